"""Placed inputs from Zarr arrays: members along axis 0.

Reading needs no JAX, so that a worker can read ahead before JAX has started.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
import uuid
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from beamjax.errors import BeamjaxError, PlacementError, SourceError, StructureError
from beamjax.sources.arrays.cf_packing import Packing, packing_of, packing_text
from beamjax.sources.arrays.data_files import DataFile, is_url, look, readable
from beamjax.sources.blocks import SourceBlock, read_blocks
from beamjax.sources.leaf_checks import (
    check_sizes,
    checked_dtype,
    leaf_name,
    native_dtype,
    native_view,
)
from beamjax.sources.source_base import (
    ByIndex,
    Count,
    HoldsLeaves,
    LeafSpec,
    Leaves,
    Positive,
    PyTreeDef,
    Source,
    Which,
    describe_source,
    first_of,
    row_text,
    spec_of,
)
from beamjax.sources.source_kinds import FileSource
from beamjax.storage.shared_cache import BLOCKS, SharedCache

_EXPECTED = "an array or a group of Zarr"
_SMALL_CHUNK_BYTES = 1 << 16
"""Bytes of chunks that are read by index together, and not cached: they take little to decode."""
_METADATA = ("zarr.json", ".zarray")
"""Files with the metadata of an array, in the formats 3 and 2."""


@dataclasses.dataclass(frozen=True)
class ZarrArray:
    """One array."""

    store: str  # absolute path of a folder or a .zip, or a URL that fsspec knows
    name: str  # the name of the array in the group at `store`; "" if the array itself is there
    rows: Positive  # the size of a chunk along axis 0
    metadata: DataFile | None  # the local file with shape and dtype, as it was; None at a URL
    # Identifies the source in the cache of blocks. Files of chunks may change while that of the
    # metadata does not, so sources do not share cached chunks.
    token: str
    chunks: ChunkFiles | None = None  # None in a .zip or at a URL
    packing: Packing | None = None  # None if the stored numbers are the values

    def identity(self) -> tuple[Any, list[str]]:
        """As `FileSource.identity`. At a URL only the location counts: changes are not detected."""
        if is_url(self.store):
            return [self.store, self.name], []
        folder = os.path.join(self.store, self.name)
        files = [os.path.join(at, name) for at, _, names in os.walk(folder) for name in names]
        paths = sorted(files) or [self.store]  # There is no folder if the store is a .zip.
        return [self.name, [os.path.relpath(path, folder) for path in sorted(files)]], paths

    def __str__(self) -> str:
        return f"{self.store}{f', array {self.name!r}' if self.name else ''}"

    def __post_init__(self) -> None:
        if "\0" in self.store + self.name:
            raise ValueError(f"found the array {self.store!r:.80}")


@dataclasses.dataclass(frozen=True)
class ChunkFiles:
    """The files of the chunks of a local array, to detect later changes."""

    # Zarr does not detect that a chunk was written again, and reads a missing chunk as the fill
    # value. So a source records the time at which the last chunk was written, and whether all
    # chunks existed.

    folder: str
    newest: int  # the time of the latest change of a file, in nanoseconds
    whole: bool  # a file for each chunk: Zarr may omit chunks that hold only the fill value

    @classmethod
    def look(cls, folder: str, opened: Any) -> ChunkFiles:
        """The files of an array as they are now."""
        newest = count = 0
        with readable(folder, "a folder of chunks"):
            for where, _, names in os.walk(folder):
                for name in names:
                    newest = max(newest, os.stat(os.path.join(where, name)).st_mtime_ns)
                    count += not name.startswith((".z", "zarr.json"))
        sizes = (math.ceil(n / c) for n, c in zip(opened.shape, _stored(opened), strict=True))
        return cls(folder, newest, count >= math.prod(sizes))

    def check(self, opened: Any, places: Iterable[int]) -> None:
        """Raises SourceError if chunks at these places along axis 0 have changed, or are gone."""
        for path in self._paths(opened, places):
            try:
                written = os.stat(path).st_mtime_ns
            except FileNotFoundError:
                if self.whole:
                    raise SourceError(
                        f"{path}: is not there, expected a chunk, as there was one of each when "
                        "the source was made; Zarr would read its fill value."
                    ) from None
                continue
            except OSError as error:
                raise SourceError(f"{path}: cannot check a chunk ({error}).") from error
            if written > self.newest:
                raise SourceError(
                    f"{path}: found a chunk written at {written}, expected none after "
                    f"{self.newest}; the file was changed after the source was made from it."
                )

    def _paths(self, opened: Any, places: Iterable[int]) -> Iterator[str]:
        sizes = zip(opened.shape[1:], _stored(opened)[1:], strict=True)
        for place in itertools.product(places, *(range(math.ceil(n / c)) for n, c in sizes)):
            yield os.path.join(self.folder, opened.metadata.encode_chunk_key(place))

    def __post_init__(self) -> None:
        if self.newest < 0 or "\0" in self.folder:
            raise ValueError(f"found the files of {self.folder!r:.80}, written at {self.newest}")


def _stored(opened: Any) -> tuple[int, ...]:
    """The shape of the part of an array that is in one file: a chunk, or a shard of chunks."""
    return tuple(max(int(n), 1) for n in (getattr(opened, "shards", None) or opened.chunks))


def chunk_files(store: str, name: str, opened: Any) -> ChunkFiles | None:
    """The files of an array in a folder; None for other stores, and if chunks differ in size."""
    folder = os.path.join(store, name) if name else store
    try:
        known = os.path.isdir(folder) and len(_stored(opened)) == len(opened.shape) > 0
    except NotImplementedError:  # Chunks have different sizes.
        return None
    return ChunkFiles.look(folder, opened) if known else None


class ZarrSource(HoldsLeaves, ByIndex, FileSource):
    """Zarr arrays, read by chunks; see `from_zarr`."""

    def __init__(
        self,
        arrays: tuple[ZarrArray, ...],
        leaves: Leaves,
        size: Count,
        treedef: PyTreeDef | None = None,
    ) -> None:
        """Use `from_zarr`, which checks."""
        super().__init__(leaves, treedef)
        self._arrays = tuple(arrays)
        self._size = size
        if len(self._arrays) != len(self._leaves) or not leaves:
            raise ValueError(f"found {len(arrays)} arrays for {len(leaves)} leaves")

    @property
    def local(self) -> bool:
        return not any(is_url(array.store) for array in self._arrays)

    @property
    def block_bytes(self) -> int:  # type: ignore[override]
        pairs = zip(self._arrays, self._leaves, strict=True)
        return sum(min(array.rows, self._size) * leaf.nbytes for array, leaf in pairs)

    def __len__(self) -> int:
        return self._size

    def _at(self, which: Which) -> list[np.ndarray]:
        pairs = zip(self._arrays, self._leaves, strict=True)
        if isinstance(which, slice):
            return [self._range(array, leaf, which.start, which.stop) for array, leaf in pairs]
        return [self._rows(array, leaf, which) for array, leaf in pairs]

    def select(self, leaves: Sequence[int]) -> tuple[Source, Sequence[int]]:
        if len(leaves) == len(self._leaves):
            return self, leaves
        arrays = tuple(self._arrays[i] for i in leaves)
        return ZarrSource(arrays, tuple(self._leaves[i] for i in leaves), self._size), leaves

    def _range(self, array: ZarrArray, leaf: LeafSpec, start: int, stop: int) -> np.ndarray:
        opened = self._opened(array, leaf)
        if array.chunks is not None:
            size = _stored(opened)[0]
            array.chunks.check(opened, range(start // size, math.ceil(stop / size)))
        parts = []
        for low, high, whole in _spans(start, stop, array.rows, self._size):
            if whole:
                parts.append(_rows(opened, array, leaf, slice(low, high)))
                continue
            first = low // array.rows * array.rows
            chunk = self._chunk(opened, array, leaf, first)
            parts.append(chunk[low - first : high - first])
        members = parts[0] if len(parts) == 1 else np.concatenate(parts)
        members.flags.writeable = False
        return members

    def _rows(self, array: ZarrArray, leaf: LeafSpec, numbers: np.ndarray) -> np.ndarray:
        opened = self._opened(array, leaf)
        if array.chunks is not None:
            array.chunks.check(opened, np.unique(numbers // _stored(opened)[0]).tolist())
        if array.rows * leaf.nbytes <= _SMALL_CHUNK_BYTES:
            return _rows(opened, array, leaf, numbers)

        def blocks(start: int, stop: int) -> Iterator[SourceBlock]:
            for first in range(start // array.rows * array.rows, stop, array.rows):
                yield SourceBlock(0, 0, first, min(first + array.rows, self._size))

        load = lambda block: [self._chunk(opened, array, leaf, block.first)]
        return read_blocks([leaf], blocks, load, numbers)[0]

    def _chunk(self, opened: Any, array: ZarrArray, leaf: LeafSpec, first: int) -> np.ndarray:
        """The chunk that begins with member `first`, which other shards may need too."""
        last = min(first + array.rows, self._size)
        load = lambda: [_rows(opened, array, leaf, slice(first, last))]
        return BLOCKS.get((array, first), load, array)[0]

    def _opened(self, array: ZarrArray, leaf: LeafSpec) -> Any:
        """Opens an array, and checks that it has not changed."""
        if array.metadata is not None:
            array.metadata.check()
        opened = _ARRAYS.get(array, lambda: _open(array.store, array.name))
        stored = leaf.dtype if array.packing is None else np.dtype(array.packing.stored)
        if opened.shape != (self._size, *leaf.shape) or native_dtype(opened.dtype) != stored:
            raise SourceError(
                f"{array}: found {opened.dtype}{list(opened.shape)}, expected {stored}"
                f"{[self._size, *leaf.shape]}; the array was changed after the source was made "
                "from it."
            )
        return opened

    def where(self, leaf: int, index: tuple[int, ...]) -> str:
        return f"{self._arrays[leaf]}, {row_text(index)}"

    def __str__(self) -> str:
        return describe_source(self, f"in {first_of(self._arrays)}")

    def identity(self) -> tuple[Any, list[str]]:
        identities = [array.identity() for array in self._arrays]
        arrays = [array for array, _ in identities]
        return spec_of(self) | {"arrays": arrays}, [
            path for _, paths in identities for path in paths
        ]


_ARRAYS: SharedCache[Any] = SharedCache(256, lambda _: 1)
"""Open arrays, at most 256."""


def _spans(start: int, stop: int, rows: int, size: int) -> Iterator[tuple[int, int, bool]]:
    """Cuts a range where chunks begin and end: start, end, and whether it is of whole chunks."""
    low = -(-start // rows) * rows  # whole chunks begin here
    high = stop if stop == size else stop // rows * rows
    if low >= high:
        # No chunk is whole: the range is in one chunk, or in parts of two.
        middle = min(low, stop) if start < low else start
        edges = [(start, middle, False), (middle, stop, False)]
        yield from [edge for edge in edges if edge[0] < edge[1]] or [(start, stop, True)]
        return
    if start < low:
        yield start, low, False
    yield low, high, True
    if high < stop:
        yield high, stop, False


def _rows(opened: Any, array: ZarrArray, leaf: LeafSpec, which: Which) -> np.ndarray:
    text = f"{which.start} to {which.stop - 1}" if isinstance(which, slice) else f"{which}"
    with _readable(array.store, f"members {text} of the array {array.name!r}"):
        stored = native_view(np.asarray(opened.oindex[which]))
    return stored if array.packing is None else array.packing.unpacked(stored, leaf.dtype)


def _open(store: str, name: str = "") -> Any:
    """An array or a group."""
    zarr = _zarr(store)
    with _naming_unreadable(store, name), _readable(store, _EXPECTED):
        return zarr.open(_where(store), path=name, mode="r")


def _where(store: str) -> Any:
    """The store as Zarr takes it."""
    is_zip = not is_url(store) and store.endswith(".zip")
    return _zarr(store).storage.ZipStore(store, mode="r") if is_zip else store


@contextlib.contextmanager
def _naming_unreadable(store: str, name: str) -> Iterator[None]:
    """Adds to errors the arrays and groups in a group that Zarr can't read: it does not say."""
    try:
        yield
    except SourceError as error:
        bad = _unreadable(store, name)
        if not bad:
            raise
        names = ", ".join(map(repr, bad[:20]))
        raise SourceError(f"{error} Of the group, {names} can't be read. {_CHOOSE}") from error


