"""Placed inputs that are read on the workers: arrays in memory, and memory-mapped files.

Reading needs no JAX, so that a worker can read ahead before JAX has started.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import os
import threading
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from beamjax import arrays as wire
from beamjax.errors import PlacementError, SourceError, StructureError
from beamjax.source_base import (
    HoldsLeaves,
    LeafSpec,
    PyTreeDef,
    Source,
    describe_source,
    live_spec,
    lookup,
    natural,
    open_spec,
    register,
    release,
)

__all__ = [
    "ArraySource",
    "LeafSpec",
    "NpySource",
    "Source",
    "from_arrays",
    "from_npy",
    "live_spec",
    "lookup",
    "open_spec",
    "register",
    "release",
]


class ArraySource(HoldsLeaves, kind="array"):
    """Arrays in the memory of this process."""

    def __init__(
        self, arrays: Sequence[np.ndarray], leaves: Sequence[LeafSpec], treedef: PyTreeDef
    ) -> None:
        """Use `from_arrays`, which checks.

        Args:
            arrays: of shape (n, *leaf.shape), with raw data for typed keys.
            leaves: one for each array.
            treedef: the tree that they form.
        """
        super().__init__(leaves, treedef)
        self._arrays: tuple[np.ndarray, ...] = tuple(arrays)

    def __len__(self) -> int:
        return self._arrays[0].shape[0]

    def read(self, start: int, stop: int) -> list[np.ndarray]:
        self.check_range(start, stop)
        return [_native_view(array[start:stop]) for array in self._arrays]

    def describe(self) -> str:
        return describe_source(self, "in memory")

    def to_spec(self) -> dict[str, Any]:
        raise SourceError(
            f"{self!r}: is in the memory of process {os.getpid()} and cannot be opened in another "
            "one, and is not pickled; write it to files with source.spill(folder), or share it "
            "within this process with sources.register(source)."
        )

    @classmethod
    def from_spec(cls, spec: dict[str, Any]) -> Source:
        raise SourceError(f"a source in memory has no spec; found {spec!r:.200}.")

    def spill(self, folder: str | os.PathLike[str]) -> NpySource:
        """Writes the arrays as .npy files, from which any process can read them.

        Args:
            folder: made (mode 0700) if it is not there; the files get names of their own.

        Raises:
            SourceError: if a file cannot be written.
        """
        folder, name = Path(folder).absolute(), uuid.uuid4().hex
        files: list[str] = []
        for index, (array, leaf) in enumerate(zip(self._arrays, self._leaves, strict=True)):
            path = folder / f"{name}-{index:03d}.npy"
            try:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                np.save(path, storable(array), allow_pickle=False)
            except OSError as error:
                for file in (*files, str(path)):
                    with contextlib.suppress(OSError):
                        os.unlink(file)
                raise SourceError(
                    f"{path}: cannot write {array.nbytes} bytes of the source's leaf "
                    f"{leaf.path or 'itself'} ({error})."
                ) from error
            files.append(str(path))
        return NpySource(files, self._leaves, len(self), self._treedef)


class NpySource(HoldsLeaves, kind="npy"):
    """Memory-mapped .npy files, one a leaf. Opened when first read, once a process."""

    def __init__(
        self,
        files: Sequence[str],
        leaves: Sequence[LeafSpec],
        size: int,
        treedef: PyTreeDef | None = None,
    ) -> None:
        """Use `from_npy`, which takes the rest from the files.

        Args:
            files: absolute paths, one a leaf, of arrays of shape (size, *leaf.shape). Dtypes that
                .npy does not know are stored as unsigned integers of the same width.
            leaves: what each file must hold.
            size: the number of members.
            treedef: the tree that they form; a tuple by default.
        """
        super().__init__(leaves, treedef)
        self._files: tuple[str, ...] = tuple(files)
        self._size = size
        if len(self._files) != len(self._leaves) or not self._files:
            raise SourceError(
                f"found {len(self._files)} files for {len(self._leaves)} leaves, expected one file "
                "a leaf."
            )

    @property
    def files(self) -> tuple[str, ...]:
        """The path of each leaf's file."""
        return self._files

    def __len__(self) -> int:
        return self._size

    def read(self, start: int, stop: int) -> list[np.ndarray]:
        self.check_range(start, stop)
        return [
            _restored(_open_checked(file, leaf, self._size)[start:stop], leaf.dtype)
            for file, leaf in zip(self._files, self._leaves, strict=True)
        ]

    def describe(self) -> str:
        first, *rest = self._files
        more = f" and {len(rest)} more" if rest else ""
        return describe_source(self, f"in {first}{more}")

    def to_spec(self) -> dict[str, Any]:
        leaves = [leaf.to_json() for leaf in self._leaves]
        return {
            **self.spec_head(),
            "files": list(self._files),
            "leaves": leaves,
            "size": self._size,
        }

    @classmethod
    def from_spec(cls, spec: dict[str, Any]) -> NpySource:
        leaves = [LeafSpec.from_json(record) for record in spec["leaves"]]
        return cls([str(file) for file in spec["files"]], leaves, natural(spec["size"]))


