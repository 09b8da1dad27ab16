"""Every accumulator: any order, any bundling, bytes in between; and the results of `jnp`."""

import itertools
import random
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers import examples, in_any_tree
from hypothesis import given
from hypothesis import strategies as st

import beamjax as bj
from beamjax.errors import (
    ArrayFormatError,
    OptionsError,
    StructureError,
    WorkerError,
)
from beamjax.numerics.ordered_tree import DyadicTree
from beamjax.numerics.reducers import REDUCERS, decode_accumulator, make_accumulator
from beamjax.numerics.superaccumulator import BLOCK
from beamjax.storage.arrays import decode_arrays, encode_arrays

FP8 = [f"float8_{e}" for e in ("e5m2", "e4m3fn", "e4m3fnuz", "e3m4")]
FLOATS = [
    *("float16", "float32", "float64", "bfloat16", *FP8),
    *("float8_e5m2fnuz", "float8_e4m3b11fnuz", "float8_e4m3", "float4_e2m1fn"),
]
INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
NUMBERS = ["float32", "float64", "complex64", "complex128", *INTEGERS]
EXTREMES = [*FLOATS, *INTEGERS, "int4", "uint4", "int2", "bool", "complex64", "complex128"]
N = 17
"""Members: two shards of eight and one more."""

REDUCTIONS = [
    *itertools.product(["sum", "prod"], NUMBERS),
    *itertools.product(["max", "min"], EXTREMES),
    *itertools.product(["any", "all"], ["bool"]),
]


def dtype_of(name):
    return np.dtype(getattr(ml_dtypes, name, name))


def random_values(rng, shape, dtype):
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


def added(reduction, rows, *, mode="exact", shards=itertools.count):
    """An accumulator of rows, which are shards 0, 1, ..."""
    accumulator = make_accumulator(reduction, rows.dtype, rows.shape[1], mode=mode)
    for shard, row in zip(shards(), rows, strict=False):
        accumulator.add(row, shard)
    return accumulator


def in_a_tree(reduction, values, seed=0, mode="exact"):
    make = lambda: make_accumulator(reduction, values.dtype, values.shape[1], mode=mode)
    return in_any_tree(values, make, random.Random(seed))


# --- the algebra


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_bits_do_not_depend_on_the_order():
    faults = []
    for reduction, name in REDUCTIONS:
        dtype = dtype_of(name)
        for seed in range(4):
            values = random_values(np.random.default_rng(seed), (11, 6), dtype)
            before = values.tobytes()
            merged = [in_a_tree(reduction, values, tree) for tree in range(6)]
            results = {each.total(0, 6, dtype).tobytes() for each in merged}
            encoded = {each.encode() for each in merged}
            again = decode_accumulator(min(encoded)).total(2, 5, dtype)
            part = merged[0].total(0, 6, dtype)[2:5]
            if (len(results), len(encoded), values.tobytes()) != (1, 1, before) or (
                again.tobytes() != part.tobytes()
            ):
                faults.append((reduction, name, seed))
    assert faults == []


def test_an_empty_accumulator_and_the_identity_change_nothing():
    faults = []
    for reduction, name in REDUCTIONS:
        dtype = dtype_of(name)
        values = random_values(np.random.default_rng(1), (1, 4), dtype)
        for mode in ("exact", "fast"):
            empty = decode_accumulator(make_accumulator(reduction, dtype, 4, mode=mode).encode())
            full = make_accumulator(reduction, dtype, 4, mode=mode)
            full.add(values[0], 3)
            alone = full.encode()
            full.merge(empty)
            empty.merge(full)
            nothing = make_accumulator(reduction, dtype, 0, mode=mode)
            nothing.add(values[0, :0], 0)
            found = decode_accumulator(nothing.encode()).total(0, 0, dtype)
            if not empty.encode() == full.encode() == alone or found.shape != (0,):
                faults.append((reduction, name, mode))
        identity = make_accumulator(reduction, dtype, 4).total(0, 4, dtype)
        other, only = make_accumulator(reduction, dtype, 4), make_accumulator(reduction, dtype, 4)
        other.add(identity, 9)
        for each in (other, only):
            each.add(values[0], 3)
        if other.total(0, 4, dtype).tobytes() != only.total(0, 4, dtype).tobytes():
            faults.append((reduction, name, "identity"))
    assert faults == []


@examples(40)
@given(shards=st.sets(st.integers(0, 40), min_size=1), rng=st.randoms(use_true_random=False))
def test_the_dyadic_tree_depends_on_the_shards_alone(shards, rng):
    def folded(order, bundles):
        trees = [DyadicTree(lambda a, b: f"({a} {b})") for _ in range(bundles)]
        for shard in order:
            rng.choice(trees).add(str(shard), shard)
        while len(trees) > 1:
            rng.shuffle(trees)
            trees[0].merge(trees.pop())
        return trees[0].fold()

    alone = folded(sorted(shards), 1)
    for bundles in (1, 2, 5):
        assert folded(rng.sample(sorted(shards), len(shards)), bundles) == alone
    assert [int(each) for each in alone.replace("(", "").replace(")", "").split()] == sorted(shards)


