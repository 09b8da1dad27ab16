"""Arrays as bytes: every dtype and shape comes back bit for bit, and nothing lying gets in."""

import json
import re
import struct
import tracemalloc
import zlib

import hypothesis
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from beamjax import arrays
from beamjax.errors import ArrayFormatError, BeamjaxError, StructureError
from beamjax.stored_dtypes import _DTYPES, dtype_from_name, dtype_name

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


def same_bits(left, right):
    return (
        left.dtype == right.dtype
        and left.shape == right.shape
        and left.tobytes() == right.tobytes()
    )


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


# ---------------------------------------------------------------- round trips


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype_name(dtype))
def test_round_trip_every_dtype_and_shape(dtype):
    values = [random_bits(dtype, shape, seed) for seed, shape in enumerate(SHAPES)]
    meta = {"name": "x", "nested": {"a": [1, 2.5, None, True]}}
    data = arrays.encode_arrays(values, meta)
    decoded, decoded_meta = arrays.decode_arrays(data)
    assert decoded_meta == meta
    assert len(decoded) == len(values)
    for before, after in zip(values, decoded, strict=True):
        assert same_bits(before, after)
        assert not after.flags.writeable


def test_table_has_every_jax_dtype():
    names = ["bool_", "float16", "bfloat16", "float32", "float64", "complex64", "complex128"]
    names += [f"{sign}int{bits}" for sign in ("", "u") for bits in (2, 4, 8, 16, 32, 64)]
    names += [name for name in vars(jnp) if re.match(r"float\d_|float4|float6", name)]
    for name in names:
        dtype = np.dtype(getattr(jnp, name))
        assert dtype_from_name(dtype_name(dtype)) == dtype
    assert dtype_from_name(dtype_name(jax.dtypes.float0)) == jax.dtypes.float0


@reproducible
@hypothesis.given(
    st.lists(
        st.tuples(
            st.sampled_from(DTYPES), hnp.array_shapes(min_dims=0, min_side=0), st.integers(0, 99)
        ),
        max_size=5,
    ),
    st.dictionaries(st.text(), st.integers() | st.text() | st.booleans() | st.none(), max_size=3),
)
def test_round_trip_property(specs, meta):
    values = [random_bits(*spec) for spec in specs]
    data = arrays.encode_arrays(values, meta)
    decoded, decoded_meta = arrays.decode_arrays(data)
    assert decoded_meta == meta
    assert all(same_bits(*pair) for pair in zip(values, decoded, strict=True))
    assert data == arrays.encode_arrays([value.copy() for value in values], dict(meta))
    assert data == arrays.encode_arrays(decoded, decoded_meta)


@reproducible
@hypothesis.given(hnp.arrays(np.float32, hnp.array_shapes(), elements=st.floats(width=32)))
def test_round_trip_keeps_nan_payloads_and_signs(value):
    assert same_bits(value, arrays.decode_array(arrays.encode_array(value)))


def test_nan_payload_is_kept():
    value = np.array([0x7FC00001, 0xFFC12345, 0x7F800001], np.uint32).view(np.float32)
    assert same_bits(value, arrays.decode_array(arrays.encode_array(value)))


@pytest.mark.parametrize(
    "dtype", [">f4", ">i8", ">c16", ">u2", ">f2", np.dtype(ml_dtypes.bfloat16).newbyteorder(">")]
)
def test_big_endian_is_converted(dtype):
    value = np.arange(6).astype(dtype).reshape(2, 3)
    assert value.dtype.str[0] == ">"
    native = value.astype(value.dtype.newbyteorder("="))
    assert arrays.encode_array(value) == arrays.encode_array(native)
    assert same_bits(arrays.decode_array(arrays.encode_array(value)), native)


def test_layouts_give_the_same_bytes(tmp_path):
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
    assert same_bits(arrays.decode_array(arrays.encode_array(broadcast)), broadcast.copy())


def test_numpy_scalar_is_a_0d_array():
    decoded = arrays.decode_array(arrays.encode_array(np.float32(2.5)))
    assert decoded.shape == ()
    assert decoded == np.float32(2.5)


def test_bytes_do_not_depend_on_the_order_of_meta():
    assert arrays.encode_arrays([], {"a": 1, "b": 2}) == arrays.encode_arrays([], {"b": 2, "a": 1})


def test_bytes_are_pinned():
    data = arrays.encode_arrays([np.array([1, 2], np.int16)], {"k": 1})
    header = b'{"arrays":[{"dtype":"int16","nbytes":4,"offset":128,"shape":[2]}],"meta":{"k":1}}'
    assert data[32:128] == header.ljust(96)
    assert data[128:] == b"\1\0\2\0"
    assert data[:16] == b"\x93BJARR\r\n\1\0\0\0\x60\0\0\0"


def test_payloads_are_aligned():
    values = [random_bits(np.int8, (size,)) for size in (1, 63, 64, 65)]
    offsets = [record["offset"] for record in header_of(arrays.encode_arrays(values))["arrays"]]
    assert all(offset % 64 == 0 for offset in offsets)


@pytest.mark.parametrize("count", [0, 1, 10, 1000])
def test_headers_of_any_length(count):
    values = [np.full(3, index, np.int32) for index in range(count)]
    decoded, _ = arrays.decode_arrays(arrays.encode_arrays(values, {"pad": "x" * count}))
    assert [int(value[0]) for value in decoded] == list(range(count))


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


