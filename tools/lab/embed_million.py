"""Embed a million short texts by one call, kill the client on the way, and let it go on.

    python -m tools.lab.embed_million [--texts N] [--model MODEL]

A server and `triolet embed --file --output` run as processes of their own. Printed are the results
so far, the rate, and the memory of both at every 100,000; then whether each index has one line, and
what the memory grows by for 100,000 texts over the last half of all. The exit code is 1 if an index
is missing or there twice, or if that is more than `GROWTH_MB_MAX`.

The server's growth is holes between the blocks of glibc's malloc, and levels off: by 100,000 texts
of 4 million it was 2.7 MB in the first million, then 1.1, 0.5 and 0.25 MB, while the bytes in use
(mallinfo2) and Python's blocks stayed the same. malloc_trim took 24 MB back.
"""

import argparse
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

EVERY = 100_000  # texts from line to line
GROWTH_MB_MAX = 4.0  # for `EVERY` texts: the holes of malloc in the first million
WORDS = ("the", "dog", "sleeps", "by", "fire", "ship", "left", "at", "dawn", "red", "sea", "old")
WORDS_MAX = 6  # at most eight tokens with those of beginning and end
INDEX = re.compile(rb'\{"index": (\d+)')
LOOK_S = 0.5


def memory_mb(pid: int) -> float:
    """Return the resident memory of a process in MB."""
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) / 1024 if found else 0.0


def write_texts(path: Path, count: int) -> None:
    """Write texts of one to six words, one for each line."""
    rng = random.Random(7)
    with path.open("w") as file:
        for _ in range(count):
            file.write(" ".join(rng.choices(WORDS, k=rng.randint(1, WORDS_MAX))) + "\n")


def watch(
    client: subprocess.Popen, server: subprocess.Popen, out: Path, stop: int
) -> list[tuple[int, float, float]]:
    """Print a line at every `EVERY` results until the client ends or has ``stop`` of them. Return
    the results, and the memory of server and client, at each line."""
    seen, at, end = [], 0, 0
    started_at, first, begun_at = time.monotonic(), None, 0.0
    next_line = 0
    while client.poll() is None:
        time.sleep(LOOK_S)
        if not out.exists():
            continue
        with out.open("rb") as file:
            file.seek(end)
            while part := file.read(2**20):
                at, end = at + part.count(b"\n"), end + len(part)
        if first is None:
            first, begun_at, next_line = at, time.monotonic(), at
        if at >= next_line:
            next_line += EVERY
            try:
                memory = memory_mb(server.pid), memory_mb(client.pid)
            except OSError:
                break
            rate = (at - first) / max(time.monotonic() - begun_at, 1e-9)
            print(
                f"{time.monotonic() - started_at:7.1f} s  {at:9,} results  {rate:8,.0f} texts/s  "
                f"server {memory[0]:6.1f} MB  client {memory[1]:6.1f} MB",
                flush=True,
            )
            seen.append((at, *memory))
        if at >= stop:
            break
    return seen


def settled_growth(seen: list[tuple[int, float, float]], place: int) -> float:
    """Return the MB by which the memory at a place of ``seen`` grows for `EVERY` texts, over the
    last half of all."""
    last = seen[-1]
    half = min(seen, key=lambda one: abs(one[0] - last[0] / 2))
    return (last[place] - half[place]) * EVERY / max(last[0] - half[0], 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=1_000_000)
    parser.add_argument("--model", default="demo-embed")
    args = parser.parse_args()
    triolet = [sys.executable, "-m", "grpc_service"]
    failures = []
    with tempfile.TemporaryDirectory() as folder:
        texts, out = Path(folder, "texts"), Path(folder, "out.jsonl")
        address = f"unix:{folder}/socket"
        write_texts(texts, args.texts)
        server = subprocess.Popen(
            [*triolet, "serve", "--model", args.model, "--uds", f"{folder}/socket"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        command = [*triolet, "embed", "--file", str(texts), "--output", str(out)]
        command += ["--server", address, "--precision", "ubinary"]
        try:
            models = [*triolet, "models", "--server", address]
            while b"READY" not in subprocess.run(models, capture_output=True, check=False).stdout:
                time.sleep(1)
            for stop in (args.texts // 3, args.texts * 2):
                client = subprocess.Popen(command)
                try:
                    seen = watch(client, server, out, stop)
                    if stop < args.texts:
                        client.send_signal(signal.SIGKILL)
                        print("the client is killed", flush=True)
                    code = client.wait()
                finally:
                    client.kill()
            for place, name in enumerate(("server", "client"), 1):
                growth = settled_growth(seen, place)
                most = max(one[place] for one in seen)
                print(f"{name}: at most {most:.1f} MB; {growth:+.2f} MB for {EVERY:,} texts")
                if growth > GROWTH_MB_MAX:
                    failures.append(f"the {name} grows by {growth:.2f} MB")
            if code:
                failures.append(f"exit code {code}")
            counts = bytearray(args.texts)
            with out.open("rb") as lines:
                for line in lines:
                    counts[int(INDEX.match(line)[1])] += 1
            missing, twice = counts.count(0), sum(one > 1 for one in counts)
            print(f"{args.texts:,} indices: {missing} missing, {twice} more than once")
            if missing or twice:
                failures.append("indices")
        finally:
            server.terminate()
            server.wait()
    print("failed: " + "; ".join(failures) if failures else "all is in order")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
