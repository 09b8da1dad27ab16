"""Rows grouped by a column: as a dict of lists would group them, whoever reads which rows."""

import os
from pathlib import Path

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import beamjax as bj
from beamjax import dealt_rows, grouping, table_parts
from beamjax.errors import (
    ArrayFormatError,
    OptionsError,
    PlacementError,
    SourceError,
    StructureError,
)

RNG = np.random.default_rng(5)
N = 3000
KEYS = RNG.integers(-40, 40, N) ** 3
TABLE = {
    "client": KEYS,
    "x": RNG.normal(size=(N, 3)).astype(np.float32),
    "y": RNG.normal(size=N).astype(np.float32),
}
RUNNERS = {
    "local": {},
    "one": {"runner": "DirectRunner"},
    "processes": {
        "runner": "DirectRunner",
        "options": {"direct_running_mode": "multi_processing", "direct_num_workers": 2},
    },
}


@pytest.fixture
def small(monkeypatch):
    """Many parts and blocks for a small table."""
    monkeypatch.setattr(table_parts, "PART_BYTES", 5000)
    monkeypatch.setattr(table_parts, "BLOCK_BYTES", 3000)
    monkeypatch.setattr(table_parts, "WRITE_BYTES", 1500)


def assert_groups(clients, table, by):
    """As groups made one row at a time."""
    expected = {}
    for number, key in enumerate(table[by].tolist()):
        expected.setdefault(key, []).append(number)
    assert sorted(clients.keys.tolist()) == sorted(expected)
    found = jax.tree_util.tree_unflatten(clients.treedef, clients.read(0, len(clients)))
    assert set(found) == {*table, "mask"} - {by}
    for member, key in enumerate(clients.keys.tolist()):
        rows = expected[key]
        assert found["mask"][member].sum() == len(rows)
        for name, array in table.items():
            if name != by:
                assert found[name].dtype == array.dtype
                np.testing.assert_array_equal(found[name][member, : len(rows)], array[rows])


@pytest.mark.parametrize("how", RUNNERS)
def test_groups(how, tmp_path, small):
    clients = bj.group_by(TABLE, "client", folder=tmp_path / "g", **RUNNERS[how])
    assert_groups(clients, TABLE, "client")
    assert sum(name.endswith("keys.npy") for name in os.listdir(tmp_path / "g")) > 5
    assert not [name for name in os.listdir(tmp_path / "g") if "tmp" in name or "dealt" in name]


def test_any_runner_writes_the_same_files(tmp_path, small):
    for how in RUNNERS:
        bj.group_by(TABLE, "client", folder=tmp_path / how, **RUNNERS[how])
    for name in os.listdir(tmp_path / "local"):
        data = [(tmp_path / how / name).read_bytes() for how in RUNNERS]
        assert data[1:] == data[:-1], name


@hypothesis.given(
    st.lists(st.integers(-3, 3), min_size=1, max_size=40),
    st.sampled_from([np.int8, np.int64, np.uint32, np.int32]),
    st.integers(1, 200),
    st.integers(1, 200),
)
@hypothesis.settings(max_examples=40)
def test_any_keys(tmp_path_factory, keys, dtype, part_bytes, write_bytes):
    keys = np.abs(keys) if np.dtype(dtype).kind == "u" else np.array(keys)
    table = {"k": keys.astype(dtype), "v": np.arange(len(keys), dtype=np.int16)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table_parts, "PART_BYTES", part_bytes)
        patch.setattr(table_parts, "BLOCK_BYTES", part_bytes)
        patch.setattr(table_parts, "WRITE_BYTES", write_bytes)
        clients = bj.group_by(table, "k", folder=tmp_path_factory.mktemp("g"))
    assert_groups(clients, table, "k")


