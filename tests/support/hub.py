"""A Hugging Face Hub on this machine: it gives the files of directories, counts their bytes, and
answers requests for ranges."""

import hashlib
import json
import threading
from collections import Counter
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

from huggingface_hub import constants

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """Has ``models``, the directory of each id, and notes in ``sent`` how many bytes of each file
    it gave."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.models: dict[str, Path] = {}
        self.sent: Counter[str] = Counter()


class Handler(BaseHTTPRequestHandler):
    """Answers as the Hub does, as far as its client looks."""

    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        """Describe a file."""
        self.do_GET()

    def do_GET(self) -> None:
        """List a model, or give a file or a part of it."""
        parts = unquote(self.path.partition("?")[0]).strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            self._list("/".join(parts[2:4]), is_tree="tree" in parts[4:5])
        elif len(parts) > 4 and parts[2] == "resolve":
            self._give("/".join(parts[:2]), "/".join(parts[4:]))
        else:
            self._answer(404)

    def log_message(self, *_: object) -> None:
        """Log nothing."""

    def _list(self, name: str, *, is_tree: bool) -> None:
        directory = self.server.models.get(name)
        if directory is None:
            self._answer(404, headers={"X-Error-Code": "RepoNotFound"})
            return
        files = sorted(path for path in directory.rglob("*") if path.is_file())
        names = [str(path.relative_to(directory)) for path in files]
        listed: object = {
            "id": name, "sha": COMMIT, "siblings": [{"rfilename": one} for one in names],
        }  # fmt: skip
        if is_tree:
            listed = [
                {"type": "file", "path": one, "size": path.stat().st_size, "oid": COMMIT}
                for one, path in zip(names, files, strict=True)
            ]
        self._answer(200, json.dumps(listed).encode(), {"Content-Type": "application/json"})

    def _give(self, model: str, name: str) -> None:
        path = self.server.models[model] / name
        if not path.is_file():
            self._answer(404, headers={"X-Error-Code": "EntryNotFound"})
            return
        data = path.read_bytes()
        headers = {
            "ETag": f'"{hashlib.sha256(data).hexdigest()}"',
            "X-Repo-Commit": COMMIT,
            "Accept-Ranges": "bytes",
        }
        span, code = self.headers.get("Range"), 200
        if span:
            first, _, last = span.removeprefix("bytes=").partition("-")
            data, code = data[int(first) : int(last or len(data)) + 1], 206
        if self.command == "GET":
            self.server.sent[name] += len(data)
        self._answer(code, data, headers)

    def _answer(self, code: int, data: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(code)
        for name, value in {**(headers or {}), "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)


@contextmanager
def hub_on_this_machine(monkeypatch, cache: Path):
    """Yield a Hub that the client uses instead of the real one, with an empty cache."""
    hub = Hub()
    thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    address = f"http://127.0.0.1:{hub.server_address[1]}"
    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    try:
        yield hub
    finally:
        hub.shutdown()
        thread.join()
        hub.server_close()