def _unreadable(store: str, name: str) -> list[str]:
    """The names of the arrays and groups in a group that can't be opened; empty for others."""
    zarr, bad = _zarr(store), []
    try:
        group = zarr.open_group(_where(store), path=name, mode="r", use_consolidated=False)
        keys = group._sync_iter(group.store.list_dir(group.path))
    except Exception:  # There is no such group: the first error says so.
        return []
    for key in sorted(keys):
        try:
            group.get(key)  # None for files that are no part of Zarr
        except Exception:
            bad.append(f"{name}/{key}".lstrip("/"))
    return bad


def _zarr(store: str) -> Any:
    try:
        import zarr
    except ImportError as error:
        raise SourceError(
            f"{store}: reading it needs zarr, which process {os.getpid()} cannot import ({error}); "
            "pip install -e '.[zarr]', on the workers too."
        ) from error
    return zarr


@contextlib.contextmanager
def _readable(store: str, expected: str) -> Iterator[None]:
    """Converts all errors of Zarr, its codecs and stores to a SourceError that names the store."""
    try:
        with readable(store, expected):
            try:
                yield
            except FileNotFoundError as error:
                if not is_url(store) and not os.path.exists(store):
                    raise
                # The store exists, so `readable` must not report that it is missing.
                raise ValueError(str(error)) from error
    except BeamjaxError:
        raise
    except Exception as error:  # Codecs and remote file systems raise errors of any kind.
        raise SourceError(
            f"{store}: cannot read {expected} ({type(error).__name__}: {error})."
        ) from error


