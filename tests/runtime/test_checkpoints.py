"""Manifests of checkpoints: they come back as they were, and all else is refused."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest

from beamjax.errors import ArrayFormatError
from beamjax.runtime import checkpoints
from beamjax.runtime.checkpoints import (
    Array,
    Checkpoint,
    Entry,
    Given,
    Members,
    Rows,
    Stack,
    Stored,
    decode,
    encode,
)
from beamjax.storage.arrays import decode_arrays, encode_arrays


def plain(value):
    """A checkpoint as plain values that can be compared, bits of arrays included."""
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return type(value).__name__, *(plain(getattr(value, f.name)) for f in fields)
    if isinstance(value, dict):
        return {name: plain(part) for name, part in value.items()}
    if isinstance(value, tuple):
        return tuple(map(plain, value))
    return value


def example():
    kept = {
        "w": Array(np.arange(5, dtype=np.float32)),
        "z": Members("run-segment-0-placed-0", ((0, 8), (8, 3))),
        "big": Stored("a" * 40, "float32", (3, 4), (("b" * 40 + "-big.arrays", 128),)),
        "x": Stack((Given("a"), Entry(Members("m", ((0, 11),)), 2, 4))),
    }
    stacks = {"losses": (Rows(Array(np.ones((3,), ml_dtypes.bfloat16))),)}
    position = (("loop_0", 3), ("branch_0", 1), ("loop_1", 0))
    return Checkpoint({"its steps": "#1"}, {"args[0]": "#2"}, position, False, kept, stacks)


def test_manifests_that_are_too_long_are_refused(monkeypatch):
    """Changed and missing bytes are refused by `decode_arrays`, see `test_arrays`."""
    whole = encode(example())
    with pytest.raises(ArrayFormatError, match="trailing bytes"):
        decode(whole + b"\0")
    monkeypatch.setattr(checkpoints, "MAX_BYTES", len(whole))
    assert plain(decode(whole)) == plain(example())
    assert encode(example()) == whole
    monkeypatch.setattr(checkpoints, "MAX_BYTES", len(whole) - 1)
    with pytest.raises(ArrayFormatError, match=f"found {len(whole)} bytes, expected at most"):
        decode(whole)
    with pytest.raises(ArrayFormatError, match="too many small values"):
        encode(example())


def lying(change):
    """The example with one thing changed, and right checksums."""
    found, meta = decode_arrays(encode(example()))
    change(meta)
    return encode_arrays(found, meta)


def put(value, *path):
    def change(meta):
        for part in path[:-1]:
            meta = meta[part]
        meta[path[-1]] = value

    return change


def nested(levels):
    value = {"given": "a"}
    for _ in range(levels - 1):
        value = {"entry": 0, "size": 1, "of": value}
    return value


def test_a_lying_manifest_is_refused():
    for message, value, *path in (
        ("found the kind 'other' in format 1, expected 'beamjax checkpoint'", "other", "kind"),
        ("in format 2, expected", 2, "format"),
        (r"values: found \[\], expected a dict", [], "values"),
        ("value: found 3, expected a dict", {"w": 3}, "values"),
        (r"found \[\], expected one of array, stored", {"w": {}}, "values"),
        ("found 9, expected one from 0 to 1", 9, "values", "w", "array"),
        ("found 2, expected one from 0 to 1", 2, "values", "w", "array"),
        ("found -1, expected one from 0", -1, "values", "w", "array"),
        ("found True, expected a int", True, "values", "w", "array"),
        ("name: found '../../etc/passwd'", "../../etc/passwd", "values", "z", "members"),
        ("file from member 9 on', expected", [[0, 8], [9, 3]], "values", "z", "parts"),
        ("found -8, expected one from 0", [[0, -8]], "values", "z", "parts"),
        (r"found \[0\], expected a list of pairs", [[0]], "values", "z", "parts"),
        ("name: found '/tmp/x.arrays'", [["/tmp/x.arrays", 3]], "values", "big", "files"),
        ("found the dtype 'object'", "object", "values", "big", "dtype"),
        ("expected one from 0 to", [2**70], "values", "big", "shape"),
        ("expected one that fits", "a/" * 20, "values", "big", "stored"),
        ("found '3', expected a int", [["loop_0", "3"]], "position"),
        ("finished: found 1, expected a bool", 1, "finished"),
        ("found 3, expected a str", {"a": 3}, "plan"),
        ("expected at most 32 levels", nested(60), "values", "w"),
    ):
        with pytest.raises(ArrayFormatError, match=message):
            decode(lying(put(value, *path)))
