"""A server's port is still free when the server binds it."""

import socket
from contextlib import ExitStack
from pathlib import Path

from dflash_core.supervised import free_ports


def test_free_ports_differ_can_be_bound_and_are_taken_by_no_outgoing_connection() -> None:
    ports = free_ports(50)
    assert len(set(ports)) == 50
    first, _ = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    assert max(ports) < int(first)
    with ExitStack() as stack:
        for port in ports:
            stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
