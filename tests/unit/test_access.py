"""Who may call which method: peers as grpc writes them, API keys as their file has them."""

import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import (
    ConfigError,
    InvalidRequest,
    NotAllowed,
    Overloaded,
    Unauthenticated,
)
from engine.requests.quota import Quota
from grpc_service._generated.triolet.v1 import control_pb2, inference_pb2, models_pb2
from grpc_service.access import keys, policy
from grpc_service.access.keys import KeyLimits, KeyRing
from grpc_service.app.server_config import ServerConfig

KEY, OTHER_KEY = "alice-has-this-key", "bob-has-another-key"
GENERATE = "triolet.v1.Inference/Generate"
DRAIN = "triolet.v1.Control/Drain"
HEALTH = "grpc.health.v1.Health/Check"
LOCAL = ["ipv4:127.0.0.1:5000", "ipv4:127.1.2.3:5000", "ipv6:%5B::1%5D:5000", "ipv6:[::1]:5000"]
LOCAL.append("ipv6:%5B::ffff:127.0.0.1%5D:5000")
UNIX = ["unix:", "unix:/run/triolet.sock"]
REMOTE = ["ipv4:10.0.0.1:5000", "ipv6:%5B2001:db8::1%5D:5000", "ipv6:%5B::ffff:10.0.0.1%5D:1"]
REMOTE += ["", "x"]
# Who may call each RPC: everybody whom the server serves; users, but for their own requests alone;
# or operators alone. An RPC that is missing here fails a test.
EVERYBODY, OF_OWN, OPERATORS = "everybody", "of their own", "operators"
RIGHTS = {
    "triolet.v1.Inference": {
        **dict.fromkeys(("Generate", "Embed", "EmbedStream", "Rerank", "GenerateImage"), EVERYBODY),
        **dict.fromkeys(("Classify", "Tokenize", "Detokenize"), EVERYBODY),
        "Attach": EVERYBODY,  # with the token of a stream of the holder's own
    },
    "triolet.v1.Models": {
        **dict.fromkeys(("ListModels", "GetModel"), EVERYBODY),
        **dict.fromkeys(("LoadModel", "UnloadModel", "LoadAdapter", "UnloadAdapter"), OPERATORS),
    },
    "triolet.v1.Control": {
        **dict.fromkeys(("GetStats", "WatchStats", "Pause", "Resume"), OPERATORS),
        **dict.fromkeys(("Drain", "ResetPrefixCache"), OPERATORS),
        **dict.fromkeys(("Abort", "Explain", "GetUsage"), OF_OWN),
    },
}
RIGHT_OF = {
    f"{service}/{name}": right for service, own in RIGHTS.items() for name, right in own.items()
}


def methods():
    return [
        f"{service.full_name}/{method.name}"
        for file in (inference_pb2, models_pb2, control_pb2)
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    ]


OPERATING = [m for m in methods() if RIGHT_OF.get(m) != EVERYBODY]


@pytest.fixture
def file(tmp_path):
    """Return a file with two keys."""
    path = tmp_path / "keys"
    path.write_text(f"# the holders\nalice {KEY}\nbob {OTHER_KEY} max_requests=2  # a guest\n\n")
    return path


@pytest.fixture
def ring(file):
    return KeyRing(str(file))


def showing(key, scheme="Bearer"):
    """Return metadata with this key as `authorization`."""
    return [("user-agent", "x"), ("authorization", f"{scheme} {key}")]


# ---- peers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("peer", LOCAL + UNIX)
def test_loopback_and_unix_sockets_are_local(peer):
    assert policy.is_local(peer)


@pytest.mark.parametrize("peer", REMOTE)
def test_everything_else_is_not(peer):
    assert not policy.is_local(peer)


def test_every_rpc_has_a_right():
    assert sorted(RIGHT_OF) == sorted(methods())


@pytest.mark.parametrize("method", methods())
@pytest.mark.parametrize("peer", [LOCAL[0], UNIX[1], REMOTE[0]])
def test_without_a_key_file_only_operating_is_for_this_machine(method, peer):
    if method in OPERATING and peer == REMOTE[0]:
        with pytest.raises(NotAllowed):
            policy.admit(method, peer, showing(KEY), None)
    else:
        caller = policy.admit(method, peer, [], None)
        assert caller == (None, peer != REMOTE[0])


@pytest.mark.parametrize("method", methods())
@pytest.mark.parametrize("peer", LOCAL[:1] + REMOTE)
def test_with_a_key_file_every_tcp_client_needs_a_key(ring, method, peer):
    is_remote = peer in REMOTE
    with pytest.raises(NotAllowed if is_remote and method in OPERATING else Unauthenticated):
        policy.admit(method, peer, [("user-agent", "x")], ring)
    assert policy.admit(method, peer, showing(KEY), ring).holder.name == "alice"
    assert policy.admit(method, peer, showing(OTHER_KEY, "bearer"), ring).holder.name == "bob"


