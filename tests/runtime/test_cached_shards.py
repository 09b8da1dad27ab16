"""The option `cache`: only what changed is computed, with the bits of a full run."""

import logging
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import url_files  # noqa: F401  (makes bjtest:// known)

import beamjax as bj
from beamjax.interpreters.planning import plan_for
from beamjax.interpreters.staging.arguments import flatten_call
from beamjax.options import parse_options
from beamjax.sources.arrays import data_files
from beamjax.storage import files
from beamjax.storage.partial_cache import SUFFIX, PartialCache

N, SIZE = 80, 8
SHARDS = N // SIZE
X = np.random.default_rng(0).normal(size=(N, 3)).astype(np.float32)
W = np.float32([0.5, -1.0, 2.0])
RUNNERS = ["local", "DirectRunner"]


def fit(w, x):
    y = bj.map_fn(lambda v: jnp.tanh(v * w), x)
    m = bj.reduce_mean(y)
    spread = bj.reduce_sum(bj.map_fn(lambda v: (jnp.tanh(v * w) - m) ** 2, x))
    return m, spread, bj.reduce_max(y)


def other(w, x):
    """As `fit`, but for its second pass."""
    y = bj.map_fn(lambda v: jnp.tanh(v * w), x)
    m = bj.reduce_mean(y)
    spread = bj.reduce_sum(bj.map_fn(lambda v: (jnp.tanh(v * w) - m) ** 4, x))
    return m, spread, bj.reduce_max(y)


def positions(w, x):
    """Reads where members are."""
    y = bj.map_fn(lambda v, i: v * w * i, (x, jnp.arange(N, dtype=jnp.float32)))
    return bj.reduce_sum(y)


def smallest(w, x):
    """Reduces by a function."""
    return bj.reduce(lambda a, b: jnp.minimum(a, b), bj.map_fn(lambda v: v * w, x))


def run(fn, folder, *args, runner="local", **options):
    """The bits of the results, how many shards there were, and how many the cache had."""
    program = bj.program(clients=N)(fn)
    options = {"shard_size": SIZE, "cache": folder, **options}
    with bj.launch(program, *args, runner=runner, options=options) as job:
        result = job.result()
        done = job.progress().done
    result = result if isinstance(result, tuple) else (result,)
    return [np.asarray(x).tobytes() for x in result], done.shards, done.shards_cached


@pytest.mark.parametrize("runner", RUNNERS)
def test_only_what_changed_is_computed_with_the_same_bits(tmp_path, runner):
    folder = str(tmp_path / "cache")

    def check(fn, cached, *args):
        bits, shards, found = run(fn, folder, *args, runner=runner)
        assert bits == run(fn, None, *args, runner=runner)[0]
        assert (shards, found) == (2 * SHARDS, cached)

    check(fit, 0, W, X)
    check(fit, 2 * SHARDS, W, X)
    changed = X.copy()
    changed[33] += 1  # changes the mean, and with it every shard of the second pass
    check(fit, SHARDS - 1, W, changed)
    moved = np.concatenate([X[SIZE:], X[:SIZE]])  # nothing reads where members are
    check(fit, 2 * SHARDS, W, moved)
    check(other, SHARDS, W, X)  # its first pass is the same
    check(fit, 0, W + np.float32(1), X)
    # Another runner finds them, too.
    assert run(fit, folder, W, X, runner=RUNNERS[runner == "local"])[1:] == (2 * SHARDS,) * 2


@pytest.mark.parametrize("fn", [positions, smallest])
def test_members_count_by_place_where_it_is_read_and_user_functions_reduce(tmp_path, fn):
    folder = str(tmp_path)
    moved = np.concatenate([X[SIZE:], X[:SIZE]])
    expected = 0 if fn is positions else SHARDS
    for x, cached in ((X, 0), (X, SHARDS), (moved, expected)):
        bits, shards, found = run(fn, folder, W, x)
        assert (bits, shards, found) == (run(fn, None, W, x)[0], SHARDS, cached)