def from_zarr(
    paths: Any,
    *,
    arrays: str | Sequence[str] | None = None,
    mask_and_scale: bool | None = None,
) -> ZarrSource:
    """A placed input from Zarr arrays, of the formats 2 and 3, with members along axis 0.

    Workers read the chunks of their members. If a shard needs only a part of a chunk, the whole
    chunk is decoded and cached, so chunks should hold at most a hundred MB. Needs the package zarr:
    pip install -e '.[zarr]'. Chunks that Zarr has not stored hold the fill value. In a local
    folder it is an error if a chunk is written again, or is missing although all chunks existed
    when the source was made. At a URL neither is noticed.

    Args:
      paths: a path (a folder, or a .zip) or a URL, or a pytree of them. Each is an array, or a
        group, which becomes a dictionary of its arrays and groups. URLs are read by fsspec, which
        needs a package for each kind of URL, such as gcsfs or s3fs, with its own credentials.
      arrays: names of the arrays to read from each group, such as ["t2m", "surface/sp"]; None for
        all. Other arrays may hold text, or have other lengths. A single name instead of a list
        gives that array itself instead of a dictionary.
      mask_and_scale: True decodes numbers that are packed by the CF conventions as xarray does:
        the values are the floats `stored * scale_factor + add_offset`, and NaN where the stored
        number is `_FillValue` or `missing_value`, or, in format 2, the fill value of the array.
        They are computed in 64 bits, and are float32 while `jax_enable_x64` is off. False reads the
        stored numbers. None does so too, but refuses arrays that have these attributes. Times are
        always read as the stored numbers.

    Returns:
      A `Source` with the tree of `paths`, in which a dictionary of arrays takes the place of a
      group.

    Raises:
      SourceError: zarr is not installed; there is no array or group at a path; or the group has no
        array, or none with one of the given names. When the source is read: an array has another
        shape or dtype, or a chunk is damaged.
      StructureError: an array is a scalar, has elements other than numbers, or is packed and
        `mask_and_scale` is None.
      PlacementError: the arrays have different numbers of members.
    """
    import jax

    located, outer = jax.tree_util.tree_flatten_with_path(paths)
    token, nodes, stores = uuid.uuid4().hex, [], list[str]()
    for path, location in located:
        if not isinstance(location, str | os.PathLike):
            raise StructureError(
                f"{leaf_name(jax.tree_util.keystr(path))}: found {type(location).__name__}, "
                f"expected the path of {_EXPECTED}."
            )
        location = os.fspath(location)
        store = location if is_url(location) else os.path.abspath(location)
        nodes.append(_tree(store, "", _open(store)) if arrays is None else _chosen(store, arrays))
        stores += [store] * len(jax.tree_util.tree_leaves(nodes[-1]))
    tree = jax.tree_util.tree_unflatten(outer, nodes)
    leaves, read, sizes, names = [], [], [], []
    listed, treedef = jax.tree_util.tree_flatten_with_path(tree)
    for (path, opened), store in zip(listed, stores, strict=True):
        name, array = jax.tree_util.keystr(path), _array(store, opened, token)
        dtype = _checked(name, array, opened)
        packing = _packing(array, opened, dtype, mask_and_scale)
        if packing is not None:
            array = dataclasses.replace(array, packing=packing)
            dtype = np.dtype(jax.dtypes.canonicalize_dtype(packing.dtype))
        leaves.append(LeafSpec(tuple(opened.shape[1:]), dtype, None, name))
        read.append(array)
        sizes.append(opened.shape[0])
        names.append(f"{name} ({array})")
    try:
        check_sizes(names, sizes)
    except PlacementError as error:
        if len(read) == 1 or arrays is not None:
            raise
        raise PlacementError(f"{error} {_CHOOSE}") from None
    return ZarrSource(tuple(read), tuple(leaves), sizes[0], treedef)


