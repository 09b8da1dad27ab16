"""Placed inputs whose members have unequal numbers of rows: clients with their own examples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from beamjax.errors import PlacementError, SourceError, StructureError
from beamjax.sources.array_source import from_arrays
from beamjax.sources.source_base import (
    MASK,
    Count,
    HoldsLeaves,
    LeafSpec,
    Positive,
    PyTreeDef,
    Source,
    StreamSource,
    Which,
    describe_source,
    members_bytes,
    take_members,
)
from beamjax.sources.source_kinds import DerivedSource, RaggedMembers, buckets_of

MAX_BUCKETS = 8
"""Largest number of default buckets. Each bucket costs one more compilation of each body."""
MULTIPLE = 8
"""Default buckets are multiples of this: finer ones save little, and 8 suits devices."""

ANY_ROWS = 1 << 16
"""A bucket may have this many rows even if there are fewer in total. Larger buckets are refused,
so that a damaged spec can't cause a large allocation."""


class RaggedSource(HoldsLeaves, DerivedSource, RaggedMembers):
    """Runs of rows of another source as members; see `from_ragged`."""

    _parts = ("_rows", "_ends")

    def __init__(
        self,
        rows: Source,
        ends: Source,
        buckets: tuple[Positive, ...],
        mask_at: Count,
        treedef: PyTreeDef | None = None,
    ) -> None:
        """Use `from_ragged`, which checks; `ends` are the numbers of rows up to each end."""
        if [(leaf.shape, leaf.dtype) for leaf in ends.leaves] != [((), np.dtype(np.int64))]:
            raise TypeError(f"found ends {ends!r}, expected one leaf int64[]")
        if not buckets or list(buckets) != sorted(set(buckets)) or buckets[-1] > _most_rows(rows):
            raise TypeError(f"found buckets {buckets} for {len(rows)} rows")
        if mask_at > len(rows.leaves):
            raise TypeError(f"found the mask at {mask_at} of {len(rows.leaves)} leaves")
        length = buckets[-1]
        leaves = [
            LeafSpec((length, *leaf.shape), leaf.dtype, leaf.key_impl, leaf.path, ragged=True)
            for leaf in rows.leaves
        ]
        mask = LeafSpec((length,), np.dtype(np.bool_), None, f"[{MASK!r}]", ragged=True)
        leaves.insert(mask_at, mask)
        super().__init__(leaves, treedef)
        self._rows = rows
        self._ends = ends
        self._buckets = tuple(buckets)
        self._mask_at = mask_at

    def __len__(self) -> int:
        return len(self._ends)

    @property
    def buckets(self) -> tuple[int, ...]:
        return self._buckets

    @property
    def usual_rows(self) -> float:
        return len(self._rows) / max(len(self._ends), 1)

    def origin(self, leaf: int, index: tuple[int, ...]) -> tuple[Source, int, tuple[int, ...]]:
        if leaf == self._mask_at:
            return self, leaf, index
        member, row, *rest = index
        first = int(self._bounds(np.array([member]))[0][0])
        return self._rows, leaf - (leaf > self._mask_at), (first + row, *rest)

    def select(self, leaves: Sequence[int]) -> tuple[Source, Sequence[int]]:
        at = self._mask_at
        used = [leaf - (leaf > at) for leaf in leaves if leaf != at]
        rows, order = self._rows.select(used or [0])
        if rows is self._rows:
            return self, range(len(self.leaves))
        numbers = [*(leaf for leaf in order if leaf < at), at]
        numbers += [leaf + 1 for leaf in order if leaf >= at]
        place = numbers.index(at)
        return RaggedSource(rows, self._ends, self._buckets, place), numbers

    def rows_of(self, which: Which) -> np.ndarray:
        starts, ends = self._bounds(which)
        return ends - starts

    def _at(self, which: Which) -> list[np.ndarray]:
        return self._padded(*self._members(which), self._buckets[-1])

    def _short(self, which: Which) -> list[np.ndarray]:
        rows, lengths = self._members(which)
        longest = lengths.max(initial=0)
        return self._padded(rows, lengths, next(b for b in self._buckets if b >= longest))

    def _members(self, which: Which) -> tuple[list[np.ndarray], np.ndarray]:
        """The rows of members, one after the other, and how many each member has."""
        starts, ends = self._bounds(which)
        lengths = ends - starts
        if isinstance(which, slice):
            first, last = (int(starts[0]), int(ends[-1])) if len(ends) else (0, 0)
            return self._rows.read(first, last), lengths
        # Each row's number within its member, plus the first row of the member.
        within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        return take_members(self._rows, np.repeat(starts, lengths) + within), lengths

    def _bounds(self, which: Which) -> tuple[np.ndarray, np.ndarray]:
        """The first row of each member, and the end of its rows."""
        members = np.arange(which.start, which.stop) if isinstance(which, slice) else which
        (ends,) = self._ends._at(which)
        (before,) = self._ends._at(np.maximum(members - 1, 0))
        starts = np.where(members > 0, before, 0)
        wrong = np.flatnonzero((ends < starts) | (ends - starts > self._buckets[-1]))
        if len(wrong):
            raise SourceError(
                f"{self!r}: member {members[wrong[0]]} has {(ends - starts)[wrong[0]]} rows, "
                f"expected 0 to {self._buckets[-1]}; the source was changed after it was made."
            )
        return starts, ends

    def _padded(self, rows: list[np.ndarray], lengths: np.ndarray, length: int) -> list[np.ndarray]:
        mask = np.arange(length) < lengths[:, None]
        arrays = []
        for leaf, values in zip(self._rows.leaves, rows, strict=True):
            array = np.zeros((*mask.shape, *leaf.shape), leaf.dtype)
            array[mask] = values
            arrays.append(array)
        arrays.insert(self._mask_at, mask)
        return arrays

    def __str__(self) -> str:
        rows = "/".join(map(str, self._buckets))
        nbytes = members_bytes(self._rows)  # without padding
        return describe_source(self, f"padded to {rows} of {self._rows}", nbytes)


