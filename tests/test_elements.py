"""Elements: bits survive every shuffle, encodings are deterministic, and nothing is pickled."""

import dataclasses
import pickle

import apache_beam as beam
import hypothesis
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from apache_beam import coders
from apache_beam.runners.portability.fn_api_runner import FnApiRunner
from apache_beam.testing.util import assert_that
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from beamjax import arrays as wire
from beamjax.errors import ArrayFormatError, StructureError
from beamjax.pipelines import elements
from beamjax.pipelines.elements import (
    ArrayCoder,
    Block,
    BlockCoder,
    Environment,
    EnvironmentCoder,
    Partial,
    RefCoder,
)
from beamjax.pipelines.refs import Ref
from beamjax.pipelines.store import Store
from beamjax.stored_dtypes import _DTYPES

CODERS = {Block: BlockCoder(), Ref: RefCoder(), Environment: EnvironmentCoder()}
FILE_REF = Ref("k" * 40, (("int8", (3, 4)),), files=((f"{'0' * 40}-hint.arrays", 7),))


def block(index=0, shard_size=4, count=None):
    count = shard_size if count is None else count
    rng = np.random.default_rng(index)
    return Block(
        index * shard_size,
        count,
        shard_size,
        {
            "x": rng.normal(size=(count, 2, 3)).astype(np.float32),
            "b": rng.normal(size=(count,)).astype(ml_dtypes.bfloat16),
            "none": np.zeros((count, 0)),
        },
    )


def inline_ref(value=0.0):
    return Store("/nowhere").put([np.full((2, 2), value), np.arange(3)])


def samples():
    return [block(), inline_ref(), FILE_REF, Environment({"w": inline_ref(), "big": FILE_REF})]


def same(left, right):
    if isinstance(left, Block):
        fields = ("start", "count", "shard_size")
        return (
            all(getattr(left, name) == getattr(right, name) for name in fields)
            and left.values.keys() == right.values.keys()
            and all(same(left.values[name], right.values[name]) for name in left.values)
        )
    if isinstance(left, np.ndarray):
        return (left.dtype, left.shape, left.tobytes()) == (
            right.dtype,
            right.shape,
            right.tobytes(),
        )
    return left == right


# ---------------------------------------------------------------- coders


@pytest.mark.parametrize("value", samples(), ids=lambda value: type(value).__name__)
def test_round_trip_and_registration(value):
    coder = coders.registry.get_coder(type(value))
    assert coder == CODERS[type(value)]
    assert coder.to_type_hint() is type(value)
    assert same(coder.decode(coder.encode(value)), value)
    assert coder.is_deterministic()
    assert coder.as_deterministic_coder("step") is coder
    assert pickle.loads(pickle.dumps(coder)) == coder
    assert len(pickle.dumps(coder)) < 200


@pytest.mark.parametrize("value", samples(), ids=lambda value: type(value).__name__)
def test_encoding_is_deterministic(value):
    coder = CODERS[type(value)]
    data = coder.encode(value)
    assert coder.encode(coder.decode(data)) == data
    if isinstance(value, Block):
        reverse = {name: value.values[name].copy() for name in reversed(value.values)}
        assert coder.encode(dataclasses.replace(value, values=reverse)) == data
    if isinstance(value, Environment):
        assert coder.encode(Environment(dict(reversed(value.values.items())))) == data


@pytest.mark.parametrize("value", samples(), ids=lambda value: type(value).__name__)
def test_size_is_estimated_without_encoding(value, monkeypatch):
    coder = CODERS[type(value)]
    exact = len(coder.encode(value))
    monkeypatch.setattr(wire, "encode_arrays", None)
    assert abs(coder.estimate_size(value) - exact) < 512
    assert coder.get_impl().estimate_size(value) == coder.estimate_size(value)


@hypothesis.settings(deadline=None, derandomize=True, max_examples=50)
@hypothesis.given(
    st.integers(1, 5),
    st.dictionaries(
        st.text(),
        st.tuples(st.sampled_from(list(_DTYPES.values())), hnp.array_shapes(min_dims=0)),
        max_size=4,
    ),
)
def test_any_block_comes_back(count, specs):
    values = {}
    for name, (dtype, shape) in specs.items():
        value = np.empty((count, *shape), dtype)
        if value.nbytes:
            raw = np.random.default_rng(count).integers(0, 256, value.nbytes, np.uint8)
            value = raw.view(dtype).reshape(value.shape)
        values[name] = value
    before = Block(8, count, 8, values)
    after = BlockCoder().decode(BlockCoder().encode(before))
    assert same(before, after)
    assert all(not value.flags.writeable for value in after.values.values())


def test_decoded_arrays_are_views():
    data = BlockCoder().encode(block())
    decoded = BlockCoder().decode(data)
    assert np.shares_memory(decoded.values["x"], np.frombuffer(data, np.uint8))


