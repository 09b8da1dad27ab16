"""Placed inputs from a Beam pipeline of the user, which runs once and writes files."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from beamjax.call import parsed_options
from beamjax.errors import OptionsError, SourceError
from beamjax.options import Options
from beamjax.plan.dropping import DeadLetters, Dropped
from beamjax.sources.arrays import part_files
from beamjax.sources.arrays.data_files import is_url
from beamjax.sources.arrays.part_files import (
    CollectedMembers,
    Part,
    prepare_folder,
    remove_parts,
    written_parts,
)
from beamjax.sources.leaf_checks import member_leaves
from beamjax.sources.member_values import MemberType
from beamjax.storage import files, locks


def from_beam(
    transform: Any,
    *,
    like: Any,
    folder: str | os.PathLike[str],
    index: Callable[[Any], int] | None = None,
    runner: Any = "DirectRunner",
    options: Any = None,
) -> CollectedMembers:
    """A placed input from a bounded PCollection, each element of which is a member.

        rows = beam.io.ReadFromText("rows-*.csv") | beam.Map(parse)  # {"x": [...], "y": 1.5}
        like = {"x": np.zeros(3, np.float32), "y": np.float32(0)}  # or jax.ShapeDtypeStruct
        data = bj.from_beam(rows, like=like, folder="/data/rows")
        bj.run(train, weights, data)  # also with loops, gradients and several passes

    This call runs the pipeline once. Its workers write the members to files in the folder, which
    `open_placed(folder)` opens again without the pipeline, in any process. A folder that has
    members is refused: they may be of another pipeline, or of other data.

    A PCollection has no order. `index` numbers the members; without it they are sorted by a hash of
    their bytes, so equal members are neighbours. Either way, member i is the same in each run and
    on each runner. So are draws by `jax.random.fold_in(key, i)` and all bits of results.

    With `options={"on_error": "drop"}`, elements that do not match `like` are left out, up to
    `drop_limit`. `data.dropped` and the file of `dead_letters` list them. The remaining members are
    numbered in the order of their indices.

    Args:
      transform: a PTransform to apply to a pipeline (`beam.io.ReadFrom... | beam.Map(...)`), or a
        function that takes the pipeline and returns the PCollection.
      like: one member: a tree of `jax.ShapeDtypeStruct` or arrays of shape (...). Each element is
        such a tree of arrays, or of Python numbers and lists, which are converted to the dtype;
        a leaf uint8[width] also takes a text of at most so many bytes, such as a key.
        Beam rows and named tuples count as dicts.
      folder: a local path that the workers see, without members. It is made if it does not exist.
      index: returns the number of an element: 0 to n - 1, each once. Beam pickles it for the
        workers, like other functions of a pipeline.
      runner: a name or an instance of a runner of Beam, as for `beamjax.run`.
      options: as for `beamjax.run`.

    Returns:
      A `Source` of the members, with the tree of `like`. Its attribute `dropped` lists the elements
      that were left out.

    Raises:
      StructureError: `like` is not a tree of arrays, an element does not match it, or the
        PCollection is unbounded or windowed.
      SourceError: there is no element, an index is missing or occurs twice, or the folder can't be
        written.
      OptionsError: the runner is unknown or "local", or the folder has members.
      WorkerError: the pipeline failed, or too many elements were dropped.
    """
    parsed = parsed_options(options, runner)
    if runner == "local":
        raise OptionsError(
            "from_beam, runner: found 'local', expected a runner of Beam, which the pipeline "
            "needs; 'DirectRunner' runs it in this process"
        )
    leaves, treedef = member_leaves(like, "from_beam")
    where = _local_folder(folder)
    template = treedef.unflatten(range(len(leaves)))
    member = MemberType("from_beam", template, tuple(leaves))
    with _claimed(where):
        parts, dropped = _collect(transform, index, where, member, runner, parsed)
        return CollectedMembers(where, parts, leaves, treedef, dropped).finish()


def _local_folder(folder: str | os.PathLike[str]) -> str:
    """The absolute path of a folder; OptionsError for a URL."""
    where = os.fspath(folder)
    if is_url(where):
        raise OptionsError(
            f"from_beam, folder: found the URL {where}, expected a path: members are in files that "
            "workers map. Use a folder that they share."
        )
    return os.path.abspath(where)


@contextlib.contextmanager
def _claimed(folder: str) -> Iterator[None]:
    """A context in which no other call writes to a folder."""
    path = os.path.join(folder, locks.NAME)
    try:
        files.make_folder(folder)
        handle = locks.try_lock(path)
    except OSError as error:
        raise SourceError(f"{folder}: cannot write members here ({error}).") from error
    if handle is None:
        raise OptionsError(
            f"from_beam: found another call that writes to {folder}, expected a new folder."
        )
    try:
        if os.path.lexists(os.path.join(folder, CollectedMembers.manifest)):
            raise OptionsError(
                f"from_beam: found that {folder} has the members of an earlier call, which may be "
                "of another pipeline; expected a new folder. Open them with "
                "beamjax.open_placed(folder), or remove the folder to run the pipeline."
            )
        yield
    finally:
        locks.unlock(path, handle)


def _collect(
    transform: Any,
    index: Callable[[Any], int] | None,
    folder: str,
    member: MemberType,
    runner: Any,
    options: Options,
) -> tuple[list[Part], list[Dropped]]:
    """Runs the pipeline; returns the parts that workers wrote, and the elements left out."""
    from beamjax.pipelines.tables.collect import Collection, collect

    prepare_folder(folder)
    collection = Collection(
        folder, member, index, options.on_error == "drop", part_files.PART_BYTES
    )
    try:
        count, messages = collect(transform, collection, runner, options)
        dropped = _dropped(count, messages, options)
        parts = written_parts(folder)
        total = sum(rows for _, rows in parts)
        if total != count:
            raise SourceError(
                f"{folder}: found {total} members, expected {count}; do the launcher and the "
                "workers see the same files there?"
            )
    except BaseException:
        remove_parts(folder)
        raise
    return parts, dropped


def _dropped(count: int, messages: Sequence[str], options: Options) -> list[Dropped]:
    """The elements that were left out; SourceError or WorkerError if there are too many."""
    if not count:
        elements = "no element"
        if messages:
            elements = f"{len(messages)} elements, none of which is a member ({messages[0]})"
        raise SourceError(f"from_beam: found {elements}, expected at least one member.")
    letters = DeadLetters(options.drop_limit, options.dead_letters)
    letters.begin(anew=True)
    dropped = [
        Dropped("from_beam", number, "Check elements", "error", message)
        for number, message in enumerate(messages)
    ]
    letters.add(dropped, {"from_beam": count + len(dropped)})
    letters.warn()
    return list(letters.dropped)
