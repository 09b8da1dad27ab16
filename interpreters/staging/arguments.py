"""Flattens the arguments of a call: arrays, scalars, sources, and abstract arrays."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import tree_util

from beamjax import _compat
from beamjax.errors import StructureError
from beamjax.interpreters.dimensions import is_unknown, members_of_streams
from beamjax.sources.source_base import LeafSpec, Source, StreamSource


class Argument(NamedTuple):
    """One flat argument."""

    path: str  # in the user's arguments, e.g. `params['w']`
    aval: Any  # of the whole array
    value: Any  # the array or scalar, the `Source` it is a leaf of, or a `jax.ShapeDtypeStruct`
    leaf: int = 0  # its number, if the value is a `Source`

    @property
    def is_source(self) -> bool:
        return isinstance(self.value, Source)

    @property
    def is_stream(self) -> bool:
        return isinstance(self.value, StreamSource)

    @property
    def file_rows(self) -> int:
        """Approximate number of members per file, a power of two; 0 if not in several files."""
        # Rounded, so that plans, and with them bits, rarely change when a file is added.
        files = len(self.value.cuts) + 1 if self.is_source and not self.is_stream else 1
        return 1 << (len(self.value) // files).bit_length() - 1 if files > 1 else 0

    @property
    def comes_by_shards(self) -> bool:
        """Whether only workers read it: from a source, or from a user's PCollection."""
        return isinstance(self.value, Source | jax.ShapeDtypeStruct)


@dataclass(frozen=True, eq=False)
class FlatCall:
    """A call of a function of programs, with its arguments flattened."""

    fn: Callable[..., Any]
    arguments: Sequence[Argument]  # a `Source` stands for a tree of placed arrays
    structure: Any  # of the arguments; hashable, since it is part of the key of a plan
    restore: Callable[[Sequence[Any]], Any]  # the tree of arguments, from a value for each flat one
    types: tuple[Any, ...]  # what a plan depends on in each argument, hashable
    # The arguments, if all are arrays in memory, none of which is a tracer.
    arrays: Sequence[Any] | None = None
    narrows: bool = True  # whether JAX may have a narrower dtype for an argument

    @functools.cached_property
    def has_sources(self) -> bool:
        """Whether an argument is a source, rather than an array."""
        return self.arrays is None and any(argument.is_source for argument in self.arguments)

    @functools.cached_property
    def has_streams(self) -> bool:
        """Whether the number of members of a source is unknown."""
        return self.has_sources and any(argument.is_stream for argument in self.arguments)

    @functools.cached_property
    def has_values(self) -> bool:
        """Whether no argument is an abstract array."""
        return self.arrays is not None or all(a.value is not None for a in self.arguments)

    @property
    def values(self) -> Sequence[Any]:
        """For each argument an array, a scalar, or a pair of a `Source` and the index of a leaf."""
        if self.arrays is not None:
            return self.arrays
        return [(a.value, a.leaf) if a.is_source else a.value for a in self.arguments]

    @property
    def avals(self) -> list[Any]:
        """Shapes and dtypes of the arguments."""
        return [argument.aval for argument in self.arguments]

    def with_arguments(self, arguments: Sequence[Argument]) -> FlatCall:
        """The call with other arguments of the same structure."""
        return FlatCall(self.fn, arguments, self.structure, self.restore, _types(arguments))


class _Arrays(Sequence[Argument]):
    """Arguments that are arrays in memory. They are described when one is first looked at."""

    # A second call finds its plan by their types alone. To name a thousand arguments and to make
    # their types in JAX takes milliseconds, which is more than small programs compute.
    def __init__(self, fn: Callable[..., Any], arrays: Sequence[Any], tree: Any):
        self._fn, self._arrays, self._tree = fn, arrays, tree

    @functools.cached_property
    def _described(self) -> list[Argument]:
        args = tree_util.tree_unflatten(self._tree, self._arrays)
        named, _ = tree_util.tree_flatten_with_path(args)
        names = _argument_names(self._fn, args)
        pairs = ((_path_text(names, path), leaf) for path, leaf in named)
        return [Argument(name, _aval(name, leaf, None), leaf) for name, leaf in pairs]

    def __len__(self) -> int:
        return len(self._arrays)

    def __getitem__(self, index: Any) -> Any:
        return self._described[index]

    def __iter__(self) -> Iterator[Argument]:
        return iter(self._described)


def _types(arguments: Sequence[Argument]) -> tuple[Any, ...]:
    """The `FlatCall.types` of arguments."""
    avals = [argument.aval for argument in arguments]
    return (
        tuple([aval.shape for aval in avals]),
        tuple([aval.dtype for aval in avals]),
        tuple(i for i, aval in enumerate(avals) if getattr(aval, "weak_type", False)),
        tuple(i for i, argument in enumerate(arguments) if argument.comes_by_shards),
    )


