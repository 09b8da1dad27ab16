"""Results by keys that nobody knows beforehand: as a dict of lists would give them."""

import contextlib
import gc
import itertools
import os
from fractions import Fraction
from pathlib import Path

import hypothesis
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import assert_same_bits, examples
from hypothesis import strategies as st

import beamjax as bj
from beamjax.errors import (
    ArrayFormatError,
    OptionsError,
    SourceError,
    StagingError,
    StructureError,
)
from beamjax.numerics import by_key
from beamjax.numerics.reducers import BY_KEY
from beamjax.sources.arrays import part_files

N = 500
RNG = np.random.default_rng(11)
KEYS = (RNG.integers(-15, 15, N) * 1000).astype(np.int32)
SHARDS = {"shard_size": 64}
VALUES = {
    "float32": RNG.normal(size=(N, 3)).astype(np.float32),
    "bfloat16": RNG.normal(size=N).astype(ml_dtypes.bfloat16),
    "int32": RNG.integers(-3, 3, (N, 2)).astype(np.int32),
    "uint8": RNG.integers(0, 4, N).astype(np.uint8),
    "bool": RNG.integers(0, 2, N).astype(bool),
    "complex64": (RNG.normal(size=N) + 1j * RNG.normal(size=N)).astype(np.complex64),
}
MEANS = ["mean", "var", "std"]


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """Many parts and blocks for few members."""
    monkeypatch.setattr(part_files, "PART_BYTES", 1500)
    monkeypatch.setattr(by_key, "BLOCK_BYTES", 4000)
    monkeypatch.setattr(by_key, "MAX_WAITING", 2)


def near(name, found, expected):
    """Whether values, dtypes and shapes are those of `reduce_by_key` with a number of keys."""
    tolerance = 0.02 if name == "bfloat16" else 1e-5
    wide = [np.asarray(x, np.complex128) for x in (found, expected)]
    same = (found.dtype, found.shape) == (expected.dtype, expected.shape)
    return same and np.allclose(*wide, tolerance, tolerance, equal_nan=True)


@pytest.mark.parametrize("op", BY_KEY)
def test_ops_and_dtypes(op):
    values = dict(VALUES)
    if op in ("max", "min"):
        del values["complex64"]  # complex numbers are not ordered
    names, dense = np.unique(KEYS, return_inverse=True)

    @bj.program(clients=N)
    def program(x, keys):
        return bj.reduce_by_key(x, keys, op=op)

    @bj.program(clients=N)
    def known(x, keys):
        return bj.reduce_by_key(x, keys, len(names), op=op)

    arrays = jax.tree.map(jnp.asarray, values)
    expected = jax.jit(known)(arrays, dense.astype(np.int32))
    table = bj.run(program, values, KEYS, runner="local", options=SHARDS)
    assert isinstance(table, bj.tables.KeyedTable)
    in_process = jax.jit(program)(arrays, KEYS).reduced()
    assert table.keys.dtype == np.int32
    faults = []
    for how, found in (("run", table.arrays()), ("jit", in_process)):
        np.testing.assert_array_equal(found["key"], names)
        for name, want in expected.items():
            if not near(name, found["value"][name], want):
                faults.append((how, name, found["value"][name], want))
    assert faults == []


@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_sums_and_means_are_rounded_once(dtype):
    """Of numbers that cancel out: in the dtype of the members, ones would be lost."""
    one = np.array(1 + (1j if dtype == "complex64" else 0)).astype(dtype)
    x, keys = one * np.float32([1e10, 1, -1e10, 3]), np.int32([7, 7, 7, 9])
    for op, wanted in (("sum", [1, 3]), ("mean", [np.float32(1 / 3), 3])):
        fn = bj.program(clients=4)(lambda x, k, op=op: bj.reduce_by_key(x, k, op=op))
        found = bj.run(fn, x, keys, runner="local").arrays()["value"]
        assert_same_bits(found, one * np.float32(wanted))


def test_more_keys_than_their_dtype_can_count():
    x, keys = np.float32([1, 2, 3, 4]), np.int8([1, 127, 1, -1])
    fn = bj.program(clients=4)(lambda x, k: bj.reduce_by_key(x, k, 300))
    expected = np.bincount([1, 127, 1], [1, 2, 3], minlength=300)
    np.testing.assert_array_equal(bj.run(fn, x, keys, runner="local"), expected)


