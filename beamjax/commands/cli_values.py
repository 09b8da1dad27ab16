"""Reads arguments from texts: JSON, or a file whose ending says what it is."""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

import beamjax
from beamjax._text import hint
from beamjax.errors import OptionsError, SourceError
from beamjax.sources.arrays.data_files import is_url


def read_value(text: str, where: str) -> Any:
    """The value of a text that the user typed; see `calls.HELP`."""
    try:
        value = json.loads(text)
    except ValueError:
        return _opener(text, where)(text)
    return _as_tree(value, where)


def _as_tree(value: Any, where: str) -> Any:
    """A JSON value as a tree, in which lists of numbers are arrays."""
    if isinstance(value, str):
        raise OptionsError(f"{where}: found the text {value!r:.80}, expected numbers")
    if isinstance(value, dict):
        return {name: _as_tree(child, f"{where}[{name!r}]") for name, child in value.items()}
    if isinstance(value, list):
        if value and _is_numbers(value):
            try:
                return jnp.asarray(value)
            except (ValueError, OverflowError):  # lists of unequal lengths, or a large number
                pass
        return [_as_tree(child, f"{where}[{i}]") for i, child in enumerate(value)]
    if isinstance(value, int):
        try:
            jnp.asarray(value)
        except OverflowError:
            raise OptionsError(
                f"{where}: found {value}, which does not fit {jnp.asarray(0).dtype}; write it as "
                "a float, or set JAX_ENABLE_X64=1"
            ) from None
    return value


def _is_numbers(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_numbers, value))
    return isinstance(value, bool | int | float)


# --- files


def _array(path: str) -> Any:
    """An .npy file as a mapped array; several files, or a URL, as a source."""
    if (glob.has_magic(path) or is_url(path)) and not os.path.exists(path):
        return beamjax.from_npy(path)
    return _loaded(path, mmap_mode="r")


def _arrays(path: str) -> Any:
    """An .npz file as a tree, by names that are paths such as "layers/0/w"."""
    with _loaded(path) as file:
        return nested(dict(file))


def _loaded(path: str, **settings: Any) -> Any:
    try:
        return np.load(path, allow_pickle=False, **settings)
    except FileNotFoundError:
        raise OptionsError(f"{path}: found no such file{_similar(path)}") from None
    except (OSError, ValueError) as error:
        raise SourceError(f"{path}: found no arrays of NumPy ({error})") from error


def nested(flat: dict[str, Any]) -> Any:
    """A tree of values by paths such as "layers/0/w"; a node with the names 0, 1, ... is a list."""
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        *folders, last = name.split("/")
        node = tree
        for folder in folders:
            node = node.setdefault(folder, {})
            if not isinstance(node, dict):
                raise SourceError(f"found {name!r} and {folder!r}, but one is in the other")
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


_OPENERS: dict[str, Callable[[str], Any]] = {
    ".npy": _array,
    ".npz": _arrays,
    ".parquet": beamjax.from_parquet,
    ".arrow": beamjax.from_arrow,
    ".feather": beamjax.from_arrow,
    ".zarr": beamjax.from_zarr,
    ".tfrecord": beamjax.from_tfrecord,
    ".tfrecord.gz": beamjax.from_tfrecord,
}
"""Functions that open a file, by the ending of its name."""
_MANIFESTS = ("placed.json", "keys.json", "members.json")
"""Files that only folders have which `beamjax.open_placed` opens."""


def _opener(text: str, where: str) -> Callable[[str], Any]:
    for ending, opener in _OPENERS.items():
        if text.rstrip("/").endswith(ending):
            return opener
    if any(os.path.exists(os.path.join(text, name)) for name in _MANIFESTS):
        return beamjax.open_placed
    raise OptionsError(
        f"{where}: found {text!r}, expected JSON, the folder of a result, or a name that ends "
        f"in {', '.join(_OPENERS)}{_similar(text)}. For anything else, give a job as TARGET: a "
        "function that returns (fn, *args)"
    )


def _similar(path: str) -> str:
    folder = os.path.dirname(path)
    try:
        return hint(path, [os.path.join(folder, other) for other in os.listdir(folder or ".")])
    except OSError:
        return f"; there is no folder {folder!r}"