_CHOOSE = "Choose those that belong together: from_zarr(..., arrays=[...])."


def _checked(name: str, array: ZarrArray, opened: Any) -> np.dtype:
    try:
        return checked_dtype(name, opened.shape, opened.dtype, str(array))
    except StructureError as error:
        if not array.name:
            raise
        raise StructureError(f"{error} {_CHOOSE}") from None


def _packing(
    array: ZarrArray, opened: Any, dtype: np.dtype, mask_and_scale: bool | None
) -> Packing | None:
    """How values are decoded from the stored numbers; None if these are the values."""
    if mask_and_scale is False:
        return None
    attributes, fill = dict(opened.attrs), None
    # In format 2, xarray stores _FillValue as Zarr's fill value. Zarr's own default is 0, so a fill
    # value means missing values only if xarray wrote the array and it is not 0.
    if opened.metadata.zarr_format == 2:
        written = "_ARRAY_DIMENSIONS" in attributes and opened.fill_value != 0
        fill = opened.fill_value if mask_and_scale or written else None
    packing = packing_of(attributes, dtype, fill, str(array))
    if packing is not None and mask_and_scale is None:
        raise StructureError(
            f"{array}: found numbers that stand for others by the CF conventions "
            f"({packing_text(packing)}). Choose from_zarr(..., mask_and_scale=True) to read these, "
            "with NaN where values are missing, or mask_and_scale=False to read the numbers as "
            "they are stored."
        )
    return packing


