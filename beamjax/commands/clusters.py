"""The commands `flink` and `prism`, which install and start what these runners need."""

from __future__ import annotations

import contextlib
import functools
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from beamjax.commands.answers import FAILED, Answer, answers

_answers = functools.partial(answers, refused=FAILED)
"""As `answers`. click has checked the arguments, so an `OptionsError` is about this machine."""


def _absolute(_context: click.Context, _option: click.Parameter, folder: Path | None) -> Path:
    from beamjax.pipelines.clusters import flink_cluster

    return (folder or flink_cluster.default_folder()).absolute()


_folder_option = click.option(
    "--folder",
    type=click.Path(path_type=Path),
    callback=_absolute,
    help="Folder of the cluster; by default in beamjax's cache folder.",
)


def _number(name: str, default: int, help: str) -> Any:
    number = click.IntRange(min=0)
    return click.option(f"--{name}", type=number, default=default, show_default=True, help=help)


@click.group()
def flink() -> None:
    """Run a Flink cluster for Beam on this machine."""


@flink.command()
@_folder_option
@_number("taskmanagers", 2, "Number of task managers; each has its own pool of Python workers.")
@_number("slots", 1, "Concurrent tasks per task manager.")
@_number("heap", 512, "Heap of each task manager, in MiB.")
@_number("attempts", 8, "Failed tasks that are restarted before a pipeline fails.")
@_number("delay", 10, "Seconds before a failed task is restarted.")
@_answers
def up(folder: Path, **settings: int) -> Answer:
    """Run a cluster until Ctrl-C."""
    from beamjax.pipelines.clusters import flink_cluster, flink_supervisor

    with _interrupted_by(signal.SIGTERM, signal.SIGHUP):
        try:
            chosen = flink_cluster.Settings(**settings)
            with flink_supervisor.running(folder, chosen) as supervisor:
                click.echo(_ready(supervisor))
                supervisor.wait()
        except KeyboardInterrupt:
            return Answer({"folder": str(folder)}, f"{folder}: stopped")
    raise AssertionError("a cluster ends with an error or by a signal")


def _ready(supervisor: Any) -> str:
    lines = [f"{supervisor.folder}: ready; Ctrl-C stops it"]
    lines += [f"  {server.name:14} {server.log}" for server in supervisor.servers.values()]
    lines += [
        f"  dashboard: http://localhost:{supervisor.cluster.rest_port}/overview",
        "  to use it: bj.run(fn, ..., runner='FlinkRunner', "
        f"options={{'flink_cluster': {str(supervisor.folder)!r}}})",
    ]
    return "\n".join(lines)


@contextlib.contextmanager
def _interrupted_by(*signals: signal.Signals) -> Iterator[None]:
    """A context in which these signals interrupt the program as Ctrl-C does."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@click.group()
def prism() -> None:
    """Install Beam's Prism, for runner='PrismRunner'."""


@prism.command()
@_answers
def install() -> Answer:
    """Build Prism with Go, in beamjax's cache folder."""
    from beamjax.pipelines.clusters import prism_server

    path = str(prism_server.install())
    return Answer({"path": path}, path)


@prism.command()
@_answers
def where() -> Answer:
    """Print the path of the Prism that runner='PrismRunner' uses; builds nothing."""
    from beamjax.pipelines.clusters import prism_server

    path, is_there = str(prism_server.installed()), prism_server.is_installed()
    if not is_there:
        click.echo("beamjax: not built yet; `beamjax prism install` builds it", err=True)
    return Answer({"path": path, "installed": is_there}, path)
