"""Options of a run: beamjax's own, and those that are Beam's."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from beamjax.errors import OptionsError

REDUCTIONS = ("exact", "fast")


@dataclass(frozen=True)
class Options:
    """How a program is planned and run.

    Attributes:
      shard_size: members in a shard, a multiple of 8; None chooses by the bytes of a member.
      reduction: "exact" gives float sums and means that are correctly rounded, and the same bits
        for any order; "fast" adds in float64, with no promise about the last bits.
      platforms: of the workers: "cpu", "cuda", "tpu". None means that of this process.
      callbacks: whether steps that call back to the host (`jax.debug.print`, `jax.pure_callback`,
        ...) may run as Python, for which the function travels to other processes by cloudpickle;
        False refuses them. A call is made once a member, but again if Beam retries a bundle.
      work_folder: where values too big for a Beam element live while a pipeline runs: a path or
        URL that this process and all workers reach. None makes a temporary folder here.
      rounds_per_graph: rounds of a `scan` or `fori_loop` around placed operators that make one
        Beam pipeline; None chooses by the steps and the bytes of a round. Rounds that hold further
        control flow, and those of a `while_loop`, always have pipelines of their own.
      gather_limit: bytes past which staging refuses to gather a placed value to the server; None
        gathers whatever an operation needs. `explain` shows what is gathered, and why.
      checkpoint: a folder, by path or URL, in which `run` saves its state after rounds of loops
        around placed operators, and from which it goes on if it was stopped. It is for one run: the
        same plan and inputs. None saves nothing.
      checkpoint_every: rounds between two checkpoints; also as many rounds at most make one Beam
        pipeline.
      beam: what is handed on to Beam: a PipelineOptions, or flags.
    """

    shard_size: int | None = None
    reduction: str = "exact"
    platforms: tuple[str, ...] | None = None
    work_folder: str | None = None
    callbacks: bool = True
    rounds_per_graph: int | None = None
    gather_limit: int | None = None
    checkpoint: str | None = None
    checkpoint_every: int = 1
    beam: Any = field(default=(), hash=False)

    @property
    def planning(self) -> tuple[Any, ...]:
        """The options that a plan depends on."""
        return self.shard_size, self.platforms, self.callbacks, self.gather_limit


OWN = tuple(f.name for f in fields(Options) if f.name != "beam")


def parse_options(options: Any) -> Options:
    """Reads what a user gave as `options`.

    Args:
      options: None, an `Options`, a Beam `PipelineOptions`, a list of flags such as
        `["--shard_size=64", "--direct_num_workers=2"]`, or a dict such as `{"shard_size": 64}`.
        Names that are not beamjax's own are Beam's.

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
        return _from_own(own, flags)
    if isinstance(options, Sequence) and not isinstance(options, str):
        return _from_own(*_split_flags(options))
    if hasattr(options, "view_as"):
        found = options.get_all_options(retain_unknown_options=True)
        own = {key: found[key] for key in OWN if found.get(key) is not None}
        return replace(_from_own(own, []), beam=options)
    raise OptionsError(
        f"options: found a {type(options).__name__}, expected a dict, a list of flags or a Beam "
        "PipelineOptions"
    )


def _split_flags(options: Sequence[Any]) -> tuple[dict[str, Any], list[str]]:
    for flag in options:
        if not isinstance(flag, str):
            raise OptionsError(f"options: found the flag {flag!r}, expected text like '--name=x'")
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False, exit_on_error=False)
    for name in OWN:
        parser.add_argument(f"--{name}")
    try:
        found, flags = parser.parse_known_args(list(options))
    except argparse.ArgumentError as error:
        raise OptionsError(f"options: {error}") from error
    return {key: value for key, value in vars(found).items() if value is not None}, flags


def _flag(key: str, value: Any) -> str | None:
    if value is None or value is False:
        return None
    return f"--{key}" if value is True else f"--{key}={value}"


def _from_own(own: Mapping[str, Any], flags: list[str]) -> Options:
    values = dict(own)
    for name in ("shard_size", "rounds_per_graph", "gather_limit", "checkpoint_every"):
        if isinstance(values.get(name), str):
            try:
                values[name] = int(values[name])
            except ValueError:
                raise OptionsError(f"{name}: found {values[name]!r}, expected a number") from None
    if str(values.get("callbacks")).lower() in ("true", "false"):
        values["callbacks"] = str(values["callbacks"]).lower() == "true"
    if isinstance(values.get("platforms"), str):
        values["platforms"] = values["platforms"].split(",")
    return _checked(replace(Options(), **values, beam=tuple(flags)))


def _checked(options: Options) -> Options:
    if options.reduction not in REDUCTIONS:
        raise OptionsError(
            f"reduction: found {options.reduction!r}, expected one of {', '.join(REDUCTIONS)}"
        )
    if not isinstance(options.callbacks, bool):
        raise OptionsError(f"callbacks: found {options.callbacks!r}, expected True or False")
    rounds = options.rounds_per_graph
    if rounds is not None and (type(rounds) is not int or rounds < 1):
        raise OptionsError(f"rounds_per_graph: found {rounds!r}, expected a number from 1, or None")
    every = options.checkpoint_every
    if type(every) is not int or every < 1:
        raise OptionsError(f"checkpoint_every: found {every!r}, expected a number from 1")
    folder = options.checkpoint
    if isinstance(folder, os.PathLike):
        options = replace(options, checkpoint=os.fspath(folder))
    elif folder is not None and (not isinstance(folder, str) or not folder):
        raise OptionsError(f"checkpoint: found {folder!r}, expected the path or URL of a folder")
    limit = options.gather_limit
    if limit is not None and (type(limit) is not int or limit < 0):
        raise OptionsError(f"gather_limit: found {limit!r}, expected a number of bytes, or None")
    if options.platforms is not None:
        names = options.platforms
        listed = isinstance(names, Sequence) and not isinstance(names, str)
        if not listed or not names or not set(names) <= {"cpu", "cuda", "rocm", "tpu"}:
            raise OptionsError(
                f"platforms: found {options.platforms!r}, expected a list of cpu, cuda, rocm, tpu"
            )
        return replace(options, platforms=tuple(options.platforms))
    return options