def test_members_that_are_dropped_are_told_each_time(tmp_path):
    x = X.copy()
    x[3] = np.nan
    options = {"shard_size": SIZE, "cache": str(tmp_path), "on_nonfinite": "drop"}
    program = bj.program(clients=N)(smallest)
    for cached in (0, SHARDS - 1):
        folder = str(tmp_path / f"job{cached}")
        with bj.launch(
            program, W, x, runner="local", options=options | {"job_folder": folder}
        ) as job:
            found = job.result()
            report = job.report()
        np.testing.assert_array_equal(found, np.nanmin(x * W, axis=0))
        assert (len(report.dropped), report.progress.done.shards_cached) == (1, cached)
        assert not cached or f"{cached} of {SHARDS} shards from the cache" in repr(report)


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_damaged_file_is_computed_again_with_a_warning(tmp_path, runner, caplog):
    bits = run(smallest, str(tmp_path), W, X)[0]
    first, second, third, *_ = sorted(tmp_path.iterdir())
    first.write_bytes(first.read_bytes()[:-5])
    flipped = bytearray(second.read_bytes())
    flipped[-1] ^= 1
    second.write_bytes(flipped)
    third.write_bytes(b"")
    with caplog.at_level(logging.WARNING):
        assert run(smallest, str(tmp_path), W, X, runner=runner) == (bits, SHARDS, SHARDS - 3)
    for path in (first, second, third):
        assert f"damaged file {path}" in caplog.text
    assert run(smallest, str(tmp_path), W, X)[2] == SHARDS


def test_a_folder_that_cannot_be_written_changes_nothing(tmp_path, caplog):
    (tmp_path / "file").write_bytes(b"")
    with caplog.at_level(logging.WARNING):
        found = run(smallest, str(tmp_path / "file" / "cache"), W, X)
    assert found == run(smallest, None, W, X)
    assert caplog.text.count("going on without it") == 1


def test_a_file_system_that_fails_slowly_delays_few_shards(tmp_path, monkeypatch):
    reads, read = [], files.read

    def slow(path):
        if not path.endswith(SUFFIX):
            return read(path)
        reads.append(path)
        time.sleep(0.2)
        raise OSError

    monkeypatch.setattr(files, "read", slow)
    assert run(smallest, str(tmp_path), W, X) == run(smallest, None, W, X)
    assert len(reads) < SHARDS, "each shard waited"


def test_what_was_used_longest_ago_is_removed_first(tmp_path):
    cache = PartialCache(str(tmp_path), limit=3000)
    array = np.zeros(100, np.float64)
    for number in range(3):
        cache.store(f"a{number}", [array], {})
        os.utime(tmp_path / f"a{number}.partials", (number, number))
    (tmp_path / "left.tmp").write_bytes(b"")
    os.utime(tmp_path / "left.tmp", (0, 0))
    (tmp_path / "mine.txt").write_bytes(b"other")
    assert cache.find("a0") is not None  # used now
    cache.store("b", [array], {})
    cache.trim()
    assert {path.name for path in tmp_path.iterdir()} == {
        "a0.partials", "a2.partials", "b.partials", "mine.txt"
    }  # fmt: skip
    assert cache.find("a1") is None


def test_explain_tells_of_the_cache(tmp_path):
    def kept(w, x):
        y = bj.map_fn(lambda v: jnp.sum(v * w), x)
        return y, bj.reduce_sum(bj.map_fn(jnp.exp, x))

    text = str(bj.explain(bj.program(clients=N)(fit), W, X, options={"cache": str(tmp_path)}))
    found = re.findall("are looked up in the cache, (.*) at most; .* as (.*)", text)
    assert [reason for _, reason in found] == ["it reads results of other steps"]
    assert text.count("are looked up in the cache") == 2
    text = str(bj.explain(bj.program(clients=N)(kept), W, X, options={"cache": str(tmp_path)}))
    assert "not cached: it makes placed values" in text
    run(smallest, str(tmp_path), W, X)
    changed = X.copy()
    changed[33] += 1
    for x, known in (
        (X, SHARDS),
        (changed, SHARDS - 1),
        (jax.ShapeDtypeStruct(X.shape, X.dtype), None),
    ):
        text = str(bj.explain(bj.program(clients=N)(smallest), W, x,
                              options={"cache": str(tmp_path), "shard_size": SIZE}))  # fmt: skip
        assert (f"which has {known} of {SHARDS}" in text) == (known is not None)


def test_a_cache_at_a_url(tmp_path):
    folder = f"bjtest:/{tmp_path}"
    for cached in (0, SHARDS):
        assert run(smallest, folder, W, X)[2] == cached


