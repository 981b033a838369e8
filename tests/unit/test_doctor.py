"""The findings of `triolet doctor`, from files and sockets that the test makes."""

import datetime
import json
import socket
import subprocess
import types
from functools import partial

import pytest
import trustme

import engine
from engine.limits.cpu import CpuLimit
from grpc_service.cli import doctor
from grpc_service.cli.main import main
from tests.support.unreadable import as_nobody, open_folder

RUN = subprocess.run
TOLD = {
    "devices": [], "kernels": "AVX512-BF16", "integers": "AVX512-VNNI",
    "origin": "compiled here", "missing": "", "uncached": "", "hub": "/",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _torch_is_not_asked(monkeypatch):
    """Replace the check of torch: torch may be missing here, and importing it takes seconds."""
    told = types.SimpleNamespace(returncode=0, stderr="", stdout=json.dumps(TOLD))
    monkeypatch.setattr(doctor.subprocess, "run", lambda *args, **kwargs: told)
    monkeypatch.setattr(doctor.metadata, "version", lambda name: "1.0")


def test_a_port_that_is_taken_makes_the_machine_unfit(capsys):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert main(["doctor", "--port", str(port)]) == 1
        assert f"BAD port            127.0.0.1:{port}: address already in use" in (
            capsys.readouterr().out
        )
    assert main(["doctor", "--port", "0"]) == 0


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("is_kept", [False, True])
def test_libraries_that_each_process_compiles_anew_are_shown(
    tmp_path, monkeypatch, capsys, is_compiled, is_kept
):
    cached = tmp_path / "torch.pyc"
    if is_compiled:
        cached.touch()
    torch = types.SimpleNamespace(cached=str(cached))
    monkeypatch.setattr(doctor.util, "find_spec", lambda name: torch)
    monkeypatch.setattr(doctor.sys, "dont_write_bytecode", not is_kept)
    assert main(["doctor", "--port", "0"]) == 0
    is_slow = not is_compiled and not is_kept
    assert ("ok  bytecode        none is kept" in capsys.readouterr().out) == is_slow


CERTIFICATES = {
    "valid": (100, "ok ", "valid until "),
    "soon": (5, "ok ", "expires on "),
    "expired": (-5, "BAD", "has expired on "),
}


@pytest.mark.parametrize(("days", "mark", "value"), CERTIFICATES.values(), ids=CERTIFICATES)
def test_how_long_a_certificate_is_valid_is_shown(tmp_path, capsys, days, mark, value):
    now = datetime.datetime.now(datetime.UTC)
    leaf = trustme.CA().issue_cert(
        "localhost",
        not_before=now - datetime.timedelta(300),
        not_after=now + datetime.timedelta(days),
    )
    path = tmp_path / "cert.pem"
    leaf.cert_chain_pems[0].write_to_path(path)
    code = main(["doctor", "--port", "0", "--tls-cert", str(path)])
    date = f"{now + datetime.timedelta(days):%Y-%m-%d}"
    assert f"{mark} certificate     {path} {value}{date}" in capsys.readouterr().out
    assert code == (mark == "BAD")


def test_a_certificate_that_cannot_be_read_makes_the_machine_unfit(tmp_path, capsys):
    (tmp_path / "empty.pem").touch()
    for name, why in (("nowhere.pem", "cannot be read"), ("empty.pem", "holds no PEM certificate")):
        assert main(["doctor", "--port", "0", "--tls-cert", str(tmp_path / name)]) == 1
        assert f"BAD certificate     {tmp_path / name} {why}" in capsys.readouterr().out


def test_json_is_one_list_of_findings(capsys):
    assert main(["doctor", "--port", "0", "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)
    names = [finding["name"] for finding in findings]
    assert {"python", "torch", "cores", "memory", "devices", "GOMP_SPINCOUNT", "port"} <= set(names)
    assert all(finding["is_fit"] for finding in findings)


def test_the_process_that_asks_torch_imports_what_the_command_imports(tmp_path, monkeypatch):
    for name in ("engine", "torch", "json"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('a file of the user')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor.subprocess, "run", RUN)
    asked = f"import engine\nprint(json.dumps({TOLD!r} | {{'kernels': engine.__file__}}))"
    monkeypatch.setattr(doctor, "ASK_TORCH", asked)
    assert [finding.value for finding in doctor._torch() if finding.name == "attention"] == [
        f"compiled kernels, {engine.__file__} (compiled here)"
    ]


def test_a_missing_package_is_named(monkeypatch, capsys):
    def version(name):
        if name == "torch":
            raise doctor.metadata.PackageNotFoundError
        return "1.0"

    monkeypatch.setattr(doctor.metadata, "version", version)
    assert main(["doctor", "--port", "0"]) == 1
    assert "BAD torch           missing – install Triolet's dependencies" in capsys.readouterr().out


def test_a_torch_that_does_not_import_says_why(monkeypatch):
    told = types.SimpleNamespace(
        returncode=1, stderr="Traceback\nImportError: no libgomp", stdout=""
    )
    monkeypatch.setattr(doctor.subprocess, "run", lambda *args, **kwargs: told)
    [finding] = doctor._torch()
    assert (finding.is_fit, finding.advice) == (
        False,
        "torch does not work: ImportError: no libgomp",
    )


@pytest.mark.parametrize(
    ("told", "value", "advice"),
    [
        ({}, "compiled kernels, AVX512-BF16 (compiled here)", ""),
        ({"kernels": "", "missing": "there is no C++ compiler"}, "reference",
         "there is no C++ compiler; models run without the kernels, several times slower"),
        ({"uncached": "this user has no home"}, "compiled kernels, AVX512-BF16 (compiled here)",
         "compiled again at every start: this user has no home"),
    ],
)  # fmt: skip
def test_which_attention_is_used_and_why(monkeypatch, told, value, advice):
    found = types.SimpleNamespace(returncode=0, stderr="", stdout=json.dumps(TOLD | told))
    monkeypatch.setattr(doctor.subprocess, "run", lambda *args, **kwargs: found)
    [finding] = [one for one in doctor._torch() if one.name == "attention"]
    assert (finding.value, finding.advice, finding.is_fit) == (value, advice, True)


def test_the_instructions_that_multiply_integers_are_named(monkeypatch):
    for told, values in ({}, ["compiled kernels, AVX512-VNNI"]), ({"kernels": ""}, []):
        found = types.SimpleNamespace(returncode=0, stderr="", stdout=json.dumps(TOLD | told))
        monkeypatch.setattr(doctor.subprocess, "run", lambda *args, found=found, **kwargs: found)
        assert [one.value for one in doctor._torch() if one.name == "quantized weights"] == values


def test_processor_features_are_found_under_either_name(tmp_path):
    path = tmp_path / "cpuinfo"
    path.write_text("processor\t: 0\nflags\t\t: fpu avx2 avx512_bf16\n")
    finding = doctor._processor(doctor._cpu_flags(path))
    assert finding.value.endswith("avx2 avx512_bf16; bf16 in hardware")
    path.write_text("Features\t: asimd\n")
    assert "asimd; no bf16" in doctor._processor(doctor._cpu_flags(path)).value
    assert doctor._cpu_flags(tmp_path / "none") == set()


def test_the_threads_and_what_limits_them_are_shown(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "cpu_limit", lambda: CpuLimit(64, 128, 1.5))
    main(["doctor", "--port", "0"])
    expected = "ok  cores           2 threads: CPU quota 1.5 of 64 cores with 128 hyper-threads\n"
    assert expected in capsys.readouterr().out


def test_a_compiler_of_the_users_own_comes_first(monkeypatch):
    monkeypatch.setenv("CXX", "mycc -O2")
    monkeypatch.setattr(doctor.shutil, "which", lambda name: f"/bin/{name}")
    assert doctor._compiler().value == "/bin/mycc"
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    assert doctor._compiler().is_fit
    assert doctor._compiler().value == "none"


def test_a_machine_without_a_temporary_folder_is_unfit(monkeypatch, capsys):
    def fail():
        raise FileNotFoundError

    monkeypatch.setattr(doctor.tempfile, "gettempdir", fail)
    assert main(["doctor", "--port", "0"]) == 1
    told = "BAD temporary files no folder can be written – name a folder in TMPDIR"
    assert told in capsys.readouterr().out


@pytest.mark.parametrize(
    ("hub", "value", "advice"),
    [
        ("{0}/a/b", "{0}/a/b", ""),
        ("~/.cache/huggingface/hub", "this user has no home directory", "name a folder in HF_HOME"),
        ("/proc/1/hub", "/proc/1/hub cannot be written", "name a folder in HF_HOME"),
    ],
)
def test_where_downloads_go_and_whether_they_can(tmp_path, monkeypatch, hub, value, advice):
    writable = doctor.os.access
    monkeypatch.setattr(
        doctor.os, "access", lambda path, how: "/proc" not in str(path) and writable(path, how)
    )
    finding = doctor._downloads(hub.format(tmp_path))
    assert (finding.value, finding.is_fit) == (value.format(tmp_path), True)
    assert finding.advice.endswith(advice)
    assert bool(finding.advice) == bool(advice)


def test_downloads_to_a_folder_of_another_user_cannot_be_written(monkeypatch):
    monkeypatch.setattr(doctor.os, "access", partial(doctor.os.access, effective_ids=True))
    with open_folder() as folder:
        (folder / "closed").mkdir(mode=0o700)
        with as_nobody():
            finding = doctor._downloads(str(folder / "closed" / "hub"))
    assert finding.value.endswith("/closed/hub cannot be written")
