"""`from_chunks`: members that a function gives."""

import jax
import numpy as np
import pytest
from streams import stream

import beamjax as bj
from beamjax.chunks import members_of
from beamjax.errors import SourceError, StructureError


def test_members_and_tree():
    tree = {"x": np.arange(10.0).reshape(5, 2), "k": np.arange(5, dtype=np.int8)}
    source = stream(tree)
    assert source.treedef == jax.tree.structure(tree)
    assert [str(leaf) for leaf in source.leaves] == ["int8[]", "float64[2]"]
    for found, expected in zip(members_of(source, True), jax.tree.leaves(tree), strict=True):
        np.testing.assert_array_equal(found, expected)
    assert "in chunks from" in repr(source)


def test_the_type_of_a_member_may_be_given():
    calls = []

    def rows():
        calls.append(1)
        yield np.ones((2, 3), np.float32)

    source = bj.from_chunks(rows, jax.ShapeDtypeStruct((3,), "float32"))
    assert not calls
    assert members_of(source, True)[0].shape == (2, 3)


def test_typed_keys():
    keys = jax.random.split(jax.random.key(0), 5)
    sources = [
        stream(keys, [2]),
        bj.from_chunks(lambda: [keys], jax.ShapeDtypeStruct((), keys.dtype)),
    ]
    for source in sources:
        assert source.leaves[0].key_impl == "threefry2x32"
        np.testing.assert_array_equal(members_of(source, True)[0], jax.random.key_data(keys))


def test_what_is_no_function():
    with pytest.raises(StructureError, match="found a generator, expected a function"):
        bj.from_chunks(x for x in [np.ones(3)])
    once = iter([np.ones(3), np.ones(3)])
    with pytest.raises(SourceError, match="the same iterator"):
        bj.from_chunks(lambda: once)
    with pytest.raises(SourceError, match="gives a int, expected an iterable"):
        bj.from_chunks(lambda: 3)


def test_nothing_to_read():
    with pytest.raises(SourceError, match="no chunk with a row"):
        bj.from_chunks(lambda: [np.ones((0, 3))])
    with pytest.raises(StructureError, match="without leaves"):
        bj.from_chunks(list, {})
    with pytest.raises(StructureError, match=r"member.*found 3"):
        bj.from_chunks(list, 3)


@pytest.mark.parametrize(
    ("later", "message"),
    [
        ({"y": np.ones(2)}, "chunk 1: found the tree"),
        ({"x": 3.0}, "chunk 1: .*scalar"),
        ({"x": ["text"]}, "chunk 1"),
        ({"x": np.ones(2, np.float32)}, "chunk 1.*found float32.*expected rows of float64"),
    ],
)
def test_chunks_that_differ(later, message):
    source = bj.from_chunks(lambda: [{"x": np.ones(2)}, later])
    with pytest.raises(SourceError, match=message):
        members_of(source, True)


def test_it_is_not_pickled():
    with pytest.raises(SourceError, match="is not pickled"):
        stream(np.ones(3)).to_spec()
    with pytest.raises(SourceError, match="no spec"):
        type(stream(np.ones(3))).from_spec({})
