"""`beamjax run`: a function on a runner, its results in a summary and in a file."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from beamjax.commands.answers import Answer, give
from beamjax.commands.arguments import flags
from beamjax.errors import BeamjaxError
from beamjax.options import Options

if TYPE_CHECKING:
    from beamjax.jobs.job import Job

takes_flags = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `beamjax run`."""
    flags.add_call(parser)
    parser.add_argument(
        "--out", metavar="PATH",
        help="an .npz file for all arrays of the result, named by their paths in it; an .npy file "
        "for a single one; with --keep placed a folder, in which placed results stay in files",
    )  # fmt: skip


def command(arguments: argparse.Namespace) -> int:
    """Runs the function."""
    return give(arguments, lambda: _run(arguments))


def _run(arguments: argparse.Namespace) -> Answer:
    from beamjax.commands import output
    from beamjax.commands.arguments.binding import find_call, with_files

    options, make_call = find_call(arguments)
    output.check_out(arguments.out, options.keep)
    if options.keep and arguments.out and options.results_folder is None:
        options = replace(options, results_folder=os.path.abspath(arguments.out))
    call = with_files(make_call(), options)
    begin = time.monotonic()
    job = _launch(call, arguments, options)
    result = _wait(job, options.job_folder)
    seconds = time.monotonic() - begin
    if arguments.out:
        output.write_out(result, arguments.out)
    data = {
        "program": job.name,
        "runner": job.runner,
        "seconds": seconds,
        "result": output.result_data(result),
        "out": arguments.out,
        "job_folder": options.job_folder,
        "progress": job.progress().to_json(),
        "dropped": [vars(dropped) for dropped in job.dropped],
    }
    lines = [output.result_text(result), *_dropped(job)]
    lines += [f"written to {arguments.out}"] * bool(arguments.out)
    lines.append(f"{job.name} on {job.runner}: {seconds:.2f} s")
    advice = job.progress().advice
    lines += [advice] * bool(advice)
    return Answer(data, "\n".join(lines))


def _launch(call: Any, arguments: argparse.Namespace, options: Options) -> Job:
    """Starts the job; its folder, if it has one that stays, keeps the command line."""
    from beamjax.commands.arguments.command_lines import keep_command
    from beamjax.execution import launch

    if options.progress is None and sys.stderr.isatty():
        options = replace(options, progress=True)
    job = launch(call.fn, *call.args, runner=arguments.runner, options=options)
    if options.job_folder is not None:
        keep_command(options.job_folder, arguments.argv)
    return job


def _wait(job: Job, folder: str | None) -> Any:
    """The result; a first interrupt cancels the job, a second one leaves at once."""
    try:
        return job.result()
    except BeamjaxError as error:
        if error.run is not None and folder is not None:
            error.add_note(f"beamjax jobs replay {shlex.quote(folder)} --pdb debugs them here.")
        raise
    except KeyboardInterrupt:
        print("beamjax: cancelling the job", file=sys.stderr)
        try:
            job.cancel()
            job.wait()
        except KeyboardInterrupt:
            os._exit(130)
        raise


def _dropped(job: Job) -> Sequence[str]:
    dropped = job.dropped
    return [f"{len(dropped)} members were dropped"] if dropped else []
