"""The commands on a function: `run`, `verify`, `explain` and `bench`."""

from __future__ import annotations

import functools
import os
import shlex
import signal
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from beamjax._text import aligned
from beamjax.commands.answers import DONE, FAILED, INTERRUPTED, Answer, error_data
from beamjax.commands.calls import Call, Command, call_command, runner_option
from beamjax.errors import BeamjaxError, OptionsError, SourceError, VerificationError

if TYPE_CHECKING:
    from beamjax.jobs.job import Job

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
def run(call: Call, runner: str, out: str | None) -> Answer:
    """Run a function in this process or on a Beam runner."""
    from beamjax.commands import output
    from beamjax.execution import launch
    from beamjax.storage.schema import to_plain
    from beamjax.telemetry.job_folder import JobFolder

    options = call.options
    output.check_out(out, options.keep)
    if options.keep and out and options.results_folder is None:
        options = replace(options, results_folder=os.path.abspath(out))
    if options.progress is None and sys.stderr.isatty():
        options = replace(options, progress=True)
    fn, args = call.load_for_workers()
    begin = time.monotonic()
    job = launch(fn, *args, runner=runner, options=options)
    try:
        if options.job_folder is not None:
            # `jobs resume` and `jobs replay` use it; its paths are relative to the current folder.
            command = Command(tuple(call.argv), os.getcwd())
            JobFolder(options.job_folder).write("command", to_plain(command))
        result = job.result()
    except BeamjaxError as error:
        if error.run is not None:
            folder = options.job_folder
            add = "" if folder else ", add --job_folder=FOLDER; then"
            replay = f"beamjax jobs replay {shlex.quote(folder) if folder else 'FOLDER'} --pdb"
            error.replay_hint = f"To debug it as Python{add}: {replay}"
        raise
    except KeyboardInterrupt as error:
        state = _cancel(job)
        click.echo("beamjax: interrupted", err=True)
        return Answer(
            {"error": error_data(error), "state": state, "job_folder": options.job_folder},
            status=INTERRUPTED,
        )
    seconds = time.monotonic() - begin
    if out:
        output.write_out(result, out)
    data = {
        "program": job.name,
        "runner": job.runner,
        "seconds": seconds,
        "result": output.result_data(result),
        "out": out,
        "job_folder": options.job_folder,
        "progress": job.progress().to_json(),
        "dropped": [vars(dropped) for dropped in job.dropped],
    }
    lines = [output.result_text(result)]
    lines += [f"{len(job.dropped)} members were dropped"] * bool(job.dropped)
    lines += [f"written to {out}"] * bool(out)
    lines.append(f"{job.name} on {job.runner}: {seconds:.2f} s")
    lines += filter(None, [job.progress().advice])
    return Answer(data, "\n".join(lines))


def _cancel(job: Job) -> str:
    """Cancels a job, and waits for its end unless it is interrupted; returns the state."""
    from beamjax.jobs.job import JobState
    from beamjax.telemetry.job_folder import JobFolder

    try:
        click.echo("beamjax: cancelling the job", err=True)
        job.cancel()
        return job.wait().value
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # The process would otherwise wait for the thread of the job after it has answered.
        end = functools.partial(os._exit, INTERRUPTED)
        click.get_current_context().find_root().call_on_close(end)
        JobFolder(job.folder).write_state("cancelled")
        return JobState.CANCELLED.value


@call_command
@one_runner
@click.option(
    "--rtol", type=float, metavar="X", help="Relative tolerance for floats, as in beamjax.verify."
)
@click.option("--atol", type=float, metavar="X", help="Absolute tolerance for floats.")
def verify(call: Call, runner: str, rtol: float | None, atol: float | None) -> Answer:
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
@click.option(
    "--save", type=click.Path(), help="Write shard sizes and loops to a file, for --plan of runs."
)
def explain(
    call: Call, runner: str, stage: str, mermaid: bool, html: str | None, save: str | None
) -> Answer:
    """Show the plan of a function: steps, passes, bytes, memory, predicted time."""
    from beamjax import explanation

    fn, args = call.load_for_workers() if stage == "plan" else call.load()
    found = explanation.explain(fn, *args, stage=stage, runner=runner, options=call.options)
    if html:
        save_page(found, html)
    if save:
        found.save_choices(save)
    data: dict[str, object] = {"stage": found.stage}
    data |= {"text": found.text} if found.facts is None else {"plan": found.to_json()}
    if mermaid:
        return Answer({**data, "mermaid": found.to_mermaid()}, found.to_mermaid())
    return Answer(data, f"written to {html}" if html else found.text)