def _array_types(leaves: Sequence[Any]) -> tuple[tuple[Any, ...], bool] | None:
    """The `types` and `narrows` of arrays of NumPy and JAX; None if there is anything else."""
    # One loop for each property, as this takes most of the time in which a call finds its plan.
    kinds = set(map(type, leaves))
    if not kinds <= {np.ndarray, _compat.ArrayImpl}:
        return None
    narrowed = _NARROWED[bool(_compat.config.jax_enable_x64)]
    try:
        own = [x.dtype for x in leaves]
        dtypes = [narrowed[dtype] for dtype in own]
    except (TypeError, ValueError):  # A dtype that JAX does not have: an error will say so.
        return None
    weak: list[int] = []
    if _compat.ArrayImpl in kinds:
        weak = [i for i, x in enumerate(leaves) if type(x) is not np.ndarray and x.weak_type]
    return (tuple([x.shape for x in leaves]), tuple(dtypes), tuple(weak), ()), dtypes != own


class _Narrowed(dict[Any, Any]):
    """For each dtype of an array, that which JAX computes with."""

    def __missing__(self, dtype: Any) -> Any:
        narrowed = dtype
        if isinstance(dtype, np.dtype):
            narrowed = _compat.array_type((), dtype, _compat.config.jax_enable_x64).dtype
        self[dtype] = narrowed
        return narrowed


_NARROWED = {False: _Narrowed(), True: _Narrowed()}


_OTHER_NAMES = {"constant", "result"}
"""Names that explanations have for other values than arguments."""


def _argument_names(fn: Callable[..., Any], args: Sequence[Any]) -> list[str]:
    """The names of arguments in messages, as JAX has them: those of the parameters, if known."""
    try:
        signature = inspect.signature(fn)
        bound = signature.bind(*args).arguments
    except (TypeError, ValueError):  # Not written in Python, or tracing will raise the error.
        bound = {}
    names: list[str] = []
    for name, value in bound.items():
        several = signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL
        names += [f"{name}[{i}]" for i in range(len(value))] if several else [name]
    if not names or _OTHER_NAMES.intersection(bound):
        return [f"args[{i}]" for i in range(len(args))]
    return names


def _path_text(names: Sequence[str], path: Sequence[Any]) -> str:
    return names[path[0].idx] + tree_util.keystr(tuple(path[1:]))


def flatten_call(fn: Callable[..., Any], args: Sequence[Any]) -> FlatCall:
    """Flattens the arguments of a call; refuses what is neither data nor a source."""
    args = tuple(args)
    leaves, tree = tree_util.tree_flatten(args)
    arrays = _array_types(leaves)
    if arrays is not None:
        types, narrows = arrays
        restore = functools.partial(tree_util.tree_unflatten, tree)
        described = _Arrays(fn, leaves, tree)
        return FlatCall(fn, described, (tree, None), restore, types, leaves, narrows)
    named, tree = tree_util.tree_flatten_with_path(args, is_leaf=lambda x: isinstance(x, Source))
    names = _argument_names(fn, args)
    flat: list[Argument] = []
    symbols: dict[str, Any] = {}
    counts: list[tuple[int, Any]] = []
    for path, leaf in named:
        name = _path_text(names, path)
        if isinstance(leaf, Source):
            flat += _source_arguments(name, leaf, symbols)
            counts.append((len(leaf.leaves), leaf.treedef))
        else:
            if isinstance(leaf, jax.ShapeDtypeStruct):
                leaf = _checked(name, leaf, symbols)
            flat.append(Argument(name, _aval(name, leaf, args[path[0].idx]), leaf))
            counts.append((1, None))

    def restore_sources(values: Sequence[Any]) -> Any:
        rest = iter(values)
        groups = []
        for count, subtree in counts:
            group = [next(rest) for _ in range(count)]
            groups.append(group[0] if subtree is None else tree_util.tree_unflatten(subtree, group))
        return tree_util.tree_unflatten(tree, groups)

    # Without sources, the same structure as above: a scalar may be an array in the next call.
    sources = tuple(counts) if any(subtree is not None for _, subtree in counts) else None
    return FlatCall(fn, flat, (tree, sources), restore_sources, _types(flat))


def _source_arguments(name: str, source: Source, symbols: dict[str, Any]) -> list[Argument]:
    if isinstance(source, StreamSource):
        symbol = members_of_streams()
        n = symbols.setdefault(str(symbol), symbol)
    else:
        n = len(source)
    arguments = [
        Argument(f"{name}{spec.path}", None, source, i) for i, spec in enumerate(source.leaves)
    ]
    return [of_members(argument, source, n) for argument in arguments]


