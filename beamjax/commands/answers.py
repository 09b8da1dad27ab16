"""What a command says at its end: text or JSON on stdout, errors on stderr, an exit status."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from beamjax.errors import BeamjaxError, OptionsError

DONE, FAILED, WRONG, INTERRUPTED = 0, 1, 2, 130


@dataclass
class Answer:
    """What a command found.

    Attributes:
      data: of `--json`, without what is not JSON.
      text: for people.
      status: the exit status.
    """

    data: dict[str, Any]
    text: str = ""
    status: int = DONE


def give(arguments: argparse.Namespace, work: Callable[[], Answer]) -> int:
    """Does the work of a command, prints what it found or how it failed.

    With `--json`, stdout has one JSON object, and what programs print goes to stderr.

    Returns:
      The exit status.
    """
    warned: list[str] = []
    try:
        with _collected(warned):
            if arguments.json:
                with _stdout_to_stderr():
                    answer = work()
            else:
                answer = work()
    except (Exception, KeyboardInterrupt) as error:
        return fail(arguments, error, warned)
    if arguments.json:
        print_json({"ok": answer.status == DONE, **answer.data, "warnings": warned})
    elif answer.text:
        print(answer.text)
    return answer.status


def fail(arguments: argparse.Namespace, error: BaseException, warnings: Sequence[str] = ()) -> int:
    """Prints how a command failed, and returns the exit status; see `give`."""
    print_error(error, full=getattr(arguments, "traceback", False))
    if arguments.json:
        print_json({"ok": False, "error": error_data(error), "warnings": warnings})
    return status_of(error)


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Of this process, and of those that it starts."""
    before = sys.stdout
    with contextlib.ExitStack() as stack:
        if before is sys.__stdout__ and before is not None:
            before.flush()
            saved = os.dup(1)
            stack.callback(os.close, saved)
            stack.callback(os.dup2, saved, 1)
            os.dup2(2, 1)
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        yield


@contextlib.contextmanager
def _collected(warned: list[str]) -> Iterator[None]:
    """Keeps the text of warnings, which are shown as ever."""
    show = warnings.showwarning

    def collect(message: Any, *rest: Any, **named: Any) -> None:
        warned.append(str(message))
        show(message, *rest, **named)

    warnings.showwarning = collect
    try:
        yield
    finally:
        warnings.showwarning = show


def print_json(data: Any) -> None:
    """Prints strict JSON: numbers that are not finite are text."""
    print(json.dumps(_strict(data), indent=1))


def _strict(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): _strict(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(child) for child in value]
    return value


# --- errors


def status_of(error: BaseException) -> int:
    """The exit status that an error means."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    return WRONG if isinstance(error, OptionsError) else FAILED


def error_data(error: BaseException) -> dict[str, Any]:
    """An error as JSON values."""
    failure = getattr(error, "failure", None)
    return {
        "type": type(error).__name__,
        "message": str(error),
        "notes": list(getattr(error, "__notes__", ())),
        "failure": None if failure is None else {**vars(failure)},
    }


def print_error(error: BaseException, full: bool = False) -> None:
    """Prints an error on stderr: those of beamjax by their message, others by frames of the user.

    Args:
      error: while it is caught.
      full: whether to show all frames.
    """
    if full:
        traceback.print_exception(error)
    elif isinstance(error, KeyboardInterrupt):
        print("beamjax: interrupted", file=sys.stderr)
    elif isinstance(error, BeamjaxError):
        notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
        print(f"beamjax: {error}{notes}", file=sys.stderr)
    else:
        print("".join(users_frames(error)), end="", file=sys.stderr)
        print("beamjax: only frames of your code; --traceback shows all", file=sys.stderr)


def users_frames(error: BaseException) -> list[str]:
    """The lines of a traceback without the frames of beamjax, JAX, Beam and Python itself."""
    found = traceback.TracebackException.from_exception(error)
    part: traceback.TracebackException | None = found
    while part is not None:
        kept = [frame for frame in part.stack if _is_users(frame.filename)]
        part.stack = traceback.StackSummary.from_list(kept)
        # JAX says that it left out frames of its own.
        part.__notes__ = [note for note in part.__notes__ or () if _REMARK not in note]
        part = part.__cause__
    found.__context__ = None
    return list(found.format())


_REMARK = "JAX has removed its internal frames"


def _is_users(file: str) -> bool:
    return not file.startswith("<") and not os.path.abspath(file).startswith(_folders())


def _folders() -> tuple[str, ...]:
    """Where files are that are not the user's."""
    names = ("beamjax", "beamjax.interpreters", "beamjax.pipelines", "jax", "jaxlib", "apache_beam",
             "concurrent.futures", "contextlib", "threading", "importlib", "functools")  # fmt: skip
    found = []
    for name in names:
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is not None:
            package = os.path.basename(file) == "__init__.py"
            found.append(os.path.join(os.path.dirname(file), "") if package else file)
    return tuple(found)
