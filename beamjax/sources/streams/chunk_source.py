"""Placed inputs of unknown length from a function that returns their members in chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from beamjax.errors import BeamjaxError, SourceError, StructureError
from beamjax.sources.array_source import ArraySource, from_arrays
from beamjax.sources.leaf_checks import member_leaves
from beamjax.sources.source_base import (
    HoldsLeaves,
    LeafSpec,
    PyTreeDef,
    StreamSource,
    describe_source,
)


class ChunkSource(HoldsLeaves, StreamSource):
    """Chunks that a function of this process returns; see `from_chunks`."""

    def __init__(
        self,
        function: Callable[[], Iterable[Any]],
        leaves: Sequence[LeafSpec],
        treedef: PyTreeDef,
    ) -> None:
        """Use `from_chunks`, which checks."""
        super().__init__(leaves, treedef)
        self._function = function

    def chunks(self, piece: int) -> Iterator[Sequence[np.ndarray]]:
        for number, tree in enumerate(_trees(self._function)):
            arrays = _arrays(tree, number)
            if arrays is None:
                continue
            if arrays.treedef != self._treedef:
                raise SourceError(
                    f"from_chunks, chunk {number}: found the tree {arrays.treedef}, expected "
                    f"{self._treedef}; every chunk is the tree of a member, with the rows first."
                )
            yield arrays.read(0, len(arrays))

    def __str__(self) -> str:
        name = getattr(self._function, "__qualname__", type(self._function).__name__)
        return describe_source(self, f"in chunks from {name}")

    def spec(self) -> None:
        return None


def from_chunks(function: Callable[[], Iterable[Any]], member: Any = None) -> ChunkSource:
    """A placed input of unknown length, from a function that returns its members in chunks.

        def rows():
            for batch in cursor():
                yield {"x": batch[:, :-1], "y": batch[:, -1]}

        bj.run(fit, weights, bj.from_chunks(rows))

    The function stays in this process and is not pickled. Workers that are threads of this process
    call it. For other workers, this process writes the members to files, one chunk at a time.

    Args:
      function: takes no arguments, and returns an iterable of chunks: trees of NumPy or JAX arrays
        of shape (rows, ...), typed keys included. It is called each time that the members are
        read, and must return the same members in the same order. Chunks may have any number of
        rows, including 0; the numbers do not affect any result.
      member: a tree of `jax.ShapeDtypeStruct` or arrays of shape (...), one member. None takes it
        from the first chunk, for which this call calls the function.

    Returns:
      A `StreamSource` with the tree of a chunk.

    Raises:
      StructureError: `function` is no function, or a leaf has a dtype that JAX does not know.
      SourceError: the function returns no chunk with a row. When the source is read: it returns
        something else than chunks.
    """
    if not callable(function):
        raise StructureError(
            f"from_chunks: found a {type(function).__name__}, expected a function without "
            "arguments that returns a new iterable of chunks each time that it is called: "
            "from_chunks(lambda: read_rows(path))."
        )
    if member is None:
        first = _first(function)
        return ChunkSource(function, first.leaves, first.treedef)
    return ChunkSource(function, *member_leaves(member, "from_chunks"))


def _first(function: Callable[[], Iterable[Any]]) -> ArraySource:
    """The first chunk with a row in it."""
    trees = _trees(function)
    if iter(trees) is trees and _trees(function) is trees:
        raise SourceError(
            "from_chunks: the function returns the same iterator each time that it is called. This "
            "can be read only once; let the function make a new one."
        )
    for number, tree in enumerate(trees):
        arrays = _arrays(tree, number)
        if arrays is not None:
            return arrays
    raise SourceError(
        "from_chunks: found no chunk with a row in it, expected at least one member. If there are "
        "none yet, give the type of one as `member`."
    )


def _trees(function: Callable[[], Iterable[Any]]) -> Iterable[Any]:
    chunks = function()
    if not isinstance(chunks, Iterable):
        raise SourceError(
            f"from_chunks: the function returns a {type(chunks).__name__}, expected an iterable of "
            "chunks; write it with `yield`."
        )
    return chunks


def _arrays(tree: Any, number: int) -> ArraySource | None:
    """A chunk as a source; None if it has no row."""
    import jax

    leaves = jax.tree_util.tree_leaves(tree)
    if leaves and all(getattr(leaf, "shape", (1,))[:1] == (0,) for leaf in leaves):
        return None
    try:
        return from_arrays(tree)
    except BeamjaxError as error:
        raise SourceError(f"from_chunks, chunk {number}: {error}") from error
