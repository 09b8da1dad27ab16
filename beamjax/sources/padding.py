"""Pads members of unequal length, and checks that bodies do not read the padding."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from beamjax._text import human_bytes
from beamjax.errors import StructureError
from beamjax.plan.steps import FusedBuffer
from beamjax.sources.source_base import LeafSpec, Source

MORE_PADDING = 2
"""Times the length of the longest member, to which members are padded for the check: a mean over
padding then halves, which no rounding does."""

FAR = 0.05
"""The share of the largest value by which results may differ: more than sums of other order do."""

NOISE = 16
"""Units of rounding of the largest operand below which a difference is no evidence: what should be
zero, such as a gradient at the optimum, is rounding errors of other operations at each length."""


def padded_rows(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Members of fewer rows with zeros up to this shape of one."""
    if array.shape[1:] == shape:
        return array
    longer = np.zeros((len(array), *shape), array.dtype)
    longer[:, : array.shape[1]] = array
    return longer


def without_padding(arrays: Sequence[np.ndarray], ragged: Sequence[int]) -> list[np.ndarray] | None:
    """Members with rows of their own, once more, in the place of their padding.

    Padding that is there already can hide more of it: the maximum of negative rows is 0 with any.

    Args:
      arrays: (members, ...) each.
      ragged: which of them have padded rows, (members, rows, ...). A mask is among them if the body
        reads it, so that rows that are all zero are padding, or can be left out as well.

    Returns:
      The arrays; None if no member has a row.
    """
    if not len(arrays[ragged[0]]):
        return None
    has_row: np.ndarray = np.zeros(arrays[ragged[0]].shape[:2], np.bool_)
    for i in ragged:
        x = arrays[i]
        has_row |= (x != 0).any(axis=tuple(range(2, x.ndim)))
    counts = has_row.sum(axis=1)
    if not counts.any():
        return None
    # Rows first, in their order; members without rows have those of one that has some.
    order = np.argsort(~has_row, axis=1, kind="stable")
    member = np.where(counts > 0, np.arange(len(counts)), np.argmax(counts > 0))
    repeated = np.arange(has_row.shape[1]) % counts[member][:, None]
    rows = np.take_along_axis(order[member], repeated, axis=1)
    own = np.arange(has_row.shape[1])
    rows = np.where(has_row, own, rows)
    members = np.where(has_row, np.arange(len(counts))[:, None], member[:, None])
    return [a[members, rows] if i in ragged else a for i, a in enumerate(arrays)]


def check_padding(
    shapes: Sequence[tuple[int, ...]],
    pairs: Iterable[tuple[np.ndarray, np.ndarray]],
    operands: Iterable[np.ndarray] = (),
) -> None:
    """Compares what a body gives for the same members with less and with more padding.

    Args:
      shapes: of a member of each operand, with less padding.
      pairs: values that the body gave with less, and the same with more.
      operands: what the body computed with.

    Raises:
      StructureError: they have nothing to do with each other.
    """
    largest = max(map(_largest, operands), default=0.0)
    for left, right in pairs:
        if _far(left, right, largest):
            raise StructureError(
                f"for members of shapes {', '.join(str(list(shape)) for shape in shapes)}, found "
                f"{_some(left)}, but {_some(right)} when they are padded further; expected a body "
                "whose results do not depend on padding. Leave out the rows whose mask is False "
                "(jnp.sum(x, where=mask), or weights of 0), and count mask.sum() rows rather than "
                "x.shape[0]; or, where it has to depend on the length, as with permutations of all "
                "rows, pad the members yourself and give arrays."
            )


