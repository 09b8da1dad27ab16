"""Base classes of placed inputs: `Source`, members that workers read by index, and `StreamSource`,
members that are read in order and counted as they are read.

A source is described by plain JSON data (`spec_of`), from which another process opens it again
(`open_spec`); it is never pickled with its data. The sources themselves are in `beamjax.sources`.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import hashlib
import importlib
import inspect
import itertools
import math
import os
import typing
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Self, TypeAlias

import numpy as np

from beamjax.errors import PlacementError, SourceError
from beamjax.storage import schema
from beamjax.storage.arrays import dtype_name

PyTreeDef: TypeAlias = Any
"""`jax.tree_util.PyTreeDef`, which type checkers take for a variable."""

Which: TypeAlias = "slice | np.ndarray"
"""The members to read: a slice of a start and a stop, or numbers int64[k]."""

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
        record: dict[str, Any] = schema.to_plain(self)
        return record

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


_CLASSES: dict[str, type[Source]] = {}
"""The classes of sources of this process, by their names."""


def class_name(cls: type[Source]) -> str:
    """The name of a class in specs."""
    return f"{cls.__module__}:{cls.__qualname__}"


class Source(abc.ABC):
    """Members 0 to n - 1 of a pytree of placed arrays, read by index range.

    A subclass defines `leaves`, `__len__` and `read`. Its description, from which other processes
    open it, is the arguments of its constructor, unless it defines `spec` and `from_spec`. All else
    has defaults. Its module must be importable on the workers. Several threads may call `read` at
    the same time.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _CLASSES[class_name(cls)] = cls

    @property
    @abc.abstractmethod
    def leaves(self) -> tuple[LeafSpec, ...]:
        """The type of one member of each leaf, in the order of the tree."""

    @property
    def treedef(self) -> PyTreeDef:
        """The tree that the leaves form; by default a tuple."""
        import jax

        return jax.tree_util.tree_structure(tuple(self.leaves))

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

    def _at(self, which: Which) -> list[np.ndarray]:
        """Members that a slice or numbers choose, as of an array; see `ByIndex`."""
        if isinstance(which, slice):
            return self.read(which.start, which.stop)
        if not len(which):
            return self.read(0, 0)
        numbers, places = np.unique(which, return_inverse=True)
        gap = self._gap_bytes // max(sum(leaf.nbytes for leaf in self.leaves), 1)
        far = np.flatnonzero(np.diff(numbers) - 1 > gap) + 1
        runs = [
            [array[run - run[0]] for array in self.read(int(run[0]), int(run[-1]) + 1)]
            for run in np.split(numbers, far)
        ]
        return [np.concatenate(parts)[places] for parts in zip(*runs, strict=True)]

    _gap_bytes = 0
    """Largest gap between members, in bytes, that is read with them: a second read takes longer."""

    def select(self, leaves: Sequence[int]) -> tuple[Source, Sequence[int]]:
        """A source of the same members that reads at least these leaves, and fewer if it can.

        Args:
            leaves: the numbers of the leaves that a program uses.

        Returns:
            The source, and for each of its leaves the number that it has here; by default this
            source with all leaves.
        """
        return self, range(len(self.leaves))

    def spec(self) -> dict[str, Any] | None:
        """Describes the source, so that `from_spec` can open it in another process.

        The tree is not part of the description, so a source that is opened from it has a tuple of
        leaves.

        Returns:
            JSON values; None if only this process can read the source, which then writes its
            members to files for others. By default, the arguments of the constructor: the value of
            the argument `name`, but for `treedef`, is that of the attribute `_name`, or `name`.
        """
        return arguments_of(self, type(self))

    @classmethod
    def from_spec(cls, spec: dict[str, Any]) -> Self:
        """Opens the source that `spec` describes.

        Args:
            spec: the result of `spec`, which may come from a damaged file.

        Returns:
            A source with the same members. By default, the constructor makes it, whose arguments
            have types that JSON knows, or are dataclasses or tuples of such.
        """
        return cls(
            **{
                name: schema.from_plain(kind, spec[name], name)
                for name, kind in _arguments(cls).items()
            }
        )

    def stamp(self, start: int, stop: int) -> str | None:
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
    def cuts(self) -> Mapping[int, str]:
        """The name of each file except the first one, by the index of its first member.

        Shards end there. Empty by default, and if there is a single file.
        """
        return {}

    @property
    def local(self) -> bool:
        """Whether it reads memory or local paths, which other machines may not have."""
        return False

    def __str__(self) -> str:
        return describe_source(self, f"from {type(self).__name__}")

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self}>"

    def __reduce__(self) -> tuple[Callable[[dict[str, Any]], Source], tuple[dict[str, Any]]]:
        """Pickles the spec, so that no pipeline holds data by mistake."""
        return open_spec, (spec_of(self),)


