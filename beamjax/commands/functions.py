"""The commands on a function: `run`, `verify` and `explain`."""

from __future__ import annotations

import os
import shlex
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from beamjax.commands.answers import DONE, FAILED, INTERRUPTED, Answer, error_data
from beamjax.commands.calls import Command, Invocation, call_command, runner_option
from beamjax.errors import BeamjaxError, OptionsError, SourceError, VerificationError

if TYPE_CHECKING:
    from beamjax.jobs.job import Job
    from beamjax.options import Options

one_runner = runner_option(
    default="DirectRunner", show_default=True, help="'local' for this process, or a Beam runner."
)


@call_command
@one_runner
@click.option(
    "--out", type=click.Path(), metavar="PATH",
    help="Write the result to an .npz file, in which arrays have the names of their paths, or a "
    "single array to an .npy file; with --keep placed, to a folder.",
)  # fmt: skip
def run(call: Invocation, runner: str, out: str | None) -> Answer:
    """Run a function in this process or on a Beam runner."""
    from beamjax.commands import output
    from beamjax.execution import launch
    from beamjax.telemetry import interrupts

    output.check_out(out, call.options.keep)
    options = _with_defaults(call.options, out)
    fn, args = call.load_for_workers()
    begin = time.monotonic()
    job = launch(fn, *args, runner=runner, options=options)
    try:
        _write_command(call, options.job_folder)
        result = job.result()
    except BeamjaxError as error:
        if error.run is not None:
            error.replay_hint = _replay_hint(options.job_folder)
        raise
    except KeyboardInterrupt as error:
        interrupts.exit_with(INTERRUPTED)
        click.echo("beamjax: interrupted", err=True)
        data = {"error": error_data(error), "state": job.state.value}
        return Answer({**data, "job_folder": options.job_folder}, status=INTERRUPTED)
    seconds = time.monotonic() - begin
    if out:
        output.write_out(result, out)
    return _run_answer(job, result, seconds, out, options.job_folder)


def _with_defaults(options: Options, out: str | None) -> Options:
    """The options with what the command line adds: a folder for results, and a bar."""
    if options.keep and out and options.results_folder is None:
        options = replace(options, results_folder=os.path.abspath(out))
    if options.progress is None and sys.stderr.isatty():
        options = replace(options, progress=True)
    return options


def _write_command(call: Invocation, folder: str | None) -> None:
    """Writes the command line to the folder of the job, for `jobs resume` and `jobs replay`."""
    from beamjax.storage.schema import to_plain
    from beamjax.telemetry.job_folder import JobFolder

    if folder is not None:
        # Its paths are relative to the current folder.
        command = Command(tuple(call.argv), os.getcwd())
        JobFolder(folder).write("command", to_plain(command))


def _replay_hint(folder: str | None) -> str:
    add = "" if folder else ", add --job_folder=FOLDER; then"
    replay = f"beamjax jobs replay {shlex.quote(folder) if folder else 'FOLDER'} --pdb"
    return f"To debug it as Python{add}: {replay}"


def _run_answer(
    job: Job, result: Any, seconds: float, out: str | None, folder: str | None
) -> Answer:
    from beamjax.commands import output

    data = {
        "program": job.name,
        "runner": job.runner,
        "seconds": seconds,
        "result": output.result_data(result),
        "out": out,
        "job_folder": folder,
        "progress": job.progress().to_json(),
        "dropped": [vars(dropped) for dropped in job.dropped],
    }
    lines = [output.result_text(result)]
    lines += [f"{len(job.dropped)} members were dropped"] * bool(job.dropped)
    lines += [f"written to {out}"] * bool(out)
    lines.append(f"{job.name} on {job.runner}: {seconds:.2f} s")
    return Answer(data, "\n".join(lines))


@call_command
@one_runner
@click.option(
    "--rtol", type=float, metavar="X", help="Relative tolerance for floats, as in beamjax.verify."
)
@click.option("--atol", type=float, metavar="X", help="Absolute tolerance for floats.")
def verify(call: Invocation, runner: str, rtol: float | None, atol: float | None) -> Answer:
    """Compare the result on a runner with that of jax.jit."""
    from beamjax import verification

    fn, args = call.load_for_workers()
    try:
        report = verification.verify(
            fn, *args, runner=runner, options=call.options, rtol=rtol, atol=atol
        )
    except VerificationError as error:
        if error.report is None:
            raise
        report = error.report
    rows = [{**vars(row), "passed": row.passed} for row in report.rows]
    failures = [row.failure() for row in report.rows if not row.passed]
    text = "\n".join([str(report), *failures, *[verification.ADVICE] * bool(failures)])
    data = {"program": report.program, "runner": report.runner, "leaves": rows}
    return Answer(data, text, FAILED if failures else DONE)


@call_command
@one_runner
@click.option(
    "--stage", default="plan", show_default=True, metavar="STAGE",
    help="plan, or a stage before it: staged, flat, placed, graph.",
)  # fmt: skip
@click.option("--mermaid", is_flag=True, help="Print a Mermaid flowchart of the steps.")
@click.option(
    "--html", type=click.Path(), help="Write a page with a graph of the steps to this file."
)
def explain(call: Invocation, runner: str, stage: str, mermaid: bool, html: str | None) -> Answer:
    """Show the plan of a function: steps, passes, operations, bytes, memory."""
    from beamjax import explanation

    fn, args = call.load_for_workers() if stage == "plan" else call.load()
    shown = explanation.explain(fn, *args, stage=stage, runner=runner, options=call.options)
    if html:
        save_page(shown, html)
    data: dict[str, object] = {"stage": shown.stage}
    data |= {"plan": shown.to_json()} if stage == "plan" else {"text": shown.text}
    if mermaid:
        return Answer({**data, "mermaid": shown.to_mermaid()}, shown.to_mermaid())
    return Answer(data, f"written to {html}" if html else shown.text)


def save_page(page: Any, path: str) -> None:
    """Writes an explanation or a report to a page of HTML; OptionsError if that fails."""
    try:
        page.save(path)
    except SourceError as error:
        raise OptionsError(f"--html {error}") from error
