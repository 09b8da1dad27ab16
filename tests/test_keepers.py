"""A run that is stopped anywhere goes on from its last checkpoint, to the same bits."""

import contextlib
import errno
import os
import shutil
import stat
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_driver
import url_files  # noqa: F401 - makes bjtest:// known to Beam
from plans import Maker, inputs_of, renamed
from test_driver import N, W, X, history_inputs, loop

import beamjax as bj
from beamjax.errors import CheckpointError, OptionsError
from beamjax.interpreters.evaluate import evaluate
from beamjax.options import Options
from beamjax.pipelines import checkpoint_folder, files, keepers, runners
from beamjax.pipelines.checkpoint_folder import CheckpointFolder
from beamjax.plan import Block

JS = np.array([0, 1, 3], np.int32)
RUNNERS = ["local", "DirectRunner"]


def shifts():
    """Carries the entry of this round to the next one, and stacks that of the one before it."""
    m = Maker(N, xs="f 4 3@", e="f 3@", p="f 3@", x="f 3@", out="f 3@", ps="f 4 3@", t="f 3",
              ts="f 4 3")  # fmt: skip
    step = m.map("map_clients_0", lambda p, e: p * e, "", "p e", "", "t")
    block = Block((step,), ("e", "p", "t"))
    steps = [loop("loop_0", 4, block, "x:p:out", "xs:e", "ps ts")]
    return m.plan(steps, "out ps ts", "xs x")


def unchanged():
    """Carried as they are, replaced by values from outside, and stacked from outside."""
    m = Maker(N, x="f 3@", y="f 3@", w="f 3", a="f 3@", b="f 3@", p="f 3", t="f 3", a1="f 3@",
              b1="f 3@", p1="f 3", xs="f 3 3@", ws="f 3 3", ts="f 3 3")  # fmt: skip
    step = m.map("map_clients_0", lambda p, a, b: p * a + b, "p", "a b", "", "t")
    block = Block((step,), ("a", "y", "w", "b", "w", "t"))
    steps = [loop("loop_0", 3, block, "x:a:a1 x:b:b1 w:p:p1", "", "xs ws ts")]
    return m.plan(steps, "a1 b1 p1 xs ws ts", "x y w")


PLANS = {
    "descent": (test_driver.descent(4), {"w": W, "x": X}),
    "history": (test_driver.history(4), history_inputs(4)),
    "reverse": (test_driver.history(3, True), history_inputs(3)),
    "swap": (test_driver.swap(), {"a": np.float32(1), "b": np.float32(2), "x": X, "y": -X}),
    "exchange": (test_driver.exchange(3), {"x": np.arange(9, dtype=np.float32).reshape(3, 3)}),
    "halving": (
        test_driver.halving(),
        {"x": X, "s": np.float32(1), "i": np.int32(0), "limit": np.float32(40)},
    ),
    "choice": (test_driver.choice(), {"x": X, "w": W, "i": np.int32(1)}),
    "nested": (test_driver.nested(), {"x": X, "w": W, "js": JS}),
    "unchanged": (unchanged(), {"x": X, "y": 2 * X, "w": W}),
    "shifts": (shifts(), {"x": X, "xs": np.arange(N * 12, dtype=np.float32).reshape(N, 4, 3)}),
}


def run(plan, arrays, runner="local", **options):
    inputs, parsed = inputs_of(plan, **arrays), Options(**options)
    if runner != "local":
        return runners.run_plan(plan, inputs, runner, parsed)
    with keepers.local_keeper(plan, inputs, parsed) as keeper:
        return evaluate(plan, inputs, parsed, keeper=keeper)


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape), name
        assert found[name].tobytes() == array.tobytes(), name


@contextlib.contextmanager
def stopped(after, save=CheckpointFolder.save):
    """Stops a run after so many checkpoints."""
    done = []

    def saves(self, checkpoint):
        save(self, checkpoint)
        done.append(checkpoint.position)
        if len(done) == after:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointFolder, "save", saves)
        yield done


def stop(plan, arrays, after, runner="local", **options):
    """Runs until so many checkpoints are there."""
    with stopped(after), contextlib.suppress(KeyboardInterrupt):
        run(plan, arrays, runner, **options)


