"""Placed inputs from objects that return one member at a time: `dataset[i]`.

The protocol is that of grain's `RandomAccessDataSource` and of map-style datasets of PyTorch.
"""

from __future__ import annotations

import functools
import operator
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from beamjax.errors import BeamjaxError, PlacementError, SourceError, StructureError
from beamjax.sources.dataset_openers import OpenedBy, is_opener, opener_name
from beamjax.sources.leaf_checks import member_leaves
from beamjax.sources.member_values import as_arrays, leaf_array
from beamjax.sources.source_base import (
    ByIndex,
    Count,
    HoldsLeaves,
    Leaves,
    PyTreeDef,
    Which,
    describe_source,
    row_text,
)
from beamjax.sources.source_kinds import FileSource

CALLER = "from_random_access"


class RandomAccessSource(HoldsLeaves, ByIndex, FileSource):
    """Members that an object returns one at a time; see `from_random_access`."""

    def __init__(
        self,
        dataset: OpenedBy,
        size: Count,
        leaves: Leaves,
        treedef: PyTreeDef | None = None,
    ) -> None:
        """Use `from_random_access`, which checks."""
        super().__init__(leaves, treedef)
        self._dataset = dataset
        self._size = size

    @property
    def local(self) -> bool:
        return not isinstance(self._dataset, OpenedBy)

    def spec(self) -> dict[str, Any] | None:
        return super().spec() if isinstance(self._dataset, OpenedBy) else None

    def __len__(self) -> int:
        return self._size

    def _at(self, which: Which) -> list[np.ndarray]:
        import jax

        arrays: list[np.ndarray] = []
        treedef = self._treedef  # None if only the paths of the leaves are known
        chosen = np.arange(which.start, which.stop) if isinstance(which, slice) else which
        for place, (index, member) in enumerate(self._members(chosen.tolist())):
            values, own = jax.tree_util.tree_flatten(member)
            if treedef is None or own != treedef:
                self._check_tree(member, treedef, index)
                treedef = own
            try:
                pairs = zip(values, self._leaves, strict=True)
                converted = [leaf_array(value, leaf) for value, leaf in pairs]
            except StructureError as error:
                raise SourceError(
                    f"{CALLER}, member {index}: {error} as in the first member."
                ) from error
            # Allocated only after the first member was checked: a damaged spec can't cause a large
            # allocation.
            arrays = arrays or self._empty(len(chosen))
            for array, value in zip(arrays, converted, strict=True):
                array[place] = value
        return arrays or self._empty(len(chosen))

    def _empty(self, count: int) -> list[np.ndarray]:
        return [np.empty((count, *leaf.shape), leaf.dtype) for leaf in self._leaves]

    def _check_tree(self, member: Any, expected: PyTreeDef | None, index: int) -> None:
        import jax

        member_paths = [
            jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(member)
        ]
        paths = [leaf.path for leaf in self._leaves]
        if expected is not None or member_paths != paths:
            raise SourceError(
                f"{CALLER}, member {index}: found a tree with the leaves {member_paths}, expected "
                f"{paths}; every member has the tree of the first one."
            )

    def _members(self, numbers: list[int]) -> Iterator[tuple[int, Any]]:
        if not numbers:
            return
        dataset = self._opened()
        several = getattr(dataset, "__getitems__", None)
        if several is None:
            for index in numbers:
                where = f"member {index}"
                get = functools.partial(operator.getitem, dataset, index)
                yield index, _called(get, where)
            return
        where = f"members {numbers[0]} to {numbers[-1]}"
        members = _called(lambda: list(several(numbers)), where)
        if len(members) != len(numbers):
            raise SourceError(
                f"{CALLER}, {where}: __getitems__ returns {len(members)} members, expected "
                f"{len(numbers)}, one for each index in the list."
            )
        yield from zip(numbers, members, strict=True)

    def _opened(self) -> Any:
        if not isinstance(self._dataset, OpenedBy):
            return self._dataset
        dataset = self._dataset.open()
        if (size := _length(dataset)) != self._size:
            raise SourceError(
                f"{self._dataset}: found {size} members in process {os.getpid()}, expected "
                f"{self._size} as when the source was made; a dataset must not change."
            )
        return dataset

    def where(self, leaf: int, index: tuple[int, ...]) -> str:
        path = self._leaves[leaf].path
        return f"{CALLER}, {f'leaf {path}, ' if path else ''}{row_text(index, 'member')}"

    def __str__(self) -> str:
        opener = self._dataset
        where = f"from {opener}" if isinstance(opener, OpenedBy) else f"of {type(opener).__name__}"
        return describe_source(self, where)


