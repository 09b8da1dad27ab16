"""How much of what is read is padding: of members of unequal length."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from beamjax._text import human_bytes
from beamjax.sources.source_base import LeafSpec, Source

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
