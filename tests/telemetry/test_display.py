"""What people see on stderr while a job runs."""

import dataclasses
import functools
import io
import re
import sys
import time
import types

import jax
import numpy as np
import pytest
import rich.progress  # noqa: F401 - takes its clock before a test replaces that

import beamjax as bj
from beamjax.jobs import display
from beamjax.jobs.display import Bar, Lines, NotebookBar, display_for
from beamjax.options import Options
from beamjax.telemetry import messages
from beamjax.telemetry.progress import Progress, Totals

HALF = Progress(
    done=Totals(members=1500, shards=3, retries=2, compute=3.0, read=1.0),
    members=3000, shards=6, rounds=1, rounds_total=4, step="map_clients_0", seconds=5.0,
)  # fmt: skip
TEXT = (
    "map_clients_0: 3 of 6 shards of 3,000 members, 1 of 4 rounds, 300/s, "
    "read 25% compute 75%, "
    "2 shards retried"
)


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def in_terminal(monkeypatch):
    """Makes stderr a terminal; pytest sets it anew after the fixtures."""

    def make():
        stream = Terminal()
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("COLUMNS", "200")
        return stream

    return make


def test_displays(in_terminal, monkeypatch):
    in_terminal()
    for wish, launched, bar in (
        (None, False, True), (None, True, False), (False, False, False),
        (False, True, False), (True, False, True), (True, True, True),
    ):  # fmt: skip
        found = type(display_for(Options(progress=wish), launched))
        assert found is (Bar if bar else type(None)), (wish, launched)
    for stream in (io.StringIO(), None):
        monkeypatch.setattr(sys, "stderr", stream)
        assert display_for(Options(), launched=False) is None
        assert type(display_for(Options(progress=True), launched=True)) is Lines


def test_lines_come_every_ten_seconds(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(display.time, "monotonic", lambda: now[0])
    lines = Lines()
    found = []
    for second in range(25):
        now[0] = float(second)
        lines.update(HALF)
        found += [second] * bool(capsys.readouterr().err)
    assert found == [10, 20]
    assert repr(Progress()) == "<Progress starting: 0 shards, 0/s>"
    assert Progress(step="<b>")._repr_html_().startswith("<progress></progress> &lt;b&gt;: ")
    assert HALF._repr_html_() == f'<progress value="0.500"></progress> {TEXT}'
    lines.close()
    assert capsys.readouterr() == ("", f"beamjax: {TEXT}\n")


def test_a_bar_appears_after_its_delay(in_terminal, monkeypatch):
    terminal = in_terminal()
    now = [0.0]
    monkeypatch.setattr(display.time, "monotonic", lambda: now[0])
    bar = Bar(2.0)
    bar.update(HALF)
    bar.close()
    assert terminal.getvalue() == ""
    now[0] = 2.5
    bar.update(HALF)
    bar.close()
    for part in ("map_clients_0", "50%", "3 of 6 shards of 3,000 members"):
        assert part in terminal.getvalue()
    bar = Bar(0.0)  # Of unknown length, and a name that looks like markup.
    bar.update(Progress(done=Totals(members=7), step="a[b]"))
    bar.close()
    assert "a[b]" in terminal.getvalue()


@pytest.mark.parametrize("columns", [80, 100])
def test_a_narrow_terminal_shows_bar_share_and_time_left(columns, in_terminal, monkeypatch):
    terminal = in_terminal()
    monkeypatch.setenv("COLUMNS", str(columns))
    bar = Bar(0.0)
    for shards in (1, 2, 3):
        time.sleep(0.05)
        done = dataclasses.replace(HALF.done, shards=shards)
        bar.update(dataclasses.replace(HALF, done=done, step=f"map_{'a_long_name_' * 9}0"))
    bar.close()
    last = terminal.getvalue().rstrip().rpartition("\r")[2]
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", last).strip()
    assert re.fullmatch(r"[━╸╺]{20} +50% \d:\d\d:\d\d map_a_long.*…", shown)
    assert len(shown) <= columns


def test_a_long_run_says_so_outside_of_terminals(capsys, monkeypatch):
    monkeypatch.setattr("beamjax.jobs.job.SELDOM_SECONDS", 0.2)

    def wait(v):
        time.sleep(0.05)
        return v

    body = lambda v: jax.pure_callback(wait, v, v, vmap_method="sequential")
    slow = bj.program(placements={"rows": None})(lambda x: bj.reduce_sum(bj.map_fn(body, x)))
    for progress, is_said in ((None, True), (False, False)):
        bj.run(slow, np.ones(16, "f"), runner="local", options={"progress": progress})
        lines = capsys.readouterr().err.splitlines()
        assert bool(lines) == is_said
        assert all(line.startswith("beamjax: ") for line in lines)


class Outputs:
    """What IPython shows of a cell: each output once, as it is in the end."""

    def __init__(self):
        self.shown = []

    def display(self, data, raw, display_id):
        assert raw
        assert display_id
        self.shown.append(data["text/plain"])
        return types.SimpleNamespace(update=functools.partial(self.update, len(self.shown) - 1))

    def update(self, number, data, raw):
        assert raw
        self.shown[number] = data["text/plain"]


@pytest.fixture
def in_notebook(monkeypatch):
    """Makes this process the kernel of a notebook."""
    shell = types.SimpleNamespace(config={"IPKernelApp": {}})
    ipython, module = types.ModuleType("IPython"), types.ModuleType("IPython.display")
    outputs = Outputs()
    ipython.get_ipython = lambda: shell
    module.display = outputs.display
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    return outputs


def test_a_notebook_has_one_output_that_changes(in_notebook, capfd):
    bar = display_for(Options(progress=True), launched=False)
    assert type(bar) is NotebookBar
    bar.update(Progress(step="map_clients_0", members=3000, shards=6))
    assert "0 of 6 shards of 3,000 members" in in_notebook.shown[0]
    bar.update(HALF)
    bar.close()
    (shown,) = in_notebook.shown
    assert shown.startswith("━")
    assert "50%" in shown
    assert f" {TEXT[:60]}" in shown
    assert capfd.readouterr() == ("", "")


@bj.program(clients=20)
def total(x):
    return bj.reduce_sum(x)


X = np.ones((20, 3), np.float32)


@pytest.mark.parametrize("runner", ["local", "DirectRunner"])
def test_a_run_is_silent_unless_it_is_asked(runner, capfd):
    bj.run(total, X, runner=runner)
    assert capfd.readouterr() == ("", "")
    bj.run(total, X, runner=runner, options={"progress": True})
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("beamjax: map_clients_0: 1 of 1 shards of 20 members")
    assert err.count("\n") == 1


@pytest.mark.parametrize("wish", [None, True, False])
def test_long_planning_says_so(wish, in_terminal, monkeypatch):
    monkeypatch.setattr(messages, "SOON_SECONDS", 0.2)
    body = lambda v: [time.sleep(0.5), v][1]  # runs while it is traced
    program = bj.program(clients=8)(lambda x: bj.reduce_sum(bj.map_fn(body, x)))
    options = Options(progress=wish)
    stream = in_terminal()
    bj.explain(program, np.ones(8, np.float32), options=options)
    said = "beamjax: planning <lambda>, 0 s\n"
    assert (stream.getvalue() == "") if wish is False else (said in stream.getvalue())
    before = stream.getvalue()
    bj.explain(program, np.ones(8, np.float32), options=options)  # The plan is there already.
    assert stream.getvalue() == before
