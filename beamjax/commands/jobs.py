"""`beamjax jobs`: jobs of any process, by their folders."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import pdb
import shlex
import sys
from typing import Any

from beamjax._text import aligned, hint, listed
from beamjax.commands.answers import DONE, FAILED, Answer, fail, give
from beamjax.commands.arguments.command_lines import read_command
from beamjax.errors import BeamjaxError, JobError, OptionsError, SourceError
from beamjax.jobs.display import compared, made_in_words
from beamjax.jobs.report import read_report
from beamjax.sources.arrays.data_files import is_url
from beamjax.storage.records import SUFFIX
from beamjax.telemetry.job_folder import JobFolder
from beamjax.telemetry.progress import in_words

ROOT = "BEAMJAX_JOBS"
"""The variable of the environment that names the folder of all jobs."""
_JOB = f"a folder that was given as --job_folder, or its name in ${ROOT}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `beamjax jobs`."""
    actions = parser.add_subparsers(
        dest="action", metavar="list|show|cancel|resume|replay", required=True
    )
    lists = actions.add_parser("list", help="the jobs in a folder and in the folders in it")
    lists.add_argument(
        "folder", nargs="?", help=f"local folder (default: ${ROOT}, or the current folder)"
    )
    show = actions.add_parser("show", help="state, progress, error and result of a job")
    show.add_argument("--html", metavar="FILE", help="write how the run went to a page")
    cancel = actions.add_parser("cancel", help="end a job, and wait until it has ended")
    cancel.add_argument(
        "--timeout", type=float, default=60.0, help="seconds to wait (default: %(default)s)"
    )
    resume = actions.add_parser(
        "resume", help="run the command line of a job again, from its last checkpoint if it has one"
    )
    replay = actions.add_parser(
        "replay", help="call the body of a job for single members, as Python in this process"
    )
    for name in ("member", "shard", "round"):
        replay.add_argument(f"--{name}", type=int, metavar="N", help="as of beamjax.replay")
    replay.add_argument("--step", metavar="NAME", help="of a step of the plan, or of a function")
    replay.add_argument("--pdb", action="store_true", help="open the debugger where it fails")
    diff = actions.add_parser("diff", help="where the results of two jobs differ, and why")
    for action in (show, cancel, resume, replay, diff):
        action.add_argument("job", metavar="JOB", help=_JOB)
    diff.add_argument("other", metavar="OTHER", help="likewise")
    for action in (lists, show, cancel, resume, replay, diff):
        action.add_argument("--json", action="store_true", help="print JSON on stdout")


def command(arguments: argparse.Namespace) -> int:
    """Runs `beamjax jobs`."""
    if arguments.action == "resume":
        return _resume(arguments)
    actions = {"list": _list, "show": _show, "cancel": _cancel, "replay": _replay, "diff": _diff}
    return give(arguments, lambda: actions[arguments.action](arguments))


# --- list


def _list(arguments: argparse.Namespace) -> Answer:
    root = arguments.folder or os.environ.get(ROOT) or "."
    if is_url(root):
        raise OptionsError(
            f"{root}: folders at URLs can't be listed; give a job's own to `beamjax jobs show`"
        )
    if not os.path.isdir(root):
        raise OptionsError(f"{root}: found no such folder, expected one with folders of jobs")
    found = []
    for folder in _folders(root):
        try:
            found.append(_summary(JobFolder(folder)))
        except BeamjaxError as error:
            found.append({"folder": folder, "state": "damaged", "error": str(error)})
    found.sort(key=lambda job: (job.get("started") or "", job["folder"]))
    rows = [("JOB", "STATE", "PROGRAM", "RUNNER", "STARTED", "PROGRESS")]
    rows += [
        (
            os.path.relpath(job["folder"], root), job["state"], job.get("program", "-"),
            job.get("runner", "-"), job.get("started", "-"), job.get("done", "-"),
        )
        for job in found
    ]  # fmt: skip
    text = "\n".join(aligned(rows)) if found else f"no jobs in {root}"
    return Answer({"jobs": found}, text)


def _folders(root: str) -> list[str]:
    below = sorted(entry.path for entry in os.scandir(root) if entry.is_dir())
    return [
        os.path.abspath(folder)
        for folder in (root, *below)
        if os.path.isfile(os.path.join(folder, f"job{SUFFIX}"))
    ]


def _summary(folder: JobFolder) -> dict[str, Any]:
    """What is known of a job without its result."""
    described = folder.describe()
    state, error = folder.state()
    progress = folder.progress()
    started = datetime.datetime.fromtimestamp(described["time"]).astimezone()
    found: dict[str, Any] = {
        "folder": folder.path,
        "state": state,
        "program": described["name"],
        "runner": described["runner"],
        "started": started.isoformat(sep=" ", timespec="seconds"),
        "process": described["process"],
        "done": in_words(progress) if progress.done.members or progress.step else "-",
        "progress": progress.to_json(),
        "error": None,
    }
    if error is not None:
        found["error"] = {"type": error.get("type"), "message": error.get("message")}
    return found


# --- show


def _folder(job: str) -> JobFolder:
    """The folder of a job, by its path or by its name among all jobs."""
    root = os.environ.get(ROOT)
    inside = os.path.join(root, job) if root and not is_url(job) else job
    if not is_url(job) and not _holds(job) and _holds(inside):
        job = inside
    folder = JobFolder(job)
    try:
        folder.describe()
    except JobError as error:
        names = [os.path.relpath(path) for path in _nearby(job, root)]
        raise OptionsError(f"{error}; jobs nearby: {listed(names)}{hint(job, names)}") from None
    return folder