def test_numpy_integers_and_jax_arrays_are_taken():
    plain = Block(0, 2, 2, {"x": np.zeros((2, 3), np.float32)})
    other = Block(np.int64(0), np.int32(2), np.uint8(2), {"x": jnp.zeros((2, 3))})
    assert BlockCoder().encode(plain) == BlockCoder().encode(other)
    assert block().nbytes == 4 * 6 * 4 + 4 * 2


def test_array_coder():
    coder = ArrayCoder()
    value = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    assert same(coder.decode(coder.encode(value)), value)
    assert coder.encode(value) == coder.encode(value.copy())
    assert coders.registry.get_coder(np.ndarray) != coder, "a user's pipelines are left alone"


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (-4, 4, 4, {}),
            "block at member -4: found 4 members, expected from 1 to the shard size 4",
        ),
        ((0, 0, 4, {}), "block at member 0: found 0 members, expected from 1 to the shard size 4"),
        ((8, 5, 4, {}), "block at member 8: found 5 members, expected from 1 to the shard size 4"),
        (
            (4, 3, 4, {"x": np.zeros((4, 2))}),
            r"block at member 4, value 'x': found the shape \(4, 2\), expected \(3, \.\.\.\)",
        ),
        (
            (4, 3, 4, {"x": np.zeros(())}),
            r"value 'x': found the shape \(\), expected \(3, \.\.\.\)",
        ),
    ],
)
def test_block_refuses(arguments, message):
    with pytest.raises(StructureError, match=message):
        Block(*arguments)


@pytest.mark.parametrize("coder", CODERS.values(), ids=repr)
def test_encode_refuses_other_types(coder):
    with pytest.raises(StructureError, match=rf"{coder!r}: found str, expected .*the type hint of"):
        coder.encode("text")


def test_encode_refuses_what_no_runner_carries():
    huge = Block(0, 4, 4, {"x": np.broadcast_to(np.int8(0), (4, 2**30))})
    with pytest.raises(
        StructureError, match=r"BlockCoder: found a Block of 4294\d+ bytes, .*make the shards small"
    ):
        BlockCoder().encode(huge)


def test_encode_refuses_strings():
    with pytest.raises(StructureError, match="array 0: dtype <U1 cannot be stored"):
        ArrayCoder().encode(np.array(["a"]))


@pytest.mark.parametrize(
    ("coder", "arrays", "meta", "message"),
    [
        (BlockCoder(), [], {}, "BlockCoder: found an element None, expected 'Block'"),
        (BlockCoder(), [], {"element": "Ref"}, "found an element 'Ref', expected 'Block'"),
        (BlockCoder(), [], {"element": "Block"}, r"0 arrays .*which is no Block \(KeyError"),
        (
            BlockCoder(),
            [],
            {"element": "Block", "block": [0, 1, 1], "names": ["x"]},
            r"which is no Block \(ValueError",
        ),
        (
            BlockCoder(),
            [np.zeros(2)],
            {"element": "Block", "block": [0, 1, 1], "names": ["x"]},
            r"which is no Block \(StructureError: block at member 0, value 'x'",
        ),
        (
            BlockCoder(),
            [],
            {"element": "Block", "block": ["a", 1, 1], "names": []},
            r"no Block \(Type",
        ),
        (RefCoder(), [], {"element": "Ref", "ref": {}}, r"which is no Ref \(ValueError"),
        (
            RefCoder(),
            [np.zeros(0, np.uint8)],
            {"element": "Ref", "ref": {}},
            "RefCoder: .*reference to a stored value",
        ),
        (EnvironmentCoder(), [], {"element": "Environment"}, r"no Environment \(KeyError"),
        (ArrayCoder(), [], {"element": "ndarray"}, r"which is no ndarray \(ValueError"),
    ],
)
def test_decode_refuses(coder, arrays, meta, message):
    with pytest.raises(ArrayFormatError, match=message):
        coder.decode(wire.encode_arrays(arrays, meta))


@pytest.mark.parametrize("coder", CODERS.values(), ids=repr)
def test_decode_refuses_corrupt_bytes(coder):
    (value, *_) = [value for value in samples() if CODERS[type(value)] is coder]
    data = bytearray(coder.encode(value))
    for position in range(0, len(data), 7):
        broken = data.copy()
        broken[position] ^= 16
        with pytest.raises(ArrayFormatError):
            coder.decode(bytes(broken))


# ---------------------------------------------------------------- pipelines


def run(build):
    with beam.Pipeline(runner=FnApiRunner()) as pipeline:
        build(pipeline)


def made(pipeline, type_hint, make, count=3):
    return (
        pipeline
        | "Numbers" >> beam.Create(range(count))
        | "Make" >> beam.Map(make).with_output_types(type_hint)
    )


def environment(index):
    return Environment({"w": inline_ref(float(index)), "big": FILE_REF})


MAKERS = [(Block, block), (Ref, inline_ref), (Environment, environment)]
each_element = pytest.mark.parametrize(
    ("type_hint", "make"), MAKERS, ids=[kind.__name__ for kind, _ in MAKERS]
)


