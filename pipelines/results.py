"""Results of a plan: workers write them to the store, the launcher reads them."""

from __future__ import annotations

import glob
import os
from typing import Any

import numpy as np

from beamjax.arrays import decode_arrays, encode_arrays
from beamjax.errors import ArrayFormatError, WorkerError
from beamjax.pipelines import files
from beamjax.pipelines.elements import Block, Environment
from beamjax.pipelines.store import Store
from beamjax.pipelines.tasks import StepFn
from beamjax.plan import Plan

SUFFIX = ".arrays"
FILE_BYTES = 16 << 20


class WriteServed(StepFn):
    """Writes server values where the launcher reads them.

    Args:
      store: where to write.
      numbers: the number of the result, by name of the value.
    """

    yields = Any

    def __init__(self, store: Store, numbers: dict[str, int]):
        self.store = store
        self.numbers = numbers

    def process(self, environment: Environment) -> None:
        for name, number in self.numbers.items():
            arrays = self.store.get(environment.values[name], cache=False)
            data = encode_arrays(arrays, {"value": name})
            files.write(files.join(self.store.root, _served_file(number)), data)


class WritePlaced(StepFn):
    """Writes placed values where the launcher reads them, many blocks in a file.

    A file is named after the members in it, so a retried bundle writes the same ones again.

    Args:
      store: where to write.
      name: of the value.
      number: of the result.
    """

    yields = Any

    def __init__(self, store: Store, name: str, number: int):
        self.store = store
        self.name = name
        self.number = number

    def start_bundle(self) -> None:
        self.blocks: list[Block] = []
        self.nbytes = 0

    def process(self, block: Block) -> None:
        self.blocks.append(block)
        self.nbytes += block.values[self.name].nbytes
        if self.nbytes >= FILE_BYTES:
            self.finish_bundle()

    def finish_bundle(self) -> None:
        """Writes what is left."""
        if not self.blocks:
            return
        arrays = [block.values[self.name] for block in self.blocks]
        starts = [block.start for block in self.blocks]
        members = f"{starts[0]}-{sum(block.count for block in self.blocks)}"
        data = encode_arrays(arrays, {"value": self.name, "starts": starts})
        files.write(
            files.join(self.store.root, f"{_placed_stem(self.number)}{members}{SUFFIX}"), data
        )
        self.start_bundle()


def read_served(store: Store, number: int) -> np.ndarray:
    """A server value that `WriteServed` wrote.

    Raises:
      ArrayFormatError: the file is not what was written.
      WorkerError: there is no file.
    """
    arrays, _ = _read(files.join(store.root, _served_file(number)))
    return arrays[0]


def read_placed(store: Store, plan: Plan, name: str, number: int) -> np.ndarray:
    """A placed value that `WritePlaced` wrote, members along axis 0.

    Raises:
      ArrayFormatError: a file is not what was written.
      WorkerError: members are missing.
    """
    value = plan.values[name]
    n = plan.sizes[value.placement or ""]
    whole = np.empty((n, *value.shape), np.dtype(value.dtype))
    seen = np.zeros(n, bool)
    for path in _matching(store, f"{_placed_stem(number)}*{SUFFIX}"):
        arrays, meta = _read(path)
        for start, array in zip(meta["starts"], arrays, strict=True):
            whole[start : start + len(array)] = array
            seen[start : start + len(array)] = True
    if not seen.all():
        missing = np.flatnonzero(~seen)
        raise WorkerError(
            f"result {name}: {len(missing)} of {n} members are missing, the first one is "
            f"{missing[0]}; do the launcher and the workers see the same files in {store.root}, "
            "and were none removed while the pipeline ran?"
        )
    return whole


def _read(path: str) -> tuple[list[np.ndarray], dict[str, Any]]:
    try:
        return decode_arrays(files.read(path))
    except ArrayFormatError as error:
        raise ArrayFormatError(f"{path}: {error}") from None
    except OSError as error:
        raise WorkerError(
            f"{path}: cannot read a result ({error}); do the launcher and the workers see the same "
            "files under this path, and were none removed while the pipeline ran?"
        ) from error


def _served_file(number: int) -> str:
    return f"result-{number}{SUFFIX}"


def _placed_stem(number: int) -> str:
    return f"result-{number}-members-"


def _matching(store: Store, pattern: str) -> list[str]:
    """Paths or URLs of the files of a store whose names match a glob pattern."""
    if not files.is_url(store.root):
        return sorted(glob.glob(os.path.join(glob.escape(store.root), pattern)))
    from apache_beam.io.filesystems import FileSystems

    (found,) = FileSystems.match([files.join(store.root, pattern)])
    return sorted(metadata.path for metadata in found.metadata_list)
