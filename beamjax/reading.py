"""How a call reads its streams (sources of unknown length): in a single pass, or counted first.

If a program can be staged without the number of members, and its plan has one pass over them, that
pass reads the streams. For any other program, beamjax first writes the members to temporary files.
Then their number is known, the program is staged with it, and all passes read the files.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from beamjax.call import LOCAL
from beamjax.errors import OptionsError, PlacementError
from beamjax.interpreters.dimensions import is_unknown
from beamjax.interpreters.planning import Planned, plan_for
from beamjax.interpreters.staging.stage import Argument, FlatCall, declared_sizes
from beamjax.interpreters.staging.unknown_sizes import SOME_NUMBER, UnknownSizeError
from beamjax.options import Options
from beamjax.plan.one_pass import obstacle
from beamjax.sources.source_base import Source
from beamjax.sources.streams.spool import spooled_here

TRIALS = 5
"""How many numbers of members to try if a program can't be staged with an unknown one.

Each costs a trace. If no trace shows whether the number is the reason, the members are counted, and
the program is staged with their real number."""


@dataclass(frozen=True)
class Reading:
    """How the streams of a call are read.

    Attributes:
      counted_because: why they are counted before the program runs; "" if they are not.
      planned: the program, staged without the number of members; None if that is not possible.
      number: a number of members with which the program can probably be staged.
    """

    counted_because: str
    planned: Planned | None = None
    number: int = SOME_NUMBER


def choose(call: FlatCall, options: Options) -> Reading:
    """Decides how the streams among the arguments of a call are read.

    Args:
      call: the function and its arguments.
      options: the options of the run.

    Returns:
      How they are read.

    Raises:
      Exception: any error of the function that does not depend on the number of members.
    """
    try:
        planned = plan_for(call, options)
    except UnknownSizeError as error:
        return Reading(error.reason)
    except Exception as error:  # of any type: a size that does not fit may raise any error
        because = f"it can't be staged without their number ({_summary(error)})"
        numbers = _numbers(call)
        failures: dict[int, str] = {}
        for number in numbers[:TRIALS]:
            try:
                plan_for(with_number(call, number), options)
            except Exception as other:
                failures[number] = _summary(other)
            else:
                return Reading(because, number=number)
        # A check in the program may raise one message for all numbers except the length of one
        # argument.
        is_check = isinstance(error, AssertionError | ValueError | RuntimeError)
        tried_all = len(failures) == len(numbers) or not is_check
        if tried_all and failures.get(SOME_NUMBER) == _summary(error):
            raise
        return Reading(because)
    streamed = [i for i, argument in enumerate(call.arguments) if argument.is_stream]
    return Reading(obstacle(planned.plan, streamed), planned)


def _numbers(call: FlatCall) -> list[int]:
    """The numbers of members to try: declared sizes, an arbitrary one, and lengths of arguments."""
    shapes = [getattr(aval, "shape", ()) for aval in call.avals]
    lengths = [shape[0] for shape in shapes if shape and isinstance(shape[0], int)]
    sizes = declared_sizes(call)
    return list(dict.fromkeys([*sizes, SOME_NUMBER, *filter(None, lengths)]))


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


def notes(call: FlatCall, reading: Reading) -> tuple[str, ...]:
    """Sentences on the streams of a call, for `explain`."""
    paths = dict.fromkeys(argument.path for argument in call.arguments if argument.is_stream)
    what = f"{', '.join(paths)}: the number of members is unknown. They are read once"
    if not reading.counted_because:
        return (f"{what}, in the one pass of the plan, and counted there.",)
    files = f"{what}, into files that the passes read, because {reading.counted_because}."
    if reading.planned is not None:
        return (files, "beamjax plans again once they are counted.")
    return (files, f"The plan is made once they are counted; this is one for {reading.number}.")


def with_lengths(
    call: FlatCall, runner: Any, options: Options
) -> contextlib.AbstractContextManager[FlatCall]:
    """A context with a call that can be planned for a run: streams are counted if necessary.

    Args:
      call: the function and its arguments.
      runner: the name or an instance of a runner.
      options: the options of the run.

    Returns:
      A context with the call, in which files replace the streams that were counted.

    Raises:
      OptionsError: an argument is a stream, and the option `checkpoint` is set.
      SourceError: as for `counted`.
    """
    stream = next((argument for argument in call.arguments if argument.is_stream), None)
    if stream is not None and options.checkpoint is not None:
        raise OptionsError(
            f"checkpoint: {stream.path} is a source of unknown length, and a resumed run can't "
            "check that its members are still the same; write them to files of known length "
            "(beamjax.from_npy), or leave out the option"
        )
    if stream is None or not _must_count(call, runner, options):
        return contextlib.nullcontext(call)
    return counted(call, runner, options)


def _must_count(call: FlatCall, runner: Any, options: Options) -> bool:
    """Whether the streams have to be counted before the program can run."""
    reading = choose(call, options)
    if reading.counted_because or runner == LOCAL:
        return bool(reading.counted_because)
    from beamjax.pipelines.tables.spool import open_on_workers

    streams = [argument.value for argument in call.arguments if argument.is_stream]
    return not open_on_workers(streams, runner, options)


@contextlib.contextmanager
def counted(call: FlatCall, runner: Any, options: Options) -> Iterator[FlatCall]:
    """Writes the streams of a call to files, which exist while the context is open.

    Args:
      call: the function and its arguments.
      runner: the Beam runner on whose workers the streams are read; "local" for this process.
      options: the options of the run, of which `work_folder` and those of Beam are used.

    Yields:
      The call with files in place of its streams.

    Raises:
      SourceError: a source can't be read, or has no member.
      PlacementError: raised in the context; the lengths of the streams are added to its message.
    """
    streams = {id(a.value): a.value for a in call.arguments if a.is_stream}
    files: contextlib.AbstractContextManager[Sequence[Source]]
    if runner == LOCAL:
        files = spooled_here(list(streams.values()), options)
    else:
        from beamjax.pipelines.tables.spool import spooled

        files = spooled(list(streams.values()), runner, options)
    with files as found:
        known: dict[int, Source] = dict(zip(streams, found, strict=True))
        arguments = [
            replace(_with_number(a, len(known[id(a.value)])), value=known[id(a.value)])
            if a.is_stream
            else a
            for a in call.arguments
        ]
        try:
            yield call.with_arguments(arguments)
        except PlacementError as error:
            lengths = [f"{streams[key]!r} has {len(known[key])} members" for key in streams]
            raise PlacementError(
                f"{error}\nbeamjax counted the members: {'; '.join(lengths)}."
            ) from error
