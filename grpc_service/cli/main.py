"""The command ``triolet``: its subcommands and their arguments.

Rule 1: nothing heavy is imported before the subcommand is known. A client command imports neither
torch nor transformers, and starts in well under a second.
"""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING

from engine.errors import ConfigError
from engine.gc_tuning import collect_hardly
from grpc_service.addresses import DEFAULT_HOST, DEFAULT_PORT
from grpc_service.cli.arguments import (
    add_client,
    add_images,
    add_model,
    add_numbers,
    add_texts,
    number_of,
    time_before,
)
from grpc_service.cli.flags import configs_of
from grpc_service.cli.interrupts import ignore_hangups, raise_on_ctrl_c
from grpc_service.cli.linking import link_torch
from grpc_service.cli.serve_arguments import add_inspect_arguments, add_serve_arguments

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Run = Callable[[argparse.Namespace], int]

EXIT_CODES = """\
exit codes of client commands: 0 done, 1 the call failed, 2 the command line is wrong, 130 Ctrl-C
exit codes of serve: 0 all requests finished, 75 some were cut, 1 the server cannot start, 2 the
command line is wrong, 70 an internal error or a step that hangs, 128 + n a second signal n"""
EXIT_USAGE = 2  # argparse exits with it, too
EXIT_INTERRUPTED = 130
SHELLS = ("bash", "zsh", "fish", "tcsh")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code."""
    parser = build_parser()
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        args.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if args.run is None:
        parser.print_help(sys.stderr)
        return EXIT_USAGE
    for stream in (sys.stdout, sys.stderr):
        # If a terminal cannot show a character, a substitute is better than an error.
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")
    # By default grpc's C code writes notes such as "Got goaway" to standard error.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        run: Run = args.run
        return run(args)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except ConfigError as error:
        print(f"triolet: {error}", file=sys.stderr)
        return EXIT_USAGE
    except UnicodeError:
        if all(map(_is_unicode, argv if argv is not None else sys.argv)):
            print("triolet: standard input is not UTF-8", file=sys.stderr)
        else:
            print("triolet: an argument is not UTF-8", file=sys.stderr)
        return EXIT_USAGE


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="triolet",
        description="A language-model server and its clients.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_ShowVersion, nargs=0, help="show the version and exit")
    parser.set_defaults(run=None, parser=parser)
    commands = parser.add_subparsers(metavar="COMMAND")

    def add(name: str, text: str, run: Run | None = None) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        command.set_defaults(run=run or _lazy(name), parser=command)
        return command

    def add_query(name: str, text: str) -> argparse.ArgumentParser:
        return add(name, text, _lazy("query", name.replace("-", "_")))

    add_serve_arguments(add("serve", "start a server", _serve))
    add_inspect_arguments(add("inspect", "say what a model would take, without loading it"))
    _add_generate(add("generate", "continue a prompt, or answer one"))
    _add_batch(add("batch", "compute a file of requests as background work"))
    _add_chat(add("chat", "talk with a model, line by line"))
    _add_embed(add("embed", "turn texts into vectors, and show how similar they are"))
    _add_rerank(add("rerank", "sort documents by how well they answer a query"))
    _add_classify(add("classify", "label texts, or find entities in them"))
    _add_draw(add("draw", "draw images of a prompt"))
    _add_tokenize(add_query("tokenize", "split a text into tokens, or turn ids into text"))
    _add_models(add("models", "list the server's models, load and unload them"))
    add_client(add_query("stats", "show what the server is doing"), timeout_s=30)
    _add_operating(add_query)
    _add_doctor(add("doctor", "check whether this machine can serve models"))
    proto = add("proto", "write the .proto files of the API, to make clients from")
    proto.add_argument("directory", metavar="DIR", help="where to; made if it is missing")
    completion = add("completion", "print the completion script of a shell", _completion)
    completion.add_argument("shell", choices=SHELLS)
    completion.epilog = (
        'bash: put eval "$(triolet completion bash)" into ~/.bashrc; other shells: likewise'
    )
    return parser


class _ShowVersion(argparse.Action):
    """Prints the version. argparse's own action needs the text in advance, which takes 20 ms."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib import metadata

        try:
            version = metadata.version("triolet")
        except metadata.PackageNotFoundError:
            version = "(not installed)"
        print(f"triolet {version}")
        parser.exit()


