"""Fingerprints of plans and inputs: runs with equal ones run the same plan on the same inputs.

They depend neither on the process nor on where in a file the user's functions are.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from jax import export

from beamjax.bodies.load import raw_array
from beamjax.options import Options
from beamjax.plan.steps import Body, Plan
from beamjax.runtime.inputs import Inputs
from beamjax.sources.array_source import ArraySource
from beamjax.sources.arrays.data_files import FileHashes
from beamjax.sources.arrays.npy_writing import blocks_in_order
from beamjax.sources.source_base import Source, spec_of
from beamjax.sources.source_kinds import DerivedSource, FileSource, buckets_of

Fingerprint = dict[str, str]
"""Short texts or hashes, by names that messages use."""

_FOR_PEOPLE = ("line", "lines", "reason", "functions", "loop_reason", "vectorization")
"""Fields of a plan that only explain it."""
_LOCATION = re.compile(r'^#loc.*\n?| loc\((?:"(?:[^"\\]|\\.)*"|[#\w]+)\)', re.M)
"""Locations in the user's code, as MLIR prints them."""
_BLOCK_BYTES = 1 << 24
"""Bytes of an array that are hashed, and if need be copied, at a time."""


def plan_fingerprint(plan: Plan, options: Options) -> Fingerprint:
    """The fingerprint of a plan, and of the options that affect how it runs."""
    # It includes where functions on the host are called, but not what these functions do.
    bodies = {key: body_fingerprint(body) for key, body in plan.bodies.items()}
    types = {name: str(value) for name, value in sorted(plan.values.items())}
    inputs = [value._replace(path="") for value in plan.inputs]
    steps = _plain((plan.steps, plan.outputs, inputs), bodies)
    sizes = {f"the size of placement {name!r}": str(n) for name, n in plan.sizes.items()}
    shards = {f"the shard size of {name!r}": str(n) for name, n in plan.shard_sizes.items()}
    return {
        **sizes,
        **shards,
        **cuts_fingerprint(plan),
        "the option reduction": options.reduction,
        "jax_enable_x64": str(plan.x64),
        "the version of JAX": plan.jax_version,
        "the types of its values": digest(types),
        "its steps": digest(_without_bodies(steps)),
        "what its steps compute": digest(steps),
    }


def cuts_fingerprint(plan: Plan) -> Fingerprint:
    """The part of the fingerprint of a plan that says where its shards are cut at files."""
    return {cuts_key(name): digest(at) for name, at in plan.file_starts.items()}


def cuts_key(placement: str) -> str:
    """The key in `cuts_fingerprint` of a placement."""
    return f"the files of {placement!r}"


def input_fingerprints(inputs: Inputs, hashes: FileHashes | None = None) -> Fingerprint:
    """The fingerprint of each input that steps read, by its number."""
    # Arrays and files are compared by their content, other sources by their specs. `hashes` are
    # known hashes of files, to which new ones are added.
    hashes = FileHashes() if hashes is None else hashes
    # By number, since a parameter may get another name between two runs.
    by_number = {}
    for i, (value, spec) in enumerate(zip(inputs.values, inputs.plan.inputs, strict=True)):
        if spec.server is None and spec.placed is None and not spec.views:
            continue
        if isinstance(value, tuple):
            source, leaf = value
            by_number[input_key(i)] = _source_leaf(source, leaf, hashes)
        else:
            by_number[input_key(i)] = array_fingerprint(raw_array(value))
    return by_number


def input_key(number: int) -> str:
    """The key in `input_fingerprints` of an input."""
    return f"input {number}"


def differences(now: Mapping[str, str], expected: Mapping[str, str]) -> list[str]:
    """The names under which two fingerprints differ, with both texts if they are short."""
    names = [name for name in {**now, **expected} if now.get(name) != expected.get(name)]
    texts = []
    for name in names:
        pair = expected.get(name, "missing"), now.get(name, "missing")
        short = all(len(text) < 40 and not text.startswith("#") for text in pair)
        texts.append(f"{name} ({pair[0]} there, {pair[1]} now)" if short else name)
    return texts


