"""Members that fail, left out: against the program on the others, on every way to run workers."""

import contextlib
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from faults import WAYS
from helpers import assert_close, assert_same_bits, examples
from hypothesis import given
from hypothesis import strategies as st

import beamjax as bj
from beamjax.errors import ArrayFormatError, OptionsError, SourceError, WorkerError
from beamjax.plan.dropping import DeadLetters, Dropped, decode_lines, encode_lines
from beamjax.sources.source_base import HoldsLeaves, LeafSpec
from beamjax.telemetry.monitor import Monitor

N = 21
HERE = pytest.mark.parametrize("way", ["local", "threads"])
EVERYWHERE = pytest.mark.parametrize(
    "way", ["local", "threads", pytest.param("processes", marks=pytest.mark.long)]
)

# The other workers are stopped where one fails.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


def run(fn, *args, way="local", **options):
    runner, more = WAYS[way]
    options = {"shard_size": 8, "drop_limit": 0.9, **options, **more}
    return bj.run(fn, *args, runner=runner, options=options)


def values(bad, fill=np.nan):
    x = np.linspace(0.5, 4.0, N * 3).astype(np.float32).reshape(N, 3)
    x[list(bad), 1] = fill
    return x


def without(bad):
    return np.isin(np.arange(N), list(bad), invert=True)


def raising(bad):
    """A body that raises for members whose first number is in `bad`."""

    def look(v):
        if int(v[0]) in bad:
            raise ValueError(f"bad member {int(v[0])}")
        return v

    out = jax.ShapeDtypeStruct((3,), "float32")
    return lambda v: jax.pure_callback(look, out, v, vmap_method="sequential")


def numbered():
    x = np.random.default_rng(3).normal(size=(N, 3)).astype(np.float32)
    x[:, 0] = np.arange(N)
    return x


def letters(path):
    return [(each.member, each.reason) for each in decode_lines(path.read_bytes(), str(path))]


# --- reductions of those that are left


@bj.program(placements={"clients": N})
def reductions(x):
    y = bj.map_fn(lambda v: v * 2, x)
    keys = jnp.arange(N) % 3
    first = lambda a, b: (jnp.where(a[1] <= b[1], a[0], b[0]), jnp.minimum(a[1], b[1]))
    return {
        "mean": bj.reduce_mean(y),
        "sum": bj.reduce_sum(y),
        "max": bj.reduce_max(y),
        "min": bj.reduce_min(y),
        "prod": bj.reduce_prod(y),
        "gram": x.T @ y,
        "argmax": bj.reduce_argmax(-y),
        "by key": bj.reduce_by_key(y, keys, 3),
        "function": bj.reduce(first, (y, jnp.arange(N)), (jnp.zeros(3), jnp.int32(N))),
        "count": jnp.sum(y[:, 0] > 3),
    }


def truth(x, kept):
    y = (x * np.float32(2))[kept].astype(np.float64)
    keys = (np.arange(N) % 3)[kept]
    return {
        "mean": y.mean(0),
        "sum": y.sum(0),
        "max": y.max(0),
        "min": y.min(0),
        "prod": y.prod(0),
        "gram": x[kept].astype(np.float64).T @ y,
        "argmax": np.flatnonzero(kept)[y.argmin(0)],
        "by key": np.stack([y[keys == k].sum(0) for k in range(3)]),
        "function": (y[0], np.flatnonzero(kept)[0]),
        "count": (y[:, 0] > 3).sum(),
    }


