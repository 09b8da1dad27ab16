"""Options of a run: those of beamjax, and those for Beam."""

from __future__ import annotations

import argparse
import functools
import inspect
import operator
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from beamjax.errors import OptionsError
from beamjax.options import rules
from beamjax.options.rules import Rule
from beamjax.storage import files, trust


def _option(default: Any, rule: Rule, planning: bool = False) -> Any:
    """A field of `Options`, with the rule for its values, and whether a plan depends on it."""
    return field(default=default, metadata={"rule": rule, "planning": planning})


XLA_THREADS = 4
"""Default of the option `xla_threads`. Dividing a computation costs time: with 16 threads on two
cores, large products take up to 25 % longer. A process with more cores computes several shards, on
more clients of XLA."""


@dataclass(frozen=True)
class Options:
    """How a program is planned and run.

    Attributes:
      shard_size: number of members in a shard, a multiple of 8. None chooses it by the bytes of a
        member.
      member_loop: how the members of a shard are computed: "vmap" all at once, "loop" sequentially,
        "batches" some at a time. None chooses by the bodies.
      reduction: how floats are added: "exact" rounds sums and means correctly, with the same bits
        in any order, "fast" adds in float64, and the last bits depend on the order.
      platforms: what JAX may compute on in the workers: "cpu", "cuda", "rocm", "tpu". Bodies are
        exported for all of them, and any other worker fails when it starts, with the reason. None
        means the platform of this process.
      work_folder: folder for values that are too large for a Beam element while a pipeline runs. It
        is a path or URL that this process and all workers can reach. None makes a temporary folder
        on this machine.
      gather_limit: largest number of bytes of a placed value that staging gathers to the server.
        None sets no limit. `explain` shows what is gathered, and why.
      job_folder: folder for the records of the job and its result, from which `open_job` reads them
        in any process. It is a path or URL that this process and all workers can reach. beamjax
        does not remove it. While the job runs, values are stored below it, unless there is a
        `work_folder`. None makes a temporary folder where one is needed.
      overwrite: whether the run may replace a job that is done in its `job_folder`, with its
        result, and results of other runs in its `results_folder`.
        Jobs that failed, were cancelled or are lost are always replaced, running jobs never.
      progress: whether to show the progress of `run` or `launch` on stderr, as a bar in terminals
        and notebooks, and as a line every ten seconds elsewhere. None shows the bar of a `run` of
        more than two seconds in a terminal or a notebook, and a line every thirty seconds
        elsewhere.
      report: file, by path or URL, for an HTML page on the run (`.html`) or a trace of it
        (`.json`). It is written when the run has ended, even if it failed.
      local_devices: number of devices of a worker that compute, each a shard at a time. None means
        all accelerators, or one CPU device. The bits do not depend on it.
      local_threads: number of threads that compute shards, for runner="local", and for DirectRunner
        with one worker in this process. None takes one for each core. Passes with little work, by
        the operations that `explain` shows, are computed in the thread that reads them; 1 computes
        all shards sequentially. The bits do not depend on it.
      xla_threads: number of threads among which XLA divides one computation on a CPU, in all
        processes of the run. A process with more cores computes several shards at once. The bits
        depend on this number, and not on the cores of a machine, so it is the same on every
        machine. LAPACK computes with one thread.
      cache: folder, by path or URL, for the partials of shards, from which later runs take those of
        unchanged shards. They compute only shards whose members, bodies or server values have
        changed, with the same bits. The folder holds the 10 GiB that were used last. No other user
        may write there. None stores nothing.
      shard_timeout: seconds that reading or computing a shard may take. After that, the run fails
        with a `WorkerError`. Compilation does not count. None sets no limit.
      checkpoint: folder, by path or URL, for checkpoints, from which a stopped run continues. They
        are saved after rounds of loops around placed operators. The folder belongs to one run: the
        same plan and inputs. None saves nothing.
      checkpoint_every: number of rounds between two checkpoints.
      memory: largest memory of a worker process, as bytes or a text such as "2GiB" or "500MB". A
        program that may take more, by the estimate of `explain`, is refused before it starts.
        Caches of decoded blocks and of server values depend on it, too. None sets no limit.
      on_error: what happens to a member that can't be read, or whose body raises an error: "raise"
        fails the run, "drop" leaves it out. A dropped member is left out of all reductions of this
        pass and of those that follow it, where means are over the rest. Its placed results, and its
        rows in gathered values, are NaN, or 0 if the dtype has no NaN. What the program computes
        from the number of members by itself (`jnp.mean`, the gradient of a mean) still counts all
        members.
      on_nonfinite: what happens to a member with NaN or infinity in a value: "keep" computes with
        it, as JAX does, "raise" fails the run, "drop" leaves the member out, as for `on_error`.
        Values count if they are reduced over the members, gathered to the server or returned.
      drop_limit: share of the members of a placement that may be dropped before the run fails, from
        0 to 1. A run always fails if no member is left.
      dead_letters: file, by path or URL, with a line of JSON for each dropped member. It has the
        placement, index, step, reason and message. There is no file if no member is dropped.
      keep: "placed" leaves placed results in files that the workers write, and returns a `Placed`
        for each whose members lie along axis 0. None returns arrays.
      results_folder: folder, by path or URL, for the files of `keep`. Each result has a folder in
        it. None takes a folder in `job_folder`, or a temporary one that is removed with the
        handles, in `work_folder` if there is one.
      beam: options for Beam: a PipelineOptions, or flags.
    """

    shard_size: int | None = _option(None, rules.eights, planning=True)
    member_loop: str | None = _option(None, rules.one_of(*rules.MEMBER_LOOPS), planning=True)
    reduction: str = _option("exact", rules.one_of("exact", "fast"))
    platforms: tuple[str, ...] | None = _option(None, rules.platforms, planning=True)
    work_folder: str | None = _option(None, rules.path("folder"))
    gather_limit: int | None = _option(None, rules.nbytes, planning=True)
    job_folder: str | None = _option(None, rules.path("folder"))
    overwrite: bool = _option(False, rules.boolean)
    progress: bool | None = _option(None, rules.boolean)
    report: str | None = _option(None, rules.path("file", ".html", ".htm", ".json"))
    local_devices: int | None = _option(None, rules.at_least_1)
    local_threads: int | None = _option(None, rules.at_least_1)
    xla_threads: int = _option(XLA_THREADS, rules.at_least_1)
    cache: str | None = _option(None, rules.path("folder"))
    shard_timeout: float | None = _option(None, rules.seconds)
    checkpoint: str | None = _option(None, rules.path("folder"))
    checkpoint_every: int = _option(1, rules.at_least_1)
    memory: int | str | None = _option(None, rules.memory, planning=True)
    on_error: str = _option("raise", rules.one_of("raise", "drop"), planning=True)
    on_nonfinite: str = _option("keep", rules.one_of("keep", "raise", "drop"), planning=True)
    drop_limit: float = _option(0.1, rules.share)
    dead_letters: str | None = _option(None, rules.path("file"))
    keep: str | None = _option(None, rules.one_of("placed"))
    results_folder: str | None = _option(None, rules.path("folder"))
    beam: Any = field(default=(), hash=False)

    @property
    def memory_bytes(self) -> int | None:
        """The option `memory` in bytes."""
        return None if self.memory is None else RULES["memory"].read(self.memory)

    @property
    def scratch_folder(self) -> str | None:
        """The folder for temporary files of this process; None is the default of `tempfile`."""
        folder = self.work_folder
        return folder if folder is not None and os.path.isdir(folder) else None

    @functools.cached_property
    def planning(self) -> tuple[Any, ...]:
        """The options that a plan depends on."""
        return _planning(self)