def _add_generate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", help="the prompt; - reads it from standard input")
    parser.add_argument(
        "--file",
        metavar="FILE",
        help="instead of a prompt: a file with one in each line, whose answers come in their "
        "order (- is standard input)",
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help="the prompt is a user's message, which the model's chat template writes out",
    )
    parser.add_argument(
        "--image",
        dest="images",
        action="append",
        default=[],
        metavar="FILE",
        help="with --chat: an image (JPEG, PNG, WebP or GIF) that goes before the prompt, for a "
        "model that reads images; may be repeated",
    )
    _add_sampling(parser)
    add_numbers(
        parser,
        ("--n", "count", "N", "number of completions, 1 to 16"),
        *(
            (
                flag,
                "count",
                "N",
                f"with --json: log-probabilities of the {of}, and N alternatives of each token, "
                "0 to 20",
            )
            for flag, of in (("--logprobs", "completion"), ("--prompt-logprobs", "prompt"))
        ),
    )
    add_client(parser, timeout_s=None)


def _add_batch(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Compute a file of requests, one JSON object in each line, while the server has nothing "
        "else to do. A line is a GenerateRequest, or of OpenAI's batch form, whose requests go to "
        "the HTTP port. After a kill, the same command goes on."
    )
    parser.add_argument("file", metavar="FILE", help="the requests")
    parser.add_argument(
        "--output",
        default="",
        metavar="FILE",
        help="the results (default: FILE.results.jsonl); errors go to a file beside it",
    )
    parser.add_argument(
        "--parallel",
        type=number_of("count"),
        default=64,
        metavar="N",
        help="most requests in flight (default: 64)",
    )
    parser.add_argument(
        "--url",
        default="http://127.0.0.1:8000",
        metavar="URL",
        help="the HTTP port, for OpenAI's form (default: http://127.0.0.1:8000)",
    )
    add_model(parser)
    add_client(parser, timeout_s=None)


