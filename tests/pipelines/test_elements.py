"""Elements: their bits come back, and encodings are deterministic and small."""

import dataclasses
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
    Environment,
    EnvironmentCoder,
    MemberBlock,
    MemberBlockCoder,
)
from beamjax.pipelines.values.refs import StoreRef
from beamjax.pipelines.values.store import Store
from beamjax.storage import arrays as wire

CODERS = {MemberBlock: MemberBlockCoder(), Environment: EnvironmentCoder()}
FILE_REF = StoreRef("k" * 40, (("int8", (3, 4)),), files=((f"{'0' * 40}-hint.arrays", 7),))


def block(index=0):
    rng = np.random.default_rng(index)
    values = {
        "x": rng.normal(size=(4, 2, 3)).astype(np.float32),
        "b": rng.normal(size=4).astype(ml_dtypes.bfloat16),
        "none": np.zeros((4, 0)),
    }
    return MemberBlock(index * 4, 4, 4, values)


def inline_ref(index=0):
    return Store("/nowhere").put([np.full((2, 2), float(index)), np.arange(3)])


def environment(index=0):
    return Environment({"w": inline_ref(index), "big": FILE_REF})


SAMPLES = [block(), environment()]


def assert_same(found, expected):
    if isinstance(found, MemberBlock):
        head = lambda block: (block.start, block.count, block.shard_size)
        assert head(found) == head(expected)
        assert_same_bits(found.values, expected.values)
    else:
        assert found == expected


# --- coders


@pytest.mark.parametrize("value", SAMPLES, ids=lambda value: type(value).__name__)
def test_a_coder(value, monkeypatch):
    coder = coders.registry.get_coder(type(value))
    assert coder == CODERS[type(value)]
    assert coder.to_type_hint() is type(value)
    assert coder.is_deterministic()
    assert coder.as_deterministic_coder("step") is coder
    assert pickle.loads(pickle.dumps(coder)) == coder
    assert len(pickle.dumps(coder)) < 200
    data = coder.encode(value)
    assert_same(coder.decode(data), value)
    assert coder.encode(coder.decode(data)) == data
    backwards = dict(reversed(value.values.items()))
    assert coder.encode(dataclasses.replace(value, values=backwards)) == data
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
    data = MemberBlockCoder().encode(block())
    decoded = MemberBlockCoder().decode(data)
    assert np.shares_memory(decoded.values["x"], np.frombuffer(data, np.uint8))
    plain = MemberBlock(0, 2, 2, {"x": np.zeros((2, 3), np.float32)})
    other = MemberBlock(np.int64(0), np.int32(2), np.uint8(2), {"x": jnp.zeros((2, 3))})
    assert MemberBlockCoder().encode(plain) == MemberBlockCoder().encode(other)
    assert block().nbytes == 4 * 6 * 4 + 4 * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-4, 4, 4, {}), "member -4: found 4 members, expected from 1 to the shard size 4"),
        ((0, 0, 4, {}), "member 0: found 0 members, expected from 1 to the shard size 4"),
        ((8, 5, 4, {}), "member 8: found 5 members, expected from 1 to the shard size 4"),
        ((4, 3, 4, {"x": np.zeros((4, 2))}), r"member 4, value 'x': .*\(4, 2\), expected \(3, "),
        ((4, 3, 4, {"x": np.zeros(())}), r"value 'x': found the shape \(\), expected \(3, "),
    ],
)
def test_block_refuses(arguments, message):
    with pytest.raises(StructureError, match=message):
        MemberBlock(*arguments)


def test_what_no_runner_carries():
    huge = MemberBlock(0, 4, 4, {"x": np.broadcast_to(np.int8(0), (4, 2**30))})
    with pytest.raises(
        StructureError, match=r"MemberBlock of 4294\d+ bytes, .*make the shards small"
    ):
        MemberBlockCoder().encode(huge)
    with pytest.raises(StructureError, match="array 0: dtype <U1 cannot be stored"):
        ArrayCoder().encode(np.array(["a"]))


def test_decode_refuses():
    head = {"element": "MemberBlock", "block": [0, 1, 1], "names": ["x"]}
    for coder, arrays, meta, message in (
        (
            MemberBlockCoder(),
            [],
            {},
            "MemberBlockCoder: found an element None, expected 'MemberBlock'",
        ),
        (
            MemberBlockCoder(),
            [],
            {"element": "Other"},
            "found an element 'Other', expected 'MemberBlock'",
        ),
        (MemberBlockCoder(), [], {"element": "MemberBlock"}, "which is no MemberBlock"),
        (MemberBlockCoder(), [], head, "which is no MemberBlock"),
        (MemberBlockCoder(), [np.zeros(2)], head, "no MemberBlock .*block at member 0, value 'x'"),
        (MemberBlockCoder(), [], {**head, "block": ["a", 1, 1], "names": []}, "no MemberBlock"),
        (
            EnvironmentCoder(),
            [np.zeros(0, np.uint8)],
            {"element": "Environment", "names": ["w"], "refs": [{}]},
            "reference to a stored value: found {}",
        ),
        (EnvironmentCoder(), [], {"element": "Environment"}, "no Environment"),
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