def check(found, x, kept):
    for name, want in truth(x, kept).items():
        for got, each in zip(jax.tree.leaves(found[name]), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(got, each, rtol=2e-6, err_msg=name)


@examples(3)
@given(
    bad=st.sets(st.integers(0, N - 1), max_size=N - 1),
    fill=st.sampled_from([np.nan, -np.inf]),
    mode=st.sampled_from(["exact", "fast"]),
)
def test_reductions_of_the_members_that_are_finite(bad, fill, mode):
    x = values(bad, fill)
    options = {"on_nonfinite": "drop", "drop_limit": 1, "reduction": mode}
    check(run(reductions, x, **options), x, without(bad))


@EVERYWHERE
def test_every_way_to_run_workers_drops_the_same(way, tmp_path):
    bad, path = (0, 5, 9, 20), tmp_path / "dead.jsonl"
    x = values(bad)
    found = run(reductions, x, way=way, on_nonfinite="drop", dead_letters=str(path))
    check(found, x, without(bad))
    assert_same_bits(found, run(reductions, x, on_nonfinite="drop"))
    assert letters(path) == [(k, "nonfinite") for k in bad]
    first = json.loads(path.read_text().splitlines()[0])
    assert set(first) == {"placement", "member", "step", "reason", "message"}


@bj.program(placements={"clients": N})
def averages(x):
    y = bj.map_fn(lambda v: v * 2, x)
    return {
        "mean": jnp.mean(y, axis=0),
        "of all": jnp.mean(y),
        "of columns": jnp.mean(y, axis=0, keepdims=True).T,
        "narrow": jnp.mean(y.astype("float16"), axis=0),
        "by hand": y.sum(0) / N,
        "variance": jnp.var(y, axis=0),
        "spread": jnp.std(x[:, 0]),
        "moments": x.T @ y / len(x),
        "share": jnp.mean(y[:, 0] > 3),
    }


@HERE
def test_whatever_divides_by_the_number_of_members_divides_by_those_left(way, caplog):
    x, kept = values({0, 5, 9, 20}), without({0, 5, 9, 20})
    found = run(averages, x, way=way, on_nonfinite="drop")
    rest, wide = x[kept].astype("f8"), 2 * x[kept].astype("f8")
    expected = {
        "mean": wide.mean(0),
        "of all": wide.mean(),
        "of columns": wide.mean(0)[:, None],
        "narrow": wide.mean(0),
        "by hand": wide.mean(0),
        "variance": wide.var(0),
        "spread": rest[:, 0].std(),
        "moments": rest.T @ wide / kept.sum(),
        "share": (wide[:, 0] > 3).mean(),
    }
    for name, want in expected.items():
        rtol = 1e-3 if name == "narrow" else 1e-5
        np.testing.assert_allclose(found[name], want, rtol, err_msg=name)
    assert "divides by" not in caplog.text
    assert_close(run(averages, values(()), way=way, on_nonfinite="drop"), averages(values(())))
    # This may be another number.
    other = bj.program(clients=N)(lambda x: jnp.sum(x[:, 1]) / (2 * N))
    found = run(other, x, way=way, on_nonfinite="drop")
    np.testing.assert_allclose(found, rest[:, 1].sum() / (2 * N), 1e-5)
    assert "div by 42 divides by the number of all members" in caplog.text


@pytest.mark.parametrize("name", ["reduce_mean", "mean"])
def test_the_report_names_what_divides_by_the_dropped_members_too(name, tmp_path):
    mean = {"reduce_mean": bj.reduce_mean, "mean": lambda y: jnp.mean(y, axis=0)}[name]
    loss = bj.program(clients=N)(lambda w, x: mean(jnp.sum((x - w) ** 2, axis=1)))
    options = {"on_nonfinite": "drop", "job_folder": str(tmp_path / "job"), "drop_limit": 0.9}
    job = bj.launch(jax.grad(loss), 0.5, values({3}), runner="local", options=options)
    kept = values({3})[without({3})].astype("f8")
    np.testing.assert_allclose(job.result(), -2 * (kept - 0.5).sum() / N, 1e-5)
    report = str(job.report())
    assert "test_dropping.py" in report
    assert "by the number of all members of 'clients', including the 1 dropped" in report


@EVERYWHERE
def test_members_for_which_a_body_raises(way, tmp_path):
    x, path, bad = numbered(), tmp_path / "raised.jsonl", {3, 4, 16}
    body = raising(bad)

    @bj.program(clients=N)
    def program(x):
        y = bj.map_fn(body, x)
        return y, bj.reduce_mean(y)

    placed, mean = run(program, x, way=way, on_error="drop", dead_letters=str(path))
    kept = without(bad)
    np.testing.assert_allclose(mean, x[kept].astype(np.float64).mean(0), rtol=1e-6)
    np.testing.assert_array_equal(placed[kept], x[kept])
    assert np.isnan(placed[~kept]).all()
    assert letters(path) == [(k, "error") for k in sorted(bad)]
    assert "bad member 3" in path.read_text()


def test_large_numbers_of_64_bits_are_finite():
    with jax.enable_x64(True):
        x = values({3, 8}).astype(np.float64) * 1e300
        total = bj.program(clients=N)(bj.reduce_sum)
        found = run(total, x, on_nonfinite="drop")
        np.testing.assert_allclose(found, x[without({3, 8})].sum(axis=0), rtol=1e-12)


def test_nothing_changes_where_no_member_fails(tmp_path):
    x, path = values(()), tmp_path / "dead.jsonl"
    path.write_text("of an earlier run")
    found = run(reductions, x, on_error="drop", on_nonfinite="drop", dead_letters=str(path))
    assert_close(found, run(reductions, x), rtol=1e-6, atol=0)
    assert not path.exists()
    assert np.isnan(run(reductions, values({9}))["sum"][1])


def test_indices_of_members_that_fail_are_not_computed_again():
    """A body that fails by the number of its member, which is no operand."""
    body = raising({7})

    @bj.program(clients=N)
    def program(x):
        rows = jnp.broadcast_to(jnp.arange(N, dtype=jnp.float32)[:, None], (N, 3))
        return bj.reduce_sum(bj.map_fn(lambda i, v: body(i) + v, (rows, x)))

    x = numbered()
    found = run(program, x, on_error="drop")
    rest = np.delete(np.arange(N), 7)
    want = (np.repeat(rest[:, None], 3, 1) + x[rest].astype(np.float64)).sum(0)
    np.testing.assert_allclose(found, want, rtol=1e-6)


class Holed(HoldsLeaves):
    """Members of which some can't be read."""

    def __init__(self, bad):
        super().__init__([LeafSpec((3,), np.dtype("float32"))])
        self.bad = sorted(bad)

    def __len__(self):
        return N

    def read(self, start, stop):
        for k in self.bad:
            if start <= k < stop:
                raise SourceError(f"record {k} is damaged")
        return [values(())[start:stop]]


@HERE
def test_members_that_cannot_be_read(way, tmp_path):
    path, bad = tmp_path / "dead.jsonl", {0, 1, 13}
    program = bj.program(clients=N)(lambda x: (bj.reduce_mean(x[0]), bj.reduce_max(x[0])))
    mean, top = run(program, Holed(bad), way=way, on_error="drop", dead_letters=str(path))
    rest = np.delete(values(()), sorted(bad), axis=0)
    np.testing.assert_allclose(mean, rest.astype(np.float64).mean(0), rtol=1e-6)
    np.testing.assert_array_equal(top, rest.max(0))
    assert letters(path) == [(k, "error") for k in sorted(bad)]
    assert "record 13 is damaged" in path.read_text()
    with pytest.raises(SourceError, match=r"members \d+ to \d+: record \d+ is damaged"):
        run(program, Holed(bad), way=way)


# --- raise, limits


@HERE
def test_a_run_fails_where_a_member_is_not_finite_or_too_many_fail(way, tmp_path):
    message = r"shard 1 .*members 8 to 15: member 9, 12: found NaN or infinity .*expected finite"
    with pytest.raises(WorkerError, match=message) as caught:
        run(reductions, values({9, 12}), way=way, on_nonfinite="raise")
    assert (caught.value.failure.shard, caught.value.failure.members) == (1, (8, 15))
    three, all_nan = values({2, 9, 12}), values(range(N))
    for limit in (0.0, 0.1):
        with pytest.raises(WorkerError, match=r"members? w.* dropped, the first is member .*allow"):
            run(reductions, three, way=way, on_nonfinite="drop", drop_limit=limit)
    for program in (reductions, bj.program(clients=N)(bj.reduce_mean)):
        with pytest.raises(WorkerError, match=r"drop_limit=1 allows 20|were dropped"):
            run(program, all_nan, way=way, on_nonfinite="drop", drop_limit=1)


@HERE
def test_a_shard_of_which_all_members_fail(way):
    def total(bad):
        body = raising(bad)
        return bj.program(clients=N)(lambda x: bj.reduce_sum(bj.map_fn(body, x)))

    x = numbered()
    found = run(total(range(8, 16)), x, way=way, on_error="drop")
    assert_close(found, np.delete(x, range(8, 16), axis=0).sum(0))
    with pytest.raises(WorkerError, match="all 8 members of the first shard were dropped"):
        run(total(range(8)), x, way=way, on_error="drop")


def test_members_that_were_too_many_are_listed(tmp_path):
    path = tmp_path / "dead.jsonl"
    options = {"on_nonfinite": "drop", "drop_limit": 0.1, "dead_letters": str(path)}
    with pytest.raises(WorkerError, match="3 of 21 members"):
        run(reductions, values({2, 3, 4, 20}), **options)
    assert letters(path) == [(k, "nonfinite") for k in (2, 3, 4)]
    dropped = lambda *members: [Dropped("clients", k, "map_0", "error", "x") for k in members]
    for limit, n, allowed in ((0.0, 21, 0), (0.1, 21, 2), (0.1, 20, 2), (1.0, 3, 2)):
        counted = DeadLetters(limit)
        counted.add(dropped(*range(allowed)), {"clients": n, "others": None})
        counted.add(dropped(*range(allowed)), {"clients": n})  # once more, and nothing new
        message = rf"{allowed + 1} members? w.* of {n} members, and drop_limit=.*ows {allowed}:"
        with pytest.raises(WorkerError, match=message):
            counted.add(dropped(20), {"clients": n, "others": None})


# --- passes that follow each other


def rounds(w, x):
    """Member k gives NaN in round k, and in no other one."""

    def one(state, number):
        w, z = state
        bad = jnp.where(jnp.arange(N) == number, jnp.nan, 1.0)
        z = bj.map_fn(lambda z, v, b: (z + v) * b, (z, x, bad))
        w = w + bj.reduce_mean(z)
        return (w, z), bj.reduce_sum(jnp.ones(N))

    return jax.lax.scan(one, (w, jnp.zeros_like(x)), jnp.arange(4))


def rounds_truth(w, x):
    z, kept = np.zeros(x.shape), np.ones(N, bool)
    for number in range(4):
        kept[number] = False
        z = z + x
        w = w + z[kept].mean(0)
    return w


@pytest.mark.parametrize("way", ["local", "one"])
def test_dead_letters_that_cannot_be_written_fail_before_any_work(way, tmp_path):
    (tmp_path / "file").write_text("")
    more = {"on_nonfinite": "drop", "dead_letters": str(tmp_path / "file" / "dead.jsonl")}
    with pytest.raises(bj.SourceError, match=r"dead.jsonl: cannot be the file of the option"):
        run(reductions, values(()), way=way, **more)


@pytest.mark.parametrize("way", ["local", "one", "threads"])
def test_rounds_hand_on_which_members_were_dropped(way, tmp_path):
    x, w, path = values(()), np.zeros(3, np.float32), tmp_path / "dead.jsonl"
    more = {"on_nonfinite": "drop", "dead_letters": str(path)}
    (found, z), counts = run(bj.program(clients=N)(rounds), w, x, way=way, **more)
    np.testing.assert_allclose(found, rounds_truth(w, x), rtol=1e-5)
    np.testing.assert_array_equal(counts, np.float32([20, 19, 18, 17]))
    assert np.isnan(z[:4]).all()
    assert np.isfinite(z[4:]).all()
    assert letters(path) == [(k, "nonfinite") for k in range(4)]
    steps = {each.step for each in decode_lines(path.read_bytes(), str(path))}
    assert steps == {"map_clients_1"}  # the name in the plan, also in rounds


def passes(k, x):
    """log gives NaN of negative numbers; no later pass does."""
    y = bj.map_fn(lambda v: jnp.log(v), x)
    center = bj.reduce_mean(y)
    z = bj.map_fn(lambda v, c: (v - c) ** 2, (x, bj.broadcast(center)))
    two = center, bj.reduce_mean(z), bj.reduce_mean(bj.map_fn(lambda v: v * 0 + 1, x))
    return two, branches(k, x)


def branches(k, x):
    chosen = jax.lax.cond(
        k > 0, lambda x: bj.reduce_mean(bj.map_fn(jnp.log, x)), lambda x: jnp.zeros(3), x
    )
    again = jax.lax.while_loop(
        lambda s: bj.reduce_sum(bj.map_fn(lambda v: v[0], x)) * s[0] < 100,
        lambda s: (s[0] + 1, bj.reduce_mean(bj.map_fn(lambda v: v * 2, x))),
        (jnp.float32(0), chosen),
    )
    return chosen, again


@pytest.mark.parametrize("way", ["local", "one"])
def test_dropped_members_are_left_out_of_all_that_follows(way):
    x = values({1, 15}, fill=-1)
    rest = np.delete(x, [1, 15], axis=0).astype(np.float64)
    logs = np.log(rest).mean(0)
    fn = bj.program(clients=N)(passes)
    (center, spread, one), found = run(fn, np.int32(1), x, way=way, on_nonfinite="drop")
    np.testing.assert_allclose(center, logs, rtol=1e-6)
    np.testing.assert_allclose(spread, ((rest - logs) ** 2).mean(0), rtol=1e-5)
    np.testing.assert_array_equal(one, np.ones(3, np.float32))
    other = run(bj.program(clients=N)(branches), np.int32(0), x, way=way, on_nonfinite="drop")
    for left, want, (chosen, (number, last)) in (
        (rest, logs, found), (x.astype(np.float64), np.zeros(3), other)
    ):  # fmt: skip
        np.testing.assert_allclose(chosen, want, rtol=1e-6)
        np.testing.assert_allclose(last, (left * 2).mean(0), rtol=1e-6)
        assert number == np.ceil(100 / left[:, 0].sum())


def test_a_run_goes_on_from_a_checkpoint_with_those_that_are_left(tmp_path, monkeypatch):
    x, w, path = values(()), np.zeros(3, np.float32), tmp_path / "dead.jsonl"
    fn = bj.program(clients=N)(rounds)
    options = {"dead_letters": str(path), "checkpoint": str(tmp_path / "saved")}
    whole = run(fn, w, x, on_nonfinite="drop")
    drop = Monitor.drop

    def stop(self, found, sizes):
        if found and len(self.letters) == 2:
            raise KeyboardInterrupt
        drop(self, found, sizes)

    monkeypatch.setattr(Monitor, "drop", stop)
    with pytest.raises(KeyboardInterrupt):
        run(fn, w, x, on_nonfinite="drop", **options)
    monkeypatch.undo()
    assert len(letters(path)) == 2
    assert_same_bits(run(fn, w, x, on_nonfinite="drop", **options), whole)
    assert letters(path) == [(k, "nonfinite") for k in range(4)]


# --- what is said of them


def test_a_job_knows_which_members_were_dropped(tmp_path, caplog):
    options = {"on_nonfinite": "drop", "shard_size": 8, "job_folder": tmp_path / "job"}
    job = bj.launch(reductions, values({2, 9}), runner="DirectRunner", options=options)
    job.result()
    assert [each.member for each in job.dropped] == [2, 9]
    other = bj.open_job(tmp_path / "job")
    assert other.dropped == job.dropped
    assert job.progress().dropped == other.progress().dropped == 2
    assert "2 members were dropped, the first is member 2 of 'clients'" in caplog.text


REASONS = st.sampled_from(["error", "nonfinite"])
EACH = st.builds(Dropped, st.text(), st.integers(0, 2**40), st.text(), REASONS, st.text())


@given(st.lists(EACH), st.binary(max_size=80))
def test_lines_of_dropped_members(found, data):
    assert decode_lines(encode_lines(found), "here") == found
    with contextlib.suppress(ArrayFormatError):
        assert all(isinstance(each, Dropped) for each in decode_lines(data, "here"))


@pytest.mark.parametrize("data", [b"{", b"[]", b"3", b'{"member": 1}', b"\xff", b"[" * 10**5])
def test_lines_that_are_something_else(data):
    with pytest.raises(ArrayFormatError, match=r"^here: .*expected"):
        decode_lines(data, "here")


def test_a_transform_leaves_no_member_out():
    with pytest.raises(OptionsError, match=r"on_error: found 'drop' in the options of transform"):
        bj.transform(reductions, values(()), options={"on_error": "drop"})
