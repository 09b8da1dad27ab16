"""What the shuffle of a table takes, against what processes took; and tables that are refused."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import beamjax as bj
from beamjax.errors import StagingError
from beamjax.grouping_memory import DEAL, WRITE, grouping_estimate
from beamjax.memory import SLACK
from beamjax.options import Options
from beamjax.sources.source_base import LeafSpec
from beamjax.table_parts import Grouping, parts_for
from beamjax.worker_processes import Workers

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
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


@pytest.mark.parametrize("workers", [Workers(beam=False), Workers(2), Workers(shared=False)])
def test_the_bound_does_not_grow_with_the_rows(workers):
    found = [estimated(Table(n), workers).worker_bytes for n in (10**5, 10**6, 10**7)]
    assert found[1] <= 1.1 * found[0]
    assert found[2] <= 1.1 * found[1]
    assert max(found) < 600 * MIB


def test_what_it_is_made_of():
    one = estimated(Table(10**6, blocks=40 * MIB), Workers(beam=False))
    three = estimated(Table(10**6, blocks=40 * MIB), Workers(3))
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


GROUPED = """
import json, sys
sys.path[:0] = [sys.argv[1]]
import memory
from pathlib import Path
folder, runner = Path(sys.argv[2]), sys.argv[3]
memory.write_rows(folder / "rows.parquet", 20_000)
import beamjax as bj
from beamjax import grouping
from beamjax.grouping_memory import grouping_estimate
from beamjax.options import Options
from beamjax.worker_processes import Workers
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
@pytest.mark.parametrize("runner", ["local", "DirectRunner"])
def test_processes_take_no_more(runner, tmp_path):
    command = [sys.executable, "-c", GROUPED, str(BENCHMARKS), str(tmp_path), runner]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    own, bound = json.loads(done.stdout.splitlines()[-1])
    assert own <= bound <= 2 * own


# --- refusals


@pytest.mark.parametrize("runner", ["local", "DirectRunner", "FlinkRunner"])
def test_what_does_not_fit_is_refused_before_it_starts(runner, tmp_path):
    folder = tmp_path / "groups"
    with pytest.raises(StagingError) as error:
        bj.group_by(Table(10**6), "key", folder=folder, runner=runner, options={"memory": "100MiB"})
    text = str(error.value)
    assert "step 'Write groups': a worker process may take" in text
    assert "memory=100.0 MiB: Python" in text
    assert not folder.exists()
    more = text.split('give a worker process more, memory="')[1].split('"')[0]
    with pytest.raises(AssertionError, match="read"):
        bj.group_by(Table(10**6), "key", folder=folder, options={"memory": more})


def test_fewer_threads_and_smaller_blocks_are_advised(tmp_path):
    def refusal(**flags):
        table = Table(10**6, blocks=200 * MIB)
        options = {"memory": "1GiB", **flags}
        with pytest.raises(StagingError) as error:
            bj.group_by(table, "key", folder=tmp_path, runner="DirectRunner", options=options)
        return str(error.value)

    text = refusal(direct_num_workers=8)
    assert "use 1 of 8 threads in a worker process" in text
    assert "write the table in smaller blocks than of 200 MiB" in text


def test_threads_that_compute_do_not_shuffle():
    """Neither without Beam nor in a bundle: one thread deals and writes."""
    table = Table(10**6, blocks=40 * MIB)
    for runner in ("local", "DirectRunner"):
        one, eight = (
            estimated(table, Workers.of(runner, Options(local_threads=n))) for n in (1, 8)
        )
        assert one == eight


def test_a_table_in_memory_is_advised_to_be_in_files(tmp_path):
    table = {"key": np.arange(1000), "x": np.zeros((1000, 64), np.float32)}
    with pytest.raises(StagingError, match="keep the table in files"):
        bj.group_by(table, "key", folder=tmp_path, options={"memory": "1MiB"})


def test_joins_are_refused_too(tmp_path):
    left = {"key": np.arange(1000), "x": np.zeros((1000, 64), np.float32)}
    right = {"key": np.arange(1000), "y": np.zeros(1000, np.float32)}
    with pytest.raises(StagingError, match=r"step 'Write groups'.*memory=1\.0 MiB"):
        bj.join(left, right, "key", folder=tmp_path, options={"memory": "1MiB"})


def test_groups_that_are_there_already_are_not_refused(tmp_path):
    table = {"key": np.arange(100), "x": np.zeros((100, 4), np.float32)}
    bj.group_by(table, "key", folder=tmp_path)
    found = bj.group_by(table, "key", folder=tmp_path, options={"memory": "1MiB"})
    assert len(found) == 100
