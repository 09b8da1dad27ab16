"""Dataclasses from JSON: what they were, or a clear error."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
from programs import CASES

import beamjax as bj
from beamjax.errors import ArrayFormatError
from beamjax.fact_types import MemberBytes, PlanFacts
from beamjax.plain_data import from_plain


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
    told: bool = False


def plain(value):
    return json.loads(json.dumps(dataclasses.asdict(value)))


TREE = Tree(
    (Leaf("a", 3), Leaf("b", MemberBytes(4, 5), 1.0)), {"x": {"y": 1}}, Leaf("root", 0), True
)


def test_what_it_was():
    assert from_plain(Tree, plain(TREE), "here") == TREE
    assert from_plain(Tree, {"leaves": []}, "here") == Tree(())
    assert from_plain(Leaf, {"name": "a", "size": 1, "share": 2, "new": 3}, "here").share == 2


@pytest.mark.parametrize("name", [n for n in CASES if CASES[n].eqns is not None][::5])
def test_facts_of_plans(name):
    fn, args = CASES[name].build(bj)
    facts = bj.explain(fn, *args).facts
    assert from_plain(PlanFacts, plain(facts), "here") == facts


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3, "here: found 3 as Tree"),
        ({}, "here: found no Tree"),
        ({"leaves": 3}, "found 3 as Tree.leaves"),
        ({"leaves": [{"name": 3, "size": 3}]}, r"found 3 as Tree.leaves\[0\].name, expected str"),
        ({"leaves": [{"name": "a", "size": "b"}]}, r"found 'b' as Tree.leaves\[0\].size"),
        ({"leaves": [], "by_name": {"x": {"y": "z"}}}, "found 'z' as Tree.by_name"),
        ({"leaves": [], "told": 1}, "found 1 as Tree.told, expected bool"),
        ({"leaves": [], "root": {"name": "a"}}, "Tree.root"),
    ],
)
def test_other_values_are_clear_errors(value, message):
    with pytest.raises(ArrayFormatError, match=message):
        from_plain(Tree, value, "here")
