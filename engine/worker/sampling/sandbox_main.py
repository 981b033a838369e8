"""The program of a sandbox process, which compiles constraints before the server does.

llguidance's own limits admit some grammars that compile for minutes, take gigabytes, or overflow
the stack and so end the process (chains of some thousand Lark rules; `allOf` of many patterns).
A client's constraint must not do that to a server, and a thread cannot be stopped. So each
constraint is compiled once here, in a fork with limits on its time, memory and stack.

Standard input has questions and standard output answers, one line of JSON each. The first question
has the tokenizer and the limits; it is answered once the tokenizer is built. Every other question
is a grammar. Its answer has either ``signal``, the signal that killed the fork, or ``error`` (empty
if the grammar compiles), ``bytes`` (the growth of memory) and ``token_s`` (processor seconds of the
longest mask but the first, on a short random walk through the grammar).

Rule: this file is run as a program and never imported, and imports nothing but the standard library
and llguidance, so that it starts in 0.1 s.
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

NICENESS = 5  # The model's steps have a higher priority, and answers still come in time.
STACK_BYTES = 1 << 20  # Less than the stack of any of the server's threads.
WALK_TOKENS = 16  # How many tokens the random walk has.


def main() -> None:
    """Answer questions until standard input ends."""
    os.nice(NICENESS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C interrupts the server only
    setup = json.loads(sys.stdin.readline())
    tokenizer = LLTokenizer(setup["tokenizer"], n_vocab=setup["vocab"], eos_token=setup["ends"])
    answer({"error": ""})
    for line in sys.stdin:
        answer(try_in_fork(tokenizer, json.loads(line), setup))


def answer(fields: dict[str, Any]) -> None:
    """Write one line of JSON to standard output."""
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def try_in_fork(tokenizer: LLTokenizer, grammar: str, setup: dict[str, Any]) -> dict[str, Any]:
    """Compile one grammar in a forked process, which may die of it, and return the answer."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reader)
            limit(setup)
            threading.stack_size(STACK_BYTES)
            reply: list[dict[str, Any]] = []
            job = threading.Thread(target=lambda: reply.append(measure(tokenizer, grammar, setup)))
            job.start()
            job.join()
            with os.fdopen(writer, "w") as pipe:
                json.dump(reply[0], pipe)
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return {"signal": os.WTERMSIG(status)}
    return json.loads(text) if text else {"signal": 0}


def limit(setup: dict[str, Any]) -> None:
    """Limit the processor time and the memory that this process may use from now on."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    most = memory_bytes(5) + setup["memory"]  # RLIMIT_DATA counts data that is there already
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    signal.setitimer(signal.ITIMER_PROF, setup["seconds"])  # SIGPROF kills the process


def measure(tokenizer: LLTokenizer, grammar: str, setup: dict[str, Any]) -> dict[str, Any]:
    """Compile a grammar, walk a few tokens through it, and return memory and time."""
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
    """Return a column of /proc/self/statm in bytes: 1 is resident memory, 5 is data and stack."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[column]) * resource.getpagesize()


if __name__ == "__main__":
    main()