def of_members(argument: Argument, source: Source, n: Any) -> Argument:
    """The argument as a leaf of a source with n members."""
    spec = source.leaves[argument.leaf]
    shape, dtype = (n, *spec.shape), spec.dtype
    if spec.key_impl:
        key = functools.partial(jax.random.wrap_key_data, impl=spec.key_impl)
        aval = jax.eval_shape(key, jax.ShapeDtypeStruct(shape, dtype))
    else:
        dtype = jax.dtypes.canonicalize_dtype(dtype)
        aval = jax.ShapeDtypeStruct(shape, dtype)
    if not is_unknown(n) and n == 0:
        # There is nothing to read: the source is the array of its members.
        return argument._replace(aval=aval, value=_no_members(spec, dtype), leaf=0)
    return argument._replace(aval=aval, value=source)


def _no_members(spec: LeafSpec, dtype: Any) -> Any:
    """The array of all members of a leaf without members."""
    array = np.empty((0, *spec.shape), dtype)
    if spec.key_impl is None:
        return array
    return jax.random.wrap_key_data(jax.numpy.asarray(array), impl=spec.key_impl)


def _aval(name: str, leaf: Any, argument: Any) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    try:
        if isinstance(leaf, jax.Array):
            return jax.typeof(leaf)
        if type(leaf) is np.ndarray:
            return _compat.array_type(leaf.shape, leaf.dtype, _compat.config.jax_enable_x64)
        return jax.api_util.shaped_abstractify(leaf)
    except OverflowError as error:
        raise StructureError(
            f"{name}: found the int {leaf}, which JAX's default int does not hold; pass a NumPy "
            "scalar of a wider dtype, with 64-bit types enabled if it has 64 bits"
        ) from error
    except (TypeError, ValueError) as error:
        if isinstance(leaf, np.ndarray):
            raise StructureError(f"{name}: {_unusable(leaf)}") from error
        raise StructureError(
            f"{name}: found a {type(leaf).__name__} ({leaf!r:.80}), expected an array, a scalar or "
            f"a beamjax.Source; {_instead(leaf, argument)}"
        ) from error


def _unusable(array: np.ndarray) -> str:
    """Why JAX does not take an array of NumPy, and what to do."""
    if isinstance(array, np.ma.MaskedArray):
        return (
            "found a masked array, which JAX does not take; pass array.filled(...), and the mask "
            "as an argument if the program needs it"
        )
    if array.dtype.kind in "biufc" and not array.dtype.isnative:
        swapped = array.dtype.newbyteorder("=")
        return (
            f"found an array of the byte order of another machine, dtype {array.dtype.str!r}; "
            f"convert it with array.astype({swapped.name!r})"
        )
    reason = f"found an array of dtype {array.dtype}, which JAX does not have"
    if array.dtype.kind in "US":
        bytes_ = "array" if array.dtype.kind == "S" else 'np.char.encode(array, "utf-8")'
        return f"{reason}; pass its bytes as numbers: {bytes_}[..., None].view(np.uint8)"
    return f"{reason}; convert it to numbers with array.astype(...)"


def _instead(leaf: Any, argument: Any) -> str:
    """Advice for a leaf of an argument that is not data."""
    if _comes_from("apache_beam", leaf):
        return (
            "beamjax.from_beam(transform, like=..., folder=...) makes one of what a PTransform "
            "reads, and beamjax.transform runs a program inside of a pipeline of your own"
        )
    from_equinox = functools.partial(_comes_from, "equinox")
    if any(map(from_equinox, tree_util.tree_leaves(argument, is_leaf=from_equinox))):
        return (
            "an equinox.Module holds functions beside its arrays: split it by "
            "params, static = eqx.partition(module, eqx.is_array), pass params, and call "
            "eqx.combine(params, static) in the program"
        )
    return "bind what is not data with functools.partial"


def _comes_from(package: str, x: Any) -> bool:
    """Whether a class of `x` is of a package, which need not be installed."""
    return any(kind.__module__.partition(".")[0] == package for kind in type(x).__mro__)


def _checked(
    name: str, aval: jax.ShapeDtypeStruct, symbols: dict[str, Any]
) -> jax.ShapeDtypeStruct:
    """Checks that at most the number of members of an abstract argument is symbolic."""
    unknown = [d for d in aval.shape if is_unknown(d)]
    if not unknown:
        return aval
    n = aval.shape[0]
    if not is_unknown(n) or len(unknown) > 1 or not str(n).isidentifier():
        raise StructureError(
            f"{name}: found a jax.ShapeDtypeStruct of shape {aval.shape}, expected at most the "
            "first dimension, the number of members, to be symbolic, and that a single symbol"
        )
    constraints = [c for c in _compat.constraints_of(n) if c.replace(" ", "") != f"{n}>=1"]
    if constraints:
        raise StructureError(
            f"{name}: found the symbolic dimension {n} with the constraints {constraints}, "
            "expected none: beamjax would not check them once the number of members is known"
        )
    # Dimensions of two scopes are never equal, so all symbols of a name become the first one.
    n = symbols.setdefault(str(n), n)
    return aval.update(shape=(n, *aval.shape[1:]))
