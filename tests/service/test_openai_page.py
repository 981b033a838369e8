"""The page of the HTTP port, without a browser: its files and headers, and who may operate.

`tests/interop/test_page.py` drives it in a browser.
"""

import json
import re
from pathlib import Path

import pytest

from grpc_service.client import messages as pb
from grpc_service.client import stubs
from tests.support.openai_calls import CHAT, TEXT, Connection, ask, own_address, request
from tests.support.programs import ROOT
from tests.support.server import fake
from tests.support.wire import wait_idle, wait_serving

PAGE = ROOT / "grpc_service" / "openai" / "page"
FILES = {
    path.name: "/" if path.suffix == ".html" else f"/page/{path.name}" for path in PAGE.iterdir()
}
STATISTICS, REQUESTS = "/triolet/statistics", "/triolet/requests"
EXPLAIN, ABORT = "/triolet/explain", "/triolet/abort"
BODY = {"model": "fake", "prompt": [1, 2], "max_tokens": 500, "stream": True}
ALLOWED = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "connect-src": "'self'",
    "img-src": "'self' data: blob:",
    "base-uri": "'none'",
    "frame-ancestors": "'none'",
    "form-action": "'none'",
    "require-trusted-types-for": "'script'",
    "trusted-types": "'none'",
}
KEY = "a-key-that-is-long-enough"


@pytest.fixture(scope="module")
def server():
    """Serve a slow fake; pages of one other origin may use the API."""
    origins = {"openai_port": 0, "openai_origins": ["https://chat.example"]}
    with fake(script={"step_s": 0.02}, server=origins) as one:
        wait_serving(one.channel)
        yield one


def look(server, path, **options):
    """Return the answer to a GET."""
    return ask(server.openai_port, path, verb="GET", **options)


@pytest.fixture
def live(server):
    """Return the id of a request that is on its way."""
    with Connection(server.openai_port) as client:
        client.send(request(TEXT, BODY, headers={"X-Request-Id": "mine/ä"}))
        client.read_head()
        yield client
    wait_idle(server.channel)


# ---- the files


@pytest.mark.parametrize("name", FILES)
def test_each_file_comes_as_it_is_under_a_strict_policy(server, name):
    answer = look(server, FILES[name])
    assert answer.status == 200
    assert answer.body == (PAGE / name).read_bytes()
    kinds = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
    assert answer.headers["content-type"] == f"{kinds[Path(name).suffix]}; charset=utf-8"
    parts = answer.headers["content-security-policy"].split("; ")
    assert dict(part.split(" ", 1) for part in parts) == ALLOWED
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_nothing_is_inline_and_nothing_comes_from_elsewhere():
    html = (PAGE / "index.html").read_text()
    assert re.findall(r"<script\b[^>]*>", html) == ['<script type="module" src="/page/page.js">']
    assert "<style" not in html
    assert not re.search(r"\s(style|on\w+)=", html)
    for path in PAGE.iterdir():
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?:|//\w+\.\w|@import|url\(", text), path.name
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|srcdoc|\beval\b"
            r"|new Function|DOMParser|localStorage|document\.cookie",
            text,
        ), path.name


def test_other_paths_and_verbs_are_refused(server):
    assert look(server, "/page/../door.py").status == 404
    assert look(server, "/page/").status == 404
    assert look(server, "/page/none.js").status == 404
    assert ask(server.openai_port, "/", {}).status == 405
    assert look(server, ABORT).status == 405
    with Connection(server.openai_port) as client:
        client.send(request("/", verb="HEAD"))
        status, headers = client.read_head()
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")


# ---- what an operator sees and does


