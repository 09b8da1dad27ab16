"""A call of a function of programs with its plan, which all public functions share.

`run`, `launch` and `transform` execute it, `explain` shows it, and `replay` repeats a part of it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import jax

from beamjax._text import hint
from beamjax.errors import OptionsError, PlacementError, StructureError
from beamjax.interpreters.dimensions import is_unknown
from beamjax.interpreters.planning import Planned
from beamjax.interpreters.staging.arguments import Argument, FlatCall, of_members
from beamjax.interpreters.staging.stage import declared_sizes, stage
from beamjax.interpreters.staging.unknown_sizes import SOME_NUMBER
from beamjax.ops.leaves import name_of
from beamjax.options import Options, parse_options
from beamjax.plan.steps import Plan
from beamjax.runtime.inputs import Inputs
from beamjax.runtime.materialized_outputs import MaterializedOutputs
from beamjax.sources.source_base import Source
from beamjax.telemetry.messages import announced

if TYPE_CHECKING:
    from beamjax.diagnostics.plan_json import Json
    from beamjax.pipelines.session_workers import SessionWorkers

LOCAL = "local"

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


@dataclass(frozen=True, eq=False)
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
        from beamjax.diagnostics.plan_json import plan_json  # most runs do not show their plan

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


# --- sources of unknown length: their members are written to files and counted before a run


def with_lengths(
    call: FlatCall, runner: Any, options: Options
) -> contextlib.AbstractContextManager[FlatCall]:
    """A context with the call in which files of known length replace streams."""
    stream = next(argument for argument in call.arguments if argument.is_stream)
    if options.checkpoint is not None:
        raise OptionsError(
            f"checkpoint: {stream.path} is a source of unknown length, and a resumed run can't "
            "check that its members are still the same; write them to files of known length "
            "(beamjax.from_npy), or leave out the option"
        )
    some_number(call)  # Errors of the program come before anything is read.
    return counted(call, runner, options)


TRIALS = 5
"""How many numbers of members to try before the members are counted. Each costs a trace."""


def some_number(call: FlatCall) -> int:
    """A number of members with which a function of streams can probably be staged."""
    # Raises errors of the function that do not depend on the number of members.
    numbers = _numbers(call)
    errors: list[Exception] = []
    for number in numbers[:TRIALS]:
        try:
            stage(with_number(call, number))
        except Exception as error:  # of any type: a size that does not fit may raise any error
            errors.append(error)
        else:
            return number
    # A check in the program may raise one message for all numbers but the length of an argument.
    is_check = isinstance(errors[0], AssertionError | ValueError | RuntimeError)
    tried_all = len(errors) == len(numbers) or not is_check
    if tried_all and len(set(map(_summary, errors))) == 1:
        raise errors[0]
    return numbers[0]


def _numbers(call: FlatCall) -> list[int]:
    """The numbers of members to try: declared sizes, an arbitrary one, and lengths of arguments."""
    shapes = [getattr(aval, "shape", ()) for aval in call.avals]
    lengths = [shape[0] for shape in shapes if shape and isinstance(shape[0], int)]
    return list(dict.fromkeys([*declared_sizes(call), SOME_NUMBER, *filter(None, lengths)]))


def _summary(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".split("\n")[0]


def with_number(call: FlatCall, n: int) -> FlatCall:
    """A call with this number of members in place of an unknown one."""
    return call.with_arguments([_with_number(argument, n) for argument in call.arguments])


def _with_number(argument: Argument, n: int) -> Argument:
    aval = argument.aval
    if not any(map(is_unknown, getattr(aval, "shape", ()))):
        return argument
    return argument._replace(aval=jax.ShapeDtypeStruct((n, *aval.shape[1:]), aval.dtype))


def stream_note(call: FlatCall, number: int) -> str:
    """A sentence on the streams of a call, for `explain`."""
    paths = dict.fromkeys(argument.path for argument in call.arguments if argument.is_stream)
    return (
        f"{', '.join(paths)}: the number of members is unknown. A run first writes them to files "
        f"and counts them. This is the plan for {number} members."
    )


@contextlib.contextmanager
def counted(call: FlatCall, runner: Any, options: Options) -> Iterator[FlatCall]:
    """Writes the streams of a call to files, which exist while the context is open."""
    # Streams are read on the workers of the runner, unless it is "local".
    streams = {id(a.value): a.value for a in call.arguments if a.is_stream}
    files: contextlib.AbstractContextManager[Sequence[Source]]
    if runner == LOCAL:
        from beamjax.sources.streams.spool import spooled_here  # few programs read streams

        files = spooled_here(list(streams.values()), options)
    else:
        from beamjax.pipelines.tables.stored_streams import spooled

        files = spooled(list(streams.values()), runner, options)
    with contextlib.ExitStack() as stack:
        with announced("reading and counting the members of a stream", options.progress):
            counted_sources: Sequence[Source] = stack.enter_context(files)
        known: dict[int, Source] = dict(zip(streams, counted_sources, strict=True))
        arguments = [
            of_members(a, known[id(a.value)], len(known[id(a.value)])) if a.is_stream else a
            for a in call.arguments
        ]
        try:
            yield call.with_arguments(arguments)
        except PlacementError as error:
            # The user does not know the lengths that contradict a placement.
            lengths = [f"{streams[key]!r} has {len(known[key])} members" for key in streams]
            raise PlacementError(
                f"{error}\nbeamjax counted the members: {'; '.join(lengths)}."
            ) from error
