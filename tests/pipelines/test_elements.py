"""Elements: their bits come back, and encodings are deterministic and small."""

import pickle

import apache_beam as beam
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from apache_beam import coders
from apache_beam.runners.portability.fn_api_runner import FnApiRunner
from apache_beam.testing.util import assert_that
from helpers import assert_same_bits

from beamjax.errors import ArrayFormatError, StructureError
from beamjax.pipelines.values import elements
from beamjax.pipelines.values.elements import (
    ArrayCoder,
    Element,
    ElementCoder,
    block_of,
    stored_part,
)
from beamjax.pipelines.values.refs import StoreRef
from beamjax.pipelines.values.store import Store
from beamjax.storage import arrays as wire

CODER = ElementCoder()
FILE_REF = StoreRef("k" * 40, (("int8", (3, 4)),), files=((f"{'0' * 40}-hint.arrays", 7),))


def block(index=0):
    rng = np.random.default_rng(index)
    values = {
        "x": rng.normal(size=(4, 2, 3)).astype(np.float32),
        "b": rng.normal(size=4).astype(ml_dtypes.bfloat16),
        "none": np.zeros((4, 0)),
    }
    return block_of(index * 4, 4, values)


def inline_ref(index=0):
    return Store("/nowhere").put([np.full((2, 2), float(index)), np.arange(3)])


def server_values(index=0):
    return Element(w=stored_part(inline_ref(index)), big=stored_part(FILE_REF))


SAMPLES = {"block": block(), "server values": server_values()}


def assert_same(found, expected):
    assert found.range == expected.range
    if found.keys() == {"w", "big"}:
        assert found.refs() == expected.refs()
    else:
        assert_same_bits(found.arrays(None), expected.arrays(None))


# --- coders


@pytest.mark.parametrize("value", SAMPLES.values(), ids=SAMPLES)
def test_a_coder(value, monkeypatch):
    coder = coders.registry.get_coder(Element)
    assert coder == CODER
    assert coder.to_type_hint() is Element
    assert coder.is_deterministic()
    assert coder.as_deterministic_coder("step") is coder
    assert pickle.loads(pickle.dumps(coder)) == coder
    assert len(pickle.dumps(coder)) < 200
    data = coder.encode(value)
    assert_same(coder.decode(data), value)
    assert coder.encode(coder.decode(data)) == data
    assert coder.encode(Element(reversed(value.items()))) == data
    with pytest.raises(StructureError, match=rf"{coder!r}: found str, expected "):
        coder.encode("text")
    for position in range(0, len(data), 7):
        broken = bytearray(data)
        broken[position] ^= 16
        with pytest.raises(ArrayFormatError):
            coder.decode(bytes(broken))
    monkeypatch.setattr(wire, "encode_arrays", None)  # Nothing is encoded for an estimate.
    assert abs(coder.estimate_size(value) - len(data)) < 512
    assert coder.get_impl().estimate_size(value) == coder.estimate_size(value)


def test_blocks():
    data = CODER.encode(block())
    decoded = CODER.decode(data)
    assert np.shares_memory(decoded.array("x", None), np.frombuffer(data, np.uint8))
    plain = block_of(0, 2, {"x": np.zeros((2, 3), np.float32)})
    other = block_of(np.int64(0), np.int32(2), {"x": jnp.zeros((2, 3))})
    assert CODER.encode(plain) == CODER.encode(other)
    assert block().nbytes == 4 * 6 * 4 + 4 * 2
    assert CODER.decode(CODER.encode(block_of(8, 3, {}))).range == (8, 3)


def test_what_no_runner_carries():
    huge = block_of(0, 4, {"x": np.broadcast_to(np.int8(0), (4, 2**30))})
    with pytest.raises(StructureError, match=r"Element of 4294\d+ bytes, .*make the shards small"):
        CODER.encode(huge)
    with pytest.raises(StructureError, match="array 0: dtype <U1 cannot be stored"):
        ArrayCoder().encode(np.array(["a"]))


def test_decode_refuses():
    one = lambda *record: {"element": "Element", "parts": [list(record)]}
    for coder, arrays, meta, message in (
        (CODER, [], {}, "ElementCoder: found an element None, expected 'Element'"),
        (CODER, [], {"element": "Other"}, "found an element 'Other', expected 'Element'"),
        (CODER, [], {"element": "Element"}, "which is no Element"),
        (CODER, [], one("x", 0, 1), "which is no Element"),
        (CODER, [np.zeros(2)], one("x", 0, 1), "no Element .*the part 'x' of 1 members"),
        (CODER, [np.zeros(())], one("x", 0, 1), "no Element .*the part 'x' of 1 members"),
        (CODER, [np.zeros(1)], one("x", "a", 1), "no Element .*have no names or ranges"),
        (CODER, [np.zeros(1)], one("x", True, 1), "no Element .*have no names or ranges"),
        (CODER, [np.zeros(1)], one(3, 0, 1), "no Element .*have no names or ranges"),
        (CODER, [np.zeros(4)], one("x", -4, 4), "no Element .*a part of 4 members begins at -4"),
        (CODER, [np.zeros(0)], one("x", 0, -1), "no Element .*a part of -1 members begins at 0"),
        (
            CODER,
            [np.zeros(0, np.uint8)],
            one("w", 0, 1, {}),
            "reference to a stored value: found {}",
        ),
        (ArrayCoder(), [], {"element": "ndarray"}, "which is no ndarray"),
    ):
        with pytest.raises(ArrayFormatError, match=message):
            coder.decode(wire.encode_arrays(arrays, meta))


def test_arrays_of_users_have_a_coder_once_registered(monkeypatch):
    coder, value = ArrayCoder(), np.asfortranarray(np.arange(6.0).reshape(2, 3))
    assert_same_bits(coder.decode(coder.encode(value)), value)
    assert coder.encode(value) == coder.encode(value.copy())
    assert coders.registry.get_coder(np.ndarray) != coder, "a user's pipelines are left alone"
    # The registry is that of the process.
    monkeypatch.setattr(coders.registry, "_coders", dict(coders.registry._coders))
    monkeypatch.setattr(coders.registry, "custom_types", list(coders.registry.custom_types))
    elements.register_array_coder()
    assert coders.registry.get_coder(np.ndarray) == coder
    with beam.Pipeline(runner=FnApiRunner()) as p:
        make = beam.Map(lambda i: np.full((2, 2), i, np.float32)).with_output_types(np.ndarray)
        values = p | beam.Create(range(3)) | make | beam.Reshuffle()
        read_only = values | beam.Map(lambda array: bool(array.flags.writeable))
        assert_that(read_only, lambda found: found == [False] * 3 or pytest.fail(str(found)))
