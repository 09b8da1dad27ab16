"""Rows grouped by a column, and the memory that this takes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits
from hypothesis import strategies as st
from source_files import refused, write_parquet

import beamjax as bj
from beamjax.diagnostics.memory import SLACK
from beamjax.diagnostics.topology import Workers
from beamjax.errors import (
    ArrayFormatError,
    OptionsError,
    PlacementError,
    SourceError,
    StagingError,
    StructureError,
)
from beamjax.options import Options
from beamjax.shuffle import dealt_rows, table_parts
from beamjax.shuffle.table_parts import Grouping, parts_for
from beamjax.sources.source_base import LeafSpec
from beamjax.tables import grouping
from beamjax.tables.grouping_memory import DEAL, WRITE, grouping_estimate

RNG = np.random.default_rng(5)
N = 3000
KEYS = RNG.integers(-40, 40, N) ** 3
TABLE = {
    "client": KEYS,
    "x": RNG.normal(size=(N, 3)).astype(np.float32),
    "y": RNG.normal(size=N).astype(np.float32),
}
PROCESSES = {
    "runner": "DirectRunner",
    "options": {"direct_running_mode": "multi_processing", "direct_num_workers": 2},
}
RUNNERS = {"local": {}, "one": {"runner": "DirectRunner"}, "processes": PROCESSES}


@pytest.fixture
def small(monkeypatch):
    """Many parts and blocks for a small table."""
    monkeypatch.setattr(table_parts, "PART_BYTES", 5000)
    monkeypatch.setattr(table_parts, "BLOCK_BYTES", 3000)
    monkeypatch.setattr(table_parts, "WRITE_BYTES", 1500)


def tree_of(source):
    return jax.tree.unflatten(source.treedef, source.read(0, len(source)))


def assert_groups(clients, table, by):
    """As groups made one row at a time."""
    expected = {}
    for number, key in enumerate(table[by].tolist()):
        expected.setdefault(key, []).append(number)
    assert sorted(clients.keys.tolist()) == sorted(expected)
    found = tree_of(clients)
    assert set(found) == {*table, "mask"} - {by}
    for member, key in enumerate(clients.keys.tolist()):
        rows = expected[key]
        assert found["mask"][member].sum() == len(rows)
        for name in set(table) - {by}:
            assert_same_bits(found[name][member, : len(rows)], table[name][rows])


def test_any_runner_writes_the_same_files(tmp_path, small):
    for how in RUNNERS:
        clients = bj.group_by(TABLE, "client", folder=tmp_path / how, **RUNNERS[how])
        assert_groups(clients, TABLE, "client")
    names = sorted(os.listdir(tmp_path / "local"))
    for name in names:
        data = [(tmp_path / how / name).read_bytes() for how in RUNNERS]
        assert data[1:] == data[:-1], name
    assert sum(name.endswith("keys.npy") for name in names) > 5
    assert not [name for name in names if "tmp" in name or "dealt" in name]


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
    assert_groups(bj.group_by(table, "client", folder=tmp_path), table, "client")
    assert max(nbytes for *_, nbytes in batches) <= 1500
    most = max(blocks for blocks, *_ in batches)
    large = [count for blocks, count, _ in batches if blocks == most]
    assert min(most, len(large)) > 10
    assert np.median(large) < most / 5


def test_only_names_of_files_are_shuffled(tmp_path, small, monkeypatch):
    """As many elements as ranges that are read, and as parts; not as many as both, multiplied."""
    from beamjax.pipelines.tables.shuffle import DealRows, WriteGroups

    dealt, written = [], []
    deal, write = DealRows.process, WriteGroups.process

    def dealing(self, element):
        for found in deal(self, element):
            dealt.append(found)
            yield found

    monkeypatch.setattr(DealRows, "process", dealing)
    monkeypatch.setattr(WriteGroups, "process", lambda self, x: written.append(x) or write(self, x))
    clients = bj.group_by(TABLE, "client", folder=tmp_path, runner="DirectRunner")
    assert_groups(clients, TABLE, "client")
    assert len(dealt) == -(-N // (3000 // 24)) > 20
    assert sorted(written) == list(range(len(written)))
    assert len(written) > 10


def test_the_hash_spreads_neighbours():
    parts = table_parts.hashed(np.arange(100_000)) % np.uint64(64)
    counts = np.bincount(parts.astype(np.int64), minlength=64)
    assert ((counts - counts.mean()) ** 2 / counts.mean()).sum() < 110  # 63 degrees of freedom
    same = {int(table_parts.hashed(np.array([7], d))[0]) for d in (np.int8, np.int64, np.uint16)}
    assert len(same) == 1


def test_the_groups_are_found_again(tmp_path, monkeypatch):
    first = bj.group_by(TABLE, "client", folder=tmp_path)
    lengths = first.read(0, len(first))[0].sum(axis=1).tolist()
    assert lengths == sorted(lengths)  # Members of like length stand together.
    monkeypatch.setattr(grouping, "shuffle", None)
    options = {"memory": "1MiB"}  # which would not do to group them
    again = bj.group_by(TABLE, "client", folder=tmp_path, buckets=[500], options=options)
    assert again.buckets == (500,)
    np.testing.assert_array_equal(first.keys, again.keys)
    other = {**TABLE, "y": TABLE["y"] + 1}
    message = "another table: table differ"
    refused(OptionsError, message, bj.group_by, other, "client", folder=tmp_path)
    other = {**TABLE, "other": TABLE["client"]}
    message = "another table: table, by, leaves differ"
    refused(OptionsError, message, bj.group_by, other, "other", folder=tmp_path)


def test_a_call_that_was_stopped_and_damaged_folders(tmp_path, small, monkeypatch):
    original = table_parts.Grouping.write

    def stops(self, part, blocks):
        if part == 5:
            raise KeyboardInterrupt
        original(self, part, blocks)

    def group():
        return bj.group_by(TABLE, "client", folder=tmp_path)

    with monkeypatch.context() as patch:
        patch.setattr(table_parts.Grouping, "write", stops)
        refused(KeyboardInterrupt, "", group)
    assert_groups(group(), TABLE, "client")
    manifest = Path(tmp_path, grouping.MANIFEST)
    manifest.write_text("{")
    refused(ArrayFormatError, r"groups\.json: cannot read", group)
    manifest.unlink()
    assert_groups(group(), TABLE, "client")
    for path in tmp_path.glob("part-*-counts.npy"):
        path.unlink()
    refused(SourceError, "found 0 rows in groups, expected 3000", group)


def test_a_program_over_the_groups(tmp_path):
    @bj.program(clients=None)
    def total(w, data):
        def loss(client):
            losses = jnp.square(client["x"] @ w - client["y"])
            return jnp.sum(losses, where=client["mask"])

        return bj.reduce_sum(bj.map_fn(loss, data))

    w = np.array([0.5, -1.0, 2.0], np.float32)
    clients = bj.group_by(TABLE, "client", folder=tmp_path)
    expected = np.square(TABLE["x"] @ w - TABLE["y"]).sum(dtype=np.float64)
    for runner in ("local", "DirectRunner"):
        found = bj.run(total, w, clients, runner=runner)
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert "padded to" in str(bj.explain(total, w, clients))


def test_tables_of_parquet_and_texts_as_keys(tmp_path, small):
    import pyarrow as pa

    path = tmp_path / "t.parquet"
    names = [f"client-{key}" if key else "" for key in KEYS.tolist()]
    write_parquet(path, pa.table({"client": names, "y": TABLE["y"]}), 700)
    rows = bj.from_parquet(path, text_bytes=20)
    clients = bj.group_by(rows, "client", folder=tmp_path / "g", runner="DirectRunner")
    assert clients.keys.dtype == "S20"
    texts = np.array([name.encode() for name in names])
    assert_groups(clients, {"client": texts, "y": TABLE["y"]}, "client")
    write_parquet(path, {"client": KEYS, "y": TABLE["y"]}, 700)
    clients = bj.group_by(bj.from_parquet(path), "client", folder=tmp_path / "h")
    assert_groups(clients, {"client": KEYS, "y": TABLE["y"]}, "client")


def test_what_cannot_be_grouped(tmp_path):
    for i, (change, error, message) in enumerate(
        [
            ({"by": "user"}, StructureError, "no leaf 'user' in a dict of 'client', 'x'"),
            ({"source": KEYS}, StructureError, "no leaf 'client' in a dict"),
            ({"by": "y"}, StructureError, r"float32\[\] as the leaf 'y'"),
            ({"by": "x"}, StructureError, "expected an integer in each row"),
            (
                {"source": {"client": KEYS.reshape(-1, 2), "x": KEYS[::2]}},
                StructureError,
                "or a text",
            ),
            ({"source": {"client": KEYS}}, StructureError, "no leaf but 'client'"),
            ({"source": bj.from_chunks(lambda: [TABLE])}, SourceError, "known length"),
            ({"folder": "gs://b/g"}, OptionsError, "found the URL"),
            ({"buckets": [3]}, SourceError, "expected at most 3"),
            ({"source": {"client": KEYS, "mask": KEYS}}, StructureError, "found a leaf 'mask'"),
            ({"source": {"client": KEYS[:0], "x": KEYS[:0]}}, PlacementError, "0 members"),
        ]
    ):
        arguments = {"source": TABLE, "by": "client", "folder": tmp_path / str(i), **change}
        refused(error, message, bj.group_by, **arguments)


# --- memory

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MIB = 1 << 20


class Table(bj.Source, kind="tests-table"):
    """Rows that nobody may read."""

    def __init__(self, n, width=1024, blocks=0):
        self.n, self.width, self.blocks = n, width, blocks

    leaves = property(
        lambda self: (
            LeafSpec((), np.dtype(np.int64), None, "['key']"),
            LeafSpec((self.width,), np.dtype(np.float32), None, "['x']"),
        )
    )
    treedef = property(lambda self: jax.tree_util.tree_structure({"key": 0, "x": 0}))
    block_bytes = property(lambda self: self.blocks)

    def __len__(self):
        return self.n

    def read(self, start, stop):
        raise AssertionError("read")

    def to_spec(self):
        return {**self.spec_head(), "n": self.n}

    @classmethod
    def from_spec(cls, spec):
        return cls(spec["n"])


def estimated(table, workers):
    return grouping_estimate(table, Grouping("", 0, parts_for(table), len(table)), workers)


def of_steps(estimate):
    return {step.step: step.nbytes for step in estimate.steps}


def test_the_bound_does_not_grow_with_the_rows():
    for workers in (Workers(beam=False), Workers(2), Workers(shared=False)):
        found = [estimated(Table(n), workers).worker_bytes for n in (10**5, 10**6, 10**7)]
        assert found[1] <= 1.1 * found[0]
        assert found[2] <= 1.1 * found[1]
        assert max(found) < 600 * MIB


def test_what_the_bound_is_made_of():
    table = Table(10**6, blocks=40 * MIB)
    one, three = estimated(table, Workers(beam=False)), estimated(table, Workers(3))
    assert set(of_steps(one)) == {DEAL, WRITE}
    for step in (DEAL, WRITE):
        assert of_steps(three)[step] == pytest.approx(3 * of_steps(one)[step])
    decoded = {part.what: part.nbytes for part in three.kept}["decoded blocks of sources"]
    assert decoded >= SLACK * 3 * 2 * 40 * MIB
    # Narrow rows have more numbers that put them in order than data.
    assert of_steps(estimated(Table(10**8, 2), Workers()))[WRITE] > of_steps(one)[WRITE]
    live = {"key": np.arange(1000), "x": np.zeros((1000, 1024), np.float32)}
    found = estimated(bj.from_arrays(live), Workers())
    assert "rows in memory" in {part.what for part in found.launcher}
    # One thread deals and writes, however many compute.
    for runner in ("local", "DirectRunner"):
        few, many = (Workers.of(runner, Options(local_threads=n)) for n in (1, 8))
        assert estimated(table, few) == estimated(table, many)


GROUPED = """
import json, sys
sys.path[:0] = [sys.argv[1]]
import memory
from pathlib import Path
folder, runner = Path(sys.argv[2]), sys.argv[3]
memory.write_rows(folder / "rows.parquet", 20_000)
import beamjax as bj
from beamjax.tables import grouping
from beamjax.tables.grouping_memory import grouping_estimate
from beamjax.diagnostics.topology import Workers
found = []
def noted(rows, grouping, options, runner):
    found.append(grouping_estimate(rows, grouping, Workers.of(runner, options)))
