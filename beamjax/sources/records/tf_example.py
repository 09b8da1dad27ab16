"""Records of `tf.train.Example` as members, parsed by protobuf, without TensorFlow."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from beamjax.errors import SourceError, StructureError
from beamjax.sources.leaf_checks import member_leaves
from beamjax.sources.source_base import LeafSpec, PyTreeDef

FLOATS, INTS, BYTES = "float_list", "int64_list", "bytes_list"

Where = Callable[[int], str]
"""Returns the name of a parsed record for messages, from its position."""


def feature_leaves(features: Any, caller: str) -> tuple[list[LeafSpec], PyTreeDef]:
    """The leaves of a member, a dict of features, in the order of their names."""
    import jax

    if not isinstance(features, Mapping) or not all(isinstance(name, str) for name in features):
        raise StructureError(
            f"{caller}: found the features {features!r:.80}, expected a dict from their names to "
            'jax.ShapeDtypeStruct, such as {"x": jax.ShapeDtypeStruct((28, 28), "float32")}.'
        )
    leaves, treedef = member_leaves(dict(features), caller)
    if treedef != jax.tree_util.tree_structure(dict.fromkeys(features, 0)):
        raise StructureError(
            f"{caller}: found a feature that is a tree, expected a single type for each feature."
        )
    for leaf in leaves:
        if leaf.key_impl is not None or leaf.dtype.kind not in "biufcV" or not leaf.dtype.itemsize:
            raise StructureError(f"{caller}{leaf.path}: found {leaf}, expected numbers.")
    return leaves, treedef


class ExampleParser:
    """Parses records, each of which holds an Example."""

    def __init__(self, names: Sequence[str], leaves: Sequence[LeafSpec]) -> None:
        self._features = [_Feature(*pair) for pair in zip(names, leaves, strict=True)]

    def parse(self, records: Sequence[bytes], where: Where) -> list[np.ndarray]:
        """The features of consecutive members, for each an array of shape (records, ...)."""
        columns: list[list[_Values]] = [[] for _ in self._features]
        for place, record in enumerate(records):
            features = _features_of(record, where, place)
            for feature, column in zip(self._features, columns, strict=True):
                column.append(feature.values(features, where, place))
        return [
            feature.array(column, records, where)
            for feature, column in zip(self._features, columns, strict=True)
        ]


_Values = tuple[str, Any]
"""The kind of a list, and its values: the bytes in the record, or integers."""


@dataclasses.dataclass(frozen=True)
class _Feature:
    """A requested feature."""

    name: str
    leaf: LeafSpec

    def values(self, features: Any, where: Where, place: int) -> _Values:
        """The feature, from all features of a record."""
        if self.name not in features:
            raise SourceError(
                f"{where(place)}: found the features {sorted(features)}, expected {self.name!r} "
                "among them."
            )
        feature, leaf = features[self.name], self.leaf
        kind = feature.WhichOneof("kind")
        values: Any = getattr(feature, kind).value if kind else ()
        if not _fits(kind, values, leaf):
            raise SourceError(f"{self._at(where, place)}: {_misfit(kind, values, leaf)}")
        if kind == INTS:
            self._check_count(kind, len(values), where, place)
            return kind, np.fromiter(values, np.int64, len(values))
        return kind, values[0] if len(values) == 1 else b"".join(values)

    def array(
        self, column: Sequence[_Values], records: Sequence[bytes], where: Where
    ) -> np.ndarray:
        """The feature of all records."""
        # An integer feature may be an int64_list in one record and a bytes_list in another.
        kinds = {kind for kind, _ in column}
        if len(kinds) < 2:
            return self._of_kind(next(iter(kinds), BYTES), column, records, where)
        parts = []
        for place, (kind, _) in enumerate(column):
            alone = slice(place, place + 1)
            at = functools.partial(lambda first, i: where(first + i), place)
            parts.append(self._of_kind(kind, column[alone], records[alone], at))
        return np.concatenate(parts)

    def _of_kind(
        self, kind: str, column: Sequence[_Values], records: Sequence[bytes], where: Where
    ) -> np.ndarray:
        lists = [values for _, values in column]
        count = math.prod(self.leaf.shape)
        shape = (len(lists), *self.leaf.shape)
        if kind == INTS:
            return self._narrowed(np.concatenate(lists), where).reshape(shape)
        if kind == FLOATS and any(len(values) != 4 * count for values in lists):
            return self._one_by_one(records, where).reshape(shape)
        stored = np.frombuffer(b"".join(lists), self.leaf.dtype.newbyteorder("<"))
        return stored.astype(self.leaf.dtype, copy=False).reshape(shape)

    def _one_by_one(self, records: Sequence[bytes], where: Where) -> np.ndarray:
        """Parses lists of floats again as numbers: some are not packed, or have another length."""
        rows = []
        for place, record in enumerate(records):
            message = _parsed(record, False, where, place)
            values = message.features.feature[self.name].float_list.value
            self._check_count(FLOATS, len(values), where, place)
            rows.append(np.asarray(values, np.float32))
        return np.concatenate(rows)

    def _check_count(self, kind: str, stored: int, where: Where, place: int) -> None:
        count = math.prod(self.leaf.shape)
        if stored != count:
            raise SourceError(
                f"{self._at(where, place)}: found {stored} values in {kind}, expected {count}, of "
                f"{self.leaf}."
            )

    def _narrowed(self, values: np.ndarray, where: Where) -> np.ndarray:
        """Converts the integers of all records to the requested dtype, if they fit."""
        dtype = self.leaf.dtype
        low, high = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
        outside = np.flatnonzero((values < low) | (values > high))
        if len(outside):
            first = int(outside[0])
            raise SourceError(
                f"{self._at(where, first // math.prod(self.leaf.shape))}: found "
                f"{values[first]}, expected {low} to {high} for {self.leaf}."
            )
        return values.astype(dtype)

    def _at(self, where: Where, place: int) -> str:
        return f"{where(place)}, feature {self.name!r}"


def _fits(kind: str | None, values: Any, leaf: LeafSpec) -> bool:
    match kind:
        case "float_list":
            return bool(leaf.dtype == np.float32)
        case "int64_list":
            return leaf.dtype.kind in "iub"
        case "bytes_list":
            return len(values) == 1 and len(values[0]) == leaf.nbytes
    return False


def _misfit(kind: str | None, values: Any, leaf: LeafSpec) -> str:
    if kind == BYTES:
        sizes = ", ".join(str(len(value)) for value in values[:4])
        return (
            f"found {len(values)} values in bytes_list, of {sizes or 0}"
            f"{', ...' if len(values) > 4 else ''} bytes, expected one of {leaf.nbytes} bytes: "
            f"{leaf} as tobytes() of NumPy returns it."
        )
    held = {FLOATS: "float_list, which is for float32", INTS: "int64_list, which is for integers"}
    return f"found {held.get(kind or '', 'no list')}, expected {leaf}."


def infer_features(record: bytes, where: str) -> dict[str, Any]:
    """The types of the features of a record. A list of a single number is a scalar."""
    import jax

    features = _parsed(record, False, lambda _: where, 0).features.feature
    dtypes = {FLOATS: np.float32, INTS: np.int64, BYTES: np.uint8}
    types = {}
    for name in sorted(features):
        kind = features[name].WhichOneof("kind")
        values: Any = getattr(features[name], kind).value if kind else ()
        if not len(values) or (kind == BYTES and len(values) > 1):
            raise SourceError(
                f"{where}, feature {name!r}: found {len(values)} values in {kind or 'no list'}, "
                "from which no type can be inferred; give the types as `features`."
            )
        shape = () if len(values) == 1 else (len(values),)
        shape = (len(values[0]),) if kind == BYTES else shape
        types[name] = jax.ShapeDtypeStruct(shape, jax.dtypes.canonicalize_dtype(dtypes[kind]))
    if not types:
        raise SourceError(f"{where}: found an Example without features, expected one at least.")
    return types


# --- messages


def _features_of(record: bytes, where: Where, place: int) -> Any:
    """The features of a record by name, with floats as bytes."""
    return _parsed(record, True, where, place).features.feature


def _parsed(record: bytes, packed: bool, where: Where, place: int) -> Any:
    from google.protobuf.message import DecodeError

    try:
        return _example_type(packed).FromString(record)
    except DecodeError as error:
        raise SourceError(
            f"{where(place)}: found {len(record)} bytes that are no tf.train.Example ({error})."
        ) from error


@functools.cache
def _example_type(packed: bool) -> Any:
    """The message type `tf.train.Example`; if `packed`, lists of floats are parsed as bytes."""
    # Packed floats have the same bytes in a record as in memory, and `repeated bytes` have the same
    # wire format. The bytes become arrays without a loop over values.
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(
        name="beamjax/example.proto", package="beamjax", syntax="proto3"
    )

    def add(message: Any, name: str, number: int, kind: Any, repeated: bool = False) -> Any:
        label = kinds.LABEL_REPEATED if repeated else kinds.LABEL_OPTIONAL
        named = {"type_name": kind, "type": kinds.TYPE_MESSAGE} if type(kind) is str else {}
        return message.field.add(name=name, number=number, label=label, **(named or {"type": kind}))

    floats = kinds.TYPE_BYTES if packed else kinds.TYPE_FLOAT
    types = {"BytesList": kinds.TYPE_BYTES, "FloatList": floats, "Int64List": kinds.TYPE_INT64}
    for name, kind in types.items():
        add(file.message_type.add(name=name), "value", 1, kind, True)
    feature = file.message_type.add(name="Feature")
    feature.oneof_decl.add(name="kind")
    lists = {BYTES: ".beamjax.BytesList", FLOATS: ".beamjax.FloatList", INTS: ".beamjax.Int64List"}
    for number, (name, kind) in enumerate(lists.items(), 1):
        add(feature, name, number, kind).oneof_index = 0
    features = file.message_type.add(name="Features")
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    add(entry, "key", 1, kinds.TYPE_STRING)
    add(entry, "value", 2, ".beamjax.Feature")
    add(features, "feature", 1, ".beamjax.Features.FeatureEntry", True)
    add(file.message_type.add(name="Example"), "features", 1, ".beamjax.Features")
    # Not the default pool, in which TensorFlow has types of these names.
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("beamjax.Example"))
