"""TLS, certificates, keys and Unix sockets: which clients real connections let in."""

import contextlib
import datetime
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
import trustme

from grpc_service.client import Client, GenerateRequest, Tls, Unauthenticated, Unavailable, stubs
from grpc_service.client import messages as pb
from tests.support.openai_calls import own_address
from tests.support.server import ROOT, fake, fake_process
from tests.support.wire import (
    NO_PROXY,
    Generation,
    details,
    error_of,
    generate,
    reason,
    stats,
    wait_serving,
    wait_until,
)

KEY, GUEST_KEY = "the-key-of-alice-1", "the-key-of-a-guest"
UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
SOON_S = 15.0


@dataclass
class Certificates:
    """Files with the certificates of an authority, a server, a client and a stranger."""

    ca: Path
    cert: Path
    key: Path
    client_cert: Path
    client_key: Path
    other_ca: Path
    other_cert: Path
    other_key: Path


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """Write the certificates, and return their files."""
    folder = tmp_path_factory.mktemp("certificates")
    ours, theirs = trustme.CA(), trustme.CA()

    def write(name, blob):
        path = folder / name
        path.write_bytes(blob.bytes())
        return path

    server = ours.issue_cert("localhost", "127.0.0.1")
    client = ours.issue_cert("client.example")
    other = theirs.issue_cert("client.example", "127.0.0.1")
    return Certificates(
        write("ca.pem", ours.cert_pem),
        write("cert.pem", server.cert_chain_pems[0]),
        write("key.pem", server.private_key_pem),
        write("client.pem", client.cert_chain_pems[0]),
        write("client.key", client.private_key_pem),
        write("other-ca.pem", theirs.cert_pem),
        write("other.pem", other.cert_chain_pems[0]),
        write("other.key", other.private_key_pem),
    )


@pytest.fixture
def keys(tmp_path):
    """Return a file with keys."""
    path = tmp_path / "keys"
    path.write_text(f"alice {KEY}\nguest {GUEST_KEY} max_requests=1 max_queued_tokens=20\n")
    return path


@contextlib.contextmanager
def secure(address, ca, cert=None, key=None):
    """Return a channel with TLS."""
    pair = (key.read_bytes(), cert.read_bytes()) if cert else (None, None)
    credentials = grpc.ssl_channel_credentials(ca.read_bytes(), *pair)
    own = ("grpc.use_local_subchannel_pool", 1)
    with grpc.secure_channel(address, credentials, options=[*NO_PROXY, own]) as channel:
        yield channel


class Interceptor(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):
    """Add a key to every call, over any kind of connection."""

    def __init__(self, key):
        self._header = ("authorization", f"Bearer {key}")

    def intercept_unary_unary(self, continuation, details, request):
        return continuation(details._replace(metadata=[self._header]), request)

    intercept_unary_stream = intercept_unary_unary


def showing(channel, key):
    """Return the channel with a key added to every call."""
    return grpc.intercept_channel(channel, Interceptor(key))


def tls_of(files, **fields):
    """Return a server's settings for TLS."""
    return {"tls_cert": str(files.cert), "tls_key": str(files.key)} | fields


def generates(channel):
    """Return whether a request is served completely; an error fails the test."""
    heard = generate(channel, max_tokens=3, timeout=SOON_S)
    assert heard.error is None, heard.error
    return len(heard.ids()) == 3


def is_refused_by_transport(channel):
    """Return whether no connection is made: UNAVAILABLE, without a text of the server's."""
    error = generate(channel, timeout=SOON_S).error
    assert error.code() is UNAVAILABLE, error
    return not details(error)


