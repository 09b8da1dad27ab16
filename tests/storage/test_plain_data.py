"""Dataclasses and structures of trees from JSON: what they were, or a clear error."""

import collections
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from beamjax.errors import ArrayFormatError, StructureError
from beamjax.storage.schema import MAX_JSON_DEPTH, from_plain, parse_json, to_plain
from beamjax.storage.treedefs import tree_from_json, tree_to_json


@dataclass(frozen=True)
class Range:
    start: int
    stop: int


@dataclass(frozen=True)
class Leaf:
    name: str
    size: int | Range
    share: float = 0.5


@dataclass(frozen=True)
class Tree:
    leaves: tuple[Leaf, ...]
    by_name: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    root: Leaf | None = None
    flag: bool = False


class Pair(NamedTuple):
    name: str
    time: float = 0.5


@dataclass(frozen=True)
class Others:
    pairs: tuple[Pair, ...] = ()
    span: tuple[int, float] = (0, 1.0)

    def __post_init__(self):
        if self.span[0] < 0:
            raise ValueError("a negative start")


def plain(value):
    return json.loads(json.dumps(to_plain(value)))


TREE = Tree((Leaf("a", 3), Leaf("b", Range(4, 5), 1.0)), {"x": {"y": 1}}, Leaf("root", 0), True)


def test_values_come_back():
    assert from_plain(Tree, plain(TREE), "here") == TREE
    assert from_plain(Tree, {"leaves": []}, "here") == Tree(())
    others = Others((Pair("a", 2.0), Pair("b")), (1, 2.0))
    assert plain(others) == {"pairs": [["a", 2.0], ["b", 0.5]], "span": [1, 2.0]}
    assert from_plain(Others, plain(others), "here") == others
    assert from_plain(Others, {"pairs": [["b"]]}, "here") == Others((Pair("b"),))
    assert from_plain(Leaf, {"name": "a", "size": 1, "share": 2, "new": 3}, "here").share == 2


def test_other_values_are_clear_errors():
    for value, message in (
        (3, "here: found 3 as Tree"),
        ({}, "here: found no Tree"),
        ({"leaves": 3}, "found 3 as Tree.leaves"),
        ({"leaves": [{"name": 3, "size": 3}]}, r"found 3 as Tree.leaves\[0\].name, expected str"),
        ({"leaves": [{"name": "a", "size": "b"}]}, r"found 'b' as Tree.leaves\[0\].size"),
        ({"leaves": [], "by_name": {"x": {"y": "z"}}}, "found 'z' as Tree.by_name"),
        ({"leaves": [], "flag": 1}, "found 1 as Tree.flag, expected bool"),
        ({"leaves": [], "root": {"name": "a"}}, "Tree.root"),
    ):
        with pytest.raises(ArrayFormatError, match=message):
            from_plain(Tree, value, "here")
    for value, message in (
        ({"pairs": [[]]}, r"found \[\] as Others.pairs\[0\], expected 1 values"),
        ({"pairs": [["a", 1, 2]]}, r"Others.pairs\[0\], expected 2 values"),
        ({"pairs": [["a", float("nan")]]}, r"found nan as Others.pairs\[0\]\[1\], expected float"),
        ({"span": [1]}, "Others.span, expected 2 values"),
        ({"span": [-1, 0]}, "found no Others .a negative start"),
    ):
        with pytest.raises(ArrayFormatError, match=message):
            from_plain(Others, value, "here")


# --- structures of trees

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
    with pytest.raises(StructureError, match=r"test_plain_data\.Other of x, y, which is not there"):
        tree_from_json({**record, "named": ["test_plain_data", "Other", ["x", "y"]]}, "p")
    with pytest.raises(StructureError, match="import its module first"):
        tree_from_json({**record, "named": ["test_plain_data", "Point", ["x", "z"]]}, "p")


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


def nested(depth, text="0"):
    return f"{'[' * depth}{text}{']' * depth}".encode()


def test_json_is_parsed_up_to_a_depth():
    brackets = json.dumps(["[{" * 500, {"]": '\\"[' * 500}])  # in texts, they are not levels
    for text in (nested(MAX_JSON_DEPTH), brackets.encode(), b"[" + b"[]," * 1000 + b"0]"):
        assert parse_json(text, "here") == json.loads(text)
    for text in (nested(MAX_JSON_DEPTH + 1), nested(100_000), b"[" * 100_000, b'{"":' * 10_000):
        with pytest.raises(ArrayFormatError, match=r"^here: found JSON of more than 400 levels"):
            parse_json(text, "here")
    for text in (b"", b"{", b"\xff", b"[1,]"):
        with pytest.raises(ArrayFormatError, match=r"^here: found .*, expected JSON"):
            parse_json(text, "here")
