"""nginx and haproxy before a server, plain and with TLS on both sides, change nothing for calls.

The server asks clients to connect anew after a second, so that all tests have such GOAWAYs.
"""

import contextlib
import re
import signal
import socket
import subprocess
import sys
import time

import grpc
import pytest
import trustme

from tests.support.server import ROOT, fake
from tests.support.toolchains import need_programs
from tests.support.wire import (
    NO_PROXY,
    Generation,
    connect,
    details,
    generate,
    reason,
    stats,
    wait_idle,
    wait_serving,
    wait_until,
)

pytestmark = pytest.mark.full

SOON_S = 30.0
# Codes of a proxy whose server is down: it sends an HTTP status, after which nginx cuts the stream.
DOWN = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNKNOWN)
MODEL = {"script": {"step_s": 0.005}, "runner": {"max_model_len": 4096}}
LONG = 4000
LARGE_BYTES = 6 * 2**20
NGINX = """
daemon off; pid {folder}/pid; user root; worker_processes 1; error_log {folder}/log;
events {{}}
http {{
    access_log off; client_max_body_size 16m;
    client_body_temp_path {folder}; proxy_temp_path {folder}; fastcgi_temp_path {folder};
    uwsgi_temp_path {folder}; scgi_temp_path {folder};
    upstream triolet {{ server 127.0.0.1:{server}; keepalive 8; }}
    server {{
        listen 127.0.0.1:{port} http2 {ssl};
        {certificates}
        location / {{ grpc_pass {scheme}://triolet; }}
    }}
}}
"""
NGINX_TLS = """
        ssl_certificate {folder}/cert.pem; ssl_certificate_key {folder}/key.pem;
        grpc_ssl_trusted_certificate {folder}/ca.pem; grpc_ssl_verify on; grpc_ssl_name localhost;
"""
HAPROXY = """
defaults
    mode http
    timeout connect 5s
    timeout client 60s
    timeout server 60s
frontend calls
    bind 127.0.0.1:{port} {front}
    default_backend triolet
backend triolet
    server one 127.0.0.1:{server} {back}
"""
# A client that reads one message of a stream, prints a line, and waits to be killed.
CLIENT = """
import sys, time
from tests.interop.test_proxies import through
from tests.support.wire import Generation
with through(sys.argv[1], sys.argv[2]) as channel:
    call = Generation(channel, prompt_ids=[1], max_tokens=4000)
    call.read_deltas(1)
    print("reading", flush=True)
    time.sleep(600)
"""


@contextlib.contextmanager
def through(address, authority):
    """Yield a channel to a proxy, with TLS if ``authority`` names a file."""
    if not authority:
        with connect(address) as channel:
            yield channel
        return
    with open(authority, "rb") as file:
        credentials = grpc.ssl_channel_credentials(file.read())
    options = [*NO_PROXY, ("grpc.ssl_target_name_override", "localhost")]
    with grpc.secure_channel(address, credentials, options=options) as channel:
        yield channel


def free_port():
    """Return a port that was free."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def configure(name, folder, port, server, is_tls):
    """Write a proxy's configuration; return its command."""
    path = folder / f"{name}.conf"
    if name == "nginx":
        path.write_text(
            NGINX.format(
                folder=folder,
                port=port,
                server=server,
                ssl="ssl" if is_tls else "",
                scheme="grpcs" if is_tls else "grpc",
                certificates=NGINX_TLS.format(folder=folder) if is_tls else "",
            )
        )
        return ["/usr/sbin/nginx", "-e", folder / "log", "-p", folder, "-c", path]
    front, back = "proto h2", "proto h2"
    if is_tls:
        both = (folder / "key.pem").read_bytes() + (folder / "cert.pem").read_bytes()
        (folder / "both.pem").write_bytes(both)
        front = f"ssl crt {folder / 'both.pem'} alpn h2"
        back = f"ssl alpn h2 verify required ca-file {folder / 'ca.pem'} verifyhost localhost"
    path.write_text(HAPROXY.format(port=port, server=server, front=front, back=back))
    return ["/usr/sbin/haproxy", "-db", "-f", path]


class Behind:
    """A server behind a proxy. ``channel`` goes through the proxy, ``direct`` does not."""

    def __init__(self, address, authority, settings):
        self.address, self.authority, self._settings = address, authority, settings

    @contextlib.contextmanager
    def serving(self):
        """Run the server, each time at the same port."""
        with fake(server=self._settings, **MODEL) as s:
            target = f"localhost:{s.address.rpartition(':')[2]}" if self.authority else s.address
            with through(target, self.authority) as self.direct:
                wait_serving(self.direct)
                yield s