def command(*args, env=None):
    """Run a client command; return its exit code, output and error output."""
    done = subprocess.run(
        [sys.executable, "-m", "grpc_service", *map(str, args)],
        cwd=ROOT,
        env=os.environ | (env or {}),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


# ---- TLS -------------------------------------------------------------------------------------


def test_a_tls_client_is_served_and_others_never_connect(files):
    with (
        fake(server=tls_of(files)) as server,
        secure(server.address, files.ca) as channel,
        secure(server.address, files.other_ca) as stranger,
    ):
        wait_serving(channel)
        assert generates(channel)
        assert is_refused_by_transport(stranger)  # this client does not trust the server
        assert is_refused_by_transport(server.channel)  # this client uses no TLS
        assert generates(channel)


def test_mtls_takes_its_authoritys_clients_only(files):
    with (
        fake(server=tls_of(files, client_ca=str(files.ca))) as server,
        secure(server.address, files.ca, files.client_cert, files.client_key) as channel,
        secure(server.address, files.ca) as nameless,
        secure(server.address, files.ca, files.other_cert, files.other_key) as wrong,
    ):
        wait_serving(channel)
        assert generates(channel)
        assert is_refused_by_transport(nameless)
        assert is_refused_by_transport(wrong)
        assert generates(channel)
        wait_until(lambda: "certificate/DNS:client.example" in server.log, SOON_S, "its name")


def test_an_expired_certificate_is_a_warning_at_the_start(files, tmp_path):
    past = datetime.datetime(2020, 2, 1, tzinfo=datetime.UTC)
    leaf = trustme.CA().issue_cert("localhost", not_before=past, not_after=past)
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    leaf.cert_chain_pems[0].write_to_path(cert)
    leaf.private_key_pem.write_to_path(key)
    for own, told in (
        ({"tls_cert": str(cert), "tls_key": str(key)}, [f"{cert} has expired on 2020-02-01"]),
        (tls_of(files), []),
    ):
        with fake(server=own) as server:
            warnings = [one for one in server.log.splitlines() if "WARNING" in one]
            assert len(warnings) == len(told)
            assert all(one in line for one, line in zip(told, warnings, strict=True))


def test_old_tls_is_not_spoken(files):
    with fake(server=tls_of(files)) as server:
        host, _, port = server.address.rpartition(":")
        context = ssl.create_default_context(cafile=files.ca)
        context.set_alpn_protocols(["h2"])
        with (
            socket.create_connection((host, int(port)), timeout=SOON_S) as raw,
            context.wrap_socket(raw, server_hostname="localhost") as wrapped,
        ):
            assert wrapped.version() in ("TLSv1.2", "TLSv1.3")
            assert wrapped.selected_alpn_protocol() == "h2"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"tls_cert": "nowhere.pem"}, "--tls-cert nowhere.pem cannot be read: No such file"),
        ({"tls_key": "other_key"}, "are not a PEM certificate and its key"),
        ({"tls_cert": "key"}, "are not a PEM certificate and its key"),
        ({"client_ca": "key"}, "--client-ca"),
        ({"api_key_file": "nowhere"}, "--api-key-file nowhere cannot be read: No such file"),
    ],
)
def test_wrong_files_are_one_sentence_before_anything_is_loaded(files, changes, told):
    fields = {name: str(getattr(files, value, value)) for name, value in changes.items()}
    settings = {"server": tls_of(files) | fields, "is_command": True}
    with fake_process(**settings) as server:
        assert server.wait() == 1
        [sentence] = server.sentences()
        assert told in sentence
        assert "is ready" not in server.log


# ---- keys ------------------------------------------------------------------------------------


def test_calls_without_a_key_are_refused_and_with_one_are_served(keys):
    with fake(server={"api_key_file": str(keys)}) as server:
        channel = showing(server.channel, KEY)
        wait_serving(server.channel)  # probes need no key
        refused = generate(server.channel).error
        assert (refused.code(), reason(refused)) == (UNAUTHENTICATED, "UNAUTHENTICATED")
        assert reason(generate(showing(server.channel, KEY + "x")).error) == "UNAUTHENTICATED"
        assert generates(channel)
        assert stats(channel).requests_total.finished == 1
        error = error_of(lambda: stats(server.channel))
        assert error.code() is UNAUTHENTICATED
        assert KEY not in server.log


def test_nothing_of_a_refused_call_is_parsed(keys):
    """The request's bytes are no message, which a client without a key does not learn."""
    with fake(server={"api_key_file": str(keys)}) as server:
        path = "/triolet.v1.Inference/Generate"

        def send(channel):
            call = channel.unary_stream(path, request_serializer=None, response_deserializer=None)
            return error_of(lambda: list(call(b"\xff\xff\xff", timeout=SOON_S)))

        assert send(server.channel).code() is UNAUTHENTICATED
        wrong = send(showing(server.channel, KEY))
        assert wrong.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_hup_reads_the_keys_again_and_a_wrong_file_changes_nothing(keys):
    with fake(server={"api_key_file": str(keys)}, may_log="the keys stay as they were") as server:
        wait_serving(server.channel)
        old, new = showing(server.channel, KEY), showing(server.channel, "the-new-key-of-bob")
        assert generates(old)
        assert reason(generate(new).error) == "UNAUTHENTICATED"
        keys.write_text("bob the-new-key-of-bob\n")
        server.signal(signal.SIGHUP)
        wait_until(lambda: "read again: 1 keys" in server.log, SOON_S)
        assert generates(new)
        assert reason(generate(old).error) == "UNAUTHENTICATED"
        keys.write_text("bob short\n")
        server.signal(signal.SIGHUP)
        wait_until(lambda: "the keys stay as they were" in server.log, SOON_S)
        assert generates(new)