def _array(store: str, opened: Any, token: str) -> ZarrArray:
    with _readable(store, _EXPECTED):
        file, chunks = _metadata(store, opened.path), chunk_files(store, opened.path, opened)
    return ZarrArray(store, opened.path, _chunk_rows(opened), file, token, chunks)


def _tree(store: str, name: str, node: Any) -> Any:
    """The arrays of a group, in nested dictionaries; or the array itself."""
    with _naming_unreadable(store, name), _readable(store, _EXPECTED):
        if hasattr(node, "shape"):
            return node
        members = dict(node.members())
    tree = {key: _tree(store, f"{name}/{key}".lstrip("/"), members[key]) for key in members}
    tree = {key: node for key, node in tree.items() if node != {}}
    if not tree and not name:
        raise SourceError(f"{store}: found a group without arrays, expected at least one.")
    return tree


def _chosen(store: str, arrays: str | Sequence[str]) -> Any:
    """The named arrays of a group, in nested dictionaries; or the array of a single name."""
    # The group itself is not opened: others of its arrays may be unreadable.
    names = [arrays] if isinstance(arrays, str) else list(arrays)
    tree: dict[str, Any] = {}
    for name in names:
        *groups, last = name.split("/")
        level = tree
        for key in groups:
            level = level.setdefault(key, {})
        level[last] = _tree(store, name, _named(store, name))
        if isinstance(arrays, str):
            return level[last]
    if not tree:
        raise SourceError(f"{store}, arrays: found no name, expected at least one.")
    return tree


def _named(store: str, name: str) -> Any:
    """The array or group of a name in a group."""
    try:
        return _open(store, name)
    except SourceError as error:
        if name in _unreadable(store, name.rpartition("/")[0]):
            raise SourceError(f"{store}, array {name!r}: {error.__cause__}.") from error
        with _readable(store, _EXPECTED):
            group = _open(store)
            if hasattr(group, "shape"):
                raise StructureError(
                    f"{store}: found an array, expected a group to choose {name!r} of."
                ) from None
            known = sorted(key for key, _ in group.members(max_depth=None))
        if name in known:
            raise
        raise SourceError(
            f"{store}: found no array {name!r}, expected some of {known!r:.200}."
        ) from None


def _metadata(store: str, name: str) -> DataFile | None:
    """The file that changes with the shape and dtype of an array; None at a URL."""
    if is_url(store):
        return None
    if not os.path.isdir(store):
        return look(store)
    files = [os.path.join(store, name, file) for file in _METADATA]
    return next((look(file) for file in files if os.path.exists(file)), None)


def _chunk_rows(opened: Any) -> int:
    """Members of a chunk; 1 if chunks have no fixed size."""
    try:
        return max(int(opened.chunks[0]), 1)
    except (IndexError, NotImplementedError):  # a scalar, or chunks of different sizes
        return 1
