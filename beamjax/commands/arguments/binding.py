"""The call that a command line asks for: a function with its arguments, or what a job returns."""

from __future__ import annotations

import argparse
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import beamjax
from beamjax._text import hint
from beamjax.commands.arguments.flags import options_of
from beamjax.commands.arguments.target import find_target
from beamjax.commands.arguments.values import json_or_text, read_value
from beamjax.errors import OptionsError
from beamjax.interpreters.planning import plan_for
from beamjax.interpreters.staging.stage import flatten_arguments
from beamjax.ops.leaves import name_of
from beamjax.options import Options

MAP_BYTES = 16 * 2**20
"""Bytes of an .npy file that workers read themselves where the program uses it as placed."""


@dataclass(frozen=True)
class Call:
    """A function, and what it is called with, as `beamjax.run` takes them."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]

    @property
    def name(self) -> str:
        return name_of(self.fn)


def find_call(arguments: argparse.Namespace) -> tuple[Options, Callable[[], Call]]:
    """The options of a command line, and what makes its call.

    With `--arg`, TARGET is the function of the call. Without, it is a job: a function that returns
    a function and its arguments, with a flag for each of its parameters.

    Raises:
      OptionsError: there is no such function, parameter or option, or a parameter has no value.
        Making the call raises it where an argument can't be read, or a job returns something else.
      Exception: what the module of TARGET raises, or the job.
    """
    words = [word for word in arguments.flags if not word.startswith("-") and ":" in word]
    if words and ":" not in arguments.target:
        raise OptionsError(
            f"found {arguments.target!r} as TARGET, which comes before the flags of Beam; "
            f"is it {words[0]!r}?"
        )
    fn = find_target(arguments.target)
    signature = _signature(fn)
    if arguments.arg:
        texts = _pairs(arguments.arg)
        _check(signature, texts, name_of(fn))
        return options_of(arguments), functools.partial(_bound, fn, signature, texts)
    given, arguments.flags = _flags_of_job(signature, arguments.flags)
    _check(signature, given, name_of(fn), is_job=True)
    return options_of(arguments), functools.partial(_made, fn, arguments.target, given)


def _signature(fn: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(fn)
    except (TypeError, ValueError):  # of what is not written in Python
        return inspect.Signature()


def _pairs(texts: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise OptionsError(f"--arg {text}: expected name=value")
        if name in found:
            raise OptionsError(f"--arg {name}: found twice: {found[name]!r} and {value!r}")
        found[name] = value
    return found


def _check(
    signature: inspect.Signature, given: Mapping[str, Any], function: str, is_job: bool = False
) -> None:
    """Raises OptionsError for names that are no parameters, and for parameters without a value."""
    parameters = signature.parameters.values()
    names = [p.name for p in parameters if p.kind not in _VARIADIC]
    text = f"{function}({', '.join(names)})"
    for name in given:
        if name not in names and not any(p.kind is p.VAR_KEYWORD for p in parameters):
            raise OptionsError(
                f"--arg {name}: there is no such parameter in {text}{hint(name, names)}"
            )
    missing = [
        p.name
        for p in parameters
        if p.default is p.empty and p.kind not in _VARIADIC and p.name not in given
    ]
    if missing:
        add = " ".join(f"--arg {name}=..." for name in missing)
        if is_job:
            flags = " ".join(f"--{name}=..." for name in missing)
            add += f"; or {flags}, if it returns a function and its arguments"
        raise OptionsError(f"{text}: add {add}")


_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


# --- functions


def _bound(fn: Callable[..., Any], signature: inspect.Signature, texts: dict[str, str]) -> Call:
    values = {name: read_value(text, f"--arg {name}") for name, text in texts.items()}
    bound = signature.bind_partial(**values)
    if bound.kwargs:
        fn = _by_position(fn, len(bound.args), list(bound.kwargs))
    return Call(fn, (*bound.args, *bound.kwargs.values()))


def _by_position(fn: Callable[..., Any], count: int, names: Sequence[str]) -> Callable[..., Any]:
    """A function of positions alone, of which those from `count` on have these names."""

    def call(*values: Any) -> Any:
        return fn(*values[:count], **dict(zip(names, values[count:], strict=True)))

    functools.update_wrapper(call, fn)
    call.__name__ = name_of(fn)
    return call


def with_files(call: Call, options: Options) -> Call:
    """The same with sources for big mapped arrays that the program uses only as placed values.

    Args:
      call: of which nothing has been read.
      options: of the run.

    Raises:
      BeamjaxError: the function can't be made a plan.
    """
    big = {
        f"args[{number}]": number
        for number, value in enumerate(call.args)
        if isinstance(value, np.memmap) and value.nbytes >= MAP_BYTES and value.ndim
    }
    if not big or any(isinstance(value, beamjax.StreamSource) for value in call.args):
        return call
    arguments, key, restore = flatten_arguments(call.args)
    args = list(call.args)
    for spec in plan_for(call.fn, arguments, key, restore, options).plan.inputs:
        placed = spec.placed is not None or spec.views
        if spec.path in big and placed and spec.server is None and spec.axis == 0:
            number = big[spec.path]
            args[number] = beamjax.from_npy(args[number].filename)
    return Call(call.fn, tuple(args))


# --- jobs


def _flags_of_job(
    signature: inspect.Signature, words: Sequence[str]
) -> tuple[dict[str, Any], list[str]]:
    """The values of flags that are named like parameters, and the other words."""
    given, rest = {}, []
    left = list(words)
    while left:
        word = left.pop(0)
        flag, equals, text = word.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        if not word.startswith("--") or name not in signature.parameters:
            rest.append(word)
        elif equals:
            given[name] = json_or_text(text)
        elif left and not left[0].startswith("--"):
            given[name] = json_or_text(left.pop(0))
        else:
            given[name] = True
    return given, rest


def _made(job: Callable[..., Any], target: str, given: dict[str, Any]) -> Call:
    found = job(**given)
    if isinstance(found, tuple) and found and callable(found[0]):
        return Call(found[0], found[1:])
    raise OptionsError(
        f"{target}: found no --arg, so it is called as a job, and it returned {found!r:.80}; "
        "expected a tuple of a function and its arguments"
    )
