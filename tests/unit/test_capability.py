"""The capability that an operator says a model has, beside the one that its files show."""

import json
from contextlib import nullcontext

import pytest

from engine.config import ConfigError, ModelConfig
from engine.status import Capability
from engine.worker.load.capability import fitting
from engine.worker.load.refusal import Refusal

CONFIGS = {
    Capability.TEXT_TO_TEXT: {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    Capability.TEXT_EMBEDDING: {"model_type": "bert", "architectures": ["BertModel"]},
    Capability.RERANK: {
        "model_type": "bert",
        "architectures": ["BertForSequenceClassification"],
        "num_labels": 1,
    },
    Capability.TEXT_CLASSIFICATION: {
        "model_type": "bert",
        "architectures": ["BertForSequenceClassification"],
        "num_labels": 3,
    },
    Capability.TOKEN_CLASSIFICATION: {
        "model_type": "bert",
        "architectures": ["BertForTokenClassification"],
    },
    Capability.IMAGE_EMBEDDING: {"model_type": "clip", "architectures": ["CLIPModel"]},
    Capability.VISION: {
        "model_type": "llava",
        "architectures": ["LlavaForConditionalGeneration"],
        "vision_config": {},
        "text_config": {},
    },
}
# Which other capability an operator may give to a model whose files show this one.
OPEN = {
    Capability.TEXT_TO_TEXT: {Capability.TEXT_EMBEDDING},
    Capability.TEXT_EMBEDDING: {Capability.TEXT_TO_TEXT},
    Capability.RERANK: {
        *(Capability.TEXT_TO_TEXT, Capability.TEXT_EMBEDDING, Capability.TEXT_CLASSIFICATION),
    },
    Capability.TEXT_CLASSIFICATION: {Capability.TEXT_TO_TEXT, Capability.TEXT_EMBEDDING},
    Capability.TOKEN_CLASSIFICATION: set(),
    Capability.IMAGE_EMBEDDING: set(),
    Capability.VISION: set(),
}


@pytest.mark.parametrize("shown", CONFIGS)
def test_a_capability_that_the_files_rule_out_is_refused(shown, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[shown]))
    if shown is Capability.TEXT_EMBEDDING:
        (tmp_path / "modules.json").write_text("[]")
    assert fitting(tmp_path, None) is shown
    for said in Capability:
        fits = said is shown or said in OPEN[shown]
        why = f"(its files show {shown.value}|it has 3 labels)"
        what = f"said to have the capability {said.value}, and {why}"
        with nullcontext() if fits else pytest.raises(Refusal, match=what):
            assert fitting(tmp_path, said) is said


@pytest.mark.parametrize(
    ("said", "head"),
    [
        (Capability.SPARSE_EMBEDDING, "sparse_linear.pt"),
        (Capability.MULTI_VECTOR_EMBEDDING, "colbert_linear.pt"),
    ],
)
def test_a_pickled_head_of_bge_m3_is_refused_by_name(said, head, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[Capability.TEXT_EMBEDDING]))
    (tmp_path / "modules.json").write_text("[]")
    with pytest.raises(Refusal, match="its files show text-embedding"):
        fitting(tmp_path, said)
    (tmp_path / head).write_bytes(b"")
    assert fitting(tmp_path, None) is Capability.TEXT_EMBEDDING, "dense vectors need no head"
    with pytest.raises(Refusal, match=f"its head {head} is a pickle, which is never read"):
        fitting(tmp_path, said)


def test_a_configured_capability_is_a_name():
    assert ModelConfig("a", capability="vision").capability is Capability.VISION
    with pytest.raises(ConfigError, match="--capability is 'sight'; use text-to-text, "):
        ModelConfig("a", capability="sight")
