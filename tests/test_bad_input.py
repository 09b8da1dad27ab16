"""What is wrong with an input is told before any work starts, where that can be known."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from faults import WAYS

import beamjax as bj
from beamjax.errors import (
    ArrayFormatError,
    OptionsError,
    OutsideProgramError,
    PlacementError,
    SourceError,
    StagingError,
    StructureError,
    WorkerError,
)
from beamjax.pipelines import files
from beamjax.pipelines.store import Store
from beamjax.sources import source_base

N = 20
X = np.arange(N * 3, dtype=np.float32).reshape(N, 3)
RUNNERS = ["local", "DirectRunner"]


@bj.program(clients=N)
def total(x):
    return bj.reduce_sum(bj.map_fn(lambda v: v * 2, x))


def program_of(body):
    return bj.program(clients=N)(lambda x: bj.map_fn(body, x))


def changing_body():
    calls = []

    def body(v):
        calls.append(1)
        return (v, v) if len(calls) % 2 else v

    return body


@pytest.fixture
def no_work(monkeypatch):
    """Makes any work an error: shards, stores and pipelines."""

    def work(*args, **kwargs):
        raise AssertionError("work was started")

    monkeypatch.setattr("beamjax.shards.ShardExecutor.__call__", work)
    monkeypatch.setattr("beamjax.pipelines.store.Store.put", work)
    monkeypatch.setattr("apache_beam.Pipeline.run", work)


# --- arguments and programs: through every front door


@bj.program(clients=N)
def unknown_placement(x):
    return bj.reduce_sum(x, placement="server")


@bj.program(clients=N, silos=3)
def ambiguous(x):
    return bj.reduce_sum(x)


@bj.program(clients=N)
def raises(x):
    return bj.map_fn(lambda v: v @ jnp.ones((2, 2)), x)


def none_of_the_members(x):
    return bj.program(clients=0)(lambda x: bj.reduce_sum(x))(x)


BAD = {
    "outside": (lambda x: bj.reduce_sum(x), X, OutsideProgramError,
                r"reduce_sum is only defined inside a program"),
    "other n": (total, X[1:], PlacementError,
                r"map_fn: arg has shape \(19, 3\), expected \(20, ...\)"),
    "other axis": (total, X.T, PlacementError, r"arg has shape \(3, 20\), expected \(20"),
    "scalar": (total, 1.0, PlacementError, r"arg has shape \(\), expected \(20, ...\)"),
    "ragged": (total, (X, X[:5]), PlacementError, r"arg\[1\] has shape \(5, 3\), expected \(20"),
    "text": (total, {"a": X, "b": "text"}, StructureError,
             r"args\[0\]\['b'\]: found a str .*'text'.* expected an array"),
    "object": (total, object(), StructureError, r"args\[0\]: found a object"),
    "object array": (total, np.array([None, 1]), StructureError, r"args\[0\]: found a ndarray"),
    "unknown placement": (unknown_placement, X, PlacementError,
                          r"unknown placement 'server'; the program has 'clients'"),
    "ambiguous": (ambiguous, X, PlacementError, r"more than one placement, 'clients', 'silos'"),
    "no members": (none_of_the_members, X, PlacementError,
                   r"x has shape \(20, 3\), expected \(0, ...\)"),
    "text result": (program_of(lambda v: {"a": v, "b": "text"}), X, StructureError,
                    r"the result of <lambda>\['b'\] is of type str"),
    "object result": (program_of(lambda v: object()), X, StructureError,
                      r"the result of <lambda> is of type object"),
    "source of other n": (total, bj.from_arrays(X[1:]), PlacementError,
                          r"map_fn: arg has shape \(19, 3\), expected \(20"),
    "callback": (program_of(lambda v: jax.pure_callback(np.sin, v, v)), X, StagingError,
                 r"test_bad_input\.py:\d+"),
    "error in the body": (raises, X, TypeError, r"dot|matmul|shapes"),
}  # fmt: skip


@pytest.mark.parametrize("front", ["local", "DirectRunner", "explain", "verify", "transform"])
@pytest.mark.parametrize("name", BAD)
@pytest.mark.usefixtures("no_work")
def test_bad_arguments_and_programs(name, front):
    fn, arg, error, message = BAD[name]
    call = functools.partial(bj.run, runner=front) if front in RUNNERS else getattr(bj, front)
    with pytest.raises(error, match=message) as caught:
        call(fn, arg)
    assert caught.type is error


@pytest.mark.parametrize("runner", RUNNERS)
def test_none_is_a_tree_without_leaves(runner):
    program = program_of(lambda d: d)
    assert bj.run(program, {"x": X, "none": None}, runner=runner)["none"] is None


@pytest.mark.parametrize("runner", RUNNERS)
def test_abstract_arguments_are_only_for_transform(runner):
    with pytest.raises(StagingError, match=r"args\[0\]: found a jax\.ShapeDtypeStruct.*transform"):
        bj.run(total, jax.ShapeDtypeStruct(X.shape, X.dtype), runner=runner)


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_body_that_changes_its_tree_keeps_the_one_that_was_traced(runner):
    """A body is traced once a plan: what it does in later calls in Python is never seen."""
    program = program_of(changing_body())
    found = bj.run(program, X, runner=runner)
    again = bj.run(program, X, runner=runner)
    assert jax.tree.structure(found) == jax.tree.structure(again)


def test_branches_that_differ_in_structure():
    fn = program_of(lambda v: jax.lax.cond(v[0] > 0, lambda: (v, v), lambda: (v,)))
    with pytest.raises(TypeError, match="structure"):
        bj.run(fn, X)


def test_a_partial_of_what_is_not_data_is_fine():
    @bj.program(clients=N)
    def scaled(how, x):
        return bj.reduce_sum(x * 2.0 if how == "double" else x)

    np.testing.assert_allclose(bj.run(functools.partial(scaled, "double"), X), 2 * X.sum(0))


# --- options and runners


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shard_size": 12}, "shard_size: found 12, expected a positive multiple of 8"),
        ({"shard_size": -8}, "shard_size: found -8"),
        (["--shard_size=many"], "shard_size: found 'many', expected a number"),
        ({"reduction": "quick"}, "reduction: found 'quick', expected one of exact, fast"),
        ({"platforms": ["abacus"]}, r"platforms: found \['abacus'\]"),
        ("--shard_size=8", "options: found a str, expected a dict"),
        ([8], "options: found the flag 8, expected text"),
    ],
    ids=str,
)
@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.usefixtures("no_work")
def test_options_of_beamjax(options, message, runner):
    with pytest.raises(OptionsError, match=message):
        bj.run(total, X, options=options, runner=runner)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shard_sise": 8}, "found 'shard_sise', expected an option.*did you mean 'shard_size'"),
        (["--direct_num_worker=2"], "found 'direct_num_worker'.*mean 'direct_num_workers'"),
        (["--direct_running_mode=fast"], "does not take these flags.*direct_running_mode.*'fast'"),
        (["--direct_num_workers=two"], "does not take these flags.*direct_num_workers.*'two'"),
        (["--runner=FlinkRunner"], r"found runner 'FlinkRunner', but the run is on FnApiRunner"),
    ],
    ids=str,
)
@pytest.mark.usefixtures("no_work")
def test_options_of_beam(options, message):
    with pytest.raises(OptionsError, match=message):
        bj.run(total, X, options=options)


@pytest.mark.parametrize("runner", ["NoSuchRunner", "no.such.Runner", None, 3, dict])
@pytest.mark.usefixtures("no_work")
def test_unknown_runners(runner):
    with pytest.raises(OptionsError, match=r"runner: found .* expected 'local', "):
        bj.run(total, X, runner=runner)


# --- what fails while it runs: step, shard and members are named


@dataclasses.dataclass(frozen=True)
class Broken(bj.Source, kind="test-broken"):
    """A source that can't be read from member 8 to 15."""

    how: str

    @property
    def leaves(self):
        return (source_base.LeafSpec((3,), np.dtype("float32")),)

    @property
    def treedef(self):
        return jax.tree.structure(0)

    def __len__(self):
        return N

    def read(self, start, stop):
        if start == 8 and self.how == "raises":
            raise OSError("the disk is gone")
        if start == 8 and self.how == "refuses":
            raise SourceError("file.npy is not what it was")
        return [X[start : stop - (start == 8)]]

    def to_spec(self):
        return {**self.spec_head(), "how": self.how}

    @classmethod
    def from_spec(cls, spec):
        return cls(spec["how"])