@pytest.fixture(params=["nginx", "nginx, TLS", "haproxy", "haproxy, TLS"])
def behind(request, tmp_path):
    """Yield the proxy, before a server that is not started yet."""
    name, _, tls = request.param.partition(", ")
    need_programs("nginx", "haproxy")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    own = authority.issue_cert("localhost")
    own.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    own.private_key_pem.write_to_path(tmp_path / "key.pem")
    port, server = free_port(), free_port()
    settings = {"port": server, "max_message_bytes": 2 * LARGE_BYTES, "max_connection_age_s": 1.0}
    settings["max_held_bytes"] = 5 * LARGE_BYTES
    if tls:
        settings |= {"tls_cert": str(tmp_path / "cert.pem"), "tls_key": str(tmp_path / "key.pem")}
    command = configure(name, tmp_path, port, server, bool(tls))
    with (tmp_path / "out").open("wb") as out, subprocess.Popen(command, stderr=out) as process:
        try:
            wait_until(lambda: is_open(port), SOON_S, f"{name}: {(tmp_path / 'out').read_text()}")
            file = str(tmp_path / "ca.pem") if tls else ""
            one = Behind(f"127.0.0.1:{port}", file, settings)
            with through(one.address, file) as one.channel:
                yield one
        finally:
            process.terminate()


def is_open(port):
    """Return whether something listens on a port."""
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def is_served(behind):
    """Return whether a call through the proxy succeeds."""
    return generate(behind.channel, max_tokens=3).error is None


def test_streams_and_trailers_come_through(behind):
    with behind.serving():
        asked = {"prompt_ids": range(1, 20), "max_tokens": 300, "seed": 3}
        heard = generate(behind.channel, **asked)
        assert heard.error is None
        assert heard.ids() == generate(behind.direct, **asked).ids()
        assert len(heard.deltas) > 50, "tokens are streamed, not gathered"
        error = generate(behind.channel, model="nobody").error
        wanted = generate(behind.direct, model="nobody").error
        assert (error.code(), error.details()) == (wanted.code(), wanted.details())
        assert details(error) == details(wanted) != {}


def test_a_cancel_and_a_killed_client_end_their_requests(behind):
    with behind.serving():
        with Generation(behind.channel, prompt_ids=[1], max_tokens=LONG) as call:
            call.read_deltas(2)
        wait_until(lambda: stats(behind.direct).running == 0, 5, "the cancel")
        command = [sys.executable, "-c", CLIENT, behind.address, behind.authority]
        with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as client:
            assert client.stdout.readline() == b"reading\n"
            client.send_signal(signal.SIGKILL)
        wait_until(lambda: stats(behind.direct).running == 0, 5, "the client's end")


def test_a_deadline_ends_the_call_with_the_servers_status(behind):
    with behind.serving():
        asked = {"prompt_ids": [1], "max_tokens": LONG}
        with Generation(behind.channel, **asked, server_timeout=3.0) as call:
            call.read_deltas(1)  # the engine runs it: the deadline's error has a reason
            error = call.finish().error
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert reason(error)
        error = generate(behind.channel, **asked, timeout=0.5).error
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        wait_idle(behind.direct)


def test_six_mebibytes_come_through(behind):
    with behind.serving():
        ids = [2**27 - 1] * (LARGE_BYTES // 4)  # ids of four bytes each
        error = generate(behind.channel, prompt_ids=ids, max_tokens=1).error
        wanted = generate(behind.direct, prompt_ids=ids, max_tokens=1).error
        assert (error.code(), error.details()) == (wanted.code(), wanted.details())
        assert re.search(r"token", error.details())
        assert generate(behind.channel, max_tokens=3).error is None


def test_after_a_restart_calls_are_served_again(behind):
    for _ in range(2):
        assert generate(behind.channel, timeout=SOON_S).error.code() in DOWN
        with behind.serving() as server:
            wait_until(lambda: is_served(behind), SOON_S, "the first call")
            assert all(is_served(behind) for _ in range(20))
            assert server.stop() == 0


def test_a_connection_that_grows_old_costs_no_call(behind):
    with behind.serving():
        ends, number = time.monotonic() + 4, 0
        while time.monotonic() < ends:
            number += 1
            heard = generate(behind.channel, max_tokens=20)
            assert heard.error is None, (number, heard.error)
        long = generate(behind.channel, prompt_ids=[1], max_tokens=600)
        assert long.error is None
        assert len(long.ids()) == 600
