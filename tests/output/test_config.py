"""config.json of an output names what `transformers` has for the model, and nothing else."""

from __future__ import annotations

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from blr.compressor.modeling.registry import auto_classes
from blr.compressor.output.files import structured_config
from blr.compressor.planning.plan import Plan

# Model type -> a class of its own, where AutoModel has none
HEADED = {
    "mllama_text_model": "MllamaForCausalLM",
    "pp_chart2table": "GotOcr2ForConditionalGeneration",
}


@pytest.mark.parametrize("model_type", HEADED)
def test_types_that_auto_model_does_not_have(model_type: str) -> None:
    if model_type not in CONFIG_MAPPING or "AutoModel" in auto_classes(model_type):
        pytest.skip("other in this release of transformers")
    source = {"model_type": model_type, "architectures": [HEADED[model_type]]}
    found = structured_config(source, Plan([]))
    assert found["architectures"] == [f"Blr{HEADED[model_type]}"]
    assert "AutoModel" not in found["auto_map"] and "AutoConfig" in found["auto_map"]
