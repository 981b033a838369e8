"""The command line: every flag, every key of the file, and the messages for wrong ones."""

import argparse
import dataclasses
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from engine.config import DEMO_MODELS, EngineConfig, ModelConfig, WorkerConfig
from engine.errors import ConfigError
from grpc_service.app.server_config import ServerConfig
from grpc_service.cli import client, flags
from grpc_service.cli.main import build_parser, main
from grpc_service.cli.models import print_models
from grpc_service.cli.values import BYTES, COUNT, SECONDS, SWITCH, TEXT
from grpc_service.client import messages

CHOICES = re.compile(r"\{(.*)\}")
PROTO = Path(__file__).resolve().parents[2] / "proto"

# Values that differ from the default, for flags that refuse what `other_value` gives their kind.
OTHER = {
    "host": "::1",
    "metrics_host": "::1",
    "max_held_bytes": "32MiB",
    "max_num_batched_tokens": "512",
    "speculation": "off",
    "vllm_engine_port": "demo-stories=7001",
    "openai_origin": "https://chat.example",
}


def other_value(flag):
    """Return an accepted value that differs from the default, as argument and as TOML."""
    if flag.kind is SWITCH:
        return None, "true"
    if flag.kind in (COUNT, SECONDS):
        return (OTHER.get(flag.key, "7"),) * 2
    [*_, choice] = CHOICES.sub(r"\1", flag.kind.metavar).split(",")
    value = OTHER.get(flag.key, "3MiB" if flag.kind is BYTES else choice)
    return value, f'["{value}"]' if flag.kind.is_repeated else f'"{value}"'


def configs(*argv, environ=None):
    """Return the configurations of a command line."""
    args = build_parser().parse_args(["serve", *argv])
    return flags.configs_of(args, environ or {})


def from_file(tmp_path, text, *argv):
    """Return the configurations of a file's text."""
    path = tmp_path / "triolet.toml"
    path.write_text(text)
    return configs("--config", str(path), *argv)


def refused(tmp_path, text, *argv):
    """Return the message with which a file's text is refused."""
    with pytest.raises(ConfigError) as caught:
        from_file(tmp_path, text, *argv)
    return str(caught.value).removeprefix(f"{tmp_path / 'triolet.toml'}: ")


# ---- serve -----------------------------------------------------------------------------------


def test_without_arguments_everything_is_the_configs_own_default():
    assert configs() == (EngineConfig(), ServerConfig())


def test_a_streams_buffer_is_bounded_and_holds_at_least_one_message():
    config = EngineConfig()
    assert (config.in_process_buffer, config.stream_buffer) == (4096, 256)
    with pytest.raises(SystemExit):
        configs("--stream-buffer", "inf")


def test_every_field_of_the_configs_has_a_flag():
    """The fields without a flag that are listed here are set in another way, or cannot be set."""
    without = {
        EngineConfig: {"models", "in_process_buffer", "aging_s", "telemetry", "check_level"},
        ServerConfig: set(),
        ModelConfig: {"model", "name", "aliases", "capability", "workers", "adapters"},
    }
    for target, others in without.items():
        fields = {field.name for field in dataclasses.fields(target)}
        assert fields - others == {f.field for f in flags.FLAGS if f.target is target}


# The flags that each of these flags requires.
BESIDE = {
    "tls_cert": ("tls_key",),
    "tls_key": ("tls_cert",),
    "client_ca": ("tls_cert", "tls_key"),
    "key_max_requests": ("api_key_file",),
    "key_max_queued_tokens": ("api_key_file",),
}


@pytest.mark.parametrize("flag", flags.FLAGS, ids=lambda flag: flag.name)
def test_every_flag_sets_its_field_alike_as_argument_and_in_the_file(flag, tmp_path):
    argument, toml = other_value(flag)
    given = [f"--{flag.name}"] if argument is None else [f"--{flag.name}", argument]
    others = BESIDE.get(flag.key, ())
    for other in others:
        given += [f"--{other.replace('_', '-')}", "/file"]
    lines = [f"{flag.key} = {toml}", *(f'{other} = "/file"' for other in others)]
    by_argument, by_file = configs(*given), from_file(tmp_path, "\n".join(lines))
    assert by_argument == by_file
    engine, server = by_argument
    target = {EngineConfig: engine, ServerConfig: server, ModelConfig: engine.models[0]}
    default = {f.name: f.default for f in dataclasses.fields(flag.target)}[flag.field]
    assert getattr(target[flag.target], flag.field) != default


