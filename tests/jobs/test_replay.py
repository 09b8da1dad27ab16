"""Replay: bodies of jobs as Python functions, against the same functions called without beamjax."""

import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_types
from jax.experimental import checkify, io_callback

import beamjax as bj

N = 20
X = np.random.default_rng(0).normal(size=(N, 3)).astype(np.float32)
W = np.array([1, 2, -1], np.float32)
RUNNERS = ("local", "DirectRunner")


def loss(w, v):
    return jnp.sum((v * w) ** 2)


def gradient(w, v):
    return {"g": jax.grad(loss)(w, v), "l": jax.jit(functools.partial(loss, w))(v)}


@bj.program(clients=N)
def descend(w, x):
    def body(w, _):
        found = bj.reduce_mean(bj.map_fn(lambda v: gradient(w, v), x))
        return w - jnp.float32(0.1) * found["g"], found["l"]

    return jax.lax.scan(body, w, None, length=4)


IN_ORDER = {
    "sum": lambda x: jnp.cumsum(x[:, 0]),
    "from the end": lambda x: jax.lax.cummax(x[:, 1], reverse=True),
    "logarithms": lambda x: jax.lax.cumlogsumexp(x, axis=0)[:, 0],
    "neighbours": lambda x: bj.neighbours(x, before=2, after=1, fill=0.5)[:, 0, 0],
    "of a body": lambda x: jnp.cumsum(bj.map_fn(jnp.sum, x)) + x[:, 0],
}


@pytest.mark.parametrize("name", IN_ORDER)
def test_an_operand_that_depends_on_other_members_is_the_one_of_the_job(tmp_path, name):
    @bj.program(rows="x")
    def weighed(x):
        body = lambda row, before: {"weighed": jnp.sum(row) * 1000 + before}
        return bj.reduce_max(bj.map_fn(body, (x, IN_ORDER[name](x))))

    options = {"shard_size": 8, "job_folder": str(tmp_path / "job")}
    job = bj.launch(weighed, X, runner="local", options=options)
    job.result()
    before = bj.program(rows="x")(IN_ORDER[name])(X)
    expected = X.sum(1) * 1000 + np.asarray(before)
    found = [bj.replay(job, weighed, X, member=i, step="<lambda>")["weighed"] for i in (0, 8, 19)]
    np.testing.assert_allclose(found, expected[[0, 8, 19]], rtol=1e-6)
    found = bj.replay(job, weighed, X, shard=2, step="<lambda>")
    np.testing.assert_allclose([v["weighed"] for v in found], expected[16:], rtol=1e-6)


class Model:
    """An object that holds values, a function that does, and itself."""

    def __init__(self, apply, mean):
        self.apply, self.mean, self.me = apply, mean, self

    def __call__(self, v):
        return self.apply(v) + 0 * self.me.mean


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_round_of_a_loop_has_its_server_values(tmp_path, runner):
    options = {"job_folder": str(tmp_path / "job"), "shard_size": 8}
    job = bj.launch(descend, W, X, runner=runner, options=options)
    job.result()
    w = W
    for number in range(4):
        found = bj.replay(job, descend, W, X, member=11, round=number)
        expected = jax.jit(gradient)(w, X[11])
        assert_same_types(found, expected)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), found, expected)
        means = jax.tree.map(lambda x: x.mean(0), jax.vmap(gradient, (None, 0))(w, X))
        w = w - np.float32(0.1) * means["g"]
    shard = bj.replay(job.folder, descend, W, X, shard=2, step="<lambda>")
    members = [gradient(W, v) for v in X[16:]]
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), shard, members)