def test_shards_in_order_need_few_values():
    tree = DyadicTree(lambda a, b: a + b)
    most = 0
    for shard in range(1000):
        tree.add(1, shard)
        most = max(most, len(tree.nodes))
    assert tree.fold() == 1000
    assert most <= 10


@pytest.mark.parametrize("again", [0, 3, 4, 5, 6])
def test_a_shard_that_is_multiplied_twice_is_noticed(again):
    twos = np.full((8, 1), 2, np.float32)
    assert added("prod", twos[:7]).total(0, 1, np.float32) == 128
    for order in ([*range(7), again], [again, *range(7)]):
        with pytest.raises(WorkerError, match=r"found the shards \d+ to \d+ twice"):
            added("prod", twos, shards=lambda order=order: order).total(0, 1, np.float32)


# --- values


def test_complex_extremes_go_by_the_real_part_first():
    nan = np.nan
    values = np.complex64(
        [
            [1 + 5j, 1 + 2j, complex(0.0, 1), complex(nan, 1), complex(1, nan)],
            [2 + 1j, 1 + 3j, complex(-0.0, 2), 7 + 0j, 2 + 0j],
        ]
    )
    wanted = {
        "max": [2 + 1j, 1 + 3j, 2j, complex(nan, 1), 2 + 0j],
        "min": [1 + 5j, 1 + 2j, 1j, complex(nan, 1), complex(1, nan)],
    }
    for reduction in wanted:
        found = in_a_tree(reduction, values).total(0, 5, values.dtype)
        np.testing.assert_array_equal(found, np.complex64(wanted[reduction]))
        np.testing.assert_array_equal(found[:3], getattr(jnp, reduction)(values, axis=0)[:3])


def test_products_are_in_float64_and_rounded_once():
    values = np.float32([[1e30, 1.1, 0.0], [1e30, 1.1, np.inf], [1e-30, 1.1, 2.0]])
    found = in_a_tree("prod", values).total(0, 3, np.float32)
    wanted = np.float32([1e30, np.prod(values[:, 1].astype(np.float64)), np.nan])
    assert found.tobytes() == wanted.tobytes()
    half = added("prod", np.float32([[1 + 2**-7], [1 - 2**-15]]))
    assert half.total(0, 1, dtype_of("bfloat16"))[0] == np.float32(1 + 2**-7)
    product = added("prod", np.complex64([[1 + 2j], [3 - 1j], [2j]]))
    assert product.total(0, 1, np.complex64)[0] == (1 + 2j) * (3 - 1j) * 2j


def test_integers_wrap_around():
    for reduction, other, wanted in (("sum", 1, -(2**31)), ("prod", -2, 2)):
        found = added(reduction, np.array([[2**31 - 1], [other]], np.int32))
        assert found.total(0, 1, np.int32)[0] == wanted


# --- all reductions of all dtypes, in whole runs

OPS = list(REDUCERS)
USUAL = ["bool", *(name for name in INTEGERS if "64" not in name), "bfloat16", "float16", *FP8,
         "float32", "complex64"]  # fmt: skip
FEW = ["bool", "int8", "int32", "uint32", "bfloat16", "float8_e5m2", "float32", "complex64"]
WITH_INFINITIES = ["bfloat16", "float16", "float8_e5m2", "float32", "float64", "complex64"]


def members(name, op):
    """Numbers so small that sums and products are exact, then zeros, infinities and NaN."""
    rng = np.random.default_rng(len(name) + len(op))
    choices = [0, 1] if op in ("any", "all") else [1, 2] if op == "prod" else range(-3, 4)
    values = rng.choice(list(choices), (N, 5)).astype(np.float64)
    if op == "prod":
        values[rng.permuted(np.tile(np.arange(N)[:, None], 5), axis=0) > 2] = 1
    if op == "sum" and name.startswith("float8"):
        values[4:] = 0
    if op in ("max", "min", "any", "all"):  # where another identity would show
        values[:, 3], values[:, 4] = -2, 0 if op in ("any", "all") else 2
    if name.startswith("u"):
        values = np.abs(values)
    if name in WITH_INFINITIES:
        inf, nan = np.inf, np.nan
        more = np.ones((N, 8))
        more[2, 0] = more[16, 1] = inf
        more[16, 2] = -inf
        more[1, 3] = more[16, 4] = nan
        more[1, 5], more[9, 5] = inf, -inf
        more[:, 6:] = 0.0
        more[3, 6], more[:, 7], more[12, 7] = -0.0, -0.0, 0.0
        values = np.concatenate([values, more], 1)
    return values.astype(dtype_of(name))