def test_the_help_of_serve_has_every_flag_in_one_section(capsys):
    sections = Counter(flag.section for flag in flags.FLAGS)
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    told = capsys.readouterr().out
    heads = [line[:-1] for line in told.splitlines() if re.fullmatch(r"\w[\w, ]*:", line)]
    assert heads == ["options", *sections]
    assert max(sections.values()) <= 12
    for flag in flags.FLAGS:
        assert re.search(rf"^  --{flag.name}( |$)", told, re.MULTILINE)
    assert len(told.partition("\n\n")[0].splitlines()) == 1, "the usage is one line"


def test_an_argument_wins_over_the_file(tmp_path):
    engine, _ = from_file(tmp_path, "seed = 1\nmax_num_seqs = 8", "--seed", "2")
    assert (engine.seed, engine.max_num_seqs) == (2, 8)


def test_models_and_names_pair_in_order():
    engine, _ = configs(
        *("--model", "org/a", "--model", "b", "--served-model-name", "x", "--dtype", "float32")
    )
    assert engine.models == (
        ModelConfig("org/a", name="x", dtype="float32"),
        ModelConfig("b", name="b", dtype="float32"),
    )
    first, *others = configs("--served-model-name", "x")[0].models
    assert first == ModelConfig(DEMO_MODELS[0], name="x")
    assert others == [ModelConfig(name) for name in DEMO_MODELS[1:]]


def test_more_names_than_models_are_refused():
    with pytest.raises(ConfigError, match="given 2 times for 1 model"):
        configs("--model", "a", "--served-model-name", "x", "--served-model-name", "y")


def test_the_example_file_of_the_design(tmp_path):
    engine, server = from_file(
        tmp_path,
        """
        host = "127.0.0.1"
        [[models]]
        model = "demo-stories"
        name = "stories"
        lazy = false
        [[models.workers]]
        device = "cpu"
        count = 1
        threads = 2
        runner = "thread"
        """,
    )
    worker = WorkerConfig("cpu", threads=2, runner="thread")
    assert engine.models == (ModelConfig("demo-stories", name="stories", workers=(worker,)),)
    replica = ModelConfig("demo-stories", name="stories", device="cpu", threads=2)
    assert engine.models[0].replica(0) == replica
    assert server == ServerConfig()


def test_threads_may_stand_at_every_level_of_the_file_and_the_nearest_counts(tmp_path):
    text = """
    threads = 3
    [[models]]
    model = "a"
    [[models]]
    model = "b"
    threads = 2
    [[models.workers]]
    [[models.workers]]
    threads = 1
    """
    common, own = from_file(tmp_path, text)[0].models
    assert [one.threads for one in (common.replica(0), own.replica(0), own.replica(1))] == [3, 2, 1]
    assert from_file(tmp_path, text, "--threads", "5")[0].models[0].threads == 5


