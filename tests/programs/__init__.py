"""Programs for tests of all kinds, as one table: `test_programs` runs each of them."""

from programs import bodies, members, rounds, training, transformations  # noqa: F401
from programs.table import (
    KEY,
    PROGRAMS,
    WS,
    M,
    N,
    Pair,
    Program,
    W,
    X,
    Y,
    reference,
    rnd,
    run_everywhere,
    step_kinds,
    steps_of,
)

__all__ = [
    "KEY", "PROGRAMS", "WS", "M", "N", "Pair", "Program", "W", "X", "Y", "reference", "rnd",
    "run_everywhere", "step_kinds", "steps_of",
]  # fmt: skip
