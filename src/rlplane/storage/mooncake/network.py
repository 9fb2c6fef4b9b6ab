"""Which address this process has for others, and how Mooncake travels between them.

Every process finds its own address: a driver's address, inherited through the environment by an actor
on another host, would make Mooncake announce a segment where nobody listens.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlplane.errors import ConfigError

# Addresses reserved for documentation (RFC 5737, RFC 3849): nothing is ever sent to them, because
# connecting a UDP socket only asks the kernel which interface would be used.
_FAR_AWAY = ((socket.AF_INET, "198.51.100.1"), (socket.AF_INET6, "2001:db8::1"))
_SIOCGIFADDR = 0x8915
_INFINIBAND = Path("/sys/class/infiniband")


def _get_local_node_ip() -> str:
    """This host's address as other hosts reach it; never loopback, link-local or unspecified.

    Tried in turn: what the host's name resolves to, the interface that routes out (v4, then v6), and any
    interface that has an address, for hosts without a default route.

    Raises:
        ConfigError: This host has no such address; ``transfer_queue.node_ip`` in the config names one.
    """
    refused: list[str] = []
    for address in _candidates():
        if _is_routable(address):
            return address
        refused.append(address)
    raise ConfigError(
        f"this host has no address that others could reach (found {sorted(set(refused)) or 'none'}); "
        "set transfer_queue.node_ip in the config"
    )


def _is_routable(address: str) -> bool:
    try:
        ip = ipaddress.ip_address(address.split("%", 1)[0])
    except ValueError:
        return False
    return not (ip.is_loopback or ip.is_link_local or ip.is_unspecified or ip.is_multicast)


def _candidates() -> Iterator[str]:
    yield from _addresses_of_host_name()
    yield from _addresses_that_route_out()
    yield from _addresses_of_interfaces()


def _addresses_of_host_name() -> list[str]:
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    # IPv4 first: most of what a cluster runs listens there.
    return [str(info[4][0]) for info in sorted(found, key=lambda info: info[0] != socket.AF_INET)]


def _addresses_that_route_out() -> Iterator[str]:
    for family, target in _FAR_AWAY:
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((target, 9))
                yield str(probe.getsockname()[0])
        except OSError:
            continue


def _addresses_of_interfaces() -> Iterator[str]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue
            yield socket.inet_ntoa(answer[20:24])


def _mooncake_transport_config(options: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Mooncake's protocol and device: ``tcp``, or ``rdma`` with the active devices of this host.

    Raises:
        ConfigError: RDMA was asked for and this host has no active device.
    """
    options = options or {}
    protocol = options.get("mooncake_protocol") or "tcp"
    device = options.get("mooncake_device") or ""
    if protocol == "tcp":
        return {"protocol": "tcp", "device_name": ""}
    if protocol != "rdma":
        raise ConfigError(f"transfer_queue.mooncake_protocol is 'tcp' or 'rdma', not {protocol!r}")
    if not device:
        device = ",".join(_active_rdma_devices())
    if not device:
        raise ConfigError(
            f"transfer_queue.mooncake_protocol is 'rdma', and {_INFINIBAND} has no active device; "
            "name one as transfer_queue.mooncake_device, or use 'tcp'"
        )
    return {"protocol": "rdma", "device_name": device}


def _active_rdma_devices() -> list[str]:
    active = []
    for state in sorted(_INFINIBAND.glob("*/ports/*/state")):
        name = state.parts[len(_INFINIBAND.parts)]
        if "ACTIVE" in state.read_text() and name not in active:
            active.append(name)
    return active


def set_mooncake_environment(node_ip: str, *, quiet: bool) -> None:
    """Prepare this process for Mooncake; call before its store is set up.

    ``MC_TCP_BIND_ADDRESS`` is set and not defaulted: an inherited value is another process's address.
    """
    os.environ["MC_TCP_BIND_ADDRESS"] = node_ip
    os.environ.setdefault("MC_STORE_MEMCPY", "1")
    if quiet:
        os.environ.setdefault("MC_LOG_LEVEL", "ERROR")


def free_port(ip: str) -> int:
    """A TCP port of ``ip`` that nobody listens on at the moment."""
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((ip, 0))
        return int(probe.getsockname()[1])