@bj.program(clients=N)
def program(w, x, keys):
    y = bj.map_fn(lambda v: {"score": v @ w, "count": jnp.int32(1)}, x)
    return {"by": bj.reduce_by_key(y, keys), "total": bj.reduce_sum(y["score"])}


W = np.array([1.0, -1.0, 0.5], np.float32)
ARGS = W, VALUES["float32"], KEYS
WORKERS = {"direct_running_mode": "multi_threading", "direct_num_workers": 2}


@pytest.mark.parametrize(
    "how",
    [{"runner": "local"}, {"options": WORKERS}],
    ids=["local", "threads"],
)
def test_a_tree_on_any_runner(how, tmp_path):
    options = {**how.get("options", {}), **SHARDS, "results_folder": str(tmp_path / "r")}
    found = bj.run(program, *ARGS, keep="placed", **{**how, "options": options})
    table = found["by"]
    local = bj.run(program, *ARGS, runner="local", options=SHARDS)
    assert_same_bits(table.arrays(), local["by"].arrays())
    assert isinstance(found["total"], jax.Array)
    counts = dict(zip(*np.unique(KEYS, return_counts=True), strict=True))
    assert dict(zip(table.keys.tolist(), table.values["count"].tolist(), strict=True)) == counts
    assert os.listdir(tmp_path / "r") == ["keyed-by"]
    again = bj.open_placed(table.folder)
    np.testing.assert_array_equal(again.keys, table.keys)
    assert again.treedef == table.treedef

    @bj.program(keys=None)
    def biggest(rows):
        return bj.reduce_argmax(rows["value"]["count"]), bj.reduce_sum(rows["value"]["score"])

    place, total = bj.run(biggest, table, runner="local")
    assert place == np.argmax(table.values["count"])
    np.testing.assert_allclose(total, (VALUES["float32"] @ W).sum(), rtol=1e-4)
    table.remove()
    assert not list((tmp_path / "r").iterdir())


@pytest.mark.parametrize("runner", ["local", "DirectRunner"])
def test_a_table_without_members(runner):
    by_key = bj.program(c=None)(lambda x, k: bj.reduce_by_key({"x": x}, k))
    none = np.zeros((0, 3), "float32"), np.zeros(0, "int32")
    table = bj.run(by_key, *none, runner=runner)
    assert isinstance(table, bj.tables.KeyedTable)
    assert len(table) == 0
    assert_same_bits(table.arrays(), jax.jit(by_key)(*none).reduced())


def test_files_go_with_the_handle(tmp_path):
    options = {"work_folder": str(tmp_path)}
    table = bj.run(program, *ARGS, runner="local", options=options)["by"]
    assert Path(table.folder).is_relative_to(tmp_path)
    assert len(table) == len(np.unique(KEYS))
    del table
    gc.collect()
    assert not list(tmp_path.iterdir())
    bj.run(program, *ARGS, runner="local", options=options)["by"].arrays()
    gc.collect()
    assert _open_below(tmp_path) == [], "maps of removed files hold their disk space"


def _open_below(folder):
    """The files of this process in a folder, removed ones included; Linux alone lists them."""
    found = []
    for descriptor in Path("/proc/self/fd").glob("*"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(descriptor))
    return [name for name in found if name.startswith(str(folder))]


@pytest.mark.versions
def test_verify_a_job_and_a_transform(tmp_path):
    report = bj.verify(program, *ARGS)
    assert report.ok
    assert "result['by']['value']['score']" in str(report)
    folder = tmp_path / "j"
    table = bj.launch(program, *ARGS, options={"job_folder": str(folder)}).result()["by"]
    found = bj.open_job(folder).result()["by"]
    assert found.folder == table.folder
    np.testing.assert_array_equal(found.keys, table.keys)
    with pytest.raises(StagingError, match=r"result\['by'\].*CombinePerKey"):
        bj.transform(program, *ARGS)