def test_figures_are_those_of_control(server, live):
    shown = look(server, STATISTICS).json
    [model] = shown["models"]
    assert (model["name"], model["state"], model["capability"]) == ("fake", "ready", "text-to-text")
    assert model["memory_bytes"] > 0
    control = stubs.ControlStub(server.channel).GetStats(pb.GetStatsRequest())
    for name in ("running", "waiting", "total_blocks", "memory_reserved", "memory_limit"):
        assert shown["totals"][name] == getattr(control.totals, name), name
    [replica] = shown["replicas"]
    assert (replica["model"], replica["state"]) == ("fake", "ready")
    assert replica["counts"]["running"] == 1
    for name in ("first_token", "inter_token"):
        one = shown["latency"][name]
        assert len(one["counts"]) == len(one["bounds"]) + 1
    live.read_chunk()
    live.read_chunk()
    counted = look(server, STATISTICS).json["latency"]["first_token"]["counts"]
    assert sum(counted) >= 1


def test_a_live_request_is_listed_explained_and_aborted_without_its_text():
    with fake(script={"step_s": 0.02}, server={"openai_port": 0}) as server:
        wait_serving(server.channel)
        port = server.openai_port
        assert look(server, REQUESTS).json == {"total": 0, "requests": []}
        with Connection(port) as client:
            body = {"model": "fake", "stream": True, "max_tokens": 500}
            body["messages"] = [{"role": "user", "content": "a secret"}]
            client.send(request(CHAT, body, headers={"X-Request-Id": "my id&x=1"}))
            client.read_head()
            client.read_chunk()  # the role
            client.read_chunk()
            shown = look(server, REQUESTS)
            assert b"secret" not in shown.body
            assert shown.json["total"] == 1
            [one] = shown.json["requests"]
            assert (one["request_id"], one["model"]) == ("my id&x=1", "fake")
            assert one["phase"] in ("prefill", "decode")
            assert one["tokens_done"] >= 1
            assert 0 < one["age_s"] < 60
            told = look(server, f"{EXPLAIN}?request_id=my%20id%26x%3D1").json
            assert told["state"] == "RUNNING"
            assert told["blocks"] >= 1
            ended = ask(port, ABORT, {"request_ids": ["my id&x=1", "none"]})
            assert [one["outcome"] for one in ended.json["results"]] == ["aborted", "remembered"]
            while part := client.read_chunk():
                last = part
            assert b'"code":"aborted"' in last
        wait_idle(server.channel)
        missing = look(server, f"{EXPLAIN}?request_id=my%20id%26x%3D1")
        assert (missing.status, missing.error["code"]) == (404, "request_not_found")
        assert "/triolet/abort OK" in server.log
        assert "/triolet/statistics" not in server.log


def test_no_more_requests_than_a_person_reads_are_listed():
    with fake(script={"step_s": 0.05}, server={"openai_port": 0}) as server:
        wait_serving(server.channel)
        with Connection(server.openai_port) as client:
            client.send(request(TEXT, BODY | {"prompt": [[1]] * 64, "n": 4}))
            client.read_head()
            shown = look(server, REQUESTS).json
            assert shown["total"] == 64
            ages = [one["age_s"] for one in shown["requests"]]
            assert len(ages) == 64
            assert ages == sorted(ages, reverse=True)


BAD = {
    "no ids": ({}, 400, "request_ids"),
    "an empty list": ({"request_ids": []}, 400, "request_ids"),
    "no list": ({"request_ids": "mine"}, 400, "request_ids"),
    "no text": ({"request_ids": [1]}, 400, "request_ids[0]"),
    "too long an id": ({"request_ids": ["a" * 5000]}, 400, "request_ids[0]"),
    "too many": ({"request_ids": ["a"] * 2000}, 400, "request_ids"),
    "another field": ({"request_ids": ["a"], "all": True}, 400, "all"),
    "no JSON": (b"{", 400, None),
    "too large": (b" " * 300_000, 413, None),
}


@pytest.mark.parametrize(("body", "status", "field"), BAD.values(), ids=BAD)
def test_a_wrong_abort_is_refused_by_its_field(server, body, status, field):
    answer = ask(server.openai_port, ABORT, body)
    assert answer.status == status, answer.body
    assert answer.error["param"] == field


