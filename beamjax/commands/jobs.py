"""The commands on folders of runs: `jobs` of any process, and the `cache`."""

from __future__ import annotations

import contextlib
import datetime
import os
import pdb
import shlex
from typing import TYPE_CHECKING, Any

import click

from beamjax._text import aligned, hint, human_bytes, listed
from beamjax.commands.answers import DONE, FAILED, Answer, answers
from beamjax.errors import BeamjaxError, JobError, OptionsError

if TYPE_CHECKING:
    from beamjax.telemetry.job_folder import JobFolder

ROOT = "BEAMJAX_JOBS"
"""The variable of the environment that names the folder of all jobs."""

job_argument = click.argument("job", metavar="JOB", type=click.Path())


@click.group(epilog=f"JOB is a folder that was given as --job_folder, or its name in ${ROOT}.")
def jobs() -> None:
    """List, show, cancel, resume, replay or compare jobs."""


# --- list


@jobs.command("list")
@click.argument("folder", envvar=ROOT, default=".", type=click.Path())
@answers
def list_jobs(folder: str) -> Answer:
    """List the jobs in FOLDER and in the folders in it.

    FOLDER is local; by default it is $BEAMJAX_JOBS, or the current folder.
    """
    from beamjax.storage.files import is_url
    from beamjax.telemetry.job_folder import JobFolder

    if is_url(folder):
        raise OptionsError(
            f"{folder}: folders at URLs can't be listed; give a job's own to `beamjax jobs show`"
        )
    if not os.path.isdir(folder):
        raise OptionsError(f"{folder}: found no such folder, expected one with folders of jobs")
    found = []
    for path in _folders(folder):
        try:
            found.append(_summary(JobFolder(path)))
        except BeamjaxError as error:
            found.append({"folder": path, "state": "damaged", "error": str(error)})
    found.sort(key=lambda job: (job.get("started") or "", job["folder"]))
    rows = [("JOB", "STATE", "PROGRAM", "RUNNER", "STARTED", "PROGRESS")]
    for job in found:
        shown = [job.get(name, "-") for name in ("state", "program", "runner", "started", "done")]
        rows.append((os.path.relpath(job["folder"], folder), *shown))
    return Answer({"jobs": found}, "\n".join(aligned(rows)) if found else f"no jobs in {folder}")


def _folders(root: str) -> list[str]:
    below = sorted(entry.path for entry in os.scandir(root) if entry.is_dir())
    return [os.path.abspath(folder) for folder in (root, *below) if _holds_job(folder)]


def _holds_job(folder: str) -> bool:
    from beamjax.storage.records import SUFFIX

    return os.path.isfile(os.path.join(folder, f"job{SUFFIX}"))


def _summary(folder: JobFolder) -> dict[str, Any]:
    """A summary of a job without its result."""
    from beamjax.telemetry.progress import in_words

    described = folder.describe()
    state, error = folder.state()
    progress = folder.progress()
    started = datetime.datetime.fromtimestamp(described["time"]).astimezone()
    return {
        "folder": folder.path,
        "state": state,
        "program": described["name"],
        "runner": described["runner"],
        "started": started.isoformat(sep=" ", timespec="seconds"),
        "process": described["process"],
        "done": in_words(progress) if progress.done.members or progress.step else "-",
        "progress": progress.to_json(),
        "error": error and {"type": error.get("type"), "message": error.get("message")},
    }


# --- show and cancel


def find_job(job: str) -> JobFolder:
    """The folder of a job, by its path or by its name among all jobs; OptionsError for none."""
    from beamjax.storage.files import is_url
    from beamjax.telemetry.job_folder import JobFolder

    root = os.environ.get(ROOT)
    inside = os.path.join(root, job) if root and not is_url(job) else job
    if not is_url(job) and not _holds_job(job) and _holds_job(inside):
        job = inside
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
@click.option("--html", type=click.Path(), help="Write how the run went to a page.")
@answers
def show(job: str, html: str | None) -> Answer:
    """Show state, progress, error and result of JOB."""
    from beamjax.commands.functions import save_page
    from beamjax.jobs.display import made_in_words
    from beamjax.jobs.report import read_report

    folder = find_job(job)
    found = _summary(folder)
    found["dropped"] = len(folder.dropped())
    line = read_command(folder)
    found["command"] = None if line is None else ["beamjax", *line[0]]
    process = found["process"]
    rows = [(name, str(found[name])) for name in ("folder", "state", "program", "runner")]
    rows.append(("started", f"{found['started']} by {process.get('pid')} on {process.get('host')}"))
    rows.append(("progress", found["done"]))
    if made := made_in_words(folder.progress().done):
        rows.append(("made", made))
    if found["dropped"]:
        rows.append(("dropped", f"{found['dropped']} members"))
    if line is not None:
        rows.append(("command", shlex.join(["beamjax", *line[0]])))
    if found["error"] is not None:
        rows.append(("error", "{type}: {message}".format_map(found["error"])))
    if html:
        save_page(read_report(folder), html)
        rows.append(("page", html))
    lines = aligned(rows)
    if found["state"] == "done":
        lines += _add_result(folder, found)
    return Answer({"job": found}, "\n".join(lines))


