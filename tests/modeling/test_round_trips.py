"""Every family with every structure, all the way round.

Compress, load through both doors, save, load, export, verify: what comes out computes everywhere what
its factors say it computes.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import bare
import pytest
import torch
import transformers
from exporting import compress_to, export_to
from fresh import shared
from pico import MODELS, MORE, inputs_for, save_pico
from safetensors import safe_open

from blr.compressor import register
from blr.compressor.checkpoint.source import open_source
from blr.compressor.commands.verify import verify_output
from blr.compressor.loading.loader import load_written
from blr.compressor.modeling.layers import Replaced
from blr.compressor.modeling.modeling_blr import Experts, module_names, stacks_apart
from blr.compressor.planning.plan import make_plan
from blr.compressor.recipe.schema import make_recipe
from blr.compressor.structures.packing import restored

register()

METHODS: dict[str, dict[str, Any]] = {
    "svd": {"method": "svd", "cf": 1.5},
    "monarch": {"method": "monarch", "cf": 1.5, "blocks": 4},
    "int3": {"method": "dense", "quantize": "int3", "group": 32},
    "curved": {"method": "dense", "quantize": "int3", "grid": "curved", "group": 32},
    "corrected": {"method": "svd", "base": "int2", "rank": 4, "group": 32},
    "blast": {"method": "blast", "cf": 1.5, "blocks": 4, "rounds": 2},
    "ks": {"method": "ks", "cf": 1.5},
    "packed": {"method": "svd", "cf": 1.25, "quantize": "int8", "group": 32},
}
FAMILIES = (
    *("llama", "llama-tied", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "gpt2", "opt"),
    *("mixtral", "qwen3-moe", "bert", "bert-mlm", "roberta", "xlm-roberta", "distilbert", "electra"),
    *("qwen2-classes", "llama-answers", "vit", "t5"),
    *("qwen2-moe", "olmoe", "gpt-oss", "deepseek-v3", "glm4-moe", "granite-moe"),
)
KIN = ("llama-tied", "mistral", "qwen2", "gemma2", "xlm-roberta", "electra")  # built as others here are
AUTO = {
    **{"CausalLM": "AutoModelForCausalLM", "LMHeadModel": "AutoModelForCausalLM"},
    **{"MaskedLM": "AutoModelForMaskedLM", "ConditionalGeneration": "AutoModelForSeq2SeqLM"},
    "SequenceClassification": "AutoModelForSequenceClassification",
    "QuestionAnswering": "AutoModelForQuestionAnswering",
    **{"ImageClassification": "AutoModelForImageClassification", "BertModel": "AutoModel"},
}
CLOSE = 1e-4  # relative: float32 through a pico model, products in another order
# A process where blr cannot be imported loads every folder and prints its results.
REMOTE = (
    bare.without("blr")
    + """
import json, torch, transformers
found = {}
for name, (auto, folder, inputs) in json.load(open(sys.argv[1])).items():
    model = getattr(transformers, auto).from_pretrained(folder, trust_remote_code=True).eval()
    with torch.inference_mode():
        given = {key: torch.tensor(value) for key, value in inputs.items()}
        found[name] = model(**given)[0].tolist()
