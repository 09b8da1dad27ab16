"""Every accumulator: any order, any bundling, bytes in between, and bytes that are none."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from beamjax.accumulators import Accumulator, decode_accumulator, make_accumulator
from beamjax.arrays import decode_arrays, encode_arrays
from beamjax.digits import BLOCK
from beamjax.dyadic import DyadicTree
from beamjax.errors import ArrayFormatError, OptionsError, StructureError, WorkerError

NARROW = [
    *("float8_e5m2", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e4m3b11fnuz"),
    *("float8_e3m4", "float8_e4m3", "float4_e2m1fn", "bfloat16"),
]
FLOATS = ["float16", "float32", "float64", *NARROW]
INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
LANES = [
    *itertools.product(["sum"], ["float32", "float64", "complex64", "complex128", *INTEGERS]),
    *itertools.product(["prod"], ["float32", "float64", "complex64", "complex128", *INTEGERS]),
    *itertools.product(["max", "min"], [*FLOATS, *INTEGERS, "int4", "uint4", "int2", "bool"]),
    *itertools.product(["max", "min"], ["complex64", "complex128"]),
    *itertools.product(["any", "all"], ["bool"]),
]


def dtype_of(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


def random_values(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Values of any bits that mean something in the dtype."""
    if dtype.kind == "b":
        return rng.integers(0, 2, shape).astype(np.bool_)
    if dtype.kind == "V" or dtype.name in ("float16", "float8_e5m2"):
        return rng.choice(np.arange(-9, 9), shape).astype(np.float32).astype(dtype)
    bits = rng.integers(0, 256, (*shape, dtype.itemsize), dtype=np.uint8)
    values = bits.view(dtype).reshape(shape)
    if dtype.kind in "fc":
        parts = values.view(f"f{dtype.itemsize // (2 if dtype.kind == 'c' else 1)}")
        parts[rng.random(parts.shape) < 0.2] = 0.0
        parts[rng.random(parts.shape) < 0.2] *= -0.0
    return values


def in_any_tree(
    vectors: np.ndarray, make: Callable[[], Accumulator], rng: random.Random
) -> Accumulator:
    """The vectors as shards 0, 1, ... in a random order, bundled and merged at random."""
    order = list(enumerate(vectors))
    rng.shuffle(order)
    parts = [make() for _ in range(rng.randint(1, len(order) + 1))]
    for shard, vector in order:
        rng.choice(parts).add(vector, shard)
    while len(parts) > 1:
        rng.shuffle(parts)
        other = parts.pop()
        if rng.random() < 0.3:
            parts[0] = decode_accumulator(parts[0].encode())
        parts[0].merge(decode_accumulator(other.encode()) if rng.random() < 0.5 else other)
    return parts[0]


@pytest.mark.parametrize(("lane", "name"), LANES)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_bits_do_not_depend_on_the_order(lane: str, name: str) -> None:
    dtype = dtype_of(name)
    for seed in range(8):
        values = random_values(np.random.default_rng(seed), (11, 6), dtype)
        before = values.tobytes()
        results, encoded = set(), set()
        for tree in range(6):
            make = lambda: make_accumulator(lane, dtype, 6)
            accumulator = in_any_tree(values, make, random.Random(tree))
            results.add(accumulator.total(0, 6, dtype).tobytes())
            encoded.add(accumulator.encode())
        assert len(results) == 1
        assert len(encoded) == 1
        assert values.tobytes() == before
        again = decode_accumulator(encoded.pop())
        assert again.total(2, 5, dtype).tobytes() == accumulator.total(2, 5, dtype).tobytes()
        assert accumulator.total(0, 6, dtype)[2:5].tobytes() == again.total(2, 5, dtype).tobytes()


@pytest.mark.parametrize(("lane", "name"), LANES)
def test_an_empty_accumulator_changes_nothing(lane: str, name: str) -> None:
    dtype = dtype_of(name)
    values = random_values(np.random.default_rng(1), (1, 4), dtype)
    for mode in ("exact", "fast"):
        empty = decode_accumulator(make_accumulator(lane, dtype, 4, mode=mode).encode())
        full = make_accumulator(lane, dtype, 4, mode=mode)
        full.add(values[0], 3)
        alone = full.encode()
        full.merge(empty)
        empty.merge(full)
        assert empty.encode() == full.encode() == alone
        nothing = make_accumulator(lane, dtype, 0, mode=mode)
        nothing.add(values[0, :0], 0)
        assert decode_accumulator(nothing.encode()).total(0, 0, dtype).shape == (0,)
    identity = make_accumulator(lane, dtype, 4).total(0, 4, dtype)
    other = make_accumulator(lane, dtype, 4)
    other.add(identity, 9)
    other.add(values[0], 3)
    only = make_accumulator(lane, dtype, 4)
    only.add(values[0], 3)
    assert other.total(0, 4, dtype).tobytes() == only.total(0, 4, dtype).tobytes()