def count(plan, arrays, **options):
    """How many checkpoints a run makes from here on."""
    with stopped(0) as done:
        found = run(plan, arrays, **options)
    return len(done), found


@pytest.fixture
def all_as_files(monkeypatch):
    monkeypatch.setattr("beamjax.pipelines.store.INLINE_BYTES", 0)


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("writer", RUNNERS)
def test_either_runner_goes_on_from_any_round(name, writer, tmp_path):
    plan, arrays = PLANS[name]
    expected = run(plan, arrays)
    folder = tmp_path / "run"
    total, found = count(plan, arrays, checkpoint=str(tmp_path / "whole"))
    assert_same(found, expected)
    for after in range(1, total + 1):
        stop(plan, arrays, after, writer, checkpoint=str(folder))
        for reader in RUNNERS if after % 2 else RUNNERS[:1]:
            copy = tmp_path / f"copy-{after}-{reader}"
            shutil.copytree(folder, copy)
            with stopped(0) as done:
                assert_same(run(plan, arrays, reader, checkpoint=str(copy)), expected)
            assert len(done) == total - after
        shutil.rmtree(folder)


@pytest.mark.parametrize("name", ["history", "nested", "exchange"])
@pytest.mark.parametrize("writer", RUNNERS)
def test_values_in_files(name, writer, tmp_path, all_as_files):
    plan, arrays = PLANS[name]
    expected = run(plan, arrays)
    for reader in RUNNERS:
        folder = str(tmp_path / reader)
        stop(plan, arrays, 2, writer, checkpoint=folder)
        assert_same(run(plan, arrays, reader, checkpoint=folder), expected)
        assert_same(run(plan, arrays, reader, checkpoint=folder), expected)


def test_workers_in_other_processes_read_checkpoints(tmp_path):
    plan, arrays = PLANS["history"]
    options = {"checkpoint": str(tmp_path), "beam": tuple(test_driver.PROCESSES)}
    stop(plan, arrays, 2, **options)
    assert_same(run(plan, arrays, "DirectRunner", **options), run(plan, arrays))


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_finished_run_is_not_run_again(runner, tmp_path, monkeypatch):
    plan, arrays = PLANS["history"]
    folder = str(tmp_path / "c")
    expected = run(plan, arrays, runner, checkpoint=folder)
    monkeypatch.setattr("beamjax.pipelines.launch.Launcher.run", None)
    monkeypatch.setattr("beamjax.interpreters.evaluate._Evaluation.steps", None)
    for reader in RUNNERS:
        assert_same(run(plan, arrays, reader, checkpoint=folder), expected)


@pytest.mark.parametrize(
    ("every", "width", "pipelines", "saved"),
    [(1, None, 5, 5), (2, None, 3, 2), (5, None, 1, 1), (4, 3, 3, 1), (9, 2, 3, 0)],
)
def test_rounds_between_checkpoints(every, width, pipelines, saved, tmp_path, monkeypatch):
    launched = []
    launch = runners.Launcher.run
    monkeypatch.setattr(runners.Launcher, "run", lambda *args: launched.append(1) or launch(*args))
    options = {"checkpoint": str(tmp_path), "checkpoint_every": every, "rounds_per_graph": width}
    with stopped(0) as done:
        run(test_driver.descent(5), {"w": W, "x": X}, "DirectRunner", **options)
    assert (len(launched), len(done)) == (pipelines, saved + 1)


def test_earlier_loops_are_not_run_again(tmp_path):
    """The values that one loop gave are in the checkpoints of the next one."""
    m = Maker(N, x="f 3@", p="f 3@", q="f 3@", a="f 3@", t="f 3", u="f 3", b="f 3", out="f 3",
              v="f 3", w="f 3", ts="f 2 3")  # fmt: skip
    first = Block((m.map("map_clients_0", lambda p: (p + 1, p), "", "p", "q", "t"),), ("q", "t"))
    second = Block(
        (m.map("map_clients_1", lambda v, a: a * v, "v", "a", "", "u"),
         m.server("server_0", lambda u, v: u / 64 + v, "u v", "b")), ("b",),
    )  # fmt: skip
    steps = [
        loop("loop_0", 2, first, "x:p:a", "", "ts"),
        loop("loop_1", 3, second, "w:v:out"),
    ]
    plan, arrays = m.plan(steps, "out a ts", "x w"), {"x": X, "w": W}
    expected = run(plan, arrays)
    for reader in RUNNERS:
        folder = str(tmp_path / reader)
        stop(plan, arrays, 4, "DirectRunner", checkpoint=folder)
        with stopped(0) as done:
            assert_same(run(plan, arrays, reader, checkpoint=folder), expected)
        assert done == [(("loop_1", 3),), ()]