def test_a_key_with_most_of_the_rows_is_written_by_batches(tmp_path, small, monkeypatch):
    """Of a part that is larger than others, a batch reads the blocks that it has rows of."""
    table = {**TABLE, "client": np.where(KEYS % 5 == 0, KEYS, 7)}
    read, batches = [], []
    original, rows = dealt_rows.Blocks.read, table_parts.Grouping._rows

    def reading(self, index):
        read.append((self.places[index][0], index))
        return original(self, index)

    def writing(self, blocks, wanted, ends, leaves):
        before = len(read)
        found = rows(self, blocks, wanted, ends, leaves)
        batches.append((len(blocks), len(read) - before, sum(x.nbytes for x in found)))
        return found

    monkeypatch.setattr(dealt_rows.Blocks, "read", reading)
    monkeypatch.setattr(table_parts.Grouping, "_rows", writing)
    clients = bj.group_by(table, "client", folder=tmp_path)
    assert_groups(clients, table, "client")
    assert max(nbytes for *_, nbytes in batches) <= 1500
    most = max(blocks for blocks, *_ in batches)
    assert most > 10
    large = [count for blocks, count, _ in batches if blocks == most]
    assert len(large) > 10
    assert np.median(large) < most / 5


def test_only_names_of_files_are_shuffled(tmp_path, small, monkeypatch):
    """As many elements as ranges that are read, and as parts; not as many as both, multiplied."""
    from beamjax.pipelines import shuffling

    dealt, written = [], []
    deal, write = shuffling.DealRows.process, shuffling.WriteGroups.process
    monkeypatch.setattr(
        shuffling.DealRows,
        "process",
        lambda self, element: (dealt.append(x) or x for x in deal(self, element)),
    )
    monkeypatch.setattr(
        shuffling.WriteGroups, "process", lambda self, x: written.append(x) or write(self, x)
    )
    clients = bj.group_by(TABLE, "client", folder=tmp_path, runner="DirectRunner")
    assert_groups(clients, TABLE, "client")
    ranges = -(-N // (3000 // 24))
    assert len(dealt) == ranges > 20
    assert sorted(written) == list(range(len(written)))
    assert len(written) > 10


def test_the_hash_spreads_neighbours():
    parts = table_parts.hashed(np.arange(100_000)) % np.uint64(64)
    counts = np.bincount(parts.astype(np.int64), minlength=64)
    assert ((counts - counts.mean()) ** 2 / counts.mean()).sum() < 110  # 63 degrees of freedom
    same = [table_parts.hashed(np.array([7], dtype)) for dtype in (np.int8, np.int64, np.uint16)]
    assert len({int(found[0]) for found in same}) == 1


def test_members_of_like_length_stand_together(tmp_path):
    clients = bj.group_by(TABLE, "client", folder=tmp_path)
    lengths = clients.read(0, len(clients))[0].sum(axis=1)
    assert lengths.tolist() == sorted(lengths)


def test_the_groups_are_found_again(tmp_path, monkeypatch):
    first = bj.group_by(TABLE, "client", folder=tmp_path)
    monkeypatch.setattr(grouping, "shuffle", None)
    again = bj.group_by(TABLE, "client", folder=tmp_path, buckets=[500])
    assert again.buckets == (500,)
    np.testing.assert_array_equal(first.keys, again.keys)
    with pytest.raises(OptionsError, match="another table: table differ"):
        bj.group_by({**TABLE, "y": TABLE["y"] + 1}, "client", folder=tmp_path)
    other = {**TABLE, "other": TABLE["client"]}
    with pytest.raises(OptionsError, match="another table: table, by, leaves differ"):
        bj.group_by(other, "other", folder=tmp_path)


def test_a_call_that_was_stopped_is_done_again(tmp_path, small, monkeypatch):
    original = table_parts.Grouping.write

    def stops(self, part, blocks):
        if part == 5:
            raise KeyboardInterrupt
        original(self, part, blocks)

    monkeypatch.setattr(table_parts.Grouping, "write", stops)
    with pytest.raises(KeyboardInterrupt):
        bj.group_by(TABLE, "client", folder=tmp_path)
    monkeypatch.undo()
    assert_groups(bj.group_by(TABLE, "client", folder=tmp_path), TABLE, "client")


@pytest.mark.parametrize("how", ["local", "processes"])
def test_a_program_over_the_groups(how, tmp_path):
    @bj.program(clients=None)
    def total(w, data):
        def loss(client):
            losses = jnp.square(client["x"] @ w - client["y"])
            return jnp.sum(losses, where=client["mask"])

        return bj.reduce_sum(bj.map_fn(loss, data))

    w = np.array([0.5, -1.0, 2.0], np.float32)
    clients = bj.group_by(TABLE, "client", folder=tmp_path)
    run = {"runner": "local", **RUNNERS[how]}
    found = bj.run(total, w, clients, **run)
    expected = np.square(TABLE["x"] @ w - TABLE["y"]).sum(dtype=np.float64)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    text = str(bj.explain(total, w, clients))
    assert "padded to" in text


def test_a_table_of_parquet(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table({"client": KEYS, "y": TABLE["y"]})
    pq.write_table(table, tmp_path / "t.parquet", row_group_size=700)
    rows = bj.from_parquet(tmp_path / "t.parquet")
    clients = bj.group_by(rows, "client", folder=tmp_path / "g", **RUNNERS["processes"])
    assert_groups(clients, {"client": KEYS, "y": TABLE["y"]}, "client")
    again = bj.from_parquet(tmp_path / "t.parquet", group_by="client", folder=tmp_path / "g")
    np.testing.assert_array_equal(again.keys, clients.keys)
    for wrong in ({"group_by": "client"}, {"folder": tmp_path}):
        with pytest.raises(OptionsError, match="expected both, or neither"):
            bj.from_parquet(tmp_path / "t.parquet", **wrong)


def test_texts_are_keys(tmp_path, small):
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = [f"client-{key}" if key else "" for key in KEYS.tolist()]
    table = pa.table({"client": names, "y": TABLE["y"]})
    pq.write_table(table, tmp_path / "t.parquet", row_group_size=700)
    rows = bj.from_parquet(tmp_path / "t.parquet", text_bytes=20)
    for how in RUNNERS:
        clients = bj.group_by(rows, "client", folder=tmp_path / how, **RUNNERS[how])
        assert clients.keys.dtype == "S20"
        texts = np.array([name.encode() for name in names])
        assert_groups(clients, {"client": texts, "y": TABLE["y"]}, "client")


ATTEMPTS = {
    "no such leaf": ({"by": "user"}, StructureError, "no leaf 'user' in a dict of 'client', 'x'"),
    "no dict": ({"source": KEYS}, StructureError, "no leaf 'client' in a dict"),
    "floats": ({"by": "y"}, StructureError, r"float32\[\] as the leaf 'y'"),
    "vectors": ({"by": "x"}, StructureError, "expected an integer in each row"),
    "numbers": (
        {"source": {"client": KEYS.reshape(-1, 2), "x": KEYS[::2]}}, StructureError, "or a text",
    ),
    "keys alone": ({"source": {"client": KEYS}}, StructureError, "no leaf but 'client'"),
    "a stream": ({"source": bj.from_chunks(lambda: [TABLE])}, SourceError, "known length"),
    "a url": ({"folder": "gs://b/g"}, OptionsError, "found the URL"),
    "a bucket": ({"buckets": [3]}, SourceError, "expected at most 3"),
    "a mask": (
        {"source": {"client": KEYS, "mask": KEYS}}, StructureError, "found a leaf 'mask'",
    ),
    "no rows": ({"source": {"client": KEYS[:0], "x": KEYS[:0]}}, PlacementError, "0 members"),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTEMPTS)
def test_bad_input(name, tmp_path):
    change, kind, message = ATTEMPTS[name]
    arguments = {"source": TABLE, "by": "client", "folder": tmp_path / "g", **change}
    with pytest.raises(kind, match=message):
        bj.group_by(**arguments)


def test_damaged_folders(tmp_path):
    clients = bj.group_by(TABLE, "client", folder=tmp_path)
    Path(tmp_path, grouping.MANIFEST).write_text("{")
    with pytest.raises(ArrayFormatError, match=r"groups\.json: cannot read"):
        bj.group_by(TABLE, "client", folder=tmp_path)
    Path(tmp_path, grouping.MANIFEST).unlink()
    again = bj.group_by(TABLE, "client", folder=tmp_path)
    np.testing.assert_array_equal(again.keys, clients.keys)
    for path in tmp_path.glob("part-*-counts.npy"):
        path.unlink()
    with pytest.raises(SourceError, match="found 0 rows in groups, expected 3000"):
        bj.group_by(TABLE, "client", folder=tmp_path)
