"""Options of a run: beamjax's own, and those that are Beam's."""

from __future__ import annotations

import argparse
import functools
import inspect
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from beamjax.errors import OptionsError
from beamjax.options import rules
from beamjax.options.choices import MEMBER_LOOPS, RECOMPUTE, Choices
from beamjax.options.rules import REQUIRED as REQUIRED
from beamjax.options.rules import Rule


def _option(default: Any, rule: Rule, planning: bool = False) -> Any:
    """A field of `Options`: what it may be, and whether a plan depends on it."""
    return field(default=default, metadata={"rule": rule, "planning": planning})


XLA_THREADS = 16
"""Enough for the shards of most machines to be computed side by side. Idle threads cost nothing;
XLA makes no part of a computation smaller than what is worth handing to another thread."""


@dataclass(frozen=True)
class Options:
    """How a program is planned and run.

    Attributes:
      shard_size: members in a shard, a multiple of 8; None chooses by the bytes of a member, or by
        `probe`.
      member_loop: how a shard is computed: "vmap" for all of its members at once, "loop" for each
        of them sequentially, "batches" for some at once. None chooses by the bodies, or by `probe`.
      member_batch: members at once for "batches", a multiple of 8 of which shards have a whole
        number; None chooses by the bytes of a member.
      probe: whether shard size and loop are chosen by timing the bodies of long passes on made-up
        data: True for passes of any length, False for none; None where it pays. What was found is
        remembered, by program, machine and version of JAX.
      plan: a file that `explain(...).save_choices(path)` wrote. The run takes its shard sizes and
        loops, and so gives the same bits. A path, or None.
      reduction: "exact" gives float sums and means that are correctly rounded, and the same bits
        for any order; "fast" adds in float64, with no promise about the last bits.
      platforms: the platforms of the workers: "cpu", "cuda", "rocm", "tpu". None means
        `require_platform`, or without it the platform of this process.
      callbacks: whether steps that JAX can't export, most of which call back to the host
        (`jax.debug.print`, `jax.pure_callback`, ...), may run as Python, for which the function
        travels to other processes by cloudpickle; False refuses them. A call is made once a
        member, but again if Beam retries a bundle.
      work_folder: a folder for values too big for a Beam element while a pipeline runs: a path or
        URL that this process and all workers reach. None makes a temporary folder here.
      recompute: which placed values later passes rematerialize, and which are stored for them:
        "elementwise" rematerializes results of elementwise operations, "nothing" stores all values,
        "everything" stores only those that can't be rematerialized, so bodies of `map_fn` run
        again. None is "elementwise", except where the other way is predicted to be clearly faster.
      merge_fan_out: the number of groups in which the partials of a pass are merged concurrently,
        before the results of the groups are merged; 1 for none. None chooses the number with the
        least predicted time, from bytes and workers.
      small_work: "here" runs a program in this process if its predicted work is shorter than the
        overhead of a pipeline on the runner; "runner" always uses the runner.
      gather_limit: bytes past which staging refuses to gather a placed value to the server; None
        gathers whatever an operation needs. `explain` shows what is gathered, and why.
      job_folder: a folder for the records of the job and its result, from which `open_job` reads
        them in any process: a path or URL that this process and all workers reach. beamjax does not
        remove it. Values are stored below it while the job runs, unless there is a `work_folder`.
        None makes a temporary folder where one is needed.
      overwrite: whether a job may replace one that is done in its `job_folder`, with its result.
        Jobs that failed, were cancelled or are lost are always replaced, running jobs never.
      keep_folder: "failed" keeps a temporary folder, and all values in it, if the job fails;
        "always" in any case. The error says where it is.
      progress: whether to show the progress of `run` or `launch` on stderr: a bar in terminals and
        notebooks, a line every ten seconds elsewhere. None shows the bar of a `run` of more than
        two seconds in a terminal or a notebook, and nothing else.
      report: a file, by path or URL, for an HTML page on the run, written when it has ended, even
        if it failed.
      require_platform: "cpu", "gpu" (which is "cuda" or "rocm"), "cuda", "rocm" or "tpu": a worker
        where JAX computes on something else fails when it starts, with the reason.
      device_memory_fraction: the share, from 0 to 1, of the memory of each device that JAX may take
        on a worker. None leaves the setting of the worker's environment.
      preallocate: whether JAX takes this memory when it starts. None leaves the setting of the
        worker's environment.
      local_devices: how many devices of a worker compute, each a shard at a time. None means all
        of an accelerator, and one of a CPU. The bits do not depend on it.
      local_threads: how many threads compute shards with runner="local", or on DirectRunner with
        its one worker in this process. None takes one for each core, but at most one for shards
        that are very short or that XLA computes on all cores; 1 computes shards sequentially. The
        bits do not depend on it.
      xla_threads: the number of threads among which XLA divides one computation on a CPU, in all
        processes of the run. The bits depend on this number, and not on the cores of a machine, so
        it is the same on every machine. LAPACK computes with one thread.
      strict: True fails a run whose results were computed on machines that may give other bits:
        other processors, or versions of JAX. False only reports it.
      compile_cache: a folder, by path or URL, in which JAX keeps what the processes of the run
        compile, and where later ones find it: JAX's own cache, which holds executables of any size
        then, those of the rest of this process included. No other user may write there, and
        machines of one type share it. None leaves JAX's settings as they are, such as
        JAX_COMPILATION_CACHE_DIR in the environment.
      cache: a folder, by path or URL, for the partials of shards, so that later runs compute only
        the shards whose members, bodies or server values have changed, with the same bits. It holds
        the 10 GiB that were used last. No other user may write there. None stores nothing.
      cut_at_files: whether shards end where a file of a source ends, so that an inserted file moves
        no members of other files into other shards. The bits of float sums depend on it. None is
        True with a `cache`, and False without.
      shard_timeout: seconds that reading or computing a shard may take; after that, the run fails
        with a `WorkerError`. Compiling does not count. None sets no limit.
      checkpoint: a folder, by path or URL, in which `run` saves its state after rounds of loops
        around placed operators, and from which a stopped run continues. The folder belongs to one
        run: the same plan and inputs. None saves nothing.
      checkpoint_every: rounds between two checkpoints; also as many rounds at most make one Beam
        pipeline.
      memory: of a worker process: bytes, or a text such as "2GiB" or "500MB". A program that may
        take more, by the estimate of `explain`, is refused before it starts; and caches of decoded
        blocks and of server values are smaller. None refuses nothing.
      on_error: "raise" fails the run where a member can't be read, or a body raises an error for
        it; "drop" leaves such members out: of all reductions of this pass and of those that follow
        it, where means are over the rest. Their placed results, and their rows in gathered values,
        are NaN, or 0 if the dtype has no NaN. What the program computes from the number of members
        by itself (`jnp.mean`, the gradient of a mean) still counts all of them.
      on_nonfinite: "keep" computes with NaN and infinity, as JAX does; "raise" fails the run where
        they are in a value of a member that is reduced over the members, gathered to the server or
        returned; "drop" leaves such a member out likewise.
      drop_limit: the share of the members of a placement, from 0 to 1, that may be dropped before
        the run fails. A run fails in any case if none is left.
      dead_letters: a file, by path or URL, for a line of JSON for each dropped member: placement,
        index, step, reason and message. There is no file if none is dropped.
      keep: "placed" leaves placed results in files, written by the workers, and gives a `Placed`
        for each whose members lie along axis 0. None gives arrays.
      results_folder: for these files, by path or URL, a folder for each result in it. None takes
        one in `job_folder`, or a temporary one that goes with the handles, in `work_folder` if
        there is one.
      beam: the options that are passed to Beam: a PipelineOptions, or flags.
    """

    shard_size: int | None = _option(None, rules.eights, planning=True)
    member_loop: str | None = _option(None, rules.one_of(*MEMBER_LOOPS), planning=True)
    member_batch: int | None = _option(None, rules.eights, planning=True)
    probe: bool | None = _option(None, rules.boolean, planning=True)
    plan: Choices | str | None = _option(None, rules.saved_plan, planning=True)
    recompute: str | None = _option(None, rules.one_of(*RECOMPUTE), planning=True)
    merge_fan_out: int | None = _option(None, rules.at_least_1)
    small_work: str = _option("runner", rules.one_of("runner", "here"))
    reduction: str = _option("exact", rules.one_of("exact", "fast"))
    platforms: tuple[str, ...] | None = _option(None, rules.platforms, planning=True)
    work_folder: str | None = _option(None, rules.path("folder"))
    callbacks: bool = _option(True, rules.boolean, planning=True)
    gather_limit: int | None = _option(None, rules.nbytes, planning=True)
    job_folder: str | None = _option(None, rules.path("folder"))
    overwrite: bool = _option(False, rules.boolean)
    keep_folder: str | None = _option(None, rules.one_of("failed", "always"))
    progress: bool | None = _option(None, rules.boolean)
    report: str | None = _option(None, rules.path("file"))
    require_platform: str | None = _option(None, rules.one_of(*REQUIRED))
    device_memory_fraction: float | None = _option(None, rules.positive_share)
    preallocate: bool | None = _option(None, rules.boolean)
    local_devices: int | None = _option(None, rules.at_least_1)
    local_threads: int | None = _option(None, rules.at_least_1)
    xla_threads: int = _option(XLA_THREADS, rules.at_least_1)
    strict: bool = _option(False, rules.boolean)
    compile_cache: str | None = _option(None, rules.path("folder"))
    cache: str | None = _option(None, rules.path("folder"))
    cut_at_files: bool | None = _option(None, rules.boolean)
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
        """The option `memory` as a number."""
        return None if self.memory is None else RULES["memory"].read(self.memory)

    @property
    def scratch_folder(self) -> str | None:
        """A folder for files of this process; None for the usual folder of temporary files."""
        folder = self.work_folder
        return folder if folder is not None and os.path.isdir(folder) else None

    @property
    def keeps_files(self) -> bool:
        """Whether files of a run are read by users or later runs, not only by its workers."""
        return bool(self.checkpoint or self.keep_folder)

    @property
    def cuts_at_files(self) -> bool:
        """The option `cut_at_files`, or its default."""
        return self.cache is not None if self.cut_at_files is None else self.cut_at_files

    @property
    def planning(self) -> tuple[Any, ...]:
        """The options that a plan depends on."""
        return tuple(getattr(self, name) for name in _PLANNING)


