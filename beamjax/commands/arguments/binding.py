"""The arguments of a call, by the names of its parameters."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import beamjax
from beamjax._text import hint
from beamjax.commands.arguments.target import find_target
from beamjax.commands.arguments.values import read_value, static_value
from beamjax.errors import OptionsError
from beamjax.interpreters.planning import plan_for
from beamjax.interpreters.staging.stage import flatten_arguments
from beamjax.ops.leaves import name_of
from beamjax.options import Options

MAP_BYTES = 16 * 2**20
"""Of an .npy file from which workers read by themselves, where the program uses it as placed."""


@dataclass(frozen=True)
class Call:
    """A function, and what it is called with, as `beamjax.run` takes them."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]

    @property
    def name(self) -> str:
        return name_of(self.fn)


def find_call(
    target: str, given: Sequence[str], static: Sequence[str], factory: bool = False
) -> Call:
    """The call that a command line asks for.

    Args:
      target: `module:function` or `file.py:function`.
      given: texts `name=value`, for arrays and sources.
      static: texts `name=value`, for values of Python.
      factory: whether the target is to be called with the static values, for the function or for a
        tuple of it and its arguments.

    Raises:
      OptionsError: there is no such function, parameter or file, or a parameter has no value.
      Exception: what the module of the function raises.
    """
    fn = find_target(target)
    values = _pairs(static, "--static")
    constants = {name: static_value(text) for name, text in values.items()}
    if factory:
        fn = _made(fn, target, constants)
        if isinstance(fn, Call):
            if given:
                raise OptionsError(
                    f"--arg {given[0]}: the arguments come with the function, from {target}"
                )
            return fn
        constants = {}
    texts = _pairs(given, "--arg")
    return _bound(fn, texts, constants)


def _pairs(texts: Sequence[str], option: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise OptionsError(f"{option} {text}: expected name=value")
        if name in found:
            raise OptionsError(f"{option} {name}: found twice: {found[name]!r} and {value!r}")
        found[name] = value
    return found


def _made(factory: Callable[..., Any], target: str, constants: dict[str, Any]) -> Any:
    """What a factory returns: a function, or a `Call`."""
    signature = _signature(factory)
    if signature is not None:
        _check_names(signature, constants, "--static", target)
    made = factory(**constants)
    if callable(made):
        return made
    if isinstance(made, tuple) and made and callable(made[0]):
        return Call(made[0], made[1:])
    raise OptionsError(
        f"{target}: as a factory it returned {made!r:.80}, expected a function, or a tuple of a "
        "function and its arguments"
    )


def _signature(fn: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(fn)
    except (TypeError, ValueError):  # of what is not written in Python
        return None


def _bound(fn: Callable[..., Any], texts: dict[str, str], constants: dict[str, Any]) -> Call:
    name = name_of(fn)
    signature = _signature(fn) or inspect.Signature(
        [inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL)]
    )
    texts = _named(texts, signature, name)
    _check_names(signature, texts, "--arg", name)
    _check_names(signature, constants, "--static", name)
    for twice in texts.keys() & constants.keys():
        raise OptionsError(f"{twice}: found both as --arg and as --static, expected one of them")
    _check_missing(signature, {**texts, **constants}, name)
    values = {key: read_value(texts[key], f"--arg {key}") for key in _ordered(texts, signature)}
    positional, named = _split(signature, list(values), constants)
    args = tuple(values[key] for key in [*positional, *named])
    if not named and not constants:
        return Call(fn, args)
    return Call(_with_names(fn, len(positional), named, constants), args)


def _named(texts: dict[str, str], signature: inspect.Signature, name: str) -> dict[str, str]:
    """The same with names in the place of positions; those of `*args` stay numbers."""
    positions = [p.name for p in signature.parameters.values() if p.kind in _POSITIONAL]
    found: dict[str, str] = {}
    for key, text in texts.items():
        known = key.isdecimal() and int(key) < len(positions)
        new = positions[int(key)] if known else key
        if new in found:
            raise OptionsError(f"--arg {key}: {new} of {name}{signature} is given twice")
        found[new] = text
    return found


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _check_names(signature: inspect.Signature, given: Any, option: str, name: str) -> None:
    kinds = {p.kind for p in signature.parameters.values()}
    fixed = [
        p.name
        for p in signature.parameters.values()
        if p.kind in (*_POSITIONAL, inspect.Parameter.KEYWORD_ONLY)
    ]
    many = sum(signature.parameters[key].kind in _POSITIONAL for key in fixed)
    rest = sorted(int(key) for key in given if key.isdecimal())
    if rest and inspect.Parameter.VAR_POSITIONAL in kinds:
        if rest != list(range(many, many + len(rest))):
            raise OptionsError(f"{option} {rest[-1]}: found the positions {rest}, expected no gaps")
        given = [key for key in given if not key.isdecimal()]
    for key in given:
        if key not in fixed and inspect.Parameter.VAR_KEYWORD not in kinds:
            raise OptionsError(
                f"{option} {key}: there is no such parameter in {name}{_text(signature)}"
                f"{hint(key, fixed)}"
            )


def _check_missing(signature: inspect.Signature, given: dict[str, Any], name: str) -> None:
    missing = [
        p.name
        for p in signature.parameters.values()
        if p.kind in (*_POSITIONAL, inspect.Parameter.KEYWORD_ONLY)
        and p.default is p.empty
        and p.name not in given
    ]
    if missing:
        wanted = " ".join(f"--arg {key}=..." for key in missing)
        raise OptionsError(f"{name}{_text(signature)}: add {wanted}")


def _text(signature: inspect.Signature) -> str:
    """A signature without its annotations, which may be long."""
    plain = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=plain, return_annotation=signature.empty))


def _ordered(texts: dict[str, str], signature: inspect.Signature) -> list[str]:
    order = [p.name for p in signature.parameters.values()]
    numbers = sorted((key for key in texts if key.isdecimal()), key=int)
    named = [key for key in order if key in texts]
    return [*named, *numbers, *(key for key in texts if key not in {*named, *numbers})]


def _split(
    signature: inspect.Signature, given: list[str], constants: dict[str, Any]
) -> tuple[list[str], list[str]]:
    """Which arguments can go by position, without a gap before them, and which go by name."""
    positional: list[str] = []
    for parameter in signature.parameters.values():
        if parameter.kind not in _POSITIONAL or parameter.name not in given:
            break
        positional.append(parameter.name)
    positional += [key for key in given if key.isdecimal()]
    named = [key for key in given if key not in positional]
    for key in [*named, *constants]:
        known = signature.parameters.get(key)
        if known is not None and known.kind is inspect.Parameter.POSITIONAL_ONLY:
            raise OptionsError(f"{key}: it goes by position only, so all before it need --arg too")
    return positional, named


def _with_names(
    fn: Callable[..., Any], count: int, names: Sequence[str], constants: dict[str, Any]
) -> Callable[..., Any]:
    """A function of positions alone, of which those from `count` on have these names."""

    def call(*values: Any) -> Any:
        return fn(*values[:count], **dict(zip(names, values[count:], strict=True)), **constants)

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
