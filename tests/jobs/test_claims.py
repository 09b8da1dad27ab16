"""Folders of runs: one run at a time, and a result is that of one run."""

import concurrent.futures
import os
import pathlib
import shutil
import subprocess
import sys
import threading

import jax
import numpy as np
import pytest

import beamjax as bj
from beamjax.errors import ArrayFormatError, OptionsError
from beamjax.jobs.claims import claimed
from beamjax.options import Options
from beamjax.runtime.materialized_outputs import MaterializedOutputs

X = np.arange(128, dtype=np.float32).reshape(64, 2)


@bj.program(placements={"rows": None})
def same(x):
    return bj.map_fn(lambda v: v * 1.0, x)


@bj.program(placements={"rows": None})
def means(x):
    return bj.reduce_mean(x), bj.reduce_max(x), bj.map_fn(lambda v: v * 1.0, x)


def run(program, x, runner="local", **options):
    return bj.run(program, x, runner=runner, options=options)


@pytest.mark.parametrize("runner", ["local", "DirectRunner"])
def test_results_of_a_run_stay_unless_they_are_overwritten(runner, tmp_path):
    options = {"keep": "placed", "results_folder": str(tmp_path / "results")}
    first = run(same, X, runner, **options)
    with pytest.raises(OptionsError, match=r"results_folder: found a result of another run in .*"):
        run(same, X + 1, runner, **options)
    np.testing.assert_array_equal(bj.open_placed(first.folder), X)
    second = run(same, X + 2, runner, overwrite=True, **options)
    assert second.folder == first.folder
    np.testing.assert_array_equal(bj.open_placed(first.folder), X + 2)
    # Nothing of the first run is left.
    assert sorted(os.listdir(first.folder)) == sorted([*second.files, "placed.json"])
    assert os.listdir(tmp_path / "results") == [os.path.basename(first.folder)]


def test_a_table_by_key_stays_unless_it_is_overwritten(tmp_path):
    @bj.program(placements={"rows": None})
    def by_key(x):
        return bj.reduce_by_key(x[:, 0], bj.map_fn(lambda v: v[1], x))

    options = {"results_folder": str(tmp_path / "results"), "keep": "placed"}
    rows = np.stack([np.arange(64) % 4, np.ones(64)], axis=1).astype(np.int32)
    first = run(by_key, rows, **options)
    with pytest.raises(OptionsError, match=r"results_folder: found a result of another run in .*"):
        run(by_key, rows, **options)
    again = run(by_key, rows, overwrite=True, **options)
    assert again.folder == first.folder


def test_a_run_that_fails_after_a_result_leaves_none(tmp_path, monkeypatch):
    finish = MaterializedOutputs.finish

    def fail(self, placed):
        finish(self, placed)
        raise ValueError("full")

    monkeypatch.setattr(MaterializedOutputs, "finish", fail)
    options = {"results_folder": str(tmp_path / "results"), "keep": "placed"}
    with pytest.raises(ValueError, match="full"):
        run(same, X, **options)
    assert not (tmp_path / "results").exists()


def test_parts_of_a_killed_run_are_removed_by_the_next_one(tmp_path):
    folder = tmp_path / "results" / "result"
    folder.mkdir(parents=True)
    np.save(folder / "part-01234567-0-64.npy", X)
    (folder / "part-of-the-user.npy").touch()
    placed = run(same, X, keep="placed", results_folder=str(tmp_path / "results"))
    assert placed.folder == str(folder)
    assert {*os.listdir(folder)} == {*placed.files, "placed.json", "part-of-the-user.npy"}


@pytest.mark.parametrize("name", ["job_folder", "results_folder"])
def test_a_folder_is_refused_before_tracing_while_another_run_has_it(name, tmp_path):
    begun, go_on = threading.Event(), threading.Event()

    def wait(v):
        begun.set()
        assert go_on.wait(60)
        return v

    kind = jax.ShapeDtypeStruct((2,), np.float32)

    @bj.program(placements={"rows": None})
    def waiting(x):
        body = lambda v: jax.pure_callback(wait, kind, v, vmap_method="sequential")
        return bj.map_fn(body, x)

    def untraced(x):
        raise AssertionError("traced")

    options = {"keep": "placed", name: str(tmp_path / "folder"), "overwrite": True}
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        first = pool.submit(run, waiting, X, **options)
        assert begun.wait(60)
        try:
            for call in (bj.run, bj.launch):
                with pytest.raises(OptionsError, match=rf"^{name}: found another run that uses "):
                    call(untraced, X, runner="local", options=options)
        finally:
            go_on.set()
        np.testing.assert_array_equal(first.result(), X)
    assert not (tmp_path / "folder" / "lock").exists()
    run(same, X, **options)


