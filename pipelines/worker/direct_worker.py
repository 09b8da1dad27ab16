"""A worker process of Beam's in-memory runner, which ends when its launcher ends."""

from __future__ import annotations

import atexit
import os
import re
import sys
import threading
import time

_SECONDS_BETWEEN_LOOKS = 0.5
_URL = re.compile(r'url: *"([^"]*)"')
"""An address in a description of a server of Beam."""


def end_with(launcher: int) -> None:
    """Ends this process soon after its parent, the launcher with this pid, has ended."""

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        os._exit(1)

    threading.Thread(target=watch, name="beamjax launcher", daemon=True).start()


def main() -> None:
    """Runs Beam's worker; the argument is the pid of the launcher."""
    end_with(int(sys.argv[1]))
    # After the watch has started: importing Beam takes seconds.
    from beamjax._beam_compat import sdk_worker_main
    from beamjax.pipelines import log_filters, own_user

    # The worker runs what these servers send.
    for name, text in os.environ.items():
        if name.endswith("_API_SERVICE_DESCRIPTOR"):
            for endpoint in _URL.findall(text):
                own_user.check_listener(endpoint)
    log_filters.install_in_worker()
    sdk_worker_main([])
    # Without Python's finalization, which takes seconds for JAX and gRPC, and in which a thread of
    # gRPC may crash the process. An exit handler records that this worker has ended.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