@pytest.mark.parametrize("method", methods())
@pytest.mark.parametrize("peer", UNIX)
def test_a_unix_socket_needs_no_key(ring, method, peer):
    assert policy.admit(method, peer, [], ring) == (None, True)
    assert policy.admit(method, peer, showing(KEY), ring).holder.name == "alice"


@pytest.mark.parametrize("peer", [LOCAL[0], UNIX[0], REMOTE[0]])
@pytest.mark.parametrize(
    "value",
    [
        f"Bearer {KEY[:-1]}",
        f"Bearer {KEY}x",
        f"Bearer {KEY.upper()}",
        f"Basic {KEY}",
        KEY,
        "Bearer ",
        "Bearer",
        "",
        "Bearer " + 100_000 * "x",
        "Bearer ключ",
        f"Bearer {KEY}".encode() + b"\xff",
    ],
)
def test_a_wrong_key_is_refused_wherever_it_is_shown(ring, peer, value):
    for method in (GENERATE, "triolet.v1.Control/GetStats"):
        with pytest.raises(Unauthenticated) as caught:
            policy.admit(method, peer, [("authorization", value)], ring)
        assert KEY not in str(caught.value)


def test_health_and_reflection_are_for_probes_too(ring):
    assert policy.admit(HEALTH, REMOTE[0], [], ring) == (None, False)
    assert policy.admit(HEALTH, REMOTE[0], showing("wrong"), ring) == (None, False)


# ---- roles -----------------------------------------------------------------------------------

ROLE_KEYS = {
    "user": "the-key-of-a-user-1",
    "operator": "the-key-of-an-operator",
    "silent": "the-key-without-a-role",
    "gateway": "the-key-of-a-gateway",
}
ROLE_LINES = {"user": "role=user", "operator": "role=operator", "gateway": "delegate=true weight=3"}


@pytest.fixture
def roles(tmp_path):
    """Return the ring of a file with a key of each role, and one without."""
    path = tmp_path / "roles"
    lines = [f"{name} {key} {ROLE_LINES.get(name, '')}" for name, key in ROLE_KEYS.items()]
    path.write_text("\n".join(lines))
    return KeyRing(str(path))


@pytest.mark.parametrize("method", methods())
@pytest.mark.parametrize("peer", [LOCAL[0], UNIX[1], REMOTE[0]])
def test_each_role_may_call_what_the_table_says(roles, method, peer):
    """A key decides wherever its client is: on this machine a user's key operates nothing."""
    right = RIGHT_OF[method]
    for name, key in ROLE_KEYS.items():
        for beside in ([], [(policy.HOLDER_HEADER, "team")] if name == "gateway" else []):
            metadata = showing(key) + beside
            if right == OPERATORS and name != "operator":
                with pytest.raises(NotAllowed, match="operators"):
                    policy.admit(method, peer, metadata, roles)
                continue
            caller = policy.admit(method, peer, metadata, roles)
            assert caller.holder.name == (f"{name}/team" if beside else name)
            assert caller.is_operator == (name == "operator")


@pytest.mark.parametrize("method", methods())
def test_a_certificates_client_is_a_user_elsewhere(method):
    for peer in (LOCAL[0], REMOTE[0]):
        if RIGHT_OF[method] == OPERATORS and peer == REMOTE[0]:
            with pytest.raises(NotAllowed):
                policy.admit(method, peer, [], None, "ann.example")
        else:
            caller = policy.admit(method, peer, [], None, "DNS:ann.example")
            assert caller.is_operator == (peer == LOCAL[0])
            assert caller.holder.name == "certificate/DNS:ann.example"
            again = policy.admit(method, peer, [], None, "DNS:ann.example")
            assert again.holder is caller.holder


def test_with_a_key_file_a_certificate_names_nobody(ring):
    assert policy.admit(GENERATE, UNIX[0], [], ring, "ann.example") == (None, True)
    with pytest.raises(Unauthenticated):
        policy.admit(GENERATE, REMOTE[0], [], ring, "ann.example")


def test_in_a_file_without_roles_every_key_operates_and_the_log_says_so(file, caplog):
    ring = KeyRing(str(file))
    assert policy.admit(DRAIN, REMOTE[0], showing(KEY), ring).is_operator
    assert "every key may operate the server" in caplog.text
    caplog.clear()
    file.write_text(f"alice {KEY}\nbob {OTHER_KEY} role=user\n")
    ring.reload()
    assert not policy.admit(GENERATE, REMOTE[0], showing(KEY), ring).is_operator
    assert "every key" not in caplog.text


