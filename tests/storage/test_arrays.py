"""Arrays as bytes: every dtype and shape comes back bit for bit, and nothing lying gets in."""

import json
import re
import struct
import subprocess
import sys
import tracemalloc
import zlib

import hypothesis
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers import assert_same_bits
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import beamjax as bj
from beamjax.errors import ArrayFormatError, BeamjaxError, StructureError
from beamjax.runtime.shard_executor import ShardExecutor
from beamjax.sources.arrays.npy_source import map_file
from beamjax.storage import arrays, buffers
from beamjax.storage.arrays import _DTYPES, dtype_from_name, dtype_name

DTYPES = list(_DTYPES.values())
SHAPES = [(), (1,), (0,), (7,), (3, 0, 2), (2, 3, 4), (1,) * 32]

reproducible = hypothesis.settings(deadline=None, derandomize=True)


def random_bits(dtype, shape, seed=0):
    """An array of random bytes, so NaN payloads and padding bits are there too."""
    empty = np.empty(shape, dtype)
    if empty.nbytes == 0:
        return empty
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, empty.nbytes, np.uint8).view(dtype).reshape(shape)


def header_of(data):
    length = struct.unpack_from("<I", data, 12)[0]
    return json.loads(data[32 : 32 + length])


def forge(header, payload=b"", version=1, length=None, total=None, pad=32):
    """A buffer with right checksums and whatever header is asked for."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text = text.ljust(pad)
    length = len(text) if length is None else length
    total = 32 + len(text) + len(payload) if total is None else total
    prefix = struct.pack("<8sHHIQI", arrays.MAGIC, version, 0, length, total, zlib.crc32(payload))
    return prefix + struct.pack("<I", zlib.crc32(text, zlib.crc32(prefix))) + text + payload


def forge_one(payload=bytes(16), **changes):
    record = {"dtype": "float32", "shape": [4], "offset": 192, "nbytes": 16, **changes}
    return forge({"arrays": [record], "meta": {}}, payload, pad=160)


# --- round trips


@pytest.mark.versions
def test_every_dtype_and_shape_comes_back():
    meta = {"name": "x", "nested": {"a": [1, 2.5, None, True]}}
    for dtype in DTYPES:
        values = [random_bits(dtype, shape, seed) for seed, shape in enumerate(SHAPES)]
        decoded, decoded_meta = arrays.decode_arrays(arrays.encode_arrays(values, meta))
        assert decoded_meta == meta
        assert_same_bits(decoded, values)
        assert not any(after.flags.writeable for after in decoded)
    names = ["bool_", "float16", "bfloat16", "float32", "float64", "complex64", "complex128"]
    names += [f"{sign}int{bits}" for sign in ("", "u") for bits in (2, 4, 8, 16, 32, 64)]
    names += [name for name in vars(jnp) if re.match(r"float\d_|float4|float6", name)]
    for dtype in [*(np.dtype(getattr(jnp, name)) for name in names), jax.dtypes.float0]:
        assert dtype_from_name(dtype_name(dtype)) == dtype


SPECS = st.tuples(
    st.sampled_from(DTYPES), hnp.array_shapes(min_dims=0, min_side=0), st.integers(0, 99)
)


@reproducible
@hypothesis.given(
    st.lists(SPECS, max_size=5),
    st.dictionaries(st.text(), st.integers() | st.text() | st.booleans() | st.none(), max_size=3),
    hnp.arrays(np.float32, hnp.array_shapes(), elements=st.floats(width=32)),
)
def test_any_arrays_come_back_with_nan_payloads_and_signs(specs, meta, floats):
    values = [floats, *(random_bits(*spec) for spec in specs)]
    data = arrays.encode_arrays(values, meta)
    decoded, decoded_meta = arrays.decode_arrays(data)
    assert decoded_meta == meta
    assert_same_bits(decoded, values)
    assert data == arrays.encode_arrays([value.copy() for value in values], dict(meta))
    assert data == arrays.encode_arrays(decoded, decoded_meta)


def test_byte_orders_and_layouts_give_the_same_bytes(tmp_path):
    for dtype in (">f4", ">i8", ">c16", ">u2", np.dtype(ml_dtypes.bfloat16).newbyteorder(">")):
        value = np.arange(6).astype(dtype).reshape(2, 3)
        assert value.dtype.str[0] == ">"
        native = value.astype(value.dtype.newbyteorder("="))
        assert arrays.encode_array(value) == arrays.encode_array(native)
        assert_same_bits(arrays.decode_array(arrays.encode_array(value)), native)
    value = np.arange(24, dtype=np.float32).reshape(4, 6)
    np.save(tmp_path / "value.npy", value)
    expected = arrays.encode_array(value)
    wide = np.zeros((8, 12), np.float32)
    wide[::2, ::2] = value
    reverse = value[::-1, ::-1].copy()[::-1, ::-1]
    mapped = np.load(tmp_path / "value.npy", mmap_mode="r")
    for other in (np.asfortranarray(value), wide[::2, ::2], reverse, mapped, jnp.asarray(value)):
        assert arrays.encode_array(other) == expected
    broadcast = np.broadcast_to(np.float32(3), (5, 2))
    assert_same_bits(arrays.decode_array(arrays.encode_array(broadcast)), broadcast.copy())
    scalar = arrays.decode_array(arrays.encode_array(np.float32(2.5)))
    assert (scalar.shape, scalar) == ((), np.float32(2.5))


def test_bytes_are_pinned():
    data = arrays.encode_arrays([np.array([1, 2], np.int16)], {"k": 1})
    header = b'{"arrays":[{"dtype":"int16","nbytes":4,"offset":128,"shape":[2]}],"meta":{"k":1}}'
    assert data[32:128] == header.ljust(96)
    assert data[128:] == b"\1\0\2\0"
    assert data[:16] == b"\x93BJARR\r\n\1\0\0\0\x60\0\0\0"
    assert arrays.encode_arrays([], {"a": 1, "b": 2}) == arrays.encode_arrays([], {"b": 2, "a": 1})


def test_headers_of_any_length_and_payloads_that_are_aligned():
    for count in (0, 1, 10, 1000):
        values = [np.full(3 + index % 64, index % 100, np.int8) for index in range(count)]
        data = arrays.encode_arrays(values, {"pad": "x" * count})
        decoded, _ = arrays.decode_arrays(data)
        assert [each.tobytes() for each in decoded] == [each.tobytes() for each in values]
        assert all(record["offset"] % 64 == 0 for record in header_of(data)["arrays"])
        assert abs(arrays.encoded_size(values) - len(data)) <= 256 * (count + 4)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_decode_copies_nothing(kind):
    data = kind(arrays.encode_array(np.arange(1 << 20, dtype=np.float32)))
    tracemalloc.start()
    decoded = arrays.decode_array(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000
    assert np.shares_memory(decoded, np.frombuffer(data, np.uint8))
    with pytest.raises(ValueError, match="read-only"):
        decoded[0] = 1


# --- refused on encoding


def test_encode_refuses_arrays_and_meta_that_would_change():
    for value, message in [
        (np.array([object()]), "dtype object cannot be stored"),
        (np.array(["a"]), "dtype <U1 cannot be stored"),
        (np.array([b"a"]), r"dtype \|S1 cannot be stored"),
        (np.zeros(1, "M8[s]"), r"dtype datetime64\[s\] cannot be stored"),
        (np.zeros(1, [("x", "f4")]), r"dtype \[\('x', '<f4'\)\] cannot be stored"),
        (np.zeros(1, "V4"), r"dtype \|V4 cannot be stored"),
        (np.zeros(1, np.longdouble), "dtype float128 cannot be stored"),
        (np.array(["a"], np.dtypes.StringDType()), r"dtype StringDType\(\) cannot"),
        (jax.random.key(0), r"dtype key<fry> cannot.*jax.random.key_data"),
        ([1, 2], "found list, expected a NumPy or JAX array"),
        (3.0, "found float, expected a NumPy or JAX array"),
        (np.ma.zeros(2), r"found MaskedArray.*call .filled\(\) first"),
    ]:
        with pytest.raises(StructureError, match=f"array 1: {message}"):
            arrays.encode_arrays([np.zeros(2), value])
    nan = float("nan")
    for meta in ({1: 2}, {"a": (1, 2)}, {"a": np.float32(1)}, {"a": nan}, [1], {"a": b""}, "text"):
        with pytest.raises(StructureError, match=r"meta of an array buffer: found .* plain JSON"):
            arrays.encode_arrays([], meta)


# --- refused on decoding


WIDE = {"dtype": "float32", "shape": [1] * 65, "offset": 320, "nbytes": 4}
TWICE = {"dtype": "int8", "shape": [64], "offset": 192, "nbytes": 64}
REFUSED = [
    (b"", "truncated, found 0 bytes, expected at least 32"),
    (b"\x93BJ", "truncated, found 3 bytes"),
    (b"PK\3\4" * 20, r"bad magic b'PK.*expected b'\\x93BJARR"),
    (forge({}, version=2), "unknown version 2, expected 1"),
    (forge({}, length=1 << 20), "header longer than the data, found 64 bytes, expected at"),
    (forge({}, length=1 << 31), "found a header of 2147483648 bytes, expected at most 16777216"),
    (forge(b'{"a":' * 500 + b"0" + b"}" * 500), "JSON of more than 400 levels"),
    (forge(b"[" * 100_000), "JSON of more than 400 levels"),
    (forge({}, total=1 << 60), "truncated, found 64 bytes, expected 1152921504606846976"),
    (forge({}, total=63), "trailing bytes, found 64 bytes, expected 63"),
    (forge(b"not json"), "found b'not json.*expected JSON"),
    (forge(b"\xff\xfe"), "expected JSON"),
    (forge(b"1" * 10_000), "expected JSON"),
    (forge(b"[1]"), "found list, expected a JSON object"),
    (forge({"arrays": [], "meta": 3}), "expected a list 'arrays' and a dictionary 'meta'"),
    (forge({"arrays": {}, "meta": {}}), "found dict and dict"),
    (forge({}), "found NoneType and NoneType"),
    (forge({"arrays": [3], "meta": {}}), "array 0 of an array buffer: found int, expected"),
    (forge({"arrays": [], "meta": {}}, b"1234"), "4 trailing bytes after the last of 0"),
    (forge_one(bytes(17)), "1 trailing bytes after the last of 1 arrays"),
    (forge_one(bytes(15)), "array 0.*ends at byte 208, outside of the 207 bytes found"),
    (forge_one(dtype="float33"), "array 0.*found the dtype 'float33', expected one of"),
    (forge_one(dtype="object"), "found the dtype 'object'"),
    (forge_one(dtype=["f", 4]), r"found the dtype \['f', 4\]"),
    (forge_one(shape=[-4]), r"found the shape \[-4\], expected sizes from 0"),
    (forge_one(shape=[4.0]), r"found the shape \[4.0\], expected sizes from 0"),
    (forge_one(shape=[True]), r"found the shape \[True\], expected sizes"),
    (forge_one(shape=[1 << 64]), r"found the shape \[18446744073709551616\], expected sizes"),
    (forge_one(shape="4"), "found as shape '4', expected a list"),
    (forge_one(shape=[1 << 40, 1 << 40]), r"found the shape .*expected at most 2\*\*63 - 1"),
    (forge_one(shape=[0, 1 << 62], nbytes=0), r"expected at most 2\*\*63 - 1 bytes"),
    (forge_one(shape=[1 << 40]), "found nbytes 16, expected 4398046511104 for float32"),
    (forge_one(nbytes=12), r"found nbytes 12, expected 16 for float32\[4\]"),
    (forge_one(nbytes=16.0), "found nbytes 16.0, expected 16"),
    (forge_one(nbytes=None), "found nbytes None, expected 16"),
    (forge_one(offset=196), "found offset 196, expected 192"),
    (forge_one(offset=0), "found offset 0, expected 192"),
    (forge_one(offset=-64), "found offset -64, expected 192"),
    (forge_one(offset=1 << 63), "found offset 9223372036854775808, expected 192"),
    (forge_one(shape=[1 << 40], nbytes=1 << 42), "ends at byte .* outside of the 208 bytes"),
    ("text", "found str, expected contiguous bytes"),
    (None, "found NoneType, expected contiguous bytes"),
    (memoryview(bytes(64))[::2], "found memoryview, expected contiguous bytes"),
    (forge({"arrays": [WIDE], "meta": {}}, bytes(4)), "found as shape 65 dimensions, expected a"),
    (forge({"arrays": [TWICE] * 2, "meta": {}}, bytes(64), pad=160), "array 1.*192, expected 256"),
]


def test_decode_refuses_headers_that_lie():
    assert_same_bits(arrays.decode_array(forge_one()), np.zeros(4, np.float32))  # it does not
    for data, message in REFUSED:
        with pytest.raises(ArrayFormatError, match=message):
            arrays.decode_arrays(data)
    assert issubclass(ArrayFormatError, BeamjaxError)
    for count in (0, 2):
        with pytest.raises(ArrayFormatError, match=f"found {count} arrays, expected one"):
            arrays.decode_array(arrays.encode_arrays([np.zeros(1)] * count))


LARGE = """
import resource, sys
from beamjax.errors import ArrayFormatError
from beamjax.storage import files, records
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    records.decode(files.read(sys.argv[1]), "a record")
except ArrayFormatError as error:
    print(error)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def test_a_large_header_is_refused_before_it_is_read(tmp_path):
    path = tmp_path / "large.record"
    path.write_bytes(forge(b'{"arrays":[],"meta":{"x":[' + b"{}," * 20_000_000 + b"0]}}"))
    done = subprocess.run([sys.executable, "-c", LARGE, path], capture_output=True, text=True)
    message, mib = done.stdout.splitlines()
    assert re.search(r"a record: .* header of 600000\d\d bytes, expected at most", message)
    assert int(mib) < 100
    with pytest.raises(StructureError, match=r"the header has .* bytes, expected at most 167"):
        arrays.encode_arrays([], {"x": ["x" * 1000] * 20_000})