@pytest.mark.versions
@pytest.mark.parametrize(
    ("x64", "names"),
    [
        (False, FEW),
        (True, ["bool", "int8", "int64", "uint64", "float64"]),
        pytest.param(False, USUAL, marks=pytest.mark.table),
    ],
    ids=["32 bits", "64 bits", "all of 32 bits"],
)
def test_results_and_dtypes_are_those_of_jnp(x64, names):
    x = {op: {name: members(name, op) for name in names} for op in OPS}
    for op in ("mean", "max", "min") if not x64 else ():  # jnp has no sums of 4 bits
        x[op] |= {name: np.arange(N).astype(dtype_of(name)) for name in ("int4", "uint4")}
    x["sum"] |= {"of any shape": np.ones((N, 2, 0, 3), np.float32)}
    by_jnp = lambda x: {
        op: jax.tree.map(lambda v, op=op: getattr(jnp, op)(v, axis=0), x[op]) for op in OPS
    }
    by_bj = bj.program(m=N)(lambda x: {op: getattr(bj, f"reduce_{op}")(x[op]) for op in OPS})
    faults = []
    with jax.enable_x64(x64):
        wanted = jax.tree.map(np.asarray, jax.jit(by_jnp)(x))
        for name, v in x["mean"].items():  # compiled, jnp divides narrow floats otherwise
            wide = v.astype(np.complex128 if v.dtype.kind == "c" else np.float64)
            with np.errstate(all="ignore"):
                wanted["mean"][name] = wide.mean(0).astype(wanted["mean"][name].dtype)
        for op in ("max", "min"):  # jnp loses complex NaN of all but the last
            wanted[op] |= {n: getattr(np, op)(x[op][n], 0) for n in names if n == "complex64"}
        for mode in ("exact", "fast"):
            options = {"shard_size": 8, "reduction": mode}
            found = bj.run(by_bj, x, runner="local", options=options)
            for op, name in [(o, n) for o in OPS for n in wanted[o]]:
                left, right = np.asarray(found[op][name]), wanted[op][name]
                same = (left.dtype, left.shape) == (right.dtype, right.shape)
                if op in ("max", "min") and name != "complex64":
                    numbers = right == right
                    bits = left[numbers].tobytes() == right[numbers].tobytes()
                    same = same and bits and not (left == left)[~numbers].any()
                if name == "complex64" and op in ("mean", "prod"):  # NaN spreads to other parts
                    left, right = (np.where(np.isfinite(v), v, np.nan) for v in (left, right))
                wide = np.complex128 if right.dtype.kind == "c" else np.float64
                eps = float(ml_dtypes.finfo(right.dtype).eps) if op == "mean" else 0
                near = np.allclose(left.astype(wide), right.astype(wide), 2 * eps, eps, True)
                if not (same and near):
                    faults.append((mode, op, name, left, right))
    assert faults == []


@pytest.mark.parametrize("mode", ["exact", "fast"])
@pytest.mark.parametrize("op", ["max", "min"])
def test_complex_extremes_at_infinity(op, mode):
    """They are ordered by their imaginary parts, and nothing that pads them wins."""
    end = -np.inf if op == "max" else np.inf
    x = np.array([complex(end, part) for part in (2, -3, 1)], np.complex64)
    fn = bj.program(m=3)(getattr(bj, f"reduce_{op}"))
    found = bj.run(fn, x, runner="local", options={"shard_size": 8, "reduction": mode})
    assert complex(found) == complex(getattr(np, op)(x))


# --- what is refused


def test_other_lanes_dtypes_and_partials_are_refused():
    for options in ({"reduction": "median"}, {"mode": "quick"}):
        with pytest.raises(OptionsError, match=f"{min(options)} {options[min(options)]!r}"):
            make_accumulator(**{"reduction": "sum", "dtype": np.float32, "size": 1, **options})
    for reduction, dtype in [
        ("sum", "float16"), ("sum", "bool"), ("prod", "bfloat16"), ("any", "int32"), ("max", "S3"),
        ("max", "O"), ("min", "datetime64[s]"), ("sum", "longdouble"),
    ]:  # fmt: skip
        with pytest.raises(StructureError, match="expected"):
            make_accumulator(reduction, dtype_of(dtype), 1)
    make = lambda reduction, mode="exact", size=1: make_accumulator(
        reduction, np.float32, size, mode=mode
    )
    for reduction in ("sum", "prod", "max"):
        for partial in (np.zeros(1, np.int32), np.zeros((1, 1), np.float32), np.float32([1, 2])):
            found = f"{partial.dtype}{list(partial.shape)}, expected float32[1]"
            with pytest.raises(StructureError, match=re.escape(found)):
                make(reduction).add(partial, 0)
    for one, other in [
        (make("sum"), make("sum", size=2)),
        (make("max"), make("min")), (make("sum"), make("prod")),
        (make("sum"), make("sum", "fast")), (make("sum", "fast"), make("prod", "fast")),
    ]:  # fmt: skip
        with pytest.raises(StructureError, match="to merge with"):
            one.merge(other)