def test_a_request_goes_on_when_its_key_is_taken_away(keys):
    with fake(server={"api_key_file": str(keys)}, script={"step_s": 0.02}) as server:
        wait_serving(server.channel)
        with Generation(showing(server.channel, KEY), max_tokens=60) as call:
            call.read_deltas(2)
            keys.write_text("bob the-new-key-of-bob\n")
            server.signal(signal.SIGHUP)
            wait_until(lambda: "read again" in server.log, SOON_S)
            assert call.finish().error is None


def test_a_hangup_does_not_end_a_server_without_keys_and_the_log_says_so():
    with fake() as server:
        wait_serving(server.channel)
        server.signal(signal.SIGHUP)
        said = "SIGHUP changes nothing: without --api-key-file there is no file to read again"
        wait_until(lambda: said in server.log, SOON_S)
        assert generates(server.channel)


def test_a_key_has_so_many_requests_at_once_and_others_are_untouched(keys):
    with fake(server={"api_key_file": str(keys)}, script={"step_s": 0.02}) as server:
        wait_serving(server.channel)
        guest, alice = showing(server.channel, GUEST_KEY), showing(server.channel, KEY)
        with Generation(guest, prompt_ids=[5], max_tokens=2000) as call:
            call.read_deltas(1)
            refused = generate(guest).error
            assert refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert reason(refused) == "QUEUE_FULL"
            assert "RetryInfo" in details(refused)
            assert generates(alice)
            assert stats(guest).running == 1  # Control does not count as a request
        wait_until(lambda: generate(guest, max_tokens=3).error is None, SOON_S, "room again")
        assert generates(guest)


def test_a_key_has_so_many_tokens_waiting(tmp_path):
    path = tmp_path / "keys"
    path.write_text(f"guest {GUEST_KEY} max_queued_tokens=20\nalice {KEY}\n")
    with fake(server={"api_key_file": str(path)}) as server:
        wait_serving(server.channel)
        guest, alice = showing(server.channel, GUEST_KEY), showing(server.channel, KEY)
        control = stubs.ControlStub(alice)
        control.Pause(pb.PauseRequest(mode="PAUSE_MODE_KEEP"), timeout=SOON_S)
        with Generation(guest, prompt_ids=range(1, 16), max_tokens=3) as waiting:
            wait_until(lambda: stats(alice).waiting == 1, SOON_S)
            refused = generate(guest, prompt_ids=range(1, 11)).error
            assert reason(refused) == "QUEUE_FULL"
            assert "15 prompt tokens waiting, of at most 20" in refused.details()
            with (
                Generation(guest, prompt_ids=[1, 2, 3], max_tokens=3) as small,
                Generation(alice, prompt_ids=range(1, 100), max_tokens=3) as other,
            ):
                wait_until(lambda: stats(alice).waiting == 3, SOON_S)
                control.Resume(pb.ResumeRequest(), timeout=SOON_S)
                for call in (waiting, small, other):
                    assert call.finish().error is None
        assert generate(guest, prompt_ids=range(1, 20), max_tokens=2).error is None
        with Generation(guest, prompt_ids=range(1, 21), max_tokens=2) as call:
            call.cancel()  # a call that ends early gives its tokens back, too
        wait_until(  # the next call may reach the server before the cancel
            lambda: generate(guest, prompt_ids=range(1, 21), max_tokens=2).error is None, SOON_S
        )


# ---- Unix sockets ----------------------------------------------------------------------------