def test_a_changed_constant_of_a_body_misses(tmp_path):
    table = np.arange(6000, dtype=np.float32)

    def looked_up(w, x):
        return bj.reduce_max(bj.map_fn(lambda v: v[0] * w[0] + jnp.asarray(table).sum(), x))

    for value, cached in ((3, 0), (3, SHARDS), (4, 0)):
        table[2999] = value
        bits, _, found = run(looked_up, str(tmp_path), W, X)
        assert (bits, found) == (run(looked_up, None, W, X)[0], cached)


@pytest.mark.parametrize("runner", RUNNERS)
def test_files_that_are_unchanged_are_not_read(tmp_path, runner):
    folder, cache = tmp_path / "data", str(tmp_path / "cache")
    folder.mkdir()

    def write(name, first, rows=SIZE):
        columns = {"x": np.arange(first, first + rows, dtype=np.float32) / 7, "y": np.ones(rows)}
        pq.write_table(pa.table(columns), folder / f"{name}.parquet")

    def settled():
        """As if all files were written long ago."""
        later = time.time_ns() + 10**10
        return mock.patch.object(data_files.time, "time_ns", return_value=later)

    @bj.program(placements={"rows": None})
    def total(rows):
        return bj.reduce_sum(bj.map_fn(lambda x: jnp.exp(jnp.sin(x)), rows))

    def check(cached, read):
        rows = bj.from_parquet(str(folder), columns="x")
        options = {"shard_size": SIZE, "cache": cache, "local_threads": 1}
        with settled(), bj.launch(total, rows, runner=runner, options=options) as job:
            result, done = job.result(), job.progress().done
        expected = bj.run(total, rows, runner="local", options={"shard_size": SIZE})
        assert np.asarray(result).tobytes() == np.asarray(expected).tobytes()
        assert (done.shards_cached, done.bytes_read // (4 * SIZE)) == (cached, read)

    def known():
        """How many shards `explain` finds, without reading a member."""
        rows = bj.from_parquet(str(folder), columns="x")
        with settled(), mock.patch.object(type(rows), "read", side_effect=AssertionError):
            text = str(bj.explain(total, rows, options={"shard_size": SIZE, "cache": cache}))
        return int(re.search(r"which has (\d+) of \d+", text)[1])

    for i in range(6):
        write(f"f{i}", 10 * i)
    write("f9", 900, rows=3)
    assert known() == 0
    check(0, 6)
    assert known() == 7
    check(7, 0)
    write("f2", 500)  # changed
    write("f3a", 600)  # inserted
    (folder / "f0.parquet").unlink()
    assert known() == 5
    check(5, 2)
    os.utime(folder / "f4.parquet")  # of the same content, which is known only when it is read
    check(7, 1)


def test_explain_after_a_file_is_gone(tmp_path):
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"x": np.ones(20, np.float32)}), path)
    rows = bj.from_parquet(str(path), columns="x")
    path.unlink()
    fn = bj.program(placements={"clients": None})(lambda x: bj.reduce_sum(bj.map_fn(jnp.exp, x)))
    text = str(bj.explain(fn, rows, options={"shard_size": SIZE, "cache": str(tmp_path / "cache")}))
    assert "3 at most" in text


def test_partials_of_all_types_by_runs_at_the_same_time(tmp_path):
    def kinds(w, x):
        drawn = bj.map_fn(lambda v: jax.random.normal(jax.random.key(3)) * v, x)
        return (
            bj.reduce_sum(bj.map_fn(lambda v: (v * w).astype(jnp.int32), x)),
            bj.reduce_sum(bj.map_fn(lambda v: v.astype(jnp.bfloat16), x)),
            bj.reduce_sum(bj.map_fn(lambda v: jax.lax.complex(v[0], v[1]), x)),
            jnp.all(bj.map_fn(lambda v: v > 0, x), axis=0),
            bj.reduce_mean(drawn),
        )

    expected = run(kinds, None, W, X)[0]
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda _: run(kinds, str(tmp_path), W, X), range(3)))
    assert [bits for bits, _, _ in found] == [expected] * 3
    assert run(kinds, str(tmp_path), W, X) == (expected, SHARDS, SHARDS)
    assert run(kinds, str(tmp_path), W, X, reduction="fast")[2] == SHARDS


ROWS = (13, 40, 8, 1, 29)
"""Rows of each file."""