def test_a_launched_job_holds_its_folder_until_it_has_ended(tmp_path):
    options = {"job_folder": str(tmp_path / "job"), "keep": "placed"}
    job = bj.launch(same, X, runner="local", options=options)
    placed = job.result()
    with pytest.raises(OptionsError, match="found a job that is done"):
        run(same, X, **options)
    assert placed.folder.startswith(str(tmp_path / "job"))
    run(same, X, overwrite=True, **options)


def test_one_folder_for_both(tmp_path):
    options = {"job_folder": str(tmp_path), "results_folder": str(tmp_path), "keep": "placed"}
    np.testing.assert_array_equal(run(same, X, **options), X)


PAIRS = 3


def child(folder, number):
    x = np.full((100_000, 4), float(number), np.float32)
    run(means, x[:64])
    for pair in range(PAIRS):
        print("ready", flush=True)
        sys.stdin.readline()
        try:
            run(means, x, job_folder=f"{folder}/job-{pair}")
            print("ran", flush=True)
        except OptionsError as error:
            print("refused" if "job_folder: found " in str(error) else error, flush=True)


def test_of_two_processes_that_start_at_the_same_moment_one_runs(tmp_path):
    code = "import sys, test_claims; test_claims.child(*sys.argv[1:])"
    environment = os.environ | {"PYTHONPATH": os.path.dirname(__file__)}
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path), number],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )
        for number in "12"
    ]  # fmt: skip
    try:
        for pair in range(PAIRS):
            assert [process.stdout.readline() for process in runs] == ["ready\n"] * 2
            for process in runs:
                process.stdin.write("\n")
                process.stdin.flush()
            outcomes = [process.stdout.readline() for process in runs]
            assert sorted(outcomes) == ["ran\n", "refused\n"]
            (number,) = (n for n, text in enumerate(outcomes, 1) if text == "ran\n")
            found = bj.open_job(tmp_path / f"job-{pair}").result()
            assert {float(np.max(leaf)) for leaf in found} == {number}
    finally:
        for process in runs:
            process.kill()
            process.communicate()


# --- a result names its run


def test_leaves_of_another_run_are_refused(tmp_path):
    for number in range(2):
        run(means, X + number, job_folder=str(tmp_path / f"job-{number}"))
    bj.open_job(tmp_path / "job-0").result()
    shutil.copy(tmp_path / "job-1" / "result-1.arrays", tmp_path / "job-0")
    with pytest.raises(
        ArrayFormatError, match=r"result-1\.arrays: found 1 arrays of run .*another"
    ):
        bj.open_job(tmp_path / "job-0").result()


def test_results_in_files_that_were_overwritten_are_not_those_of_the_job(tmp_path):
    options = {"keep": "placed", "results_folder": str(tmp_path / "results")}
    run(same, X, job_folder=str(tmp_path / "first"), **options)
    np.testing.assert_array_equal(bj.open_job(tmp_path / "first").result(), X)
    run(same, X + 1, overwrite=True, **options)
    with pytest.raises(ArrayFormatError, match=r"results of another run in .*which have replaced"):
        bj.open_job(tmp_path / "first").result()


def test_a_run_that_fails_leaves_no_folder(tmp_path):
    def wrong(x):
        raise ValueError("no")

    options = {"keep": "placed", "results_folder": str(tmp_path / "results")}
    with pytest.raises(ValueError, match="no"):
        run(wrong, X, **options)
    assert not (tmp_path / "results").exists()


def test_folders_at_urls_are_not_locked():
    with claimed(Options(results_folder="gs://bucket/results", keep="placed")):
        pass
    assert not pathlib.Path("gs:").exists()
