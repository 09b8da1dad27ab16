"""Random programs on every runner; `python -m tests.generate` runs many more."""

import hypothesis
import jax
import jax.numpy as jnp
import pytest
from generate import checks
from generate.long_run import main, parse
from generate.programs import FEATURES, Program, programs
from hypothesis import HealthCheck, Phase, given, settings

CHUNKS, EXAMPLES = 6, 40


def quick(examples):
    return settings(
        max_examples=examples,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


SEEDS = [0, *(pytest.param(chunk, marks=pytest.mark.table) for chunk in range(1, CHUNKS))]


@pytest.mark.parametrize("chunk", SEEDS)
def test_programs_give_what_jit_gives(chunk):
    rejected = []

    @hypothesis.seed(chunk)
    @quick(EXAMPLES)
    @given(programs(FEATURES))
    def run(program):
        try:
            checks.check(program)
        except checks.RejectedError as error:
            rejected.append(error)
        except checks.DifferenceError as error:
            raise AssertionError(f"{error}\n\n{program.script()}") from error

    run()
    jax.clear_caches()
    assert len(rejected) <= EXAMPLES // 20 + 1


# --- the checks can fail


def program(body, **changes):
    facts = {"x64": False, "floats": frozenset({"float32"}), "inexact": (True,)}
    return Program(body, **(facts | changes), used={}, misfits={})


BODY = """\
@bj.program(placements={'clients': 11})
def prog(a0):
    return bj.reduce_sum(bj.map_fn(lambda v: v * 2, a0))

fn = prog

args = (floats(0, 11, 3),)
"""


def test_a_program_that_passes():
    checks.check(program(BODY))


def test_a_script_runs_by_itself(capsys):
    exec(program(BODY).script(), {"__name__": "script"})
    assert capsys.readouterr().out.count("[") == 3


def test_a_program_that_jit_refuses():
    with pytest.raises(checks.RejectedError, match="no_such"):
        checks.check(program(BODY.replace("v * 2", "jnp.no_such(v)")))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x + 1e-3, "local: leaf 0 differs by 0.001"),
        (lambda x: x.astype("bfloat16"), "local: leaf 0 is bfloat16"),
        (lambda x: (x,), "local: found the tree"),
    ],
)
def test_a_runner_that_is_wrong(change, message, monkeypatch):
    run = checks.bj.run
    monkeypatch.setattr(checks.bj, "run", lambda *args, **kwargs: change(run(*args, **kwargs)))
    with pytest.raises(checks.DifferenceError, match=message):
        checks.check(program(BODY))


def test_runners_that_differ_in_the_last_bit(monkeypatch):
    run = checks.bj.run

    def other(*args, runner, **kwargs):
        found = run(*args, runner="local", **kwargs)
        return jnp.nextafter(found, jnp.inf) if runner == "DirectRunner" else found

    monkeypatch.setattr(checks.bj, "run", other)
    with pytest.raises(checks.DifferenceError, match="other bits"):
        checks.check(program(BODY))


def test_a_runner_that_fails(monkeypatch):
    def broken(*args, runner, **kwargs):
        raise RuntimeError("no such luck")

    monkeypatch.setattr(checks.bj, "run", broken)
    with pytest.raises(checks.DifferenceError, match="local: "):
        checks.check(program(BODY))


# --- the command line


def drawn(seed):
    found = []
    run = given(programs())(lambda program: found.append(program.body))
    hypothesis.seed(seed)(quick(10)(run))()
    return found


def test_the_same_seed_draws_the_same_programs():
    assert drawn(3) == drawn(3)
    assert len(set(drawn(3))) > 5


def test_a_long_run_reports_what_it_covered(tmp_path, capsys):
    flags = "--count 3 --runner local --folder".split()
    assert main([*flags, str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "3 programs" in out
    assert "programs that use each operation:" in out
    assert not list(tmp_path.iterdir())


def test_a_feature_can_be_turned_off():
    args = parse(["--without", "control_flow", "x64"])
    assert set(args.features) == FEATURES - {"control_flow", "x64"}
