"""Files of tables, of Parquet and of Arrow alike: the rows that were written."""

import os
import shutil
import threading
from pathlib import Path

import hypothesis
import jax
import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
import url_files  # noqa: F401 - makes bjtest:// known to Beam
from hypothesis import strategies as st
from source_programs import (
    assert_opens_elsewhere,
    assert_reads,
    assert_runs,
    assert_same,
    assert_threads_read,
)
from table_files import (
    FORMS,
    N,
    in_order,
    save_parts,
    table_of,
    tree_of,
)

import beamjax as bj
from beamjax.errors import SourceError, StructureError
from beamjax.sources import block_source
from beamjax.sources.source_base import open_spec


@pytest.fixture(params=FORMS)
def form(request):
    block_source.BLOCKS.clear()
    return FORMS[request.param]


@pytest.fixture
def end(form):
    return ".parquet" if form.batch == "row group" else ".arrow"


DTYPES = [
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    *("float16", "float32", "float64", "bool"),
]


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)], ids=str)
def test_round_trip_of_every_dtype(form, shape, tmp_path):
    rng = np.random.default_rng(1)
    tree = {d: rng.integers(0, 2, (N, *shape)).astype(d) for d in DTYPES}
    source = form.read(form.save(table_of(tree), tmp_path / "x"))
    assert len(source) == N
    assert source.treedef == jax.tree.structure(tree)
    assert [leaf.path for leaf in source.leaves] == [f"[{name!r}]" for name in sorted(tree)]
    assert_reads(source, in_order(tree))
    assert_reads(source, in_order(tree), 3, 18)


def test_other_types_of_columns(form, tmp_path):
    tensor = np.arange(N * 6, dtype=np.int16).reshape(N, 2, 3)
    table = pa.table(
        {
            "lists": pa.array([[i, i + 1] for i in range(N)]),
            "deep": pa.array([[[i], [i + 1]] for i in range(N)]),
            "large": pa.array([[1.5 * i] for i in range(N)], pa.large_list(pa.float64())),
            "bytes": pa.array([bytes([i, 2 * i]) for i in range(N)], pa.binary(2)),
            "words": pa.array([i % 3 for i in range(N)]).dictionary_encode(),
            "tensor": pa.FixedShapeTensorArray.from_numpy_ndarray(tensor),
        }
    )
    source = form.read(form.save(table, tmp_path / "x"))
    i = np.arange(N)
    expected = {
        "lists": np.stack([i, i + 1], 1),
        "deep": np.stack([i, i + 1], 1)[..., None],
        "large": 1.5 * i[:, None],
        "bytes": np.stack([i, 2 * i], 1).astype(np.uint8),
        "words": i % 3,
        "tensor": tensor,
    }
    assert_reads(source, in_order(expected))
    assert_opens_elsewhere(source)


def test_columns_are_chosen(form, tmp_path):
    tree = tree_of()
    path = form.save(table_of(tree).append_column("name", pa.array(["a"] * N)), tmp_path / "x")
    source = form.read(path, columns=["x", "label"])
    assert source.treedef == jax.tree.structure({"label": 0, "x": 0})
    assert_reads(source, [tree["label"], tree["x"]], 4, 12)
    bare = form.read(path, columns="x")
    assert bare.treedef == jax.tree.structure(0)
    assert bare.leaves[0].path == ""
    assert_reads(bare, [tree["x"]])


def test_a_column_with_a_dot_in_its_name(form, tmp_path):
    table = pa.table({"a": np.arange(3), "a.b": np.arange(3.0), "a.b.c": np.arange(3) * 2})
    source = form.read(form.save(table, tmp_path / "x"), columns=["a", "a.b"])
    assert_reads(source, [np.arange(3), np.arange(3.0)])


def test_files_by_path_pattern_list_folder_and_url(form, end, tmp_path):
    tree = tree_of()
    folder = tmp_path / "data"
    folder.mkdir()
    for path in save_parts(form, tmp_path, tree, [0, 4, 4, 19, N]):
        shutil.move(path, folder / Path(path).with_suffix(end).name)
    (folder / "_SUCCESS").touch()
    names = sorted(path.name for path in folder.glob(f"*{end}"))
    ways = [
        folder,
        str(folder / f"*{end}"),
        [folder / name for name in names],
        [str(folder / names[0]), str(folder / f"part-0[1-3]{end}")],
        f"bjtest:/{folder}/",
        f"bjtest:/{folder}/part-*{end}",
    ]
    for way in ways:
        source = form.read(way)
        assert_reads(source, in_order(tree))
        assert_reads(source, in_order(tree), 3, 20)
        assert "and 3 more" in repr(source)
    backwards = form.read([folder / names[3], folder / names[0]])
    assert_same(backwards.read(0, 8)[0], np.concatenate([tree["label"][19:], tree["label"][:4]]))


