"""Random programs on every runner. `CHUNKS=500 pytest -m table` with this file runs many more."""

import os

import hypothesis
import jax
import jax.numpy as jnp
import pytest
from generate import checks
from generate.programs import Program, programs
from hypothesis import HealthCheck, Phase, given, settings

EXAMPLES = 15
SEEDS = range(1, int(os.environ.get("CHUNKS", 16)))


@pytest.mark.parametrize("chunk", [0, *(pytest.param(k, marks=pytest.mark.table) for k in SEEDS)])
def test_programs_give_what_jit_gives(chunk):
    rejected, count = [], EXAMPLES if chunk else EXAMPLES // 3

    @hypothesis.seed(chunk)
    @settings(
        max_examples=count, database=None, deadline=None, report_multiple_bugs=False,
        phases=[Phase.generate, Phase.shrink], suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(programs())
    def run(program):
        try:
            checks.check(program)
        except checks.RejectedError as error:
            rejected.append(error)
        except checks.DifferenceError as error:
            raise AssertionError(f"{error}\n\n{program.script()}") from error

    run()
    jax.clear_caches()
    assert len(rejected) <= count // 10 + 1


# --- the checks can fail


def program(body):
    return Program(body, False, frozenset({"float32"}), (True,))


BODY = """\
@bj.program(placements={'clients': 11})
def prog(a0):
    return bj.reduce_sum(bj.map_fn(lambda v: v * 2, a0))

fn = prog

args = (floats(0, 11, 3),)
"""


def test_a_program_passes_and_its_script_runs_by_itself(capsys):
    checks.check(program(BODY))
    exec(program(BODY).script(), {"__name__": "script"})
    assert capsys.readouterr().out.count("[") == 3


def fail(*args, **kwargs):
    raise RuntimeError("no such luck")


@pytest.mark.parametrize(
    ("change", "runner", "message"),
    [
        (lambda x: x + 1e-3, "local", "local: leaf 0 differs by 0.001"),
        (lambda x: x.astype("bfloat16"), "local", "local: leaf 0 is bfloat16"),
        (lambda x: (x,), "local", "local: found the tree"),
        (lambda x: jnp.nextafter(x, jnp.inf), "DirectRunner", "other bits"),
        (fail, "DirectRunner", "DirectRunner: RuntimeError: no such luck"),
    ],
)
def test_a_runner_that_is_wrong_is_found(change, runner, message, monkeypatch):
    run = checks.bj.run

    def wrong(*args, **kwargs):
        found = run(*args, **kwargs | {"runner": "local"})
        return change(found) if kwargs["runner"] == runner else found

    monkeypatch.setattr(checks.bj, "run", wrong)
    with pytest.raises(checks.DifferenceError, match=message):
        checks.check(program(BODY))


def test_a_program_that_jit_refuses_is_rejected():
    with pytest.raises(checks.RejectedError, match="no_such"):
        checks.check(program(BODY.replace("v * 2", "jnp.no_such(v)")))