grouping.check_grouping = noted
rows = bj.from_parquet(folder / "rows.parquet")
watch = memory.Watch()
bj.group_by(rows, "key", folder=folder / "groups", runner=runner)
own, _ = watch.end()
(e,) = found
print(json.dumps([own, e.launcher_bytes / 2**20]))
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="memory is read from /proc")
@pytest.mark.parametrize("runner", [pytest.param("local", marks=pytest.mark.long), "DirectRunner"])
def test_processes_take_no_more(runner, tmp_path):
    command = [sys.executable, "-c", GROUPED, str(BENCHMARKS), str(tmp_path), runner]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    own, bound = json.loads(done.stdout.splitlines()[-1])
    assert own <= bound <= 2 * own


@pytest.mark.parametrize("runner", ["local", "DirectRunner", "FlinkRunner"])
def test_what_does_not_fit_is_refused_before_it_starts(runner, tmp_path):
    folder = tmp_path / "groups"
    how = {"folder": folder, "runner": runner, "options": {"memory": "100MiB"}}
    message = "step 'Write groups': a worker process may take"
    text = str(refused(StagingError, message, bj.group_by, Table(10**6), "key", **how))
    assert "memory=100.0 MiB: Python" in text
    assert not folder.exists()
    more = text.split('give a worker process more, memory="')[1].split('"')[0]
    how = {"folder": folder, "options": {"memory": more}}
    refused(AssertionError, "read", bj.group_by, Table(10**6), "key", **how)


def test_advice_where_it_does_not_fit(tmp_path):
    table = Table(10**6, blocks=200 * MIB)
    options = {"memory": "1GiB", "direct_num_workers": 8}
    how = {"folder": tmp_path, "runner": "DirectRunner", "options": options}
    text = str(refused(StagingError, "", bj.group_by, table, "key", **how))
    assert "use 1 of 8 threads in a worker process" in text
    assert "write the table in smaller blocks than of 200 MiB" in text
    table = {"key": np.arange(1000), "x": np.zeros((1000, 64), np.float32)}
    how = {"folder": tmp_path, "options": {"memory": "1MiB"}}
    refused(StagingError, "keep the table in files", bj.group_by, table, "key", **how)
