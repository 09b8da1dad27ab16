"""The commands on folders of jobs: `jobs`."""

from __future__ import annotations

import contextlib
import datetime
import os
import pdb
import shlex
from typing import TYPE_CHECKING, Any

import click

from beamjax._text import aligned, hint, listed, printable
from beamjax.commands.answers import DONE, FAILED, Answer, answers
from beamjax.commands.calls import Command, make_call, parsed
from beamjax.errors import BeamjaxError, JobError, OptionsError

if TYPE_CHECKING:
    from beamjax.telemetry.job_folder import JobFolder
    from beamjax.telemetry.progress import Progress

ROOT = "BEAMJAX_JOBS"
"""The environment variable that names the folder of all jobs."""

job_argument = click.argument("job", metavar="JOB", type=click.Path())


@click.group(epilog=f"JOB is the --job_folder of a run, or its name in ${ROOT}.")
def jobs() -> None:
    """List, show, cancel, resume or replay jobs."""


# --- list


@jobs.command("list")
@click.argument("folder", envvar=ROOT, default=".", type=click.Path())
@answers
def list_jobs(folder: str) -> Answer:
    """List the jobs in FOLDER and its subfolders.

    FOLDER is local. The default is $BEAMJAX_JOBS, or else the current folder.
    """
    from beamjax.storage import trust
    from beamjax.storage.files import is_url
    from beamjax.telemetry.job_folder import JobFolder

    if is_url(folder):
        raise OptionsError(
            f"{folder}: folders at URLs can't be listed; `beamjax jobs show` takes the URL of a job"
        )
    if not os.path.isdir(folder):
        raise OptionsError(f"{folder}: found no such folder, expected one with folders of jobs")
    summaries = []
    for path in _folders(folder):
        try:
            trust.check_folder(path, "jobs list")
            place = JobFolder(path)
            summaries.append(_summary(place, place.progress()))
        except BeamjaxError as error:
            state = "not trusted" if isinstance(error, OptionsError) else "damaged"
            summaries.append({"folder": path, "state": state, "error": str(error)})
    summaries.sort(key=lambda job: (job.get("started") or "", job["folder"]))
    rows = [("JOB", "STATE", "PROGRAM", "RUNNER", "STARTED", "PROGRESS")]
    for job in summaries:
        shown = [job.get(name, "-") for name in ("state", "program", "runner", "started", "done")]
        rows.append((os.path.basename(job["folder"]), *shown))
    lines = aligned([tuple(map(printable, row)) for row in rows])
    return Answer({"jobs": summaries}, "\n".join(lines) if summaries else f"no jobs in {folder}")


def _folders(root: str) -> list[str]:
    below = sorted(entry.path for entry in os.scandir(root) if entry.is_dir())
    return [os.path.abspath(folder) for folder in (root, *below) if _holds_job(folder)]


def _holds_job(folder: str) -> bool:
    from beamjax.storage.records import SUFFIX

    return os.path.isfile(os.path.join(folder, f"job{SUFFIX}"))


def _summary(folder: JobFolder, progress: Progress) -> dict[str, Any]:
    """A summary of a job, without its result, as JSON values."""
    record = folder.describe()
    state, error = folder.state()
    started = datetime.datetime.fromtimestamp(record.time).astimezone()
    return {
        "folder": folder.path,
        "state": state,
        "program": record.name,
        "runner": record.runner,
        "started": started.isoformat(sep=" ", timespec="seconds"),
        "process": dict(record.process),
        "done": str(progress) if progress.done.members or progress.step else "-",
        "progress": progress.to_json(),
        "error": error and {"type": error.get("type"), "message": error.get("message")},
    }


# --- show and cancel


def find_job(job: str) -> JobFolder:
    """The folder of a job, by its path or by its name in `ROOT`; OptionsError if there is none."""
    from beamjax.storage import trust
    from beamjax.storage.files import is_url
    from beamjax.telemetry.job_folder import JobFolder

    root = os.environ.get(ROOT)
    inside = os.path.join(root, job) if root and not is_url(job) else job
    if not is_url(job) and not _holds_job(job) and _holds_job(inside):
        job = inside
    trust.check_folder(job, "jobs")
    folder = JobFolder(job)
    try:
        folder.describe()
    except JobError as error:
        nearby: list[str] = []
        for parent in filter(None, (os.path.dirname(job) or ".", root)):
            with contextlib.suppress(OSError):
                nearby += map(os.path.relpath, _folders(parent))
        raise OptionsError(f"{error}; jobs nearby: {listed(nearby)}{hint(job, nearby)}") from None
    return folder