# --- what is in the folder


def test_the_folder_keeps_two_checkpoints_and_no_more(tmp_path, all_as_files):
    plan, arrays = PLANS["history"]
    folder = tmp_path / "new" / "c"
    counts = []
    save = CheckpointFolder.save
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            CheckpointFolder, "save",
            lambda self, found: (save(self, found), counts.append(sorted(os.listdir(folder)))),
        )  # fmt: skip
        run(plan, arrays, "DirectRunner", checkpoint=str(folder))
    for number, names in enumerate(counts, 1):
        manifests = [name for name in names if name.endswith(".checkpoint")]
        assert manifests == [f"{i:08d}.checkpoint" for i in range(max(1, number - 1), number + 1)]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    listed = set(os.listdir(folder)) - {"lock"} - set(manifests)
    kept = CheckpointFolder(str(folder))
    assert listed == {name for _, found in kept.manifests() for name in found.files()}


def test_placed_values_are_linked_and_not_read(tmp_path, monkeypatch):
    plan, arrays = PLANS["history"]
    linked = []
    link = files.link
    monkeypatch.setattr(files, "link", lambda a, b: linked.append(b) or link(a, b))
    monkeypatch.setattr("beamjax.pipelines.values.Placed.whole", None)
    stop(plan, arrays, 3, "DirectRunner", checkpoint=str(tmp_path))
    members = [Path(path) for path in linked if path.endswith(".members")]
    assert len({path.name for path in members}) == len(members) > 3


def test_unchanged_values_are_written_once(tmp_path, all_as_files):
    plan, arrays = PLANS["nested"]
    written = []
    write = CheckpointFolder.wrote
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            CheckpointFolder, "wrote", lambda self, name: (written.append(name), write(self, name))
        )
        run(plan, arrays, "DirectRunner", checkpoint=str(tmp_path))
    assert len(set(written)) == len(written)


# --- damage