RULES: dict[str, Rule] = {f.name: f.metadata["rule"] for f in fields(Options) if f.metadata}
"""The rule for the values of each option. An option with the default None may also be None."""
_OWN_FOLDERS = ("job_folder", "cache", "checkpoint", "results_folder")
"""The options with folders of which beamjax reads what it finds there."""
_DEFAULTS = Options()
OWN = tuple(RULES)
"""Names of the options of beamjax; all others are options of Beam."""
_planning = operator.attrgetter(*(f.name for f in fields(Options) if f.metadata.get("planning")))


@functools.cache
def summaries() -> dict[str, str]:
    """The first sentence on each option, from the docstring of `Options`, for the command line."""
    _, _, attributes = (inspect.getdoc(Options) or "").partition("Attributes:\n")
    sentences = {}
    for entry in re.split(r"\n  (?=\w)", f"\n{attributes}"):
        name, _, text = entry.strip().partition(": ")
        first = re.split(r"(?<=[.;])\s", " ".join(text.split()))[0].rstrip(".;")
        sentences[name] = f"{first[:1].upper()}{first[1:]}."
    return sentences


def parse_options(options: Any) -> Options:
    """The checked options for what a user gave, with those of Beam in `beam`."""
    # None, an `Options`, a Beam `PipelineOptions`, a list of flags such as ["--shard_size=64"], or
    # a dict such as {"shard_size": 64}. Names that beamjax does not have are options of Beam.
    if options is None:
        return _DEFAULTS
    if isinstance(options, Options):
        return _checked(options)
    if isinstance(options, Mapping):
        own = {key: value for key, value in options.items() if key in RULES}
        others = {k: v for k, v in options.items() if k not in RULES and k != "beam"}
        return _checked(Options(**own, beam=_with_flags(options.get("beam", ()), others)))
    if isinstance(options, Sequence) and not isinstance(options, str):
        own, flags = _split_own(options)
        return _checked(Options(**own, beam=tuple(flags)))
    if hasattr(options, "view_as"):
        by_name = options.get_all_options(retain_unknown_options=True)
        own = {key: by_name[key] for key in OWN if by_name.get(key) is not None}
        return _checked(Options(**own, beam=options))
    raise OptionsError(
        f"options: found a {type(options).__name__}, expected a dict, a list of flags or a Beam "
        "PipelineOptions"
    )


