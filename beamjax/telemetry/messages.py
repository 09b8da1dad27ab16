"""Messages on stderr that something still goes on, for work that has no progress."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator

SOON_SECONDS = 2.0
"""Time after which a terminal shows that a run goes on."""
SELDOM_SECONDS = 30.0
"""Time between two lines where nobody has asked for progress, and there is no terminal."""


@contextlib.contextmanager
def announced(what: str, wish: bool | None = None) -> Iterator[None]:
    """A context that prints what goes on: in a terminal after two seconds, and every 30 seconds."""
    over = threading.Event()
    thread = threading.Thread(target=_say, args=(what, over), name="beamjax messages", daemon=True)
    if wish is not False:  # the option `progress`
        thread.start()
    try:
        yield
    finally:
        over.set()


def _say(what: str, over: threading.Event) -> None:
    began = time.monotonic()
    in_terminal = sys.stderr is not None and sys.stderr.isatty()
    pause = SOON_SECONDS if in_terminal else SELDOM_SECONDS
    while not over.wait(pause):
        with contextlib.suppress(Exception):  # stderr may be closed
            passed = time.monotonic() - began
            print(f"beamjax: {what}, {passed:.0f} s", file=sys.stderr, flush=True)
        pause = SELDOM_SECONDS