def test_encoded_size_is_near():
    for count in (1, 20):
        values = [np.zeros((100, index)) for index in range(count)]
        exact = len(arrays.encode_arrays(values))
        assert abs(arrays.encoded_size(values) - exact) <= 256 * count


# ---------------------------------------------------------------- refused on encoding


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.array([object()]), "array 1: dtype object cannot be stored"),
        (np.array(["a"]), "array 1: dtype <U1 cannot be stored"),
        (np.array([b"a"]), r"array 1: dtype \|S1 cannot be stored"),
        (np.zeros(1, "M8[s]"), r"array 1: dtype datetime64\[s\] cannot be stored"),
        (np.zeros(1, [("x", "f4")]), r"array 1: dtype \[\('x', '<f4'\)\] cannot be stored"),
        (np.zeros(1, "V4"), r"array 1: dtype \|V4 cannot be stored"),
        (np.zeros(1, np.longdouble), "array 1: dtype float128 cannot be stored"),
        (np.array(["a"], np.dtypes.StringDType()), r"array 1: dtype StringDType\(\) cannot"),
        (jax.random.key(0), r"array 1: dtype key<fry> cannot.*jax.random.key_data"),
        ([1, 2], "array 1: found list, expected a NumPy or JAX array"),
        (3.0, "array 1: found float, expected a NumPy or JAX array"),
        (np.ma.zeros(2), r"array 1: found MaskedArray.*call .filled\(\) first"),
    ],
)
def test_encode_refuses(value, message):
    with pytest.raises(StructureError, match=message):
        arrays.encode_arrays([np.zeros(2), value])


@pytest.mark.parametrize(
    "meta",
    [{1: 2}, {"a": (1, 2)}, {"a": np.float32(1)}, {"a": float("nan")}, [1], {"a": b""}, "text"],
    ids=repr,
)
def test_encode_refuses_meta_that_json_would_change(meta):
    with pytest.raises(StructureError, match=r"meta of an array buffer: found .* plain JSON"):
        arrays.encode_arrays([], meta)


# ---------------------------------------------------------------- refused on decoding


def test_forged_buffer_is_accepted_when_it_does_not_lie():
    decoded = arrays.decode_array(forge_one())
    assert same_bits(decoded, np.zeros(4, np.float32))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "truncated, found 0 bytes, expected at least 32"),
        (b"\x93BJ", "truncated, found 3 bytes"),
        (b"PK\3\4" * 20, r"bad magic b'PK.*expected b'\\x93BJARR"),
        (forge({}, version=2), "unknown version 2, expected 1"),
        (forge({}, length=1 << 31), "header longer than the data, found 64 bytes, expected at"),
        (forge({}, total=1 << 60), "truncated, found 64 bytes, expected 1152921504606846976"),
        (forge({}, total=63), "trailing bytes, found 64 bytes, expected 63"),
        (forge(b"not json"), "found b'not json.*expected JSON"),
        (forge(b"\xff\xfe"), "expected JSON"),
        (forge(b"[" * 100_000), "expected JSON"),
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
    ],
)
def test_decode_refuses(data, message):
    with pytest.raises(ArrayFormatError, match=message) as info:
        arrays.decode_arrays(data)
    assert isinstance(info.value, BeamjaxError)


def test_decode_refuses_too_many_dimensions():
    record = {"dtype": "float32", "shape": [1] * 65, "offset": 320, "nbytes": 4}
    with pytest.raises(ArrayFormatError, match="found as shape 65 dimensions, expected a list of"):
        arrays.decode_arrays(forge({"arrays": [record], "meta": {}}, bytes(4)))


def test_decode_refuses_overlapping_arrays():
    record = {"dtype": "int8", "shape": [64], "offset": 192, "nbytes": 64}
    data = forge({"arrays": [record, record], "meta": {}}, bytes(64), pad=160)
    with pytest.raises(ArrayFormatError, match=r"array 1.*found offset 192, expected 256"):
        arrays.decode_arrays(data)


def test_lying_header_allocates_nothing():
    data = forge_one(shape=[1 << 40], nbytes=1 << 42)
    tracemalloc.start()
    with pytest.raises(ArrayFormatError, match="outside"):
        arrays.decode_arrays(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000


@pytest.mark.parametrize("count", [0, 2])
def test_decode_array_wants_one(count):
    data = arrays.encode_arrays([np.zeros(1)] * count)
    with pytest.raises(ArrayFormatError, match=f"found {count} arrays, expected one"):
        arrays.decode_array(data)


SAMPLE = arrays.encode_arrays(
    [np.arange(5, dtype=np.float32), np.zeros((0, 3)), np.array(True)], {"name": "x"}
)


@pytest.mark.parametrize("flip", [0x01, 0x80, 0xFF])
def test_any_changed_byte_is_an_error(flip):
    for position in range(len(SAMPLE)):
        broken = bytearray(SAMPLE)
        broken[position] ^= flip
        with pytest.raises(ArrayFormatError):
            arrays.decode_arrays(broken)


def test_any_truncation_or_extension_is_an_error():
    for length in range(len(SAMPLE)):
        with pytest.raises(ArrayFormatError):
            arrays.decode_arrays(SAMPLE[:length])
    with pytest.raises(ArrayFormatError, match="trailing bytes"):
        arrays.decode_arrays(SAMPLE + b"\0")


@reproducible
@hypothesis.given(st.binary(max_size=300))
def test_any_bytes_are_an_error(data):
    for broken in (data, arrays.MAGIC + data, SAMPLE[:32] + data):
        with pytest.raises(ArrayFormatError):
            arrays.decode_arrays(broken)


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