def test_a_unix_socket_needs_no_key_and_may_operate(keys, tmp_path):
    uds = tmp_path / "socket"
    settings = {"uds": str(uds), "api_key_file": str(keys)}
    with fake_process(server=settings):
        wait_until(uds.exists, SOON_S, "the socket")
        with grpc.insecure_channel(f"unix:{uds}") as channel:
            wait_serving(channel)
            assert generates(channel)
            assert stats(channel).requests_total.finished == 1
            assert reason(generate(showing(channel, "wrong")).error) == "UNAUTHENTICATED"
        assert uds.stat().st_mode & 0o022 == 0  # other users of the machine cannot connect


# ---- beyond this machine ---------------------------------------------------------------------


def test_from_another_address_operating_needs_the_key(keys):
    host = own_address() or "127.0.0.1"
    is_remote = host != "127.0.0.1"
    with fake(server={"host": "0.0.0.0", "api_key_file": str(keys)}) as server:
        port = server.address.rpartition(":")[2]
        with grpc.insecure_channel(f"{host}:{port}", options=NO_PROXY) as channel:
            wait_serving(channel)
            error = error_of(lambda: stats(channel))
            expected = "PERMISSION_DENIED" if is_remote else "UNAUTHENTICATED"
            assert (error.code().name, reason(error)) == (expected, expected)
            assert reason(generate(channel).error) == "UNAUTHENTICATED"
            assert stats(showing(channel, KEY)).requests_total.finished == 0
            assert generates(showing(channel, KEY))


def test_from_another_address_nobody_operates_without_keys():
    host = own_address() or "127.0.0.1"
    is_remote = host != "127.0.0.1"
    with fake(server={"host": "0.0.0.0", "insecure": True}) as server:
        port = server.address.rpartition(":")[2]
        with grpc.insecure_channel(f"{host}:{port}", options=NO_PROXY) as channel:
            wait_serving(channel)
            assert generates(channel)
            if is_remote:
                error = error_of(lambda: stats(channel))
                assert error.code() is grpc.StatusCode.PERMISSION_DENIED
        assert stats(server.channel).requests_total.finished == 1


def test_a_server_for_other_machines_refuses_to_start_without_its_flag():
    code, out, err = command("serve", "--host", "0.0.0.0")
    assert (code, out) == (2, "")
    for flag in ("--tls-cert", "--api-key-file", "--insecure"):
        assert flag in err


# ---- sizes -----------------------------------------------------------------------------------


def test_a_request_that_is_too_large_gets_a_whole_status():
    with fake(server={"max_message_bytes": 20_000}) as server:
        wait_serving(server.channel)
        error = generate(server.channel, text="x" * 20_001).error
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert reason(error) == "REQUEST_TOO_LARGE"
        assert "of at most 20000" in error.details()
        huge = generate(server.channel, text="x" * 5_000_000).error  # not all of it need arrive
        assert reason(huge) == "REQUEST_TOO_LARGE"
        assert generates(server.channel)


# ---- the command line ------------------------------------------------------------------------


def test_the_client_commands_speak_tls_and_show_a_key(files, keys, tmp_path):
    mine = tmp_path / "mine"
    mine.write_text(f"{KEY}\n")
    fields = tls_of(files, client_ca=str(files.ca), api_key_file=str(keys))
    with fake(server=fields) as server:
        to = ("--server", server.address, "--json")
        tls = ("--tls-ca", files.ca)
        own = ("--tls-cert", files.client_cert, "--tls-key", files.client_key)
        code, out, err = command("stats", *to, *tls, *own, "--api-key-file", mine)
        assert (code, err) == (0, "")
        assert "totals" in json.loads(out)
        code, out, err = command("models", *to, *tls, *own, env={"TRIOLET_API_KEY": KEY})
        assert (code, err) == (0, "")
        code, _, err = command("models", *to, *tls, *own)
        assert (code, err.count("\n")) == (1, 1)
        assert "a key is needed" in err
        code, _, err = command("models", *to, *tls, "--api-key-file", mine, "--timeout", "5")
        assert (code, err.count("\n")) == (1, 1), err
        assert "its clients need certificates (--tls-cert and --tls-key)" in err
        code, _, err = command("models", *to, *tls, "--tls-cert", files.client_cert)
        assert (code, err) == (2, "triolet: --tls-cert and --tls-key go together\n")
        code, _, err = command("models", *to, "--tls-ca", "nowhere")
        assert (code, err) == (
            2,
            "triolet: --tls-ca nowhere cannot be read: No such file or directory\n",
        )