WHERE = r"step 'map_clients_0' \(<lambda>\), shard 1 of placement 'clients', members 8 to 15: "


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ("raises", WorkerError, WHERE + "OSError: the disk is gone"),
        ("refuses", SourceError, "file.npy is not what it was"),
        ("lacks one", SourceError, "asked for members 8 to 15, found 7 of them"),
    ],
)
def test_a_source_that_fails(runner, how, error, message):
    with pytest.raises(error, match=message) as caught:
        bj.run(total, Broken(how), runner=runner, options={"shard_size": 8})
    assert caught.type is error


@pytest.mark.parametrize("how", ["raises", "refuses"])
@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "in the text of the runner"])
def test_errors_that_come_as_text_keep_their_type(how, recorded, monkeypatch):
    flags = ["--direct_running_mode=multi_threading", "--direct_num_workers=2", "--shard_size=8"]
    error, message = (WorkerError, WHERE)
    if how == "refuses":
        error, message = (SourceError, WHERE if recorded else r"file\.npy")
    if not recorded:
        monkeypatch.setattr("beamjax.pipelines.failures.recorded_error", lambda store: None)
    with pytest.raises(error, match=f"^{message}") as caught:
        bj.run(total, Broken(how), options=flags)
    assert caught.type is error
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_body_that_fails_on_a_member(runner):
    @bj.program(clients=N)
    def roots(x):
        return bj.reduce_sum(bj.map_fn(lambda v: jnp.log(v), x))

    x = np.where(np.arange(N)[:, None] == 9, np.float32(-1), X + 1)
    with jax.debug_nans(True), pytest.raises(WorkerError, match=WHERE + "FloatingPointError"):
        bj.run(roots, x, runner=runner, options={"shard_size": 8})


