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
import url_files  # noqa: F401 - makes bjtest:// known
from helpers import assert_same_bits

import beamjax as bj
from beamjax.errors import ArrayFormatError, CheckpointError, OptionsError
from beamjax.pipelines.checkpoints import checkpointer
from beamjax.pipelines.checkpoints import folder as checkpoint_folder
from beamjax.pipelines.checkpoints.checkpointer import Checkpointer
from beamjax.pipelines.checkpoints.folder import CheckpointFolder
from beamjax.plan.steps import ValueType
from beamjax.runtime.checkpoints import Pieces
from beamjax.runtime.values import Part
from beamjax.storage import files

N = 20
X = np.random.default_rng(0).normal(size=(N, 3)).astype(np.float32)
W = np.ones(3, np.float32)
RUNNERS = ["local", "DirectRunner"]
SIZE = {"shard_size": 8}


@bj.program(clients=N)
def pass_over(w, x):
    return bj.reduce_mean(bj.map_fn(lambda v: jnp.tanh(v * w) * v, x))


@bj.program(clients=N)
def damped(w, x):
    return bj.map_fn(lambda v: v * 0.5 + w, x)


@bj.program(clients=N)
def product(x, y):
    return bj.map_fn(lambda a, b: a * b, (x, y))


def descent(w, x):
    return jax.lax.fori_loop(0, 4, lambda _, w: w - pass_over(w, x), w)


def history(w, x, reverse=False):
    """Carries and stacks placed and server values."""

    def one(state, scale):
        w, x = state
        x = damped(w * scale, x)
        return (w + pass_over(w, x), x), (x, w)

    return jax.lax.scan(one, (w, x), jnp.arange(4.0), reverse=reverse)


def reverse(w, x):
    return history(w, x, True)


def swap(w, x):
    step = lambda _, s: (s[1], s[0] + pass_over(s[0], s[2]), s[3], s[2])
    return jax.lax.fori_loop(0, 3, step, (w, 2 * w, x, damped(w, x)))


def exchange(x):
    """Members move from one to another in each round."""
    return jax.lax.fori_loop(0, 3, lambda _, x: damped(jnp.max(x, 0), jnp.roll(x, 1, 0)), x)


def halving(w, x):
    step = lambda s: (s[0] / 2, damped(s[0], s[1]))
    return jax.lax.while_loop(lambda s: pass_over(s[0], s[1])[0] > 0.1, step, (w, x))


def nested(w, x):
    """A loop and a branch with loops, in a loop."""

    def one(w, round):
        w = jax.lax.fori_loop(0, 2, lambda _, w: w - pass_over(w, x), w)
        return jax.lax.cond(
            round % 2 == 0,
            lambda w: jax.lax.fori_loop(0, 2, lambda _, w: w + pass_over(w, x), w),
            lambda w: w * 2,
            w,
        ), w

    return jax.lax.scan(one, w, jnp.arange(2))


def unchanged(w, x):
    """Carries values as they are, replaces them by values from outside, and stacks these."""
    y = damped(w, x)
    step = lambda s, _: ((s[0], y, s[2] + pass_over(w, product(s[0], s[1]))), (x, w, s[2]))
    return jax.lax.scan(step, (x, x, w), None, length=3)


def shifts(xs):
    """Carries the entry of this round to the next one, and stacks that of the one before."""
    step = lambda s, e: ((e, product(s[0], e)), (s[0], pass_over(e[0], product(s[1], e))))
    return jax.lax.scan(step, (xs[0], xs[1]), xs)


@bj.program(clients=N)
def three_reductions(w, x):
    moved = bj.map_fn(lambda v: jnp.tanh(v @ w), x)
    return w + bj.reduce_mean(moved), (bj.reduce_mean(moved), bj.reduce_max(moved))


def several(w, x):
    """Several reductions of a pass, whose parts have names that are not hashes."""
    return jax.lax.scan(lambda w, _: three_reductions(w, x), w, None, length=4)


XS = np.stack([X + i for i in range(4)])
PROGRAMS = {
    fn.__name__: (fn, args)
    for fn, args in [
        *((fn, (W, X)) for fn in (descent, history, reverse, swap, halving, nested, unchanged)),
        (several, (W, X)),
        (exchange, (X,)),
        (shifts, (XS,)),
    ]
}


def run(fn, args, runner="local", **options):
    return bj.run(fn, *args, runner=runner, options=SIZE | options)


@contextlib.contextmanager
def stopped(after, save=CheckpointFolder.save):
    """Stops a run after so many checkpoints, or never."""
    done = []

    def saves(self, checkpoint):
        save(self, checkpoint)
        done.append(checkpoint.position)
        if len(done) == after:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointFolder, "save", saves)
        yield done


