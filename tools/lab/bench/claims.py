"""The tables of README.md and docs/performance.md: one for each claim, made from the figures.

Rule 1: a number of these tables is a row of a file in `tools/lab/figures`, which the command in
front of the table wrote. Rule 2: what a claim shows, and of which file, is said here and nowhere
else. A file that was measured again changes the tables by `python -m tools.lab.bench.tables
--write`; a file under another name needs a line in `FILES`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class File:
    """What a file of figures does not say itself: the machine's kind, as the person who measured
    noted it, and the `BENCH_ONLY` pattern that selected its rows."""

    machine: str = ""
    only: str = ""


FILES = {
    "step-zen4": File("Zen 4", "^(s135|q05) (decode B=.* at 128|prefill)"),
    "step-memory-zen3": File("Zen 3", "^s135 decode B=8 at 128"),
    "quantized-weights-peers-zen4": File("Zen 4"),
    "gguf-zen4": File("Zen 4", "^(q05|q17) .* (decode|prefill)"),
    "serve-zen4": File("Zen 4", "^(8|32) clients"),
    "serve-openai-zen4": File("Zen 4"),
    "embed": File("Zen 3"),
    "front-openai-zen4": File("Zen 4"),
    "front-zen4": File("Zen 4"),
    "front-real": File("Zen 4"),
    "startup": File("Zen 4"),
    "quantized-weights-zen4": File("Zen 4"),
    "workers": File("Zen 3"),
}


@dataclass(frozen=True)
class Line:
    """A line of a table. ``rows`` has for each column the name of the row of ``file`` that it
    shows, or None. ``spread``: the columns that show the row's spread, too, the last one by
    default. ``is_new``: the line is left out as long as the file has none of its rows."""

    label: str
    unit: str
    rows: tuple[str | None, ...]
    file: str
    spread: tuple[int, ...] = (-1,)
    is_new: bool = False


@dataclass(frozen=True)
class Claim:
    """A table, and the page that shows it."""

    name: str
    page: str
    columns: tuple[str, ...]
    lines: tuple[Line, ...]
    brief: str = ""  # what is measured; if set, the page has benches' names and no commands

    @property
    def files(self) -> list[str]:
        """Return the names of the files that the table shows."""
        return list(dict.fromkeys(line.file for line in self.lines))


PAGE = "docs/performance.md"
CASES = {
    "decode B=1 at 128": "decode, 1 sequence",
    "decode B=8 at 128": "decode, 8 sequences",
    "decode B=32 at 128": "decode, 32 sequences",
    "prefill 1 × 1024": "prompt of 1,024",
}
ENGINES = ("triolet", "llama.cpp", "vllm", "transformers", "against the best")


def _decode() -> tuple[Line, ...]:
    return tuple(
        Line(
            f"{model}, {label}",
            "tokens/s",
            tuple(f"{model} {case}: {engine}" for engine in ENGINES),
            "step-zen4",
        )
        for model in ("s135", "q05")
        for case, label in CASES.items()
    )


def _gguf_lines() -> tuple[Line, ...]:
    lines = []
    for model, many in (("q05", 128), ("q17", 32), ("q4b", 32)):
        for mix in ("Q4_K_M", "Q5_K_M", "Q6_K", "IQ4_XS", "Q8_0", "Q4_0"):
            one, several, prompt = (
                f"{model} {mix} {case}"
                for case in ("decode B=1 at 128", f"decode B=8 at {many}", "prefill 1 × 1024")
            )
            both = mix in ("Q8_0", "Q4_0")
            rows = (
                *(f"{one}: triolet", f"{one}, against llama.cpp"),
                f"{one}, against ik_llama.cpp",
                f"{one}, against openvino" if both else None,
                *(f"{several}: triolet", f"{several}, against llama.cpp"),
                *(f"{prompt}: triolet", f"{prompt}, against llama.cpp"),
                f"{prompt}, against ik_llama.cpp",
                f"{prompt}, against openvino" if both else None,
            )
            lines.append(Line(f"{model} {mix}", "", rows, "gguf-zen4", (), is_new=True))
    return tuple(lines)


def _servers() -> tuple[Line, ...]:
    compared = ("output", "first token p50", "between tokens p99")
    start = ("start to ready: triolet", "start to ready: vllm", None)
    lines = [Line("start to ready", "s", start, "serve-zen4")]
    for clients in ("8 clients", "32 clients"):
        for what in (*("output", "first token p50", "first token p99", "between tokens p99"),):
            head = f"{clients}, {what}"
            against = f"{head} against vllm" if what in compared else None
            rows = (f"{head}: triolet", f"{head}: vllm", against)
            lines.append(Line(head, "tokens/s" if what == "output" else "ms", rows, "serve-zen4"))
    memory = ("memory: triolet", "memory: vllm", None)
    lines.append(Line("memory", "MB", memory, "serve-zen4", is_new=True))
    return tuple(lines)


def _http_servers() -> tuple[Line, ...]:
    peer, lines = "llama-server", []
    for clients in ("1 client", "8 clients", "32 clients"):
        for what, unit in (("output", "tokens/s"), ("first token p50", "ms")):
            head = f"{clients}, {what}"
            rows = (f"{head}: triolet", f"{head}: {peer}", f"{head} against {peer}")
            lines.append(Line(head, unit, rows, "serve-openai-zen4"))
    return tuple(lines)


def _http() -> tuple[Line, ...]:
    file, added = "front-openai-zen4", "first token p50, a kept connection, added"
    return (
        *(
            Line(
                f"a token, {case}",
                "µs",
                (
                    f"CPU per token, {case}",
                    f"bare ASGI handler, {case}",
                    f"against bare, {case}",
                    f"against gRPC, {case}",
                ),
                file,
                (2,),
            )
            for case in ("1 stream", "16 streams", "128 streams")
        ),
        Line("first token, added", "ms", (added, None, None, None), file, (0,)),
    )


def _grpc() -> tuple[Line, ...]:
    cases = [f"{count} stream{'s' * (count > 1)}" for count in (1, 16, 128, 512)]
    return tuple(
        Line(
            f"a message, {case}",
            "µs",
            (f"CPU per message, {case}", f"plain grpc.aio, {case}", f"against plain, {case}"),
            "front-zen4",
        )
        for case in (*cases, f"{cases[-1]}, TLS")
    )


def _devices() -> tuple[Line, ...]:
    return tuple(
        Line(
            f"{count} simulated devices",
            "",
            (
                f"{count} devices against one",
                f"{count} devices behind one lock",
                f"{count} devices: p99 against a request alone",
            ),
            "workers",
            (),
        )
        for count in (2, 4, 8)
    )


def _one(file: str, *rows: tuple[str, str, str]) -> tuple[Line, ...]:
    """Return the lines of a table of one column, each made of (label, unit, row's name)."""
    return tuple(Line(label, unit, (row,), file) for label, unit, row in rows)


def _readme() -> tuple[Line, ...]:
    """Return what the front page shows of the other tables: s135 beside llama.cpp and vLLM."""
    plain = {
        "decode B=1 at 128": "1 stream",
        "decode B=8 at 128": "8 streams",
        "decode B=32 at 128": "32 streams",
        "prefill 1 × 1024": "prompt of 1,024",
    }
    peers = ("llama.cpp", "vllm")
    small = [
        ("8 bits (int8, Q8_0, W8A8)", "int8", "Q8_0", "vLLM's W8A8"),
        ("4 bits (int4, Q4_0)", "int4", "Q4_0", None),
    ]
    return (
        *(
            Line(
                f"{label}, bfloat16",
                "tokens/s",
                tuple(f"s135 {case}: {engine}" for engine in ("triolet", *peers)),
                "step-zen4",
                (),
            )
            for case, label in plain.items()
        ),
        *(
            Line(
                f"1 stream, {bits}",
                "tokens/s",
                tuple(way and f"s135 decode B=1 at 128: {way}" for way in ways),
                "quantized-weights-peers-zen4",
                (),
            )
            for bits, *ways in small
        ),
        *(
            Line(
                label,
                unit,
                (f"{row}: triolet", None, f"{row}: vllm"),
                "serve-zen4",
                (),
            )
            for label, unit, row in (
                ("8 clients, first token p50", "ms", "8 clients, first token p50"),
                ("8 clients, first token p99", "ms", "8 clients, first token p99"),
                ("server, start to ready", "s", "start to ready"),
            )
        ),
        Line(
            "memory, 8 streams, bfloat16",
            "MB",
            tuple(f"s135 memory: {engine}" for engine in ("triolet", *peers)),
            "step-memory-zen3",
            (),
        ),
    )


CLAIMS = (
    Claim(
        "readme",
        "README.md",
        ("Triolet", "llama.cpp", "vLLM"),
        _readme(),
        "Medians with a Llama of 135 million random weights; engines alone, except by `serve`.",
    ),
    Claim(
        "decode", PAGE, ("Triolet", "llama.cpp", "vLLM", "transformers", "× the best"), _decode()
    ),
    Claim(
        "gguf",
        PAGE,
        (
            *("1 sequence", "× llama.cpp", "× ik", "× OpenVINO"),
            *("8 sequences", "× llama.cpp"),
            *("prompt", "× llama.cpp", "× ik", "× OpenVINO"),
        ),
        _gguf_lines(),
    ),
    Claim("servers", PAGE, ("Triolet", "vLLM", "× vLLM"), _servers()),
    Claim("http-servers", PAGE, ("Triolet", "llama-server", "× llama-server"), _http_servers()),
    Claim(
        "embeddings",
        PAGE,
        ("measured",),
        _one(
            "embed",
            ("256 requests through gRPC", "s", "256 requests through gRPC"),
            ("the library, all in one call", "s", "encode, all in one call, 1 thread"),
            ("throughput, × one call", "", "throughput against one call"),
        ),
    ),
    Claim("grpc", PAGE, ("Triolet", "plain grpc.aio", "× plain"), _grpc()),
    Claim("http", PAGE, ("Triolet", "bare handler", "× bare", "× gRPC"), _http()),
    Claim(
        "grpc-of-a-model",
        PAGE,
        ("through gRPC", "in process", "× in process"),
        (
            Line(
                "s135, 256 streams",
                "tokens/s",
                (
                    "s135, 256 gRPC streams",
                    "s135, 256 readers in process",
                    "through gRPC against in process",
                ),
                "front-real",
            ),
        ),
    ),
    Claim(
        "memory",
        PAGE,
        ("measured",),
        (
            *_one(
                "startup",
                ("start to ready, the story model", "s", "second start, the story model"),
                ("importing the libraries alone", "s", "floor: the libraries that this imports"),
                ("start to ready, s135", "s", "second start, s135"),
                ("memory when ready, the story model", "MiB", "memory when ready, the story model"),
            ),
            *_one(
                "quantized-weights-zen4",
                *(
                    (f"weights of {model}, {label}", "MB", f"{model} memory of the weights: {way}")
                    for model in ("s135", "q05")
                    for label, way in (
                        ("bfloat16", "bfloat16"),
                        ("8 bits", "bfloat16 int8"),
                        ("4 bits", "bfloat16 int4"),
                    )
                ),
            ),
        ),
    ),
    Claim("devices", PAGE, ("× one device", "× behind one lock", "p99, × alone"), _devices()),
    Claim(
        "replicas",
        PAGE,
        ("one replica", "two", "× one"),
        tuple(
            Line(
                f"s135, a {kind} each",
                "tokens/s",
                (
                    f"s135 ({kind}): one replica of a thread",
                    f"s135 ({kind}): two replicas of a thread",
                    f"s135 ({kind}): two against one",
                ),
                "workers",
            )
            for kind in ("thread", "process")
        ),
    ),
)
