"""Pads members of unequal length, and checks that results do not depend on the padding."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from beamjax._text import human_bytes
from beamjax.errors import StructureError
from beamjax.plan.steps import FusedBuffer
from beamjax.sources.source_base import MASK, LeafSpec, Source, Which
from beamjax.sources.source_kinds import RaggedMembers, buckets_of
from beamjax.spans import count

MORE_PADDING = 2
"""The check pads members to this multiple of the longest one. A mean over the padding then halves,
which rounding can't explain."""

FAR = 0.05
"""Largest difference of results, as a share of the largest value, that the check accepts. Sums in
another order differ by less."""

NOISE = 16
"""Differences below this many units of rounding of the largest operand are accepted: a value that
should be zero, such as a gradient at the optimum, consists of rounding errors, which differ with
the length."""


def padded_rows(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Pads the rows of members with zeros, so that a member has this shape."""
    if array.shape[1:] == shape:
        return array
    longer = np.zeros((len(array), *shape), array.dtype)
    longer[:, : array.shape[1]] = array
    return longer


def without_padding(arrays: Sequence[np.ndarray], ragged: Sequence[int]) -> list[np.ndarray] | None:
    """Replaces the padding of each member by repetitions of its own rows."""
    # The check then compares results without padding to results with padding. Padding in both
    # would hide some effects: the maximum of negative rows is 0 with any padding.
    if not len(arrays[ragged[0]]):
        return None
    # A row that is zero in all arrays, the mask included if the body reads it, is padding.
    has_row: np.ndarray = np.zeros(arrays[ragged[0]].shape[:2], np.bool_)
    for i in ragged:
        x = arrays[i]
        has_row |= (x != 0).any(axis=tuple(range(2, x.ndim)))
    counts = has_row.sum(axis=1)
    if not counts.any():
        return None
    # The rows of each member in order, before its padding. A member without rows gets those of the
    # first member that has some.
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
    """Compares the results of a body for the same members with less and with more padding."""
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
    """Pairs the results of a body with less padding with those with more, of equal shapes."""
    for (left, right), x, y in zip(buffers, less, more, strict=False):
        for a, b in zip(left.reductions, right.reductions, strict=True):
            if a.size == b.size:
                yield x[a.offset :][: a.size], y[b.offset :][: b.size]
    rest = zip(less[len(buffers) :], more[len(buffers) :], strict=True)
    yield from ((x, y) for x, y in rest if x.shape == y.shape)


def _largest(array: np.ndarray) -> float:
    """The largest finite magnitude in a float array; 0 for other arrays."""
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
    # Not for 16-bit floats, of which `NOISE` units of rounding are a large difference.
    is_precise = left.dtype.kind in "fc" and left.dtype.itemsize >= 4
    noise = NOISE * operand * np.finfo(left.dtype).eps if is_precise else 0.0
    return bool(np.abs(a[known] - b[known]).max(initial=0) > FAR * largest + noise)


def _some(array: np.ndarray) -> str:
    return np.array2string(array.ravel()[:4], precision=4, separator=", ")


# --- the share of padding in the bytes that are read

SCANNED_MEMBERS = 1 << 20
"""Members whose lengths are read at a time."""
SAMPLED_SHARDS = 64
"""Number of shards that are sampled to estimate the padding of all."""


def count_padding(
    leaves: Sequence[LeafSpec], arrays: Sequence[np.ndarray], used: Sequence[int], mask: int
) -> None:
    """Counts the padding of ragged members that this thread has read."""
    rows = arrays[mask]
    short = rows.size - int(np.count_nonzero(rows))
    for number in used:
        if leaves[number].ragged and short:
            count("bytes_padding", arrays[number].nbytes * short // rows.size)


def mask_of(source: Source) -> int | None:
    """The number of the mask among the leaves; None if members are not ragged."""
    path = f"[{MASK!r}]"
    masks = (i for i, leaf in enumerate(source.leaves) if leaf.path == path and leaf.ragged)
    return next(masks, None)


def bucket_shares(source: Source, shard_size: int) -> np.ndarray | None:
    """Estimates the share of the members that are padded to each bucket."""
    n, buckets = len(source), np.array(buckets_of(source))
    counts = np.zeros(len(buckets))
    starts = range(0, n, shard_size)
    for k in np.unique(np.linspace(0, len(starts) - 1, SAMPLED_SHARDS).astype(int)):
        lengths = _rows_of(source, slice(starts[k], min(starts[k] + shard_size, n)))
        if lengths is None:
            return None
        counts[np.searchsorted(buckets, lengths.max())] += len(lengths)
    return counts / counts.sum()


def _rows_of(source: Source, which: Which) -> np.ndarray | None:
    return source.rows_of(which) if isinstance(source, RaggedMembers) else None


def padding_text(source: Source, shard_size: int, short: bool) -> str:
    """The bytes that a pass over ragged members reads, and the share of padding; "" if unknown."""
    n, buckets = len(source), np.array(buckets_of(source))
    shards = np.zeros(len(buckets), np.int64)
    rows = padded = 0
    step = max(1, SCANNED_MEMBERS // shard_size) * shard_size
    for start in range(0, n, step):
        lengths = _rows_of(source, slice(start, min(start + step, n)))
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
    padded_to = ", ".join(f"{m} of {b}" for m, b in zip(shards, buckets.tolist(), strict=True) if m)
    return (
        f"A pass reads {human_bytes(padded * row)} of them, {share:.1%} of which is padding, for "
        f"{human_bytes(rows * row)} of data; shards and the rows they are padded to: {padded_to}."
    )