@pytest.mark.parametrize("name", [*FLOATS, *INTEGERS[:3], *INTEGERS[4:7], "int4", "uint4", "bool"])
@pytest.mark.parametrize("lane", ["max", "min"])
def test_extremes_agree_with_jnp(lane: str, name: str) -> None:
    dtype = dtype_of("float32" if name == "float64" else name)
    values = random_values(np.random.default_rng(5), (7, 50), dtype)
    if dtype.name in FLOATS:
        values[:, :4] = np.array([[0.0, -0.0, 0.0, -0.0]], np.float32).astype(dtype)
        values[3, 2], values[3, 3] = dtype.type(-0.0), dtype.type(0.0)
        values[2, 9] = np.array(np.nan, np.float32).astype(dtype)
    accumulator = in_any_tree(values, lambda: make_accumulator(lane, dtype, 50), random.Random(0))
    wanted = np.asarray(getattr(jnp, lane)(jnp.asarray(values), axis=0))
    found = accumulator.total(0, 50, dtype)
    nan = found != found
    assert (nan == (wanted != wanted)).all()
    assert found[~nan].tobytes() == wanted[~nan].tobytes()


def test_complex_extremes_go_by_the_real_part_first() -> None:
    values = np.array(
        [
            [1 + 5j, 1 + 2j, complex(0.0, 1), complex(np.nan, 1), complex(1, np.nan)],
            [2 + 1j, 1 + 3j, complex(-0.0, 2), 7 + 0j, 2 + 0j],
        ],
        np.complex64,
    )
    wanted = {
        "max": [2 + 1j, 1 + 3j, 2j, complex(np.nan, 1), 2 + 0j],
        "min": [1 + 5j, 1 + 2j, 1j, complex(np.nan, 1), complex(1, np.nan)],
    }
    for lane in ("max", "min"):
        accumulator = in_any_tree(
            values,
            lambda: make_accumulator(lane, values.dtype, 5),  # noqa: B023
            random.Random(0),
        )
        np.testing.assert_array_equal(
            accumulator.total(0, 5, values.dtype), np.array(wanted[lane], np.complex64)
        )
        np.testing.assert_array_equal(
            accumulator.total(0, 3, values.dtype),
            np.asarray(getattr(jnp, lane)(values, axis=0))[:3],
        )


@settings(max_examples=200, deadline=None)
@given(shards=st.sets(st.integers(0, 40), min_size=1), rng=st.randoms(use_true_random=False))
def test_the_dyadic_tree_depends_on_the_shards_alone(shards: set[int], rng: random.Random) -> None:
    def folded(order: list[int], bundles: int) -> str:
        trees = [DyadicTree(lambda a, b: f"({a} {b})") for _ in range(bundles)]
        for shard in order:
            rng.choice(trees).add(str(shard), shard)
        while len(trees) > 1:
            rng.shuffle(trees)
            trees[0].merge(trees.pop())
        return trees[0].fold()

    alone = folded(sorted(shards), 1)
    for bundles in (1, 2, 5):
        order = sorted(shards)
        rng.shuffle(order)
        assert folded(order, bundles) == alone
    assert [int(each) for each in alone.replace("(", "").replace(")", "").split()] == sorted(shards)


def test_shards_in_order_need_few_values() -> None:
    tree = DyadicTree(lambda a, b: a + b)
    most = 0
    for shard in range(1000):
        tree.add(1, shard)
        most = max(most, len(tree.nodes))
    assert tree.fold() == 1000
    assert most <= 10


@pytest.mark.parametrize("again", [0, 3, 4, 5, 6])
def test_a_shard_that_is_multiplied_twice_is_noticed(again: int) -> None:
    def twice(shards: list[int]) -> None:
        accumulator = make_accumulator("prod", np.float32, 1)
        for shard in shards:
            accumulator.add(np.float32([2]), shard)
        accumulator.total(0, 1, np.float32)

    twice(list(range(7)))
    for order in ([*range(7), again], [again, *range(7)]):
        with pytest.raises(WorkerError, match=r"found the shards \d+ to \d+ twice"):
            twice(order)


