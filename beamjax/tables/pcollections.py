"""Placed inputs from a Beam pipeline of the user, which runs once and writes files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from beamjax.call import parsed_options
from beamjax.errors import ArrayFormatError, OptionsError, SourceError
from beamjax.options import Options
from beamjax.plan.dropping import DeadLetters, Dropped
from beamjax.shuffle import elements, sorted_blocks
from beamjax.shuffle.elements import ElementShuffle
from beamjax.shuffle.sorted_blocks import scratch_in
from beamjax.sources.arrays.data_files import is_url
from beamjax.sources.arrays.npy_source import Part, PartFiles, written_parts
from beamjax.sources.leaf_checks import member_leaves
from beamjax.sources.source_base import LeafSpec, PyTreeDef, natural
from beamjax.sources.streams.one_member import MemberType
from beamjax.storage import files
from beamjax.storage.schema import from_plain, to_plain
from beamjax.storage.treedefs import tree_to_json

VERSION = 1
MANIFEST = "members.json"


class CollectedMembers(PartFiles):
    """Members in files, made from the elements of a PCollection; see `beamjax.from_beam`.

    Attributes:
      folder: the folder of the files.
      dropped: the elements that were left out with `on_error="drop"`.
    """

    def __init__(
        self,
        folder: str,
        parts: Sequence[Part],
        leaves: Sequence[LeafSpec],
        treedef: PyTreeDef,
        dropped: Sequence[Dropped],
    ) -> None:
        """Use `beamjax.from_beam`."""
        super().__init__(folder, parts, leaves, treedef)
        self.dropped = tuple(dropped)


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

    This call runs the pipeline once. Its workers write the members to files in the folder. A later
    call with the same folder reads these files and does not run the pipeline again, even if its
    data has changed. Remove the folder to run it again.

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
        such a tree of arrays, or of Python numbers and lists, which are converted to the dtype.
        Beam rows and named tuples count as dicts.
      folder: a local path that the workers see. It is created if it does not exist.
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
      OptionsError: the runner is unknown or "local", or the folder holds other members.
      ArrayFormatError: the list of members in the folder is damaged.
      WorkerError: the pipeline failed, or too many elements were dropped.
    """
    parsed = parsed_options(options, runner)
    if runner == "local":
        raise OptionsError(
            "from_beam, runner: found 'local', expected a runner of Beam, which the pipeline "
            "needs; 'DirectRunner' runs it in this process"
        )
    leaves, treedef = member_leaves(like, "from_beam")
    where = _checked(folder)
    what = {
        "version": VERSION,
        "tree": tree_to_json(treedef),
        "leaves": [leaf.to_json() for leaf in leaves],
        "indexed": index is not None,
    }
    template = treedef.unflatten(range(len(leaves)))
    member = MemberType("from_beam", template, tuple(leaves))
    record = _found_before(where, what)
    if record is None:
        record = {**what, **_collect(transform, index, where, member, runner, parsed)}
        _write_manifest(where, record)
    return _opened(where, record, member, treedef)


def _checked(folder: str | os.PathLike[str]) -> str:
    """The absolute path of a folder; OptionsError for a URL."""
    where = os.fspath(folder)
    if is_url(where):
        raise OptionsError(
            f"from_beam, folder: found the URL {where}, expected a path: members are in files that "
            "workers map. Use a folder that they share."
        )
    return os.path.abspath(where)


def _found_before(folder: str, what: dict[str, Any]) -> dict[str, Any] | None:
    """The record that an earlier call wrote to a folder; None if there is none.

    Returns:
      The record, or None.

    Raises:
      ArrayFormatError: the record can't be read.
      OptionsError: the folder holds members of another kind.
    """
    path = os.path.join(folder, MANIFEST)
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ArrayFormatError(f"{path}: cannot read ({error}); remove the folder.") from error
    fields = found if isinstance(found, dict) else {}
    different = [name for name in what if fields.get(name) != what[name]]
    if different:
        raise OptionsError(
            f"from_beam: {folder} holds members of another kind: {', '.join(different)} differ. "
            "Choose another folder, or remove this one to run the pipeline again."
        )
    return fields


def _write_manifest(folder: str, record: dict[str, Any]) -> None:
    """Lists the members of a folder, which marks it as complete.

    Raises:
      SourceError: the list can't be written.
    """
    path = os.path.join(folder, MANIFEST)
    try:
        files.write(path, json.dumps(record, indent=1).encode())
    except OSError as error:
        raise SourceError(f"{path}: cannot write the list of members ({error}).") from error


def _collect(
    transform: Any,
    index: Callable[[Any], int] | None,
    folder: str,
    member: MemberType,
    runner: Any,
    options: Options,
) -> dict[str, Any]:
    """Runs the pipeline; returns the parts that workers wrote, and the elements left out."""
    from beamjax.pipelines.tables import shuffle as pipeline

    with scratch_in(folder) as scratch:
        shuffle = ElementShuffle(
            folder,
            scratch,
            member.leaves,
            sorted_blocks.BLOCK_BYTES,
            sorted_blocks.PART_BYTES,
            member,
            indexed=index is not None,
            drop=options.on_error == "drop",
            inline_bytes=elements.INLINE_BYTES,
        )
        pipeline.collect(transform, index, shuffle, runner, options)
        listed = shuffle.listed()
        letters = _letters(listed, options)
    parts = written_parts(folder)
    found = sum(rows for _, rows in parts)
    if found != listed["count"]:
        raise SourceError(
            f"{folder}: found {found} members, expected {listed['count']}; do the launcher and the "
            "workers see the same files there?"
        )
    return {"parts": parts, "dropped": to_plain(letters.dropped)}


def _letters(listed: dict[str, Any], options: Options) -> DeadLetters:
    """The elements that were left out; WorkerError if there are too many."""
    letters = DeadLetters(options.drop_limit, options.dead_letters)
    letters.begin(anew=True)
    dropped = [
        Dropped("from_beam", number, "Check elements", "error", message)
        for number, message in enumerate(listed["dropped"])
    ]
    letters.add(dropped, {"from_beam": listed["count"] + len(dropped)})
    letters.warn()
    return letters


def _opened(
    folder: str, record: dict[str, Any], member: MemberType, treedef: PyTreeDef
) -> CollectedMembers:
    """Opens the members in a folder.

    Returns:
      The source.

    Raises:
      ArrayFormatError: the list of members is damaged.
      SourceError: a file is missing or has changed.
    """
    path = os.path.join(folder, MANIFEST)
    try:
        parts = [(natural(part), natural(rows, 1)) for part, rows in record["parts"]]
        dropped = [from_plain(Dropped, each, path) for each in record["dropped"]]
    except (KeyError, TypeError, ValueError) as error:
        raise ArrayFormatError(
            f"{path}: found no list of members ({error}); remove the folder to run the pipeline "
            "again"
        ) from error
    found = CollectedMembers(folder, parts, member.leaves, treedef, dropped)
    try:
        found.check_files()
    except SourceError as error:
        raise SourceError(f"{error} Remove {folder} to run the pipeline again.") from error
    return found