def damage(path, how):
    data = bytearray(path.read_bytes())
    if how == "gone":
        path.unlink()
    elif how == "cut":
        path.write_bytes(data[:-1])
    elif how == "empty":
        path.write_bytes(b"")
    else:
        data[len(data) // 2] ^= 1
        path.unlink()  # it may have other links
        path.write_bytes(data)


@pytest.mark.parametrize("how", ["gone", "cut", "empty", "flipped"])
@pytest.mark.parametrize("what", [".checkpoint", ".arrays", ".members"])
@pytest.mark.parametrize("reader", RUNNERS)
def test_a_damaged_checkpoint_is_not_used(what, how, reader, tmp_path, all_as_files):
    plan, arrays = PLANS["history"]
    expected = run(plan, arrays)
    stop(plan, arrays, 3, checkpoint=str(tmp_path))
    last = next(CheckpointFolder(str(tmp_path)).manifests())
    before = list(CheckpointFolder(str(tmp_path)).manifests())[1]
    names = [last[0]] if what == ".checkpoint" else sorted(last[1].files() - before[1].files())
    name = next(name for name in names if name.endswith(what))
    damage(tmp_path / name, how)
    warned = pytest.warns(RuntimeWarning, match=f"checkpoint {tmp_path}/00000003.checkpoint is dam")
    silent = what == ".checkpoint" and how == "gone"
    with contextlib.nullcontext() if silent else warned, stopped(0) as done:
        assert_same(run(plan, arrays, reader, checkpoint=str(tmp_path)), expected)
    assert done == [(("loop_0", 3),), (("loop_0", 4),), ()]
    assert_same(run(plan, arrays, reader, checkpoint=str(tmp_path)), expected)


def test_a_run_starts_anew_if_all_are_damaged(tmp_path):
    plan, arrays = PLANS["descent"]
    stop(plan, arrays, 3, checkpoint=str(tmp_path))
    for path in tmp_path.glob("*.checkpoint"):
        damage(path, "cut")
    with pytest.warns(RuntimeWarning) as warned, stopped(0) as done:
        run(plan, arrays, checkpoint=str(tmp_path))
    assert (len(warned), len(done)) == (2, 5)
    run(plan, arrays, checkpoint=str(tmp_path))


# --- other runs


def test_another_plan_or_other_inputs_are_refused(tmp_path):
    plan, arrays = PLANS["descent"]
    folder = str(tmp_path)
    stop(plan, arrays, 2, checkpoint=folder)
    others = {
        r"is of other inputs than this run: they differ in w\.": (plan, {"w": W + 1, "x": X}, {}),
        r"they differ in x\. Give this run a folder of its own": (plan, {"w": W, "x": X + 1}, {}),
        r"other plan .* in the option reduction \(exact there, fast now\)": (
            plan, arrays, {"reduction": "fast"}),
        r"the shard size of 'clients' \(8 there, 16 now\)": (
            renamed(plan, shard_sizes={"clients": 16}), arrays, {}),
        r"differ in the types of its values; its steps; what": (*PLANS["history"], {}),
    }  # fmt: skip
    for message, (other, given, options) in others.items():
        for runner in RUNNERS:
            with pytest.raises(CheckpointError, match=message):
                run(other, given, runner, checkpoint=folder, **options)
    assert_same(run(plan, arrays, checkpoint=folder), run(plan, arrays))


@pytest.mark.parametrize("runner", RUNNERS)
def test_files_that_are_written_again_are_the_same_inputs(runner, tmp_path, monkeypatch):
    @bj.program(clients=N)
    def one_round(w, x):
        return w - bj.reduce_mean(bj.map_fn(lambda v: jnp.tanh(v @ w) * v, x))

    def rounds(w, x):
        return jax.lax.fori_loop(0, 3, lambda _, w: one_round(w, x), w)

    monkeypatch.setattr("beamjax.file_hashes._SETTLED", 0)
    w, x = np.ones(3, np.float32), np.asarray(X, np.float32).reshape(N, 3)
    path, options = tmp_path / "x.npy", {"checkpoint": str(tmp_path / "c")}
    np.save(path, x)
    expected = bj.run(rounds, w, bj.from_npy(path), runner=runner, options=options)
    os.utime(path, ns=(1, 1))
    np.save(path, x)
    with stopped(0) as done:
        found = bj.run(rounds, w, bj.from_npy(path), runner=runner, options=options)
    assert found.tobytes() == expected.tobytes()
    assert not done
    monkeypatch.setattr("hashlib.file_digest", None)  # what is unchanged is not read
    bj.run(rounds, w, bj.from_npy(path), runner=runner, options=options)
    monkeypatch.undo()
    np.save(path, x + 1)
    with pytest.raises(CheckpointError, match=r"of other inputs .* they differ in args\[1\]"):
        bj.run(rounds, w, bj.from_npy(path), runner=runner, options=options)


def test_a_folder_is_for_one_run_at_a_time(tmp_path):
    plan, arrays = PLANS["descent"]
    with (
        checkpoint_folder.held(str(tmp_path)),
        pytest.raises(CheckpointError, match=rf"another run is using it \(process {os.getpid()}\)"),
    ):
        run(plan, arrays, checkpoint=str(tmp_path))
    run(plan, arrays, checkpoint=str(tmp_path))


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file/c: cannot be written"):
        run(*PLANS["descent"], checkpoint=str(tmp_path / "file" / "c"))


def test_transform_saves_nothing(tmp_path):
    total = bj.program(clients=4)(lambda x: bj.reduce_sum(x))
    with pytest.raises(OptionsError, match="in the options of transform, where nobody drives"):
        bj.transform(total, np.ones(4, np.float32), options={"checkpoint": str(tmp_path)})


@pytest.mark.parametrize("runner", ["local", "DirectRunner"])
def test_sources_of_unknown_length_are_refused(runner, tmp_path):
    total = bj.program(clients=None)(lambda x: bj.reduce_sum(x))
    source = bj.from_chunks(lambda: iter([np.ones(3, np.float32)]))
    with pytest.raises(OptionsError, match=r"args\[0\] is a source of unknown length"):
        bj.run(total, source, runner=runner, options={"checkpoint": str(tmp_path)})


@pytest.mark.parametrize("work", [None, "work"])
def test_checkpoints_at_a_url(work, tmp_path):
    """Another file system of Beam, see `test_store`; also with temporary files elsewhere."""
    plan, arrays = PLANS["history"]
    expected = run(plan, arrays)
    (tmp_path / "work").mkdir()
    options = {"checkpoint": f"bjtest:/{tmp_path}/c"}
    if work:
        options["work_folder"] = str(tmp_path / work)
    stop(plan, arrays, 2, "DirectRunner", **options)
    for reader in RUNNERS[::-1]:
        assert_same(run(plan, arrays, reader, **options), expected)


# --- a process may end at any moment


def test_parts_of_a_pass_go_on(tmp_path):
    """Several reductions of a pass are stored under names that are not hashes."""

    @bj.program(clients=N)
    def one_round(w, x):
        moved = bj.map_fn(lambda v: jnp.tanh(v @ w), x)
        return w + bj.reduce_mean(moved), (bj.reduce_mean(moved), bj.reduce_max(moved))

    def rounds(w, x):
        return jax.lax.scan(lambda w, _: one_round(w, x), w, None, length=4)

    w, x = np.ones(3, np.float32), np.asarray(X, np.float32).reshape(N, 3)
    expected = bj.run(rounds, w, x, runner="local")
    for after in (1, 3):
        options = {"checkpoint": str(tmp_path / str(after))}
        with stopped(after), pytest.raises(KeyboardInterrupt):
            bj.run(rounds, w, x, options=options)
        with stopped(0) as done:
            found = bj.run(rounds, w, x, options=options)
        assert len(done) == 5 - after
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


class Disk:
    """The disk below a folder, which is gone after so many changes of that folder.

    Attributes:
      left: changes that still work; None for all.
      changes: how many there were.
      durable: inodes of the files whose content outlives a loss of power.
    """

    def __init__(self, folder, left=None):
        self.folder, self.left, self.changes, self.durable = str(folder), left, 0, set()

    def __enter__(self):
        self.patch = pytest.MonkeyPatch()
        for name, path in {"replace": 1, "link": 1, "unlink": 0, "open": 0}.items():
            self.patch.setattr(os, name, self._failing(getattr(os, name), path))
        self.patch.setattr(os, "fsync", self._syncing(os.fsync))
        return self

    def __exit__(self, *_):
        self.patch.undo()

    def _change(self):
        if self.left is not None and self.changes >= self.left:
            raise OSError(errno.EIO, "the disk is gone")
        self.changes += 1

    def _failing(self, function, path):
        def call(*args, **kwargs):
            writes = function.__name__ != "open" or args[1] & os.O_CREAT
            if writes and os.path.dirname(os.fspath(args[path])) == self.folder:
                self._change()
            return function(*args, **kwargs)

        return call

    def _syncing(self, function):
        def call(handle):
            self._change()
            function(handle)
            self.durable.add(os.fstat(handle).st_ino)

        return call

    def lose_power(self):
        """Cuts off what nobody has waited for."""
        for path in Path(self.folder).iterdir():
            if path.is_file() and path.stat().st_ino not in self.durable:
                os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize("writer", RUNNERS)
def test_a_run_that_ends_at_any_change_of_its_folder_goes_on(writer, tmp_path, all_as_files):
    plan, arrays = test_driver.history(2), history_inputs(2)
    expected = run(plan, arrays)
    with Disk(tmp_path / "whole") as disk:
        run(plan, arrays, writer, checkpoint=disk.folder)
    total, changes = 3, disk.changes
    assert changes > 10 * total
    wrong = []
    for left in range(1, changes, 1 if writer == "local" else 5):
        with Disk(tmp_path / str(left), left) as disk, pytest.raises(CheckpointError):
            run(plan, arrays, writer, checkpoint=disk.folder)
        if left % 2:
            disk.lose_power()
        saved = [int(path.stem) for path in Path(disk.folder).glob("*.checkpoint")]
        with warnings.catch_warnings(record=True) as warned, stopped(0) as done:
            warnings.simplefilter("always")
            assert_same(run(plan, arrays, checkpoint=disk.folder), expected)
        if warned or len(done) != total - max(saved, default=0):
            wrong.append((left, saved, done, [str(each.message) for each in warned]))
    assert not wrong
