"""Dataclasses from the plain values that `dataclasses.asdict` and JSON made of them."""

from __future__ import annotations

import collections.abc
import dataclasses
import functools
import types
import typing
from typing import Any, TypeVar

from beamjax.errors import ArrayFormatError

T = TypeVar("T")


def from_plain(kind: type[T], value: Any, path: str) -> T:
    """Undoes `json.loads(json.dumps(dataclasses.asdict(...)))`.

    Fields that the class does not have are left out, those that are missing have their defaults.

    Args:
      kind: the class, with fields of plain types, of such classes, and of tuples and mappings.
      value: what was read.
      path: where it was, for the message.

    Raises:
      ArrayFormatError: the value is something else.
    """
    return typing.cast(T, _value(kind, value, path, kind.__name__))


def _value(kind: Any, value: Any, path: str, where: str) -> Any:
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        return _one_of(typing.get_args(kind), value, path, where)
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        return _instance(kind, value, path, where)
    if origin is tuple and isinstance(value, list | tuple):
        inner = typing.get_args(kind)[0]
        return tuple(_value(inner, x, path, f"{where}[{i}]") for i, x in enumerate(value))
    if origin is collections.abc.Mapping and isinstance(value, dict):
        inner = typing.get_args(kind)[1]
        return {str(k): _value(inner, x, path, f"{where}[{k!r}]") for k, x in value.items()}
    if kind is Any or type(value) is kind or (kind is float and type(value) is int):
        return value
    name = getattr(kind, "__name__", str(kind))
    raise ArrayFormatError(f"{path}: found {value!r:.80} as {where}, expected {name}")


def _one_of(kinds: tuple[Any, ...], value: Any, path: str, where: str) -> Any:
    for kind in kinds:
        if kind is types.NoneType:
            if value is None:
                return None
            continue
        try:
            return _value(kind, value, path, where)
        except ArrayFormatError:
            continue
    raise ArrayFormatError(f"{path}: found {value!r:.80} as {where}, expected one of {kinds}")


def _instance(kind: Any, value: dict[str, Any], path: str, where: str) -> Any:
    hints = _hints(kind)
    known = {
        field.name: _value(hints[field.name], value[field.name], path, f"{where}.{field.name}")
        for field in dataclasses.fields(kind)
        if field.name in value
    }
    try:
        return kind(**known)
    except TypeError as error:  # a field is missing that has no default
        raise ArrayFormatError(f"{path}: found no {where} ({error})") from None


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)
