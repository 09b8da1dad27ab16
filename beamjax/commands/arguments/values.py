"""The text of an argument as what `beamjax.run` takes: a number, an array, a tree or a source."""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import beamjax
from beamjax._text import closest, hint, listed
from beamjax.errors import OptionsError, SourceError
from beamjax.sources.arrays.data_files import is_url
from beamjax.sources.leaf_checks import native_dtype

DTYPES = (
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 bfloat16 float32 float64"
).split()


@dataclass(frozen=True)
class Kind:
    """A way to open what is at a path.

    Attributes:
      open: takes the path, and the settings after `#` by name.
      endings: of files that are opened so without being told.
      settings: that it takes; None for any.
    """

    open: Callable[..., Any]
    endings: tuple[str, ...] = ()
    settings: tuple[str, ...] | None = ()


def read_value(text: str, where: str) -> Any:
    """What a text stands for; see `value_help`.

    Args:
      text: as it was typed.
      where: the name of the argument, for messages.

    Raises:
      OptionsError: the text is none of these, or there is no such file.
      SourceError, StructureError, PlacementError: the file does not hold what it should.
    """
    prefix, colon, rest = text.partition(":")
    if colon and not rest.startswith("//"):
        if prefix in KINDS:
            return _open(prefix, rest, where)
        if prefix in DTYPES:
            return jnp.asarray(_parsed(rest, where), native_dtype(jnp.dtype(prefix)))
        if prefix in ("key", "range"):
            number = _number(rest, where)
            return jax.random.key(number) if prefix == "key" else beamjax.from_range(number)
    try:
        value = json.loads(text)
    except ValueError:
        pass
    else:
        return as_tree(value, where)
    path, _ = _settings(text)
    kind = _kind_of(path)
    if kind is not None:
        return _open(kind, text, where)
    raise OptionsError(f"{where}: {_unknown(text, path, prefix if colon else '')}")


