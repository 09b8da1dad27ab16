"""Placed results that a run writes to files and returns as handles."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import uuid
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.tree_util import PyTreeDef

from beamjax.errors import ArrayFormatError, BeamjaxError, OptionsError, SourceError
from beamjax.options import Options
from beamjax.plan.steps import Plan
from beamjax.sources.source_base import LeafSpec, class_name, open_spec, spec_of
from beamjax.storage import files, temporary, trust
from beamjax.storage.buffers import allocate
from beamjax.storage.files import is_url
from beamjax.storage.schema import parse_json

if TYPE_CHECKING:
    from beamjax.sources.arrays.part_files import PartFiles
    from beamjax.sources.arrays.placed import Placed

# All runs have a `MaterializedOutputs`, but few keep results in files, so what writes and reads
# these is imported where it is needed.

VERSION = 1
_PART = re.compile(r"part-[0-9a-f]{8}-\d+-\d+\.npy")
HANDED_BYTES = 1 << 24
"""Largest placed value, in bytes, that passes exchange in memory; larger ones go through files."""


@dataclass(frozen=True, eq=False)
class MaterializedOutputs:
    """The placed results of a run that go to files."""

    # The folder of each value of the plan that is materialized, by name.
    folders: Mapping[str, str] = field(default_factory=dict)
    stem: str = ""  # the prefix of the names of all files, different in each run
    # Whether the files stay when the handles (`Placed`) are garbage collected
    persistent: bool = True
    base: str = ""  # the folder of these folders

    def write(self, name: str, start: int, members: np.ndarray) -> None:
        """Writes members of a value, beginning with member `start`, to a file of their own."""
        from beamjax.sources.arrays.placed import Placed, encode_part

        file = Placed.file_name(self.stem, start, len(members))
        _write(self.folders[name], file, encode_part(members))

    def room(self, name: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray | None:
        """A mapped file for all members of a value that goes to a local folder; None for others."""
        folder = self.folders.get(name)
        if folder is None or is_url(folder) or 0 in shape:
            return None
        from beamjax.sources.arrays.npy_source import stored_dtype
        from beamjax.sources.arrays.placed import Placed

        path = os.path.join(folder, Placed.file_name(self.stem, 0, shape[0]))
        with _writing(path, math.prod(shape) * dtype.itemsize):
            os.makedirs(folder, mode=0o700, exist_ok=True)
            stored = np.lib.format.open_memmap(path, "w+", stored_dtype(dtype), shape)
            # Without this, a full disk would kill the process (SIGBUS) when the array is written.
            with open(path, "r+b") as file:
                allocate(file.fileno(), stored.offset, stored.nbytes)
        return stored.view(dtype)

    def find(self, plan: Plan, name: str) -> Placed:
        """The handle to a value whose files are all written."""
        from beamjax.sources.arrays.placed import Placed

        value = plan.values[name]
        n = plan.sizes[value.placement or ""]
        leaf = LeafSpec(value.shape, np.dtype(value.dtype), value.key_impl)
        folder = self.folders[name]
        parts = Placed.members_in(files.names(folder), self.stem)
        placed = Placed(folder, self.stem, parts, leaf, n)
        placed.check_complete(f"result {name}")
        return placed

    def finish(self, placed: Placed) -> Placed:
        """Writes the list of the files of a value, with which other processes can open it."""
        record = {"version": VERSION, **spec_of(placed)}
        _write(placed.folder, placed.manifest, json.dumps(record, indent=1).encode())
        with contextlib.suppress(Exception):
            _remove_others(placed)
        if not self.persistent:
            weakref.finalize(placed, _remove, spec_of(placed))
        return placed

    @contextlib.contextmanager
    def cleared(self) -> Iterator[None]:
        """Makes a temporary folder; removes the files of this run if the `with` block fails."""
        if not self.persistent:
            temporary.make(self.base)
        try:
            yield
        except BaseException:
            for folder in self.folders.values():
                with contextlib.suppress(Exception):
                    _clear(folder, self.stem)
            temporary.remove_empty(self.base)
            raise


NOTHING = MaterializedOutputs()


def materialized_outputs(
    plan: Plan, out_tree: PyTreeDef, options: Options, numbers: Collection[int] = ()
) -> MaterializedOutputs:
    """The results that go to files: placed results with all members along axis 0."""
    # The outputs with these indices (`numbers`) are materialized whatever `keep` says.
    if options.keep is None and not numbers:
        return NOTHING
    numbered = jax.tree_util.tree_unflatten(out_tree, range(out_tree.num_leaves))
    leaves = jax.tree_util.tree_flatten_with_path(numbered)[0]
    paths = [jax.tree_util.keystr(path) for path, _ in leaves]
    base, persistent = options.results_folder, True
    if base is None and options.job_folder is not None:
        base = f"{options.job_folder.rstrip('/')}/results"
    if base is None:
        base, persistent = temporary.new_name(options.work_folder, "results"), False
    base = base if is_url(base) else os.path.abspath(base)
    trust.check_folder(base, "results_folder")
    folders: dict[str, str] = {}
    for number, (path, out) in enumerate(zip(paths, plan.outputs, strict=True)):
        if options.keep is None and number not in numbers:
            continue
        name = out.value
        if name is None or plan.values[name].placement is None or name in folders:
            continue
        if any(other.value == name and other.axis for other in plan.outputs):
            continue  # files have members along axis 0
        word = re.sub(r"[^A-Za-z0-9_]+", "-", path).strip("-") or "result"
        taken = word if f"{base}/{word}" not in folders.values() else f"{word}-{len(folders)}"
        folders[name] = f"{base}/{taken}"
    if not folders and not numbers:
        return NOTHING
    refuse_results(folders.values(), options)
    return MaterializedOutputs(folders, f"part-{uuid.uuid4().hex[:8]}", persistent, base)


def refuse_results(folders: Iterable[str], options: Options) -> None:
    """Refuses folders with results of another run, unless they may be overwritten."""
    from beamjax.sources.arrays.placed import Placed
    from beamjax.sources.tables.keyed_table import KeyedTable

    if options.overwrite or options.results_folder is None:
        return  # a temporary folder is new, and that of a job has been claimed
    for folder in folders:
        names = (Placed.manifest, KeyedTable.manifest)
        if any(files.exists(files.join(folder, name)) for name in names):
            raise OptionsError(
                f"results_folder: found a result of another run in {folder}, expected a folder of "
                "its own for each run; open_placed reads that result, and the option "
                "overwrite=True replaces it"
            )


def _write(folder: str, name: str, data: bytes) -> None:
    path = f"{folder}/{name}"
    with _writing(path, len(data)):
        files.write(path, data)


@contextlib.contextmanager
def _writing(path: str, nbytes: int) -> Iterator[None]:
    """Replaces errors of writing a file by a SourceError that names the file."""
    try:
        yield
    except Exception as error:
        raise SourceError(
            f"{path}: cannot write {nbytes} bytes of a result ({error}); expected a folder that "
            "the launcher and all workers can write and read."
        ) from error


def open_placed(folder: str | os.PathLike[str]) -> Placed | PartFiles:
    """Opens members that are in files of a folder, in any process.

    Args:
      folder: the path or URL of the folder of one placed result (`placed.folder`); or the path of
        the folder of a table by key (`table.folder`), or of a call of `from_beam`.

    Returns:
      A `Placed` with all members of the result, a `KeyedTable`, or the members of `from_beam`.

    Raises:
      SourceError: the folder has no finished result, or a file is missing or has changed.
      ArrayFormatError: the list of files is damaged.
      OptionsError: another user can write to the folder.
    """
    from beamjax.sources.arrays.part_files import CollectedMembers
    from beamjax.sources.arrays.placed import Placed
    from beamjax.sources.tables.keyed_table import KeyedTable

    where = files.local_path(os.fspath(folder))
    where = where if is_url(where) else os.path.abspath(where)
    trust.check_folder(where, "open_placed")
    for kind in (KeyedTable, CollectedMembers):
        if not is_url(where) and os.path.exists(os.path.join(where, kind.manifest)):
            return kind.open(where)
    path = f"{where}/{Placed.manifest}"
    try:
        record = parse_json(files.read(path), path)
    except ArrayFormatError:
        raise
    except Exception as error:
        raise SourceError(
            f"{path}: cannot read ({error}); expected the folder of a result that a run with "
            "keep='placed' has finished."
        ) from error
    if not isinstance(record, dict) or record.get("version") != VERSION:
        raise ArrayFormatError(
            f"{path}: found {record!r:.80}, expected a list of files of version {VERSION}"
        )
    # The folder may have been moved since it was written.
    placed = open_spec({**record, "class": class_name(Placed), "folder": where})
    assert isinstance(placed, Placed)
    return placed


def _remove(spec: dict[str, Any]) -> None:
    from beamjax.sources.arrays.placed import Placed

    with contextlib.suppress(Exception):
        placed = Placed.from_spec(spec)
        placed.remove()
        if not is_url(placed.folder):
            temporary.remove_empty(os.path.dirname(placed.folder))


def _remove_others(placed: Placed) -> None:
    """Removes files of earlier runs, which were replaced or killed."""
    own = set(placed.files)
    gone = [n for n in files.names(placed.folder) if _PART.fullmatch(n) and n not in own]
    files.remove_files(placed.folder, gone)


def _clear(folder: str, stem: str) -> None:
    gone = [name for name in files.names(folder) if name.startswith(stem)]
    with contextlib.suppress(BeamjaxError):
        placed = open_placed(folder)
        if getattr(placed, "stem", "") == stem:
            gone.append(placed.manifest)
    files.remove_files(folder, gone)
    if not is_url(folder):
        os.rmdir(folder)
