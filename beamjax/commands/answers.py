"""The output of a command: text or JSON on stdout, errors on stderr, an exit status."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import click

from beamjax._text import printable
from beamjax.errors import BeamjaxError, OptionsError

DONE, FAILED, WRONG, INTERRUPTED = 0, 1, 2, 130
"""Exit statuses."""
FLAGS = ("as_json", "full")
"""Parameters of every command, for its output."""


@dataclass
class Answer:
    """The result of a command."""

    data: dict[str, Any]  # for `--json`; may also hold tuples and numbers that are not finite
    text: str = ""  # what the command prints otherwise
    status: int = DONE  # its exit status


def answers(work: Callable[..., Answer], refused: int = WRONG) -> Callable[..., None]:
    """The callback of a command from a function; `refused` is the status for an `OptionsError`."""
    # With `--json`, the command prints one JSON object on stdout, and what programs print goes to
    # stderr.

    @click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
    @click.option("--traceback", "full", is_flag=True, help="Show all frames of errors.")
    @functools.wraps(work)
    def command(as_json: bool, full: bool, **arguments: Any) -> None:
        collected: list[str] = []
        try:
            with _collected_warnings(collected), _stdout_to_stderr(as_json):
                answer = work(**arguments)
        except (click.ClickException, BrokenPipeError):  # click handles these
            raise
        except (Exception, KeyboardInterrupt) as error:
            if isinstance(error, KeyboardInterrupt):
                interrupts = sys.modules.get("beamjax.telemetry.interrupts")
                if interrupts is not None:  # else no job has begun
                    interrupts.exit_with(INTERRUPTED)
            click.echo(printable(_error_text(error, full), lines=True), err=True)
            status = refused if isinstance(error, OptionsError) else FAILED
            status = INTERRUPTED if isinstance(error, KeyboardInterrupt) else status
            answer = Answer({"error": error_data(error)}, "", status)
        if as_json:
            data = {"ok": answer.status == DONE, **answer.data, "warnings": collected}
            echo(json.dumps(_strict(data), indent=1))
        elif answer.text:
            echo(answer.text)
        click.get_current_context().exit(answer.status)

    return command


def echo(text: object) -> None:
    """Prints to stdout; raises a `ClickException` if that fails."""
    try:
        click.echo(printable(str(text), lines=True))
    except BrokenPipeError:  # click ends the process quietly
        raise
    except OSError as error:
        # Python writes the rest of its buffer when it exits, which would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        raise click.ClickException(f"cannot write to stdout ({error.strerror})") from error


@contextlib.contextmanager
def _stdout_to_stderr(redirect: bool) -> Iterator[None]:
    """A context that redirects the stdout of this process and its children, if `redirect`."""
    if not redirect:
        yield
        return
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
def _collected_warnings(collected: list[str]) -> Iterator[None]:
    """A context that adds the text of warnings to a list, and shows them as well."""
    show = warnings.showwarning

    def collect(message: Any, *rest: Any, **named: Any) -> None:
        collected.append(str(message))
        show(message, *rest, **named)

    warnings.showwarning = collect
    try:
        yield
    finally:
        warnings.showwarning = show


def _strict(value: Any) -> Any:
    """Turns NaN and infinity into text, and tuples into lists, as JSON has neither."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): _strict(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(child) for child in value]
    return value


# --- errors


def error_data(error: BaseException) -> dict[str, Any]:
    """An error as JSON values."""
    failure = getattr(error, "failure", None)
    return {
        "type": type(error).__name__,
        "message": str(error),
        "notes": list(getattr(error, "__notes__", ())),
        "failure": None if failure is None else {**vars(failure)},
    }


def _error_text(error: BaseException, full: bool) -> str:
    """The message of an error of beamjax, or a traceback of the user's frames for other errors."""
    if full:
        return "".join(traceback.format_exception(error)).rstrip()
    if isinstance(error, KeyboardInterrupt):
        return "beamjax: interrupted"
    if isinstance(error, BeamjaxError):
        return "\n".join([f"beamjax: {error}", *getattr(error, "__notes__", ())])
    lines = "".join(user_frames(error))
    return f"{lines}beamjax: only frames of your code are shown; --traceback shows all"


def user_frames(error: BaseException) -> list[str]:
    """The lines of a traceback without frames of beamjax, installed packages and Python."""
    shown = traceback.TracebackException.from_exception(error)
    part: traceback.TracebackException | None = shown
    while part is not None:
        frames = [frame for frame in part.stack if _is_users(frame.filename)]
        part.stack = traceback.StackSummary.from_list(frames)
        # Leaves out JAX's note that it removed frames of its own.
        part.__notes__ = [n for n in part.__notes__ or () if "removed its internal frames" not in n]
        part = part.__cause__
    shown.__context__ = None
    return list(shown.format())


def _is_users(file: str) -> bool:
    return not file.startswith("<") and not os.path.abspath(file).startswith(_foreign_folders())


def _foreign_folders() -> tuple[str, ...]:
    """The folders of installed packages, Python and beamjax, which may be a git clone."""
    paths = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    names = ("beamjax", "beamjax.interpreters", "beamjax.pipelines")
    files = [getattr(sys.modules.get(name), "__file__", None) for name in names]
    paths += [os.path.dirname(file) for file in files if file]
    return tuple(os.path.join(path, "") for path in paths)