def test_bad_input(tmp_path):
    with pytest.raises(OptionsError, match="does not know the dropped members"):
        bj.run(program, *ARGS, options={"on_error": "drop"})
    with pytest.raises(StructureError, match="found num_keys 0"):
        bj.run(bj.program(clients=N)(lambda k: bj.reduce_by_key(k, k, 0)), KEYS)
    several = jax.vmap(program, in_axes=(0, None, None))
    with pytest.raises(StructureError, match=r"result\['by'\]: found members with keys along"):
        bj.run(several, np.stack([W, W]), *ARGS[1:], runner="local")
    with pytest.raises(SourceError, match=r"placed\.json: cannot read"):
        bj.open_placed(tmp_path)
    for text in ("", "[]", "{}", '{"version": 2, "leaves": [], "parts": [], "tree": null}'):
        (tmp_path / bj.tables.KeyedTable.manifest).write_text(text)
        with pytest.raises(ArrayFormatError, match="found no list"):
            bj.open_placed(tmp_path)
    for keys in (np.ones((N, 2), np.int32), np.ones(N, np.complex64), np.ones((N, 2), np.float32)):
        with pytest.raises(StructureError, match=r"found keys of type .* texts as uint8 of shape"):
            bj.run(bj.program(clients=N)(lambda x, k: bj.reduce_by_key(x, k)), KEYS, keys)


@pytest.mark.parametrize(
    "use",
    [
        lambda k: k + 1, lambda k: 1 / k, lambda k: -k, lambda k: k > 0, lambda k: k[0], len, list,
        jnp.sqrt, lambda k: jnp.add(1, k), np.asarray, bool,
    ],
)  # fmt: skip
def test_a_program_that_computes_with_rows_by_key(use):
    """The message names the ways out."""
    computes = bj.program(clients=N)(lambda x, keys: use(bj.reduce_by_key(x, keys)))
    for call in (
        lambda: bj.run(computes, VALUES["uint8"], KEYS, runner="local"),
        lambda: jax.jit(computes)(VALUES["uint8"], KEYS),
    ):
        with pytest.raises(
            StructureError, match=r"found .* of its result without num_keys.*Give num_keys"
        ):
            call()


def test_the_hash_spreads_neighbours():
    codes = by_key.key_codes(np.arange(100_000))
    texts = by_key.key_codes(
        np.array([f"key {i:06d}" for i in range(100_000)], "S").view(np.uint8).reshape(100_000, -1)
    )
    for keys in codes, texts:
        counts = np.bincount((by_key.hashed(keys) % np.uint64(64)).astype(np.int64), minlength=64)
        assert ((counts - counts.mean()) ** 2 / counts.mean()).sum() < 110  # 63 degrees of freedom


# --- keys of any type


def text(words, width):
    """Words as a source with `text_bytes=width` reads them."""
    return (
        np.array([word.encode() for word in words], f"S{width}").view(np.uint8).reshape(-1, width)
    )


@bj.program(rows=None)
def sums(x, keys):
    return bj.reduce_by_key(x, keys)


FLOATS = [0.0, -0.0, np.nan, -np.nan, np.inf, -np.inf, 1e-45, -2.5, 3.0]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8", "uint32", "bool"])
def test_keys_of_numbers(dtype):
    keys = np.array(FLOATS if "float" in dtype else [0, 1, 7, 7, 100, 3], dtype)[
        RNG.integers(0, 6, 300)
    ]
    found = bj.run(sums, np.ones(300, np.int32), keys, runner="local").arrays()
    wide = keys.astype(np.float64)
    names, counts = np.unique(
        np.where(wide == 0, 0.0, wide), return_counts=True
    )  # one NaN, as in pandas
    assert found["key"].dtype == keys.dtype
    np.testing.assert_array_equal(found["key"].astype(np.float64), names)
    np.testing.assert_array_equal(found["value"], counts)
    assert not np.signbit(found["key"][found["key"] == 0].astype(np.float64)).any()


WORDS = ["", "a", "ab", "b", "Zürich", "京都", "\U0001f600", "a b"]