def _split_own(options: Sequence[Any]) -> tuple[dict[str, Any], list[str]]:
    """The options of beamjax among flags, and the other flags."""
    for flag in options:
        if not isinstance(flag, str):
            raise OptionsError(f"options: found the flag {flag!r}, expected text like '--name=x'")
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False, exit_on_error=False)
    for name in OWN:
        parser.add_argument(f"--{name}", default=argparse.SUPPRESS)
    try:
        own, flags = parser.parse_known_args(list(options))
    except argparse.ArgumentError as error:
        raise OptionsError(f"options: {error}") from error
    return vars(own), flags


def _with_flags(beam: Any, others: Mapping[str, Any]) -> Any:
    """The options for Beam of a dict: those of its entry `beam`, and its entries of other names."""
    flags = [flag for key, value in others.items() if (flag := _flag(key, value))]
    if isinstance(beam, list | tuple):
        return (*beam, *flags)
    if not hasattr(beam, "view_as"):
        raise OptionsError(
            f"beam: found {beam!r:.80}, expected a list of flags or a Beam PipelineOptions"
        )
    if flags:
        raise OptionsError(
            f"options: found {next(iter(others))!r} beside a PipelineOptions in 'beam', expected "
            "all options of Beam in the PipelineOptions"
        )
    return beam


def _flag(key: str, value: Any) -> str | None:
    if value is None or value is False:
        return None
    return f"--{key}" if value is True else f"--{key}={value}"


def _checked(options: Options) -> Options:
    """The same options, with values as their rules read them."""
    by_name, defaults = vars(options), vars(_DEFAULTS)
    values = {}
    for name, rule in RULES.items():
        chosen, default = by_name[name], defaults[name]
        if chosen is default:
            continue
        try:
            values[name] = rule.read(chosen)
        except (TypeError, ValueError) as error:
            if isinstance(error, OptionsError):
                raise
            optional = ", or None" if default is None else ""
            raise OptionsError(
                f"{name}: found {chosen!r}, expected {rule.expected}{optional}"
            ) from None
    for name, value in values.items():
        if isinstance(value, str) and files.is_url(value):
            reason = files.remote().missing(value)
            if reason is not None:
                raise OptionsError(
                    f"{name}: found {value!r}, which {reason}; expected a path, or a URL that "
                    "fsspec reaches here and on the workers"
                )
    for name in _OWN_FOLDERS:
        if name in values:
            trust.check_folder(values[name], name)
    if "work_folder" in values:  # each run makes a folder of its own there
        trust.check_folder(files.join(values["work_folder"], "run"), "work_folder")
    # Read during and after a run, when the working directory may have changed.
    for name in ("cache", "checkpoint", "dead_letters", "report"):
        if name in values and not files.is_url(values[name]):
            values[name] = os.path.abspath(values[name])
    changed = {name: value for name, value in values.items() if value is not by_name[name]}
    read = replace(options, **changed) if changed else options
    _check_together(read)
    return read


def _check_together(options: Options) -> None:
    """Raises OptionsError for options that exclude each other."""
    if options.dead_letters and "drop" not in (options.on_error, options.on_nonfinite):
        raise OptionsError(
            "dead_letters: found a file, but no members are dropped; add on_error='drop' or "
            "on_nonfinite='drop'"
        )


# --- flags of Beam


def split_flags(words: Sequence[str]) -> Iterator[tuple[str, str, list[str]]]:
    """Splits flags as Beam does into their names, values, and the words that they come from."""
    # `--name=value`, `--name value`, or `--name` with the value "". The name is "" for a word
    # without a flag.
    left = list(words)
    while left:
        taken = [left.pop(0)]
        name, equals, value = taken[0].partition("=")
        if not name.startswith("--"):
            yield "", taken[0], taken
            continue
        if not equals and left and not re.match(r"-(?!\d)", left[0]):
            value = left.pop(0)
            taken.append(value)
        yield name.removeprefix("--"), value, taken


def beam_flags(beam: Any) -> dict[str, Any]:
    """The options for Beam by name, from a `PipelineOptions` or flags."""
    if hasattr(beam, "get_all_options"):
        by_name: dict[str, Any] = beam.get_all_options(
            drop_default=True, retain_unknown_options=True
        )
        return by_name
    return {name: value for name, value, _ in split_flags(beam) if name}
