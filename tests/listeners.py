"""Who listens where, as Linux tells it."""

import contextlib
import threading
from pathlib import Path

IS_TOLD = Path("/proc/self/net/tcp").exists()


def listening(pid="self"):
    """Addresses and ports at which a process listens, in hexadecimal: "0100007F:1F90"."""
    sockets, found = set(), set()
    with contextlib.suppress(OSError):  # it ended
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # it was closed
                sockets.add(str(link.readlink()))
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                    found.add(fields[1])
    return found


def for_others(sockets):
    """The addresses of these that others reach: not 127.x.x.x, in IPv6 or not, and not ::1."""
    addresses = {socket.partition(":")[0] for socket in sockets}
    own = ("0" * 24 + "01000000",)
    mapped = "0000000000000000FFFF0000"
    return {a for a in addresses if a not in own and a.removeprefix(mapped)[-2:] != "7F"}


class Watch(threading.Thread):
    """Notes where processes listen, again and again."""

    def __init__(self, *pids, every=0.01):
        super().__init__(daemon=True)
        self.pids, self.every = pids or ("self",), every
        self.found, self.over = set(), threading.Event()

    def run(self):
        while not self.over.wait(self.every):
            for pid in self.pids:
                self.found |= listening(pid)

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.over.set()
        self.join()
