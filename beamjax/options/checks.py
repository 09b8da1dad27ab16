"""What each option may be, and what goes together."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from beamjax.errors import OptionsError
from beamjax.options.choices import MEMBER_LOOPS, RECOMPUTE, check_choices

if TYPE_CHECKING:
    from beamjax.options import Options

CHOICES: dict[str, tuple[str | bool | None, ...]] = {
    "member_loop": (*MEMBER_LOOPS, None),
    "probe": (True, False, None),
    "recompute": (*RECOMPUTE, None),
    "strict": (True, False),
    "small_work": ("runner", "here"),
    "reduction": ("exact", "fast"),
    "callbacks": (True, False),
    "overwrite": (True, False),
    "keep_folder": ("failed", "always", None),
    "progress": (True, False, None),
    "preallocate": (True, False, None),
    "on_error": ("raise", "drop"),
    "on_nonfinite": ("keep", "raise", "drop"),
    "keep": ("placed", None),
}
"""The allowed values of options with few of them; None means that beamjax chooses."""


def check_options(options: Options) -> None:
    """Checks options but for those that come in several forms: paths, platforms and memory.

    Raises:
      OptionsError: one of them has an impossible value.
    """
    for name, choices in CHOICES.items():
        found = getattr(options, name)
        # Only text is compared: 1 is equal to True.
        if not any(found is c or (isinstance(found, str) and found == c) for c in choices):
            expected = ", ".join(str(choice) for choice in choices if choice is not None)
            optional = ", or None" if None in choices else ""
            raise OptionsError(f"{name}: found {found!r}, expected one of {expected}{optional}")
    every = options.checkpoint_every
    if type(every) is not int or every < 1:
        raise OptionsError(f"checkpoint_every: found {every!r}, expected a number from 1")
    limit = options.gather_limit
    if limit is not None and (type(limit) is not int or limit < 0):
        raise OptionsError(f"gather_limit: found {limit!r}, expected a number of bytes, or None")
    check_choices(options)
    _check_dropping(options)
    _check_machine(options)


def _check_dropping(options: Options) -> None:
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
    for name in ("local_devices", "local_threads"):
        count = getattr(options, name)
        if count is not None and (type(count) is not int or count < 1):
            raise OptionsError(f"{name}: found {count!r}, expected a number from 1, or None")
    if type(options.xla_threads) is not int or options.xla_threads < 1:
        raise OptionsError(
            f"xla_threads: found {options.xla_threads!r}, expected a number of threads from 1"
        )
    limit = options.shard_timeout
    if limit is not None and (type(limit) not in (int, float) or not 0 < limit < math.inf):
        raise OptionsError(
            f"shard_timeout: found {limit!r}, expected a number of seconds above 0, or None"
        )
