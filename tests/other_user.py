"""Another user of this machine: what servers answer it, and ports that it takes. Needs root."""

import contextlib
import os
import subprocess
import sys

import pytest

from beamjax.pipelines import own_user

NOBODY = 65534
NEEDS_ROOT = pytest.mark.skipif(
    os.geteuid() != 0 or not own_user.is_known(), reason="becomes another user of Linux"
)
_LOSE_ROOT = f"os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})"
_CALL = """
import concurrent.futures.thread, os, sys
import grpc
grpc.insecure_channel("127.0.0.1:1").unary_unary("/load")  # the other user may not read modules
USER
try:
    grpc.insecure_channel(sys.argv[1]).unary_unary(sys.argv[2])(b"", timeout=30)
    print("answered")
except grpc.RpcError as error:
    print(error.code().name)
os._exit(0)
"""
_LISTEN = """
import os, socket, sys
USER
server = socket.socket(socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET)
server.bind((sys.argv[1], int(sys.argv[2])))
server.listen()
print("listens", flush=True)
sys.stdin.read()
"""
_PIPES = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}


def answer_to(user, address, method):
    """What a server answers to an empty request of a user: "answered", or the name of a status."""
    code = _CALL.replace("USER", _LOSE_ROOT if user == NOBODY else "")
    command = [sys.executable, "-c", code, address, method]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() or done.stderr


@contextlib.contextmanager
def taken(host, port):
    """The other user listens at an address; skips the test where there is no such address."""
    command = [sys.executable, "-c", _LISTEN.replace("USER", _LOSE_ROOT), host, str(port)]
    with subprocess.Popen(command, **_PIPES) as other:
        try:
            if other.stdout.readline() != "listens\n":
                pytest.skip(f"no {host} here")
            yield other
        finally:
            other.kill()