def _holds(folder: str) -> bool:
    return os.path.isfile(os.path.join(folder, f"job{SUFFIX}"))


def _nearby(job: str, root: str | None) -> list[str]:
    found: list[str] = []
    if not is_url(job):
        for folder in filter(None, (os.path.dirname(job) or ".", root)):
            with contextlib.suppress(OSError):
                found += _folders(folder)
    return found


def _show(arguments: argparse.Namespace) -> Answer:
    folder = _folder(arguments.job)
    found = _summary(folder)
    found["dropped"] = len(folder.dropped())
    line = read_command(folder)
    found["command"] = None if line is None else ["beamjax", *line[0]]
    rows = [(name, str(found[name])) for name in ("folder", "state", "program", "runner")]
    process = found["process"]
    rows.append(("started", f"{found['started']} by {process.get('pid')} on {process.get('host')}"))
    rows.append(("progress", found["done"]))
    if made := made_in_words(folder.progress().done):
        rows.append(("made", made))
    rows += [("dropped", f"{found['dropped']} members")] * bool(found["dropped"])
    rows += [("command", _words(line[0]))] if line else []
    if found["error"] is not None:
        rows.append(("error", "{type}: {message}".format_map(found["error"])))
    if arguments.html:
        try:
            read_report(folder).save(arguments.html)
        except SourceError as error:
            raise OptionsError(f"--html {error}") from error
        rows.append(("page", arguments.html))
    lines = aligned(rows)
    if found["state"] == "done":
        progress = folder.progress()
        found["predicted"] = {
            "seconds": dict(progress.predicted),
            "measured": progress.measured,
            "factors": progress.factors,
        }
        lines += aligned(compared(progress))
        lines += [progress.advice] * bool(progress.advice)
        found["result"], text = _result(folder)
        lines.append(text)
    return Answer({"job": found}, "\n".join(lines))


def _result(folder: JobFolder) -> tuple[Any, str]:
    from beamjax.commands.output import result_data, result_text
    from beamjax.jobs.results import read_result

    try:
        result = read_result(folder)
    except BeamjaxError as error:
        return {"error": str(error)}, f"the result: {error}"
    return result_data(result), result_text(result)


# --- cancel and resume


def _cancel(arguments: argparse.Namespace) -> Answer:
    from beamjax.jobs.job import Job, JobState

    job = Job(_folder(arguments.job))
    job.cancel()
    state = job.wait(arguments.timeout)
    text = f"{job.folder}: {state.value}"
    if state is JobState.RUNNING:
        text += f" still, after {arguments.timeout:g} s; it ends when its shards under way do"
    status = FAILED if state is JobState.RUNNING else DONE
    return Answer({"folder": job.folder, "state": state.value}, text, status)


def _resume(arguments: argparse.Namespace) -> int:
    """Runs a job again; what it prints is what `beamjax run` prints."""
    try:
        argv, cwd = _resumable(_folder(arguments.job))
    except BeamjaxError as error:
        return fail(arguments, error)
    from beamjax.commands import cli

    os.chdir(cwd)
    print(f"beamjax: in {os.getcwd()}: {_words(argv)}", file=sys.stderr)
    return cli.main([*argv[:1], *["--json"] * arguments.json, *argv[1:]])


def _replay(arguments: argparse.Namespace) -> Answer:
    """Calls the body of a job that the command line started."""
    from beamjax.commands import cli
    from beamjax.commands.arguments.binding import find_call, with_files
    from beamjax.commands.output import result_data, result_text
    from beamjax.replaying import replay

    folder = _folder(arguments.job)
    argv, cwd = _line_of(folder)
    os.chdir(cwd)
    options, make_call = find_call(cli.parsed(argv))
    call = with_files(make_call(), options)
    chosen = {name: getattr(arguments, name) for name in ("member", "shard", "step", "round")}
    try:
        found = replay(folder.path, call.fn, *call.args, **chosen, options=options)
    except BeamjaxError:
        raise
    except Exception as error:
        if arguments.pdb:
            pdb.post_mortem(error.__traceback__)
        raise
    return Answer({"result": result_data(found)}, result_text(found))


def _diff(arguments: argparse.Namespace) -> Answer:
    """Compares two jobs; the status is 1 if a bit of their results differs."""
    from beamjax.jobs.comparison import diff

    found = diff(_folder(arguments.job).path, _folder(arguments.other).path)
    return Answer({"difference": vars(found)}, str(found), FAILED if found else DONE)


def _resumable(folder: JobFolder) -> tuple[list[str], str]:
    """The command line of a job that can be run again.

    Raises:
      OptionsError: it runs, is done, or was not started by a command line.
    """
    state, _ = folder.state()
    if state == "running":
        raise OptionsError(f"{folder.path}: the job runs; `beamjax jobs cancel` ends it")
    if state == "done":
        raise OptionsError(f"{folder.path}: the job is done; `beamjax jobs show` shows its result")
    return _line_of(folder)


def _line_of(folder: JobFolder) -> tuple[list[str], str]:
    """The command line of a job, and the folder in which it was given.

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
    return line


def _words(argv: list[str]) -> str:
    return shlex.join(["beamjax", *argv])
