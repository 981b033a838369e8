"""Addresses of servers: the defaults, and which addresses only this machine can reach."""

from __future__ import annotations

import ipaddress

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 50051


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach ``host``. This is False for every name except
    localhost, because a name may resolve to any address."""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def target_of(address: str) -> str:
    """Return ``address`` as grpc takes it: ``unix:PATH``, or ``HOST:PORT``, where a missing port
    becomes the default one."""
    if address.startswith("unix:") or address.rpartition("]")[2].count(":"):
        return address
    return f"{address}:{DEFAULT_PORT}"
