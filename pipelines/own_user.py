"""Connections on this machine with processes of this user only.

Every user of a machine reaches its loopback addresses. Linux says to which user the other end of a
connection belongs, so servers here answer only this user and root, who may read the memory of this
process in any case, and clients check who listens before they connect. Other systems do not say it;
there, nothing is checked.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

import grpc

from beamjax.errors import OptionsError

_TABLES = (Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6"))
_ESTABLISHED, _LISTEN = "01", "0A"
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class _Socket(NamedTuple):
    """A TCP socket of this machine, on any process."""

    local: tuple[Address, int]
    remote: tuple[Address, int]
    state: str
    uid: int
    inode: str


def is_known() -> bool:
    """Whether this system says to which user a socket belongs."""
    return _TABLES[0].exists()


def serves(peer: str, ports: set[int]) -> bool:
    """Whether a server at these ports answers a client, such as `ipv4:127.0.0.1:40000`."""
    # It refuses clients on this machine that belong to another user. A client on another machine
    # reaches only servers that were told to listen for these.
    kind, _, where = peer.partition(":")
    if kind not in ("ipv4", "ipv6") or not is_known():
        return kind != "unix"
    host, _, port = unquote(where).rpartition(":")
    client = _normal(ipaddress.ip_address(host.strip("[]").partition("%")[0])), int(port)
    sockets = [s for s in _sockets() if s.local == client and s.remote[1] in ports]
    if not sockets:
        return not client[0].is_loopback
    # A closed socket has no inode, and the user of root.
    return all(_is_own(s) and s.state == _ESTABLISHED and s.inode != "0" for s in sockets)


def check_listener(endpoint: str) -> None:
    """Raises OptionsError for an address of this machine at which another user listens."""
    host, _, text = endpoint.rpartition(":")
    if not is_known() or not text.isdigit():
        return
    # Other machines are not checked.
    try:
        named = socket.getaddrinfo(host.strip("[]") or None, None)
    except OSError:
        return  # nothing there to connect to
    addresses = {_normal(ipaddress.ip_address(info[4][0])) for info in named}
    for sock in _sockets():
        address, port = sock.local
        if sock.state != _LISTEN or port != int(text) or _is_own(sock):
            continue
        if address in addresses or address.is_unspecified:
            raise OptionsError(
                f"{endpoint}: found a server of user {sock.uid}, expected one of this user; it "
                "may have taken the port, and would get your functions and data"
            )


class OwnUserOnly(grpc.ServerInterceptor):
    """Has a server refuse calls of other users."""

    def __init__(self) -> None:
        self.ports: set[int] = set()
        """The ports at which the server listens."""

    def intercept_service(self, continuation: Callable[..., Any], details: Any) -> Any:
        handler = continuation(details)
        if handler is None:
            return None
        kind = ("stream" if handler.request_streaming else "unary") + "_"
        kind += "stream" if handler.response_streaming else "unary"
        behavior = getattr(handler, kind)

        # Workers and runners make few calls, most of which last as long as their connection.
        def checked(request: Any, context: Any) -> Any:
            if not serves(context.peer(), self.ports):
                context.abort(
                    grpc.StatusCode.PERMISSION_DENIED, "this server answers its own user only"
                )
            return behavior(request, context)

        make: Any = getattr(grpc, f"{kind}_rpc_method_handler")
        return make(checked, handler.request_deserializer, handler.response_serializer)


def _is_own(sock: _Socket) -> bool:
    return sock.uid in (os.geteuid(), 0)


def _sockets() -> Iterator[_Socket]:
    for table in _TABLES:
        try:
            lines = table.read_text().splitlines()[1:]
        except FileNotFoundError:  # no IPv6
            continue
        for line in lines:
            fields = line.split()
            local, remote = _address(fields[1]), _address(fields[2])
            yield _Socket(local, remote, fields[3], int(fields[7]), fields[9])


def _address(text: str) -> tuple[Address, int]:
    """The address and the port in a table: words in the order of bytes of this machine."""
    host, port = text.split(":")
    order = "<" if sys.byteorder == "little" else ">"
    words = struct.unpack(f"{order}{len(host) // 8}I", bytes.fromhex(host))
    packed = struct.pack(f">{len(words)}I", *words)
    return _normal(ipaddress.ip_address(packed)), int(port, 16)


def _normal(address: Address) -> Address:
    mapped = getattr(address, "ipv4_mapped", None)
    return address if mapped is None else mapped