def stop(fn, args, after, runner="local", **options):
    with stopped(after), contextlib.suppress(KeyboardInterrupt):
        run(fn, args, runner, **options)


def go_on(fn, args, expected, runner="local", **options):
    """How many checkpoints a run makes from here on, to the bits that are expected."""
    with stopped(0) as done:
        assert_same_bits(run(fn, args, runner, **options), expected)
    return len(done)


@pytest.fixture
def all_as_files(monkeypatch):
    monkeypatch.setattr("beamjax.pipelines.values.store.INLINE_BYTES", 0)


@pytest.mark.parametrize("name", PROGRAMS)
def test_either_runner_goes_on_from_any_round(name, tmp_path, monkeypatch):
    if name in ("reverse", "nested", "exchange"):
        monkeypatch.setattr(
            "beamjax.pipelines.values.store.INLINE_BYTES", 0
        )  # All values are in files.
        monkeypatch.setattr(checkpointer, "FILE_BYTES", 7 * X[0].nbytes)  # Of 7, 7 and 6 members.
    fn, args = PROGRAMS[name]
    expected = run(fn, args)
    total = go_on(fn, args, expected, checkpoint=str(tmp_path / "whole"))
    assert total > 3
    wrong = []
    for after in range(1, total + 1):
        # Both runners write, and both read, though not each what each wrote in each round.
        for writer in RUNNERS if after == 2 else [RUNNERS[after % 2]]:
            folder = tmp_path / f"{after}-{writer}"
            stop(fn, args, after, writer, checkpoint=str(folder))
            for reader in RUNNERS if after % 3 == 2 else RUNNERS[:1]:
                copy = tmp_path / f"{folder.name}-{reader}"
                shutil.copytree(folder, copy)
                left = go_on(fn, args, expected, reader, checkpoint=str(copy))
                if left != total - after:
                    wrong.append((after, writer, reader, left, total))
    assert wrong == []


@pytest.mark.long
def test_workers_in_other_processes_read_checkpoints(tmp_path):
    options = {"checkpoint": str(tmp_path), "direct_running_mode": "multi_processing"}
    options["direct_num_workers"] = 2
    stop(history, (W, X), 2, **options)
    assert go_on(history, (W, X), run(history, (W, X)), "DirectRunner", **options) == 3


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_finished_run_is_not_run_again(runner, tmp_path, monkeypatch):
    folder = str(tmp_path / "c")
    expected = run(history, (W, X), runner, checkpoint=folder)
    monkeypatch.setattr("beamjax.runtime.driver.Driver._block", None)
    for reader in RUNNERS:
        assert go_on(history, (W, X), expected, reader, checkpoint=folder) == 0


@pytest.mark.parametrize(("every", "saved"), [(1, 4), (3, 1), (9, 0)])
def test_rounds_between_checkpoints(every, saved, tmp_path):
    options = {"checkpoint": str(tmp_path), "checkpoint_every": every}
    expected = run(history, (W, X))
    stop(history, (W, X), 1, "DirectRunner", **options)
    assert go_on(history, (W, X), expected, **options) == saved


@pytest.mark.parametrize("reader", RUNNERS)
def test_earlier_loops_are_not_run_again(reader, tmp_path):
    """The checkpoints of a loop hold the results of the loops before it."""

    def two_loops(w, x):
        (w, x), ws = history(w, x)
        return descent(w, x), x, ws

    expected = run(two_loops, (W, X))
    stop(two_loops, (W, X), 6, "DirectRunner", checkpoint=str(tmp_path))
    assert go_on(two_loops, (W, X), expected, reader, checkpoint=str(tmp_path)) == 3


# --- what is in the folder


def test_the_folder_holds_two_checkpoints_and_their_files(tmp_path, all_as_files, monkeypatch):
    folder = tmp_path / "new" / "c"
    listed, written, linked = [], [], []
    save, wrote, link = CheckpointFolder.save, CheckpointFolder.wrote, files.link
    monkeypatch.setattr(files, "link", lambda a, b: linked.append(b) or link(a, b))
    monkeypatch.setattr("beamjax.runtime.values.Leaf.array", None)  # They are linked unread.
    monkeypatch.setattr(
        CheckpointFolder, "wrote", lambda self, name: (written.append(name), wrote(self, name))
    )
    monkeypatch.setattr(
        CheckpointFolder,
        "save",
        lambda self, found: (save(self, found), listed.append(sorted(os.listdir(folder)))),
    )
    with stopped(4, CheckpointFolder.save), contextlib.suppress(KeyboardInterrupt):
        run(history, (W, X), "DirectRunner", checkpoint=str(folder))
    assert len(listed) == 4
    for number, names in enumerate(listed, 1):
        manifests = [name for name in names if name.endswith(".checkpoint")]
        assert manifests == [f"{i:08d}.checkpoint" for i in range(max(1, number - 1), number + 1)]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    others = set(listed[-1]) - {"lock", "work", *manifests}
    manifests = CheckpointFolder(str(folder)).manifests()
    assert others == {name for _, found in manifests for name in found.files()}
    members = [path for path in linked if path.endswith(".members")]
    assert len(set(members)) == len(members) > 3
    assert len(set(written)) == len(written) > 3  # What is unchanged is written once.


