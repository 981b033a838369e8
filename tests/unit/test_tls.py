"""What a server's TLS accepts, and the warnings before its certificates expire."""

import datetime
import itertools
import ssl
from pathlib import Path

import pytest
import trustme

from engine.errors import ConfigError
from grpc_service.app.server_config import ServerConfig
from grpc_service.app.tls import certificate_warnings, server_context
from grpc_service.rpc.sockets import name_of

DAY_S = 86_400.0
NOW = datetime.datetime(2030, 6, 15, tzinfo=datetime.UTC)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with the certificates of four authorities and of a client of each."""
    path = tmp_path_factory.mktemp("certificates")
    root, stranger = trustme.CA(), trustme.CA()
    middle = root.create_child_ca()
    lower = middle.create_child_ca()
    authorities = {"root": root, "middle": middle, "lower": lower, "stranger": stranger}
    for name, authority in authorities.items():
        authority.cert_pem.write_to_path(path / f"{name}.pem")
        leaf = authority.issue_cert(f"{name}.example", "localhost")
        leaf.private_key_pem.write_to_path(path / f"of-{name}.key")
        leaf.cert_chain_pems[0].write_to_path(path / f"of-{name}-alone.crt")
        chain = b"".join(part.bytes() for part in leaf.cert_chain_pems)
        (path / f"of-{name}.crt").write_bytes(chain)
    both = (path / "middle.pem").read_bytes() + (path / "root.pem").read_bytes()
    (path / "middle-and-root.pem").write_bytes(both)
    return path


def is_accepted(context, folder, client):
    """Return whether the handshake of a client with this file's chain and key succeeds."""
    key = folder / f"{client.removesuffix('-alone')}.key"
    theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    theirs.check_hostname, theirs.verify_mode = False, ssl.CERT_NONE
    theirs.load_cert_chain(folder / f"{client}.crt", key)
    theirs.set_alpn_protocols(["h2"])
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [theirs.wrap_bio(down, up), context.wrap_bio(up, down, server_side=True)]
    for _ in range(4):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLError:
                return False
    return True


@pytest.mark.parametrize(
    ("names", "name"),
    [
        ([], ""),
        ([("DNS", "ann"), ("DNS", "ben")], "DNS:ann"),
        ([("URI", "ann")], "URI:ann"),
        ([("email", "ann")], "email:ann"),
        ([("IP Address", "10.0.0.1")], "IP:10.0.0.1"),
        # `ssl` has the same text for every name of these types.
        ([("othername", "<unsupported>")], ""),
        ([("othername", "<unsupported>"), ("DNS", "ann")], "DNS:ann"),
        ([("DirName", ((("commonName", "ann"),),))], ""),
    ],
)
def test_a_certificates_name_has_its_type(names, name):
    """Else who has a URI signed is the holder whose DNS name reads the same."""
    assert name_of({"subjectAltName": tuple(names)}) == name


def test_a_client_without_a_certificate_has_no_name():
    assert name_of(None) == name_of({}) == ""


# The clients that a server with each --client-ca accepts, as grpcio's server does. A client sends
# its certificates up to the root, or with "-alone" its own only.
BELOW_MIDDLE = {"of-middle", "of-middle-alone", "of-lower"}
LET_IN = {
    "root": {"of-root", "of-root-alone", "of-middle", "of-lower"},
    "middle": BELOW_MIDDLE,
    "lower": {"of-lower", "of-lower-alone"},
    "middle-and-root": BELOW_MIDDLE | {"of-root", "of-root-alone"},
    "stranger": {"of-stranger", "of-stranger-alone"},
}
CLIENTS = [
    f"of-{name}{alone}"
    for name, alone in itertools.product(("root", "middle", "lower", "stranger"), ("", "-alone"))
]


@pytest.mark.parametrize("authority", LET_IN)
def test_an_authority_lets_in_whom_it_signed_wherever_it_stands(folder, authority):
    config = ServerConfig(
        tls_cert=str(folder / "of-root.crt"),
        tls_key=str(folder / "of-root.key"),
        client_ca=str(folder / f"{authority}.pem"),
    )
    context = server_context(config)
    assert {one for one in CLIENTS if is_accepted(context, folder, one)} == LET_IN[authority]


# ---- how long certificates are valid


def dates(after_days, before_days=-300):
    """Return the end and the beginning of a certificate's validity, in days from now."""
    return {
        "not_after": NOW + datetime.timedelta(after_days),
        "not_before": NOW + datetime.timedelta(before_days),
    }


WARNINGS = {
    "a year": (dates(365), ""),
    "fifteen days": (dates(15), ""),
    "thirteen days": (dates(13), "expires on 2030-06-28"),
    "an hour": (dates(1 / 24), "expires on 2030-06-15"),
    "three of six days": (dates(3, -3), ""),
    "one of six days": (dates(1, -5), "expires on 2030-06-16"),
    "until a second ago": (dates(-1 / 86_400), "has expired on 2030-06-14"),
    "until last century": (dates(-30 * 365, -40 * 365), "has expired on 2000-06-22"),
    "until after 2050": (dates(40 * 365), ""),
    "from tomorrow": (dates(100, 1), "is not valid before 2030-06-16"),
}


def with_dates(folder, *wanted):
    """Return a configuration whose certificate file has leaf certificates of these dates."""
    root = trustme.CA()
    leaves = [root.issue_cert("localhost", **one) for one in wanted]
    (folder / "cert.pem").write_bytes(b"".join(one.cert_chain_pems[0].bytes() for one in leaves))
    leaves[0].private_key_pem.write_to_path(folder / "key.pem")
    return ServerConfig(tls_cert=str(folder / "cert.pem"), tls_key=str(folder / "key.pem"))


@pytest.mark.parametrize(("validity", "told"), WARNINGS.values(), ids=WARNINGS)
def test_a_certificate_that_has_expired_or_soon_will_is_named(tmp_path, validity, told):
    config = with_dates(tmp_path, validity)
    found = certificate_warnings(config, NOW.timestamp())
    wanted = [f"--tls-cert {tmp_path / 'cert.pem'} {told}"] if told else []
    assert [sentence.partition(";")[0] for sentence in found] == wanted


def test_the_certificate_that_ends_first_counts(tmp_path):
    config = with_dates(tmp_path, dates(100), dates(-1), dates(5))
    [sentence] = certificate_warnings(config, NOW.timestamp())
    assert "has expired on 2030-06-14" in sentence


def test_the_clients_authority_is_looked_at_too(tmp_path):
    config = with_dates(tmp_path, dates(100))
    client_ca = tmp_path / "ca.pem"
    client_ca.write_bytes(Path(with_dates(tmp_path, dates(-2)).tls_cert).read_bytes())
    own = with_dates(tmp_path, dates(100))
    config = ServerConfig(tls_cert=own.tls_cert, tls_key=own.tls_key, client_ca=str(client_ca))
    [sentence] = certificate_warnings(config, NOW.timestamp())
    assert sentence.startswith(f"--client-ca {client_ca} has expired on 2030-06-13")


def test_a_server_without_tls_has_no_certificates():
    assert certificate_warnings(ServerConfig(), NOW.timestamp()) == []


def test_a_file_without_certificates_is_refused_by_name(tmp_path):
    config = with_dates(tmp_path, dates(100))
    (tmp_path / "cert.pem").write_text("none")
    with pytest.raises(ConfigError, match="--tls-cert"):
        server_context(config)