def source_fingerprint(source: Source) -> str:
    """The fingerprint of all leaves of a source. Files are compared by path, size and mtime."""
    return digest([_source_leaf(source, leaf) for leaf in range(len(source.leaves))])


def _source_leaf(source: Source, leaf: int, hashes: FileHashes | None = None) -> str:
    if isinstance(source, ArraySource):
        return array_fingerprint(source.read(0, len(source))[leaf])
    if isinstance(source, DerivedSource):
        inner = [_source_leaf(s, i, hashes) for s in source.inner for i in range(len(s.leaves))]
        leaves = [leaf_spec.to_json() for leaf_spec in source.leaves]
        name = type(source).__name__
        return digest([name, len(source), buckets_of(source), leaves, leaf, inner])
    if source.spec() is None:
        return digest([array_fingerprint(arrays[leaf]) for arrays in blocks_in_order(source)])
    if hashes is not None:
        identity, files = spec_of(source), list[str]()
        if isinstance(source, FileSource):
            identity, files = source.identity()
        return digest([identity, leaf, hashes.of(files)])
    spec: dict[str, Any] = {"spec": spec_of(source), "leaf": leaf}
    paths = getattr(source, "files", ())
    status = [os.stat(path) for path in paths if os.path.exists(path)]
    spec["files"] = [(stat.st_size, stat.st_mtime_ns) for stat in status]
    return digest(spec)


def array_fingerprint(array: np.ndarray) -> str:
    """A hash of dtype, shape and content. At most `_BLOCK_BYTES` of the array are copied."""
    content = hashlib.blake2b(f"{array.dtype.name}{array.shape}".encode(), digest_size=16)
    rows = max(1, _BLOCK_BYTES // max(array[:1].nbytes, 1)) if array.ndim else 1
    blocks = (array[i : i + rows] for i in range(0, len(array), rows)) if array.ndim else [array]
    for block in blocks:
        if block.nbytes:
            native = np.ascontiguousarray(block, block.dtype.newbyteorder("="))
            content.update(native.reshape(-1).view(np.uint8).data)
    return f"#{content.hexdigest()}"


def body_fingerprint(body: Body) -> str:
    """The fingerprint of a body. It does not depend on line numbers of the user's code."""
    if body.python is not None:
        return f"python {body.python.fingerprint}"
    artefacts = {name: _stable_hlo(data) for name, data in sorted(body.artefacts.items())}
    return digest([artefacts, body.narrow])


def _stable_hlo(data: bytes) -> str:
    """A hash of the StableHLO of an artefact, without the locations in the user's code."""
    try:
        text = export.deserialize(bytearray(data)).mlir_module()
    except Exception:  # JAX raises errors of many types for artefacts of other versions
        return digest(data.hex())
    return digest(_LOCATION.sub("", text))


def _plain(value: Any, bodies: Mapping[str, str]) -> Any:
    """Dataclasses as JSON, without `_FOR_PEOPLE`; fingerprints of bodies replace their keys."""
    if isinstance(value, np.ndarray):
        return array_fingerprint(value)
    if dataclasses.is_dataclass(value):
        names = [f.name for f in dataclasses.fields(value) if f.name not in _FOR_PEOPLE]
        parts = {name: _plain(getattr(value, name), bodies) for name in names}
        return {"": type(value).__name__, **parts}
    if isinstance(value, list | tuple):
        return [_plain(part, bodies) for part in value]
    if isinstance(value, str):
        return f"body {bodies[value]}" if value in bodies else value
    return value


def _without_bodies(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {k: v for k, v in value.items() if k not in ("body", "short_body")}
        return {k: _without_bodies(v) for k, v in kept.items()}
    if isinstance(value, list):
        return [_without_bodies(part) for part in value]
    return value


def digest(value: Any) -> str:
    """A hash of plain values, as `json` writes them."""
    text = json.dumps(value, sort_keys=True, default=str)
    return f"#{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}"