def write_files(folder, rows):
    """Writes .npy files whose rows do not depend on the other files; gives the source and array."""
    arrays = []
    for name, count in rows.items():
        array = np.random.default_rng(sum(name.encode())).normal(size=(count, 3))
        arrays.append(array.astype(np.float32))
        np.save(folder / f"{name}.npy", arrays[-1])
    return bj.from_npy(str(folder / "*.npy")), np.concatenate(arrays)


def numbered(w, x):
    y = bj.map_fn(lambda v, i: v * w * i, (x, jnp.arange(len(x), dtype=jnp.float32)))
    return bj.reduce_sum(y)


def carried(w, x):
    """Placed values that rounds carry, that are gathered, and that are returned."""
    body = lambda total, _: (bj.map_fn(lambda t, v: t + jnp.sin(v * w), (total, x)), None)
    total, _ = jax.lax.scan(body, jnp.zeros(x.shape, x.dtype), None, length=2)
    return total, total[jnp.argmax(total[:, 0])], bj.reduce_sum(total)


@pytest.fixture
def cut_at_each(monkeypatch):
    """Shards end at each file, whatever that costs."""
    monkeypatch.setattr("beamjax.interpreters.lowering.shard_size.PAYING", 0)
    monkeypatch.setattr("beamjax.interpreters.lowering.shard_size.GROUP_SHARDS", 1e-9)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("fn", [fit, numbered, smallest, carried])
