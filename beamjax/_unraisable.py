"""Repeats interrupts that Python ignores. It is imported before JAX, whose import takes long."""

from __future__ import annotations

import _thread
import sys
import time

# `import beamjax` imports this module alone, so it takes no others that take long: contextlib and
# typing take three times as long as all of it.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def _interrupt_soon(thread: int) -> None:
    import signal  # takes twice as long as the rest of this module

    time.sleep(0.01)  # else the main thread would raise it in the hook
    signal.pthread_kill(thread, signal.SIGINT)  # which also ends what the thread waits for


def _repeating(
    show: Callable[[sys.UnraisableHookArgs], Any],
) -> Callable[[sys.UnraisableHookArgs], None]:
    """A hook that repeats an interrupt that Python ignores, as it does in garbage collection."""
    # JAX has a callback there, and a signal that arrives during a collection is raised in it.
    # Names of this function, as Python clears those of a module while it ends.
    start, here, soon = _thread.start_new_thread, _thread.get_ident, _interrupt_soon

    def hook(ignored: sys.UnraisableHookArgs) -> None:
        if not issubclass(ignored.exc_type, KeyboardInterrupt):
            show(ignored)
            return
        try:
            start(soon, (here(),))  # Python calls handlers of signals in the main thread.
        except RuntimeError:  # The process ends, and starts no threads any more.
            return

    return hook


sys.unraisablehook = _repeating(sys.unraisablehook)
