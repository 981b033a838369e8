"""A tool that is missing and cannot be installed fails its tests with a sentence to act on."""

import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support import toolchains


@pytest.fixture
def bare_machine(monkeypatch):
    """Simulate a machine where nothing is installed and the user is not root."""
    monkeypatch.setattr(toolchains.shutil, "which", lambda name, path=None: None)
    monkeypatch.setattr(toolchains.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(toolchains, "missing_npm_packages", lambda: ["@grpc/grpc-js"])


@pytest.mark.usefixtures("bare_machine")
def test_without_node_the_sentence_names_node():
    with pytest.raises(pytest.fail.Exception, match=r"need Node\.js with npm.*not interop"):
        toolchains.need_npm()


def test_one_npm_at_a_time_and_none_when_all_is_there(monkeypatch):
    """Several test workers ask for npm's packages at once, in a fresh clone."""
    running, missing, seen = [], ["@grpc/grpc-js"], []

    def install(wanted):
        running.append(wanted)
        time.sleep(0.2)
        seen.append(len(running))
        running.pop()
        missing.clear()

    monkeypatch.setattr(toolchains, "missing_npm_packages", lambda: list(missing))
    monkeypatch.setattr(toolchains, "_install_from_npm", install)
    with ThreadPoolExecutor(4) as pool:
        for one in [pool.submit(toolchains.need_npm) for _ in range(4)]:
            one.result()
    assert seen == [1]


def test_an_interrupted_npm_is_run_again(monkeypatch, tmp_path):
    monkeypatch.setattr(toolchains, "NODE_MODULES", tmp_path)
    pinned = json.loads((toolchains.INTEROP / "package.json").read_text())["devDependencies"]
    for name, version in pinned.items():
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "package.json").write_text(json.dumps({"version": version}))
    assert toolchains.missing_npm_packages() == list(pinned)
    (tmp_path / ".package-lock.json").write_text("{}")
    assert toolchains.missing_npm_packages() == []


@pytest.mark.usefixtures("bare_machine")
def test_without_ruby_the_sentence_has_the_command():
    with pytest.raises(pytest.fail.Exception) as failed:
        toolchains.need_ruby()
    said = str(failed.value)
    assert "need ruby, protoc, grpc_ruby_plugin" in said
    packages = " ".join(toolchains.DEBIAN_PACKAGES)
    assert f"`sudo apt-get install --no-install-recommends {packages}`" in said


@pytest.mark.usefixtures("bare_machine")
def test_without_arms_tools_the_sentence_has_the_command():
    with pytest.raises(pytest.fail.Exception) as failed:
        toolchains.need_arm()
    said = str(failed.value)
    assert "need aarch64-linux-gnu-g++, qemu-aarch64" in said
    packages = "g++-aarch64-linux-gnu qemu-user"
    assert f"`sudo apt-get install --no-install-recommends {packages}`" in said


@pytest.mark.usefixtures("bare_machine")
def test_without_a_program_of_debians_the_sentence_has_the_command():
    with pytest.raises(pytest.fail.Exception) as failed:
        toolchains.need_programs("nginx", "haproxy")
    said = str(failed.value)
    assert "the nginx and haproxy tests need nginx, haproxy" in said
    assert "`sudo apt-get install --no-install-recommends nginx haproxy`" in said
    with pytest.raises(pytest.fail.Exception, match=r"need chromium.*not interop"):
        toolchains.need_programs("chromium", leave_out=toolchains.LEAVE_OUT)


def test_a_user_who_is_not_root_gets_the_sentence_even_with_apt_get(monkeypatch):
    monkeypatch.setattr(
        toolchains.shutil, "which", lambda name: "/usr/bin/apt-get" if name == "apt-get" else None
    )
    monkeypatch.setattr(toolchains.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(toolchains, "_run", lambda *_: pytest.fail("apt-get was run"))
    with pytest.raises(pytest.fail.Exception, match="sudo apt-get install"):
        toolchains.need_ruby()


def test_an_install_that_fails_shows_its_output(monkeypatch):
    ran = []

    def run(command, cwd=None):
        ran.append(command[-1])
        return 100, "E: Unable to locate package ruby-grpc"

    monkeypatch.setattr(toolchains.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(toolchains, "missing_for_ruby", lambda: ["Ruby's grpc"])
    monkeypatch.setattr(toolchains.os, "geteuid", lambda: 0)
    monkeypatch.setattr(toolchains, "_run", run)
    with pytest.raises(pytest.fail.Exception) as failed:
        toolchains.need_ruby()
    assert ran == ["libprotobuf-dev", "update", "libprotobuf-dev"]
    assert "status 100; missing then: Ruby's grpc" in str(failed.value)
    assert "Unable to locate package" in str(failed.value)


def test_a_version_that_package_json_does_not_pin_is_missing(monkeypatch, tmp_path):
    monkeypatch.setattr(toolchains, "NODE_MODULES", tmp_path)
    assert "@grpc/grpc-js" in toolchains.missing_npm_packages()
    folder = tmp_path / "@grpc/grpc-js"
    folder.mkdir(parents=True)
    (folder / "package.json").write_text('{"version": "0.0.1"}')
    assert "@grpc/grpc-js" in toolchains.missing_npm_packages()
