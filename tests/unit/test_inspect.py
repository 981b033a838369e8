"""What `triolet inspect` prints, and with which exit code."""

import json
from dataclasses import replace

import pytest

from engine.config import AdapterConfig, EngineConfig
from engine.status import Capability
from engine.worker import inspection
from engine.worker.inspection import Fit, Report
from engine.worker.interface import Inspection, KvInspection
from grpc_service.cli.flags import FLAGS
from grpc_service.cli.main import main
from grpc_service.cli.serve_arguments import INSPECTED

MIB = 1 << 20
KV = KvInspection("bfloat16", bytes_per_token=1024, block_size=16, num_blocks=1024)
FOUND = Inspection(
    device="cpu",
    architecture="LlamaForCausalLM",
    dtype="bfloat16",
    stored="GGUF (Q4_K, Q6_K)",
    file_bytes=90 * MIB,
    weight_bytes=100 * MIB,
    tokenizer_bytes=4 * MIB,
    workspace_bytes=50 * MIB,
    execution="compiled (AVX2)",
    context_limit=8192,
    max_model_len=4096,
    kv=KV,
)
FITS = (Fit(2048, 9, 18 * MIB), Fit(8192, 0, 0))


def shown(monkeypatch, capsys, report, *argv):
    """Return the exit code and what is printed about a model of this report."""
    monkeypatch.setattr(inspection, "inspect", lambda model, config: report)
    return main(["inspect", "a-model", *argv]), capsys.readouterr().out


def test_a_served_model_is_described_in_lines(monkeypatch, capsys):
    report = Report(Capability.TEXT_TO_TEXT, FOUND, 512 * MIB, fits=FITS)
    code, out = shown(monkeypatch, capsys, report)
    assert code == 0
    lines = out.splitlines()
    assert lines.pop(7).startswith("memory    512 MiB for all models (--memory-limit), of ")
    assert lines == [
        "model     a-model, text-to-text",
        "class     LlamaForCausalLM, bfloat16 on cpu",
        "runs      compiled (AVX2)",
        "files     GGUF (Q4_K, Q6_K), 90 MiB",
        "weights   100 MiB",
        "KV cache  1 KiB for each token in bfloat16; the pool has 16 MiB (--kv-cache-memory), "
        "and a sequence up to 4,096 of 8,192 tokens",
        "loaded    120 MiB, and at most 50 MiB more for a step: 170 MiB are reserved",
        "fits      9 of 2,048 tokens, no of 8,192 tokens (sequences at once, with as large a "
        "--kv-cache-memory)",
    ]


def test_adapters_and_the_processes_of_ranks_have_lines(monkeypatch, capsys):
    found = replace(FOUND, adapter_bytes=3 * MIB, process_bytes=500 * MIB)
    _, out = shown(monkeypatch, capsys, Report(Capability.TEXT_TO_TEXT, found, 1 << 30))
    assert out.splitlines()[6:9] == [
        "adapters  3 MiB",
        "processes 500 MiB beside the model",
        "loaded    623 MiB, and at most 50 MiB more for a step: 673 MiB are reserved",
    ]


def test_json_has_every_number_in_bytes(monkeypatch, capsys):
    report = Report(Capability.TEXT_TO_TEXT, FOUND, 512 * MIB, fits=FITS)
    code, out = shown(monkeypatch, capsys, report, "--json")
    answer = json.loads(out)
    assert (code, answer.pop("usable_bytes") > 0) == (0, True)
    kept = {"model": "a-model", "capability": "text-to-text", "refusal": "", "kv_block_size": 16}
    assert kept.items() <= answer.items()
    sizes = {"load_bytes": 120, "reserved_bytes": 170, "kv_bytes": 16, "memory_limit": 512}
    assert {name: answer[name] / MIB for name in sizes} == sizes
    assert answer["fits"][0] == {
        "num_tokens": 2048, "num_sequences": 9, "kv_bytes": 18 * MIB
    }  # fmt: skip


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_a_model_that_is_not_served_has_its_sentence_and_exit_code_1(monkeypatch, capsys, flags):
    report = Report(None, None, 512 * MIB, "it is no model", "/a/place")
    code, out = shown(monkeypatch, capsys, report, *flags)
    assert code == 1
    if flags:
        assert json.loads(out)["refusal"] == "it is no model"
    else:
        assert out == "model     a-model\nrefused   it is no model [/a/place]\n"


def test_a_path_at_which_there_is_nothing_needs_no_torch(capsys):
    assert main(["inspect", "/no/such/place"]) == 1
    assert "there is no such directory [/no/such/place]" in capsys.readouterr().out


def test_the_flags_are_those_of_serve(monkeypatch):
    """They reach the configuration as serve's do."""
    assert {flag.name for flag in FLAGS} >= INSPECTED
    seen = []

    def note(model, config):
        seen.append((model, config))
        return Report(None, None, 0, "no")

    monkeypatch.setattr(inspection, "inspect", note)
    main(["inspect", "m", "--dtype", "float32", "--max-num-seqs", "7", "--memory-limit", "1GiB"])
    [(model, config)] = seen
    assert (model.model, model.dtype) == ("m", "float32")
    wanted = {"max_num_seqs": 7, "memory_limit": 1 << 30, "check_level": config.check_level}
    assert config == EngineConfig(models=(model,), **wanted)
    main(["inspect", "a/m", "--adapter", "m:sql=/d", "--served-model-name", "m"])
    assert seen[1][0].adapters == (AdapterConfig("sql", "/d"),)
    main(["inspect", "m", "--tensor-parallel-size", "2"])
    assert seen[2][0].tp == 2


def test_a_sequence_takes_whole_blocks_and_its_states():
    assert KV.sequence_bytes(17) == 32 * 1024
    assert KV.sequences(100 * 1024, 17) == 3
    assert KV.sequences(-1, 17) == 0
    hybrid = KvInspection(
        "int8", 1024, 16, 64, bytes_per_state=8192, states_per_sequence=2, num_states=4
    )
    assert hybrid.num_bytes == 64 * 16 * 1024 + 4 * 8192
    assert hybrid.sequence_bytes(16) == 16 * 1024 + 2 * 8192
    assert hybrid.sequences(48 * 1024, 16) == 1, "a step's new states count, too"
