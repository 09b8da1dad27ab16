"""Rounds and branches on resident workers: passes that run, what the store holds, and errors."""

import os
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, assert_same_bits

import beamjax as bj
from beamjax.errors import WorkerError
from beamjax.pipelines.resident import mailbox
from beamjax.pipelines.resident.executor import Resident
from beamjax.pipelines.resident.resident_job import ResidentJob
from beamjax.pipelines.values import store as stores
from beamjax.pipelines.values.members import MembersSource
from beamjax.plan.steps import RANGE_VALUES
from beamjax.storage import files

N = 21
X = np.random.default_rng(0).integers(-4, 5, (N, 3)).astype(np.float32)
W = np.array([2, -1, 3], np.float32)
OPTIONS = {"shard_size": 8}
THREADS = {"direct_running_mode": "multi_threading", "direct_num_workers": 2}
PROCESSES = {"direct_running_mode": "multi_processing", "direct_num_workers": 2}


def total(w, x):
    return bj.reduce_sum(bj.map_fn(lambda v: v * w, x))


@pytest.fixture
def passes(monkeypatch):
    """The passes that workers run, by the names of their steps, and the files before each."""
    found = []
    there = Resident._run_on_workers

    def spy(self, program, current, elements):
        found.append((program.task.step.name, len(files.names(self.store.root))))
        return there(self, program, current, elements)

    monkeypatch.setattr(Resident, "_run_on_workers", spy)
    return found


def names(passes):
    return [name for name, _ in passes]


@bj.program(clients=N)
def mixed(x, w, hs):
    """Carries what is read from outside, passed on, replaced or sliced, and stacks all of it."""
    y = bj.map_fn(lambda v: v * 2, x)
    u = bj.reduce_sum(bj.map_fn(lambda v, w: v * w, (x, bj.broadcast(w))))

    def step(state, each):
        p, v, a, b, q, h = state
        e, i = each
        t = bj.reduce_sum(bj.map_fn(lambda p, a, b, e: p * a + b + e.astype("f4"), (p, a, b, e)))
        p1 = bj.map_fn(lambda p, y, v: p / 2 + i * y + v / 64, (p, y, bj.broadcast(v)))
        h1 = bj.map_fn(lambda h, e: h + e, (h, e))
        return (p1, v + jnp.round(t / 64), y, b, w, h1), (a, b, w, q, t, h)

    return jax.lax.scan(step, (y, u, x, y, u, hs[0]), (hs, u))


@bj.program(clients=N)
def nested(x, w, turns):
    """Rounds with a branch that has rounds of its own, backwards."""

    def taken(w, p):
        return jax.lax.scan(lambda a, _: (bj.map_fn(lambda a: a + w, a), a), p, length=2)

    def other(w, p):
        return p, bj.map_fn(lambda p: p * 0, p)[None].repeat(2, 0)

    def step(state, turn):
        w, p = state
        q, hist = jax.lax.cond(turn % 2 == 1, taken, other, w, p)
        w = jnp.round(total(w * 0 + 0.125, q) + w)
        return (w, q), (q, hist, w)

    return jax.lax.scan(step, (w, x), turns, reverse=True)


@pytest.mark.versions
def test_rounds_have_the_bits_of_a_run_in_this_process():
    hs = (np.arange(3 * N * 3) % 7).reshape(3, N, 3).astype(jnp.bfloat16)
    turns = (np.int32([0, 1, 3]), np.int32([]))
    for fn, args in ((mixed, (X, W, hs)), *((nested, (X, W, some)) for some in turns)):
        expected = bj.run(fn, *args, runner="local", options=OPTIONS)
        assert_close(expected, jax.jit(fn)(*args))
        for more in ({}, THREADS):
            assert_same_bits(bj.run(fn, *args, options={**OPTIONS, **more}), expected)


def test_a_pass_with_sums_and_a_combine():
    """Their partials take different ways to the launching process."""

    @bj.program(clients=N)
    def fn(x, w):
        y = bj.map_fn(lambda v: v * w, x)
        tail = bj.reduce(lambda a, b: a * 0.5 + b, y)
        return bj.reduce_sum(y) / N + tail, bj.reduce_argmax(y)

    looped = lambda x, w: jax.lax.scan(lambda w, _: fn(x, w), w, length=2)
    expected = bj.run(looped, X, W, runner="local", options=OPTIONS)
    for more in ({}, THREADS, PROCESSES):
        assert_same_bits(bj.run(looped, X, W, options={**OPTIONS, **more}), expected)


