"""Base classes of placed inputs: `Source`, members that workers read by index, and `StreamSource`,
members that are read in order and counted as they are read.

A source is described by plain JSON data (`to_spec`), from which another process opens it again
(`open_spec`); it is never pickled with its data. The sources themselves are in `beamjax.sources`.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import hashlib
import importlib
import itertools
import math
import os
import threading
import typing
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Self, TypeAlias

import numpy as np

from beamjax.errors import PlacementError, SourceError
from beamjax.storage import schema
from beamjax.storage.dtypes import dtype_name

PyTreeDef: TypeAlias = Any
"""`jax.tree_util.PyTreeDef`, which type checkers take for a variable."""

MAX_VALUES = 2**48
"""Limit of the values of a member and of all counts in a spec; larger numbers are refused as
damaged."""
MAX_NDIM = 62
"""Largest rank of a member: NumPy allows 64 axes, and members are stacked twice."""


@dataclasses.dataclass(frozen=True)
class LeafSpec:
    """The type of one member of one leaf of a source.

    Attributes:
        shape: the shape of a member; for typed keys, the shape of its key data, which has one axis
            more than the key.
        dtype: the dtype in native byte order; uint32 for typed keys.
        key_impl: for typed keys, the argument of `jax.random.wrap_key_data(..., impl=key_impl)`;
            None for other leaves.
        path: the path of the leaf in the tree, as `jax.tree_util.keystr` writes it.
        ragged: whether members have up to `shape[0]` rows, and are padded to that many.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    key_impl: str | None = None
    path: str = ""
    ragged: bool = False

    def __post_init__(self) -> None:
        values = math.prod(max(size, 1) for size in self.shape)
        if min(self.shape, default=0) < 0 or len(self.shape) > MAX_NDIM or values > MAX_VALUES:
            raise ValueError(f"found a member of shape {list(self.shape)}, which can't be stacked")
        if self.ragged and not self.shape:
            raise ValueError("found ragged members of shape [], expected rows")

    @property
    def nbytes(self) -> int:
        """Number of bytes of a member."""
        return math.prod(self.shape) * self.dtype.itemsize

    def to_json(self) -> dict[str, Any]:
        """Returns JSON values from which `from_json` makes an equal `LeafSpec`."""
        found: dict[str, Any] = schema.to_plain(self)
        return found

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> LeafSpec:
        """Makes a `LeafSpec` from the result of `to_json`.

        Args:
            record: the result of `to_json`.

        Returns:
            The `LeafSpec`.

        Raises:
            ArrayFormatError: the record has missing entries, other types or impossible values.
        """
        return schema.from_plain(cls, record, "leaf")

    def __reduce__(self) -> tuple[Callable[[dict[str, Any]], LeafSpec], tuple[dict[str, Any]]]:
        """Pickles by names: NumPy's own dtypes are other objects once they are unpickled."""
        return LeafSpec.from_json, (self.to_json(),)

    def __str__(self) -> str:
        key = f" (keys, {self.key_impl})" if self.key_impl else ""
        return f"{dtype_name(self.dtype)}{list(self.shape)}{key}"


