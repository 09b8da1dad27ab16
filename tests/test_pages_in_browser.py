"""Pages as Chromium shows them: nothing is cut off, hidden or fetched, and no script complains.

The variable BEAMJAX_SCREENSHOTS names a folder for pictures of all of them.
"""

import contextlib
import os
from pathlib import Path

import browser
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_reports import EVIL, example_report

import beamjax as bj
from beamjax.dropping import Dropped
from beamjax.pages.run_page import run_page
from beamjax.pages.shell import document

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(bool(browser.missing()), reason=f"needs {browser.missing()}"),
]
N = 100
X = np.ones((N, 3), np.float32)


@bj.program(clients=N)
def trimmed(x):
    y = bj.map_fn(lambda v: v * 2, x)
    return jnp.mean(jnp.sort(y, axis=0)[5:-5], axis=0)


@bj.program(clients=N)
def rounds(w, x):
    step = lambda w, _: (w - bj.reduce_mean(bj.map_fn(lambda v: (v @ w) * v, x)), jnp.sum(w))
    return jax.lax.scan(step, w, None, length=4)


def wide_plan():
    """Many inputs, outputs and steps, a gather, a scatter, and long names."""

    @bj.program(placements={"the_clients_with_a_long_name": None})
    def wide(tree, x):
        y = bj.map_fn(lambda v: sum(map(jnp.sum, tree.values())) * v, x)
        z = jnp.sort(y, axis=0) @ jnp.ones((3, 2))
        again = bj.map_fn(lambda v: v - 1, jnp.flip(z, axis=0))
        return {"a" * 60: bj.reduce_max(again), "z": z, "tree": jax.tree.map(jnp.cos, tree)}

    tree = {f"weights_of_layer_{i}": np.ones((i + 2, 3), np.float32) for i in range(7)}
    return bj.explain(wide, tree, np.ones((50, 3), np.float32)).to_html()


def evil_run():
    error = {"type": "ValueError", "message": f"{EVIL}\n" * 30, "traceback": f"{EVIL * 9}\n" * 30}
    dropped = tuple(Dropped(EVIL, i, EVIL, EVIL, EVIL * 4) for i in range(40))
    return document(run_page(example_report(program="x" * 200, error=error, dropped=dropped)))


def measured():
    """A run, with its times in its plan."""
    with bj.launch(rounds, np.ones(3, np.float32), X, runner="local") as job:
        job.result()
        return job.report().to_html()


