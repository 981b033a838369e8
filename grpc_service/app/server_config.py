"""The settings of the gRPC server: where it listens, and what is safe there (D21).

Rule 1: as in `engine.config`, a config object that exists is valid, and the defaults are only here.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from engine.errors import ConfigError
from grpc_service.addresses import DEFAULT_HOST, DEFAULT_PORT, is_loopback

LOG_FORMATS = ("auto", "human", "json")
UNIX_PATH_BYTES_MAX = 107  # sun_path of Linux holds 108 with its NUL


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Where and how the server listens.

    ``uds``, the path of a Unix socket, replaces host and port. ``port`` 0 takes any free port.
    ``insecure`` allows other machines without TLS or a key. A connection on which nothing arrived
    for ``keepalive_time_s`` gets a ping, and is closed if no answer arrives within
    ``keepalive_timeout_s``. A client is asked to connect anew after ``max_connection_age_s`` (None:
    never), and to leave after ``max_connection_idle_s`` without a call.

    ``max_image_bytes`` are those of the images of one request, beside its ``max_message_bytes``.

    ``max_connections`` counts all connections, ``max_connections_per_address`` those of one
    address. ``connection_budget`` and ``max_held_bytes`` bound what clients may cost that bring no
    work, and what is kept for those that do not send or read on (`grpc_service.rpc.limits`).

    ``tls_cert`` and ``tls_key`` are PEM files. With ``client_ca`` clients need certificates, too.
    ``api_key_file`` is read by `grpc_service.access.keys`; ``key_max_requests`` and
    ``key_max_queued_tokens`` are the limits of keys that have none of their own. With
    ``metrics_port`` None no metrics are served; 0 takes any free port.

    ``vllm_engine_ports`` has a model's name, or "" for the only model, and the port on which a
    gateway may use that model (`grpc_service.vllm_engine`); 0 takes any free port. Gateways send no
    keys, so these ports are on loopback unless the server is ``insecure``.

    LoadAdapter reads from directories below ``adapter_root`` only; "": from none.
    """

    host: str = DEFAULT_HOST
    port: int = DEFAULT_PORT
    uds: str = ""
    insecure: bool = False
    max_message_bytes: int = 4 * 2**20
    # A phone's photograph of 12 million pixels has 2 to 6 MB, one of 24 to 33 million up to 12.
    max_image_bytes: int = 12 * 2**20
    keepalive_time_s: float = 30.0  # with the timeout, a client that has gone is noticed in 45 s
    keepalive_timeout_s: float = 15.0
    max_connections: int = 16_384
    max_connections_per_address: int = 4096
    max_connection_age_s: float | None = None
    max_connection_idle_s: float = 1800.0
    connection_budget: int = 10_000
    max_held_bytes: int = 16 * 2**20
    tls_cert: str = ""
    tls_key: str = ""
    client_ca: str = ""
    api_key_file: str = ""
    key_max_requests: int | None = None
    key_max_queued_tokens: int | None = None
    metrics_port: int | None = None
    metrics_host: str = DEFAULT_HOST
    vllm_engine_ports: tuple[tuple[str, int], ...] = ()
    log_format: str = "auto"
    adapter_root: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "adapter_root", os.path.expanduser(self.adapter_root))
        if self.uds:
            if len(self.uds.encode()) > UNIX_PATH_BYTES_MAX:
                raise ConfigError(f"--uds is longer than {UNIX_PATH_BYTES_MAX} bytes")
            if self.uds.startswith("@") or "\0" in self.uds:
                raise ConfigError(
                    f"--uds is {self.uds!r}, and abstract sockets are not served, because every "
                    "user may open them; give a path, such as ./@name for a file of that name"
                )
        elif not self.host:
            raise ConfigError("--host is empty; use 127.0.0.1 for this machine only")
        elif not (self.is_guarded or self.insecure or is_loopback(self.host)):
            raise ConfigError(
                f"--host {self.host} would serve other machines without encryption or a key; give "
                "--tls-cert and --tls-key, or --api-key-file, or listen on 127.0.0.1; or add "
                "--insecure if everyone who can reach it may use it"
            )
        for flag, host in (("host", self.host), ("metrics-host", self.metrics_host)):
            if not _is_encodable(host):
                raise ConfigError(f"--{flag} is {host!r}, which is not the name of a host")
        own = [("vllm-engine-port", port) for _, port in self.vllm_engine_ports]
        for flag, port in (("port", self.port), ("metrics-port", self.metrics_port or 0), *own):
            if not 0 <= port <= 65535:
                raise ConfigError(f"--{flag} is {port}, outside [0, 65535]")
        taken = [port for _, port in own]
        others = (0 if self.uds else self.port, self.metrics_port)
        if double := [port for port in taken if port and (port in others or taken.count(port) > 1)]:
            raise ConfigError(
                f"--vllm-engine-port {double[0]} is taken by --port, --metrics-port or another "
                "--vllm-engine-port; choose another"
            )
        self._check_security()
        if self.log_format not in LOG_FORMATS:
            raise ConfigError(
                f"--log-format is {self.log_format!r}; use {', '.join(LOG_FORMATS[:-1])} or "
                f"{LOG_FORMATS[-1]}"
            )
        if self.max_message_bytes < 1024:
            raise ConfigError("--max-message-bytes must be at least 1024")
        if self.max_image_bytes < 0:
            raise ConfigError("--max-image-bytes must be at least 0")
        largest = self.max_message_bytes + self.max_image_bytes
        if self.max_held_bytes < largest:
            raise ConfigError(
                f"--max-held-bytes is {self.max_held_bytes}, but must be at least "
                f"--max-message-bytes and --max-image-bytes together ({largest})"
            )
        for flag, seconds in (
            ("keepalive-time", self.keepalive_time_s),
            ("keepalive-timeout", self.keepalive_timeout_s),
            ("max-connection-age", self.max_connection_age_s),
            ("max-connection-idle", self.max_connection_idle_s),
        ):
            if seconds is not None and not seconds >= 0.001:
                raise ConfigError(f"--{flag} is {seconds:g} s, but must be at least 0.001")
        for flag, number in (
            ("max-connections", self.max_connections),
            ("max-connections-per-address", self.max_connections_per_address),
            ("connection-budget", self.connection_budget),
            ("max-held-bytes", self.max_held_bytes),
        ):
            if number < 1:
                raise ConfigError(f"--{flag} is {number}, but must be at least 1")

    def _check_security(self) -> None:
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ConfigError("--tls-cert and --tls-key go together")
        if self.client_ca and not self.tls_cert:
            raise ConfigError("--client-ca needs --tls-cert and --tls-key")
        for flag, limit in (
            ("key-max-requests", self.key_max_requests),
            ("key-max-queued-tokens", self.key_max_queued_tokens),
        ):
            if limit is not None and not self.api_key_file:
                raise ConfigError(f"--{flag} needs --api-key-file")
            if limit is not None and limit < 1:
                raise ConfigError(f"--{flag} is {limit}, but must be at least 1")

    @property
    def is_guarded(self) -> bool:
        """Whether the server uses TLS, so that others cannot read what is sent, or keys, so that
        others cannot call."""
        return bool(self.tls_cert or self.api_key_file)

    @property
    def vllm_engine_host(self) -> str:
        """The address of the ports for gateways."""
        return self.host if self.insecure or is_loopback(self.host) else DEFAULT_HOST

    @property
    def address(self) -> str:
        """The address in the form that grpc clients take."""
        if self.uds:
            return f"unix:{self.uds}"
        host = self.host.strip("[]")
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"


def _is_encodable(host: str) -> bool:
    """Return whether the system can look the name up."""
    try:
        host.encode("idna")
    except UnicodeError:
        return False
    return True