@pytest.fixture
def no_pickle(monkeypatch):
    """Makes pickling of any element an error."""

    def refuse(self, *args):
        raise AssertionError(f"{type(self).__name__} was pickled")

    for kind in (Block, Ref, Environment):
        monkeypatch.setattr(kind, "__reduce_ex__", refuse)


def _run_and_compare(type_hint, make, transform):
    """Compares inside of the pipeline, as digests: a result that is printed would be pickled."""
    coder = CODERS[type_hint]

    def build(pipeline):
        values = made(pipeline, type_hint, make)
        digests = transform(values) | "Digest" >> beam.Map(lambda value: coder.encode(value).hex())
        assert_that(digests, check)

    def check(found):
        assert sorted(found) == sorted(coder.encode(make(index)).hex() for index in range(3))

    run(build)


def test_pickling_would_be_noticed(no_pickle):
    """Without its type hint, Beam's fallback coder pickles an element; the tests below see that."""

    def build(pipeline):
        pipeline | beam.Create([0]) | beam.Map(block).with_output_types(object) | beam.Reshuffle()

    with pytest.raises(Exception, match="Block was pickled"):
        run(build)


@each_element
def test_elements_survive_reshuffle(type_hint, make, no_pickle):
    _run_and_compare(type_hint, make, lambda values: values | beam.Reshuffle())


@each_element
def test_elements_survive_group_by_key(type_hint, make, no_pickle):
    _run_and_compare(
        type_hint,
        make,
        lambda values: (
            values
            | beam.Map(lambda value: ("key", value)).with_output_types(tuple[str, type_hint])
            | beam.GroupByKey()
            | beam.FlatMap(lambda group: group[1]).with_output_types(type_hint)
        ),
    )


@each_element
def test_elements_are_keys(type_hint, make, no_pickle):
    _run_and_compare(
        type_hint,
        make,
        lambda values: (
            (values, values)
            | beam.Flatten()
            | beam.Map(lambda value: (value, 1)).with_output_types(tuple[type_hint, int])
            | beam.GroupByKey()
            | beam.Map(lambda group: group[0]).with_output_types(type_hint)
        ),
    )


@each_element
@pytest.mark.parametrize("view", [beam.pvalue.AsList, beam.pvalue.AsIter])
def test_elements_survive_side_inputs(type_hint, make, view, no_pickle):
    def transform(values):
        return (
            values.pipeline
            | beam.Create([None])
            | beam.FlatMap(lambda _, side: side, view(values)).with_output_types(type_hint)
        )

    _run_and_compare(type_hint, make, transform)


def test_singleton_side_input(no_pickle):
    def transform(values):
        one = (
            values.pipeline
            | beam.Create([5])
            | "Server" >> beam.Map(environment).with_output_types(Environment)
        )

        def use(value, side):
            assert side == environment(5)
            return value

        return values | "Use" >> beam.Map(use, beam.pvalue.AsSingleton(one)).with_output_types(
            Block
        )

    _run_and_compare(Block, block, transform)


def test_pipeline_proto_has_the_coders():
    pipeline = beam.Pipeline(runner=FnApiRunner())
    for type_hint, make in MAKERS:
        (
            pipeline
            | f"Zero {type_hint}" >> beam.Create([0])
            | type_hint.__name__ >> beam.Map(make).with_output_types(type_hint)
        )
    (
        pipeline
        | "Zero" >> beam.Create([0])
        | "Partial" >> beam.Map(lambda _: ("lane", b"")).with_output_types(Partial)
    )
    proto, context = pipeline.to_runner_api(return_context=True)
    found = {}
    for transform in proto.components.transforms.values():
        if transform.unique_name in ("Block", "Ref", "Environment", "Partial"):
            (output,) = transform.outputs.values()
            coder = proto.components.pcollections[output].coder_id
            found[transform.unique_name] = context.coders.get_by_id(coder)
    partial = found.pop("Partial")
    assert found == {kind.__name__: CODERS[kind] for kind, _ in MAKERS}
    assert partial == coders.TupleCoder([coders.StrUtf8Coder(), coders.BytesCoder()])
    assert partial.is_deterministic()


def test_register_array_coder(monkeypatch):
    registered = []
    monkeypatch.setattr(
        coders.registry, "register_coder", lambda kind, coder: registered.append((kind, coder))
    )
    elements.register_array_coder()
    assert registered == [(np.ndarray, ArrayCoder)]


def test_arrays_survive_a_pipeline_once_registered(monkeypatch):
    # The registry is process-wide: give back the state that other tests expect.
    monkeypatch.setattr(coders.registry, "_coders", dict(coders.registry._coders))
    monkeypatch.setattr(coders.registry, "custom_types", list(coders.registry.custom_types))
    elements.register_array_coder()

    def build(pipeline):
        values = made(pipeline, np.ndarray, lambda index: np.full((2, 2), index, np.float32))
        writable = values | beam.Reshuffle() | beam.Map(lambda array: bool(array.flags.writeable))
        assert_that(writable, lambda found: found == [False] * 3 or pytest.fail(str(found)))

    run(build)
