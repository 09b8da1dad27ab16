"""Reductions of members by key, for keys that are not known in advance.

`Rows` are the reduction of some members, with a row for each of their keys. `ByKey.merged` joins
them by sorting. The operations on rows are associative and commutative, so the bits of a result
depend only on the members.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import ml_dtypes  # noqa: F401  (registers bfloat16 and friends with numpy.dtype)
import numpy as np

from beamjax.numerics.accumulators import Extreme, OrderedProduct, from_keys, is_float, to_keys
from beamjax.numerics.exact_sum import ExactSum, divided, quotient, with_special
from beamjax.numerics.reducers import REDUCERS, REDUCTIONS, Fold, Reducer
from beamjax.numerics.rounding import round_pair, total_of
from beamjax.numerics.superaccumulator import LOWEST, WIDTH, split
from beamjax.storage.arrays import decode_arrays, encode_arrays

# Floats are added as the digits of long fixed-point numbers, as in `superaccumulator`, but as
# int64, for which NumPy can reduce runs of rows. Maxima compare integers. Products of floats, which
# round, have a row for each key and block of members until the end, and are then multiplied in the
# order of the blocks.

BLOCK_BYTES = 1 << 24
"""Approximate bytes of the rows of a block, which a worker reduces at once."""
MAX_BLOCK = 1 << 18
"""Largest number of members of a block: sums of so many digits of `WIDTH` + 1 bits fit in int64."""
MAX_WAITING = 16
"""Rows that wait to be merged at once; merging them one by one would sort the same rows again."""

State: TypeAlias = dict[str, np.ndarray]
"""What is known of a leaf: arrays with a row for each key, by name. Names of digits are numbers."""
Type: TypeAlias = tuple[tuple[int, ...], np.dtype]
"""The shape and dtype of a member of a leaf."""

_LOWEST = LOWEST[np.dtype(np.float64)]


@dataclass(frozen=True)
class Rows:
    """The reduction of some members, with a row for each of their keys."""

    # The codes of the keys (`key_codes`), ascending.
    keys: np.ndarray
    # int64, the number of members of each row.
    counts: np.ndarray
    # int64, the first member of the block of each row; 0 if the order of blocks does not matter.
    blocks: np.ndarray
    # For each leaf.
    states: tuple[State, ...]

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        arrays = [self.keys, self.counts, self.blocks]
        return sum(x.nbytes for x in [*arrays, *(x for s in self.states for x in s.values())])

    def take(self, rows: np.ndarray) -> Rows:
        """Some of the rows."""
        states = tuple({name: x[rows] for name, x in state.items()} for state in self.states)
        return Rows(self.keys[rows], self.counts[rows], self.blocks[rows], states)

    def encode(self) -> bytes:
        """The rows as bytes, for `decode`."""
        keys = self.keys
        if keys.dtype.kind == "S":
            keys = keys.view(np.uint8).reshape(len(keys), -1)
        others = [self.counts, self.blocks, *(x for s in self.states for x in s.values())]
        # Most blocks and special values are 0 in all rows.
        arrays = [keys, *(x if x.any() else x[:0] for x in others)]
        return encode_arrays(arrays, {"names": [list(state) for state in self.states]})

    @classmethod
    def decode(cls, data: bytes) -> Rows:
        """Undoes `encode`; raises ArrayFormatError for other bytes."""
        (keys, *others), meta = decode_arrays(data)
        arrays = (x if len(x) else np.zeros((len(keys), *x.shape[1:]), x.dtype) for x in others)
        counts, blocks = next(arrays), next(arrays)
        states = tuple({name: next(arrays) for name in names} for names in meta["names"])
        return cls(key_codes(keys) if keys.ndim == 2 else keys, counts, blocks, states)


@dataclass(frozen=True)
class ByKey:
    """A reduction of members by key."""

    # The reduction, as in `reduce_by_key`.
    op: str
    # A number, or a text of uint8[width] with zeros at its end.
    key: Type
    # For each leaf, the type of a member and the dtype of the result.
    members: tuple[Type, ...]
    results: tuple[np.dtype, ...]

    @property
    def _reducer(self) -> Reducer:
        """The reduction of the states; those of variances are sums."""
        return REDUCERS["sum" if self._fold else self.op]

    @property
    def _fold(self) -> Fold | None:
        reduction = REDUCTIONS[self.op]
        return reduction if isinstance(reduction, Fold) else None

    @property
    def row_bytes(self) -> int:
        """Approximate bytes of a row."""
        # Two int64, the key, and the values: mostly four digits where sums are exact.
        values = sum(_size(shape) * max(dtype.itemsize, 8) for shape, dtype in self.members)
        return (
            16
            + max(_size(self.key[0]), 8)
            + values * (4 if self._reducer.accumulator is ExactSum else 1)
        )

    def blocks(self, count: int) -> Iterator[tuple[int, int]]:
        """The ranges of members that make blocks."""
        size = min(max(BLOCK_BYTES // self.row_bytes, 1), MAX_BLOCK)
        for start in range(0, count, size):
            yield start, min(start + size, count)

    def of_block(self, keys: np.ndarray, leaves: Sequence[np.ndarray], start: int) -> Rows:
        """The reduction of a block of members; `start` is the first one of them."""
        codes = key_codes(keys)
        order = np.argsort(codes, kind="stable")
        codes = codes[order]
        first = _first_rows(codes[1:] != codes[:-1])
        counts = np.diff(np.append(first, len(codes)))
        is_ordered = self._reducer.accumulator is OrderedProduct
        blocks = np.full(len(first), start if is_ordered else 0, np.int64)
        pairs = zip(leaves, self.results, strict=True)
        states = [self._reduced(leaf[order], result, first) for leaf, result in pairs]
        return Rows(codes[first], counts, blocks, tuple(states))

    def _reduced(self, values: np.ndarray, result: np.dtype, first: np.ndarray) -> State:
        """The state of runs of members with equal keys, which begin at the rows `first`."""
        if self._adds_digits(result):
            return _digits((_squares if self._fold else _as_float64)(values), first)
        held = self._held(values, result)
        return {"values": _folded(self._ufunc, held, first)}

    def _adds_digits(self, result: np.dtype) -> bool:
        return self._reducer.accumulator is ExactSum and (result.kind == "c" or is_float(result))

    def _held(self, values: np.ndarray, result: np.dtype) -> np.ndarray:
        """Members in a form in which they are reduced without rounding, except for products."""
        if self._reducer.is_logical:
            return values != 0
        if self._reducer.accumulator is Extreme:
            parts = to_keys(np.ascontiguousarray(values).reshape(-1), self.op)
            return np.moveaxis(parts.reshape(len(parts), *values.shape), 0, -1)
        if result.kind == "c" or is_float(result):
            return values.astype(np.complex128 if result.kind == "c" else np.float64)
        # Integers wrap around in the result, whatever the width in which they are added.
        return values.astype(np.uint64 if result.kind == "u" else np.int64)

    @property
    def _ufunc(self) -> np.ufunc:
        """The operation that reduces two rows of an array of a state."""
        # Minima are maxima of integers in the reverse order.
        return np.maximum if self._reducer.accumulator is Extreme else self._reducer.ufunc

    def merged(self, parts: Iterable[Rows], blocks: bool = True) -> Rows:
        """The reduction of the members of several reductions; `blocks` keeps rows of blocks."""
        parts = list(parts)
        if len(parts) == 1 and blocks:
            return parts[0]
        keys = np.concatenate([part.keys for part in parts])
        numbers = np.concatenate([part.blocks for part in parts])
        # By key, and by block within a key.
        order = np.argsort(numbers, kind="stable")
        order = order[np.argsort(keys[order], kind="stable")]
        keys, numbers = keys[order], numbers[order]
        new = keys[1:] != keys[:-1]
        first = _first_rows(new | (numbers[1:] != numbers[:-1]) if blocks else new)
        counts = np.concatenate([part.counts for part in parts])[order]
        states = tuple(
            self._merged(
                [part.states[leaf] for part in parts],
                list(map(len, (p.keys for p in parts))),
                order,
                first,
            )
            for leaf in range(len(self.members))
        )
        return Rows(keys[first], np.add.reduceat(counts, first), numbers[first], states)

    def _merged(
        self, states: Sequence[State], lengths: Sequence[int], order: np.ndarray, first: np.ndarray
    ) -> State:
        merged: State = {}
        for name in sorted({name for state in states for name in state}):
            like = next(state[name] for state in states if name in state)
            columns = [
                state[name] if name in state else np.zeros((rows, *like.shape[1:]), like.dtype)
                for state, rows in zip(states, lengths, strict=True)
            ]
            merged[name] = _folded(self._ufunc, np.concatenate(columns)[order], first)
        return _carried(merged) if "special" in merged else merged

    def added(self, waiting: list[Rows], rows: Iterable[Rows]) -> list[Rows]:
        """Rows that wait to be merged, with more of them."""
        waiting = [*waiting, *rows]
        if len(waiting) <= MAX_WAITING:
            return waiting
        # Merges the latest, from the first one that is not much longer than all after it together.
        # So each row is merged a few times, even if all keys are different.
        first, after = len(waiting) - 1, len(waiting[-1].keys)
        while first and len(waiting[first - 1].keys) <= 2 * after:
            first -= 1
            after += len(waiting[first].keys)
        return [*waiting[:first], self.merged(waiting[first:])]

    def divided(self, rows: Rows, parts: int) -> Iterator[tuple[int, Rows]]:
        """Divides rows among parts by a hash of their keys."""
        part = (hashed(rows.keys) % np.uint64(parts)).astype(np.int64)
        order = np.argsort(part, kind="stable")
        numbers, starts = np.unique(part[order], return_index=True)
        for number, some in zip(numbers.tolist(), np.split(order, starts[1:]), strict=True):
            yield number, rows.take(some)

    def finished(self, parts: Iterable[Rows]) -> list[np.ndarray]:
        """The keys, ascending, and the leaves of the result."""
        parts = list(parts)
        if not parts:
            pairs = zip(self.members, self.results, strict=True)
            types = [self.key, *((shape, result) for (shape, _), result in pairs)]
            return [np.zeros((0, *shape), dtype) for shape, dtype in types]
        rows = self.merged(parts, blocks=False)
        members = zip(rows.states, self.members, self.results, strict=True)
        shape, dtype = self.key
        leaves = [
            self._finished(state, rows.counts, shape, member, result)
            for state, (shape, member), result in members
        ]
        return [keys_of(rows.keys, shape, dtype), *leaves]

    def _finished(
        self,
        state: State,
        counts: np.ndarray,
        shape: tuple[int, ...],
        member: np.dtype,
        result: np.dtype,
    ) -> np.ndarray:
        if self._fold:
            values = _variances(state, counts)
            if member.kind == "c":
                values = values.reshape(len(counts), -1, 2).sum(axis=2)
            assert self._fold.of_variance is not None
            with np.errstate(all="ignore"):
                values = self._fold.of_variance(values).astype(result)
        elif "special" in state:
            values = _rounded(state, counts if self._reducer.divides else None, result)
        elif self._reducer.accumulator is Extreme:
            parts = np.moveaxis(state["values"], -1, 0)
            values = from_keys(parts.reshape(len(parts), -1), member, self.op)
        else:
            with np.errstate(all="ignore"):
                values = state["values"].astype(result)
        return values.reshape(len(counts), *shape).astype(result, copy=False)


def reduced(by_key: ByKey, keys: np.ndarray, leaves: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The keys and the leaves of the result for members in memory."""
    blocks = by_key.blocks(len(keys))
    return by_key.finished(
        by_key.of_block(keys[start:stop], [leaf[start:stop] for leaf in leaves], start)
        for start, stop in blocks
    )


