"""Manifests of checkpoints: they come back as they were, and all else is refused."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest

from beamjax.errors import ArrayFormatError
from beamjax.runtime import checkpoints
from beamjax.runtime.checkpoints import Checkpoint, Given, Members, Pieces, decode, encode
from beamjax.runtime.values import Part, Ref, server
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
    members = Members("run-segment-0-placed-0", ((0, 8), (8, 3)))
    big = Pieces("float32", (3, 4), (("b" * 40 + "-big.arrays", 128),))
    entries = Part(0, 11, Given("a"), (0,)), Part(0, 11, Members("m", ((0, 11),)), (1,), (2, 4))
    kept = {
        "w": server(np.arange(5, dtype=np.float32)),
        "z": Ref("int8", (2,), 11, (Part(0, 11, members),)),
        "big": Ref("float32", (3, 4), None, (Part(0, 1, big),)),
        "x": Ref("float32", (2, 3), 11, entries),
    }
    stacks = {"losses": (server(np.ones((3,), ml_dtypes.bfloat16)),)}
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


def test_a_lying_manifest_is_refused():
    for message, value, *path in (
        ("found the kind 'other' in format 2, expected 'beamjax checkpoint'", "other", "kind"),
        ("in format 1, expected", 1, "format"),
        (r"values: found \[\], expected a dict", [], "values"),
        ("value: found 3, expected a dict", {"w": 3}, "values"),
        ("found the dtype 'object'", "object", "values", "w", "dtype"),
        ("shape: found 3, expected a list", 3, "values", "w", "shape"),
        ("expected one from 0 to", [2**70], "values", "w", "shape"),
        ("number: found '3', expected a int", "3", "values", "z", "n"),
        (r"parts: found \{\}, expected a list", {}, "values", "w", "parts"),
        (r"part: found \['at', 'entry', 'rows'\], expected one of array, pieces", *of("w", {})),
        ("found 9, expected one from 0 to 1", *of("w", {"array": 9})),
        ("found 2, expected one from 0 to 1", *of("w", {"array": 2})),
        ("found -1, expected one from 0", *of("w", {"array": -1})),
        ("found True, expected a int", *of("w", {"array": True})),
        ("name: found '../../etc/passwd'", *of("z", {"members": "../../etc/passwd"})),
        ("file from member 9 on', expected", *of("z", {"members": "m", "parts": [[0, 8], [9, 3]]})),
        ("found -8, expected one from 0", *of("z", {"members": "m", "parts": [[0, -8]]})),
        (r"found \[0\], expected a list of pairs", *of("z", {"members": "m", "parts": [[0]]})),
        ("name: found '/tmp/x.arrays'", *of("big", pieces([["/tmp/x.arrays", 3]]))),
        ("found the dtype 'object'", *of("big", pieces([], "object"))),
        ("expected one from 0 to", *of("big", pieces([], "int8", [2**70]))),
        ("name: found 3, expected a str", *of("w", {"given": 3})),
        ("at most 32", [0] * 60, "values", "x", "parts", 0, "at"),
        ("found '2', expected a int", ["2"], "values", "x", "parts", 1, "entry"),
        ("rows: found None, expected a list of pairs", None, "values", "x", "parts", 0, "rows"),
        ("found '3', expected a int", [["loop_0", "3"]], "position"),
        ("finished: found 1, expected a bool", 1, "finished"),
        ("found 3, expected a str", {"a": 3}, "plan"),
    ):
        with pytest.raises(ArrayFormatError, match=message):
            decode(lying(put(value, *path)))


def of(name, data):
    """Other data of the value of this name, and where it is."""
    head = {"rows": [0, 1], "at": [], "entry": []}
    return [head | data], "values", name, "parts"


def pieces(files, dtype="float32", shape=()):
    return {"pieces": files, "of": [dtype, list(shape)]}
