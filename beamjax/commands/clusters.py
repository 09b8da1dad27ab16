"""The commands `flink` and `prism`, which install and start what these runners need."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import click

from beamjax.commands.answers import DONE, FAILED, Answer, answers

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
    """Start a cluster, and wait until it accepts jobs."""
    from beamjax.pipelines.clusters import flink_cluster

    flink_cluster.up(folder, flink_cluster.Settings(**settings))
    return _status(folder)


@flink.command()
@_folder_option
@_answers
def status(folder: Path) -> Answer:
    """Show the processes; the exit status is 1 if one does not run."""
    return _status(folder)


@flink.command()
@_folder_option
@_answers
def down(folder: Path) -> Answer:
    """Stop the cluster."""
    from beamjax.pipelines.clusters import flink_cluster

    stopped = flink_cluster.down(folder)
    text = f"{folder}: stopped {', '.join(stopped)}" if stopped else f"{folder}: nothing ran"
    return Answer({"folder": str(folder), "stopped": list(stopped)}, text)


def _status(folder: Path) -> Answer:
    from beamjax.pipelines.clusters import flink_cluster

    found = flink_cluster.status(folder)
    lines = [f"{found['folder']}: {'ready' if found['healthy'] else 'not ready'}"]
    for name, process in found["processes"].items():
        state = f"process {process['pid']}" if process["alive"] else "ended"
        lines.append(f"  {name:14} {state:16} {process['log']}")
    if found["healthy"]:
        lines += [
            f"  dashboard: {found['dashboard']}/overview",
            "  to use it: bj.run(fn, ..., runner='FlinkRunner', "
            f"options={{'flink_cluster': {found['folder']!r}}})",
        ]
    return Answer(found, "\n".join(lines), DONE if found["healthy"] else FAILED)


@click.group()
def prism() -> None:
    """Install Beam's Prism, for runner='PrismRunner'."""


@prism.command()
@_answers
def install() -> Answer:
    """Build Prism with Go, in beamjax's cache folder."""
    from beamjax.pipelines.runners import prism as runner

    path = str(runner.install())
    return Answer({"path": path}, path)


@prism.command()
@_answers
def where() -> Answer:
    """Print the path of the Prism that runner='PrismRunner' uses."""
    from beamjax.pipelines.runners import prism as runner

    path = str(runner.locate())
    return Answer({"path": path}, path)