def _add_result(folder: JobFolder, found: dict[str, Any]) -> list[str]:
    """Adds the result of a job, and its times beside the predicted ones; gives them as lines."""
    from beamjax.commands.output import result_data, result_text
    from beamjax.jobs.display import compared
    from beamjax.jobs.results import read_result

    progress = folder.progress()
    found["predicted"] = {
        "seconds": dict(progress.predicted),
        "measured": progress.measured,
        "factors": progress.factors,
    }
    lines = [*aligned(compared(progress)), *filter(None, [progress.advice])]
    try:
        result = read_result(folder)
    except BeamjaxError as error:
        found["result"] = {"error": str(error)}
        return [*lines, f"the result: {error}"]
    found["result"] = result_data(result)
    return [*lines, result_text(result)]


@jobs.command()
@job_argument
@click.option("--timeout", type=float, default=60.0, show_default=True, help="Seconds to wait.")
@answers
def cancel(job: str, timeout: float) -> Answer:
    """End JOB, and wait until it has ended."""
    from beamjax.jobs.job import Job, JobState

    found = Job(find_job(job))
    found.cancel()
    state = found.wait(timeout)
    text = f"{found.folder}: {state.value}"
    if state is JobState.RUNNING:
        text += f" still, after {timeout:g} s; it ends when its shards under way do"
    status = FAILED if state is JobState.RUNNING else DONE
    return Answer({"folder": found.folder, "state": state.value}, text, status)


# --- resume, replay and diff


@jobs.command()
@job_argument
@answers
def resume(job: str) -> Answer:
    """Run the command line of JOB again, from its last checkpoint if it has one."""
    from beamjax.commands.functions import run

    folder = find_job(job)
    state, _ = folder.state()
    if state == "running":
        raise OptionsError(f"{folder.path}: the job runs; `beamjax jobs cancel` ends it")
    if state == "done":
        raise OptionsError(f"{folder.path}: the job is done; `beamjax jobs show` shows its result")
    argv = _enter(folder)
    click.echo(f"beamjax: in {os.getcwd()}: {shlex.join(['beamjax', *argv])}", err=True)
    return run.answer_to(argv)


@jobs.command()
@job_argument
@click.option("--member", type=int, metavar="N", help="As of beamjax.replay.")
@click.option("--shard", type=int, metavar="N", help="As of beamjax.replay.")
@click.option("--round", type=int, metavar="N", help="As of beamjax.replay.")
@click.option("--step", metavar="NAME", help="Of a step of the plan, or of a function.")
@click.option("--pdb", "debug", is_flag=True, help="Open the debugger where it fails.")
@answers
def replay(job: str, debug: bool, **chosen: Any) -> Answer:
    """Call the body of JOB for single members, as Python in this process."""
    from beamjax import replaying
    from beamjax.commands.functions import run
    from beamjax.commands.output import result_data, result_text

    folder = find_job(job)
    call = run.call_of(_enter(folder))
    fn, args = call.load_for_workers()
    try:
        found = replaying.replay(folder.path, fn, *args, **chosen, options=call.options)
    except BeamjaxError:
        raise
    except Exception as error:
        if debug:
            pdb.post_mortem(error.__traceback__)
        raise
    return Answer({"result": result_data(found)}, result_text(found))


@jobs.command()
@job_argument
@click.argument("other", metavar="OTHER", type=click.Path())
@answers
def diff(job: str, other: str) -> Answer:
    """Say where the results of JOB and OTHER differ, and why; the status is 1 if a bit does."""
    from beamjax.jobs import comparison

    found = comparison.diff(find_job(job).path, find_job(other).path)
    return Answer({"difference": vars(found)}, str(found), FAILED if found else DONE)


def read_command(folder: JobFolder) -> tuple[list[str], str] | None:
    """The command line after `beamjax` that started a job, and its folder; None without one."""
    from beamjax.storage import records

    found = folder.read("command")
    if found is None:
        return None
    path = f"{folder.path}/command{records.SUFFIX}"
    fields: dict[str, Any] = records.checked(found, {"argv": list, "cwd": str}, path)
    return [str(word) for word in fields["argv"]], fields["cwd"]


def _enter(folder: JobFolder) -> list[str]:
    """Changes to the folder in which a job was started; gives the command line.

    Raises:
      OptionsError: the job was not started by a command line, or the folder is gone.
    """
    line = read_command(folder)
    if line is None:
        raise OptionsError(
            f"{folder.path}: the job was not started by `beamjax run`, so the folder lacks its "
            "arguments; call beamjax.run or beamjax.launch again with them. With the same "
            "option `checkpoint` it goes on from the last one"
        )
    if not os.path.isdir(line[1]):
        raise OptionsError(f"{line[1]}: the folder in which the job was started is gone")
    os.chdir(line[1])
    return line[0]


# --- cache


@click.group()
def cache() -> None:
    """Show what a folder of the option cache holds, or clear it."""


@cache.command()
@click.argument("folder", type=click.Path())
@answers
def info(folder: str) -> Answer:
    """Show how many files FOLDER holds, and their bytes."""
    found = _cache(folder).describe()
    limit = human_bytes(found["limit"])
    return Answer(
        found, f"{found['files']:,} files, {human_bytes(found['bytes'])} of at most {limit}"
    )


@cache.command()
@click.argument("folder", type=click.Path())
@answers
def clear(folder: str) -> Answer:
    """Remove the files of FOLDER that a cache wrote."""
    found = _cache(folder).clear()
    return Answer(found, f"removed {found['files']:,} files, {human_bytes(found['bytes'])}")


def _cache(folder: str) -> Any:
    from beamjax.storage.files import is_url
    from beamjax.storage.partial_cache import PartialCache

    if not is_url(folder) and not os.path.isdir(folder):
        raise OptionsError(f"{folder}: found no such folder, expected one of the option cache")
    return PartialCache(folder)
