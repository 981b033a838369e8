"""What the small files of a model that reads images show before torch is imported."""

import json

import pytest

from engine.status import Capability
from engine.worker.load.capability import capability_of
from engine.worker.load.refusal import Refusal
from engine.worker.load.vision_architectures import VISION, find_vision

NESTED = {"vision_config": {"depth": 2}, "text_config": {"hidden_size": 8}}
# The first Qwen-VL models have the text model's fields beside `vision_config`.
FLAT = {"vision_config": {"depth": 2}, "hidden_size": 8}


def write(directory, **fields):
    """Write a config.json, and return its directory."""
    (directory / "config.json").write_text(json.dumps(fields))
    return directory


@pytest.mark.parametrize("name", VISION)
@pytest.mark.parametrize("form", [NESTED, FLAT], ids=["nested", "flat"])
def test_each_architecture_has_the_capability_vision(tmp_path, name, form):
    directory = write(tmp_path, architectures=[name], **form)
    assert capability_of(directory) is Capability.VISION


def test_another_architecture_is_refused_by_name(tmp_path):
    config = {"architectures": ["PaliGemmaForConditionalGeneration"], **NESTED}
    assert capability_of(write(tmp_path, **config)) is Capability.VISION
    with pytest.raises(Refusal, match="PaliGemmaForConditionalGeneration is not served"):
        find_vision(config)


def test_quantised_weights_are_refused(tmp_path):
    config = {"architectures": [next(iter(VISION))], **NESTED, "quantization_config": {}}
    with pytest.raises(Refusal, match="quantised"):
        find_vision(config)