def static_value(text: str) -> Any:
    """A value of Python for a parameter that is no data: JSON, or else the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def as_tree(value: Any, where: str) -> Any:
    """Values of JSON as a tree: lists of numbers are arrays.

    Raises:
      OptionsError: it holds text.
    """
    if isinstance(value, str):
        raise OptionsError(
            f"{where}: found the text {value!r:.80}, expected numbers; a value that is no data is "
            "given as --static name=value"
        )
    if isinstance(value, dict):
        return {name: as_tree(child, f"{where}[{name!r}]") for name, child in value.items()}
    if isinstance(value, list):
        if value and _is_numbers(value):
            try:
                return jnp.asarray(value)
            except ValueError:  # of unequal lengths
                pass
        return [as_tree(child, f"{where}[{i}]") for i, child in enumerate(value)]
    return value


def nested(flat: dict[str, Any]) -> Any:
    """A tree of values by paths such as "layers/0/w"; the names 0, 1, ... make a list."""
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        *folders, last = name.split("/")
        node = tree
        for folder in folders:
            node = node.setdefault(folder, {})
            if not isinstance(node, dict):
                raise SourceError(f"found {name!r} and {folder!r}, of which one is in the other")
        node[last] = value
    return _with_lists(tree)


def _with_lists(node: Any) -> Any:
    if not isinstance(node, dict):
        return node
    children = {name: _with_lists(child) for name, child in node.items()}
    numbers = [str(i) for i in range(len(children))]
    if children and set(children) == set(numbers):
        return [children[number] for number in numbers]
    return children


# --- files


def _array(path: str, at: str | None = None) -> Any:
    """An .npy file as an array, mapped; an .npz file as a tree."""
    try:
        if not path.endswith(".npz"):
            array = np.load(path, mmap_mode="r", allow_pickle=False)
            if isinstance(array, np.ndarray):
                return array
            array.close()
        with np.load(path, allow_pickle=False) as file:
            tree = nested(dict(file))
    except FileNotFoundError:
        raise OptionsError(f"{path}: found no such file{_file_hint(path)}") from None
    except (OSError, ValueError) as error:
        raise SourceError(f"{path}: found no arrays of NumPy ({error})") from error
    return tree if at is None else _part(tree, at, path)


def _part(tree: Any, at: str, path: str) -> Any:
    for name in at.split("/"):
        if isinstance(tree, list):
            tree = {str(number): child for number, child in enumerate(tree)}
        if not isinstance(tree, dict) or name not in tree:
            names = tree if isinstance(tree, dict) else []
            raise OptionsError(
                f"{path}: found no {name!r} of {at!r}, expected one of: {listed(names)}"
                f"{hint(name, names)}"
            )
        tree = tree[name]
    return tree


def _json(path: str) -> Any:
    try:
        return as_tree(json.loads(Path(path).read_text(encoding="utf-8")), path)
    except FileNotFoundError:
        raise OptionsError(f"{path}: found no such file{_file_hint(path)}") from None
    except ValueError as error:
        raise SourceError(f"{path}: found no JSON ({error})") from error


def _table(open: Callable[..., Any]) -> Callable[..., Any]:
    def opened(path: str, **settings: str) -> Any:
        given: dict[str, Any] = dict(settings)
        if "columns" in given:
            given["columns"] = given["columns"].split(",")
        if "buckets" in given:
            given["buckets"] = [_number(n, path) for n in given["buckets"].split(",")]
        if "text_bytes" in given:
            given["text_bytes"] = _number(given["text_bytes"], path)
        return open(path, **given)

    return opened


_TYPE = re.compile(r"([a-z0-9]+)\[([0-9, ]*)\]")


def _records(open: Callable[..., Any]) -> Callable[..., Any]:
    def opened(path: str, **types: str) -> Any:
        features = {name: _type(text, path) for name, text in types.items()}
        return open(path, features or None)

    return opened


def _type(text: str, path: str) -> jax.ShapeDtypeStruct:
    found = _TYPE.fullmatch(text)
    if not found or found[1] not in DTYPES:
        raise OptionsError(f"{path}: found the type {text!r}, expected one such as float32[28,28]")
    shape = tuple(int(n) for n in found[2].split(",") if n.strip())
    return jax.ShapeDtypeStruct(shape, jnp.dtype(found[1]))


KINDS: dict[str, Kind] = {
    "array": Kind(_array, (".npy", ".npz"), ("at",)),
    "json": Kind(_json, (".json",)),
    "npy": Kind(beamjax.from_npy),
    "npz": Kind(beamjax.from_npz),
    "npy_parts": Kind(beamjax.from_npy_parts, (".npy.gz",)),
    "parquet": Kind(
        _table(beamjax.from_parquet), (".parquet", ".pq"),
        ("columns", "text_bytes", "buckets", "group_by", "folder"),
    ),
    "arrow": Kind(
        _table(beamjax.from_arrow), (".arrow", ".feather", ".ipc"),
        ("columns", "text_bytes", "buckets"),
    ),
    "zarr": Kind(beamjax.from_zarr, (".zarr", ".zarr.zip")),
    "tfrecord": Kind(
        _records(beamjax.from_tfrecord), (".tfrecord", ".tfrecords", ".tfrecord.gz"), None
    ),
    "array_record": Kind(
        _records(beamjax.from_array_record), (".array_record", ".arrayrecord"), None
    ),
    "placed": Kind(beamjax.open_placed),
    "keyed": Kind(beamjax.open_keyed),
}  # fmt: skip

_MARKS = {
    "placed.json": "placed", "keys.json": "keyed", "zarr.json": "zarr", ".zarray": "zarr",
    ".zgroup": "zarr",
}  # fmt: skip
"""The file that tells what a folder is."""


def _kind_of(path: str) -> str | None:
    """How to open a path that says it by its name, or by what is in its folder."""
    for name, kind in KINDS.items():
        if path.rstrip("/").endswith(kind.endings) and kind.endings:
            several = name == "array" and (glob.has_magic(path) or is_url(path))
            return "npy" if several and not os.path.exists(path) else name
    for mark, name in _MARKS.items():
        if os.path.exists(os.path.join(path, mark)):
            return name
    return None


def _settings(text: str) -> tuple[str, dict[str, str]]:
    """A path, and what follows `#`."""
    path, hash_, rest = text.rpartition("#")
    pairs = [pair.partition("=") for pair in rest.split("&")]
    if not hash_ or not all(name and equals for name, equals, _ in pairs):
        return text, {}
    return path, {name: value for name, _, value in pairs}


def _open(name: str, text: str, where: str) -> Any:
    kind = KINDS[name]
    path, settings = _settings(text)
    for setting in settings:
        if kind.settings is not None and setting not in kind.settings:
            raise OptionsError(
                f"{where}: found {setting!r} after '#' in {text!r}, expected for {name}: "
                f"{listed(kind.settings)}{hint(setting, kind.settings)}"
            )
    if not path:
        raise OptionsError(f"{where}: found no path in '{name}:', expected {name}:PATH")
    return kind.open(path, **settings)


# --- messages


def _is_numbers(value: Any) -> bool:
    if isinstance(value, list):
        return all(_is_numbers(child) for child in value)
    return isinstance(value, bool | int | float)


def _parsed(text: str, where: str) -> Any:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if value is None or not _is_numbers(value):
        raise OptionsError(f"{where}: found {text!r}, expected a number or a list of numbers")
    return value


def _number(text: str, where: str) -> int:
    try:
        return int(text.replace("_", ""))
    except ValueError:
        raise OptionsError(f"{where}: found {text!r}, expected a whole number") from None


def _file_hint(path: str) -> str:
    folder, name = os.path.split(path)
    try:
        names = os.listdir(folder or ".")
    except OSError:
        return f"; the folder {folder!r} is not there" if folder else ""
    found = closest(name, names)
    return f"; did you mean {os.path.join(folder, found)!r}?" if found else ""


def _unknown(text: str, path: str, prefix: str) -> str:
    """What is wrong with a text that is no value."""
    if os.path.isdir(path):
        marks = ", ".join(_MARKS)
        return (
            f"{path} is a folder with none of {marks}, expected one of these, or KIND:{path} with "
            f"KIND one of {listed(KINDS)}"
        )
    if os.path.exists(path):
        endings = [ending for kind in KINDS.values() for ending in kind.endings]
        return f"found {path!r}, expected a name that ends in {', '.join(endings)}; or KIND:{path}"
    kinds = [*KINDS, *DTYPES, "key", "range"]
    if prefix.isidentifier() and closest(prefix, kinds):
        return f"found the kind {prefix!r}{hint(prefix, kinds)}"
    return (
        f"found {text!r}, expected a number, JSON, or a file that is there{_file_hint(path)}; text "
        "that is no data is given as --static name=value"
    )
