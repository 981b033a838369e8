"""`python -m tools.lab.gpu` runs whole on a CPU, with small shapes."""

import json
import subprocess
import sys
import zipfile

import pytest

from tests.support.model_zoo import ZOO
from tests.support.programs import ROOT
from tools.lab.gpu.__main__ import main
from tools.lab.gpu.phases import PHASES
from tools.lab.gpu.wheels import NEEDED, complete, lacking


def run(tmp_path, *arguments):
    """Return the exit code, the rows by name, the description of the machine, and standard
    error."""
    file = tmp_path / "gpu.json"
    argv = [sys.executable, "-m", "tools.lab.gpu", "--json", str(file), *arguments]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    if not file.exists():
        return done.returncode, {}, {}, done.stderr
    found = json.loads(file.read_text())
    return (
        done.returncode,
        {row["name"]: row for row in found["rows"]},
        found["machine"],
        done.stderr,
    )


@pytest.mark.full
def test_one_architecture_and_the_attention_are_checked_on_a_cpu(tmp_path):
    only = "kernel, bfloat16|parity, llama$"
    code, rows, machine, trouble = run(tmp_path, "--device", "cpu", "--only", only)
    assert code == 0, trouble
    assert list(rows) == [
        "kernel, bfloat16: worst difference",
        "parity, llama, float32: wrong tokens",
        "parity, llama, bfloat16: wrong first tokens",
    ]
    assert 0 < rows["kernel, bfloat16: worst difference"]["value"] < 6e-2
    assert rows["parity, llama, float32: wrong tokens"]["n"] >= 70
    assert all(row["pass"] for row in rows.values())
    assert machine["device"] == "cpu"
    assert machine["versions"].keys() == set(NEEDED.values())


@pytest.mark.full
def test_all_of_it_runs_on_a_cpu(tmp_path):
    code, rows, _, trouble = run(tmp_path, "--device", "cpu")
    assert code == 0, trouble
    for name in ZOO:
        assert f"parity, {name}, float32: wrong tokens" in rows
    for batch in (1, 4):
        assert rows[f"step, tiny, B={batch}: against transformers'"]["value"] > 0
    assert rows["memory, tiny: reported at load"]["value"] > 0
    for switch in ("on", "off"):
        name = f"gap, tiny, 4 readers, prepared plans {switch}: between two steps"
        assert rows[name]["value"] > 0


@pytest.mark.full
def test_what_there_was_no_time_for_is_named(tmp_path):
    code, rows, _, _ = run(tmp_path, "--device", "cpu", "--minutes", "0.02")
    assert code == 1
    assert rows.keys() == PHASES.keys()
    for row in rows.values():
        assert row["note"].startswith("was stopped after 1 s")


@pytest.mark.slow
def test_a_phase_that_fails_costs_no_other_its_rows(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("tools.lab.gpu.__main__.PHASES", {"nothing": 0.5, "kernel": 0.5})
    file = tmp_path / "gpu.json"
    assert main(["--device", "cpu", "--only", "kernel, float16", "--json", str(file)]) == 1
    failed, kernel = json.loads(file.read_text())["rows"]
    assert (failed["name"], failed["unit"]) == ("nothing", "failed")
    assert "No module named 'tools.lab.gpu.nothing'" in failed["note"]
    assert kernel["pass"]


@pytest.mark.slow
def test_a_device_that_is_not_there_is_one_sentence(tmp_path):
    code, rows, _, trouble = run(tmp_path, "--device", "cuda:77")
    assert (code, rows) == (2, {})
    assert trouble.startswith("tools.lab.gpu: the device cuda:77 is not there: ")
    assert len(trouble.splitlines()) == 1


# --- wheels ---------------------------------------------------------------------------------


def wheel(folder, name, version="1.0"):
    """Write a wheel with a module of its name."""
    folder.mkdir(exist_ok=True)
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as file:
        file.writestr(f"{name}.py", "here = True\n")
        file.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        file.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr(f"{info}/RECORD", "")


def test_only_what_is_missing_comes_from_the_wheels(tmp_path):
    wheel(tmp_path / "wheels", "triolet_made_up")
    wheel(tmp_path / "wheels", "torch", "0.1")
    target = tmp_path / "libraries"
    assert complete(tmp_path / "wheels", target) == ["triolet_made_up-1.0-py3-none-any.whl"]
    assert (target / "triolet_made_up.py").exists()
    assert not (target / "torch.py").exists()


def test_a_package_that_is_nowhere_is_named_with_the_command(tmp_path, monkeypatch, capsys):
    made_up = {"triolet_made_up": "triolet-made-up"}
    monkeypatch.setattr("tools.lab.gpu.wheels.NEEDED", NEEDED | made_up)
    assert lacking(tmp_path) == ["triolet-made-up"]
    assert main(["--device", "cpu"]) == 2
    told = capsys.readouterr().err
    assert "triolet-made-up must be installed" in told
    assert "pip download" in told


def test_without_wheels_nothing_is_installed(tmp_path):
    assert complete(None, tmp_path / "libraries") == []
    assert not (tmp_path / "libraries").exists()