def from_arrays(tree: Any) -> ArraySource:
    """A placed input from arrays in memory.

    Args:
        tree: pytree of NumPy or JAX arrays of shape (n, ...), typed keys included. Nothing is
            copied, but for arrays on an accelerator.

    Raises:
        StructureError: if a leaf is no array, is a scalar, or has a dtype that JAX does not know.
        PlacementError: if n is 0, or not the same for all leaves.
    """
    import jax

    paths, treedef = jax.tree_util.tree_flatten_with_path(tree)
    arrays, leaves, names = [], [], []
    for path, value in paths:
        name = jax.tree_util.keystr(path)
        impl = None
        if isinstance(value, jax.Array) and jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key):
            if value.ndim == 0:
                raise _scalar_error(name, str(value.dtype))
            impl = str(jax.random.key_impl(value))
            value = jax.random.key_data(value)
        array = _checked_leaf(name, value)
        arrays.append(array)
        names.append(name)
        leaves.append(LeafSpec(array.shape[1:], _native_dtype(array.dtype), impl, name))
    _check_sizes(names, [array.shape[0] for array in arrays])
    return ArraySource(arrays, leaves, treedef)


def from_npy(paths: Any) -> NpySource:
    """A placed input from .npy files that the launcher and the workers see under the same path.

    Args:
        paths: a path, or a pytree of paths, of files with arrays of shape (n, ...).

    Raises:
        SourceError: if a file is missing, truncated, or no .npy file.
        StructureError: if a file holds a scalar, or a dtype that JAX does not know.
        PlacementError: if n is 0, or not the same for all files.
    """
    import jax

    found, treedef = jax.tree_util.tree_flatten_with_path(paths)
    files, leaves, sizes, names = [], [], [], []
    for path, file in found:
        name = jax.tree_util.keystr(path)
        if not isinstance(file, str | os.PathLike):
            raise StructureError(
                f"{_leaf(name)}: found {type(file).__name__}, expected the path of a .npy file."
            )
        file = os.path.abspath(file)
        array = _map_file(file)
        if array.dtype.kind == "V":
            raise StructureError(
                f"{_leaf(name)}: found the dtype {array.dtype} in {file}, expected numbers. "
                "np.save loses bfloat16 and its like: write them with from_arrays(...).spill()."
            )
        array = _checked_leaf(name, array, f" in {file}")
        files.append(file)
        sizes.append(array.shape[0])
        names.append(f"{name} ({file})")
        leaves.append(LeafSpec(array.shape[1:], _native_dtype(array.dtype), None, name))
    _check_sizes(names, sizes)
    return NpySource(files, leaves, sizes[0], treedef)


def _leaf(name: str) -> str:
    return f"placed input, leaf {name}" if name else "placed input"


def _scalar_error(name: str, found: str) -> StructureError:
    return StructureError(
        f"{_leaf(name)}: found {found}, which has no members; expected an array of shape (n, ...) "
        "with one row a member."
    )