def save_page(page: Any, path: str) -> None:
    """Writes an explanation or a report to a page of HTML; OptionsError if that fails."""
    try:
        page.save(path)
    except SourceError as error:
        raise OptionsError(f"--html {error}") from error


@call_command
@runner_option(
    multiple=True, default=("local", "DirectRunner"), show_default=True,
    help="A runner to measure; repeatable.",
)  # fmt: skip
@click.option(
    "--repeat", type=click.IntRange(min=1), default=5, show_default=True, metavar="K",
    help="Number of calls after the first.",
)  # fmt: skip
@click.option("--no-jit", is_flag=True, help="Do not measure jax.jit of the whole arrays.")
def bench(call: Call, runner: tuple[str, ...], repeat: int, no_jit: bool) -> Answer:
    """Measure the time of a function on runners and under jax.jit."""
    import jax

    from beamjax.diagnostics.text import human_seconds
    from beamjax.execution import run
    from beamjax.ops.leaves import name_of
    from beamjax.verification import whole_arguments

    options = replace(call.options, progress=False)
    if options.checkpoint is not None or options.job_folder is not None:
        raise OptionsError("bench: found a folder of a job or of checkpoints, expected neither")
    fn, args = call.load()
    reason = "--no-jit" if no_jit else _too_big(fn, args)
    rows = []
    if reason is None:
        whole, jitted = whole_arguments(fn, args), jax.jit(fn)
        rows.append(_measured("jit", lambda: jax.block_until_ready(jitted(*whole)), repeat))
    fn, args = call.load_for_workers()
    for name in dict.fromkeys(runner):
        once = functools.partial(run, fn, *args, runner=name, options=options)
        rows.append(_measured(name, once, repeat))
    for row in rows:
        row["times_jit"] = None if reason else row["median"] / rows[0]["median"]
    cells = [("", "first call", "compiling", "best", "median", "median / jit")]
    for row in rows:
        times = [human_seconds(row[key]) for key in ("first", "once", "best", "median")]
        cells.append((row["runner"], *times, "-" if reason else f"{row['times_jit']:.2f}"))
    lines = [f"{name_of(fn)}, {repeat} calls after the first"]
    lines += [f"  {line}" for line in aligned(cells)] + [f"without jit: {reason}"] * bool(reason)
    return Answer({"program": name_of(fn), "runs": rows, "without_jit": reason}, "\n".join(lines))


def _measured(name: str, call: Callable[[], Any], repeat: int) -> dict[str, Any]:
    """Measures calls. The first one compiles: `once` is the time by which it takes longer."""
    seconds = []
    for number in range(repeat + 1):
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
        click.echo(f"beamjax: {name}, call {number}: {seconds[-1]:.3f} s", err=True)
    first, rest = seconds[0], seconds[1:]
    median = statistics.median(rest)
    return {
        "runner": name, "first": first, "once": max(0.0, first - median), "best": min(rest),
        "median": median, "seconds": rest,
    }  # fmt: skip


def _too_big(fn: Callable[..., Any], args: tuple[Any, ...]) -> str | None:
    """Why the arguments can't all be arrays in memory; None if they can."""
    from beamjax.interpreters.staging.stage import flatten_call

    call = flatten_call(fn, args)
    if call.has_streams:
        return "a source is a stream of unknown length"
    need = sum(aval.size * aval.dtype.itemsize for aval in call.avals)
    if need > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4:
        return f"the arguments have {need / 2**30:.1f} GiB, more than a quarter of the memory"
    return None