def from_random_access(
    dataset: Any, kwargs: dict[str, Any] | None = None, member: Any = None
) -> RandomAccessSource:
    """A placed input from an object that returns one member at a time, by its index.

        bj.run(train, weights, bj.from_random_access(dataset))

    An object stays in this process and is not pickled. Workers that are threads of this process
    read from it. For other workers, its members are first written to files of the run. To let
    workers open the dataset themselves, give the function that opens it:

        @bj.opens_dataset
        def images(path):
            return ImageFolder(path)

        bj.from_random_access(images, {"path": "/data/images"})

    The function is called once in each process. It is imported by its name, so its module must be
    importable on the workers. If it is defined in the launching script itself, the dataset stays in
    this process.

    Args:
      dataset: has `len(dataset)` and `dataset[i]`, which returns member i: a tree of NumPy or JAX
        arrays and of numbers, with the same tree, shapes and dtypes for each i. If there is a
        `dataset.__getitems__([i, ...])`, it reads several members. Several threads read at once.
        Or a function that opens such an object, or the name of one: "package.module:images".
      kwargs: arguments of that function, which JSON can hold.
      member: a tree of `jax.ShapeDtypeStruct` or arrays, one member; None takes it from
        `dataset[0]`. Python numbers have the dtypes that `jnp.asarray` gives them.

    Returns:
      A `Source` with `len(dataset)` members and the tree of `dataset[i]`.

    Raises:
      StructureError: `dataset` is no such object, or a leaf of a member is no number or array.
      PlacementError: there is no member, and `member` is None.
      SourceError: the function fails, or member 0 can't be read.
    """
    dataset, opened = _opened(dataset, kwargs)
    size = _length(opened)
    if member is None and not size:
        raise PlacementError(
            f"{CALLER}: found 0 members, and so no type of one; give it as the argument `member`."
        )
    if member is None:
        member = as_arrays(_called(lambda: opened[0], "member 0"), f"{CALLER}, member 0")
    leaves, treedef = member_leaves(member, CALLER)
    return RandomAccessSource(dataset, size, tuple(leaves), treedef)


def _opened(dataset: Any, kwargs: dict[str, Any] | None) -> tuple[Any, Any]:
    """The argument `dataset` of the source, and the open dataset."""
    if isinstance(dataset, str) or is_opener(dataset):
        opener = OpenedBy(*opener_name(dataset), kwargs or {})
        opened = opener.open()
        # Workers can't import the launching script, so the source takes the object itself.
        return opened if opener.module == "__main__" else opener, opened
    if kwargs is not None:
        raise StructureError(
            f"{CALLER}: found kwargs with a {type(dataset).__name__}, expected them with a "
            "function that opens a dataset."
        )
    return dataset, dataset


def _length(dataset: Any) -> int:
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        hint = "; decorate a function that opens one by beamjax.opens_dataset"
        raise StructureError(
            f"{CALLER}: found a {type(dataset).__name__}, expected an object with len(dataset) and "
            f"dataset[i]{hint if callable(dataset) else ''}."
        )
    return int(_called(lambda: len(dataset), "its length"))


def _called(function: Callable[[], Any], what: str) -> Any:
    """Calls a function of the user; its errors become a SourceError that names `what`."""
    try:
        return function()
    except BeamjaxError:
        raise
    except Exception as error:
        raise SourceError(
            f"{CALLER}, {what}: cannot be read ({type(error).__name__}: {error})."
        ) from error