@hypothesis.settings(deadline=None, derandomize=True, max_examples=60)
@hypothesis.given(st.sampled_from(sorted(FORMS)), st.data())
def test_any_range_of_any_files(tmp_path_factory, name, data):
    block_source.BLOCKS.clear()
    form, tree = FORMS[name], tree_of()
    cuts = sorted(data.draw(st.lists(st.integers(0, N), max_size=5)))
    rows = data.draw(st.integers(1, 9))
    files = save_parts(form, tmp_path_factory.mktemp("x"), tree, [0, *cuts, N], rows)
    source = form.read(files)
    assert len(source) == N
    for _ in range(4):
        start = data.draw(st.integers(0, N))
        assert_reads(source, in_order(tree), start, data.draw(st.integers(start, N)))


def test_other_processes_and_pickle(form, tmp_path):
    tree = tree_of()
    files = save_parts(form, tmp_path, tree, [0, 7, N])
    assert_opens_elsewhere(form.read(files))
    assert_opens_elsewhere(form.read(files, "x"))


def test_opening_a_spec_touches_no_file(form, tmp_path):
    path = form.save(table_of(tree_of()), tmp_path / "x")
    source = form.read(path)
    os.unlink(path)
    again = open_spec(source.to_spec())
    assert len(again) == N
    with pytest.raises(SourceError, match="x: is not there"):
        again.read(0, 1)


@pytest.mark.parametrize("name", ["parquet", "feather"])  # others are maps
def test_threads_decode_each_batch_once(name, tmp_path, monkeypatch):
    form, tree = FORMS[name], tree_of(400)
    block_source.BLOCKS.clear()
    source = form.read(form.save(table_of(tree), tmp_path / "x", rows=100))
    count, lock, decode = [], threading.Lock(), type(source)._decode

    def counted(self, block):
        with lock:
            count.append(block.number)
        return decode(self, block)

    monkeypatch.setattr(type(source), "_decode", counted)
    assert_threads_read(source, in_order(tree))
    assert sorted(count) == [0, 1, 2, 3]


def test_threads_read_maps(tmp_path):
    tree = tree_of(400)
    source = bj.from_arrow(FORMS["arrow"].save(table_of(tree), tmp_path / "x", rows=100))
    assert_threads_read(source, in_order(tree))


@pytest.mark.parametrize("name", ["parquet", "feather"])
def test_what_is_kept_is_bounded(name, tmp_path, monkeypatch):
    form, tree = FORMS[name], tree_of(400)
    block_source.BLOCKS.clear()
    source = form.read(form.save(table_of(tree), tmp_path / "x", rows=100))
    monkeypatch.setattr(block_source.BLOCKS.passing, "limit", 2 * 100 * (24 + 2))
    for start in range(0, 400, 10):
        assert_reads(source, in_order(tree), start, start + 10)
    assert len(block_source.BLOCKS.passing._values) == 2
    assert_reads(source, in_order(tree))


@pytest.mark.parametrize("name", ["parquet", "feather"])
def test_programs(name, tmp_path):
    tree = tree_of(50)
    files = save_parts(FORMS[name], tmp_path, tree, [0, 21, 50], rows=6)
    assert_runs(FORMS[name].read(files), tree)


TEXTS = ["", "a", "\u00e4\u00f6", "0123456789", "x" * 10, None]
KINDS = [pa.string(), pa.large_string(), pa.binary(), pa.large_binary(), pa.string_view()]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_texts_as_bytes(form, kind, tmp_path):
    texts = [text.encode() for text in TEXTS[:-1]] * 3
    values = texts if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) else [
        text.decode() for text in texts
    ]  # fmt: skip
    table = pa.table({"t": pa.array(values, kind), "n": np.arange(15)})
    path = tmp_path / f"x.{form}"
    if form == "parquet":
        pq.write_table(table, path, row_group_size=4)
    else:
        feather.write_feather(table, str(path), "uncompressed", chunksize=4)
    read = {"parquet": bj.from_parquet, "arrow": bj.from_arrow}[form]
    source = read(path, text_bytes=12)
    assert [str(leaf) for leaf in source.leaves] == ["int64[]", "uint8[12]"]
    for start, stop in ((0, 15), (3, 9), (14, 15), (4, 4)):
        found = source.read(start, stop)[1]
        assert found.dtype == np.uint8
        assert [bytes(row).rstrip(b"\0") for row in found] == texts[start:stop]
    with pytest.raises(SourceError, match=r"found a text of 10 bytes, expected at most 5; choose"):
        read(path, text_bytes=5).read(0, 15)
    with pytest.raises(StructureError, match="text_bytes=64"):
        read(path)
    with pytest.raises(StructureError, match="text_bytes: found 0"):
        read(path, text_bytes=0)


