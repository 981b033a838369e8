"""Torch's largest library is linked beside other imports, and torch imports as without that."""

import importlib.machinery
import subprocess
import sys

import pytest

from grpc_service.cli import linking

PROGRAM = """
import sys
from grpc_service.cli.linking import link_torch
link_torch().join()
assert "torch" not in sys.modules
print(open("/proc/self/maps").read().count("libtorch_cpu") > 0)
import torch
print(torch.ones(3).sum().item(), torch.get_num_threads() > 0)
print(link_torch())
"""


@pytest.mark.model
def test_the_library_is_linked_before_torch_is_imported():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("True\n3.0 True\nNone\n", "")


@pytest.mark.parametrize("spec", [None, importlib.machinery.ModuleSpec("torch", None)])
def test_without_torch_nothing_is_linked(monkeypatch, spec):
    monkeypatch.setattr(linking, "find_spec", lambda name: spec)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert linking.link_torch() is None


def test_a_library_that_is_not_there_is_left_to_the_import(monkeypatch, tmp_path):
    spec = importlib.machinery.ModuleSpec("torch", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(linking, "find_spec", lambda name: spec)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    thread = linking.link_torch()
    thread.join(10)
    assert not thread.is_alive()