@pytest.mark.parametrize("query", ["", "?request_id=", "?id=a", "?request_id=%ff&a=1&b=2&c"])
def test_a_wrong_question_is_refused(server, query):
    answer = look(server, EXPLAIN + query)
    assert answer.status in (400, 404), answer.body
    assert answer.error["message"]


# ---- who may


PATHS = {STATISTICS: None, REQUESTS: None, f"{EXPLAIN}?request_id=a": None}
PATHS[ABORT] = {"request_ids": ["someone's"]}


@pytest.mark.parametrize("path", PATHS)
def test_only_this_servers_own_page_may_operate(server, path):
    def status(**headers):
        verb = "GET" if PATHS[path] is None else "POST"
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        answer = ask(server.openai_port, path, PATHS[path], verb=verb, headers=names)
        assert "access-control-allow-origin" not in answer.headers
        return answer.status

    own = {"Host": "localhost:8000", "Origin": "http://localhost:8000"}
    assert status(**own) in (200, 404)
    assert status(Origin="http://evil.example") == 403
    assert status(Origin="https://chat.example") == 403  # it may use the API alone
    assert status(Origin="null") == 403
    assert status(Host="evil.example", Origin="http://evil.example") == 403
    assert status(Host="evil.example") == 403
    if PATHS[path] is not None:
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
            assert status(Content_Type=kind) == 415


def test_a_page_of_another_origin_may_not_ask_first(server):
    asked = {"Origin": "https://chat.example", "Access-Control-Request-Method": "POST"}
    answer = ask(server.openai_port, ABORT, verb="OPTIONS", headers=asked)
    assert answer.status == 403
    assert "access-control-allow-methods" not in answer.headers


def test_with_a_file_of_keys_the_page_comes_and_every_figure_needs_a_key(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text(f"ours {KEY}\n")
    settings = {"openai_port": 0, "api_key_file": str(keys)}
    with fake(server=settings) as server:
        assert look(server, "/").status == 200
        for path, body in PATHS.items():
            verb = "GET" if body is None else "POST"

            def status(headers, path=path, body=body, verb=verb):
                return ask(server.openai_port, path, body, verb=verb, headers=headers).status

            assert status({}) == 401, path
            assert status({"Authorization": "Bearer wrong"}) == 401, path
            assert status({"Authorization": f"Bearer {KEY}"}) in (200, 404), path
        assert KEY not in server.log


def test_on_every_address_a_name_that_leads_here_does_not_operate(tmp_path):
    """A page whose name leads to 127.0.0.1 comes from the loopback address, as its browser does."""
    open_to_all = {"openai_port": 0, "host": "0.0.0.0", "insecure": True}
    with fake(server=open_to_all) as server:
        foreign = {"Host": "evil.example:8000", "Origin": "http://evil.example:8000"}
        for path, body in PATHS.items():
            verb = "GET" if body is None else "POST"
            answer = ask(server.openai_port, path, body, verb=verb, headers=foreign)
            assert answer.status == 403, path
            assert ask(server.openai_port, path, body, verb=verb).status in (200, 404), path


def test_from_another_address_nobody_operates_without_keys():
    host = own_address() or "127.0.0.1"
    open_to_all = {"openai_port": 0, "host": "0.0.0.0", "insecure": True}
    with fake(server=open_to_all) as server:
        for path, body in PATHS.items():
            verb = "GET" if body is None else "POST"
            with Connection(server.openai_port, host=host) as client:
                answer = client.ask(path, body, verb=verb, host=host)
            if host != "127.0.0.1":
                assert answer.status == 403, path
                assert "with one of its keys" in answer.error["message"]
        with Connection(server.openai_port, host=host) as client:
            assert client.ask("/", verb="GET", host=host).status == 200


def test_the_figures_are_json_that_a_script_can_read(server):
    json.loads(look(server, STATISTICS).body, parse_constant=lambda name: pytest.fail(name))
