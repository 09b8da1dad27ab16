"""Pages as Chromium shows them: nothing is cut off, hidden or fetched, and no script complains.

The variable BEAMJAX_SCREENSHOTS names a folder for pictures of all of them.
"""

import functools
import os
import re

import browser
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import beamjax as bj
from beamjax.diagnostics.pages.page import document
from beamjax.diagnostics.pages.run_page import run_page
from beamjax.jobs.report import Curve
from beamjax.plan.dropping import Dropped
from tests.jobs.test_reports import EVIL, example_report

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
    return document(
        run_page(example_report(program="x" * 200, error=error, dropped=dropped).to_json())
    )


def measured():
    """A run, with its times in its plan."""
    with bj.launch(rounds, np.ones(3, np.float32), X, runner="local") as job:
        job.result()
        return job.report().to_html()


def cell(shown):
    """What a notebook shows, as a document."""
    styles = "html { color-scheme: light dark } body { margin: 0 }"
    return f"<!DOCTYPE html><meta charset=utf-8><style>{styles}</style>{shown._repr_html_()}"


PAGES = {
    "gather": lambda: bj.explain(trimmed, X).to_html(),
    "rounds": lambda: bj.explain(rounds, np.ones(3, np.float32), X).to_html(),
    "wide": wide_plan,
    "flat": lambda: bj.explain(trimmed, X, stage="flat").to_html(),
    "run": lambda: document(run_page(example_report().to_json())),
    "plan in a notebook": lambda: cell(bj.explain(rounds, np.ones(3, np.float32), X)),
    "run in a notebook": lambda: cell(example_report()),
    "evil": evil_run,
    "measured": measured,
}


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
  const at = e => e.getBoundingClientRect(), things = [];
  for (const box of document.querySelectorAll('.graph .box')) {
    const shape = at(box.querySelector('.shape'));
    things.push([box, shape]);
    for (const text of box.querySelectorAll('text'))
      if (!inside(at(text), shape, 1)) found.push('out of its box: ' + text.textContent);
  }
  for (const under of document.querySelectorAll('.graph .under-label')) {
    things.push([under, at(under)]);
    for (const text of under.parentNode.querySelectorAll('text'))
      if (!inside(at(text), at(under), 1)) found.push('label: ' + text.textContent);
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
  for (const e of document.querySelectorAll('h1, h2, p, td, th, summary, .tile *, .key'))
    found.push([e.tagName + ' ' + e.className, ratio(getComputedStyle(e).color, under(e))]);
  for (const t of document.querySelectorAll('.graph text')) {
    const shape = (t.closest('.box') || t.parentNode).querySelector('.shape, .under-label');
    const [over, under] = [t, shape].map(e => getComputedStyle(e).fill);
    found.push(['text ' + t.textContent, ratio(over, under)]);
  }
  return found.filter(([, r]) => r < 4.5);
})()"""


ALL = f"""
const {{ scrollWidth }} = document.scrollingElement;
const ground = getComputedStyle(document.querySelector('.bjx')).backgroundColor;
const fetched = performance.getEntriesByType('resource').map(e => e.name);
const wrong = [{OVERFLOWING}, {MISPLACED}, {FAINT}].flat();
for (const {{ media }} of [...document.styleSheets].flatMap(s => [...s.cssRules]))
  if (media) media.mediaText = {{ print: 'all', all: 'all' }}[media.mediaText] ?? 'not all';
const controls = [...document.querySelectorAll('.tools, .u-legend')];
const paper = getComputedStyle(document.querySelector('.bjx')).backgroundColor;
return [scrollWidth, ground, fetched, wrong, paper,
  controls.filter(e => getComputedStyle(e).display != 'none').length];