@pytest.mark.usefixtures("cut_at_each")
def test_shards_end_where_files_end(tmp_path, fn, runner):
    source, x = write_files(tmp_path, dict(zip("abcde", ROWS, strict=True)))
    fn = bj.program(placements={"clients": None})(fn)
    expected = jax.tree.map(np.asarray, fn(W, x))
    options = {"shard_size": SIZE}
    with bj.launch(fn, W, source, runner=runner, options=options) as job:
        found, done = job.result(), job.progress().done
    shards = sum(-(-rows // SIZE) for rows in ROWS)
    assert done.shards % shards == 0
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)
    again = bj.run(fn, W, source, runner=RUNNERS[runner == "local"], options=options)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(again), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.usefixtures("cut_at_each")
def test_members_are_dropped_from_shards_that_end_where_files_end(tmp_path, runner):
    _, x = write_files(tmp_path, dict(zip("abcde", ROWS, strict=True)))
    bad = np.isin(np.arange(len(x)), [0, 12, 13, 52, 61, 90])
    x[bad, 1] = np.nan
    for name, rows in zip("abcde", np.split(x, np.cumsum(ROWS)[:-1]), strict=True):
        np.save(tmp_path / f"{name}.npy", rows)
    options = {"shard_size": SIZE, "on_nonfinite": "drop"}
    source = bj.from_npy(str(tmp_path / "*.npy"))
    fn = bj.program(placements={"clients": None})(fit)
    with bj.launch(fn, W, source, runner=runner, options=options) as job:
        found = job.result()
        assert [each.member for each in job.dropped] == list(np.flatnonzero(bad))
    expected = bj.program(clients=int((~bad).sum()))(fit)(W, x[~bad])
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("shard_size", [None, SIZE])
@pytest.mark.usefixtures("cut_at_each")
def test_an_inserted_file_moves_no_member_of_others_to_another_shard(tmp_path, shard_size):
    folder, cache = tmp_path / "data", str(tmp_path / "cache")
    folder.mkdir()
    fn = bj.program(placements={"clients": None})(smallest)

    def check(files):
        source, x = write_files(folder, files)
        options = {"shard_size": shard_size}
        with bj.launch(fn, W, source, runner="local", options=options | {"cache": cache}) as job:
            found, done = job.result(), job.progress().done
        whole = bj.run(fn, W, source, runner="local", options=options)
        assert np.asarray(found).tobytes() == np.asarray(whole).tobytes()
        np.testing.assert_array_equal(found, (x * W).min(axis=0))
        return done.shards - done.shards_cached

    assert check({"b": 21, "d": 30, "e": 17}) >= 3
    new = {"a": 19, "b": 21, "c": 24, "d": 30, "e": 17}
    assert check(new) == 6
    assert check(new) == 0


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_file_inserted_among_small_ones_changes_its_group_only(tmp_path, runner):
    folder, cache = tmp_path / "data", str(tmp_path / "cache")
    folder.mkdir()
    fn = bj.program(placements={"clients": None})(smallest)

    def check(files, folder=folder, **options):
        source, x = write_files(folder, files)
        options = {"shard_size": SIZE, **options}
        with bj.launch(fn, W, source, runner=runner, options={**options, "cache": cache}) as job:
            found, done = job.result(), job.progress().done
        assert np.asarray(found).tobytes() == np.asarray((x * W).min(axis=0)).tobytes()
        return done.shards, done.shards - done.shards_cached

    files = {f"f{i:03}": 2 + i % 4 for i in range(0, 400, 2)}
    text = str(bj.explain(fn, W, write_files(folder, files)[0], options={"shard_size": SIZE}))
    group = int(re.search(r"where a group of about (\d+) files ends", text)[1])
    shards, computed = check(files)
    assert computed <= shards < len(files) <= 2 * group * shards
    for new in ("f001", "f041", "f399"):
        files = dict(sorted({**files, new: 3}.items()))
        assert 1 <= check(files)[1] <= shards // 3
    for file in folder.glob("f15*.npy"):
        file.unlink()
        del files[file.stem]
    assert check(files)[1] <= shards // 3
    (tmp_path / "moved").mkdir()
    assert check(files, tmp_path / "moved")[1] == 0


def test_a_file_with_enough_work_is_cut_into_shards(tmp_path):
    source, _ = write_files(tmp_path, {f"f{i:02}": 40 + i % 30 for i in range(40)})

    @bj.program(placements={"clients": None})
    def costly(x):
        def one(v):
            large = jnp.outer(jnp.tile(v, 80), jnp.tile(v, 80))
            return jnp.sum(jnp.sin(large) @ jnp.cos(large))

        return bj.reduce_max(bj.map_fn(one, x))

    plan = plan_for(flatten_call(costly, (source,)), parse_options({})).plan
    assert plan.shard_sizes["clients"] == 8
    assert len(plan.file_starts["clients"]) == 39


def test_whether_shards_are_cut_does_not_depend_on_the_cache(tmp_path):
    fn = bj.program(placements={"clients": None})(smallest)

    def check(rows, **options):
        for file in tmp_path.glob("*.npy"):
            file.unlink()
        source, _ = write_files(tmp_path, dict(zip("abcd", rows, strict=True)))
        call = flatten_call(fn, (W, source))
        plans = [
            plan_for(call, parse_options(options | more)).plan
            for more in ({}, {"cache": str(tmp_path / "cache")})
        ]
        assert plans[0] is plans[1]
        return plans[0].file_starts.get("clients")

    large, tiny = (130, 150, 170, 140), (1, 2, 1, 3)
    assert check(large, shard_size=SIZE) == (130, 280, 450)
    assert check(large) is None  # There are too few of them for groups, with so little work.
    assert check(tiny, shard_size=SIZE) is None
    source, _ = write_files(tmp_path, dict(zip("abcd", tiny, strict=True)))
    text = str(bj.explain(fn, W, source, options={"shard_size": SIZE}))
    assert "are not cut at files, because there would be fewer than 4 groups" in text


@pytest.mark.usefixtures("cut_at_each")
def test_shards_of_equal_size_where_a_program_needs_them(tmp_path):
    source, x = write_files(tmp_path, dict(zip("abcde", ROWS, strict=True)))
    fn = bj.program(placements={"clients": None})(lambda x: jnp.cumsum(bj.map_fn(jnp.sin, x), 0))
    options = {"shard_size": SIZE}
    why = "because a pass depends on the order of the members"
    assert why in str(bj.explain(fn, source, options=options))
    found = bj.run(fn, source, runner="local", options=options)
    np.testing.assert_allclose(found, np.cumsum(np.sin(x), 0), rtol=1e-4, atol=1e-5)
    assert "cut at files" in str(
        bj.explain(bj.program(placements={"clients": None})(smallest), W, source, options=options)
    )


@pytest.mark.usefixtures("cut_at_each")
def test_calls_with_the_same_files_have_the_same_plan(tmp_path):
    """Sessions know a plan by its identity, and send its programs once."""
    fn = bj.program(placements={"clients": None})(smallest)
    options = parse_options({"shard_size": SIZE})

    def planned(files):
        source, _ = write_files(tmp_path, files)
        return plan_for(flatten_call(fn, (W, source)), options).plan

    first = planned({"a": 20, "b": 12})
    assert first.file_starts == {"clients": (20,)}
    assert planned({"a": 20, "b": 12}) is first
    assert planned({"a": 19, "b": 13}).file_starts == {"clients": (19,)}