@pytest.mark.parametrize(("rows", "nbytes", "full"), [(2, 1 << 20, 2), (9, 24, 2), (9, 99, 9)])
def test_small_entries_share_arrays_that_are_written_once(
    rows, nbytes, full, tmp_path, monkeypatch
):
    """Entries of 12 bytes each, of a run and of one that goes on."""

    def fn(w, x):
        return jax.lax.scan(lambda w, _: (w + pass_over(w, x), w), w, None, length=5)

    with_header = 145
    monkeypatch.setattr("beamjax.pipelines.values.store.INLINE_BYTES", with_header)
    monkeypatch.setattr(checkpointer, "ROWS", rows)
    monkeypatch.setattr(checkpointer, "ROWS_BYTES", nbytes)
    found, save = [], CheckpointFolder.save
    spy = lambda self, saved: (found.extend(saved.stacks.values()), save(self, saved))
    expected = run(fn, (W, X))
    with stopped(3, spy), contextlib.suppress(KeyboardInterrupt):
        run(fn, (W, X), checkpoint=str(tmp_path))
    with stopped(0, spy):
        assert_same_bits(run(fn, (W, X), checkpoint=str(tmp_path)), expected)
    for done, records in enumerate(found, 1):
        assert len(records) == -(-done // full)
        last = found[2] if done <= 3 else found[-1]
        for record, same in zip(records[: done // full], last, strict=False):
            assert record is same
            assert isinstance(record.data, Pieces)


# --- damage


def damage(path, how):
    data = bytearray(path.read_bytes())
    path.unlink()  # It may have other links.
    if how == "flipped":
        data[len(data) // 2] ^= 1
    if how != "gone":
        path.write_bytes({"cut": data[:-1], "empty": b"", "flipped": data}[how])


@pytest.mark.parametrize("what", [".checkpoint", ".arrays", ".members"])
@pytest.mark.parametrize("reader", RUNNERS)
def test_a_damaged_checkpoint_is_not_used(what, reader, tmp_path, all_as_files):
    expected = run(history, (W, X))
    stop(history, (W, X), 3, checkpoint=str(tmp_path / "c"))
    last, before = CheckpointFolder(str(tmp_path / "c")).manifests()
    names = [last[0]] if what == ".checkpoint" else sorted(last[1].files() - before[1].files())
    name = next(name for name in names if name.endswith(what))
    for how in ("gone", "cut", "empty", "flipped"):
        if reader == "DirectRunner" and how in ("empty", "cut"):
            continue
        copy = tmp_path / how
        shutil.copytree(tmp_path / "c", copy)
        damage(copy / name, how)
        silent = what == ".checkpoint" and how == "gone"
        warned = pytest.warns(RuntimeWarning, match=f"checkpoint {copy}/00000003.checkpoint is dam")
        with contextlib.nullcontext() if silent else warned:
            assert go_on(history, (W, X), expected, reader, checkpoint=str(copy)) == 3, how
        assert go_on(history, (W, X), expected, reader, checkpoint=str(copy)) == 0


@pytest.mark.parametrize("at", [(3,), (0, 0)])
def test_an_entry_that_a_value_does_not_have_is_damage(at):
    part, spec = Part(0, 1, np.zeros(3, np.float32), at), ValueType((3,), "float32")
    with pytest.raises(ArrayFormatError, match="found the entry"):
        Checkpointer._restored_part(None, part, spec, None)


def test_a_run_starts_anew_if_all_are_damaged(tmp_path):
    stop(descent, (W, X), 3, checkpoint=str(tmp_path))
    for path in tmp_path.glob("*.checkpoint"):
        damage(path, "cut")
    with pytest.warns(RuntimeWarning) as warned:
        left = go_on(descent, (W, X), run(descent, (W, X)), checkpoint=str(tmp_path))
    assert (len(warned), left) == (2, 5)


# --- other runs


def test_another_program_or_other_inputs_are_refused(tmp_path):
    stop(descent, (W, X), 2, checkpoint=str(tmp_path))
    for message, fn, args, options in (
        (r"is of other inputs than this run: they differ in w\.", descent, (W + 1, X), {}),
        (r"they differ in x\. Give this run a folder", descent, (W, X + 1), {}),
        (r"in the option reduction \(exact there, fast now\)", descent, (W, X),
         {"reduction": "fast"}),
        (r"the shard size of 'clients' \(8 there, 16 now\)", descent, (W, X), {"shard_size": 16}),
        (r"its steps; what", history, (W, X), {}),
    ):  # fmt: skip
        for runner in RUNNERS:
            with pytest.raises(CheckpointError, match=message):
                run(fn, args, runner, checkpoint=str(tmp_path), **options)
    assert go_on(descent, (W, X), run(descent, (W, X)), checkpoint=str(tmp_path)) == 3


def test_parameters_may_have_other_names(tmp_path):
    stop(descent, (W, X), 2, checkpoint=str(tmp_path))
    renamed = lambda x, w: descent(x, w)
    with pytest.raises(CheckpointError, match=r"they differ in x\."):
        run(renamed, (W + 1, X), checkpoint=str(tmp_path))
    go_on(renamed, (W, X), run(descent, (W, X)), checkpoint=str(tmp_path))


@pytest.mark.parametrize("runner", RUNNERS)
def test_files_that_are_written_again_are_the_same_inputs(runner, tmp_path, monkeypatch):
    monkeypatch.setattr("beamjax.sources.arrays.data_files.SETTLED_NS", 0)
    path, options = tmp_path / "x.npy", {"checkpoint": str(tmp_path / "c")}
    np.save(path, X)
    expected = run(descent, (W, bj.from_npy(path)), runner, **options)
    os.utime(path, ns=(1, 1))
    np.save(path, X)
    assert go_on(descent, (W, bj.from_npy(path)), expected, runner, **options) == 0
    monkeypatch.setattr("hashlib.file_digest", None)  # What is unchanged is not read.
    run(descent, (W, bj.from_npy(path)), runner, **options)
    monkeypatch.undo()
    np.save(path, X + 1)
    with pytest.raises(CheckpointError, match=r"of other inputs .* they differ in x\."):
        run(descent, (W, bj.from_npy(path)), runner, **options)


def test_folders_that_cannot_be_used(tmp_path):
    with (
        checkpoint_folder.held(str(tmp_path)),
        pytest.raises(CheckpointError, match="another run is using it"),
    ):
        run(descent, (W, X), checkpoint=str(tmp_path))
    run(descent, (W, X), checkpoint=str(tmp_path))
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file/c: cannot be written"):
        run(descent, (W, X), checkpoint=str(tmp_path / "file" / "c"))
    with pytest.raises(OptionsError, match="in the options of transform"):
        bj.transform(descent, W, X, options={"checkpoint": str(tmp_path)})
    total = bj.program(clients=None)(lambda x: bj.reduce_sum(x))
    source = bj.from_chunks(lambda: iter([np.ones(3, np.float32)]))
    for runner in RUNNERS:
        with pytest.raises(OptionsError, match="x is a source of unknown length"):
            run(total, (source,), runner, checkpoint=str(tmp_path))


@pytest.mark.parametrize("work", [None, "work"])
def test_checkpoints_at_a_url(work, tmp_path):
    (tmp_path / "work").mkdir()
    options = {"checkpoint": f"bjtest:/{tmp_path}/c"}
    if work:
        options["work_folder"] = str(tmp_path / work)
    stop(history, (W, X), 2, "DirectRunner", **options)
    expected = run(history, (W, X))
    assert go_on(history, (W, X), expected, "DirectRunner", **options) == 3
    assert go_on(history, (W, X), expected, "local", **options) == 0


# --- a process may end at any moment


class Disk:
    """The disk below a folder, which fails after so many changes of that folder.

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
        """Cuts off what was not synced."""
        for path in Path(self.folder).iterdir():
            if path.is_file() and path.stat().st_ino not in self.durable:
                os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize("writer", RUNNERS)
def test_a_run_that_ends_at_any_change_of_its_folder_goes_on(writer, tmp_path, all_as_files):
    def two_rounds(w, x):
        step = lambda s, _: ((s[0] + pass_over(*s), damped(*s)), s)
        return jax.lax.scan(step, (w, x), None, length=2)

    expected = run(two_rounds, (W, X))
    with Disk(tmp_path / "whole") as disk:
        run(two_rounds, (W, X), writer, checkpoint=disk.folder)
    total, changes = 3, disk.changes
    assert changes > 10 * total
    wrong = []
    for left in range(1, changes, 2 if writer == "local" else 9):
        with Disk(tmp_path / str(left), left) as disk, pytest.raises(CheckpointError):
            run(two_rounds, (W, X), writer, checkpoint=disk.folder)
        if left % 4 == 1:
            disk.lose_power()
        saved = [int(path.stem) for path in Path(disk.folder).glob("*.checkpoint")]
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            done = go_on(two_rounds, (W, X), expected, checkpoint=disk.folder)
        if warned or done != total - max(saved, default=0):
            wrong.append((left, saved, done, [str(each.message) for each in warned]))
    assert wrong == []