"""


@functools.cache
def html_of(name):
    return PAGES[name]()


@pytest.mark.parametrize("name", PAGES)
def test_all_can_be_seen(name, tmp_path):
    faults = []
    for width, dark in ((1280, False), (500, False), (1280, True)):
        shot = f"{os.environ.get('BEAMJAX_SCREENSHOTS', tmp_path)}/{name}-{width}-{dark}.png"
        found, console = browser.look(html_of(name), ALL, width, dark, screenshot=shot)
        assert os.path.getsize(shot) > 10_000
        scroll, ground, fetched, wrong, paper, controls = found
        right = scroll <= width and (ground == WHITE) != dark and paper == WHITE
        if not right or fetched or wrong or controls or console:
            faults.append((width, dark, found, console))
    assert faults == []


def test_the_arguments_of_a_step_are_in_order():
    names = ["weights", "x", "ends", "scale"]

    @bj.program(clients=N)
    def fit(weights, x, ends, scale):
        return bj.reduce_sum(bj.map_fn(lambda v: v * weights + ends * scale, x))

    page = bj.explain(fit, *np.ones((1, 3), np.float32), X, *np.ones((2, 3), np.float32)).to_html()
    script = """
    const at = box => box.getBoundingClientRect().x;
    return [...document.querySelectorAll('.graph .box.input')].sort((a, b) => at(a) - at(b))
      .map(box => box.querySelector('text').textContent);
    """
    assert browser.look(page, script) == (names, [])


@pytest.mark.parametrize("name", ["plan in a notebook", "run in a notebook", "rounds", "gather"])
def test_what_can_be_seen_without_scrolling(name):
    script = """
    const svg = document.querySelector('svg.graph');
    const [x, y, width, height] = svg.getAttribute('viewBox').split(' ').map(Number);
    return [document.querySelector('.bjx').offsetHeight, innerHeight,
      +svg.getAttribute('width') <= width + 1, +svg.getAttribute('height') <= height + 1];
    """
    found, console = browser.look(html_of(name), script)
    page, window, *whole = found
    assert console == []
    assert page <= window or "notebook" not in name
    assert whole == [True, True] or name == "run in a notebook"  # whose graph is folded


@pytest.mark.parametrize("width", [1280, 500])
@pytest.mark.parametrize("name", ["rounds", "gather", "measured"])
def test_the_panel_cuts_nothing(name, width):
    script = """
    for (const step of document.querySelectorAll('.panel details')) step.open = true;
    return [...document.querySelectorAll('.panel .facts')].map(e => e.scrollWidth - e.clientWidth);
    """
    beyond, console = browser.look(html_of(name), script, width)
    assert console == []
    assert beyond
    assert max(beyond) <= 0


WHITE = "rgb(255, 255, 255)"

# Helpers for scripts that act as a user does.
USER = """
const $ = s => document.querySelector(s), svg = $('svg.graph'), box = $('.graph-box');
const scale = () => Number(svg.dataset.scale);
const view = () => svg.getAttribute('viewBox').split(' ').map(Number);
const middle = e => { const r = e.getBoundingClientRect();
  return { clientX: r.x + r.width / 2, clientY: r.y + r.height / 2, bubbles: true,
    cancelable: true, pointerId: 1 }; };
const click = e => e.dispatchEvent(new MouseEvent('click', middle(e)));
const point = (e, kind, dx = 0, dy = 0) => { const at = middle(e); at.clientX += dx;
  at.clientY += dy; e.dispatchEvent(new PointerEvent(kind, at)); };
const key = key => document.activeElement.dispatchEvent(
  new KeyboardEvent('keydown', { key, bubbles: true, cancelable: true }));
const chosen = () => [$('a[aria-current]')?.dataset.names ?? null,
  [...document.querySelectorAll('.panel details[open] summary code')].map(e => e.textContent),
  document.querySelectorAll('.edge.near').length > 0];
