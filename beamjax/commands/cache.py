"""`beamjax cache`: what a folder of the option `cache` holds."""

from __future__ import annotations

import argparse
import os

from beamjax._text import human_bytes
from beamjax.commands.answers import Answer, give
from beamjax.errors import OptionsError
from beamjax.storage.files import is_url
from beamjax.storage.partial_cache import PartialCache


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `beamjax cache`."""
    actions = parser.add_subparsers(dest="action", metavar="info|clear", required=True)
    info = actions.add_parser("info", help="how many files it holds, and their bytes")
    clear = actions.add_parser("clear", help="remove them; files of others stay")
    for action in (info, clear):
        action.add_argument("folder", metavar="FOLDER", help="path or URL, as of the option cache")
        action.add_argument("--json", action="store_true", help="print JSON on stdout")


def command(arguments: argparse.Namespace) -> int:
    """Runs `beamjax cache`."""
    return give(arguments, lambda: _answer(arguments))


def _answer(arguments: argparse.Namespace) -> Answer:
    folder = arguments.folder
    if not is_url(folder) and not os.path.isdir(folder):
        raise OptionsError(f"{folder}: found no such folder, expected one of the option cache")
    cache = PartialCache(folder)
    found = cache.clear() if arguments.action == "clear" else cache.describe()
    held = f"{found['files']:,} files, {human_bytes(found['bytes'])}"
    if arguments.action == "clear":
        return Answer(found, f"removed {held}")
    return Answer(found, f"{held} of at most {human_bytes(found['limit'])}")
