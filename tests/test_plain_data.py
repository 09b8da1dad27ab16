"""Dataclasses from JSON: what they were, or a clear error."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
from programs import CASES

import beamjax as bj
from beamjax._text import MemberBytes
from beamjax.diagnostics.fact_types import PlanFacts
from beamjax.errors import ArrayFormatError
from beamjax.storage.schema import from_plain


@dataclass(frozen=True)
class Leaf:
    name: str
    size: int | MemberBytes
    share: float = 0.5


@dataclass(frozen=True)
class Tree:
    leaves: tuple[Leaf, ...]
    by_name: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    root: Leaf | None = None
    flag: bool = False


def plain(value):
    return json.loads(json.dumps(dataclasses.asdict(value)))


TREE = Tree(
    (Leaf("a", 3), Leaf("b", MemberBytes(4, 5), 1.0)), {"x": {"y": 1}}, Leaf("root", 0), True
)


def test_values_come_back():
    assert from_plain(Tree, plain(TREE), "here") == TREE
    assert from_plain(Tree, {"leaves": []}, "here") == Tree(())
    assert from_plain(Leaf, {"name": "a", "size": 1, "share": 2, "new": 3}, "here").share == 2


def test_facts_of_plans():
    for name in [name for name in CASES if CASES[name].eqns is not None][::15]:
        fn, args = CASES[name].build(bj)
        facts = bj.explain(fn, *args).facts
        assert from_plain(PlanFacts, plain(facts), "here") == facts, name


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