@bj.program(clients=N)
def until(x, w, limit):
    """The condition is computed in this process, each round is one pass."""
    again = lambda state: (total(state[0], x) / 8, state[1] + 1)
    return jax.lax.while_loop(lambda state: state[1] < limit, again, (w, 0))


@bj.program(clients=N)
def halve(x, s, limit):
    """The condition is a pass, the round is computed in this process."""
    return jax.lax.while_loop(lambda s: total(s, x).sum() > limit, lambda s: s / 2, s)


@bj.program(clients=N)
def choose(x, w, index):
    blocks = [lambda: total(w, x), lambda: total(w, x + 1), lambda: w]
    return jax.lax.switch(index, blocks)


def test_passes_alone_go_to_workers(passes):
    found = bj.run(until, X, W, 3, options=OPTIONS)
    assert_same_bits(found, bj.run(until, X, W, 3, runner="local", options=OPTIONS))
    assert names(passes) == ["map_clients_0"] * 3
    passes.clear()
    x = np.abs(X)
    s = bj.run(halve, x, np.float32(8), np.float32(x.sum() * 1.5), options=OPTIONS)
    assert (s, len(passes)) == (1, 4)
    passes.clear()
    bj.run(until, X, W, 0, options=OPTIONS)
    assert not passes


def test_branches_run_one_block(passes):
    for index, taken in ((-3, 0), (0, 0), (1, 1), (2, 2), (9, 2)):
        passes.clear()
        expected = (total_by_numpy(W, X), total_by_numpy(W, X + 1), W)[taken]
        assert_same_bits(bj.run(choose, X, W, index, options=OPTIONS), expected)
        assert names(passes) == [f"map_clients_{taken}"] * (taken < 2)


def total_by_numpy(w, x):
    return (x * w).sum(axis=0)


# --- what is left behind, and what goes wrong


@pytest.fixture
def all_as_files(monkeypatch):
    monkeypatch.setattr("beamjax.pipelines.values.store.INLINE_BYTES", 0)


def test_files_of_dead_values_go_as_the_loop_goes_on(passes, all_as_files):
    bj.run(until, X, W, 8, options={**OPTIONS, **THREADS})
    assert len(passes) == 8
    assert len({count for _, count in passes[1:]}) == 1

    @bj.program(clients=N)
    def placed(x):
        return jax.lax.fori_loop(0, 6, lambda _, p: bj.map_fn(lambda v: v + 1, p), x)

    passes.clear()
    np.testing.assert_array_equal(bj.run(placed, X, options=OPTIONS), X + 6)
    assert len({count for _, count in passes[2:]}) == 1


def test_a_value_that_shares_its_file_stays(all_as_files):
    """Equal values share a content-hashed file: one is dropped, the other one is still read."""

    @bj.program(clients=N)
    def fn(x, w):
        step = lambda _, s: (bj.reduce_sum(bj.map_fn(lambda v: v * 0 + s[1] / N, x)), s[1])
        return jax.lax.fori_loop(0, 3, step, (w, w))

    assert_close(bj.run(fn, X, W, options=OPTIONS), (W, W))


