"""The settings of the gRPC server, which are refused if they are unsafe (D21).

Rule 1: as in `engine.config`, a config object that exists is valid, and a setting is one field.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from engine.errors import ConfigError
from engine.settings import check, setting
from grpc_service.addresses import DEFAULT_HOST, DEFAULT_PORT, is_loopback
from grpc_service.rpc.limits import Limits

LOG_FORMATS = ("auto", "human", "json")
PORT_MAX = 65535
RPC = Limits()  # limits of the RPC library, the defaults of settings below
UNIX_PATH_BYTES_MAX = 107  # sun_path of Linux holds 108 with its NUL


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Where and how the server listens; `Setting.help` says what each field is."""

    host: str = setting(
        DEFAULT_HOST, "address to listen on", unit="ADDRESS", section="address and access"
    )
    port: int = setting(DEFAULT_PORT, "port to listen on; 0 takes a free one", low=0, high=PORT_MAX)
    uds: str = setting("", "path of a Unix socket to listen on instead", unit="PATH")
    insecure: bool = setting(False, "serve other machines without TLS or key")
    tls_cert: str = setting("", "PEM file of the server's certificate chain", unit="FILE")
    tls_key: str = setting("", "PEM file of the server's private key", unit="FILE")
    client_ca: str = setting(
        "",
        "PEM file of the authority that must have signed the clients' certificates (mTLS)",
        unit="FILE",
    )
    api_key_file: str = setting(
        "",
        "file of the keys that clients must show, a name and a key per line; read again on SIGHUP",
        unit="FILE",
    )
    # The limits of keys whose lines in the file set none.
    key_max_requests: int | None = setting(
        None, "most concurrent requests of one key", unset="no limit", low=1
    )
    key_max_queued_tokens: int | None = setting(
        None, "most prompt tokens of one key that wait", unset="no limit", low=1
    )
    # Models' names, or "" for the only model, and ports (`grpc_service.vllm_engine`). Gateways send
    # no keys.
    vllm_engine_ports: tuple[tuple[str, int], ...] = setting(
        (),
        "port on which a gateway (smg) may use the model, by vllm.grpc.engine.VllmEngine; with "
        "several models MODEL=PORT, once for each; on loopback without --insecure",
        unit="[MODEL=]PORT",
        flag="vllm-engine-port",
        section="gateways, metrics and the log",
    )
    openai_port: int | None = setting(
        None,
        "port for OpenAI's API over HTTP, on the address of --host; 0 takes a free one",
        unset="none",
        low=0,
        high=PORT_MAX,
    )
    openai_origins: tuple[str, ...] = setting(
        (),
        "web page whose scripts may use that port, such as https://chat.example; once for each",
        unit="ORIGIN",
        flag="openai-origin",
    )
    metrics_port: int | None = setting(
        None, "port for Prometheus; 0 takes a free one", unset="none", low=0, high=PORT_MAX
    )
    metrics_host: str = setting(DEFAULT_HOST, "address for Prometheus", unit="ADDRESS")
    log_format: str = setting(
        LOG_FORMATS[0], "human, json, or auto: human on a terminal", choices=LOG_FORMATS
    )
    usage_log: str = setting(
        "",
        "file to which a line of JSON is appended for each request that has ended: what it used, "
        "and for whom",
        unit="FILE",
    )
    usage_log_bytes: int = setting(
        64 * 2**20,
        "size at which that file is renamed, to FILE.1, FILE.2, …",
        low=4096,
        unit="BYTES",
    )
    adapter_root: str = setting(
        "",
        "directory below which clients may have adapters loaded (LoadAdapter)",
        unit="DIR",
        section="loads, failures and the end",
    )
    max_message_bytes: int = setting(
        RPC.max_message_bytes,
        "most bytes of a request, images not counted",
        low=1024,
        unit="BYTES",
        section="connections",
    )
    max_held_bytes: int = setting(
        RPC.held_bytes, "most bytes kept of requests and answers that are not read", unit="BYTES"
    )
    max_connections: int = setting(
        RPC.connections_max,
        "most connections; more are served health and Control alone, and end soon",
        low=1,
    )
    max_connections_per_address: int = setting(
        RPC.connections_per_address_max, "most connections of one address", low=1
    )
    max_connection_age_s: float | None = setting(
        None, "after how long a client is asked to connect anew", unset="never", low=0.001
    )
    max_connection_idle_s: float = setting(
        RPC.connection_idle_s, "after how long without a call a client is asked to leave", low=0.001
    )
    connection_budget: int = setting(
        int(RPC.budget),
        "points that a connection may spend on frames and calls without use; one is about 10 µs, "
        "and half of them return each second",
        low=1,
    )
    keepalive_time_s: float = setting(
        RPC.keepalive_time_s, "after how long a silent connection gets a ping", low=0.001
    )
    keepalive_timeout_s: float = setting(
        RPC.keepalive_timeout_s,
        "how long the answer may take before the connection is closed",
        low=0.001,
    )
    # A phone's photograph of 12 million pixels has 2 to 6 MB, one of 24 to 33 million up to 12.
    max_image_bytes: int = setting(
        12 * 2**20,
        "most bytes of the images of one request, beside --max-message-bytes",
        low=0,
        unit="BYTES",
        section="images",
    )

    def __post_init__(self) -> None:
        for name in ("adapter_root", "usage_log"):
            object.__setattr__(self, name, os.path.expanduser(getattr(self, name)))
        check(self)
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
        for flag, port in own:
            if not 0 <= port <= PORT_MAX:
                raise ConfigError(f"--{flag} is {port}, outside [0, {PORT_MAX}]")
        taken = [port for _, port in own]
        others = (0 if self.uds else self.port, self.metrics_port, self.openai_port)
        if double := [port for port in taken if port and (port in others or taken.count(port) > 1)]:
            raise ConfigError(
                f"--vllm-engine-port {double[0]} is taken by --port, --metrics-port, --openai-port "
                "or another --vllm-engine-port; choose another"
            )
        if self.openai_port and self.openai_port in others[:2]:
            raise ConfigError(
                f"--openai-port {self.openai_port} is taken by --port or --metrics-port; choose "
                "another"
            )
        for origin in self.openai_origins:
            scheme, _, rest = origin.partition("://")
            if scheme not in ("http", "https") or not rest or "/" in rest:
                raise ConfigError(
                    f"--openai-origin is {origin!r}, which is not of the form https://chat.example"
                )
        self._check_security()
        largest = self.max_message_bytes + self.max_image_bytes
        if self.max_held_bytes < largest:
            raise ConfigError(
                f"--max-held-bytes is {self.max_held_bytes}, but must be at least "
                f"--max-message-bytes and --max-image-bytes together ({largest})"
            )

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
    def openai_host(self) -> str:
        """The address of the port for OpenAI's API."""
        return DEFAULT_HOST if self.uds else self.host

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