# --- keys


def key_codes(keys: np.ndarray) -> np.ndarray:
    """Keys as uint64, or bytes for texts, with the same order, and equal for equal keys."""
    if keys.ndim == 2:
        width = max(keys.shape[1], 1)
        padded = np.zeros((len(keys), width), np.uint8)
        padded[:, : keys.shape[1]] = keys
        return padded.view(f"S{width}")[:, 0]
    if keys.dtype.kind in "bu":
        return keys.astype(np.uint64)
    if keys.dtype.kind == "i":
        return keys.astype(np.int64).view(np.uint64) ^ _TOP
    # -0 and 0 are one key, and so are all NaN, which come last. As in `accumulators`, the bits of
    # negative numbers are flipped.
    wide = keys.astype(np.float64) + 0.0
    wide[np.isnan(wide)] = np.nan
    bits = wide.view(np.uint64)
    return np.where(bits >= _TOP, ~bits, bits | _TOP)


def keys_of(codes: np.ndarray, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Undoes `key_codes`."""
    if codes.dtype.kind == "S":
        return codes.view(np.uint8).reshape(len(codes), -1)[:, : shape[0]]
    if dtype.kind in "bu":
        return codes.astype(dtype)
    if dtype.kind == "i":
        return (codes ^ _TOP).view(np.int64).astype(dtype)
    return np.where(codes >= _TOP, codes ^ _TOP, ~codes).view(np.float64).astype(dtype)


_TOP = np.uint64(1 << 63)


def text_of(keys: np.ndarray) -> np.ndarray:
    """Keys as users read them: texts of uint8 (n, width) as str (n,), and numbers as they are."""
    if keys.ndim == 1:
        return keys
    return np.char.decode(key_codes(keys), "utf-8", "surrogateescape")


def hashed(codes: np.ndarray) -> np.ndarray:
    """Pseudorandom uint64 (n,) of the codes of keys."""
    # The finalizer of SplitMix64: Steele, Lea, Flood, "Fast splittable pseudorandom number
    # generators", OOPSLA 2014, figure 16.
    words = [codes]
    if codes.dtype.kind == "S":
        whole = codes.astype(f"S{-(-codes.itemsize // 8) * 8}")
        words = list(whole.view("<u8").reshape(len(codes), -1).T)
    x = np.zeros(len(codes), np.uint64)
    for word in words:
        x = (x ^ word) + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    return x


# --- exact sums of runs of rows


def _as_float64(values: np.ndarray) -> list[np.ndarray]:
    """Float64 arrays (n, coordinates), the exact sum of which is `values`."""
    # A complex number is two coordinates. An int of 64 bits has more bits than a double, so it is
    # high * 2^32 + low.
    flat = values.reshape(len(values), -1)
    if flat.dtype.kind == "c":
        return [np.ascontiguousarray(flat, np.complex128).view(np.float64)]
    if flat.dtype.kind in "iu" and flat.dtype.itemsize == 8:
        high = flat >> flat.dtype.type(32)
        low = flat & flat.dtype.type(2**32 - 1)
        return [high.astype(np.float64) * 2.0**32, low.astype(np.float64)]
    return [flat.astype(np.float64)]


def _squares(values: np.ndarray) -> list[np.ndarray]:
    """Float64 arrays (n, 2 * coordinates), the exact sum of which is `values` and their squares."""
    flat = values.reshape(len(values), -1)
    if flat.dtype.kind == "c":
        flat = np.ascontiguousarray(flat, np.complex128).view(np.float64)
    x = flat.astype(np.float64)
    # A square is the sum of two doubles, the rounded square and the rest. The rest is computed from
    # halves of 26 bits, whose products are doubles: x = high + low, so the square is
    # high^2 + 2*high*low + low^2 (Dekker, "A floating-point technique", 1971).
    with np.errstate(all="ignore"):
        square, left = x * x, x * (2.0**27 + 1)
        high = left - (left - x)
        low = x - high
        rest = ((high * high - square) + 2 * high * low) + low * low
    rest = np.where(np.isfinite(square) & np.isfinite(rest), rest, 0.0)
    zeros = np.zeros_like(x)
    return [np.concatenate([x, square], 1), np.concatenate([zeros, rest], 1)]


def _digits(terms: Sequence[np.ndarray], first: np.ndarray) -> State:
    """The digits of the sums of runs of rows; infinities and NaN are added apart."""
    # Digit k is a multiple of 2^(WIDTH * k + _LOWEST), as in `superaccumulator.Digits`.
    state: State = {"special": np.zeros((len(first), terms[0].shape[1]))}
    for rest in terms:
        finite = np.isfinite(rest)
        if not finite.all():
            special = np.where(finite, 0.0, rest)
            state["special"] = _folded(np.add, special, first) + state["special"]
            rest = np.where(finite, rest, 0.0)
        top = max(float(rest.max(initial=0)), -float(rest.min(initial=0)))
        for key, digit in split(rest, top):
            total = np.add.reduceat(digit.astype(np.int64), first, axis=0)
            state[str(key)] = state[str(key)] + total if str(key) in state else total
        # Two terms of MAX_BLOCK rows could overflow without a carry.
        state = _carried(state)
    return state


def _carried(state: State) -> State:
    """Brings each digit to [-2^(WIDTH-1), 2^(WIDTH-1)), and drops digits that are 0 in all rows."""
    digits = {int(name): x for name, x in state.items() if name != "special"}
    # A number has only one form with such digits, so they depend on the sum alone.
    half = np.int64(1 << (WIDTH - 1))
    for key in range(min(digits, default=0), max(digits, default=-1) + 2):
        if key in digits:
            carry = (digits[key] + half) >> WIDTH
            if carry.any():
                digits[key] = digits[key] - (carry << WIDTH)
                digits[key + 1] = digits[key + 1] + carry if key + 1 in digits else carry
    carried: State = {str(key): x for key, x in sorted(digits.items()) if x.any()}
    return {"special": state["special"], **carried}


def _rounded(state: State, counts: np.ndarray | None, result: np.dtype) -> np.ndarray:
    """The numbers that digits stand for, over `counts` if given, rounded once to a dtype."""
    real = np.dtype(f"f{result.itemsize // 2}") if result.kind == "c" else result
    special = state["special"].reshape(-1)
    digits = {int(name): x.reshape(-1) for name, x in state.items() if name != "special"}
    divisor = 1 if counts is None else np.repeat(counts, len(special) // len(counts))
    integer = lambda at: sum(int(x[at]) << (key * WIDTH) for key, x in digits.items())
    with np.errstate(all="ignore"):
        terms = (
            np.ldexp(digits[key].astype(np.float64), key * WIDTH + _LOWEST)
            for key in sorted(digits, reverse=True)
        )
        pair = divided(*total_of(terms, len(special)), divisor, _LOWEST, integer)
        values = with_special(round_pair(*pair, real), special)
    return values.view(result) if result.kind == "c" else values


def _variances(state: State, counts: np.ndarray) -> np.ndarray:
    """Float64 variances (rows, coordinates) of members with such squares."""
    special = state["special"]
    digits = {int(name): x for name, x in state.items() if name != "special"}
    # The variance is (n * sum of squares - (sum)^2) / n^2, in which floats would cancel. So the
    # digits become Python's integers, of which only the quotient is rounded.
    lowest = min(digits, default=0)
    total = np.zeros(special.shape, object)
    for key, digit in digits.items():
        total = total + (digit.astype(object) << WIDTH * (key - lowest))
    unit = WIDTH * lowest + _LOWEST
    sums, squares = np.split(total, 2, axis=1)
    number = counts.astype(object)[:, None]
    # Sums and sums of squares are these integers times 2^unit.
    down, up = max(-unit, 0), max(unit, 0)
    above = (number * squares << down + up) - (sums * sums << 2 * up)
    variances = _quotients(above, number * number << 2 * down).astype(np.float64)
    no_mean, no_square = np.split(special, 2, axis=1)
    return np.where(no_mean != 0, np.nan, np.where(no_square != 0, no_square, variances))


_quotients = np.frompyfunc(lambda above, below: quotient(above, below)[0], 2, 1)


def _folded(ufunc: Any, values: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Reduces runs of rows, which begin at the rows `first`."""
    with np.errstate(all="ignore"):
        return ufunc.reduceat(values, first, axis=0, dtype=values.dtype)


def _first_rows(new: np.ndarray) -> np.ndarray:
    """The rows that begin a run; `new` says it of each row but the first."""
    return np.flatnonzero(np.concatenate([[True], new]))


def _size(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape, dtype=np.int64))