@pytest.mark.parametrize("error", [KeyboardInterrupt, WorkerError])
def test_a_run_that_ends_early_leaves_nothing(error, tmp_path, all_as_files, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run, left = ResidentJob.run, iter([None, None])

    def broken(self, *args):
        if next(left, error) is error:
            assert os.listdir(tmp_path)
            raise error("stopped")
        return run(self, *args)

    monkeypatch.setattr(ResidentJob, "run", broken)
    with pytest.raises(error, match="stopped"):
        bj.run(until, X, W, 4, options=OPTIONS)
    assert list(tmp_path.iterdir()) == []


def test_an_error_names_the_round():
    def fails(v, number):
        def check(v, number):
            assert number < 3, "round three"
            return v

        return jax.pure_callback(check, v, v, number, vmap_method="sequential")

    @bj.program(clients=N)
    def fn(x, w):
        step = lambda i, w: bj.reduce_mean(bj.map_fn(lambda v: fails(v * w, i), x))
        return jax.lax.fori_loop(0, 4, step, w)

    step = r"step 'map_clients_0' \(.*\), shard \d of placement"
    for more in ({}, PROCESSES):
        with pytest.raises(WorkerError, match=f"^loop_0, round 3: {step}"):
            bj.run(fn, X, W, options={**OPTIONS, **more})
    with pytest.raises(WorkerError, match=f"^loop_0, round 3: {step}"):
        bj.run(fn, X, W, runner="local", options=OPTIONS)


def test_an_error_in_this_process_names_the_rounds(monkeypatch):
    def fail(plan, step, *_):
        raise WorkerError(f"step {step.name!r}: broken")

    monkeypatch.setattr("beamjax.pipelines.resident.executor.run_server", fail)
    with pytest.raises(WorkerError, match=r"^loop_0, round 0: step 'server_\d': broken$"):
        bj.run(until, X, W, 3, options=OPTIONS)


# --- what stays in workers, and how they merge


@bj.program(clients=N)
def carried(x):
    step = lambda _, p: bj.map_fn(lambda p, v: p + v, (p, x))
    return bj.reduce_sum(jax.lax.fori_loop(0, 4, step, x * 0))


def test_workers_read_what_they_wrote_from_memory(monkeypatch):
    read, load = [], MembersSource.load

    def spy(self, path):
        read.append(stores._CACHE.find(path) is not None)
        return load(self, path)

    monkeypatch.setattr(MembersSource, "load", spy)
    assert_same_bits(bj.run(carried, X, options={**OPTIONS, **THREADS}), 4 * X.sum(axis=0))
    assert len(read) >= 9
    assert all(read)
    # After the run; members at the URLs of other tests may be there.
    assert not [key for key in stores._CACHE._values if "pass-" in key and "://" not in key]


def test_files_are_read_where_their_worker_has_died(monkeypatch):
    """Any worker computes any shard, as the files have all members."""
    monkeypatch.setattr("beamjax.pipelines.values.members.members_in", lambda path, load: load())
    for more in (THREADS, PROCESSES):
        assert_same_bits(bj.run(carried, X, options={**OPTIONS, **more}), 4 * X.sum(axis=0))


@pytest.mark.parametrize(("groups", "merges"), [(1, 0), (2, 1)])
def test_workers_merge_large_partials_in_groups(passes, monkeypatch, groups, merges):
    monkeypatch.setattr("beamjax.pipelines.resident.executor.WORKER_MERGE_BYTES", 0)
    monkeypatch.setattr("beamjax.plan.merging._groups", lambda *_: groups)
    options = {**OPTIONS, **PROCESSES}
    assert_same_bits(
        bj.run(until, X, W, 2, options=options), bj.run(until, X, W, 2, runner="local")
    )
    assert names(passes) == ["map_clients_0"] * 2 * (1 + merges + 1)  # of two rounds


def test_workers_merge_each_range_of_large_values(monkeypatch):
    monkeypatch.setattr("beamjax.pipelines.resident.executor.WORKER_MERGE_BYTES", 0)

    @bj.program(clients=9)
    def wide(x, w):
        products = lambda w: bj.map_fn(lambda v, w: jnp.tanh(v * w), (x, bj.broadcast(w)))
        return jax.lax.fori_loop(0, 2, lambda _, w: bj.reduce_mean(products(w)), w)

    x = np.linspace(-1, 2, 9, dtype=np.float32)
    w = np.linspace(-3, 3, RANGE_VALUES + 5, dtype=np.float32)
    found = bj.run(wide, x, w, options={"shard_size": 8, **PROCESSES})
    assert_same_bits(found, bj.run(wide, x, w, runner="local", options={"shard_size": 8}))


@pytest.mark.parametrize("most", [1 << 30, 1000], ids=["small", "large"])
def test_large_partials_do_not_pass_through_the_launching_process(most, monkeypatch):
    monkeypatch.setattr("beamjax.pipelines.resident.executor.WORKER_MERGE_BYTES", most)
    count, write, decode = [], mailbox.FileMailbox._write_signed, mailbox.decode

    def written(self, name, data):
        if name.startswith("task-"):
            count.append(len(data))
        write(self, name, data)

    def decoded(kind, data):
        count.append(len(data))
        return decode(kind, data)

    monkeypatch.setattr(mailbox.FileMailbox, "_write_signed", written)
    monkeypatch.setattr(mailbox, "decode", decoded)

    @bj.program(clients=N)
    def widest(w, x):
        return bj.reduce_sum(bj.map_fn(lambda v: jnp.full(20_000, v[0] + w), x)).max()

    def run(x):
        return jax.lax.fori_loop(0, 2, lambda _, w: widest(w, x) / 64, jnp.float32(1))

    found = bj.run(run, X, options={**OPTIONS, **PROCESSES})
    assert_same_bits(found, bj.run(run, X, runner="local"))
    partial_bytes = 8 * 20_000
    if most > 1000:
        assert sum(count) > 2 * partial_bytes
    else:
        assert sum(count) < partial_bytes / 2