class Source(abc.ABC):
    """Members 0 to n - 1 of a pytree of placed arrays, read by index range.

    A subclass gives its `kind`, a name under which beamjax finds it, as a class argument
    (`class MySource(Source, kind="mine")`). It must define `leaves`, `__len__`, `read`, `to_spec`
    and `from_spec`; all other methods have defaults. Its module must be importable on the workers.
    Several threads may call `read` at the same time.
    """

    kind: ClassVar[str] = ""

    def __init_subclass__(cls, kind: str = "", **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if kind:
            cls.kind = kind
            _KINDS[kind] = cls

    @property
    @abc.abstractmethod
    def leaves(self) -> tuple[LeafSpec, ...]:
        """The type of one member of each leaf, in the order of the tree."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """The number of members, n."""

    @abc.abstractmethod
    def read(self, start: int, stop: int) -> list[np.ndarray]:
        """Reads consecutive members.

        Args:
            start: the first member.
            stop: the member after the last one, up to n.

        Returns:
            For each leaf, an array of shape (stop - start, *leaf.shape) and of the leaf's dtype.

        Raises:
            SourceError: the range is not within 0 to n, or the data has changed.
        """

    def select(self, leaves: Sequence[int]) -> tuple[Source, Sequence[int]]:
        """A source of the same members that reads at least these leaves, and fewer if it can.

        Args:
            leaves: the numbers of the leaves that are read.

        Returns:
            The source, and for each of its leaves the number that it has here; by default this
            source.
        """
        return self, range(len(self.leaves))

    @property
    def buckets(self) -> tuple[int, ...]:
        """Numbers of rows to which `read_short` pads ragged members, ascending.

        The last one is the number of rows in `leaves`. Empty if no leaf is ragged.
        """
        return ()

    @property
    def usual_rows(self) -> float:
        """The mean number of rows of ragged members; 0 if no leaf is ragged."""
        return 0.0

    def rows_of(self, start: int, stop: int) -> np.ndarray | None:
        """Counts the rows of ragged members without reading them.

        Args:
            start: the first member.
            stop: the member after the last one.

        Returns:
            int[stop - start]; None if the numbers are known only after the members are read.
        """
        return None

    def read_short(self, start: int, stop: int) -> list[np.ndarray]:
        """As `read`, but pads ragged leaves only to the first of `buckets` that is long enough."""
        return self.read(start, stop)

    @property
    def file_starts(self) -> Mapping[int, int]:
        """A hash of the name of each file except the first one, by the index of its first member.

        Empty if the source does not read several files in sequence.
        """
        return {}

    @property
    def inner(self) -> tuple[Source, ...]:
        """The sources that this one reads, if it is made of others."""
        return ()

    def with_inner(self, inner: Sequence[Source]) -> Source:
        """This source, reading from other sources with the same members instead of `inner`."""
        return self

    def origin(self, leaf: int, index: tuple[int, ...]) -> tuple[Source, int, tuple[int, ...]]:
        """The source from which a value comes: one of `inner`, or this one.

        Args:
            leaf: the number of the leaf.
            index: the index of the value in the array of all members, with the member first.

        Returns:
            The source, and the leaf and the index there.
        """
        return self, leaf, index

    def where(self, leaf: int, index: tuple[int, ...]) -> str:
        """Describes where a value comes from, for messages.

        Args:
            leaf: as for `origin`.
            index: as for `origin`.

        Returns:
            Its file, column and row as text, as far as they are known.
        """
        source, number, at = self.origin(leaf, index)
        if source is not self:
            return source.where(number, at)
        path = self.leaves[leaf].path
        return f"{self.describe()}, {f'leaf {path}, ' if path else ''}{row_text(index, 'member')}"

    def wraps(self, leaf: int) -> bool:
        """Whether 64-bit integers of a leaf may wrap while JAX computes with 32 bits.

        Those of arrays in memory wrap, as under `jax.jit`. So may those in files of a run, which
        were checked when they were written. In all other sources, integers that would wrap are
        refused.

        Args:
            leaf: the number of the leaf.

        Returns:
            True if they may wrap.
        """
        source, number, _ = self.origin(leaf, (0,) * (1 + len(self.leaves[leaf].shape)))
        return source is not self and source.wraps(number)

    @property
    def block_bytes(self) -> int:
        """Bytes of members that are decoded to read any one of them; 0 if there are no blocks."""
        return sum(source.block_bytes for source in self.inner)

    def spilled(self, folder: str) -> Source:
        """The same members, with those in the memory of this process written to files in a folder.

        Args:
            folder: a path that the workers see.

        Returns:
            A source of the same members; this one if none of them are in memory.

        Raises:
            SourceError: a file cannot be written.
        """
        parts = [source.spilled(f"{folder}/{i}") for i, source in enumerate(self.inner)]
        return self.with_inner(parts) if parts else self

    def snapshot(self) -> Source:
        """The same members, without memory that the caller can still write to.

        Writable arrays are copied. Files, and objects or functions that give members, are still
        read later.

        Returns:
            A source of the same members; this one if there is nothing to copy.
        """
        parts = [source.snapshot() for source in self.inner]
        pairs = zip(parts, self.inner, strict=True)
        return self.with_inner(parts) if any(new is not old for new, old in pairs) else self

    @abc.abstractmethod
    def to_spec(self) -> dict[str, Any]:
        """Describes the source, so that another process can open it.

        The tree is not part of the description, so a source that is opened from it has a tuple of
        leaves.

        Returns:
            JSON values, including those of `spec_head`.
        """

    @classmethod
    @abc.abstractmethod
    def from_spec(cls, spec: dict[str, Any]) -> Source:
        """Opens the source that `to_spec` describes.

        Args:
            spec: the result of `to_spec`.

        Returns:
            A source with the same members.
        """

    def identity(self) -> tuple[Any, list[str]]:
        """Describes what the members depend on, to detect a changed source.

        Returns:
            Plain JSON values, and the paths or URLs of files whose contents count as well. The
            location of the files and the time at which they were written make no difference. By
            default, the spec and no files.
        """
        return self.to_spec(), []

    def content_mark(self, start: int, stop: int) -> str | None:
        """Identifies the contents of members without reading them.

        Args:
            start: the first member.
            stop: the member after the last one.

        Returns:
            A string that changes whenever members [start, stop) change; None if there is no such
            string. The caller then reads the members.
        """
        return None

    @property
    def treedef(self) -> PyTreeDef:
        """The tree that the leaves form; by default a tuple."""
        import jax

        return jax.tree_util.tree_structure(tuple(self.leaves))

    @property
    def is_live(self) -> bool:
        """Whether only this process can read the source, which has no spec but can be `spilled`."""
        return False

    @property
    def is_local(self) -> bool:
        """Whether it reads memory or local paths, which other machines may not have."""
        return self.is_live

    @property
    def nbytes(self) -> int:
        """Number of bytes of all members of all leaves."""
        return len(self) * sum(leaf.nbytes for leaf in self.leaves)

    def describe(self) -> str:
        """The source in one line, for messages."""
        return describe_source(self, self.kind or type(self).__name__)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.describe()}>"

    def __reduce__(self) -> tuple[Callable[[dict[str, Any]], Source], tuple[dict[str, Any]]]:
        """Pickles the spec, so that no pipeline holds data by mistake."""
        return open_spec, (self.to_spec(),)

    def spec_head(self) -> dict[str, Any]:
        """Returns the entries "kind" and "module" of a spec, by which beamjax finds the class."""
        return {"kind": self.kind, "module": type(self).__module__}

    def check_range(self, start: int, stop: int) -> None:
        """Raises SourceError unless 0 <= start <= stop <= n; `read` calls it first."""
        if not 0 <= start <= stop <= len(self):
            raise SourceError(
                f"{self!r}: members {start} to {stop} were asked for, expected a range within 0 "
                f"to {len(self)}."
            )


def starts_of(files: Sequence[tuple[str, int]]) -> dict[int, int]:
    """Makes the `Source.file_starts` of files from their paths and numbers of members.

    Only the part of a path below the folder of all files counts, so that data can be moved.

    Returns:
      A hash of the name of each file except the first one, by the index of its first member.
    """
    paths = [path.split("/") for path, _ in files]
    folders = zip(*(path[:-1] for path in paths), strict=False)
    shared = len(list(itertools.takewhile(lambda names: len(set(names)) == 1, folders)))
    found, start = {}, 0
    for path, (_, rows) in zip(paths, files, strict=True):
        if start and rows:
            name = hashlib.sha256("/".join(path[shared:]).encode(errors="surrogateescape"))
            found[start] = int.from_bytes(name.digest()[:4], "little")
        start += rows
    return found


class StreamSource(Source):
    """Members of a pytree of placed arrays that are read in order and counted as they are read.

    For data that can't be read by index: compressed files, rows of a query, a generator of records.
    A run writes the members to temporary files and counts them before it plans the program.

    A subclass gives its `kind` like any source, and `leaves`, `chunks`, `to_spec` and `from_spec`,
    but no `__len__` and no `read`. A run reads each piece once, from its beginning to its end, and
    again only if the runner retries work that failed.
    """

    @property
    def pieces(self) -> int:
        """The number of pieces, such as files, that may be read at the same time; 1 by default.

        The members of piece 0 come first, then those of piece 1, and so on.
        """
        return 1

    @abc.abstractmethod
    def chunks(self, piece: int) -> Iterator[Sequence[np.ndarray]]:
        """Reads the members of one piece, in order. Every call yields the same members.

        The division into chunks does not affect any result. Chunks of a few MiB are read fastest;
        only one is in memory at a time.

        Args:
            piece: from 0 to `pieces` - 1.

        Yields:
            For each leaf an array of shape (rows, *leaf.shape) and of the leaf's dtype. The number
            of rows is the same for all leaves and may be 0. The arrays are copied before the next
            chunk is requested, so a buffer may be reused.
        """

    def where_in(self, piece: int, leaf: int, index: tuple[int, ...]) -> str:
        """Like `where`, with `index[0]` counted from the beginning of a piece."""
        path, part = self.leaves[leaf].path, f"piece {piece}, " if self.pieces > 1 else ""
        text = row_text(index)
        return f"{self.describe()}, {part}{f'leaf {path}, ' if path else ''}{text}"

    def __len__(self) -> int:
        raise SourceError(
            f"{self!r}: its number of members is known only when all of them have been read; "
            "beamjax.run counts them where the placement has no size, as in "
            "@program(placements={'clients': None})."
        )

    def read(self, start: int, stop: int) -> list[np.ndarray]:
        raise SourceError(f"{self!r}: is read from its beginning, by chunks(), not by index.")


class PlainSource(Source):
    """A source whose spec is the arguments of its constructor.

    The constructor checks each argument `name` and stores it as the attribute `_name`, or `name`.
    The types of arguments are those that `storage.schema` knows. `treedef` is not part of a spec.
    """

    def to_spec(self) -> dict[str, Any]:
        # `open_spec` makes a subclass without a kind of its own an instance of the class that has
        # the kind, so the spec holds the arguments of that class.
        names, values = _arguments(_KINDS[self.kind]), vars(self)
        arguments = {name: values.get(f"_{name}", values.get(name)) for name in names}
        return {**self.spec_head(), **schema.to_plain(arguments)}

    @classmethod
    def from_spec(cls, spec: dict[str, Any]) -> Self:
        arguments = {
            name: schema.from_plain(kind, spec[name], name)
            for name, kind in _arguments(cls).items()
        }
        return cls(**arguments)


@functools.cache
def _arguments(cls: type) -> dict[str, Any]:
    """The arguments of the constructor of a `PlainSource` that are in its spec, and their types."""
    hints = typing.get_type_hints(getattr(cls, "__init__"), include_extras=True)  # noqa: B009 - mypy
    return {name: kind for name, kind in hints.items() if name not in ("return", "treedef")}


class HoldsLeaves(PlainSource):
    """A source that is made with its leaves and their tree.

    Args:
        leaves: one member of each.
        treedef: the tree that they form; a tuple by default.
    """

    def __init__(self, leaves: Sequence[LeafSpec], treedef: PyTreeDef | None = None) -> None:
        self._leaves = tuple(leaves)
        self._treedef = treedef

    @property
    def leaves(self) -> tuple[LeafSpec, ...]:
        return self._leaves

    @property
    def treedef(self) -> PyTreeDef:
        return super().treedef if self._treedef is None else self._treedef


def natural(value: Any, least: int = 0) -> int:
    """Checks a number of members or the like in a spec.

    Returns:
        The number.

    Raises:
        TypeError: it is no int, or out of range.
    """
    if type(value) is not int or not least <= value < MAX_VALUES:
        raise TypeError(f"found {value!r:.80}, expected a number from {least}")
    return value


Count = Annotated[int, natural]
"""A number of members or the like, in the arguments of a `PlainSource`."""
Positive = Annotated[int, functools.partial(natural, least=1)]
"""A `Count` that is not 0."""
Leaves = tuple[LeafSpec, ...]

MASK = "mask"
"""Name of the leaf that marks the rows of ragged members, as opposed to padding."""


def row_text(index: tuple[int, ...], name: str = "row") -> str:
    """`row 3`, or `row 3, at [0, 2] of it`: where a value is in an array with rows."""
    return f"{name} {index[0]}{f', at {list(index[1:])} of it' if len(index) > 1 else ''}"


def first_of(names: Sequence[Any]) -> str:
    """`name and 2 more`: the first of several names, at least one, for messages."""
    return f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}"


def describe_source(source: Source, where: str) -> str:
    """`n members of leaf, leaf, ... (bytes) where`; without numbers if they are unknown."""
    leaves = ", ".join(f"{leaf.path} {leaf}".strip() for leaf in source.leaves[:4])
    more = ", ..." if len(source.leaves) > 4 else ""
    if isinstance(source, StreamSource):
        return f"members of {leaves}{more} (their number is unknown) {where}"
    return f"{len(source)} members of {leaves}{more} ({source.nbytes} bytes) {where}"


# --- sources of this process, which its threads find by a token

_LIVE: dict[str, Source] = {}
_LIVE_LOCK = threading.Lock()


def register(source: Source) -> str:
    """Shares a live source with the other threads of this process, until `release`.

    Returns:
        A token for `lookup`, or for `open_spec(live_spec(token))`.
    """
    token = uuid.uuid4().hex
    with _LIVE_LOCK:
        _LIVE[token] = source
    return token


def live_spec(token: str) -> dict[str, Any]:
    """The spec of a registered source; good in this process only."""
    return {"kind": "live", "token": token}


def lookup(token: str) -> Source:
    """The source that was registered under `token`.

    Returns:
        The source.

    Raises:
        SourceError: if it was released, or registered in another process.
    """
    with _LIVE_LOCK:
        source = _LIVE.get(token)
    if source is None:
        raise SourceError(
            f"source {token}: not registered in process {os.getpid()}. In-memory sources live in "
            "the process that made them and until they are released: write it to files with "
            "source.spill(folder), in a folder that the workers see, to read it elsewhere."
        )
    return source


def release(token: str) -> None:
    """Forgets a registered source; harmless if it is unknown."""
    with _LIVE_LOCK:
        _LIVE.pop(token, None)


_KINDS: dict[str, type[Source]] = {}
"""The class of each kind of source whose module has been imported."""


def open_spec(spec: dict[str, Any]) -> Source:
    """Opens the source that a `to_spec` or a `live_spec` describes.

    Returns:
        The source.

    Raises:
        SourceError: if the kind is unknown here, or the spec is not one.
        PlacementError: the source has no members, or different numbers of them.
    """
    fields = spec if isinstance(spec, dict) else {}
    kind, module = str(fields.get("kind")), fields.get("module")
    if kind == "live":
        return lookup(str(fields.get("token")))
    if kind not in _KINDS and isinstance(module, str) and module not in ("", "__main__"):
        try:
            importlib.import_module(module)
        except (ImportError, TypeError, ValueError) as error:  # the latter for malformed names
            raise SourceError(
                f"source of kind {kind!r}: cannot import its module {module!r} in process "
                f"{os.getpid()} ({error}); install it on the workers."
            ) from error
    if kind not in _KINDS:
        raise SourceError(
            f"source of kind {kind!r} (module {module!r}) is unknown in process {os.getpid()}, "
            f"expected one of {sorted(_KINDS)}; define it in a module that the workers can import."
        )
    try:
        return _KINDS[kind].from_spec(spec)
    except (SourceError, PlacementError):
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise SourceError(
            f"source of kind {kind!r}: found the spec {spec!r:.200}, which its to_spec does not "
            f"give ({type(error).__name__}: {error})."
        ) from error


schema.add_codec(Source, lambda source: source.to_spec(), open_spec)
