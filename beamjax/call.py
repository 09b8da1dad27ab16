"""A call of a function of programs with its plan, which all public functions share.

`run`, `launch` and `transform` execute it, `explain` shows it, and `replay` repeats a part of it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from beamjax._text import hint
from beamjax.diagnostics.plan_json import Json, plan_json
from beamjax.errors import OptionsError, StructureError
from beamjax.interpreters.planning import Planned
from beamjax.interpreters.staging.stage import FlatCall
from beamjax.ops.leaves import name_of
from beamjax.options import Options, parse_options
from beamjax.plan.steps import Plan
from beamjax.runtime.inputs import Inputs
from beamjax.runtime.materialized_outputs import MaterializedOutputs

if TYPE_CHECKING:
    from beamjax.pipelines.session_workers import SessionWorkers

LOCAL = "local"

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Call:
    """A call with its plan."""

    # The function and its flat arguments; streams that were counted are files here.
    flat: FlatCall
    backend: Any  # the user's runner, or "local"
    runner: str  # its name
    options: Options
    planned: Planned  # the plan, together with the program that it was made from
    plan: Plan  # the same plan in the form that other processes need
    inputs: Inputs | None  # of the plan; None if an argument has no value
    can_replay: bool = True  # whether the members can be read again, which is false for streams
    # The folders of results that stay in files.
    results: MaterializedOutputs = field(default_factory=MaterializedOutputs)
    # Closes, when the run is over, the temporary files of streams that were counted.
    files: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    workers: SessionWorkers | None = None  # of a session; None if the run starts its own
    planning: float = 0.0  # seconds of staging and planning

    @property
    def values(self) -> Inputs:
        """The inputs of a call whose arguments all have values."""
        assert self.inputs is not None
        return self.inputs

    def plan_json(self, notes: tuple[str, ...] | None = None, cached: bool = False) -> Json:
        """The plan as JSON values, which `explain` shows."""
        # `notes` are sentences on how the arguments are read. Only `explain` counts the shards that
        # the cache has, as that takes time.
        notes = self.planned.notes if notes is None else notes
        inputs = self.inputs if cached else None
        flat = self.flat.arguments
        return plan_json(self.planned, flat, self.options, notes, self.runner, inputs)


def runner_name(backend: Any) -> str:
    """The name of a runner, which users give by name or as an instance."""
    return backend if isinstance(backend, str) else type(backend).__name__


def by_position(front: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
    """Decorates a function that is called as `front(fn, *args, **options)`."""
    # For an unknown keyword argument, an error explains how to give it to `fn`. Python would only
    # say that `front` does not have it.
    known = inspect.signature(front).parameters

    @functools.wraps(front)
    def checked(*args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        unknown = [name for name in kwargs if name not in known]
        if unknown and args:
            _refuse_keywords(front.__name__, args[0], unknown, known)
        return front(*args, **kwargs)

    return checked


def _refuse_keywords(front: str, fn: Any, unknown: list[str], known: Iterable[str]) -> None:
    name = name_of(fn)
    bound = ", ".join(f"{key}=..." for key in unknown)
    raise StructureError(
        f"{front}: found the keyword argument {unknown[0]!r}{hint(unknown[0], known) or '.'} The "
        f"arguments of {name} are given by position, beamjax.{front}({name}, ...), or bound "
        f"before: beamjax.{front}(functools.partial({name}, {bound}), ...)."
    )


def check_runner(runner: Any) -> None:
    """Checks that a runner exists; imports Beam only for one that beamjax does not know."""
    if runner == LOCAL:
        return
    from beamjax.pipelines.runners.runner_table import OTHER, short, spec_of

    if isinstance(runner, str):
        spec = spec_of(runner)
        if spec is not OTHER and runner in (spec.name, spec.class_name):
            return
        expected = LOCAL if short(runner) == LOCAL else spec.name
        if expected:
            raise OptionsError(f"runner: found {runner!r}, expected {expected!r}")
    from beamjax.pipelines.runners.connect import make_runner

    make_runner(runner)


def parsed_options(options: Any, runner: Any) -> Options:
    """Parses the options of a run, and checks its runner and Beam's flags among them."""
    check_runner(runner)
    parsed = parse_options(options)
    if parsed.beam and isinstance(parsed.beam, Sequence):
        from beamjax.pipelines.runners.unknown_flags import check_flags

        check_flags(parsed.beam, runner_name(runner))
    return parsed