PAGES = {
    "gather": lambda: bj.explain(trimmed, X).to_html(),
    "rounds": lambda: bj.explain(rounds, np.ones(3, np.float32), X).to_html(),
    "wide": wide_plan,
    "flat": lambda: bj.explain(trimmed, X, stage="flat").to_html(),
    "run": lambda: document(run_page(example_report())),
    "evil": evil_run,
    "measured": measured,
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A function from the name of a page to its file."""
    folder = tmp_path_factory.mktemp("pages")

    def made(name):
        path = folder / f"{name}.html"
        if not path.exists():
            path.write_text(PAGES[name](), encoding="utf-8")
        return path

    return made


@pytest.fixture(scope="module")
def chromium():
    with browser.browser() as found:
        yield found


@pytest.fixture
def tab(chromium):
    """A function that shows a file in a window of a width, in a colour scheme."""
    with contextlib.ExitStack() as stack:

        def shown(path, width=1280, scheme="light", scripts=True):
            page = browser.open_page(chromium)
            stack.callback(page.close)
            page.size(width)
            page.scheme(scheme)
            page.scripts(scripts)
            page.show(path.as_uri())
            return page

        yield shown


OVERFLOWING = """[...document.querySelectorAll('body *')].filter(e => {
  if (e.closest('svg, .table, pre, .graph-box, script, style')) return false;
  const r = e.getBoundingClientRect();
  return r.width && (r.right > innerWidth + 1 || r.left < -1);
}).map(e => e.tagName + '.' + e.className + ': ' + e.textContent.slice(0, 60))"""

# Text outside of its box or label, and boxes and labels on top of others.
MISPLACED = """(() => {
  const found = [], inside = (a, b, slack) => a.x >= b.x - slack && a.y >= b.y - slack &&
    a.x + a.width <= b.x + b.width + slack && a.y + a.height <= b.y + b.height + slack;
  const apart = (a, b) => a.x + a.width <= b.x + 1 || b.x + b.width <= a.x + 1 ||
    a.y + a.height <= b.y + 1 || b.y + b.height <= a.y + 1;
  const things = [];
  for (const box of document.querySelectorAll('.graph .box')) {
    const shape = box.querySelector('.shape').getBBox();
    things.push([box, shape]);
    for (const text of box.querySelectorAll('text'))
      if (!inside(text.getBBox(), shape, 1)) found.push('out of its box: ' + text.textContent);
  }
  for (const under of document.querySelectorAll('.graph .under-label')) {
    things.push([under, under.getBBox()]);
    for (const text of under.parentNode.querySelectorAll('text'))
      if (!inside(text.getBBox(), under.getBBox(), 1)) found.push('label: ' + text.textContent);
  }
  for (let i = 0; i < things.length; i++) for (let j = i + 1; j < things.length; j++) {
    const [[a, first], [b, second]] = [things[i], things[j]];
    if (apart(first, second) || inside(second, first, 0) || inside(first, second, 0)) continue;
    found.push(a.textContent + ' on ' + b.parentNode.textContent);
  }
  return found;
})()"""

# Text with less contrast than 4.5.
FAINT = """(() => {
  const light = c => { const [r, g, b] = c.match(/[\\d.]+/g).map(Number).map(v => v / 255)
      .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const ratio = (a, b) => { const [x, y] = [light(a), light(b)].sort((p, q) => q - p);
    return (x + 0.05) / (y + 0.05); };
  const under = e => { for (; e; e = e.parentElement) {
      const c = getComputedStyle(e).backgroundColor;
      if (c && !/rgba\\(.*, 0\\)|transparent/.test(c)) return c; } return 'rgb(255, 255, 255)'; };
  const found = [];
  for (const e of document.querySelectorAll('h1, h2, p, td, th, summary, .tile b, .key'))
    found.push([e.tagName + ' ' + e.className, ratio(getComputedStyle(e).color, under(e))]);
  for (const t of document.querySelectorAll('.graph text')) {
    const shape = (t.closest('.box') || t.parentNode).querySelector('.shape, .under-label');
    const [over, under] = [t, shape].map(e => getComputedStyle(e).fill);
    found.push(['text ' + t.textContent, ratio(over, under)]);
  }
  return found.filter(([, r]) => r < 4.5);
})()"""


@pytest.mark.parametrize("name", PAGES)
def test_all_can_be_seen(name, files, tab, tmp_path):
    for width, scheme in ((1280, "light"), (420, "dark"), (1280, "dark")):
        page = tab(files(name), width, scheme)
        assert page.complaints() == []
        assert page.run("document.scrollingElement.scrollWidth") <= width
        for wrong in (OVERFLOWING, MISPLACED, *([FAINT] if width == 1280 else [])):
            assert page.run(wrong) == [], (width, scheme)
        ground = page.run("getComputedStyle(document.querySelector('.bjx')).backgroundColor")
        assert (ground == "rgb(255, 255, 255)") == (scheme == "light")
        folder = Path(os.environ.get("BEAMJAX_SCREENSHOTS", tmp_path))
        shot = folder / f"{name}-{width}-{scheme}.png"
        page.screenshot(shot)
        assert shot.read_bytes()[1:4] == b"PNG"
        assert shot.stat().st_size > 10_000
    page.scheme("dark", media="print")
    assert page.run("getComputedStyle(document.querySelector('.bjx')).backgroundColor") == (
        "rgb(255, 255, 255)"
    )
    controls = "[...document.querySelectorAll('.tools, .readout')]"
    assert set(page.run(f"{controls}.map(e => getComputedStyle(e).display)")) <= {"none"}


def middle(page, selector):
    """The middle of an element in the window."""
    return page.run(
        f"(() => {{ const r = document.querySelector(`{selector}`).getBoundingClientRect();"
        "return [r.x + r.width / 2, r.y + r.height / 2]; })()"
    )


def scale(page):
    return page.run("Number(document.querySelector('svg.graph').dataset.scale)")


def view(page):
    return page.run(
        "document.querySelector('svg.graph').getAttribute('viewBox').split(' ').map(Number)"
    )


@pytest.mark.parametrize("width", [1280, 420])
def test_zoom_and_move(width, files, tab):
    page = tab(files("rounds"), width)
    page.run("document.querySelector('.graph-box').scrollIntoView({block: 'center'})")
    start = scale(page)
    page.click(*middle(page, ".tools button:nth-child(1)"))
    assert scale(page) == pytest.approx(1.25 * start)
    page.click(*middle(page, ".tools button:nth-child(2)"))
    assert scale(page) == pytest.approx(start)
    x, y = middle(page, ".graph-box")
    before = view(page)
    page.wheel(x, y, -200, ctrl=True)
    assert scale(page) > start
    after = view(page)
    assert before[0] + before[2] / 2 == pytest.approx(after[0] + after[2] / 2, abs=2)
    page.click(*middle(page, ".tools button:nth-child(3)"))  # All of it.
    left, top, wide, high = view(page)
    size = page.run(
        "(s => [+s.getAttribute('width'), +s.getAttribute('height')])"
        "(document.querySelector('svg.graph'))"
    )
    assert max(left, top) <= 1
    assert left + wide >= size[0] - 1
    assert top + high >= size[1] - 1
    page.click(*middle(page, ".tools button:nth-child(4)"))
    assert scale(page) == 1
    before = view(page)
    page.drag((x, y), (x - 60, y - 40))
    after = view(page)
    assert after[0] - before[0] == pytest.approx(60, abs=2)
    assert after[1] - before[1] == pytest.approx(40, abs=2)
    scrolled = page.run("scrollY")
    page.wheel(x, y, 120, ctrl=False)  # A wheel alone scrolls the page.
    page.run("new Promise(r => setTimeout(r, 300))")
    assert scale(page) == 1
    assert page.run("scrollY") != scrolled
    assert page.complaints() == []


CHOSEN = """[document.querySelector('a[aria-current]')?.dataset.names,
  [...document.querySelectorAll('.panel details[open] summary code')].map(e => e.textContent),
  document.querySelectorAll('.edge.near').length > 0]"""


def test_choosing_a_step(files, tab):
    page = tab(files("gather"))
    colour = "getComputedStyle(document.querySelector('.graph .gather .shape')).stroke"
    red, green, blue = eval(page.run(colour).removeprefix("rgb"))
    assert red > 2.5 * max(green, blue)
    page.click(*middle(page, "a.gather"))
    assert page.run(CHOSEN) == ["gather_0", ["gather_0"], True]
    assert page.run("document.querySelector('details.chosen').id") == "bjx-step-1"
    page.click(*middle(page, "a.server"))
    assert page.run(CHOSEN) == ["server_0", ["server_0"], True]
    page.click(*middle(page, "a.server"))
    assert page.run(CHOSEN)[0] is None
    page.click(*middle(page, "details.map summary"))
    assert page.run(CHOSEN)[0] == "map_clients_0"
    assert page.complaints() == []


def test_choosing_by_keys(files, tab):
    page = tab(files("gather"))
    page.run("document.querySelector('.graph-box').focus()")
    before = scale(page)
    page.key("+")
    assert scale(page) > before
    page.key("-")
    page.key("ArrowRight")
    assert view(page)[0] > 0 or scale(page) == before
    for _ in range(3):  # An input, the pass, the gather.
        page.key("Tab")
    assert page.run("document.activeElement.dataset.names") == "gather_0"
    page.key("Enter")
    assert page.run(CHOSEN) == ["gather_0", ["gather_0"], True]
    page.key("Escape")
    assert page.run(CHOSEN)[0] is None
    label = page.run("document.activeElement.getAttribute('aria-label')")
    assert label.startswith("gather_0, GATHERS")


def test_without_scripts(files, tab):
    page = tab(files("rounds"), 420, scripts=False)
    page.scripts(True)
    assert page.run("document.querySelector('.tools')") is None
    width, natural = page.run(
        "(s => [s.getBoundingClientRect().width, +s.getAttribute('width')])"
        "(document.querySelector('svg.graph'))"
    )
    assert width == pytest.approx(natural, abs=1)
    assert page.run("getComputedStyle(document.querySelector('.graph-box')).overflowX") == "auto"
    assert page.run("document.querySelectorAll('.panel details').length") > 3
    assert page.run("document.scrollingElement.scrollWidth") <= 420


def test_a_chart_says_its_numbers(files, tab):
    page = tab(files("run"))
    readout = "document.querySelector('.chart .readout').textContent"
    before = page.run(readout)
    x, y = middle(page, ".chart .strip:nth-last-of-type(20)")
    page.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    assert page.run(readout) != before
    assert page.run(readout).endswith(" s")


NOTEBOOK = """<!DOCTYPE html><html><head><meta charset="utf-8"><title>notebook</title>
<style>h1 {{ color: rgb(1, 2, 3); }} td {{ padding: 7px; }}</style></head><body>
<h1 id="own">own</h1><table><tr><td id="cell">1</td></tr></table>{}{}</body></html>"""


def test_outputs_of_a_notebook_stay_in_their_cells(tab, tmp_path):
    output = bj.explain(trimmed, X)
    path = tmp_path / "notebook.html"
    text = NOTEBOOK.format(output._repr_html_(), output._repr_html_())
    path.write_text(text, encoding="utf-8")
    page = tab(path)
    assert page.complaints() == []
    style = "getComputedStyle(document.getElementById('{}')).{}"
    assert page.run(style.format("own", "color")) == "rgb(1, 2, 3)"
    assert page.run(style.format("own", "fontSize")) == "32px"
    assert page.run(style.format("cell", "paddingLeft")) == "7px"
    # Notebooks run the script of an output again when they show it again.
    page.run("[...document.querySelectorAll('.bjx script:last-child')].forEach(s => eval(s.text))")
    assert page.run("document.querySelectorAll('.tools').length") == 2
    page.click(*middle(page, ".bjx a.gather"))
    chosen = "[...document.querySelectorAll('.bjx')].map(e => e.querySelectorAll('.chosen').length)"
    assert page.run(chosen) == [1, 0]
