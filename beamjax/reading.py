"""Sources of unknown length: their members are written to files and counted before a run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax

from beamjax.call import LOCAL
from beamjax.errors import OptionsError, PlacementError
from beamjax.interpreters.dimensions import is_unknown
from beamjax.interpreters.staging.stage import (
    Argument,
    FlatCall,
    declared_sizes,
    of_members,
    stage,
)
from beamjax.interpreters.staging.unknown_sizes import SOME_NUMBER
from beamjax.options import Options
from beamjax.sources.source_base import Source
from beamjax.sources.streams.spool import spooled_here
from beamjax.telemetry.messages import announced


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
    return replace(argument, aval=jax.ShapeDtypeStruct((n, *aval.shape[1:]), aval.dtype))


def note(call: FlatCall, number: int) -> str:
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
        files = spooled_here(list(streams.values()), options)
    else:
        from beamjax.pipelines.tables.stored_streams import spooled

        files = spooled(list(streams.values()), runner, options)
    with contextlib.ExitStack() as stack:
        with announced("reading and counting the members of a stream", options.progress):
            found: Sequence[Source] = stack.enter_context(files)
        known: dict[int, Source] = dict(zip(streams, found, strict=True))
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