SAMPLE = arrays.encode_arrays(
    [np.arange(5, dtype=np.float32), np.zeros((0, 3)), np.array(True)], {"name": "x"}
)


def test_any_changed_byte_truncation_or_extension_is_an_error():
    for position in range(len(SAMPLE)):
        for flip in (0x01, 0x80, 0xFF):
            broken = bytearray(SAMPLE)
            broken[position] ^= flip
            with pytest.raises(ArrayFormatError):
                arrays.decode_arrays(broken)
        with pytest.raises(ArrayFormatError):
            arrays.decode_arrays(SAMPLE[:position])
    with pytest.raises(ArrayFormatError, match="trailing bytes"):
        arrays.decode_arrays(SAMPLE + b"\0")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)


@reproducible
@hypothesis.given(
    st.sampled_from(["dtype", "shape", "offset", "nbytes"]),
    json_values | st.lists(st.integers(), max_size=4) | st.sampled_from(list(_DTYPES)),
    st.integers(0, 64),
)
def test_any_lie_is_an_error_or_harmless(field, value, size):
    """With right checksums, a header may say anything: at worst it describes the bytes there."""
    record = {"dtype": "float32", "shape": [4], "offset": 192, "nbytes": 16, field: value}
    try:
        decoded, _ = arrays.decode_arrays(
            forge({"arrays": [record], "meta": {}}, bytes(size), pad=160)
        )
    except ArrayFormatError:
        return
    assert sum(array.nbytes for array in decoded) <= size


