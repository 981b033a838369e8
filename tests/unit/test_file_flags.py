"""A file that a command or a setting names and that cannot be read is named with the system's
reason. Commands and their flags are found by walking the parsers."""

import io

import pytest

from engine.errors import ConfigError
from grpc_service.access.keys import KeyRing
from grpc_service.app.server_config import ServerConfig
from grpc_service.app.tls import server_context
from grpc_service.cli import doctor
from grpc_service.cli.completion import _commands
from grpc_service.cli.main import build_parser, main
from grpc_service.ray.command import read_fleet
from tests.support.unreadable import FAULTS, broken, open_folder, reason

PARSERS = _commands(build_parser())
BESIDE = {("generate", "--image"): ["--chat"]}  # other flags that a flag requires
PAIRED = {
    "--tls-cert": ["--tls-key"],
    "--tls-key": ["--tls-cert"],
    "--client-ca": ["--tls-cert", "--tls-key"],
}


WRITTEN = ("--usage-log",)


def flags():
    """Return the commands and flags that take a file. If several commands share a flag and
    its help, only the first command is returned."""
    found = {}
    for command, parser in PARSERS.items():
        for action in parser._actions:
            for flag in action.option_strings[-1:]:
                if str(action.metavar).startswith("FILE") and flag != "--output":
                    found.setdefault((flag, action.help), (command, flag))
    return list(found.values())


CASES = [
    (command, flag, fault)
    for command, flag in flags()
    for fault in FAULTS
    if flag not in WRITTEN or fault != "a link to nothing"  # its target is made
]


@pytest.fixture(scope="module")
def folder():
    with open_folder() as made:
        yield made


def arguments(command, flag, path, folder):
    """Return a command line with a file that cannot be read."""
    needed = [
        "x"
        for action in PARSERS[command]._actions
        if not action.option_strings
        and action.nargs != "*"
        and (command, flag) != ("generate", "--file")
    ]
    required = ["-o", str(folder / "out.png")] if command == "draw" else []
    others = PAIRED.get(flag, ()) if command != "doctor" else ()
    pair = [word for other in others for word in (other, str(path))]
    return [command, *needed, *required, *BESIDE.get((command, flag), ()), *pair, flag, str(path)]


@pytest.mark.parametrize(("command", "flag", "fault"), CASES)
def test_a_file_of_a_flag_that_cannot_be_read_is_named(
    folder, monkeypatch, capsys, command, flag, fault
):
    monkeypatch.setattr("sys.stdin", io.StringIO("a\n"))
    monkeypatch.setattr(doctor, "_torch", list)  # the check of torch would start a process
    path = folder / "wanted"
    with broken(path, fault):
        assert main(arguments(command, flag, path, folder)) != 0
    shown = capsys.readouterr()
    done = "written" if flag in WRITTEN else "read"
    assert f"{path} cannot be {done}: {reason(fault)}" in shown.out + shown.err
    assert "Traceback" not in shown.err


SETTINGS = {
    "tls_cert": lambda path: server_context(ServerConfig(tls_cert=path, tls_key=path)),
    "api_key_file": KeyRing,
    "fleet": read_fleet,
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_file_of_a_servers_setting_that_cannot_be_read_is_named(
    folder, monkeypatch, setting, fault
):
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: True)  # Ray need not be installed
    path = folder / "wanted"
    with broken(path, fault), pytest.raises(ConfigError) as refused:
        SETTINGS[setting](str(path))
    assert f"{path} cannot be read: {reason(fault)}" in str(refused.value)