@pytest.mark.parametrize(
    "how", [{"runner": "local"}, {"options": WORKERS}], ids=["local", "threads"]
)
def test_keys_of_text(how, tmp_path):
    """From a column of Parquet, against Arrow's own grouping."""
    words = np.array(WORDS)[RNG.integers(0, len(WORDS), N)]
    table = pa.table({"word": words, "x": VALUES["float32"][:, 0]})
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=90)
    rows = bj.from_parquet(tmp_path / "rows.parquet", text_bytes=8)
    by_word = bj.program(rows=None)(
        lambda rows: bj.reduce_by_key(rows["x"], rows["word"], op="max")
    )
    found = bj.run(by_word, rows, **how)
    expected = table.group_by("word").aggregate([("x", "max")]).sort_by("word")
    assert (
        found.to_arrow()
        .rename_columns(["word", "x_max"])
        .equals(expected.select(["word", "x_max"]))
    )
    assert found.arrays()["key"].tolist() == expected["word"].to_pylist()
    assert sorted(found.keys.tolist()) == expected["word"].to_pylist()
    with pytest.raises(
        StructureError, match=r"dtype <U6.*np.char.encode\(array, \"utf-8\"\)\["
    ) as error:
        bj.run(sums, VALUES["int32"], words, runner="local")
    as_said = np.char.encode(words, "utf-8")[..., None].view(np.uint8)
    assert str(error.value).endswith('np.char.encode(array, "utf-8")[..., None].view(np.uint8)')
    counts = bj.run(sums, np.ones(N, np.int32), as_said, runner="local").arrays()
    assert_same_bits([*np.unique(words, return_counts=True)][1], counts["value"].astype(int))
    assert counts["key"].tolist() == sorted(set(words), key=str.encode)
    again = bj.run(sums, bj.from_arrays(text(words, 8)), text(words, 8), runner="local")
    assert again.values.shape == (len(WORDS), 8)
    counted = bj.program(keys=None)(lambda table: bj.reduce_sum(table["key"]))
    assert bj.run(counted, found, runner="local").shape == (8,)


def test_a_table_in_arrow(tmp_path):
    found = bj.run(
        bj.program(clients=N)(lambda x, k: bj.reduce_by_key(x, k)), VALUES, KEYS, runner="local"
    )
    table, arrays = found.to_arrow(), found.arrays()
    pq.write_table(table, tmp_path / "t.parquet")
    again = pq.read_table(tmp_path / "t.parquet")
    assert again["key"].to_pylist() == np.unique(KEYS).tolist()
    assert set(again.column_names) == {"key", *(f"value.{name}" for name in VALUES)}
    for name, column in arrays["value"].items():
        wide = column.astype(np.float32) if name == "bfloat16" else column
        pairs = wide.view(np.float32).reshape(-1, 2) if name == "complex64" else wide
        assert again[f"value.{name}"].to_pylist() == pairs.tolist()


# --- bits


SUMS = by_key.ByKey("sum", ((), np.dtype("i8")), (((), np.dtype("i8")),), (np.dtype("i8"),))


@pytest.mark.parametrize("keys", [4, 1 << 40], ids=["few", "all different"])
def test_each_row_is_merged_a_few_times_however_many_blocks_there_are(keys, monkeypatch):
    monkeypatch.setattr(by_key, "MAX_WAITING", 16)
    rng, blocks, rows = np.random.default_rng(0), 4_000, 8
    merged, count = by_key.ByKey.merged, []

    def counted(self, parts, blocks=True):
        parts = list(parts)
        if len(parts) > 1:
            count.append(sum(len(part.keys) for part in parts))
        return merged(self, parts, blocks)

    monkeypatch.setattr(by_key.ByKey, "merged", counted)
    waiting, most = [], 0
    for block in range(blocks):
        members = rng.integers(0, keys, rows)
        waiting = SUMS.added(waiting, [SUMS.of_block(members, [members], block * rows)])
        most = max(most, len(waiting))
    assert sum(count) < 8 * blocks * rows
    assert most <= 32
    assert len(merged(SUMS, waiting).keys) == min(keys, blocks * rows)


class Looked(np.ndarray):
    """Numbers of parts that count how many of them NumPy operations look at."""

    seen = 0

    def __array_ufunc__(self, ufunc, method, *inputs, **more):
        Looked.seen += self.size
        plain = [x.view(np.ndarray) if isinstance(x, Looked) else x for x in inputs]
        found = getattr(ufunc, method)(*plain, **more)
        return found.view(Looked) if isinstance(found, np.ndarray) else found