def check_range(source: Source, start: int, stop: int) -> None:
    """Raises SourceError unless 0 <= start <= stop <= n."""
    if not 0 <= start <= stop <= len(source):
        raise SourceError(
            f"{source!r}: members {start} to {stop} were asked for, expected a range within 0 to "
            f"{len(source)}."
        )


class ByIndex(Source):
    """A source that reads any members together, not only consecutive ones."""

    def read(self, start: int, stop: int) -> list[np.ndarray]:
        check_range(self, start, stop)
        return self._at(slice(start, stop))

    @abc.abstractmethod
    def _at(self, which: Which) -> list[np.ndarray]:
        """Members that a slice of a start and a stop, or int64[k] in any order, choose."""


def take_members(source: Source, numbers: np.ndarray) -> list[np.ndarray]:
    """The members of these numbers, int64[k], in any order and some repeatedly."""
    if len(numbers) and not 0 <= numbers.min() <= numbers.max() < len(source):
        raise SourceError(
            f"{source!r}: members {numbers.min()} to {numbers.max()} were asked for, expected "
            f"numbers from 0 to {len(source) - 1}; the source was changed after it was made."
        )
    return source._at(numbers)


def members_bytes(source: Source) -> int:
    """Number of bytes of all members of all leaves, with padding."""
    return len(source) * sum(leaf.nbytes for leaf in source.leaves)


def cuts_at(files: Sequence[tuple[str, int]]) -> dict[int, str]:
    """The `Source.cuts` of files, from their paths and numbers of members."""
    # Only the part of a path below the folder of all files counts, so that data can be moved.
    paths = [path.split("/") for path, _ in files]
    folders = zip(*(path[:-1] for path in paths), strict=False)
    shared = len(list(itertools.takewhile(lambda names: len(set(names)) == 1, folders)))
    starts, start = {}, 0
    for path, (_, rows) in zip(paths, files, strict=True):
        if start and rows:
            starts[start] = "/".join(path[shared:])
        start += rows
    return starts


def cut_number(name: str) -> int:
    """A number that depends on the name of a file, by which files form groups."""
    digest = hashlib.sha256(name.encode(errors="surrogateescape")).digest()
    return int.from_bytes(digest[:4], "little")


