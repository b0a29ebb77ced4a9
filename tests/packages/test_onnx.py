"""ONNX graphs of every structure, by both exporters, in onnxruntime at sizes that were not traced."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from exporting import compress_to
from pico import MODELS, VOCAB, save_model
from running import Invoke
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM

from blr.compressor import register

register()

METHODS = {"svd": {}, "monarch": {"blocks": 4}, "blast": {"blocks": 4, "rounds": 1}, "ks": {}}
CLASSES: dict[str, Any] = {"bert": AutoModel, "llama": AutoModelForCausalLM}
NAMES = ["input_ids", "attention_mask"]
ERROR = 3.5e-5


class FirstResult(nn.Module):
    """A model as a function of ids and mask."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Logits or hidden states [B, T, …]."""
        return self.model(input_ids=input_ids, attention_mask=attention_mask)[0]


@pytest.fixture(scope="module")
def compressed(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    """Pico models of one layer, for a trace takes its time, by family and method."""
    folder = tmp_path_factory.mktemp("compressed")
    for name in CLASSES:
        source, (config, settings, cls) = folder / name / "dense", MODELS[name]
        save_model(config, {**settings, "num_hidden_layers": 1}, cls, source)
        for method, options in METHODS.items():
            compress_to(source, folder / name / method, method=method, cf=1.5, **options)
    return {(name, method): folder / name / method for name in CLASSES for method in METHODS}


def computed(path: Path, inputs: dict[str, Tensor]) -> Tensor:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    given = {name: tensor.numpy() for name, tensor in inputs.items()}
    return torch.from_numpy(session.run(None, given)[0])


def inputs_of(rows: int, tokens: int) -> dict[str, Tensor]:
    ids = torch.randint(2, VOCAB, (rows, tokens), generator=torch.Generator().manual_seed(rows))
    return dict(zip(NAMES, (ids, torch.ones_like(ids)), strict=True))


# Both exporters for one structure of each family, the cheap one for the others; export goes further.
CASES = [(name, method, False) for name in CLASSES for method in METHODS]


@pytest.mark.parametrize(("name", "method", "dynamo"), [*CASES, ("bert", "svd", True)])
def test_a_users_own_export(
    name: str, method: str, dynamo: bool, compressed: dict[tuple[str, str], Path], tmp_path: Path
) -> None:
    folder = compressed[name, method]
    model = FirstResult(CLASSES[name].from_pretrained(folder, use_cache=False)).eval()
    axes = {key: {0: "batch", 1: "tokens"} for key in [*NAMES, "y"]}
    shapes = {key: {0: torch.export.Dim("b"), 1: torch.export.Dim("t", max=64)} for key in NAMES}
    free = {"dynamic_shapes": shapes} if dynamo else {"dynamic_axes": axes}
    traced = tuple(inputs_of(2, 12).values())
    with torch.no_grad(), warnings.catch_warnings(action="ignore"):
        names = {"input_names": NAMES, "output_names": ["y"]}
        torch.onnx.export(model, traced, str(tmp_path / "graph"), dynamo=dynamo, **names, **free)
        inputs = inputs_of(3, 19)
        assert (computed(tmp_path / "graph", inputs) - model(**inputs)).abs().max() < ERROR


@pytest.mark.parametrize(("name", "method"), [("llama", "blast"), ("llama", "ks"), ("bert", "monarch")])
def test_blr_export_as_onnx(
    name: str,
    method: str,
    compressed: dict[tuple[str, str], Path],
    tmp_path: Path,
    invoke: Invoke,
) -> None:
    """Checked by the command, verified like every output, and without paths of this machine."""
    source, output = compressed[name, method], tmp_path / "out"
    assert invoke("export", source, "-o", output, "--as", "onnx", "--quiet")[::2] == (0, "")
    assert invoke("verify", output)[0] == 0 and "model.onnx" in (output / "README.md").read_text()
    model = CLASSES[name].from_pretrained(source).eval()
    with torch.no_grad():
        inputs = inputs_of(3, 19)
        assert (computed(output / "model.onnx", inputs) - model(**inputs)[0]).abs().max() < ERROR
    assert str(Path(torch.__file__).parent).encode() not in (output / "model.onnx").read_bytes()


def test_a_graph_that_computes_something_else_is_refused(
    compressed: dict[tuple[str, str], Path],
    tmp_path: Path,
    invoke: Invoke,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = onnxruntime.InferenceSession.run
    monkeypatch.setattr(onnxruntime.InferenceSession, "run", lambda *a: [1.01 * y for y in run(*a)])
    arguments = ("export", compressed["bert", "svd"], "-o", tmp_path / "out", "--as", "onnx")
    code, out, err = invoke(*arguments, "--quiet")
    assert (code, out, err.count("\n")) == (9, "", 1) and "is off by" in err
    assert not (tmp_path / "out").exists()
