"""Structures of trees as JSON: the same again, or a clear error."""

import collections
import json

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from beamjax.errors import ArrayFormatError, StructureError
from beamjax.storage.treedefs import tree_from_json, tree_to_json

Point = collections.namedtuple("Point", "x y")
TREES = st.recursive(
    st.one_of(st.none(), st.integers()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
        st.dictionaries(st.integers(), inner, max_size=3),
        st.lists(st.tuples(st.text(max_size=2), inner), max_size=3).map(collections.OrderedDict),
        st.tuples(inner, inner).map(lambda pair: Point(*pair)),
    ),
    max_leaves=8,
)


@given(TREES)
def test_a_structure_comes_back(tree):
    treedef = jax.tree.structure(tree)
    record = json.loads(json.dumps(tree_to_json(treedef)))
    assert tree_from_json(record, "p") == treedef


def test_named_tuples_need_their_type():
    record = tree_to_json(jax.tree.structure(Point(1, 2)))
    with pytest.raises(StructureError, match=r"test_trees\.Other of x, y, which is not there"):
        tree_from_json({**record, "named": ["test_trees", "Other", ["x", "y"]]}, "p")
    with pytest.raises(StructureError, match="import its module before"):
        tree_from_json({**record, "named": ["test_trees", "Point", ["x", "z"]]}, "p")


def test_what_is_no_structure():
    records = [3, "x", [], {}, {"list": None}, {"dict": [["a"]]}, {"of": []},
               {"dict": [["a", "*"], [1, "*"]]}]  # fmt: skip
    for record in records:
        with pytest.raises(ArrayFormatError, match=r"^p: found"):
            tree_from_json(record, "p")
    deep = "*"
    for _ in range(100_000):
        deep = {"list": [deep]}
    with pytest.raises(ArrayFormatError, match=r"^p: found a tree that is too deep$"):
        tree_from_json(deep, "p")
