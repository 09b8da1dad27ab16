"""What each option may be, and what goes together."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from beamjax.choices import check_choices
from beamjax.errors import OptionsError

if TYPE_CHECKING:
    from beamjax.options import Options

REDUCTIONS = ("exact", "fast")
ON_ERROR = ("raise", "drop")
ON_NONFINITE = ("keep", "raise", "drop")
KEEP_FOLDER = (None, "failed", "always")
KEEP = (None, "placed")
SMALL_WORK = ("runner", "here")


def check_options(options: Options) -> None:
    """Checks options but for those that come in several forms: paths, platforms and memory.

    Raises:
      OptionsError: one of them has an impossible value.
    """
    if options.reduction not in REDUCTIONS:
        raise OptionsError(
            f"reduction: found {options.reduction!r}, expected one of {', '.join(REDUCTIONS)}"
        )
    if not isinstance(options.callbacks, bool):
        raise OptionsError(f"callbacks: found {options.callbacks!r}, expected True or False")
    if options.progress is not None and not isinstance(options.progress, bool):
        raise OptionsError(f"progress: found {options.progress!r}, expected True, False or None")
    if options.keep_folder not in KEEP_FOLDER:
        raise OptionsError(
            f"keep_folder: found {options.keep_folder!r}, expected 'failed', 'always' or None"
        )
    rounds = options.rounds_per_graph
    if rounds is not None and (type(rounds) is not int or rounds < 1):
        raise OptionsError(f"rounds_per_graph: found {rounds!r}, expected a number from 1, or None")
    every = options.checkpoint_every
    if type(every) is not int or every < 1:
        raise OptionsError(f"checkpoint_every: found {every!r}, expected a number from 1")
    limit = options.gather_limit
    if limit is not None and (type(limit) is not int or limit < 0):
        raise OptionsError(f"gather_limit: found {limit!r}, expected a number of bytes, or None")
    if options.keep not in KEEP:
        raise OptionsError(f"keep: found {options.keep!r}, expected 'placed' or None")
    check_choices(options)
    if options.small_work not in SMALL_WORK:
        raise OptionsError(
            f"small_work: found {options.small_work!r}, expected one of {', '.join(SMALL_WORK)}"
        )
    _check_dropping(options)
    _check_machine(options)


def _check_dropping(options: Options) -> None:
    for name, choices in (("on_error", ON_ERROR), ("on_nonfinite", ON_NONFINITE)):
        found = getattr(options, name)
        if found not in choices:
            raise OptionsError(f"{name}: found {found!r}, expected one of {', '.join(choices)}")
    limit = options.drop_limit
    if type(limit) not in (int, float) or not 0 <= limit <= 1:
        raise OptionsError(f"drop_limit: found {limit!r}, expected a share from 0 to 1")
    path = options.dead_letters
    if path is not None and "drop" not in (options.on_error, options.on_nonfinite):
        raise OptionsError(
            "dead_letters: found a file, but no members are dropped; add on_error='drop' or "
            "on_nonfinite='drop'"
        )


def _check_machine(options: Options) -> None:
    fraction = options.device_memory_fraction
    if fraction is not None and (type(fraction) not in (int, float) or not 0 < fraction <= 1):
        raise OptionsError(
            f"device_memory_fraction: found {fraction!r}, expected a number above 0 and up to 1"
        )
    if options.preallocate not in (None, True, False):
        raise OptionsError(f"preallocate: found {options.preallocate!r}, expected True or False")
    for name in ("local_devices", "local_threads"):
        count = getattr(options, name)
        if count is not None and (type(count) is not int or count < 1):
            raise OptionsError(f"{name}: found {count!r}, expected a number from 1, or None")
    if type(options.xla_threads) is not int or options.xla_threads < 1:
        raise OptionsError(
            f"xla_threads: found {options.xla_threads!r}, expected a number of threads from 1"
        )
    if not isinstance(options.strict, bool):
        raise OptionsError(f"strict: found {options.strict!r}, expected True or False")
    limit = options.shard_timeout
    if limit is not None and (type(limit) not in (int, float) or not 0 < limit < math.inf):
        raise OptionsError(
            f"shard_timeout: found {limit!r}, expected a number of seconds above 0, or None"
        )
