"""Embed a million short texts by one call, kill the client in the middle, and let it go on.

    python -m tools.lab.embed_million [--texts N] [--model MODEL]

A server and `triolet embed --file --output` run as processes of their own. Printed are the results
so far, the rate, and the memory of both at every tenth; then whether each index has one line. The
exit code is 1 if an index is missing or there twice, or if memory has grown from the second tenth
of a run to its end by more than `GROWTH_MB_MAX`.
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

GROWTH_MB_MAX = 48  # the allocator's noise, and the indices of a million results; measured 20
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
    client: subprocess.Popen, server: subprocess.Popen, out: Path, total: int, stop: int
) -> list[tuple[float, float]]:
    """Print a line at every tenth until the client ends or has ``stop`` results. Return the
    memory of server and client from the second line on."""
    seen, at, end = [], 0, 0
    started_at, first, begun_at = time.monotonic(), None, 0
    next_line = 0
    while client.poll() is None:
        time.sleep(LOOK_S)
        if not out.exists():
            continue
        with out.open("rb") as file:
            file.seek(end)
            new = file.read()
        at, end = at + new.count(b"\n"), end + len(new)
        if first is None:
            first, begun_at, next_line = at, time.monotonic(), at
        if at >= next_line:
            next_line += total // 10
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
            seen.append(memory)
        if at >= stop:
            break
    return seen[1:]


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
            for stop in (args.texts // 2, args.texts * 2):
                client = subprocess.Popen(command)
                try:
                    seen = watch(client, server, out, args.texts, stop)
                    if stop < args.texts:
                        client.send_signal(signal.SIGKILL)
                        print("the client is killed", flush=True)
                    code = client.wait()
                finally:
                    client.kill()
                for name, of_one in zip(
                    ("server", "client"), zip(*seen, strict=True), strict=False
                ):
                    growth = max(of_one) - of_one[0]
                    print(f"{name}: at most {max(of_one):.1f} MB, {growth:+.1f} MB")
                    if growth > GROWTH_MB_MAX:
                        failures.append(f"{name} grew by {growth:.1f} MB")
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
