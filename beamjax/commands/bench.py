"""`beamjax bench`: how long a function takes on runners, and under `jax.jit`."""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from beamjax.commands.answers import Answer, give
from beamjax.commands.arguments import flags
from beamjax.errors import OptionsError

if TYPE_CHECKING:
    from beamjax.commands.arguments.binding import Call

takes_flags = True

JIT = "jit"
DEFAULT = ["local", "DirectRunner"]


@dataclass(frozen=True)
class Times:
    """Seconds of calls.

    Attributes:
      name: of the runner.
      first: of the first call, in which everything is staged and compiled.
      rest: of those after it.
    """

    name: str
    first: float
    rest: tuple[float, ...]

    @property
    def best(self) -> float:
        return min(self.rest)

    @property
    def median(self) -> float:
        return statistics.median(self.rest)

    @property
    def once(self) -> float:
        """How much longer the first call took than the others: what is done but once."""
        return max(0.0, self.first - self.median)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `beamjax bench`."""
    flags.add_call(parser, runner=False)
    parser.add_argument(
        "--runner", action="append", metavar="NAME",
        help=f"may be given several times (default: {' and '.join(DEFAULT)})",
    )  # fmt: skip
    parser.add_argument(
        "--repeat", type=_count, default=5, metavar="K", help="calls after the first (default: 5)"
    )
    parser.add_argument(
        "--no-jit", action="store_true", help="leave out jax.jit on the whole arrays in memory"
    )


def command(arguments: argparse.Namespace) -> int:
    """Measures, and prints a table."""
    return give(arguments, lambda: _bench(arguments))


def _bench(arguments: argparse.Namespace) -> Answer:
    runners = list(dict.fromkeys(arguments.runner or DEFAULT))
    beam = [runner for runner in runners if runner != "local"]
    arguments.runner = beam[0] if beam else "local"
    from beamjax.commands.arguments.binding import find_call, with_files
    from beamjax.execution import run

    options, make_call = find_call(arguments)
    if options.checkpoint is not None or options.job_folder is not None:
        raise OptionsError("bench: found a folder of a job or of checkpoints, expected neither")
    options = replace(options, progress=False)
    call = make_call()
    read = with_files(call, options)
    found = []
    for runner in runners:
        once = functools.partial(run, read.fn, *read.args, runner=runner, options=options)
        found.append(_measure(runner, once, arguments.repeat))
    reason = "--no-jit" if arguments.no_jit else _too_big(call)
    jit = _jit(call, arguments.repeat) if reason is None else None
    rows = [*([jit] if jit else []), *found]
    notes = [] if jit else [f"without jit: {reason}"]
    data = {"program": call.name, "runs": [_data(row, jit) for row in rows], "without_jit": reason}
    return Answer(data, "\n".join([_table(call.name, rows, jit), *notes]))


def _measure(name: str, call: Callable[[], Any], repeat: int) -> Times:
    seconds = []
    for number in range(repeat + 1):
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
        print(f"beamjax: {name}, call {number}: {seconds[-1]:.3f} s", file=sys.stderr)
    return Times(name, seconds[0], tuple(seconds[1:]))


def _too_big(call: Call) -> str | None:
    """Why the arguments can't all be arrays in memory, if so."""
    from beamjax.interpreters.staging.stage import flatten_arguments

    arguments, _, _ = flatten_arguments(call.args)
    if any(argument.is_stream for argument in arguments):
        return "a source is a stream of unknown length"
    need = sum(argument.aval.size * argument.aval.dtype.itemsize for argument in arguments)
    free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if need > free // 4:
        return f"the arguments have {need / 2**30:.1f} GiB, more than a quarter of the memory"
    return None


def _jit(call: Call, repeat: int) -> Times:
    import jax

    from beamjax.verification import whole_arguments

    args = whole_arguments(call.args)
    jitted = jax.jit(call.fn)
    return _measure(JIT, lambda: jax.block_until_ready(jitted(*args)), repeat)


def _data(row: Times, jit: Times | None) -> dict[str, Any]:
    ratio = None if jit is None else row.median / jit.median
    return {
        "runner": row.name, "first": row.first, "once": row.once, "best": row.best,
        "median": row.median, "seconds": row.rest, "times_jit": ratio,
    }  # fmt: skip


def _table(name: str, rows: list[Times], jit: Times | None) -> str:
    from beamjax._text import aligned

    cells: list[tuple[str, ...]] = [
        ("", "first call", "of it once", "best", "median", "median / jit")
    ]
    cells += [
        (
            row.name,
            *map(in_units, (row.first, row.once, row.best, row.median)),
            "-" if jit is None else f"{row.median / jit.median:.2f}",
        )
        for row in rows
    ]
    calls = f"{len(rows[0].rest)} calls after the first" if rows else ""
    return "\n".join([f"{name}, {calls}", *(f"  {line}" for line in aligned(cells))])


def in_units(seconds: float) -> str:
    """Seconds with three digits: `1.23 s`, `45.6 ms`, `789 us`."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:#.3g} {unit}".replace(". ", " ")
    return f"{seconds / 1e-6:#.3g} us".replace(". ", " ")


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"found {number}, expected a number from 1")
    return number