assert not any(name == "blr" or name.startswith("blr.") for name, m in sys.modules.items() if m)
print(json.dumps(found))
"""
)


def case(number: int, name: str, method: str) -> Any:
    """A diagonal of the table runs everywhere, of one family of those that are alike."""
    diagonal = list(METHODS)[number % len(METHODS)] == method
    marks = [] if diagonal and name not in KIN else [pytest.mark.slow]
    return pytest.param(name, method, id=f"{name}-{method}", marks=marks)


CASES = [case(number, name, method) for number, name in enumerate(FAMILIES) for method in METHODS]


def auto_class(name: str) -> str:
    architecture = {**MODELS, **MORE}[name][2]
    return next(auto for suffix, auto in AUTO.items() if architecture.endswith(suffix))


def given(model: Any) -> dict[str, torch.Tensor]:
    found = inputs_for(model)
    return {**found, "decoder_input_ids": found["input_ids"]} if is_pair(model) else found


def is_pair(model: Any) -> bool:
    return bool(model.config.is_encoder_decoder)


def results(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model.eval()(**given(model))[0]


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def dense(work: Path, name: str) -> Path:
    return shared(work / "dense" / name, lambda folder: save_pico(name, folder))


def compressed(work: Path, name: str, method: str) -> Path:
    source = dense(work, name)
    return shared(work / method / name, lambda folder: compress_to(source, folder, **METHODS[method]))


def rebuilt(work: Path, name: str, method: str) -> Any:
    """The native model with every compressed weight replaced by the product of its factors."""
    source, output = dense(work, name), compressed(work, name, method)
    recipe = make_recipe(**METHODS[method])
    model = getattr(transformers, auto_class(name)).from_pretrained(source)
    modules, plan = dict(model.named_modules()), make_plan(open_source(source), recipe)
    names = [planned.layer.module for planned in plan.layers]
    for experts, stacks in stacks_apart(model, names).items():
        parts = Experts(modules[experts], stacks).named_modules()  # of the memory of the stack
        modules |= {f"{experts}.{name}": part for name, part in parts}
    with safe_open(output / "model.safetensors", "pt") as stored, torch.no_grad():
        for planned in plan.layers:
            spec, module = planned.spec, planned.layer.module
            tensors = {name: stored.get_tensor(f"{module}.{name}") for name in spec.stored()}
            weight = restored(spec, tensors, torch.float64).float()
            target = modules[module_names(model, [module])[module]].weight
            target.copy_(weight.T if planned.layer.transposed and not planned.layer.stack else weight)
    return model


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all processes of the run share."""
    base = tmp_path_factory.getbasetemp()
    return (base.parent if base.name.startswith("popen-") else base) / "round-trips"


@pytest.fixture(scope="module")
def remote(work: Path, request: pytest.FixtureRequest) -> dict[str, Any]:
    """What the selected cases compute in a process where blr is hidden, by name."""
    items = [item for item in request.session.items if item.module is request.module]
    names = [tuple(item.callspec.params.values()) for item in items if "method" in item.callspec.params]

    def make(path: Path) -> None:
        cases = {f"{name}-{method}": remote_case(work, name, method) for name, method in names}
        asked = path.with_suffix(".asked")
        asked.write_text(json.dumps(cases))
        environment = {**os.environ, "HF_HOME": str(path.with_suffix(".home"))}
        done = bare.run(REMOTE, asked, env=environment)
        assert done.returncode == 0, done.stderr
        path.write_text(done.stdout.splitlines()[-1])

    return json.loads(shared(work / "remote.json", make).read_text())


def remote_case(work: Path, name: str, method: str) -> tuple[str, str, dict[str, Any]]:
    folder, auto = compressed(work, name, method), auto_class(name)
    model = getattr(transformers, auto).from_pretrained(folder)
    return auto, str(folder), {key: value.tolist() for key, value in given(model).items()}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "method"), CASES)
def test_round_trip(name: str, method: str, work: Path, remote: dict[str, Any], tmp_path: Path) -> None:
    output, auto = compressed(work, name, method), getattr(transformers, auto_class(name))
    model = auto.from_pretrained(output)
    assert any(isinstance(module, Replaced) for module in model.modules())
    found = results(model)
    assert relative(found, results(rebuilt(work, name, method))) < CLOSE
    assert relative(torch.tensor(remote[f"{name}-{method}"]), found) < CLOSE
    model.save_pretrained(tmp_path / "saved")
    assert relative(results(auto.from_pretrained(tmp_path / "saved")), found) == 0
    exported = export_to(tmp_path / "saved", tmp_path / "exported")
    assert relative(results(load_written(exported)), found) < CLOSE
    for folder in (output, tmp_path / "saved", exported):
        assert verify_output(folder)["files"] > 2