RULES: dict[str, Rule] = {f.name: f.metadata["rule"] for f in fields(Options) if f.metadata}
"""What each option may be. An option whose default is None may be None as well."""
OWN = tuple(RULES)
_PLANNING = [f.name for f in fields(Options) if f.metadata.get("planning")]


@functools.cache
def summaries() -> dict[str, str]:
    """The first sentence on each option, from the docstring of `Options`."""
    _, _, attributes = (inspect.getdoc(Options) or "").partition("Attributes:\n")
    found = {}
    for entry in re.split(r"\n  (?=\w)", f"\n{attributes}"):
        name, _, text = entry.strip().partition(": ")
        found[name] = re.split(r"(?<=[.;])\s", " ".join(text.split()))[0].rstrip(".;")
    return found


def parse_options(options: Any) -> Options:
    """Reads what a user gave as `options`.

    Args:
      options: None, an `Options`, a Beam `PipelineOptions`, a list of flags such as
        `["--shard_size=64", "--direct_num_workers=2"]`, or a dict such as `{"shard_size": 64}`.
        Names that are not beamjax's own are Beam's.

    Returns:
      The checked options, with those of Beam in `beam`.

    Raises:
      OptionsError: an option of beamjax has an impossible value.
    """
    if options is None:
        return Options()
    if isinstance(options, Options):
        return _checked(options)
    if isinstance(options, Mapping):
        own = {key: value for key, value in options.items() if key in OWN}
        flags = [flag for k, v in options.items() if k not in OWN and (flag := _flag(k, v))]
        return _checked(replace(Options(), **own, beam=tuple(flags)))
    if isinstance(options, Sequence) and not isinstance(options, str):
        own, flags = _split_own(options)
        return _checked(replace(Options(), **own, beam=tuple(flags)))
    if hasattr(options, "view_as"):
        found = options.get_all_options(retain_unknown_options=True)
        own = {key: found[key] for key in OWN if found.get(key) is not None}
        return _checked(replace(Options(), **own, beam=options))
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
        found, flags = parser.parse_known_args(list(options))
    except argparse.ArgumentError as error:
        raise OptionsError(f"options: {error}") from error
    return vars(found), flags


