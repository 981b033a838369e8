"""The built wheel, unpacked into an empty folder, serves the demo model."""

import json
import os
import re
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from engine.config import DEMO_MODELS
from engine.errors import install_command
from engine.worker.forward.variants import VARIANTS, best_variant, features_of
from tests.support.server import MODEL_START_LIMIT_S, READY, ROOT, process
from tests.support.wire import SERVING, connect, generate, health, list_models, wait_until

pytestmark = [pytest.mark.model, pytest.mark.slow]

PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
BUILD_LIMIT_S = 240
PAGE = "grpc_service/openai/page"


def run(argv, **options):
    """Run a command, and check that it succeeds."""
    done = subprocess.run(
        argv, capture_output=True, text=True, timeout=BUILD_LIMIT_S, check=False, **options
    )
    assert done.returncode == 0, f"{argv}: {done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Build the wheel, and return its path."""
    directory = tmp_path_factory.mktemp("wheel")
    run([*PIP, "wheel", str(ROOT), "--no-deps", "--wheel-dir", str(directory)])
    [path] = directory.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Return a folder that has the wheel's contents and nothing else."""
    target = tmp_path_factory.mktemp("installed")
    run([*PIP, "install", "--no-deps", "--no-index", "--target", str(target), str(wheel)])
    return target


def test_the_wheel_holds_the_packages_and_the_demo_without_tests_or_tools(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {"engine/py.typed", "grpc_service/py.typed"} <= set(names)
    assert {name.split("/")[0].split("-")[0] for name in names} == {
        "engine",
        "grpc_service",
        "triolet",
    }
    for demo in ("stories", "embed", "rerank", "draft", "clip", "see"):
        assert f"engine/demo/{demo}/model.safetensors" in names
        assert f"engine/demo/{demo}/README.md" in names
    assert {"engine/demo/embed/modules.json", "engine/demo/embed/1_Pooling/config.json"} <= set(
        names
    )
    assert "grpc_service/_generated/triolet/v1/inference_pb2.py" in names
    sources = {f"engine/kernels/{path.name}" for path in (ROOT / "engine/kernels").glob("*.[ch]*")}
    assert "engine/kernels/triolet.cpp" in sources
    assert sources <= set(names)
    page = {f"{PAGE}/{path.name}" for path in (ROOT / PAGE).iterdir()}
    assert f"{PAGE}/index.html" in page
    assert page <= set(names)
    protos = {f"grpc_service/{path.relative_to(ROOT)}" for path in ROOT.glob("proto/**/*.proto")}
    assert "grpc_service/proto/triolet/v1/inference.proto" in protos
    assert protos <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if "__pycache__" in name or "/test_" in name]
    assert not [name for name in names if "/tests/" in name]


def test_the_wheel_serves_the_demo_models_from_a_directory_of_its_users(installed, tmp_path):
    """Files there that are named like our packages are not imported in place of these."""
    theirs = [tmp_path / "engine.py", tmp_path / "grpc_service.py"]
    for path in theirs:
        path.write_text("raise ImportError('a file of the user')")
    env = {"PYTHONPATH": str(installed), "PYTHONSAFEPATH": "1"}
    where = "import engine, grpc_service; print(engine.__file__, grpc_service.__file__)"
    found = run([sys.executable, "-c", where], cwd=tmp_path, env=os.environ | env)
    assert all(path.startswith(str(installed)) for path in found.split())
    argv = [sys.executable, installed / "bin" / "triolet", "serve", "--port", "0"]
    with process(argv, env={"PYTHONPATH": str(installed)}, cwd=tmp_path) as server:
        address = server.wait_for_output(READY.search, MODEL_START_LIMIT_S)[1]
        with connect(address) as channel:
            heard = generate(channel, text="Once upon a time", max_tokens=20, temperature=0)
            assert heard.error is None
            assert len(heard.ids()) > 1
            assert " " in heard.text()
            for name in DEMO_MODELS:
                wait_until(lambda name=name: health(channel, f"model/{name}") == SERVING, 90)
            listed = {model.name: model.demo for model in list_models(channel)}
            assert listed == dict.fromkeys(DEMO_MODELS, True)
        command = [sys.executable, "-m", "grpc_service", "generate", "--server", address]
        text = run([*command, "--max-tokens", "5", "Once"], cwd=tmp_path, env=os.environ | env)
        assert text.strip()
    assert sorted(tmp_path.iterdir()) == theirs, "serving left something behind"
    run(
        [sys.executable, installed / "bin" / "triolet", "proto", "api"],
        cwd=tmp_path,
        env=os.environ | env,
    )
    assert (tmp_path / "api/triolet/v1/inference.proto").read_bytes() == (
        ROOT / "proto/triolet/v1/inference.proto"
    ).read_bytes()


@pytest.mark.parametrize("source", ["wheel", "checkout"])
def test_the_command_that_messages_name_installs_an_extra_though_no_index_has_the_package(
    installed, tmp_path, source
):
    """pip takes the extra's packages, which are there, from the metadata of what is installed."""
    _, _, *arguments = shlex.split(install_command("images"))
    argv = [*PIP[:3], "install", "--no-index", "--dry-run", *arguments]
    env = {"PYTHONPATH": str(installed)} if source == "wheel" else {}
    told = run(argv, cwd=tmp_path, env=os.environ | env)
    [first] = [line for line in told.splitlines() if "satisfied: triolet[images] in" in line]
    assert (str(installed) in first) == (source == "wheel")
    assert re.search(r"satisfied: diffusers.*from triolet\[images\]", told)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_wheel_with_kernels_runs_compiled_where_no_compiler_is(tmp_path):
    """The wheel has the libraries of `VARIANTS`; the best one for this processor is used."""
    env = os.environ | {"TRIOLET_WHEEL_KERNELS": "1"}
    run([*PIP, "wheel", str(ROOT), "--no-deps", "--wheel-dir", str(tmp_path)], env=env)
    [path] = tmp_path.glob("*-linux_x86_64.whl")
    names = {name for name in zipfile.ZipFile(path).namelist() if name.endswith(".so")}
    assert names == {f"engine/kernels/{variant.file}" for variant in VARIANTS}
    target = tmp_path / "installed"
    run([*PIP, "install", "--no-deps", "--no-index", "--target", str(target), str(path)])
    bare = {"PATH": "", "CXX": "", "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(target)}
    best = best_variant(features_of(Path("/proc/cpuinfo").read_text()))
    told = run(
        [sys.executable, "-P", "-m", "grpc_service", "doctor", "--port", "0", "--json"],
        cwd=tmp_path, env=os.environ | bare,
    )  # fmt: skip
    values = {finding["name"]: finding["value"] for finding in json.loads(told)}
    assert values["attention"].endswith(f"(from the wheel, {best.name})")
    argv = [sys.executable, target / "bin" / "triolet", "serve", "--port", "0"]
    with process(argv, env=bare, cwd=tmp_path) as server:
        address = server.wait_for_output(READY.search, MODEL_START_LIMIT_S)[1]
        with connect(address) as channel:
            assert len(generate(channel, sampling={"max_tokens": 9, "ignore_eos": True}).ids()) == 9
        assert "LlamaForCausalLM runs compiled" in server.log
