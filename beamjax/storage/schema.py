"""Dataclasses and named tuples as JSON values, and back; JSON that was read is limited."""

from __future__ import annotations

import collections.abc
import contextlib
import dataclasses
import functools
import json
import math
import re
import types
import typing
from collections.abc import Callable
from typing import Any, TypeVar

from beamjax.errors import ArrayFormatError

T = TypeVar("T")

MAX_JSON_BYTES = 16 * 2**20
"""Bytes of JSON that are parsed, in headers and other files. Objects take 25 times as many."""
MAX_JSON_DEPTH = 400
"""Levels of lists and objects that are parsed. Python fails on deeper ones, when it parses, prints
or compares them."""
_BRACKETS = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[{]|[\]}]', re.DOTALL)

_PLAIN = (str, int, bool, bytes)
"""Types that are the same in JSON, or, as bytes, beside it. Most values have one of them."""
_CODECS: dict[type, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {}
"""Codecs of types that are no dataclasses: to plain values, and back."""


def add_codec(kind: type, encode: Callable[[Any], Any], decode: Callable[[Any], Any]) -> None:
    """Registers how a class is written; `decode` raises KeyError, TypeError or ValueError."""
    _CODECS[kind] = encode, decode


def parse_json(data: bytes | bytearray | memoryview, where: str) -> Any:
    """The values of a JSON text."""
    if len(data) > MAX_JSON_BYTES:
        raise ArrayFormatError(
            f"{where}: found {len(data)} bytes of JSON, expected at most {MAX_JSON_BYTES}"
        )
    text = bytes(data)
    if text.count(b"[") + text.count(b"{") > MAX_JSON_DEPTH and _depth(text) > MAX_JSON_DEPTH:
        raise ArrayFormatError(
            f"{where}: found JSON of more than {MAX_JSON_DEPTH} levels, expected fewer"
        )
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ArrayFormatError(f"{where}: found {text[:40]!r}, expected JSON ({error})") from None


def _depth(text: bytes) -> int:
    depth = deepest = 0
    for token in _BRACKETS.findall(text):
        if token in (b"[", b"{"):
            depth += 1
            deepest = max(deepest, depth)
        elif token in (b"]", b"}"):
            depth -= 1
    return deepest


def to_plain(value: Any) -> Any:
    """Converts dataclasses and mappings to dicts, and tuples, also named ones, to lists."""
    if type(value) in _PLAIN:
        return value
    for kind, (encode, _) in _CODECS.items():
        if isinstance(value, kind):
            return encode(value)
    if dataclasses.is_dataclass(value):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, collections.abc.Mapping):
        return {str(key): to_plain(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(child) for child in value]
    return value


def from_plain(kind: type[T], value: Any, path: str) -> T:
    """Undoes `to_plain`, also after a round trip through JSON."""
    # Fields that the class does not have are ignored. Missing ones get their defaults.
    # `Annotated[kind, check]` calls `check`, which may refuse a value with a `ValueError` or
    # `TypeError`, as may a `__post_init__`.
    return typing.cast(T, _value(kind, value, path, getattr(kind, "__name__", "a value")))


def _value(kind: Any, value: Any, path: str, where: str) -> Any:
    if type(value) is kind and kind in _PLAIN:
        return value
    if isinstance(kind, TypeVar):
        return _one_of(kind.__constraints__, value, path, where)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(origin):  # a generic one
        kind = origin
    if origin is typing.Annotated:
        inner = _value(arguments[0], value, path, where)
        for check in arguments[1:]:
            _called(check, inner, path, where)
        return inner
    if origin in (typing.Union, types.UnionType):
        return _one_of(arguments, value, path, where)
    for known, (_, decode) in _CODECS.items():
        if isinstance(kind, type) and issubclass(kind, known):
            return _called(decode, value, path, where)
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        return _instance(kind, value, path, where)
    if isinstance(value, list | tuple):
        if origin is tuple:
            return _items(arguments, value, path, where)
        if origin is collections.abc.Sequence:
            return _items((*arguments, ...), value, path, where)
        if hasattr(kind, "_fields"):
            return _named_tuple(kind, value, path, where)
    if origin is collections.abc.Mapping and isinstance(value, dict):
        return {str(k): _value(arguments[1], x, path, f"{where}[{k!r}]") for k, x in value.items()}
    is_number = kind is float and type(value) in (int, float) and math.isfinite(value)
    if kind is Any or is_number or (type(value) is kind and kind is not float):
        return value
    name = getattr(kind, "__name__", str(kind))
    raise ArrayFormatError(f"{path}: found {value!r:.80} as {where}, expected {name}")


def _items(kinds: tuple[Any, ...], value: Any, path: str, where: str) -> tuple[Any, ...]:
    if kinds[-1] is Ellipsis:
        kinds = kinds[:1] * len(value)
    if len(kinds) != len(value):
        raise ArrayFormatError(
            f"{path}: found {value!r:.80} as {where}, expected {len(kinds)} values"
        )
    pairs = enumerate(zip(kinds, value, strict=True))
    return tuple(_value(kind, x, path, f"{where}[{i}]") for i, (kind, x) in pairs)


def _named_tuple(kind: Any, value: Any, path: str, where: str) -> Any:
    kinds = tuple(_hints(kind).values())
    least = len(kinds) - len(kind._field_defaults)  # records of earlier versions have fewer
    return kind(*_items(kinds[: max(len(value), least)], value, path, where))


def _called(function: Callable[[Any], Any], value: Any, path: str, where: str) -> Any:
    """Calls a function with a value; adds to its errors where the value is."""
    try:
        return function(value)
    except (KeyError, TypeError, ValueError) as error:
        raise ArrayFormatError(f"{path}: found {value!r:.80} as {where}: {error}") from error


def _one_of(kinds: tuple[Any, ...], value: Any, path: str, where: str) -> Any:
    if value is None and types.NoneType in kinds:
        return None
    *first, last = [kind for kind in kinds if kind is not types.NoneType]
    # The error for the last kind is the one that is raised.
    for kind in first:
        with contextlib.suppress(ArrayFormatError):
            return _value(kind, value, path, where)
    return _value(last, value, path, where)


def _instance(kind: Any, value: dict[str, Any], path: str, where: str) -> Any:
    hints = _hints(kind)
    known = {
        field.name: _value(hints[field.name], value[field.name], path, f"{where}.{field.name}")
        for field in dataclasses.fields(kind)
        if field.name in value
    }
    missing = [f.name for f in dataclasses.fields(kind) if f.name not in known and _is_required(f)]
    if missing:
        raise ArrayFormatError(
            f"{path}: found no {where}, expected the fields {', '.join(missing)} as well"
        )
    try:
        return kind(**known)
    except (TypeError, ValueError) as error:  # from `__post_init__`
        raise ArrayFormatError(f"{path}: found no {where} ({error})") from None


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)
