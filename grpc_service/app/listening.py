"""The server's listening sockets, with errors that name the flag to change."""

from __future__ import annotations

import errno
import logging
import os
import resource
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from engine.errors import ConfigError
from grpc_service.rpc.sockets import HTTP1, check_unix, listen_tcp, listen_unix

if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterator

    from grpc_service.app.server_config import ServerConfig
    from grpc_service.rpc.sockets import SocketListener

log = logging.getLogger(__name__)

# File descriptors beside those of a port's `--max-connections`: for connections in its reserve
# (`Limits.reserved_max`), workers and models' files. Guess: four times the reserve.
OTHER_FILES = 256


def num_connections(wanted: int, num_ports: int = 1) -> int:
    """Return how many of the ``wanted`` connections each of the process's ports may have open, and
    let the process have a file descriptor for each as far as the system allows. Without a free
    descriptor the process could accept no connection, not even a probe's."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = num_ports * (wanted + OTHER_FILES)
    most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        with suppress(OSError, ValueError):  # a system may have limits that it does not tell
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            soft = most
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    limit = max(1, soft // num_ports - OTHER_FILES)
    log.warning(
        "--max-connections is %d here, as the process may have %d files open (ulimit -n)",
        limit,
        soft,
    )
    return limit


def check_free(config: ServerConfig) -> None:
    """Check that the configured addresses can be bound; called before models load.

    Raises:
        ConfigError: an address cannot be bound, as in `listen`.
    """
    for _, port in config.vllm_engine_ports:
        for listener in listen_for_gateway(config, port):
            listener.close()
    if config.openai_port is not None:
        for listener in listen_for_openai(config, config.openai_port):
            listener.close()
    if not config.uds:
        for listener in listen(config):
            listener.close()
        return
    with _named(config.address, "--uds", "--uds"):
        check_unix(config.uds)


def listen(config: ServerConfig, tls: ssl.SSLContext | None = None) -> list[SocketListener]:
    """Listen at the configured address: on each of the host's addresses that this machine has.

    Raises:
        ConfigError: the address is in use, or is not this machine's, or no socket can be made.
    """
    if config.uds:
        with _named(config.address, "--uds", "--uds"):
            return listen_unix(config.uds, tls)
    with _named(config.address, "--host", "--port"):
        return listen_tcp(config.host, config.port, tls)


def listen_for_gateway(config: ServerConfig, port: int) -> list[SocketListener]:
    """Listen at a port for gateways.

    Raises:
        ConfigError: an address cannot be bound, as in `listen`.
    """
    host = config.vllm_engine_host
    shown = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    with _named(shown, "--host", "--vllm-engine-port"):
        return listen_tcp(host, port)


def listen_for_openai(
    config: ServerConfig, port: int, tls: ssl.SSLContext | None = None
) -> list[SocketListener]:
    """Listen at the port for OpenAI's API.

    Raises:
        ConfigError: an address cannot be bound, as in `listen`.
    """
    host = config.openai_host.strip("[]")
    shown = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    with _named(shown, "--host", "--openai-port"):
        return listen_tcp(host, port, tls, HTTP1)


@contextmanager
def _named(address: str, host_flag: str, port_flag: str) -> Iterator[None]:
    """Turn an OSError of the block into a ConfigError that names the address and the flag."""
    try:
        yield
    except OSError as error:
        flag = port_flag if error.errno in (errno.EADDRINUSE, errno.EACCES) else host_flag
        # Python's text for a failed bind repeats the address; the system's does not.
        own = os.strerror(error.errno) if error.errno and error.errno > 0 else None
        reason = (error.strerror if flag == "--uds" else own or error.strerror) or str(error)
        raise ConfigError(
            f"cannot listen on {address}: {reason}; choose another with {flag}"
        ) from None
