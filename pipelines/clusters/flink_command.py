"""The command `beamjax flink`: a cluster on this machine."""

from __future__ import annotations

import argparse
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from beamjax.pipelines.clusters import flink_cluster
from beamjax.pipelines.clusters.flink_cluster import Settings

_HELP = {
    "taskmanagers": "how many task managers, each with a pool of Python workers of its own",
    "slots": "tasks at a time in each of them",
    "heap": "of each of them, in MiB",
    "attempts": "failed tasks that are started again, in all, before the pipeline fails",
    "delay": "seconds before each of these",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `beamjax flink`."""
    actions = parser.add_subparsers(dest="action", metavar="up|status|down", required=True)
    up = actions.add_parser("up", help="start a cluster and wait until it takes jobs")
    status = actions.add_parser("status", help="what runs; the exit status is 1 if not all does")
    down = actions.add_parser("down", help="stop the cluster")
    for action in (up, status, down):
        action.add_argument(
            "--folder", type=Path, help="of the cluster (default: in beamjax's cache folder)"
        )
    for field in fields(Settings):
        help = f"{_HELP[field.name]} (default: {field.default})"
        up.add_argument(f"--{field.name}", type=_number, default=field.default, help=help)
    status.add_argument("--json", action="store_true", help="print it as JSON")


def command(arguments: argparse.Namespace) -> int:
    """Runs `beamjax flink`."""
    folder = (arguments.folder or flink_cluster.default_folder()).absolute()
    if arguments.action == "down":
        stopped = flink_cluster.down(folder)
        print(f"{folder}: stopped {', '.join(stopped)}" if stopped else f"{folder}: nothing ran")
        return 0
    if arguments.action == "up":
        given = {field.name: getattr(arguments, field.name) for field in fields(Settings)}
        flink_cluster.up(folder, Settings(**given))
    found = flink_cluster.status(folder)
    if arguments.action == "status" and arguments.json:
        print(json.dumps(found, indent=1))
    else:
        print(_text(found))
    return 0 if found["healthy"] else 1


def _text(found: dict[str, Any]) -> str:
    lines = [f"{found['folder']}: {'ready' if found['healthy'] else 'not ready'}"]
    for name, process in found["processes"].items():
        state = f"process {process['pid']}" if process["alive"] else "ended"
        lines.append(f"  {name:14} {state:16} {process['log']}")
    if found["healthy"]:
        lines += [
            f"  dashboard of Flink: {found['dashboard']}/overview",
            "  use it: bj.run(fn, ..., runner='FlinkRunner', "
            f"options={{'flink_cluster': {found['folder']!r}}})",
        ]
    return "\n".join(lines)


def _number(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"found {number}, expected a number from 0")
    return number