class StreamSource(Source):
    """Members of a pytree of placed arrays that are read in order and counted as they are read.

    For data that can't be read by index: compressed files, rows of a query, a generator of records.
    A run writes the members to temporary files and counts them before it plans the program.

    A subclass defines `leaves` and `chunks`, but no `__len__` and no `read`. A run reads each piece
    once, from its beginning to its end, and again only if the runner retries work that failed.
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

    def __len__(self) -> int:
        raise SourceError(
            f"{self!r}: its number of members is known only when all of them have been read; "
            "beamjax.run counts them where the placement has no size, as in "
            "@program(placements={'clients': None})."
        )

    def read(self, start: int, stop: int) -> list[np.ndarray]:
        raise SourceError(f"{self!r}: is read from its beginning, by chunks(), not by index.")


def arguments_of(source: Source, cls: type[Source]) -> dict[str, Any]:
    """The arguments of the constructor of a class that would make a source, as JSON values."""
    values = vars(source)
    plain = {name: values.get(f"_{name}", values.get(name)) for name in _arguments(cls)}
    return {name: schema.to_plain(value) for name, value in plain.items()}


@functools.cache
def _arguments(cls: type[Source]) -> dict[str, Any]:
    """The arguments of the constructor of a source that are in its spec, and their types."""
    hints = typing.get_type_hints(getattr(cls, "__init__"), include_extras=True)  # noqa: B009 - mypy
    several = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    parameters = inspect.signature(cls).parameters.values()
    names = [p.name for p in parameters if p.name != "treedef" and p.kind not in several]
    return {name: hints.get(name, Any) for name in names}


class HoldsLeaves(Source):
    """A source that is made with its leaves and their tree."""

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
    """Checks a number of members or the like in a spec."""
    if type(value) is not int or not least <= value < MAX_VALUES:
        raise TypeError(f"found {value!r:.80}, expected a number from {least}")
    return value


Count = Annotated[int, natural]
"""A number of members or the like, in the arguments of a source."""
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


def describe_source(source: Source, where: str, nbytes: int | None = None) -> str:
    """`n members of leaf, leaf, ... (bytes) where`; without numbers if they are unknown."""
    leaves = ", ".join(f"{leaf.path} {leaf}".strip() for leaf in source.leaves[:4])
    more = ", ..." if len(source.leaves) > 4 else ""
    if isinstance(source, StreamSource):
        return f"members of {leaves}{more} (their number is unknown) {where}"
    nbytes = members_bytes(source) if nbytes is None else nbytes
    return f"{len(source)} members of {leaves}{more} ({nbytes} bytes) {where}"


# --- sources of this process, which its threads find by a token

_LIVE_CLASS = "live"
_LIVE: dict[str, Source] = {}


def register(source: Source) -> str:
    """Shares a live source with the other threads of this process, until `release`."""
    token = uuid.uuid4().hex
    _LIVE[token] = source
    return token


def live_spec(token: str) -> dict[str, Any]:
    """The spec of a registered source; good in this process only."""
    return {"class": _LIVE_CLASS, "token": token}


def lookup(token: str) -> Source:
    """The source that was registered under `token`."""
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
    _LIVE.pop(token, None)


# --- descriptions of sources as JSON


def spec_of(source: Source) -> dict[str, Any]:
    """The description of a source, with its class; SourceError if only this process can read it."""
    spec = source.spec()
    if spec is None:
        raise SourceError(
            f"{source!r}: is in the memory of process {os.getpid()} and is not pickled. Write it "
            "to files, such as by from_arrays(...).spill(folder), or make a source that workers "
            "can open by themselves."
        )
    return {"class": class_name(type(source)), **spec}


def open_spec(spec: dict[str, Any]) -> Source:
    """Opens the source that a `spec_of` or a `live_spec` describes."""
    name = str(spec.get("class")) if isinstance(spec, dict) else ""
    if name == _LIVE_CLASS:
        return lookup(str(spec.get("token")))
    cls = class_named(name)
    try:
        return cls.from_spec({key: value for key, value in spec.items() if key != "class"})
    except (SourceError, PlacementError):
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise SourceError(
            f"source {name!r:.200}: found the spec {spec!r:.200}, which it does not give "
            f"({type(error).__name__}: {error})."
        ) from error


def class_named(name: str) -> type[Source]:
    """The class of sources of this name, whose module is imported if need be."""
    module, _, path = name.partition(":")
    if name not in _CLASSES and path and module not in ("", "__main__"):
        try:
            importlib.import_module(module)
        except (ImportError, TypeError, ValueError) as error:  # the latter for malformed names
            raise SourceError(
                f"source {name!r:.200}: cannot import its module {module!r:.80} in process "
                f"{os.getpid()} ({error}); install it on the workers."
            ) from error
    if name not in _CLASSES:
        raise SourceError(
            f"source {name!r:.200}: is unknown in process {os.getpid()}, expected a subclass of "
            "beamjax.Source in a module that the workers can import."
        )
    return _CLASSES[name]


schema.add_codec(Source, spec_of, open_spec)