@pytest.mark.parametrize("where", WAYS)
def test_what_jax_is_told_to_check(where, monkeypatch):
    """Wherever a shard is computed: in other threads of this process, or in other processes."""
    monkeypatch.setattr("beamjax.pace.pays_in_bundle", lambda body: True)
    monkeypatch.setattr("beamjax.pace.pays", lambda body, left: left is None or left > 1)
    monkeypatch.setattr("beamjax.pace.threads", lambda body, most: 2)
    monkeypatch.setattr("beamjax.pace.threads_in_bundle", lambda body, most: most)

    @bj.program(clients=N)
    def inverses(x):
        return bj.reduce_sum(bj.map_fn(lambda v: 1 / v, x))

    x = np.where(np.arange(N)[:, None] == 9, np.float32(0), X + 1)
    runner, flags = WAYS[where]
    with jax.debug_infs(True), pytest.raises(WorkerError, match=WHERE + "FloatingPointError"):
        bj.run(inverses, x, runner=runner, options={"shard_size": 8} | flags)


@pytest.mark.parametrize("where", WAYS)
def test_a_server_step_that_fails(where):
    @bj.program(clients=N)
    def root(x):
        return jnp.log(bj.reduce_sum(x) - 1e9)

    runner, flags = WAYS[where]
    with jax.debug_nans(True), pytest.raises(WorkerError, match=r"'server_\d': FloatingPointError"):
        bj.run(root, X, runner=runner, options=flags)


def test_messages_of_beam_are_the_cause_of_those_of_beamjax():
    with pytest.raises(WorkerError, match=f"^{WHERE}OSError: the disk is gone$") as caught:
        bj.run(total, Broken("raises"), options={"shard_size": 8})
    assert "[while running 'map_clients_0" in str(caught.value.__cause__)


# --- files that change while it runs


DAMAGE = {
    "truncated": lambda data: data[:-5],
    "longer": lambda data: data + b"12345",
    "another shape": lambda data: data.replace(b'"shape":[', b'"shape":[9,', 1),
    "another dtype": lambda data: data.replace(b"float32", b"float64", 1),
    "no header": lambda data: bytes(len(data)),
}


@bj.program(clients=N)
def with_table(x, table):
    return bj.reduce_sum(bj.map_fn(lambda v: v * jnp.sum(table), x))


@bj.program(clients=N)
def placed_result(x):
    return bj.map_fn(lambda v: v + 1, x)


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize(
    ("program", "args", "written"),
    [
        (with_table, (X, np.ones((30, 3), np.float32)), "-arg"),
        (total, (X,), "segment-0-served-0.arrays"),
        (placed_result, (X,), "segment-0-placed-0-"),
    ],
    ids=["server value", "result", "placed result"],
)
def test_a_damaged_file_in_the_work_folder(damage, program, args, written, monkeypatch, tmp_path):
    write = files.write
    paths = []

    def write_damaged(path, data, **kwargs):
        paths.append(path)
        write(path, DAMAGE[damage](data) if written in path else data, **kwargs)

    monkeypatch.setattr("beamjax.pipelines.store.INLINE_BYTES", 0)
    monkeypatch.setattr("beamjax.pipelines.runners.store_budget", lambda limit: 0)
    monkeypatch.setattr(files, "write", write_damaged)
    with pytest.raises(ArrayFormatError, match=r"(arrays|members): .*(found|bad) .*expected"):
        bj.run(program, *args, options={"work_folder": str(tmp_path)})
    assert any(written in path for path in paths), paths
    assert list(tmp_path.iterdir()) == []


def test_a_work_folder_that_cannot_be_made(tmp_path, monkeypatch):
    monkeypatch.setattr("beamjax.pipelines.store.INLINE_BYTES", 0)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(SourceError, match=r"cannot write .* expected a\s+folder"):
        bj.run(
            with_table, X, np.ones(3, np.float32), options={"work_folder": str(tmp_path / "file")}
        )


def test_files_removed_while_it_runs(tmp_path, monkeypatch):
    monkeypatch.setattr("beamjax.pipelines.store.INLINE_BYTES", 0)
    get = Store.get

    def get_after_removal(self, ref, **kwargs):
        files.remove(self.root, ".arrays")
        return get(self, ref, **kwargs)

    monkeypatch.setattr(Store, "get", get_after_removal)
    with pytest.raises(SourceError, match=r"cannot read a stored value.*was it not cleaned up"):
        bj.run(with_table, X, np.ones(3, np.float32), options={"work_folder": str(tmp_path)})
