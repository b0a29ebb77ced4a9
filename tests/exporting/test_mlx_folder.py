"""`blr export --as mlx`: the bytes as MLX reads them, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from exporting import compress_to, export_to
from pico import MODELS, save_model
from running import Invoke
from safetensors.torch import load_file
from tolerances import TOLERANCES
from torch import Tensor

FORMATS: dict[str, dict[str, Any]] = {
    "int8": {"method": "dense", "quantize": "int8", "group": 64},
    "int4": {"method": "dense", "quantize": "int4"},  # 128 numbers a scale, of rows of 64
    "int3": {"method": "dense", "quantize": "int3", "group": 32},
    "int2": {"method": "dense", "quantize": "int2", "group": 32},
    "int2-4": {
        **{"method": "svd", "base": "int2", "group": 32, "rank": 2},
        "rules": [{"match": "*down_proj", "rank": 4}],
    },
}


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config, settings, cls = MODELS["llama"]
    settings = {**settings, "hidden_size": 64, "intermediate_size": 64}
    folder = tmp_path_factory.mktemp("dense")
    save_model(config, settings, cls, folder)
    return folder


def weight_of(tensors: dict[str, Tensor], module: str, bits: int, group: int) -> Tensor:
    """What MLX computes of a packed weight: field n of a row is its bits from n times `bits` on."""
    packed = tensors[f"{module}.weight"].contiguous().view(torch.uint8)
    inputs = packed.shape[1] * 8 // bits
    rows = [int.from_bytes(bytes(row), "little") for row in packed.tolist()]
    codes = [[row >> n * bits & 2**bits - 1 for n in range(inputs)] for row in rows]
    scales, biases = (
        tensors[f"{module}.{part}"].repeat_interleave(group, 1) for part in ("scales", "biases")
    )
    return torch.tensor(codes) * scales + biases


@pytest.mark.parametrize("name", FORMATS)
def test_it_holds_the_values_of_the_checkpoint(name: str, dense: Path, tmp_path: Path) -> None:
    """Every weight, with its correction where it has one; ranks of an adapter are filled up."""
    source = compress_to(dense, tmp_path / "source", **FORMATS[name])
    whole = load_file(export_to(source, tmp_path / "dense", kind="dense") / "model.safetensors")
    folder = export_to(source, tmp_path / "out", kind="mlx", check=False)
    tensors = load_file(folder / "model.safetensors")
    layers = json.loads((folder / "config.json").read_bytes())["quantization"]
    factors = load_file(folder / "adapters/adapters.safetensors") if name == "int2-4" else {}
    modules = [key for key, value in layers.items() if isinstance(value, dict)]
    assert len(modules) == 14
    for module in modules:
        found = weight_of(tensors, module, layers[module]["bits"], layers[module]["group_size"])
        if factors:
            a, b = (factors[f"{module}.lora_{part}"] for part in "ab")
            assert a.shape == (64, 4)
            found = found + (a @ b).mT
        expected = whole[f"{module}.weight"]
        assert float((found - expected).norm() / expected.norm()) < TOLERANCES[torch.float32], module


def test_rotary_positions_are_said_as_mlx_lm_reads_them(dense: Path, tmp_path: Path) -> None:
    """It takes 10,000 for most models that say it in `rope_parameters` alone."""
    config = json.loads((dense / "config.json").read_bytes())
    config["rope_parameters"] = {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}
    folder = shutil.copytree(dense, tmp_path / "scaled")
    (folder / "config.json").write_text(json.dumps(config))
    source = compress_to(folder, tmp_path / "source", **FORMATS["int4"])
    made = export_to(source, tmp_path / "out", kind="mlx", check=False)
    found = json.loads((made / "config.json").read_bytes())
    assert found["rope_theta"] == 500.0 and found["rope_scaling"] == config["rope_parameters"]


def test_what_mlx_has_no_form_of_is_refused(dense: Path, tmp_path: Path, invoke: Invoke) -> None:
    curved = compress_to(
        dense, tmp_path / "curved", method="dense", quantize="int3", grid="curved", group=32
    )
    code, _, err = invoke("export", curved, "-o", tmp_path / "out", "--as", "mlx")
    assert code == 2 and "--grid uniform" in err and err.count("\n") == 1
    config, settings, cls = MODELS["llama"]
    save_model(config, settings, cls, tmp_path / "narrow")  # 48 inputs of down_proj
    narrow = compress_to(tmp_path / "narrow", tmp_path / "odd", **FORMATS["int2"])
    code, _, err = invoke("export", narrow, "-o", tmp_path / "out", "--as", "mlx")
    assert code == 2 and "48 inputs, which 32 does not divide" in err
    code, out, _ = invoke(
        "export", narrow, "-o", tmp_path / "out", "--as", "mlx", "--dense-rest", "--no-check"
    )
    assert code == 0 and "2 of other form, made dense" in out


def test_a_sliding_window_is_told(tmp_path: Path, invoke: Invoke) -> None:
    """MLX has none in these model types, so that long texts are read otherwise."""
    config, settings, cls = MODELS["mistral"]
    save_model(config, {**settings, "intermediate_size": 64}, cls, tmp_path / "dense")
    source = compress_to(tmp_path / "dense", tmp_path / "source", **FORMATS["int2"])
    code, _, err = invoke("export", source, "-o", tmp_path / "out", "--as", "mlx", "--no-check")
    assert code == 0 and "they agree up to 16 tokens" in err