def test_a_body_sees_arrays_and_no_tracers(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr("sys.breakpointhook", lambda: seen.append("stopped"))

    @bj.program(clients=N)
    def centred(x, scale):
        mean = bj.reduce_mean(x)
        parameters = {"mean": mean, "names": ["a", ("b", scale)]}

        def inner(v, power=scale):
            held = jax.tree.leaves((v, parameters["mean"], parameters["names"][1][1], power))
            if not any(isinstance(x, jax.core.Tracer) for x in held):
                seen.append(float(power))
                breakpoint()
            return (v - parameters["mean"]) * power

        model = Model(functools.partial(jax.jit(inner), power=scale), mean)
        return bj.reduce_sum(bj.map_fn(lambda v: model(v), x))

    scale = np.float32(2)
    options = {"job_folder": str(tmp_path / "job")}
    bj.run(centred, X, scale, runner="local", options=options)
    assert not seen
    found = bj.replay(str(tmp_path / "job"), centred, X, scale, member=7, step="<lambda>")
    assert seen == [2.0, "stopped"]
    np.testing.assert_allclose(found, (X[7] - X.mean(0)) * 2, rtol=1e-5)


def _on_host(check, shape=(3,)):
    out = jax.ShapeDtypeStruct(shape, "float32")
    return lambda v: jax.pure_callback(check, out, v, vmap_method="sequential")


@pytest.mark.parametrize("runner", RUNNERS)
def test_an_error_replays_the_member_that_fails(runner):
    def check(v):
        if v[0] == X[13, 0]:
            raise ValueError("it is the thirteenth")
        return v

    @bj.program(clients=N)
    def failing(x):
        mean = bj.reduce_mean(x)
        return bj.reduce_sum(bj.map_fn(lambda v: _on_host(check)(v) - mean, x))

    with pytest.raises(bj.WorkerError) as raised:
        bj.run(failing, X, runner=runner, options={"shard_size": 8})
    assert str(raised.value).endswith("beamjax.replay(error)")
    with pytest.raises(ValueError, match="thirteenth") as again:
        bj.replay(raised.value)
    assert "member 13 in the step" in again.value.__notes__[-1]
    assert any(entry.path.samefile(__file__) for entry in again.traceback[2:])
    found = bj.replay(raised.value, member=12)
    np.testing.assert_allclose(found, X[12] - X.mean(0), rtol=1e-5, atol=1e-6)
    elsewhere = pickle.loads(pickle.dumps(raised.value))
    assert (elsewhere.failure, elsewhere.run) == (raised.value.failure, None)
    found = bj.replay(elsewhere, failing, X, member=12)
    np.testing.assert_allclose(found, X[12] - X.mean(0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("runner", [*RUNNERS, "session"])
def test_the_round_that_failed(tmp_path, runner):
    """A failure in rounds of a loop in a branch, by its error and by its folder."""

    @bj.program(clients=N)
    def failing(w, x):
        def check(v):
            if v[0] > 100:
                raise ValueError("too large")
            return v

        body = lambda w, _: (w * 10 + bj.reduce_mean(bj.map_fn(
            lambda v: _on_host(check)(v * 0 + w), x)), None)  # fmt: skip
        rounds = lambda w: jax.lax.scan(body, w, None, length=5)[0]
        return jax.lax.cond(w[0] > 0, rounds, lambda w: w, w)

    folder = str(tmp_path / "job")
    with bj.session("DirectRunner") as session:
        call = session.run if runner == "session" else functools.partial(bj.run, runner=runner)
        with pytest.raises(
            bj.WorkerError, match=r"^branch_0, block 1, loop_0, round 2: "
        ) as raised:
            call(failing, W, X, options={"job_folder": folder})
    assert str(raised.value).endswith(f"beamjax.replay({folder!r}, fn, *args)")
    assert raised.value.failure.step == "map_clients_0"
    for job in ((raised.value,), (folder, failing, W, X)):
        with pytest.raises(ValueError, match="too large") as again:
            bj.replay(*job)
        assert "after 2 rounds" in again.value.__notes__[-1]


def test_dropped_members_stay_dropped(tmp_path):
    x = X.copy()
    x[4] = np.nan

    @bj.program(clients=N)
    def centred(x):
        mean = bj.reduce_mean(bj.map_fn(lambda v: v + 1, x))
        return bj.reduce_sum(bj.map_fn(lambda v: v - mean, x))

    options = {"on_nonfinite": "drop", "drop_limit": 1, "job_folder": str(tmp_path / "job")}
    bj.run(centred, x, runner="local", options=options)
    call = str(tmp_path / "job"), centred, x
    rest = np.delete(x, 4, 0).mean(0) + 1
    found = bj.replay(
        *call, member=5, step="map_clients_1", options={**options, "job_folder": None}
    )
    np.testing.assert_allclose(found, x[5] - rest, rtol=1e-5, atol=1e-6)
    assert np.isnan(bj.replay(*call, member=4)).all()


def _rows(tmp_path):
    np.save(tmp_path / "x.npy", X)
    return bj.from_npy(str(tmp_path / "x.npy")), X


def _keys(tmp_path):
    keys = jax.random.split(jax.random.key(0), N)
    return keys, keys


def _ragged(tmp_path):
    lengths = np.arange(N) % 5
    rows = np.arange(lengths.sum(), dtype=np.float32)
    ends = np.cumsum(lengths)
    members = [rows[end - n : end] for end, n in zip(ends, lengths, strict=True)]
    made = [{"rows": member, "mask": np.ones(len(member), bool)} for member in members]
    return bj.from_ragged(rows, lengths), made


BODIES = {
    "files": (_rows, lambda v: {"a": v * 2, "b": [v[0]]}),
    "keys": (_keys, lambda key: jax.random.normal(key, (2,))),
    "ragged": (_ragged, lambda rows: jnp.sum(rows["rows"], where=rows["mask"])),
}


@pytest.mark.parametrize("case", BODIES)
def test_members_are_read_again(tmp_path, case):
    make, body = BODIES[case]
    data, members = make(tmp_path)
    program = bj.program(clients=N)(lambda x: bj.reduce_sum(bj.map_fn(body, x)))
    job = bj.launch(program, data, runner="local", options={"shard_size": 8})
    job.result()
    for member in (0, 13, N - 1):
        found = bj.replay(job, program, data, member=member)
        expected = jax.jit(body)(members[member])
        assert_same_types(found, expected)
        jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_derivatives_of_a_program_call_its_function():
    seen = []
    curve = lambda w, v: jnp.sin(loss(w, v))

    def body(w, v):
        if not isinstance(w, jax.core.Tracer):
            seen.append(w)
        return curve(w, v)

    program = bj.program(clients=N)(lambda w, x: bj.reduce_sum(bj.map_fn(lambda v: body(w, v), x)))

    def replayed(fn, *args):
        job = bj.launch(fn, *args, runner="local")
        job.result()
        return bj.replay(job, fn, *args, member=3)

    (slope,) = replayed(jax.grad(program), W, X)  # which does not compute the value
    np.testing.assert_allclose(slope, jax.grad(curve)(W, X[3]), rtol=1e-5)
    assert not seen
    value = replayed(jax.value_and_grad(program), W, X)
    np.testing.assert_allclose(value, curve(W, X[3]), rtol=1e-6)
    np.testing.assert_array_equal(seen[0], W)
    pair = np.stack([W, 2 * W])
    (values,) = replayed(jax.vmap(program, (0, None)), pair, X)
    np.testing.assert_allclose(values, [curve(w, X[3]) for w in pair], rtol=1e-6)
    checked = checkify.checkify(program, errors=checkify.nan_checks)
    np.testing.assert_allclose(replayed(checked, W, X)[-1], curve(W, X[3]), rtol=1e-6)


def test_loops_and_branches_with_effects(tmp_path):
    seen = []

    @bj.program(clients=N)
    def program(w, x):
        def body(state):
            i, w = state

            def even(v):
                io_callback(lambda i: seen.append(int(i)), None, i)
                return v * w

            means = [
                lambda: bj.reduce_mean(bj.map_fn(even, x)),
                lambda: bj.reduce_max(bj.map_fn(lambda v: v + w, x)),
            ]
            return i + 1, w + jax.lax.switch(i % 2, means)

        return jax.lax.while_loop(lambda state: state[0] < 4, body, (jnp.int32(0), w))

    folder = str(tmp_path / "job")
    bj.run(program, W, X, runner="local", options={"job_folder": folder})
    w = W
    for number in range(4):
        seen.clear()
        step = ("even", "<lambda>")[number % 2]
        found = bj.replay(folder, program, W, X, member=3, step=step, round=number)
        members = X + w if number % 2 else X * w
        np.testing.assert_allclose(found, members[3], rtol=1e-5, atol=1e-6)
        assert number % 2 or seen[-1] == number
        w = w + (members.max(0) if number % 2 else members.mean(0))


def test_what_can_not_be_replayed(tmp_path):
    folder = str(tmp_path / "job")
    bj.run(descend, W, X, runner="local", options={"job_folder": folder, "shard_size": 8})
    call = folder, descend, W, X
    for error, message, arguments, options in [
        (bj.JobError, "without the function", (folder,), {}),
        (bj.JobError, "without the function", (bj.WorkerError("x"),), {}),
        (bj.OptionsError, "member=... or shard=", call, {}),
        (bj.OptionsError, "one from 0 to 19", call, {"member": 20}),
        (bj.OptionsError, "one from 0 to 2", call, {"shard": 3}),
        (bj.OptionsError, "map_clients_0", call, {"member": 0, "step": "map_client_0"}),
        (bj.OptionsError, "after 4 rounds", call, {"member": 0, "round": 4}),
    ]:
        with pytest.raises(error, match=message):
            bj.replay(*arguments, **options)


@pytest.mark.parametrize("at_each", [False, True])
def test_shards_that_end_where_files_end(tmp_path, monkeypatch, at_each):
    if at_each:
        monkeypatch.setattr("beamjax.interpreters.lowering.shard_size.GROUP_SHARDS", 1e-9)
    rows = [5, 11, 3, 6] * 10
    for number, start in enumerate(np.cumsum([0, *rows[:-1]])):
        array = np.arange(start, start + rows[number], dtype=np.float32)
        np.save(tmp_path / f"{number:02}.npy", array)
    source = bj.from_npy(str(tmp_path / "*.npy"))
    fn = bj.program(placements={"rows": None})(lambda x: bj.reduce_sum(bj.map_fn(jnp.negative, x)))
    options = {"shard_size": 8, "job_folder": str(tmp_path / "job")}
    bj.run(fn, source, runner="local", options=options)
    shards = bj.open_job(tmp_path / "job").progress().done.shards
    assert (shards == 50) == at_each  # files of 11 rows are two shards
    found = [bj.replay(tmp_path / "job", fn, source, shard=i) for i in range(shards)]
    np.testing.assert_array_equal(np.concatenate(found), -np.arange(sum(rows)))