@pytest.mark.parametrize("setting", ["role=user", "weight=1", "delegate=false", "max_priority=0"])
def test_a_file_that_loses_its_last_role_is_wrong(file, setting):
    """Else every key would operate the server as soon as the file is read again."""
    file.write_text(f"alice {KEY}\nbob {OTHER_KEY} {setting}\n")
    ring = KeyRing(str(file))
    for text in (f"alice {KEY}\n", f"alice {KEY}\nbob {OTHER_KEY} max_requests=3\n"):
        file.write_text(text)
        with pytest.raises(ConfigError, match="no role= any more"):
            ring.reload()
        for key in (KEY, OTHER_KEY):
            with pytest.raises(NotAllowed, match="operators"):
                policy.admit(DRAIN, REMOTE[0], showing(key), ring)
        assert ring.find(OTHER_KEY.encode()).max_requests is None
    file.write_text(f"alice {KEY} role=operator\n")
    ring.reload()
    assert policy.admit(DRAIN, REMOTE[0], showing(KEY), ring).is_operator


# ---- holders for whom others call --------------------------------------------------------------


def called_for(name, key):
    return [*showing(key), (policy.HOLDER_HEADER, name)]


def test_only_a_key_that_delegates_names_another_holder(roles, ring):
    for name in ("user", "operator", "silent"):
        with pytest.raises(NotAllowed, match="delegate=true"):
            policy.admit(GENERATE, REMOTE[0], called_for("team", ROLE_KEYS[name]), roles)
    with pytest.raises(NotAllowed, match="delegate=true"):
        policy.admit(GENERATE, UNIX[0], [(policy.HOLDER_HEADER, "team")], ring)
    assert policy.admit(GENERATE, LOCAL[0], [(policy.HOLDER_HEADER, "x")], None).holder is None


def test_a_delegated_holder_has_its_gateways_weight_and_counts_against_its_limits(roles):
    gateway = roles.find(ROLE_KEYS["gateway"].encode())
    gateway.max_requests = 2
    found = [
        policy.admit(GENERATE, REMOTE[0], called_for(name, ROLE_KEYS["gateway"]), roles).holder
        for name in ("one", "two", "one")
    ]
    assert found[0] is found[2] is not found[1]
    assert [one.weight for one in found] == [3, 3, 3]
    for one in found[:2]:
        one.counted.enter()
    assert gateway.num_requests == 2
    with pytest.raises(Overloaded):
        found[0].counted.enter()


def test_a_delegated_holder_with_a_request_follows_its_gateways_new_settings(tmp_path):
    """Red if a busy holder keeps what its gateway had at its first call."""
    path, key = tmp_path / "keys", ROLE_KEYS["gateway"]
    path.write_text(f"gateway {key} delegate=true weight=3")
    ring = KeyRing(str(path))
    busy = policy.admit(GENERATE, REMOTE[0], called_for("one", key), ring).holder
    path.write_text(f"gateway {key} delegate=true weight=5 max_priority=2")
    ring.reload()
    again = policy.admit(GENERATE, REMOTE[0], called_for("one", key), ring).holder
    assert again is busy
    assert (again.weight, again.max_priority) == (5, 2)


@pytest.mark.parametrize("name", ["", "two words", "ö", "x" * 129])
def test_a_wrong_name_of_a_delegated_holder_is_refused(roles, name):
    with pytest.raises(InvalidRequest, match=policy.HOLDER_HEADER):
        policy.admit(GENERATE, REMOTE[0], called_for(name, ROLE_KEYS["gateway"]), roles)


def test_two_names_of_delegated_holders_are_refused(roles):
    """The first may be the gateway's own client's."""
    metadata = [*called_for("one", ROLE_KEYS["gateway"]), (policy.HOLDER_HEADER, "two")]
    with pytest.raises(InvalidRequest, match="sent twice"):
        policy.admit(GENERATE, REMOTE[0], metadata, roles)


# ---- keys ------------------------------------------------------------------------------------


@pytest.mark.parametrize("shown", [KEY, OTHER_KEY, "nobody-has-this-key"])
def test_a_shown_key_is_compared_with_every_known_key(ring, monkeypatch, shown):
    compared = []
    monkeypatch.setattr(keys, "hmac", _Comparer(compared))
    ring.find(shown.encode())
    assert len(compared) == 2
    assert len({len(part) for pair in compared for part in pair}) == 1  # digests of one length


class _Comparer:
    """Stands in for `hmac`, and records what it compares."""

    def __init__(self, compared):
        self._compared = compared

    def compare_digest(self, one, other):
        self._compared.append((one, other))
        return hmac.compare_digest(one, other)


@given(st.binary(max_size=40))
def test_no_other_bytes_are_a_key(tmp_path_factory, shown):
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text(f"alice {KEY}\n")
    assert (KeyRing(str(path)).find(shown) is None) == (shown != KEY.encode())


def test_no_key_is_kept(ring):
    assert KEY not in repr(vars(ring))