# --- room for arrays that JAX takes as they are


def test_room_is_aligned_and_jax_takes_it_without_a_copy():
    for shape in ((), (3,), (1000, 7), (0, 4)):
        for dtype in ("float32", "int8", "complex128", "bfloat16"):
            room = buffers.empty(shape, np.dtype(dtype))
            assert (room.shape, room.dtype.name) == (shape, dtype)
            assert room.flags.writeable
            assert room.flags.c_contiguous
            assert not room.size or room.ctypes.data % buffers.ALIGNMENT == 0
    room = buffers.empty((1 << 16,), np.dtype(np.float32))
    room[:] = 1
    assert jax.device_put(room).unsafe_buffer_pointer() == room.ctypes.data


@pytest.mark.parametrize("runner", ["local", "DirectRunner"])
def test_shards_of_mapped_files_are_read_where_they_are(runner, tmp_path, monkeypatch):
    @bj.program(clients=None)
    def total(x, y):
        return bj.reduce_sum(bj.map_fn(lambda v, w: jnp.sin(v) * w, (x, y)))

    n, taken = 44, []
    rows = np.arange(n * 16, dtype=np.float32).reshape(n, 16)
    numbers = np.arange(n, dtype=np.float32)
    np.save(tmp_path / "x.npy", rows)
    np.save(tmp_path / "y.npy", numbers)
    real = ShardExecutor._called

    def called(self, call, shard, heads, arrays):
        taken.append((shard, arrays))
        return real(self, call, shard, heads, arrays)

    monkeypatch.setattr(ShardExecutor, "_called", called)
    sources = [bj.from_npy(tmp_path / name) for name in ("x.npy", "y.npy")]
    found = bj.run(total, *sources, runner=runner, options={"shard_size": 16})
    np.testing.assert_allclose(found, (np.sin(rows) * numbers[:, None]).sum(axis=0), rtol=1e-4)
    maps = [map_file(str(tmp_path / name)) for name in ("x.npy", "y.npy")]
    assert sorted(shard.count for shard, _ in taken) == [12, 16, 16]
    for shard, read in taken:
        for array, whole in zip(read, maps, strict=True):
            # The last shard is filled up to the size of the others; those are parts of the file.
            assert np.shares_memory(array, whole) == (shard.count == 16)
            taken_as_it_is = jax.device_put(array).unsafe_buffer_pointer() == array.ctypes.data
            assert taken_as_it_is or shard.count < 16