def test_models_of_the_file_take_common_settings_unless_they_have_their_own(tmp_path):
    text = """
    dtype = "bfloat16"
    [[models]]
    model = "a"
    aliases = ["x", "y"]
    lazy = true
    [[models]]
    model = "b"
    dtype = "float32"
    """
    assert from_file(tmp_path, text)[0].models == (
        ModelConfig("a", aliases=("x", "y"), lazy=True, dtype="bfloat16"),
        ModelConfig("b", dtype="float32"),
    )
    assert from_file(tmp_path, text, "--model", "c")[0].models == (
        ModelConfig("c", dtype="bfloat16"),
    )


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("max_num_seq = 1", "max_num_seq is not a setting; did you mean max_num_seqs?"),
        ("max-num-seqs = 1", "max-num-seqs is not a setting; did you mean max_num_seqs?"),
        ("idle_tt = 1", "idle_tt is not a setting; did you mean idle_ttl?"),
        ('model = "a"', "model is not a setting; write a [[models]] table with model and name"),
        ("seed = true", "seed is True, but must be a whole number"),
        ("seed = 1.5", "seed is 1.5, but must be a whole number"),
        ("stall_timeout = nan", "stall_timeout is nan, but must be a number of seconds"),
        (
            'kv_cache_memory = "4 parsecs"',
            "kv_cache_memory is '4 parsecs', but must be a number of",
        ),
        ("insecure = 1", "insecure is 1, but must be true or false"),
        ("models = 1", "models must be written as [[models]] tables"),
        ("[[models]]\nname = 'a'", "models[0].model is missing"),
        ("[[models]]\nmodel = ''", "models[0].model is '', but must be a text"),
        (
            "[[models]]\nmodel = 'a'\nlasy = true",
            "models[0].lasy is not a setting; did you mean lazy?",
        ),
        (
            "[[models]]\nmodel = 'a'\ncapability = 'sight'",
            "--capability is 'sight'; use text-to-text, text-embedding, rerank, image-embedding, "
            "vision, text-to-image, sparse-embedding, multi-vector-embedding, "
            "text-classification or token-classification",
        ),
        ("count = 2", "count is not a setting; it belongs to [[models.workers]]"),
        (
            "[[models]]\nmodel = 'a'\n[[models.adapters]]\nthreads = 2",
            "models[0].adapters[0].threads is not a setting; it belongs to [[models]] or "
            "[[models.workers]]",
        ),
        ("threads = -1", "--threads is -1, but must be at least 0"),
        (
            "[[models]]\nmodel = 'a'\nthreads = 1025",
            "--threads is 1025, but may be at most 1024",
        ),
        (
            "[[models]]\nmodel = 'a'\n[[models.workers]]\nthreads = 1025",
            "models[0].workers[0]: --threads is 1025, but may be at most 1024",
        ),
        ("[[models]]\nmodel = 'a'\naliases = 'b'", "models[0].aliases must be a list of names"),
        (
            "[[models]]\nmodel = 'a'\n[[models.workers]]\ncount = 0",
            "models[0].workers[0]: --count is 0, but must be at least 1",
        ),
        (
            "[[models]]\nmodel = 'a'\n[[models.workers]]\nrunner = 'fork'",
            "models[0].workers[0]: --runner is 'fork'; use thread or process",
        ),
        (
            "[[models]]\nmodel = 'a'\nworkers = 2",
            "models[0].workers must be written as [[models.workers]] tables",
        ),
        (
            "[[models]]\nmodel = 'a'\n[[models]]\nmodel = 'org/a'",
            "models[1].name: 'a' is taken by models[0].name; give one of them another name",
        ),
        (
            "[[models]]\nmodel = 'a'\nname = 'x'\n[[models]]\nmodel = 'b'\naliases = ['y', 'x']",
            "models[1].aliases: 'x' is taken by models[0].name",
        ),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path, text, sentence):
    assert refused(tmp_path, text).startswith(sentence)


def test_models_of_the_command_line_with_one_name_are_told_of_its_flag(tmp_path):
    for argv in (["--model", "a", "--model", "b/a"], ["--model", "a", "--model", "a"]):
        with pytest.raises(ConfigError, match="served as 'a'; rename one with --served-model-name"):
            configs(*argv)
    two = "[[models]]\nmodel = 'a'\n[[models]]\nmodel = 'b'"
    assert "--served-model-name" in refused(
        tmp_path, two, "--served-model-name", "x", "--served-model-name", "x"
    )


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        configs("--config", str(tmp_path / "none.toml"))
    assert "is not TOML" in refused(tmp_path, "a = ")


def test_the_check_level_comes_from_the_environment():
    assert configs(environ={"ENGINE_CHECK": "2"})[0].check_level == 2
    with pytest.raises(ConfigError, match="ENGINE_CHECK is '3'"):
        configs(environ={"ENGINE_CHECK": "3"})


# ---- where to listen -------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.2.1", "::1", "[::1]", "localhost"])
def test_loopback_needs_no_flag(host):
    assert ServerConfig(host=host)


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "10.0.0.1", "example.org", "127.1", "::ffff:0:0"]
)
def test_other_machines_are_served_only_with_a_flag(host):
    with pytest.raises(ConfigError, match="add --insecure if") as caught:
        ServerConfig(host=host)
    assert host in str(caught.value)
    assert ServerConfig(host=host, insecure=True)


def test_addresses_are_as_grpc_takes_them():
    assert ServerConfig().address == "127.0.0.1:50051"
    assert ServerConfig(host="::1", port=1).address == "[::1]:1"
    assert ServerConfig(host="[::1]").address == "[::1]:50051"
    for path in ("/run/t.sock", "./@name", "/run/@name", "name@"):
        assert ServerConfig(host="0.0.0.0", uds=path).address == f"unix:{path}"


@pytest.mark.parametrize(
    "wrong",
    [
        *({"port": 65536}, {"host": ""}),
        *({"uds": name} for name in ("a" * 108, "@", "@name", "@a/b", "\0name", "a\0b")),
    ],
)
def test_impossible_addresses_are_refused(wrong):
    with pytest.raises(ConfigError, match=f"--{next(iter(wrong))}"):
        ServerConfig(**wrong)