def _checked_leaf(name: str, value: Any, where: str = "") -> np.ndarray:
    """The leaf as a NumPy array, a view of `value` where it can be."""
    if isinstance(value, bool | int | float | complex | np.generic):
        raise _scalar_error(name, f"the scalar {value!r}{where}")
    if isinstance(value, np.ma.MaskedArray) or not hasattr(value, "__array__"):
        raise StructureError(
            f"{_leaf(name)}: found {type(value).__name__}{where}, expected a NumPy or JAX array."
        )
    try:
        wire.dtype_name(getattr(value, "dtype", None))
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise StructureError(f"{_leaf(name)}{where}: {error}") from None
    if array.ndim == 0:
        raise _scalar_error(name, f"an array of shape (){where}")
    return array


def _check_sizes(names: list[str], sizes: list[int]) -> None:
    if not names:
        raise StructureError("placed input: found a tree without leaves, expected an array.")
    for name, size in zip(names, sizes, strict=True):
        if size != sizes[0]:
            raise PlacementError(
                f"{_leaf(name)}: found {size} members, expected {sizes[0]} as in "
                f"{_leaf(names[0])}; all leaves of a placed input have the same leading size."
            )
    if sizes[0] == 0:
        raise PlacementError(f"{_leaf(names[0])}: found 0 members, expected at least one.")


@functools.cache
def _native_dtype(dtype: np.dtype) -> np.dtype:
    return wire.dtype_from_name(wire.dtype_name(dtype))


def _native_view(array: np.ndarray) -> np.ndarray:
    """Read-only view; a copy of another byte order."""
    view = array.astype(_native_dtype(array.dtype), copy=False).view()
    view.flags.writeable = False
    return view


def stored_dtype(dtype: np.dtype) -> np.dtype:
    """What a .npy file holds for a dtype: itself, or raw integers of the same width."""
    if dtype.isbuiltin == 1:
        return dtype
    return np.dtype(f"u{max(dtype.itemsize, 1)}")


def storable(array: np.ndarray) -> np.ndarray:
    native = _native_dtype(array.dtype)
    if native == wire.FLOAT0:
        return np.empty((*array.shape, 0), np.uint8)
    if native.isbuiltin == 1:
        return array
    return np.ascontiguousarray(array, native).view(stored_dtype(native))


def _restored(stored: np.ndarray, dtype: np.dtype) -> np.ndarray:
    if dtype == wire.FLOAT0:
        return np.empty(stored.shape[:-1], dtype)
    view = _native_view(stored)
    return view if view.dtype == dtype else view.view(dtype)


_MAPPED: collections.OrderedDict[tuple[str, int, int], np.ndarray] = collections.OrderedDict()
_MAPPED_LOCK = threading.Lock()
_MAX_MAPPED = 128  # each map keeps a file descriptor open


def _map_file(file: str) -> np.ndarray:
    """The mapped array of a file, from the cache while the file has not changed."""
    try:
        status = os.stat(file)
    except (OSError, ValueError) as error:
        raise _cannot_open(file, error) from error
    key = (file, status.st_mtime_ns, status.st_size)
    with _MAPPED_LOCK:
        if key in _MAPPED:
            _MAPPED.move_to_end(key)
            return _MAPPED[key]
    try:
        array = np.lib.format.open_memmap(file, mode="r")
    except OSError as error:
        raise _cannot_open(file, error) from error
    except Exception as error:
        raise SourceError(
            f"{file}: found {status.st_size} bytes that are not a whole .npy array ({error})."
        ) from error
    with _MAPPED_LOCK:
        _MAPPED[key] = array
        while len(_MAPPED) > _MAX_MAPPED:
            _MAPPED.popitem(last=False)
    return array


def _cannot_open(file: str, error: OSError | ValueError) -> SourceError:
    reason = getattr(error, "strerror", None) or error
    return SourceError(
        f"{file}: cannot open ({reason}); expected a .npy file that the launcher and all workers "
        "see under this path."
    )


def _open_checked(file: str, leaf: LeafSpec, size: int) -> np.ndarray:
    array = _map_file(file)
    expected = (size, *leaf.shape, *([0] if leaf.dtype == wire.FLOAT0 else []))
    dtype = stored_dtype(leaf.dtype)
    if array.shape != expected or array.dtype.newbyteorder("=") != dtype:
        raise SourceError(
            f"{file}: found {array.dtype}{list(array.shape)}, expected {dtype}{list(expected)}"
            f"{f' for leaf {leaf.path}' if leaf.path else ''}; the file was changed after the "
            "source was made from it."
        )
    return array
