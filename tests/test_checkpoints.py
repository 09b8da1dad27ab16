"""Manifests: what was written is read back, and whatever else is there is refused."""

import dataclasses
import itertools
import json
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from beamjax import checkpoints
from beamjax.arrays import decode_arrays, encode_arrays
from beamjax.checkpoints import (
    Array,
    Checkpoint,
    Entry,
    Given,
    Members,
    Rows,
    Scattered,
    Stack,
    Stored,
    decode,
    encode,
)
from beamjax.errors import ArrayFormatError
from beamjax.stored_dtypes import dtype_name

QUICK = settings(deadline=None, derandomize=True, database=None, max_examples=40)
DTYPES = [
    *("bool", "int8", "uint32", "float32", "float64", "complex64", "complex128"),
    ml_dtypes.bfloat16,
]

names = st.text(max_size=12)
counts = st.integers(0, 2**40)
hashes = st.text("0123456789abcdef", min_size=40, max_size=40)
shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)


@st.composite
def arrays(draw):
    dtype, shape = np.dtype(draw(st.sampled_from(DTYPES))), draw(shapes)
    nbytes = int(np.prod(shape)) * dtype.itemsize
    data = draw(st.binary(min_size=nbytes, max_size=nbytes))
    if dtype.kind == "b":
        data = bytes(byte & 1 for byte in data)
    return np.frombuffer(data, dtype).reshape(shape)


@st.composite
def members(draw):
    ends = np.cumsum([0, *draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))]).tolist()
    stem = draw(st.from_regex(r"[A-Za-z0-9_-]{1,9}", fullmatch=True))
    return Members(stem, tuple((a, b - a) for a, b in itertools.pairwise(ends)))


files = st.tuples(hashes.map(lambda text: f"{text}-w.arrays"), counts)
stored = st.builds(
    Stored,
    hashes,
    st.sampled_from(DTYPES).map(lambda dtype: dtype_name(np.dtype(dtype))),
    shapes,
    st.lists(files, max_size=2).map(tuple),
)
server = st.one_of(st.builds(Array, arrays()), stored, st.builds(Given, names))
records = st.recursive(
    st.one_of(server, members(), st.builds(Scattered, server, st.integers(0, 3))),
    lambda inner: st.one_of(
        st.builds(Entry, inner, counts, counts),
        st.builds(Stack, st.lists(inner, max_size=3).map(tuple)),
        st.builds(Rows, server),
    ),
    max_leaves=5,
)
found = st.builds(
    Checkpoint,
    st.dictionaries(names, names, max_size=3),
    st.dictionaries(names, names, max_size=3),
    st.lists(st.tuples(names, counts), max_size=3).map(tuple),
    st.booleans(),
    st.dictionaries(names, records, max_size=3),
    st.dictionaries(names, st.lists(records, max_size=3).map(tuple), max_size=2),
)


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


@QUICK
@given(found)
def test_any_checkpoint_is_read_as_it_was_written(checkpoint):
    data = encode(checkpoint)
    assert plain(decode(data)) == plain(checkpoint)
    assert encode(checkpoint) == data


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


def test_files_of_a_checkpoint():
    assert example().files() == {
        "run-segment-0-placed-0-0-8.members",
        "run-segment-0-placed-0-8-3.members",
        "b" * 40 + "-big.arrays",
        "m-0-11.members",
    }


@QUICK
@given(st.data())
def test_a_flipped_byte_is_detected(data):
    whole = bytearray(encode(example()))
    index = data.draw(st.integers(0, len(whole) - 1))
    whole[index] ^= data.draw(st.integers(1, 255))
    with pytest.raises(ArrayFormatError):
        decode(bytes(whole))


def test_a_truncation_is_detected():
    whole = encode(example())
    for length in range(len(whole)):
        with pytest.raises(ArrayFormatError):
            decode(whole[:length])
    with pytest.raises(ArrayFormatError, match="trailing bytes"):
        decode(whole + b"\0")


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


DEEP = {"given": "a"}
for _ in range(60):
    DEEP = {"entry": 0, "size": 1, "of": DEEP}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("other", "kind"), "found the kind 'other' in format 1, expected 'beamjax checkpoint'"),
        (put(2, "format"), "in format 2, expected"),
        (put([], "values"), r"values: found \[\], expected a dict"),
        (put({"w": 3}, "values"), "value: found 3, expected a dict"),
        (put({"w": {}}, "values"), r"found \[\], expected one of array, stored"),
        (put(9, "values", "w", "array"), "found 9, expected one from 0 to 1"),
        (put(-1, "values", "w", "array"), "found -1, expected one from 0"),
        (put(True, "values", "w", "array"), "found True, expected a int"),
        (put("../../etc/passwd", "values", "z", "members"), "name: found '../../etc/passwd'"),
        (
            put([[0, 8], [9, 3]], "values", "z", "parts"),
            "a file from member 9 on', expected one from",
        ),
        (put([[0, -8]], "values", "z", "parts"), "found -8, expected one from 0"),
        (put([[0]], "values", "z", "parts"), r"found \[0\], expected a list of pairs"),
        (put([["/tmp/x.arrays", 3]], "values", "big", "files"), "name: found '/tmp/x.arrays'"),
        (put("object", "values", "big", "dtype"), "found the dtype 'object'"),
        (put([2**70], "values", "big", "shape"), "expected one from 0 to"),
        (put("a/" * 20, "values", "big", "stored"), "expected one that fits"),
        (put([["loop_0", "3"]], "position"), "found '3', expected a int"),
        (put(1, "finished"), "finished: found 1, expected a bool"),
        (put({"a": 3}, "plan"), "found 3, expected a str"),
        (put(DEEP, "values", "w"), "expected at most 32 levels"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_a_lying_manifest_is_refused(change, message):
    with pytest.raises(ArrayFormatError, match=message):
        decode(lying(change))


@pytest.mark.parametrize(
    "change",
    [
        put([2**40, 2**20], "values", "big", "shape"),
        put([[0, 2**62]], "values", "z", "parts"),
        put([["loop_0", 2**62]], "position"),
        put({"entry": 2**62, "size": 2**62, "of": {"given": "a"}}, "values", "w"),
    ],
)
def test_huge_claims_cost_no_memory(change):
    data = lying(change)
    tracemalloc.start()
    decode(data)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1e6


def test_too_long_manifests_are_refused(monkeypatch):
    data = encode(example())
    monkeypatch.setattr(checkpoints, "MAX_BYTES", len(data) - 1)
    with pytest.raises(ArrayFormatError, match=f"found {len(data)} bytes, expected at most"):
        decode(data)
    with pytest.raises(ArrayFormatError, match="too many small values"):
        encode(example())


@QUICK
@given(st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from("kind format plan inputs position finished values stacks array w".split()),
        inner, max_size=4,
    ),
    max_leaves=12,
))  # fmt: skip
def test_any_json_is_refused_or_read(meta):
    base = {"kind": checkpoints.KIND, "format": 1, "plan": {}, "inputs": {}, "position": []}
    base |= {"finished": False, "values": {}, "stacks": {}}
    data = encode_arrays(
        [np.ones(2)], base | (meta if isinstance(meta, dict) else {"values": meta})
    )
    try:
        read = decode(data)
    except ArrayFormatError:
        return
    assert json.loads(json.dumps(dict(read.plan))) == read.plan
