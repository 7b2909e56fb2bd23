"""Ports of local processes: one for the router, three for every pod."""

from __future__ import annotations

import socket
from dataclasses import dataclass

HOST = "127.0.0.1"
PORTS_PER_POD = 3


class PortInUse(OSError):
    """A port that is needed belongs to another program."""


@dataclass(frozen=True)
class PodPorts:
    """A pod's own HTTP port, and the two that its group would use if it leads one."""

    http: int
    rendezvous: int
    control: int


def assign(num_pods: int, base_port: int) -> tuple[int, list[PodPorts]]:
    """The router's port and each pod's: counted up from `base_port`, or any free ones for 0. Raises PortInUse."""
    count = 1 + PORTS_PER_POD * num_pods
    wanted = range(base_port, base_port + count) if base_port else [0] * count
    probes: list[socket.socket] = []
    try:
        for port in wanted:
            probe = socket.socket()
            probes.append(probe)
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except (OSError, OverflowError) as error:
                raise PortInUse(
                    f"port {port} on {HOST} cannot be used ({error}); choose another --base-port"
                ) from error
        ports = [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()
    pods = [PodPorts(*ports[i : i + PORTS_PER_POD]) for i in range(1, count, PORTS_PER_POD)]
    return ports[0], pods