def changed(data, change):
    """The bytes of an accumulator after a change to its arrays and fields, with right checksums."""
    arrays, meta = decode_arrays(data)
    arrays = [array.copy() for array in arrays]
    result = change(arrays, meta)
    return encode_arrays(arrays if result is None else result, meta)


def fields(**changes):
    return lambda arrays, meta: meta.update(changes)


def entry(number, place, value):
    return lambda arrays, meta: arrays[number].__setitem__(place, value)


KINDS = {
    "exact_sum": ("sum", np.float32),
    "running": ("sum", np.int64),
    "extreme": ("max", np.float32),
    "ordered_product": ("prod", np.float32),
}
HOSTILE = {
    "any": [
        *(fields(accumulator=name) for name in ("pickle", None, ["exact_sum"])),
        lambda a, m: m.pop("accumulator") and None,
        *(fields(size=size) for size in (-1, True, 10**30)),
        lambda a, m: m.pop("size") and None,
        *(fields(dtype=dtype) for dtype in ("float0", "object", 3)),
        lambda a, m: [*a, np.zeros(3)],
        lambda a, m: [*a, np.zeros(())],
        lambda a, m: [array.astype(np.complex128) for array in a],
        lambda a, m: [array[..., None] for array in a],
    ],
    "exact_sum": [
        fields(reduction="prod"),
        fields(size=5),
        fields(dtype="bfloat16"),
        *(fields(left_out=count) for count in (-1, 1.5, "1")),
        lambda a, m: [],
        lambda a, m: [a[0], a[1][:-1], *a[2:]],
        lambda a, m: [a[0], np.append(a[1], a[1][:1]), *a[2:]],
        lambda a, m: [a[0][::-1], *a[1:]],
        *(entry(0, (0, 0), value) for value in (10**6, -1)),
        *(entry(0, (0, 1), value) for value in (-2, 1000)),
        *(entry(1, 0, value) for value in (0.5, 2.0**200, np.inf, np.nan)),
        *(entry(2, (0, 0), value) for value in (-1, 10**6)),
        *(entry(2, (0, 1), value) for value in (0, 1, 1 << 40)),
        lambda a, m: [*a[:2], np.concatenate([a[2], a[2]])],
    ],
    "running": [fields(reduction="max"), fields(reduction=None), fields(dtype="bool"),
                lambda a, m: [a[0][:-1]]],
    "extreme": [fields(reduction="sum"), fields(dtype="complex64"), lambda a, m: [a[0][:, :-1]]],
    "ordered_product": [
        *(entry(0, (0, 0), value) for value in (-1, 63)),
        *(entry(0, (0, 1), value) for value in (-1, 1 << 62)),
        lambda a, m: a[0].__setitem__(1, a[0][0]),
        lambda a, m: a[0].__setitem__(0, (3, 1 << 60)),
        lambda a, m: [a[0][:-1], a[1]],
        lambda a, m: [],
        fields(dtype="int32"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_hostile_bytes_are_refused(kind):
    reduction, dtype = KINDS[kind]
    rows = np.array([[1e9, 1.125 / (shard + 1), -3] for shard in (0, 2, 5)]).astype(dtype)
    accumulator = added(reduction, rows, shards=lambda: (0, 2, 5))
    if kind == "exact_sum":
        accumulator.add(np.float32([0, 1e-20, np.inf]), 6)
    assert accumulator.name == kind
    data = accumulator.encode()
    assert decode_accumulator(data).encode() == data
    for change in [*HOSTILE["any"], *HOSTILE[kind]]:
        with pytest.raises(ArrayFormatError):
            decode_accumulator(changed(data, change))
    for position in range(0, len(data), 7):
        flipped = bytearray(data)
        flipped[position] ^= 0x10
        for damaged in (data[:position], bytes(flipped)):
            with pytest.raises(ArrayFormatError):
                decode_accumulator(damaged)


def test_a_huge_claim_takes_no_memory():
    empty = make_accumulator("sum", np.float32, 0).encode()
    accumulator = decode_accumulator(changed(empty, fields(size=1 << 59)))
    assert accumulator.nbytes == 0
    assert accumulator.total(BLOCK, BLOCK + 2, np.dtype(np.float32)).tolist() == [0, 0]
