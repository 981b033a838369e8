"""The server's listening sockets, with errors that name the flag to change."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

from engine.errors import ConfigError
from grpc_service.rpc.sockets import check_unix, listen_tcp, listen_unix

if TYPE_CHECKING:
    import ssl

    from grpc_service.app.server_config import ServerConfig
    from grpc_service.rpc.sockets import SocketListener


def check_free(config: ServerConfig) -> None:
    """Check that the configured address can be bound; called before models load.

    Raises:
        ConfigError: as `listen`.
    """
    if not config.uds:
        for listener in listen(config):
            listener.close()
        return
    try:
        check_unix(config.uds)
    except OSError as error:
        raise _cannot_listen(config, error) from None


def listen(config: ServerConfig, tls: ssl.SSLContext | None = None) -> list[SocketListener]:
    """Listen at the configured address: on each of the host's addresses that this machine has.

    Raises:
        ConfigError: the address is in use, or is not this machine's, or no socket can be made.
    """
    try:
        if config.uds:
            return listen_unix(config.uds, tls)
        return listen_tcp(config.host, config.port, tls)
    except OSError as error:
        raise _cannot_listen(config, error) from None


def _cannot_listen(config: ServerConfig, error: OSError) -> ConfigError:
    is_port = error.errno in (errno.EADDRINUSE, errno.EACCES)
    flag = "--uds" if config.uds else "--port" if is_port else "--host"
    # Python's text for a failed bind repeats the address; the system's does not.
    own = os.strerror(error.errno) if error.errno and error.errno > 0 else None
    reason = (error.strerror if config.uds else own or error.strerror) or str(error)
    return ConfigError(f"cannot listen on {config.address}: {reason}; choose another with {flag}")