@pytest.mark.parametrize(
    ("server", "target"),
    [
        ("127.0.0.1:7", "127.0.0.1:7"),
        ("example.org", "example.org:50051"),
        ("[::1]", "[::1]:50051"),
        ("[::1]:7", "[::1]:7"),
        ("unix:/run/t.sock", "unix:/run/t.sock"),
    ],
)
def test_a_clients_server_may_leave_the_port_out(server, target):
    assert client.target_of(server) == target


def test_a_variable_names_the_server_of_every_client_command(monkeypatch):
    commands = (["stats"], ["models", "list"], ["drain"], ["chat"], ["generate", "x"])
    for given in commands:
        assert build_parser().parse_args(given).server == "127.0.0.1:50051"
    monkeypatch.setenv("TRIOLET_SERVER", "unix:/run/t.sock")
    for given in commands:
        assert build_parser().parse_args(given).server == "unix:/run/t.sock"
        assert build_parser().parse_args([*given, "--server", "a:1"]).server == "a:1"
    monkeypatch.setenv("TRIOLET_SERVER", "")
    assert build_parser().parse_args(["stats"]).server == "127.0.0.1:50051"


# ---- values ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("1024", 1024),
        ("512MiB", 512 * 2**20),
        ("4g", 4 * 2**30),
        ("4 GiB", 4 * 2**30),
        ("4GB", 4 * 10**9),
        ("1.5K", 1536),
        ("7B", 7),
    ],
)
def test_sizes(text, size):
    assert BYTES.read(text) == size


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (BYTES, "4XB"),
        (BYTES, ""),
        (BYTES, "-1"),
        (BYTES, -1),
        (BYTES, 1.5),
        (BYTES, "٤"),
        (COUNT, "1.5"),
        (COUNT, None),
        (SECONDS, "inf"),
        (SECONDS, "soon"),
        (SECONDS, True),
        (TEXT, ""),
        (TEXT, 1),
        (SWITCH, "true"),
    ],
)
def test_malformed_values_are_refused(kind, given):
    with pytest.raises(ValueError):  # noqa: PT011 (the caller writes the sentence)
        kind.read(given)


# ---- main ------------------------------------------------------------------------------------


def test_version(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("triolet ")


def test_without_a_command_the_help_is_shown(capsys):
    assert main([]) == 2
    shown = capsys.readouterr().err
    for command in ("serve", "generate", "tokenize", "models", "stats", "doctor"):
        assert f"\n    {command} " in shown


def test_a_wrong_configuration_is_one_sentence_and_no_traceback(capsys):
    assert main(["serve", "--host", "0.0.0.0"]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith("triolet: --host 0.0.0.0 would serve other machines")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["serve", "--port", "x"], "argument --port: is 'x', but must be a whole number"),
        (["serve", "--max-num", "1"], "unrecognized arguments: --max-num"),
        (["generate", "a", "--n", "-1"], "argument --n: -1 is outside [0, 4294967295]"),
        (["generate", "a", "--seed", str(2**64)], "is outside [0,"),
        (["generate", "a", "--timeout", "0"], "argument --timeout: must be more than 0"),
        (["tokenize", "--detokenize", "4294967296"], "is outside [0, 4294967295]"),
        *[
            (["usage", "--since", wrong], f"argument --since: {wrong!r} is neither a time such as")
            for wrong in (
                *("", "1", "1y", "h", "1h ", "1.h", "1e3s", "99999999d", "999999999999d"),
                *("2026-01-31", "2026-01-31T08:00:00", "2026-02-30T08:00:00Z", "20260131T080000Z"),
                *("yesterday", "2026-01-31T08:00:00+2"),
            )
        ],
    ],
)
def test_wrong_arguments_are_usage_errors(argv, sentence, capsys):
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv",
    [
        ["serve", "--max-num", "1"],
        ["stats", "extra"],
        ["generate", "x", "--max-token", "5"],
        ["models", "--no-such"],
        ["models", "load", "x", "--replica", "2"],
        ["--no-such", "stats"],
    ],
    ids=" ".join,
)
def test_an_unknown_argument_shows_the_usage_of_its_own_command(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    command = " ".join([word for word in argv if not word.startswith("--")][: 1 + ("load" in argv)])
    shown = capsys.readouterr().err
    assert shown.startswith(f"usage: triolet {command} [-h]")
    assert f"triolet {command}: error: unrecognized arguments: " in shown


def test_tokenize_takes_one_text(capsys):
    assert main(["tokenize"]) == main(["tokenize", "a", "--detokenize", "1"]) == 2
    assert "either a text or --detokenize" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["embed", "--image", "~nobody-here/a.png"], "--image ~nobody-here/a.png cannot be read"),
        (["rerank", "q", "--file", "~nobody-here/a"], "--file ~nobody-here/a cannot be read: No"),
        (["draw", "a", "-o", "~nobody-here/a.png"], "-o ~nobody-here/a.png is no file in a folder"),
    ],
)
def test_the_home_of_a_user_who_is_unknown_is_no_traceback(argv, sentence, capsys):
    """`pathlib` raises RuntimeError for ``~nobody``, and for ``~`` where the user has no home."""
    assert main(argv) == 2
    assert capsys.readouterr().err.startswith(f"triolet: {sentence}")