def _flag(key: str, value: Any) -> str | None:
    if value is None or value is False:
        return None
    return f"--{key}" if value is True else f"--{key}={value}"


def _checked(options: Options) -> Options:
    """The same options, with values as their rules read them."""
    values = {}
    for each in fields(Options):
        found, rule = getattr(options, each.name), each.metadata.get("rule")
        if rule is None or (found is None and each.default is None):
            continue
        try:
            values[each.name] = rule.read(found)
        except (TypeError, ValueError) as error:
            if isinstance(error, OptionsError):
                raise
            optional = ", or None" if each.default is None else ""
            raise OptionsError(
                f"{each.name}: found {found!r}, expected {rule.expected}{optional}"
            ) from None
    for name in ("cache", "compile_cache"):
        if name in values and "://" not in values[name]:
            values[name] = os.path.abspath(values[name])
    if (required := values.get("require_platform")) is not None:
        values.setdefault("platforms", REQUIRED[required][:1])
    read = replace(options, **values)
    _check_together(read)
    return read


def _check_together(options: Options) -> None:
    """Raises OptionsError for options that exclude each other."""
    batch, size = options.member_batch, options.shard_size
    if batch is not None and options.member_loop != "batches":
        raise OptionsError(
            f"member_batch: found {batch}, but members don't come in batches; add "
            "member_loop='batches'"
        )
    if batch is not None and size is not None and (size % batch or size == batch):
        raise OptionsError(
            f"member_batch: found {batch} with shard_size={size}, expected several batches in "
            "a shard, of which it has a whole number"
        )
    if options.dead_letters and "drop" not in (options.on_error, options.on_nonfinite):
        raise OptionsError(
            "dead_letters: found a file, but no members are dropped; add on_error='drop' or "
            "on_nonfinite='drop'"
        )
    required = options.require_platform
    if required is not None and not set(options.platforms or ()) & set(REQUIRED[required]):
        raise OptionsError(
            f"require_platform: found {required!r}, but platforms={list(options.platforms or ())} "
            "has nothing for it; leave out platforms"
        )


# --- flags of Beam


def split_flags(words: Sequence[str]) -> Iterator[tuple[str, str, list[str]]]:
    """Splits flags as Beam does: `--name=value`, `--name value`, or `--name` with the value "".

    Yields:
      Name, value, and the words that they are from. The name of a word without a flag is "".
    """
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
    """The options for Beam by name, from `Options.beam`, a `PipelineOptions` or flags."""
    if hasattr(beam, "get_all_options"):
        found: dict[str, Any] = beam.get_all_options(drop_default=True, retain_unknown_options=True)
        return found
    return {name: value for name, value, _ in split_flags(beam) if name}