@jobs.command()
@job_argument
@click.option("--html", type=click.Path(), help="Write a page on the run to this file.")
@answers
def show(job: str, html: str | None) -> Answer:
    """Show the state, progress, error and result of JOB."""
    from beamjax.commands.functions import save_page
    from beamjax.jobs.display import made_in_words
    from beamjax.jobs.report import read_report

    folder = find_job(job)
    progress = folder.progress()
    summary = _summary(folder, progress)
    summary["dropped"] = len(folder.dropped())
    command = read_command(folder)
    summary["command"] = None if command is None else ["beamjax", *command.argv]
    process = summary["process"]
    rows = [(name, str(summary[name])) for name in ("folder", "state", "program", "runner")]
    rows.append(
        ("started", f"{summary['started']} by {process.get('pid')} on {process.get('host')}")
    )
    rows.append(("progress", summary["done"]))
    if loaded := made_in_words(progress.done):
        rows.append(("loaded", loaded))
    if summary["dropped"]:
        rows.append(("dropped", f"{summary['dropped']} members"))
    if command is not None:
        rows.append(("command", shlex.join(summary["command"])))
    if summary["error"] is not None:
        rows.append(("error", "{type}: {message}".format_map(summary["error"])))
    if html:
        save_page(read_report(folder), html)
        rows.append(("page", html))
    # The message of an error may have several lines, and comes last.
    lines = aligned([(name, printable(text, lines=name == "error")) for name, text in rows])
    if summary["state"] == "done":
        lines += _add_result(folder, summary)
    return Answer({"job": summary}, "\n".join(lines))


def _add_result(folder: JobFolder, summary: dict[str, Any]) -> list[str]:
    """Adds the result of a job to `summary`; returns its text."""
    from beamjax.commands.output import result_data, result_text
    from beamjax.jobs.results import read_result

    try:
        result = read_result(folder)
    except BeamjaxError as error:
        summary["result"] = {"error": str(error)}
        return [f"the result: {error}"]
    summary["result"] = result_data(result)
    return [result_text(result)]


@jobs.command()
@job_argument
@click.option(
    "--timeout",
    type=float,
    default=60.0,
    show_default=True,
    help="Longest time to wait, in seconds.",
)
@answers
def cancel(job: str, timeout: float) -> Answer:
    """Cancel JOB, and wait until it has ended."""
    from beamjax.jobs.job import Job, JobState

    handle = Job(find_job(job))
    handle.cancel()
    state = handle.wait(timeout)
    text = f"{handle.folder}: {state.value}"
    if state is JobState.RUNNING:
        text += f" after {timeout:g} s; it ends when its workers have finished their shards"
    status = FAILED if state is JobState.RUNNING else DONE
    return Answer({"folder": handle.folder, "state": state.value}, text, status)


# --- resume and replay


@jobs.command()
@job_argument
@answers
def resume(job: str) -> Answer:
    """Run JOB again by its command line, from its last checkpoint if there is one."""
    from beamjax.commands.functions import run

    folder = find_job(job)
    state, _ = folder.state()
    if state == "running":
        raise OptionsError(f"{folder.path}: the job is running; `beamjax jobs cancel` ends it")
    if state == "done":
        raise OptionsError(f"{folder.path}: the job is done; `beamjax jobs show` shows its result")
    argv = _enter(folder)
    callback: Any = run.callback
    answer: Answer = callback.__wrapped__(**parsed(run, argv))
    return answer


@jobs.command()
@job_argument
@click.option("--member", type=int, metavar="N", help="Index of a member.")
@click.option("--shard", type=int, metavar="N", help="Number of a shard, to call all its members.")
@click.option("--round", type=int, metavar="N", help="Round of a loop, from 0.")
@click.option("--step", metavar="NAME", help="Step of the plan, or function in it.")
@click.option("--pdb", "debug", is_flag=True, help="Open the debugger at the error.")
@answers
def replay(job: str, debug: bool, **chosen: Any) -> Answer:
    """Call the body of JOB for one member, as Python in this process."""
    from beamjax import replaying
    from beamjax.commands.functions import run
    from beamjax.commands.output import result_data, result_text

    folder = find_job(job)
    call = make_call(parsed(run, _enter(folder)))
    fn, args = call.load_for_workers()
    try:
        result = replaying.replay(folder.path, fn, *args, **chosen, options=call.options)
    except BeamjaxError:
        raise
    except Exception as error:
        if debug:
            pdb.post_mortem(error.__traceback__)
        raise
    return Answer({"result": result_data(result)}, result_text(result))


def read_command(folder: JobFolder) -> Command | None:
    """The command line that started a job; None if another process called beamjax."""
    from beamjax.storage.schema import from_plain

    record = folder.read("command")
    return None if record is None else from_plain(Command, record, folder.record_path("command"))


def _enter(folder: JobFolder) -> list[str]:
    """Changes to the folder in which a job was started; prints and returns the command line."""
    command = read_command(folder)
    if command is None:
        raise OptionsError(
            f"{folder.path}: the job was not started by `beamjax run`, so its arguments are not in "
            "the folder; call beamjax.run or beamjax.launch again with them. With the same option "
            "`checkpoint`, the run continues from its last checkpoint"
        )
    if not os.path.isdir(command.cwd):
        raise OptionsError(f"{command.cwd}: the folder in which the job was started is gone")
    os.chdir(command.cwd)
    # It runs code of that folder, so users see it before it runs.
    line = shlex.join(["beamjax", *command.argv])
    click.echo(printable(f"beamjax: in {os.getcwd()}: {line}"), err=True)
    return list(command.argv)