def test_proto_writes_every_proto_as_it_stands_in_the_repository(tmp_path, capsys):
    target = tmp_path / "new" / "protos"
    for _ in range(2):  # the second time overwrites the files of the first
        assert main(["proto", str(target)]) == 0
        written = capsys.readouterr().out.splitlines()
    files = {path.relative_to(PROTO): path.read_bytes() for path in PROTO.rglob("*.proto")}
    assert {Path(name).relative_to(target) for name in written} == set(files)
    assert {path: (target / path).read_bytes() for path in files} == files
    assert Path("triolet/v1/inference.proto") in files
    (tmp_path / "file").touch()
    assert main(["proto", str(tmp_path / "file")]) == 1
    assert f"triolet: {tmp_path / 'file'} cannot be written: " in capsys.readouterr().err


@pytest.mark.parametrize("form", ["as a module", "as a script"])
def test_files_named_like_our_packages_in_the_working_directory_are_not_imported(tmp_path, form):
    """A script's own folder comes first in the path, and for ``-m`` the working directory does."""
    here, scripts = tmp_path / "here", tmp_path / "bin"
    for folder in (here / "engine", scripts):
        folder.mkdir(parents=True)
    (here / "engine" / "__init__.py").write_text("raise ImportError('a file of the user')")
    script = scripts / "triolet"
    script.write_text("import sys\nfrom grpc_service.cli.entry import main\nsys.exit(main())")
    command = ["-m", "grpc_service"] if form == "as a module" else [str(script)]
    done = subprocess.run(
        [sys.executable, *command, "models", "--server", "127.0.0.1:1"],
        cwd=here,
        env=os.environ | {"PYTHONPATH": str(PROTO.parent)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("triolet: no server answers at 127.0.0.1:1")


def test_ctrl_c_ends_an_importing_command_also_if_nobody_reads_standard_error():
    code = "import os; from grpc_service.cli import entry; os.close(2); entry.end_at_once()"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 130


@pytest.fixture
def hangups():
    """Restore how this process reacts to SIGHUP, which `triolet serve` changes."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def test_serve_hands_its_configs_to_the_server(monkeypatch, hangups):
    seen = []
    server = argparse.Namespace(serve_forever=lambda *configs: seen.append(configs) or 75)
    monkeypatch.setitem(sys.modules, "grpc_service.app.application", server)
    monkeypatch.delenv("ENGINE_CHECK", raising=False)
    assert main(["serve", "--seed", "3", "--port", "0"]) == 75
    assert seen == [(EngineConfig(seed=3), ServerConfig(port=0))]


def test_a_hangup_does_not_end_a_server_that_is_still_importing(monkeypatch, hangups):
    """`systemctl reload` may come before the server listens for signals."""
    seen = []
    server = argparse.Namespace(
        serve_forever=lambda *_: seen.append(signal.getsignal(signal.SIGHUP)) or 0
    )
    monkeypatch.setitem(sys.modules, "grpc_service.app.application", server)
    assert main(["serve"]) == 0
    assert seen == [signal.SIG_IGN]


def test_the_list_of_models_says_how_weights_are_kept(capsys):
    small = messages.Model(name="small", dtype="bfloat16", quantization="int4")
    print_models([messages.Model(name="whole", dtype="bfloat16"), small], {})
    whole, quantised = capsys.readouterr().out.splitlines()[-2:]
    assert "int4" not in whole
    assert "bfloat16, int4 " in quantised


def test_the_list_of_models_says_why_a_context_is_short(capsys):
    note = "of 4800, because its KV pool holds no more"
    short = messages.Model(name="short", max_model_len=600, context_note=note)
    print_models([messages.Model(name="whole", max_model_len=2048), short], {})
    assert capsys.readouterr().out.splitlines()[-1] == f"short: context 600 {note}"