def same_values(
    buffers: Sequence[tuple[FusedBuffer, FusedBuffer]],
    less: Sequence[np.ndarray],
    more: Sequence[np.ndarray],
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """What a body gives with less and with more padding, value by value.

    Values whose shapes depend on the padding are left out.

    Args:
      buffers: of both bodies.
      less: the vector of each buffer, then other arrays.
      more: likewise.
    """
    for (left, right), x, y in zip(buffers, less, more, strict=False):
        for a, b in zip(left.reductions, right.reductions, strict=True):
            if a.size == b.size:
                yield x[a.offset :][: a.size], y[b.offset :][: b.size]
    rest = zip(less[len(buffers) :], more[len(buffers) :], strict=True)
    yield from ((x, y) for x, y in rest if x.shape == y.shape)


def _largest(array: np.ndarray) -> float:
    """The largest magnitude among the numbers of a float array."""
    if array.dtype.kind in "biu" or not array.size:
        return 0.0
    try:
        magnitude = np.abs(array.astype(np.complex128))
    except (TypeError, ValueError):
        return 0.0
    return float(magnitude[np.isfinite(magnitude)].max(initial=0))


def _far(left: np.ndarray, right: np.ndarray, operand: float) -> bool:
    if left.shape != right.shape:
        return True
    is_complex = left.dtype.kind == "c"
    a, b = (x.astype(np.complex128 if is_complex else np.float64) for x in (left, right))
    known = np.isfinite(a) & np.isfinite(b)
    if (np.isfinite(a) != np.isfinite(b)).any():
        return True
    largest = max(np.abs(b[known]).max(initial=0), np.abs(a[known]).max(initial=0))
    noise = NOISE * operand * np.finfo(left.dtype).eps if left.dtype.kind in "fc" else 0.0
    if left.dtype.itemsize < 4:
        noise = 0.0
    return bool(np.abs(a[known] - b[known]).max(initial=0) > FAR * largest + noise)


def _some(array: np.ndarray) -> str:
    return np.array2string(array.ravel()[:4], precision=4, separator=", ")


# --- how much of what is read is padding

SCANNED = 1 << 20
"""Lengths that are looked at together."""
SAMPLED_SHARDS = 64
"""How many shards are sampled to estimate the padding of all."""


class _Local(threading.local):
    def __init__(self) -> None:
        self.nbytes = 0


_local = _Local()


def padding_bytes() -> int:
    """Bytes of padding that this thread has read. Only differences mean anything."""
    return _local.nbytes


def count_padding(
    leaves: Sequence[LeafSpec], arrays: Sequence[np.ndarray], used: Sequence[int], mask: int
) -> None:
    """Ragged members were read.

    Args:
      leaves: of their source.
      arrays: what was read of each.
      used: the numbers of those that count.
      mask: the number of the leaf that marks rows, as opposed to padding.
    """
    rows = arrays[mask]
    short = rows.size - int(np.count_nonzero(rows))
    for number in used:
        if leaves[number].ragged and short:
            _local.nbytes += arrays[number].nbytes * short // rows.size


def mask_of(source: Source) -> int | None:
    """The number of the leaf that marks rows, if members are ragged."""
    names = [i for i, leaf in enumerate(source.leaves) if leaf.path == "['mask']" and leaf.ragged]
    return names[0] if names else None


def bucket_shares(source: Source, shard_size: int) -> np.ndarray | None:
    """float64[buckets]: the part of the members in shards that are padded to each, about.

    Args:
      source: of ragged members.
      shard_size: members that are padded alike.

    Returns:
      See above; None if the lengths are not known before the members are read.
    """
    n, buckets = len(source), np.array(source.buckets)
    counts = np.zeros(len(buckets))
    starts = range(0, n, shard_size)
    for k in np.unique(np.linspace(0, len(starts) - 1, SAMPLED_SHARDS).astype(int)):
        lengths = source.rows_of(starts[k], min(starts[k] + shard_size, n))
        if lengths is None:
            return None
        counts[np.searchsorted(buckets, lengths.max())] += len(lengths)
    return counts / counts.sum()


def padding_text(source: Source, shard_size: int, short: bool) -> str:
    """What a pass over ragged members reads, and how much of that is padding.

    Args:
      source: of the members.
      shard_size: members that are padded alike.
      short: whether a shard is padded to the first bucket that holds its members.

    Returns:
      A line; "" if the lengths are not known before the members are read.
    """
    n, buckets = len(source), np.array(source.buckets)
    shards = np.zeros(len(buckets), np.int64)
    rows = padded = 0
    step = max(1, SCANNED // shard_size) * shard_size
    for start in range(0, n, step):
        lengths = source.rows_of(start, min(start + step, n))
        if lengths is None:
            return ""
        firsts = np.arange(0, len(lengths), shard_size)
        longest = np.maximum.reduceat(lengths, firsts)
        chosen = np.searchsorted(buckets, longest) if short else np.full(len(firsts), -1)
        rows += int(lengths.sum())
        padded += int((buckets[chosen] * np.diff([*firsts, len(lengths)])).sum())
        np.add.at(shards, chosen, 1)
    ragged = [leaf for leaf in source.leaves if leaf.ragged]
    row = sum(leaf.nbytes // leaf.shape[0] for leaf in ragged if leaf.shape[0])
    share = 1 - rows / padded if padded else 0.0
    each = ", ".join(f"{m} of {b}" for m, b in zip(shards, buckets.tolist(), strict=True) if m)
    return (
        f"A pass reads {human_bytes(padded * row)} of them, {share:.1%} of which is padding, for "
        f"{human_bytes(rows * row)} of data; shards and the rows they are padded to: {each}."
    )
