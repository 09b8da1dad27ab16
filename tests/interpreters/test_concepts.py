"""That the rules of docs/concepts.md hold: each row of its tables is a program."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from explained import all_steps, facts_of
from helpers import assert_close
from jax import lax

import beamjax as bj
from beamjax.interpreters.lowering.reasons import CREATED, REDUCES

PAGE = Path(__file__).parents[2] / "docs" / "concepts.md"
ROW = re.compile(r"\| `(.+)` \| (.+) \|")
N = 12
X = np.random.default_rng(0).normal(size=(N, 3)).astype(np.float32)
W = np.linspace(0.2, 0.9, 9, dtype=np.float32).reshape(3, 3)
K = np.arange(N, dtype=np.int32) % 5


def rows():
    """The rows of the tables of the rules, by the first title of their table."""
    text = PAGE.read_text()
    section = text[text.index("## Where an operation runs") : text.index("## The plan")]
    found = {}
    for line in section.splitlines():
        if head := re.fullmatch(r"\| (\w+) \| .+ \|", line):
            found[head[1]] = []
        elif row := ROW.fullmatch(line):
            found[list(found)[-1]].append(row.groups())
    return found


ROWS = rows()


def program_of(text):
    """The program of an expression, as the page describes its names."""

    def program(x, w, k):
        n, key = N, jax.random.key(0)
        # No elementwise operation, so a pass stores it.
        y = bj.map_fn(lambda v: v * jnp.sum(v), x)
        names = {"bj": bj, "jax": jax, "jnp": jnp, "lax": lax, "n": n, "key": key}
        return eval(text, names | {"x": x, "y": y, "w": w, "k": bj.map_fn(lambda v: v, k)})

    return bj.program(clients=N)(program)


def facts(text):
    prog = program_of(text)
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        found = facts_of(bj.explain(prog, X, W, K))
        result = bj.run(prog, X, W, K, runner="local", options={"shard_size": 8})
        assert_close(result, jax.jit(prog)(X, W, K), rtol=2e-4, atol=2e-5)
    return found, list(all_steps(found.steps))


def kinds(steps):
    return {step.kind for step in steps}


def rules(steps):
    return " ".join(step.rule for step in steps if step.kind == "Map")


def test_the_page_has_tables_of_all_rules():
    assert {title: len(each) > 4 for title, each in ROWS.items()} == dict.fromkeys(
        ("Program", "Operation", "Loop", "Value"), True
    )


@pytest.mark.parametrize(("text", "answer"), ROWS["Program"])
def test_arguments(text, answer):
    x = facts(text)[0].inputs[0]
    assert {"placed": x.read.startswith("by shards"), "a server value": "whole" in x.read}[answer]


@pytest.mark.parametrize(("text", "answer"), ROWS["Operation"])
def test_operations(text, answer):
    found, steps = facts(text)
    is_placed = all("@clients" in output.type for output in found.outputs)
    assert ("Gather" in kinds(steps)) == (answer == "is gathered")
    assert ("Scatter" in kinds(steps)) is False
    match answer:
        case "runs along the members":
            assert kinds(steps) <= {"Map", "Server"}
            assert is_placed
            assert REDUCES not in rules(steps)
        case "reduces over the members":
            assert REDUCES in rules(steps)
            assert not is_placed
        case "has an operand that is created on workers":
            assert kinds(steps) <= {"Map", "Server"}
            assert is_placed
            assert CREATED in rules(steps) or REDUCES not in rules(steps)
        case "is expanded":
            assert "map_by_shard" in rules(steps)
        case "is gathered":
            (gather,) = (step for step in steps if step.kind == "Gather")
            assert gather.rule.startswith("gathered: ")
            assert gather.lines
        case _:
            raise AssertionError(answer)


@pytest.mark.parametrize(("text", "answer"), ROWS["Loop"])
def test_loops(text, answer):
    _, steps = facts(text)
    expected = {
        "runs inside of a pass": {"Map"},
        "has passes in its rounds": {"Map", "Loop"},
        "is gathered": {"Map", "Gather", "Server"},
        "reads rows by index": {"Map", "Loop", "Rows"},
    }[answer]
    assert kinds(steps) - {"Server"} == expected - {"Server"}
    loops = [step.rule for step in steps if step.kind == "Loop"]
    assert all(rule.startswith("its rounds have steps of their own") for rule in loops)


@pytest.mark.parametrize(("text", "answer"), ROWS["Value"])
def test_values_of_earlier_passes(text, answer):
    centered = f"(lambda z: bj.reduce_mean((z - jnp.mean(z)) ** 2))({text})"
    _, steps = facts(centered)
    later = [value.name for step in steps[1:] if step.kind == "Map" for value in step.placed]
    is_read = any(not name.startswith("arg0") for name in later)
    assert {"read it": is_read, "compute it again": not is_read}[answer]