"""


def act(page, script, **window):
    found, console = browser.look(page, USER + script, **window)
    assert console == []
    return found


def test_zoom_and_move():
    script = """
    const button = n => click($(`.tools button:nth-child(${n})`));
    const wheel = (deltaY, ctrlKey) => box.dispatchEvent(
      new WheelEvent('wheel', { ...middle(box), deltaY, ctrlKey }));
    const scales = [scale()], views = [];
    for (const n of [1, 2]) { button(n); scales.push(scale()); }
    const passed = [wheel(-200, true), wheel(120, false)];
    scales.push(scale());
    button(3); views.push(view());
    button(4); scales.push(scale()); views.push(view());
    point(box, 'pointerdown'); point(box, 'pointermove', -30, -20);
    point(box, 'pointermove', -60, -40); point(box, 'pointerup', -60, -40);
    views.push(view());
    return [scales, views, passed, +svg.getAttribute('width'), +svg.getAttribute('height')];
    """
    scales, (whole, own, moved), passed, wide, high = act(html_of("rounds"), script)
    start, larger, again, wheeled, natural = scales
    assert (larger, again) == pytest.approx((1.25 * start, start))
    assert wheeled > start
    assert natural == 1
    assert whole[0] + whole[2] >= wide - 1
    assert whole[1] + whole[3] >= high - 1
    assert [moved[i] - own[i] for i in (0, 1)] == pytest.approx([60, 40], abs=2)
    assert passed == [False, True]  # A wheel alone scrolls the page.


def test_choosing_a_step():
    script = """
    const found = [getComputedStyle($('.graph .gather .shape')).stroke];
    for (const [s, inner] of [['a.gather'], ['a.server'], ['a.server'], ['details.map summary']]) {
      click($(s)); found.push([...chosen(), $('details.chosen')?.id ?? null]);
    }
    box.focus(); const before = [scale(), view()[0]];
    key('+'); key('ArrowRight'); found.push([scale() > before[0], view()[0] > before[1]]);
    key('Escape'); found.push(chosen()[0]);
    const stops = [...svg.querySelectorAll('a.box')];
    found.push(stops.every(e => e.tabIndex == 0) && stops.map(e => e.getAttribute('aria-label')));
    return found;
    """
    stroke, gather, server, none, by_panel, keys, escaped, labels = act(html_of("gather"), script)
    red, green, blue = map(int, re.findall(r"\d+", stroke)[:3])
    assert red > 2.5 * max(green, blue)
    assert gather == ["gather_0", ["gather_0"], True, "bjx-step-1"]
    assert server[:3] == ["server_0", ["server_0"], True]
    assert none[0] is None
    assert by_panel[0] == "map_clients_0"
    assert keys == [True, True]
    assert escaped is None
    assert any(label.startswith("gather_0, GATHERS") for label in labels)


def test_a_loop_folds():
    script = """
    const blocks = () => [document.querySelectorAll('.graph .block').length,
      $('.fold').getAttribute('aria-expanded'), document.querySelectorAll('a.box').length];
    const found = [blocks()];
    click($('.fold')); found.push(blocks());
    key('Enter'); found.push(blocks());
    return found;
    """
    open_, folded, again = act(html_of("rounds"), script)
    assert open_ == again == [1, "true", 6]
    assert folded == [0, "false", 4]


def test_charts_are_drawn_and_losses_have_a_logarithmic_axis():
    losses = [
        (1e3, 1e1, 1e-1),
        (3.0, 2.0, 1.0),
        (1e3, 0.0, 1.0),
        (None, 1.0, 1e-9),
        (None,),
    ]
    curves = tuple(Curve(str(i), tuple(range(len(y))), y, len(y)) for i, y in enumerate(losses))
    script = """
    const inked = canvas => canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height)
      .data.some((value, i) => i % 4 == 3 && value);
    const canvases = [...document.querySelectorAll('.plot canvas')];
    return [canvases.length, canvases.every(inked),
      [...document.querySelectorAll('.plot')].map(e => e.dataset.log ?? null)];
    """
    page = document(run_page(example_report(curves=curves).to_json()))
    count, drawn, log = browser.look(page, script)[0]
    assert (count, drawn) == (9, True)
    assert log == ["false"] * 5 + ["true", "false", "false", "true", None]