def test_a_text_that_is_missing(tmp_path):
    pq.write_table(pa.table({"t": TEXTS}), tmp_path / "x.parquet")
    with pytest.raises(SourceError, match=r"row 5 of it .*found null"):
        bj.from_parquet(tmp_path / "x.parquet", text_bytes=12).read(0, 6)


LISTS = [[1, 2, 3], [], [4], [5, 6, 7, 8, 9], [10, 11]] * 4


@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_lists_of_any_length(form, tmp_path):
    offsets = np.cumsum([0, *map(len, LISTS)])
    pairs = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(2.0 * offsets[-1])), 2)
    table = pa.table({
        "n": np.arange(len(LISTS), dtype=np.int16),
        "t": pa.array(LISTS, pa.list_(pa.int32())),
        "v": pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pairs),
    })  # fmt: skip
    path = tmp_path / f"x.{form}"
    if form == "parquet":
        pq.write_table(table, path, row_group_size=7)
    else:
        feather.write_feather(table, str(path), "uncompressed", chunksize=7)
    read = {"parquet": bj.from_parquet, "arrow": bj.from_arrow}[form]
    made = read(path, buckets=[2, 4, 6])
    for source in (made, open_spec(made.to_spec())):
        assert list(map(str, source.leaves)) == ["bool[6]", "int16[]", "int32[6]", "float64[6, 2]"]
        assert [leaf.ragged for leaf in source.leaves] == [True, False, True, True]
        for start, stop in ((0, 20), (5, 9), (10, 11), (3, 3)):
            for short in (False, True):
                arrays = (source.read_short if short else source.read)(start, stop)
                longest = max(map(len, LISTS[start:stop]), default=0)
                rows = next(b for b in (2, 4, 6) if b >= longest) if short else 6
                mask, numbers, tokens, vectors = arrays
                assert tokens.shape == (stop - start, rows)
                assert numbers.tolist() == list(range(start, stop))
                found = [row[known].tolist() for row, known in zip(tokens, mask, strict=True)]
                assert found == LISTS[start:stop]
                assert not tokens[~mask].any()
                expected = np.arange(2.0 * offsets[start], 2.0 * offsets[stop]).reshape(-1, 2)
                np.testing.assert_array_equal(vectors[mask], expected)


def test_a_program_over_lists_of_any_length(tmp_path):
    lists = sorted(LISTS, key=len)
    table = pa.table({"t": pa.array(lists, pa.list_(pa.float32()))})
    pq.write_table(table, tmp_path / "x.parquet")

    @bj.program(rows=None)
    def total(data):
        return bj.reduce_sum(bj.map_fn(lambda r: (r["t"] ** 2).sum(where=r["mask"]), data))

    source = bj.from_parquet(tmp_path / "x.parquet", buckets=[1, 3, 5])
    assert "padded to 1/3/5 rows" in str(bj.explain(total, source))
    for runner in ("local", "DirectRunner"):
        assert bj.run(total, source, runner=runner, options={"shard_size": 8}) == sum(
            item**2 for row in lists for item in row
        )


def test_lists_that_do_not_fit(tmp_path):
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"t": LISTS, "u": [row[:1] for row in LISTS]}), path)
    for buckets in ([], [3, 2], [0, 3], [2.5], [2**40]):
        with pytest.raises(SourceError, match="buckets: found"):
            bj.from_parquet(path, ["t"], buckets=buckets)
    with pytest.raises(SourceError, match=r"row 3 .*found a list of length 5, expected at most 4"):
        bj.from_parquet(path, ["t"], buckets=[4]).read(0, 20)
    with pytest.raises(
        SourceError, match=r"column 'u'.* row 0 .*length 1, expected 3 as in .* 't'"
    ):
        bj.from_parquet(path, buckets=[5]).read(0, 20)
    holes = [[1, 2], [3, None], None]
    pq.write_table(pa.table({"t": holes}), path)
    with pytest.raises(SourceError, match="found null, 1 of them"):
        bj.from_parquet(path, buckets=[5]).read(0, 3)
    pq.write_table(pa.table({"t": holes[:2]}), path)
    with pytest.raises(SourceError, match=r"row 1 .*found null in a list"):
        bj.from_parquet(path, buckets=[5]).read(0, 2)
    pq.write_table(pa.table({"n": [1], "mask": [[1]]}), path)
    with pytest.raises(StructureError, match="found a column 'mask'"):
        bj.from_parquet(path, buckets=[5])
    with pytest.raises(StructureError, match="no column of lists"):
        bj.from_parquet(path, ["n"], buckets=[5])
    pq.write_table(pa.table({"t": [[[1], [2, 3]]]}), path)
    with pytest.raises(StructureError, match="lists of lists of any length"):
        bj.from_parquet(path, buckets=[5])