def test_products_are_kept_in_float64_and_rounded_once() -> None:
    values = np.float32([[1e30, 1.1, 0.0], [1e30, 1.1, np.inf], [1e-30, 1.1, 2.0]])
    accumulator = in_any_tree(
        values, lambda: make_accumulator("prod", np.float32, 3), random.Random(0)
    )
    found = accumulator.total(0, 3, np.float32)
    wanted = np.float32([1e30, np.prod(values[:, 1].astype(np.float64)), np.nan])
    assert found.tobytes() == wanted.tobytes()
    just_above = np.float32([[1 + 2**-7], [1 - 2**-15]])
    half = make_accumulator("prod", np.float32, 1)
    for shard, factor in enumerate(just_above):
        half.add(factor, shard)
    assert half.total(0, 1, dtype_of("bfloat16"))[0] == np.float32(1 + 2**-7)
    complex_product = make_accumulator("prod", np.complex64, 1)
    for shard, factor in enumerate([1 + 2j, 3 - 1j, 2j]):
        complex_product.add(np.complex64([factor]), shard)
    assert complex_product.total(0, 1, np.complex64)[0] == (1 + 2j) * (3 - 1j) * 2j


def test_integers_wrap_around() -> None:
    for lane, wanted in (("sum", -(2**31)), ("prod", 2)):
        accumulator = make_accumulator(lane, np.int32, 1)
        accumulator.add(np.array([2**31 - 1], np.int32), 0)
        accumulator.add(np.array([1 if lane == "sum" else -2], np.int32), 1)
        assert accumulator.total(0, 1, np.int32)[0] == wanted


def test_fast_sums_are_near() -> None:
    values = np.random.default_rng(0).standard_normal((30, 5)).astype(np.complex64)
    accumulator = in_any_tree(
        values, lambda: make_accumulator("sum", np.complex64, 5, mode="fast"), random.Random(1)
    )
    np.testing.assert_allclose(accumulator.total(0, 5, np.complex64), values.sum(0), rtol=1e-5)
    np.testing.assert_allclose(accumulator.mean(0, 5, 30, np.complex64), values.mean(0), rtol=1e-5)
    assert np.isnan(
        make_accumulator("sum", np.float32, 2, mode="fast").mean(0, 2, 0, np.float32)
    ).all()


def test_what_is_no_accumulator_is_refused() -> None:
    with pytest.raises(OptionsError, match="lane 'median'"):
        make_accumulator("median", np.float32, 1)
    with pytest.raises(OptionsError, match="mode 'quick'"):
        make_accumulator("sum", np.float32, 1, mode="quick")
    for lane, dtype in [
        ("sum", "float16"),
        ("sum", "bool"),
        ("prod", "bfloat16"),
        ("any", "int32"),
        ("max", "S3"),
        ("max", "O"),
        ("min", "datetime64[s]"),
        ("sum", "longdouble"),
    ]:
        with pytest.raises(StructureError, match="expected"):
            make_accumulator(lane, dtype_of(dtype), 1)
    for lane, other in [("max", "min"), ("sum", "prod")]:
        with pytest.raises(StructureError, match="to merge with"):
            make_accumulator(lane, np.int32, 1).merge(make_accumulator(other, np.int32, 1))
    with pytest.raises(StructureError, match="to merge with"):
        make_accumulator("sum", np.float32, 1).merge(
            make_accumulator("sum", np.float32, 1, mode="fast")
        )


def changed(data: bytes, change: Callable[[list[np.ndarray], dict[str, Any]], Any]) -> bytes:
    """The bytes of an accumulator after a change to its arrays and fields, with right checksums."""
    arrays, meta = decode_arrays(data)
    arrays = [array.copy() for array in arrays]
    result = change(arrays, meta)
    return encode_arrays(arrays if result is None else result, meta)