def test_the_client_module_speaks_tls_and_shows_a_key(files, keys):
    fields = tls_of(files, client_ca=str(files.ca), api_key_file=str(keys))
    own = {"cert": str(files.client_cert), "key": str(files.client_key)}
    request = GenerateRequest(text="Once", sampling={"max_tokens": 3})
    with fake(server=fields) as server:
        with Client(server.address, tls=Tls(str(files.ca), **own), api_key=KEY) as client:
            assert client.generate(request, timeout=SOON_S).text()
            assert client.models.list_models(timeout=SOON_S).models
        with Client(server.address, tls=Tls(str(files.ca), **own), api_key="wrong") as client:
            with pytest.raises(Unauthenticated) as caught:
                client.models.list_models(timeout=SOON_S)
            assert caught.value.reason == "UNAUTHENTICATED"
        with Client(server.address, tls=Tls(str(files.ca))) as client, pytest.raises(Unavailable):
            client.models.list_models(timeout=SOON_S)


def test_the_client_commands_say_why_there_is_no_connection(files, keys):
    """Each message is one line, which names the flag."""
    with fake() as plain, fake(server=tls_of(files) | {"api_key_file": str(keys)}) as secured:
        wait_serving(plain.channel)
        for server, flags, told in (
            (plain, ["--tls"], "does not use TLS: leave out --tls and --tls-ca"),
            (plain, ["--tls-ca", files.ca], "does not use TLS: leave out"),
            (secured, [], "it may want TLS (--tls or --tls-ca)"),
            (secured, ["--tls"], "was signed by an authority that is not trusted here"),
            (
                secured,
                ["--tls-ca", files.other_ca],
                "was signed by an authority that is not trusted here",
            ),
            (secured, ["--tls-ca", files.ca], "give one by --api-key-file or in $TRIOLET_API_KEY"),
        ):
            code, out, err = command("stats", "--server", server.address, *flags)
            assert (code, out, err.count("\n")) == (1, "", 1)
            assert told in err, err


def test_the_client_commands_name_a_certificate_for_another_name(files):
    fields = {"tls_cert": str(files.client_cert), "tls_key": str(files.client_key)}
    with fake(server=fields) as server:
        code, _, err = command("stats", "--server", server.address, "--tls-ca", files.ca)
        assert (code, err.count("\n")) == (1, 1)
        assert "is for another name" in err


def test_the_client_commands_recognise_a_server_without_grpc():
    with fake(server={"metrics_port": 0}) as server:
        where = wait_until(lambda: re.search(r"http://(\S+)/metrics", server.log), SOON_S)[1]
        code, _, err = command("stats", "--server", where)
        assert (code, err) == (1, f"triolet: what answers at {where} is not a gRPC server\n")


# ---- encoders --------------------------------------------------------------------------------


def test_embed_needs_the_key_and_counts_against_it(tmp_path):
    path = tmp_path / "keys"
    path.write_text(f"guest {GUEST_KEY} max_queued_tokens=20\n")
    models = [{"name": "vectors", "capability": "text-embedding"}]
    with fake(models=models, server={"api_key_file": str(path)}) as server:
        wait_serving(server.channel)
        request = pb.EmbedRequest(inputs=[{"token_ids": {"ids": [1, 2, 3]}}] * 5)

        def embed(channel, request=request):
            stub = stubs.InferenceStub(channel)
            return list(stub.Embed(request, timeout=SOON_S))

        assert error_of(lambda: embed(server.channel)).code() is UNAUTHENTICATED
        guest = showing(server.channel, GUEST_KEY)
        for _ in range(4):  # each call gives its 15 tokens back
            assert len(embed(guest)) == 5
        control = stubs.ControlStub(guest)
        control.Pause(pb.PauseRequest(mode="PAUSE_MODE_KEEP"), timeout=SOON_S)
        waiting = stubs.InferenceStub(guest).Embed(request, timeout=SOON_S)
        wait_until(lambda: stats(guest).waiting, SOON_S, "waiting")
        assert reason(error_of(lambda: embed(guest))) == "QUEUE_FULL"
        control.Resume(pb.ResumeRequest(), timeout=SOON_S)
        assert len(list(waiting)) == 5
        assert "Inference/Embed OK" in server.log
        assert "tokens_done=15" in server.log
