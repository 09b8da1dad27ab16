"""Structures of trees as plain JSON values, without pickle: dicts, lists, tuples, None."""

from __future__ import annotations

import collections
import sys
from typing import Any

import jax
from jax.tree_util import PyTreeDef

from beamjax.errors import ArrayFormatError, StructureError

_LEAF = "*"
_LISTS: dict[str, type] = {"list": list, "tuple": tuple}
_DICTS: dict[str, type] = {"dict": dict, "ordered": collections.OrderedDict}


def tree_to_json(treedef: PyTreeDef) -> Any:
    """A structure as JSON values."""
    data = treedef.node_data()
    if data is None:
        return _LEAF
    kind, extra = data
    children = [tree_to_json(child) for child in treedef.children()]
    if kind is type(None):
        return None
    for name, known in _LISTS.items():
        if kind is known:
            return {name: children}
    for name, known in _DICTS.items():
        if kind is known and all(type(key) in (str, int, bool) for key in extra):
            return {name: [[key, child] for key, child in zip(extra, children, strict=True)]}
    where = f"{kind.__module__}.{kind.__qualname__}"
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return {"named": [kind.__module__, kind.__qualname__, list(kind._fields)], "of": children}
    return {"other": where}  # the name alone, from which the node can't be rebuilt


def tree_from_json(record: Any, path: str) -> PyTreeDef:
    """Undoes `tree_to_json`. Named tuples are looked up in modules that are imported here."""
    try:
        return jax.tree_util.tree_structure(_example(record, path))
    except RecursionError:
        raise ArrayFormatError(f"{path}: found a tree that is too deep") from None
    except ValueError as error:  # of JAX, which sorts the keys of a dict
        if isinstance(error, ArrayFormatError):
            raise
        raise ArrayFormatError(f"{path}: found no structure of a tree ({error})") from error


def _example(record: Any, path: str) -> Any:
    """A tree of zeros that has the structure."""
    match record:
        case "*":
            return 0
        case None:
            return None
        case {"list": list(children)}:
            return [_example(child, path) for child in children]
        case {"tuple": list(children)}:
            return tuple(_example(child, path) for child in children)
        case {"dict": list(items)} | {"ordered": list(items)}:
            kind = _DICTS["dict" if "dict" in record else "ordered"]
            return kind((_key(item, path), _example(item[1], path)) for item in items)
        case {"named": [str(module), str(name), list(names)], "of": list(children)}:
            return _named(module, name, names)(*(_example(child, path) for child in children))
        case {"other": str(name)}:
            raise StructureError(
                f"{path}: the result holds a node of {name}, which can't be rebuilt from a file "
                f"alone; {_LIKE}"
            )
    raise ArrayFormatError(f"{path}: found {record!r:.200}, expected the structure of a tree")


_LIKE = "give an example of the tree, of any leaves, as job.result(like=...)"


def _key(item: Any, path: str) -> Any:
    if isinstance(item, list) and len(item) == 2 and type(item[0]) in (str, int, bool):
        return item[0]
    raise ArrayFormatError(f"{path}: found {item!r:.200}, expected a key and its value")


def _named(module: str, name: str, names: list[str]) -> Any:
    value: Any = sys.modules.get(module)
    for part in name.split("."):
        value = getattr(value, part, None)
    tuples = isinstance(value, type) and issubclass(value, tuple)
    if not tuples or list(getattr(value, "_fields", ())) != names:
        raise StructureError(
            f"the result holds a named tuple {module}.{name} of {', '.join(map(str, names))}, "
            f"which is not there in this process; import its module first, or {_LIKE}"
        )
    return value


def like(tree: Any, leaves: int) -> PyTreeDef:
    """The structure of an example."""
    treedef: Any = jax.tree_util.tree_structure(tree)
    if treedef.num_leaves != leaves:
        raise StructureError(
            f"like: found a tree with {treedef.num_leaves} leaves, expected {leaves} as in the "
            "result of the job"
        )
    return treedef