def test_rows_are_divided_among_any_number_of_parts_at_once(monkeypatch):
    members = np.arange(5_000)
    rows = SUMS.of_block(members, [members], 0)
    monkeypatch.setattr(by_key, "hashed", lambda keys: keys.astype(np.uint64).view(Looked))
    parts = dict(SUMS.divided(rows, 500))
    assert Looked.seen < 10 * len(members)
    assert list(parts) == list(range(500))
    assert all((part.keys % 500 == number).all() for number, part in parts.items())
    assert sum(len(part.keys) for part in parts.values()) == len(members)


SPECIALS = [np.inf, -np.inf, np.nan, 3.4e38, -3.4e38, 1e-45, 1.0, -1.0, 2.0**-30, 1e10, -1e10, 0.0]


@hypothesis.given(st.data(), st.sampled_from(["float32", "float64", "float16", "int64", "uint64"]))
@examples(12)
def test_rows_of_any_cut_give_the_same_bits(data, dtype):
    """Sums, means, variances are those of fractions; products do not depend on the order."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    n, op = data.draw(st.integers(1, 80)), data.draw(st.sampled_from(BY_KEY))
    if dtype.endswith("int64"):
        x = rng.integers(0, 2**62, (n, 2)).astype(dtype)
    else:
        x = np.where(
            rng.random((n, 2)) < 0.3,
            rng.choice(SPECIALS, (n, 2)),
            rng.normal(size=(n, 2)) * 10.0 ** rng.integers(-4, 5, (n, 2)),
        )
        with np.errstate(over="ignore"):
            x = x.astype(dtype)
    keys = rng.integers(0, 4, n)
    result = (
        np.dtype(bool)
        if op in ("any", "all")
        else np.dtype(np.float64 if op in MEANS and dtype.endswith("int64") else dtype)
    )
    what = by_key.ByKey(op, ((), keys.dtype), (((2,), x.dtype),), (result,))
    cuts = [0, *sorted(rng.choice(np.arange(1, n), min(n - 1, 5), replace=False)), n]
    found = []
    for _ in range(2):
        blocks = [what.of_block(keys[a:b], [x[a:b]], a) for a, b in itertools.pairwise(cuts)]
        merged = []
        for i in rng.permutation(len(blocks)):
            merged = what.added(merged, [by_key.Rows.decode(blocks[i].encode())])
            if rng.random() < 0.5:
                merged = [what.merged(merged)]
        found.append(what.finished(merged))
    assert_same_bits(*found)
    names, values = found[0]
    assert names.tolist() == np.unique(keys).tolist()
    if (
        op in ("sum", "mean", "var")
        and np.isfinite(x).all()
        and not (op != "mean" and dtype.endswith("int64"))
    ):
        for row, key in enumerate(names):
            for column in range(2):
                terms = list(map(Fraction, x[keys == key, column].tolist()))
                exact = sum(terms) / (1 if op == "sum" else len(terms))
                if op == "var":
                    exact = sum((term - exact) ** 2 for term in terms) / len(terms)
                assert values[row, column] == nearest(exact, result)


def nearest(exact, dtype):
    """A fraction rounded to nearest even, by the candidates around it."""
    limit = float(np.finfo(dtype).max)
    with np.errstate(over="ignore"):
        try:
            near = np.dtype(dtype).type(float(exact))
        except OverflowError:
            return np.dtype(dtype).type(np.inf if exact > 0 else -np.inf)
        if not np.isfinite(near) and abs(exact) < limit:
            near = np.dtype(dtype).type(np.sign(near) * limit)
        if not np.isfinite(near):
            return near
        candidates = [
            near,
            np.nextafter(near, np.inf, dtype=dtype),
            np.nextafter(near, -np.inf, dtype=dtype),
        ]
    whole = [c for c in candidates if np.isfinite(c)]
    bits = f"i{np.dtype(dtype).itemsize}"
    return min(whole, key=lambda c: (abs(Fraction(float(c)) - exact), int(c.view(bits)) & 1))