def test_a_file_that_is_read_again_has_the_new_keys_and_the_old_counts(ring, file):
    alice = ring.find(KEY.encode())
    alice.enter()
    file.write_text(f"alice new-key-of-alice-1 max_requests=1\nalice {KEY} max_requests=1\n")
    assert ring.reload() == 2
    assert ring.find(b"new-key-of-alice-1") is ring.find(KEY.encode()) is alice
    assert ring.find(OTHER_KEY.encode()) is None
    with pytest.raises(Overloaded):
        alice.enter()


BAD_FILES = {
    "alice": "line 1: must have a name and a key",
    "alice short": "line 1: the key must have at least 16 characters",
    f"\n\nal/ice {KEY}": "line 3: the name must be",
    f"alice {KEY}é": "line 1: the key must",
    f"alice {KEY} max_requests=0": "line 1: max_requests= must be a number of at least 1",
    f"alice {KEY} max_request=1": "line 1: after the key come",
    f"alice {KEY} max_requests=²": "line 1: max_requests= must be",
    f"alice {KEY} max_priority=1e3": "line 1: max_priority= must be a number of 32 bits",
    f"alice {KEY} max_priority=-2147483649": "line 1: max_priority= must be",
    f"alice {KEY} weight=0": "line 1: weight= must be a number from 1 to 1000",
    f"alice {KEY} weight=-1": "line 1: weight= must be",
    f"alice {KEY} role=admin": "line 1: role= must be user or operator",
    f"alice {KEY} role": "line 1: role= must be user or operator",
    f"alice {KEY} delegate=yes": "line 1: delegate= must be true or false",
    f"alice {KEY}\nbob {KEY}": "holds a key twice",
    "# nobody": "holds no key",
    "\udcff": "it is not UTF-8",
}


@pytest.mark.parametrize("text", BAD_FILES)
def test_a_wrong_file_changes_nothing_and_the_error_shows_no_key(ring, file, text):
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError) as caught:
        ring.reload()
    assert BAD_FILES[text] in str(caught.value)
    assert KEY not in str(caught.value)
    assert ring.find(KEY.encode()).name == "alice"


def test_a_missing_file_is_an_error(file):
    file.unlink()
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        KeyRing(str(file))


def test_lines_have_the_servers_limits_unless_they_say_otherwise(file):
    ring = KeyRing(str(file), KeyLimits(max_requests=5, max_queued_tokens=100))
    alice, bob = ring.find(KEY.encode()), ring.find(OTHER_KEY.encode())
    assert (alice.max_requests, alice.max_queued_tokens) == (5, 100)
    assert (bob.max_requests, bob.max_queued_tokens) == (2, 100)


def test_a_holder_has_the_settings_of_its_last_line(file):
    file.write_text(f"alice {KEY} role=operator weight=2\nalice {OTHER_KEY} max_priority=-3\n")
    alice = KeyRing(str(file)).find(KEY.encode())
    assert (alice.is_operator, alice.weight, alice.max_priority) == (False, 1, -3)


# ---- quotas ----------------------------------------------------------------------------------


def test_a_quota_counts_requests_and_tokens_separately():
    quota = Quota("alice", max_requests=2, max_queued_tokens=10)
    quota.enter()
    quota.enter()
    with pytest.raises(Overloaded):
        quota.enter()
    quota.leave()
    quota.enter()
    quota.queue(50)  # alone in the queue, so accepted, or it could never be served
    with pytest.raises(Overloaded):
        quota.queue(1)
    quota.unqueue(50)
    quota.queue(9)
    with pytest.raises(Overloaded):
        quota.queue(2)
    quota.queue(1)


# ---- the configuration -----------------------------------------------------------------------


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "example.org"])
def test_serving_other_machines_needs_tls_keys_or_a_flag(host):
    with pytest.raises(ConfigError) as caught:
        ServerConfig(host=host)
    for flag in ("--tls-cert", "--tls-key", "--api-key-file", "--insecure"):
        assert flag in str(caught.value)
    ServerConfig(host=host, tls_cert="c", tls_key="k")
    ServerConfig(host=host, api_key_file="f")
    ServerConfig(host=host, insecure=True)
    ServerConfig(uds="/run/socket", host=host)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tls_cert": "c"}, "--tls-cert and --tls-key go together"),
        ({"tls_key": "k"}, "--tls-cert and --tls-key go together"),
        ({"client_ca": "c"}, "--client-ca needs --tls-cert"),
        ({"key_max_requests": 1}, "--key-max-requests needs --api-key-file"),
        ({"host": "a..b", "insecure": True}, "--host is 'a..b', which is not the name of a host"),
        ({"metrics_host": "x" * 64}, "--metrics-host is 'x+', which is not the name of a host"),
    ],
)
def test_contradictory_settings_are_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        ServerConfig(**fields)