def _add_chat(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Talk with a model, line by line. Ctrl-C ends an answer, and Ctrl-D ends the chat. /reset "
        "forgets the conversation; /system TEXT begins a new one with this system prompt; /image "
        "FILE adds an image to the next message, for a model that reads images. When the "
        "conversation is longer than the model's context, the oldest turns after the first are "
        "left out, with a note."
    )
    parser.add_argument("--system", default="", metavar="TEXT", help="the system prompt")
    parser.add_argument(
        "--tools",
        default="",
        metavar="FILE",
        help="functions that the model may call, a JSON list as OpenAI's API has it; when it calls "
        "one, the next line is what the function returns",
    )
    parser.add_argument(
        "--tool-choice",
        default="",
        metavar="NAME",
        help="auto, none, required, or the function that the first answer to a message must call",
    )
    parser.add_argument(
        "--reasoning",
        dest="enabled",
        action=argparse.BooleanOptionalAction,
        help="whether the model reasons before it answers (default: as its template does)",
    )
    parser.add_argument(
        "--reasoning-budget",
        dest="budget_tokens",
        type=number_of("count"),
        metavar="N",
        help="most tokens of reasoning; a sentence may end up to a quarter or 64 tokens later",
    )
    add_images(parser, "images (JPEG, PNG, WebP or GIF) that go before the first message")
    _add_sampling(parser)
    add_client(parser, timeout_s=None)


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the model and of sampling, which are fields of `SamplingParams`. The server
    checks the ranges."""
    add_model(parser)
    add_numbers(
        parser,
        ("--max-tokens", "count", "N", "most tokens to generate, at least 1"),
        ("--temperature", "real", "T", "0 takes the likeliest token; to 100"),
        ("--top-p", "real", "P", "share of likeliest tokens kept, above 0, to 1"),
        ("--top-k", "count", "K", "number of likeliest tokens kept; 0 keeps all"),
        ("--min-p", "real", "P", "drops tokens below this share of the likeliest one, 0 to 1"),
        ("--typical-p", "real", "P", "share of locally typical tokens kept, 0 to 1"),
        (
            "--repetition-penalty",
            "real",
            "R",
            "above 1 makes tokens of prompt and completion less likely",
        ),
        (
            "--presence-penalty",
            "real",
            "X",
            "subtracted for tokens that the completion has, -2 to 2",
        ),
        ("--frequency-penalty", "real", "X", "the same for each time that it has them, -2 to 2"),
        ("--seed", "seed", "N", "the same seed repeats a completion"),
    )
    for flag, field, most, what in (
        ("--stop", "stop", 16, "text that ends the completion"),
        ("--bad-word", "bad_words", 64, "text that is never generated"),
    ):
        parser.add_argument(
            flag,
            dest=field,
            action="append",
            default=[],
            metavar="TEXT",
            help=f"{what}; may be repeated, {most} times at most",
        )


def _add_embed(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Turn texts and images into vectors. Shows how similar they are: the cosines of all pairs, "
        "or, of many, the nearest of each. --json prints all numbers, one line per text or image, "
        "in their order."
    )
    add_texts(parser, "texts", "TEXT", "the texts to embed")
    what = "files of images (JPEG, PNG, WebP or GIF), for a model that embeds images; texts come "
    add_images(parser, f"{what}before this flag")
    add_numbers(
        parser,
        ("--dimensions", "count", "N", "cut vectors to N numbers, for models that allow it"),
        ("--top-k", "count", "N", "only the N greatest weights of a sparse vector"),
        ("--threshold", "real", "X", "only the weights of a sparse vector above this one"),
    )
    for flag, choices, what in (
        ("--kind", ("dense", "sparse", "multi-vector"), "kind of vectors (default: dense)"),
        (
            "--precision",
            ("float32", "float16", "int8", "uint8", "binary", "ubinary"),
            "numbers of the vectors (default: float32); --json prints others in base64",
        ),
    ):
        parser.add_argument(flag, choices=choices, help=what)
    for flag, default, metavar, what in (
        (
            "--prompt-name",
            "",
            "NAME",
            "which of the model's named prompts goes before each text, such as query",
        ),
        (
            "--ranges",
            None,
            "FILE",
            'JSON of the least and the greatest number of each dimension, {"low": […], "high": '
            "[…]}, for int8 and uint8 (default: those in the model's folder)",
        ),
        (
            "--output",
            None,
            "OUT",
            "a file for the vectors of the lines of --file, any number of them: a line of JSON for "
            "each as soon as it is ready; the same command goes on after it was stopped",
        ),
    ):
        parser.add_argument(flag, default=default, metavar=metavar, help=what)
    parser.add_argument(
        "--normalize",
        action=argparse.BooleanOptionalAction,
        help="scale the vectors to length 1, also after a cut (default: as the model does)",
    )
    add_client(parser, timeout_s=None)


def _add_rerank(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Sort documents by how well they answer a query, best first. Shows each document's score "
        "and its place among the given documents."
    )
    parser.add_argument("query", help="the query")
    add_texts(parser, "documents", "DOCUMENT", "the documents to sort")
    add_numbers(parser, ("--top-n", "count", "N", "only the N best (default: all)"))
    parser.add_argument(
        "--raw-scores",
        action="store_true",
        help="show the model's own scores, without its activation (mostly a sigmoid)",
    )
    add_client(parser, timeout_s=None)


def _add_classify(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Label texts. Shows each text's best labels with their scores or, with --aggregation, the "
        "entities in it. --json prints everything, one line per text, in their order."
    )
    add_texts(parser, "texts", "TEXT", "the texts to label")
    parser.add_argument(
        "--pair", metavar="TEXT", help="read each text together with this one, as its second"
    )
    add_numbers(parser, ("--top-k", "count", "N", "only the N best labels (default: all)"))
    for flag, choices, what in (
        (
            "--activation",
            ("none", "sigmoid", "softmax"),
            "function that makes scores of logits (default: as the model's config says)",
        ),
        (
            "--aggregation",
            ("none", "simple", "first", "average", "max"),
            "find entities, by a model that labels tokens; how these become entities",
        ),
    ):
        parser.add_argument(flag, choices=choices, help=what)
    add_client(parser, timeout_s=None)


def _add_draw(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Draw images of a prompt and write them to files. A bar shows how far the denoising has "
        "come, if standard error is a terminal."
    )
    parser.add_argument("prompt", help="what the images show")
    parser.add_argument(
        "-o",
        "--output",
        required=True,
        metavar="FILE",
        help="the file to write; the end of its name decides the format; with --n, each file gets "
        "a number before that end; - is standard output",
    )
    add_model(parser)
    parser.add_argument(
        "--negative", default="", metavar="TEXT", help="what the images are to be unlike"
    )
    parser.add_argument(
        "--size", type=_size, metavar="WxH", help="width and height in pixels, multiples of 8"
    )
    add_numbers(
        parser,
        ("--n", "count", "N", "number of images, 1 to 8"),
        ("--steps", "count", "N", "number of denoising steps, 1 to 150"),
        ("--guidance", "real", "G", "how closely the images follow the prompt, 0 to 30"),
        ("--seed", "seed", "N", "the same seed repeats an image"),
        ("--strength", "real", "S", "with --image: how much of it is replaced, above 0, to 1"),
        ("--quality", "count", "N", "quality of JPEG and WebP, 1 to 100"),
    )
    parser.add_argument(
        "--image", metavar="FILE", help="an image (JPEG, PNG, WebP or GIF) to start from"
    )
    parser.add_argument(
        "--scheduler",
        default="",
        metavar="NAME",
        help="how noise is removed, such as ddim, euler or dpm++2m (default: the model's own)",
    )
    parser.add_argument(
        "--format", choices=("png", "jpeg", "webp"), help="the files' format (default: by FILE)"
    )
    add_client(parser, timeout_s=None)


def _size(text: str) -> tuple[int, int]:
    width, separator, height = text.lower().partition("x")
    try:
        if not separator:
            raise ValueError
        return int(width), int(height)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no size, such as 512x512") from None


def _add_tokenize(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("text", nargs="?", help="the text; - reads it from standard input")
    parser.add_argument(
        "--detokenize",
        nargs="+",
        type=number_of("count"),
        metavar="ID",
        help="turn these ids into text instead",
    )
    add_model(parser)
    parser.add_argument(
        "--no-special-tokens",
        action="store_true",
        help="leave out the special tokens that the model would add",
    )
    add_client(parser, timeout_s=30)


def _add_models(parser: argparse.ArgumentParser) -> None:
    add_client(parser, timeout_s=None)
    parser.set_defaults(action="list")
    actions = parser.add_subparsers(metavar="ACTION")

    def add(name: str, text: str) -> argparse.ArgumentParser:
        action = actions.add_parser(name, help=text, description=text, allow_abbrev=False)
        action.set_defaults(action=name, parser=action)
        return action

    listing = add("list", "list the server's models; the default action")
    load = add("load", "load a model, or more replicas of it")
    load.add_argument("name", metavar="NAME")
    what = "number of replicas, as many as fit in memory (default: as configured)"
    add_numbers(load, ("--replicas", "count", "N", what))
    unload = add("unload", "take a model out of memory; the next request for it loads it again")
    unload.add_argument("name", metavar="NAME")
    load_adapter = add(
        "load-adapter", "load an adapter (LoRA) as a model of its own, or replace it"
    )
    load_adapter.add_argument("name", metavar="BASE:NAME")
    load_adapter.add_argument(
        "directory", metavar="DIR", help="on the server's machine, below its --adapter-root"
    )
    load_adapter.add_argument(
        "--alias", action="append", default=[], metavar="NAME", help="a further name; repeatable"
    )
    unload_adapter = add("unload-adapter", "forget an adapter and free its memory")
    unload_adapter.add_argument("name", metavar="BASE:NAME")
    what = "how long its requests may take to finish (default: the server's --drain-timeout)"
    for action in (unload, unload_adapter):
        add_numbers(action, ("--drain", "real", "SECONDS", what))
    for action in (listing, load, unload, load_adapter, unload_adapter):
        add_client(action, timeout_s=None)
        _leave_defaults_to_parent(action)


def _leave_defaults_to_parent(parser: argparse.ArgumentParser) -> None:
    """Let flags after the action (as ``load`` in ``triolet models load``) override those before it:
    a flag that is not repeated keeps its value."""
    for action in parser._actions:
        if action.option_strings and action.default is not argparse.SUPPRESS:
            action.help = (action.help or "") % {"default": action.default}
            action.default = argparse.SUPPRESS


def _add_operating(add: Callable[[str, str], argparse.ArgumentParser]) -> None:
    pause = add("pause", "stop computing for one model or for all")
    pause.add_argument(
        "--mode",
        choices=("keep", "wait", "abort"),
        default="keep",
        help="keep: freeze running requests and queue new ones; wait: let running ones finish; "
        "abort: end all requests (default: keep)",
    )
    resume = add("resume", "compute again after a pause")
    reset = add("reset-prefix-cache", "forget cached prefixes")
    for command in (pause, resume, reset):
        add_model(command, "all")
        add_client(command, timeout_s=30)
    drain = add("drain", "close the port and wait for the running requests")
    what = "cut requests that run longer (default: the server's --drain-timeout)"
    add_numbers(drain, ("--cut-after", "real", "SECONDS", what))
    add_client(drain, timeout_s=None)
    why = add("explain", "show what a request does and waits for")
    why.add_argument("request_id", metavar="REQUEST_ID")
    add_client(why, timeout_s=30)
    usage = add("usage", "show what ended requests have used, by holder and model")
    add_model(usage, "all")
    usage.add_argument("--holder", metavar="NAME", help="only this holder's (default: all)")
    what = (
        "only what ended since the minute of a time (2026-01-31T08:00:00Z), or for this long (1h)"
    )
    usage.add_argument("--since", type=time_before, metavar="TIME", help=what)
    add_client(usage, timeout_s=30)
    abort = add("abort", "end requests by their ids")
    abort.add_argument("request_ids", nargs="+", metavar="REQUEST_ID")
    add_client(abort, timeout_s=30)


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--host", default=DEFAULT_HOST, help="address to try (default: %(default)s)"
    )
    parser.add_argument(
        "--port",
        type=number_of("count"),
        default=DEFAULT_PORT,
        help="port to try (default: %(default)s)",
    )
    parser.add_argument(
        "--tls-cert", default="", metavar="FILE", help="PEM file of certificates to look at"
    )
    parser.add_argument("--json", action="store_true", help="answer in JSON, for scripts")


# ---- the subcommands, each of which imports its own modules --------------------------------------


def _serve(args: argparse.Namespace) -> int:
    ignore_hangups()
    engine_config, server_config = configs_of(args, os.environ)
    collect_hardly()
    import trio  # noqa: F401  (first: its modules have libraries, see `grpc_service.cli.linking`)

    if any(not model.lazy and model.runner == "thread" for model in engine_config.models):
        link_torch()
    from grpc_service.app.application import serve_forever

    raise_on_ctrl_c()
    return serve_forever(engine_config, server_config)


def _lazy(module: str, function: str = "run") -> Run:
    """Return a subcommand that imports a module of `grpc_service.cli` when it is run, and calls the
    module's ``function``."""

    def run(args: argparse.Namespace) -> int:
        command: Run = getattr(import_module(f"grpc_service.cli.{module}"), function)
        raise_on_ctrl_c()
        return command(args)

    return run


def _completion(args: argparse.Namespace) -> int:
    from grpc_service.cli import completion

    raise_on_ctrl_c()
    return completion.run(build_parser(), args.shell)
