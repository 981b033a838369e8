"""A process that tries constraints before the server does: run as a program, never imported.

llguidance's own limits leave some grammars that compile for minutes, take gigabytes, or overflow
the stack and with it end the process (chains of some thousand Lark rules; `allOf` of many
patterns). What a client sends must not do that to a server, and a thread cannot be stopped: so
each constraint is compiled once here, in a fork with limits on its time, memory and stack.

Lines of JSON in, lines of JSON out. The first names the tokenizer and the limits and is answered
when that is built; each other one is a grammar, answered by ``error`` ("" for none) or ``signal``
(which ended the fork), ``bytes`` (by how much memory grew) and ``token_s`` (the longest mask after
the first, in processor seconds, on a short random walk through the grammar).

Rule: imports nothing but the standard library and llguidance; starting takes 0.1 s.
"""

import json
import os
import random
import resource
import signal
import sys
import threading
import time
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

NICENESS = 5  # below the steps of the model; low enough to be answered on a busy machine
STACK_BYTES = 1 << 20  # less than any thread of the server has
WALK_TOKENS = 16


def main() -> None:
    os.nice(NICENESS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server's, when both share a terminal
    setup = json.loads(sys.stdin.readline())
    tokenizer = LLTokenizer(setup["tokenizer"], n_vocab=setup["vocab"], eos_token=setup["ends"])
    answer({"error": ""})
    for line in sys.stdin:
        answer(try_in_fork(tokenizer, json.loads(line), setup))


def answer(said: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()


def try_in_fork(tokenizer: LLTokenizer, grammar: str, setup: dict[str, Any]) -> dict[str, Any]:
    """What came of one grammar, tried in a process that may die of it."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reader)
            limit(setup)
            threading.stack_size(STACK_BYTES)
            said: list[dict[str, Any]] = []
            job = threading.Thread(target=lambda: said.append(look(tokenizer, grammar, setup)))
            job.start()
            job.join()
            with os.fdopen(writer, "w") as pipe:
                json.dump(said[0], pipe)
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        told = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return {"signal": os.WTERMSIG(status)}
    found: dict[str, Any] = json.loads(told) if told else {"signal": 0}
    return found


def limit(setup: dict[str, Any]) -> None:
    """What this process may use from now on."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    most = memory_bytes(5) + setup["memory"]  # its data segment, which the limit counts
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    signal.setitimer(signal.ITIMER_PROF, setup["seconds"])  # SIGPROF ends it


def look(tokenizer: LLTokenizer, grammar: str, setup: dict[str, Any]) -> dict[str, Any]:
    """Compile, and walk a few tokens."""
    before = memory_bytes(1)
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(**setup["limits"]))
    choose, token_s = random.Random(0), 0.0
    for step in range(WALK_TOKENS):
        if matcher.is_error() or matcher.is_stopped():
            break
        start = time.thread_time()
        mask = matcher.compute_bitmask()
        if step:
            token_s = max(token_s, time.thread_time() - start)
        places = [place for place, byte in enumerate(mask) if byte]
        if matcher.is_error() or not places:
            break
        place = choose.choice(places)
        bit = choose.choice([bit for bit in range(8) if mask[place] >> bit & 1])
        matcher.consume_token(8 * place + bit)
    grown = max(0, memory_bytes(1) - before)
    return {"error": matcher.get_error(), "bytes": grown, "token_s": token_s}


def memory_bytes(column: int) -> int:
    """A figure of /proc/self/statm: 1 what is resident, 5 data and stack."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[column]) * resource.getpagesize()


if __name__ == "__main__":
    main()
