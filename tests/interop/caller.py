"""Run a client written in another language, and return what it received.

A client is a program, `tests/interop/clients/client.*`. Its argument is the server's address. Its
standard input is a JSON list of calls, ``{method, request, deadline_s, metadata, cancel_after}``,
which it makes one after the other on one channel. Requests and messages are in proto's JSON with
the fields' own names; ``cancel_after`` is a number of messages. Its standard output has, for each
call, ``{messages, code, text, details}``: the messages, and of an error the code's number, the
text, and the google.rpc details by name.
"""

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

LIMIT_S = 50.0


@dataclass(frozen=True)
class Told:
    """What a client received for one call. Fields with default values are missing in messages."""

    messages: list[dict[str, Any]]
    code: int = 0
    text: str = ""
    details: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def kinds(self) -> list[str]:
        """Return which event each of Generate's messages is."""
        return [next(k for k in ("started", "delta", "finished") if k in m) for m in self.messages]

    @property
    def story(self) -> str:
        """Return the text of Generate's Deltas."""
        return "".join(m["delta"].get("text", "") for m in self.messages if "delta" in m)

    @property
    def num_tokens(self) -> int:
        """Return how many token ids Generate's Deltas have."""
        return sum(len(m["delta"].get("token_ids", ())) for m in self.messages if "delta" in m)

    def by_index(self) -> list[dict[str, Any]]:
        """Return Embed's or Rerank's messages in the order of their inputs."""
        found = {message.get("index", 0): message for message in self.messages}
        assert sorted(found) == list(range(len(self.messages)))
        return [found[index] for index in sorted(found)]


@dataclass(frozen=True)
class Caller:
    """A client program."""

    argv: Sequence[str | PathLike[str]]
    env: Mapping[str, str] | None = None

    def calls(self, address: str, *calls: dict[str, Any]) -> list[Told]:
        """Make the calls, in one process and on one channel."""
        done = subprocess.run(
            [*map(str, self.argv), address],
            input=json.dumps(calls),
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            env=self.env,
        )
        assert done.returncode == 0, done.stderr + done.stdout
        told = [Told(**one) for one in json.loads(done.stdout)]
        assert len(told) == len(calls)
        return told

    def call(self, address: str, method: str, request: dict[str, Any], **options: Any) -> Told:
        """Make one call."""
        [told] = self.calls(address, {"method": method, "request": request, **options})
        return told
