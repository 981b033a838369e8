"""The page of the HTTP port, in Debian's Chromium: it works, and it does no harm."""

import http.server
import json
import os
import shutil
import subprocess
import threading
from pathlib import Path

import pytest

from tests.support import toolchains
from tests.support.server import fake, openai_port_of, real
from tests.support.wire import wait_idle, wait_serving
from tools.lab.demo.drawings import held_out_drawing, png_of

pytestmark = [pytest.mark.interop, pytest.mark.slow, pytest.mark.timeout(600)]

CLIENTS = Path(__file__).resolve().parent / "clients"
LIMIT_S = 280
CASES = ["conversation", "stop", "picture", "seen", "abort"]
CASES += ["key", "keyboard", "foreign", "rebound"]
SCREENSHOTS = "TRIOLET_SCREENSHOTS"  # a folder that keeps them, for people to look at
KEY = "a-key-that-is-long-enough"
ATTACK = (
    '<img src="x" onerror="globalThis.stolen = 1"><script>globalThis.stolen = 2</script>'
    '<a href="javascript:globalThis.stolen = 3">here</a>'
)
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: <think>{% endif %}"
)
DRAWING = held_out_drawing(0, 0)
MODELS = [
    {
        "name": "talker",
        "script": {
            "words": [
                "I",
                " think.",
                "</think>",
                *("Hi ", ATTACK, " and", " more", " follows", "."),
            ],
            "chat_template": TEMPLATE,
            "answer_opening": "<think>",
            "step_s": 0.03,
        },
    },
    {"name": "slow", "script": {"step_s": 0.05}},
    {"name": "seeing", "capability": "vision"},
]


class Foreign(http.server.BaseHTTPRequestHandler):
    """Serves an empty page of another origin."""

    def do_GET(self):
        body = b"<!doctype html><title>Elsewhere</title><body></body>"
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        """Write nothing."""


@pytest.fixture(scope="module")
def elsewhere():
    """Return the address of a page of another origin."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Foreign) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def drive(elsewhere, tmp_path_factory):
    """Return a function that runs cases in the browser, and returns what each found by its name."""
    toolchains.need_npm()
    toolchains.need_programs("chromium", leave_out=toolchains.LEAVE_OUT)
    folder = tmp_path_factory.mktemp("page")
    picture = folder / "picture.png"
    picture.write_bytes(png_of(DRAWING))
    keys = folder / "keys"
    keys.write_text(f"ours {KEY}\n")
    keyed_settings = {"openai_port": 0, "api_key_file": str(keys)}
    keyed_models = [{"name": "keyed", "script": {"words": ["Yes", "."]}}]
    with (
        fake(models=MODELS, server={"openai_port": 0}) as server,
        fake(models=keyed_models, server=keyed_settings) as keyed,
        real("--openai-port", 0, model="demo-see") as seeing,
    ):
        wait_serving(server.channel)
        given = {
            "url": f"http://127.0.0.1:{server.openai_port}",
            "keyed_url": f"http://127.0.0.1:{keyed.openai_port}",
            "seeing_url": f"http://127.0.0.1:{openai_port_of(seeing)}",
            "foreign_url": elsewhere,
            "key": KEY,
            "picture": str(picture),
            "screenshots": os.environ.get(SCREENSHOTS, str(folder)),
            "chromium": shutil.which("chromium"),
        }

        def run(*cases):
            made = subprocess.run(
                [shutil.which("node"), CLIENTS / "page_cases.mjs"],
                input=json.dumps(given | {"cases": cases}),
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
                env={"PATH": os.environ["PATH"], "HOME": str(folder)},
            )
            assert made.returncode == 0, made.stderr[-3000:]
            wait_idle(server.channel)
            return json.loads(made.stdout)

        yield run
        assert KEY not in keyed.log


@pytest.fixture(scope="module")
def found(drive):
    """Return what all cases but that of the faults found."""
    return drive(*CASES)


def test_a_conversation_has_its_turns_its_reasoning_and_its_figures(found):
    case = found["conversation"]
    assert case["text"].startswith("Hi ")
    assert case["reasoning"] == "I think."
    assert case["folded"]
    assert "first token after" in case["figures"]
    assert "tokens/s" in case["figures"]
    assert "ended at the limit" in case["limited"]
    assert case["roles"] == ["system", "user", "assistant", "user"]
    assert case["max_tokens"] == 3
    assert case["turns"] == 4  # the answer that was made again replaced the one before
    assert case["troubles"] == []
    assert case["hosts"] == []


def test_what_a_model_writes_is_text(found):
    assert ATTACK in found["conversation"]["text"]
    assert found["conversation"]["elements"] == 0
    assert found["conversation"]["injected"] is None
    assert found["conversation"]["written"] == "TypeError"  # HTML from a string (trusted types)


def test_an_answer_stops_by_key_and_by_button(found):
    case = found["stop"]
    assert "stopped" in case["figures"]
    assert case["canSend"]
    assert case["troubles"] == []


def test_a_picture_goes_to_a_model_that_reads_pictures(found):
    case = found["picture"]
    assert not case["blind"]
    assert case["types"] == ["image_url", "text"]
    assert case["url"] == "data:image/png;base64,"
    assert case["shown"] > 0
    assert (case["failed"], case["troubles"]) == (0, [])
    assert "tokens" in case["figures"]


@pytest.mark.model
def test_a_model_describes_the_picture_that_it_was_shown(found):
    case = found["seen"]
    assert all(thing.name in case["text"] for thing in DRAWING.scene.things), case["text"]
    assert case["troubles"] == []


def test_a_request_is_seen_explained_and_aborted(found):
    case = found["abort"]
    assert case["model"] == "slow"
    assert case["phase"] == "decode"
    assert "RUNNING" in case["explained"]
    assert case["kept"] == f"Abort {case['id']}"
    assert case["notice"] == f"{case['id']} was aborted."
    assert "abort" in case["failed"]
    assert max(case["lines"]) >= 3
    assert [row.split("\t")[:2] for row in case["models"]] == [
        [model["name"], "ready"] for model in MODELS
    ]
    assert case["troubles"] == []


def test_a_key_is_asked_for_and_stays_in_its_tab(found):
    case = found["key"]
    assert "key" in case["wrong"]
    assert case["figures"] == 0
    assert case["failed"] == 0
    assert case["kept"]["session"] == [KEY]
    assert (case["kept"]["local"], case["kept"]["cookie"]) == (0, "")
    assert KEY not in case["kept"]["url"]
    assert case["forgotten"] == 0
    assert case["troubles"] == []


def test_the_keyboard_reaches_everything_and_shows_where_it_is(found):
    names = found["keyboard"]
    for name in ("skip", "to-chat", "to-server", "key-button", "model", "clear", "SUMMARY"):
        assert name in names, names
    assert {"message", "send"} <= set(names)
    assert not [name for name in names if "no outline" in name]


def test_a_page_of_another_origin_gets_nothing(found):
    case = found["foreign"]
    assert set(case["asked"].values()) == {"stopped"}
    assert case["framed"] == "other"
    assert all(url.startswith("chrome-error:") for url in case["frames"])


def test_a_name_that_leads_here_gets_nothing(found):
    assert found["rebound"] == [403, 403]


def test_axe_finds_no_serious_fault_and_nothing_is_too_wide(drive):
    assert drive("faults") == {"faults": []}