def from_ragged(rows: Any, lengths: Any, *, buckets: Sequence[int] | None = None) -> RaggedSource:
    """A placed input whose members have unequal numbers of rows, padded, with a mask.

        clients = bj.from_ragged({"x": x, "y": y}, rows_per_client)

        def loss(w, client):  # x: (rows, ...), y: (rows,), mask: (rows,)
            losses = jnp.square(client["x"] @ w - client["y"])
            return jnp.sum(losses, where=client["mask"]) / jnp.maximum(client["mask"].sum(), 1)

    A member is the dict of its rows with one more entry, "mask": True for rows, False for the zeros
    that they are padded with. Rows that are no dict become the entry "rows". Under `jax.jit` all
    members have the length of the longest. A run pads the members of a shard to the first of
    `buckets` in which they fit, and compiles each body once per bucket, provided that only bodies
    depend on the length. Neighbouring members of similar length need the least padding.

    Args:
      rows: tree of arrays of shape (total, ...), or a `Source`: the rows of member 0, then those of
        member 1, and so on.
      lengths: int[n], the number of rows of each member; 0 is allowed.
      buckets: lengths to pad to, ascending, the last one at least the longest member; by default
        up to eight multiples of 8, each about half of the next, down from the longest member.

    Returns:
      A `Source` of n dictionaries with the leaves of `rows`, padded to (length, ...), and "mask",
      bool[length].

    Raises:
      StructureError: `lengths` are no integers of shape (n,), or the rows have a leaf named "mask".
      PlacementError: the lengths are negative, or do not add up to the number of rows.
      SourceError: the longest member does not fit in the last bucket.
    """
    source = rows if isinstance(rows, Source) else from_arrays(rows)
    if isinstance(source, StreamSource) or buckets_of(source):
        raise SourceError(
            f"from_ragged, rows: found {source!r}, expected arrays or a source of known length "
            "whose members are single rows."
        )
    counts = np.asarray(lengths)
    if counts.ndim != 1 or counts.dtype.kind not in "iu":
        raise StructureError(
            f"from_ragged, lengths: found {counts.dtype}{list(counts.shape)}, expected integers of "
            "shape (n,), the number of rows of each member."
        )
    counts = counts.astype(np.int64)
    if counts.min(initial=0) < 0 or counts.sum() != len(source):
        raise PlacementError(
            f"from_ragged, lengths: found {len(counts)} lengths from {counts.min(initial=0)} that "
            f"add up to {counts.sum()}, expected lengths from 0 that add up to the {len(source)} "
            "rows."
        )
    chosen = _chosen_buckets(buckets, counts, source)
    ends = from_arrays(np.cumsum(counts))
    return RaggedSource(source, ends, tuple(chosen), *_place_of_mask(source))


def choose_buckets(lengths: np.ndarray) -> list[int]:
    """Default lengths to pad members to: about the longest, its half, and so on, if used."""
    longest = max(int(lengths.max(initial=0)), 1)
    ladder = sorted({-(-longest // (MULTIPLE << k)) * MULTIPLE for k in range(MAX_BUCKETS)})
    fits = {*np.searchsorted(ladder, lengths).tolist(), len(ladder) - 1}
    return [rows for i, rows in enumerate(ladder) if i in fits]


def _most_rows(rows: Source) -> int:
    """The largest bucket that is allowed."""
    return max(len(rows), ANY_ROWS) + MULTIPLE


def _chosen_buckets(buckets: Sequence[int] | None, lengths: np.ndarray, rows: Source) -> list[int]:
    """The buckets of a user, checked, or default ones for members of these lengths."""
    if buckets is None:
        return choose_buckets(lengths)
    chosen, most = list(map(int, buckets)), _most_rows(rows)
    if not chosen or chosen != sorted(set(chosen)) or chosen[0] < 1:
        raise SourceError(f"buckets: found {list(buckets)}, expected lengths from 1, ascending.")
    if chosen[-1] > most:
        raise SourceError(
            f"buckets: found {chosen[-1]}, expected at most {most}, for {len(rows)} rows of all "
            "members."
        )
    if lengths.max(initial=0) > chosen[-1]:
        member = int(lengths.argmax())
        raise SourceError(
            f"buckets: member {member} has {lengths[member]} rows, expected at most {chosen[-1]}, "
            "the last bucket."
        )
    return chosen


def _place_of_mask(rows: Source) -> tuple[int, PyTreeDef]:
    """The position of the mask among the leaves, and the tree of all leaves."""
    import jax

    tree = jax.tree_util.tree_unflatten(rows.treedef, range(len(rows.leaves)))
    if not isinstance(tree, dict):
        tree = {"rows": tree}
    if MASK in tree:
        raise StructureError(
            f"from_ragged, rows: found a leaf {MASK!r}, which is the name of the mask of rows; "
            "give it another name."
        )
    flat, treedef = jax.tree_util.tree_flatten({**tree, MASK: -1})
    return flat.index(-1), treedef