HOSTILE: dict[str, list[Callable[[list[np.ndarray], dict[str, Any]], Any]]] = {
    "any": [
        lambda a, m: m.update(accumulator="pickle"),
        lambda a, m: m.update(accumulator=None),
        lambda a, m: m.pop("accumulator") and None,
        lambda a, m: m.update(accumulator=["exact_sum"]),
        lambda a, m: m.update(size=-1),
        lambda a, m: m.update(size=True),
        lambda a, m: m.update(size=10**30),
        lambda a, m: m.pop("size") and None,
        lambda a, m: m.update(dtype="float0"),
        lambda a, m: m.update(dtype="object"),
        lambda a, m: m.update(dtype=3),
        lambda a, m: [*a, np.zeros(3)],
        lambda a, m: [*a, np.zeros(())],
        lambda a, m: [array.astype(np.complex128) for array in a],
        lambda a, m: [array[..., None] for array in a],
    ],
    "exact_sum": [
        lambda a, m: m.update(width=0),
        lambda a, m: m.update(width=64),
        lambda a, m: m.update(width="44"),
        lambda a, m: m.update(size=5),
        lambda a, m: m.update(dtype="bfloat16"),
        lambda a, m: [],
        lambda a, m: [a[0], a[1][:-1], a[2]],
        lambda a, m: [a[0], np.append(a[1], a[1][:1]), a[2]],
        lambda a, m: [a[0][::-1], a[1], a[2]],
        lambda a, m: a[0].__setitem__((0, 0), 10**6),
        lambda a, m: a[0].__setitem__((0, 0), -1),
        lambda a, m: a[0].__setitem__((0, 1), -1),
        lambda a, m: a[0].__setitem__((0, 1), 1000),
        lambda a, m: a[0].__setitem__((0, 2), 0),
        lambda a, m: a[0].__setitem__((0, 2), 9),
        lambda a, m: a[1].__setitem__(slice(None), 0x7F),
        lambda a, m: a[2].__setitem__((0, 0), -1),
        lambda a, m: a[2].__setitem__((0, 0), 10**6),
        lambda a, m: a[2].__setitem__((0, 1), 8),
        lambda a, m: a[2].__setitem__((0, 1), 0),
        lambda a, m: [a[0], a[1], np.concatenate([a[2], a[2]])],
    ],
    "running": [
        lambda a, m: m.update(lane="max"),
        lambda a, m: m.update(lane=None),
        lambda a, m: m.update(dtype="bool"),
        lambda a, m: [a[0][:-1]],
    ],
    "extreme": [
        lambda a, m: m.update(lane="sum"),
        lambda a, m: m.update(dtype="complex64"),
        lambda a, m: [a[0][:, :-1]],
    ],
    "ordered_product": [
        lambda a, m: a[0].__setitem__((0, 0), -1),
        lambda a, m: a[0].__setitem__((0, 0), 63),
        lambda a, m: a[0].__setitem__((0, 1), -1),
        lambda a, m: a[0].__setitem__((0, 1), 1 << 62),
        lambda a, m: a[0].__setitem__(1, a[0][0]),
        lambda a, m: [a[0][:-1], a[1]],
        lambda a, m: [],
        lambda a, m: m.update(dtype="int32"),
    ],
}


def example(kind: str) -> Accumulator:
    """An accumulator of each kind, with something in all of its arrays."""
    lane, dtype = {
        "exact_sum": ("sum", np.float32),
        "running": ("sum", np.int64),
        "extreme": ("max", np.float32),
        "ordered_product": ("prod", np.float32),
    }[kind]
    accumulator = make_accumulator(lane, dtype, 3)
    for shard in (0, 2, 5):
        accumulator.add(np.array([1e9, 1.125 / (shard + 1), -3]).astype(dtype), shard)
    if kind == "exact_sum":
        accumulator.add(np.float32([0, 1e-20, np.inf]), 6)
    assert accumulator.name == kind
    return accumulator


@pytest.mark.parametrize("kind", [kind for kind in HOSTILE if kind != "any"])
def test_hostile_bytes_are_refused(kind: str) -> None:
    data = example(kind).encode()
    for change in [*HOSTILE["any"], *HOSTILE[kind]]:
        with pytest.raises(ArrayFormatError):
            decode_accumulator(changed(data, change))
    for position in range(0, len(data), 7):
        with pytest.raises(ArrayFormatError):
            decode_accumulator(data[:position])
        flipped = bytearray(data)
        flipped[position] ^= 0x10
        with pytest.raises(ArrayFormatError):
            decode_accumulator(bytes(flipped))


def test_a_huge_claim_takes_no_memory() -> None:
    empty = make_accumulator("sum", np.float32, 0).encode()
    accumulator = decode_accumulator(changed(empty, lambda a, m: m.update(size=1 << 59)))
    assert accumulator.nbytes == 0
    assert accumulator.total(BLOCK, BLOCK + 2, np.dtype(np.float32)).tolist() == [0, 0]
