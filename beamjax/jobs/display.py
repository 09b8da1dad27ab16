"""Displays progress on stderr: a bar in terminals and notebooks, lines elsewhere."""

from __future__ import annotations

import contextlib
import importlib
import io
import sys
import time
from typing import TYPE_CHECKING, Any, Protocol

from beamjax.options import Options
from beamjax.telemetry.messages import SOON_SECONDS

if TYPE_CHECKING:
    from beamjax.telemetry.progress import Progress, Totals

LINE_SECONDS = 10.0
"""Seconds between two lines of progress."""
NOTEBOOK_COLUMNS = 140
"""Width of the bar in a notebook, in characters."""


class Display(Protocol):
    """Shows the progress of a job."""

    def update(self, progress: Progress) -> None:
        """Shows the progress, if it is time."""

    def close(self) -> None:
        """Called at the end of the job."""


def display_for(options: Options, launched: bool) -> Display | None:
    """The display for the progress of a job, or None."""
    # A caller that does not wait for its job (`launched`) gets no bar by default.
    wish = options.progress
    if wish is False or (wish is None and launched):
        return None
    delay = 0.0 if wish else SOON_SECONDS
    if "IPython" in sys.modules and _in_notebook():
        return NotebookBar(delay)
    if sys.stderr is not None and sys.stderr.isatty():
        return Bar(delay)
    return Lines() if wish else None


def say(name: str, progress: Progress) -> None:
    """Prints that a run goes on. Without a folder, what other processes have done is not known."""
    words = str(progress) if progress.done.shards else "running"
    with contextlib.suppress(Exception):  # stderr may be closed
        print(f"beamjax: {name}, {progress.seconds:.0f} s: {words}", file=sys.stderr, flush=True)


def _in_notebook() -> bool:
    ipython: Any = sys.modules["IPython"]
    shell = ipython.get_ipython()
    return "IPKernelApp" in getattr(shell, "config", ())


class Lines:
    """A line every ten seconds, and one at the end."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._progress: Progress | None = None

    def update(self, progress: Progress) -> None:
        """Prints the progress, if the last line is old enough."""
        self._progress = progress
        if time.monotonic() - self._last >= LINE_SECONDS:
            self._last = time.monotonic()
            self._print(progress)

    def close(self) -> None:
        """Prints the last progress."""
        if self._progress is not None:
            self._print(self._progress)

    def _print(self, progress: Progress) -> None:
        print(f"beamjax: {progress}", file=sys.stderr, flush=True)


class Bar:
    """A bar of `rich`, which appears after a delay in seconds."""

    def __init__(self, delay: float):
        self._shown_at = time.monotonic() + delay
        self._bar: Any = None
        self._task: Any = None

    def update(self, progress: Progress) -> None:
        """Shows the progress, once the delay is over."""
        if time.monotonic() < self._shown_at:
            return
        if self._bar is None:
            self._start()
        self._bar.update(
            self._task,
            completed=progress.done.shards,
            total=progress.shards or None,
            words=str(progress),
        )
        self._show()

    def close(self) -> None:
        """Ends the bar, which stays visible."""
        if self._bar is not None:
            self._bar.stop()

    def _show(self) -> None:
        self._bar.refresh()

    def _start(self) -> None:
        from rich.console import Console

        self._make(Console(stderr=True))
        self._bar.start()

    def _make(self, console: Any) -> None:
        from rich import progress as rich_progress
        from rich.table import Column

        self._bar = rich_progress.Progress(
            rich_progress.BarColumn(20, table_column=Column(min_width=20)),
            rich_progress.TaskProgressColumn(table_column=Column(min_width=4)),
            rich_progress.TimeRemainingColumn(table_column=Column(min_width=7)),
            # Last, and cut at the end of the line: names of steps may be long.
            rich_progress.TextColumn(
                "{task.fields[words]}",
                markup=False,
                table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1),
            ),
            console=console,
            auto_refresh=False,
            expand=True,
        )
        self._task = self._bar.add_task("starting", total=None, words="")


class NotebookBar(Bar):
    """A bar as an output of a cell, which is updated; rich's own needs `ipywidgets`."""

    def close(self) -> None:
        """Ends the bar, which stays visible."""

    def _start(self) -> None:
        from rich.console import Console

        console = Console(
            file=io.StringIO(), width=NOTEBOOK_COLUMNS, force_jupyter=False, color_system=None
        )
        self._make(console)
        self._handle: Any = None

    def _show(self) -> None:
        display = importlib.import_module("IPython.display").display
        console = self._bar.console
        with console.capture() as captured:
            console.print(self._bar.get_renderable())
        shown = {"text/plain": captured.get().rstrip()}
        if self._handle is None:
            self._handle = display(shown, raw=True, display_id=True)
        else:
            self._handle.update(shown, raw=True)


def made_in_words(done: Totals) -> str:
    """A line on executables, bodies and broadcasts; "" if there are none."""
    parts = []
    if done.executables:
        compiled = done.executables - done.cache_hits
        parts.append(f"{compiled:,} executables compiled, {done.cache_hits:,} found on disk")
    if done.bodies_loaded or done.bodies_reused:
        parts.append(f"{done.bodies_loaded:,} bodies loaded, {done.bodies_reused:,} in memory")
    parts += [f"{done.broadcasts:,} broadcasts put on devices"] * bool(done.broadcasts)
    return "; ".join(parts)
