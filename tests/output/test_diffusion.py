"""Models of diffusers, where that is not installed: planned, compressed, verified, refused in a line.

What diffusers itself makes of the folders is in tests/packages/test_diffusers.py.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers_folders import CONFIGS, LAYERS, LINEAR, save_diffusion, state_of
from safetensors.torch import load_file

from blr.compressor.base.errors import CapabilityError, InputError
from blr.compressor.base.progress import Progress
from blr.compressor.checkpoint.source import open_source
from blr.compressor.commands.compress import Settings, compress
from blr.compressor.commands.inspect import inspect_output
from blr.compressor.commands.verify import verify_output
from blr.compressor.loading.checked import open_checked
from blr.compressor.loading.resolve import resolve_model
from blr.compressor.modeling.layers import layer_of
from blr.compressor.planning.plan import make_plan
from blr.compressor.recipe.schema import make_recipe
from blr.compressor.structures.specs import spec_from_dict

pytestmark = pytest.mark.fast
STEM = "diffusion_pytorch_model"
METHODS: dict[str, dict[str, Any]] = {
    "svd": {"cf": 1.2},
    "monarch": {"blocks": 4},
    "blast": {"cf": 1.2, "blocks": 9, "rounds": 1},
    "ks": {},
    "dense": {"quantize": "int8"},
}


@pytest.fixture(autouse=True)
def absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without diffusers, also where it is installed."""
    monkeypatch.setitem(sys.modules, "diffusers", None)
    monkeypatch.setattr("blr.compressor.output.check.find_spec", lambda _: None)


def compressed(source: Path, output: Path, *, check: bool = False, **settings: Any) -> Path:
    """`source` compressed; returns `output`."""
    options = {key: settings.pop(key) for key in ("max_shard_size", "allow_pickle") if key in settings}
    given = Settings(source.name, check=check, **options)
    compress(source, make_recipe(**settings), output, given, Progress(quiet=True))
    return output


@pytest.mark.parametrize("kind", CONFIGS)
def test_every_linear_layer_of_the_blocks_is_planned(kind: str, tmp_path: Path) -> None:
    source = open_checked(save_diffusion(tmp_path / kind, kind))
    plan = make_plan(source, make_recipe(method="svd", cf=2.0))
    expected = {f"transformer_blocks.{n}.{name}" for n in range(LAYERS) for name in LINEAR[kind]}
    assert {planned.layer.module for planned in plan.layers} == expected


@pytest.mark.parametrize("method", METHODS)
def test_what_is_written(method: str, tmp_path: Path) -> None:
    """Every tensor has its place; what replaces a weight computes about what it did."""
    source = save_diffusion(tmp_path / "dit", shards=2)
    output = compressed(source, tmp_path / "out", method=method, **METHODS[method])
    config, state = json.loads((output / "config.json").read_bytes()), state_of("dit")
    assert config["auto_map"] == {"AutoModel": "diffusion_blr.BlrDiTTransformer2DModel"}
    assert config["_class_name"] == "BlrDiTTransformer2DModel"
    written = load_file(output / f"{STEM}.safetensors")
    for module, fields in config["blr"]["layers"].items():
        layer = layer_of(spec_from_dict(fields), bias=True)
        found = {n.removeprefix(f"{module}."): written.pop(n) for n in layer_keys(written, module)}
        layer.load_state_dict(found)
        weight, x = state.pop(f"{module}.weight"), torch.eye(layer.in_features)
        error = (layer(x) - layer.bias - weight.T).norm() / weight.norm()
        assert error < (0.01 if method == "dense" else 0.9)
        assert torch.equal(found["bias"], state.pop(f"{module}.bias"))
    assert written.keys() == state.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in state.items())
    assert verify_output(output)["ok"]
    assert len(inspect_output(output)["layers"]) == LAYERS * len(LINEAR["dit"])


def layer_keys(state: dict[str, Any], module: str) -> list[str]:
    return [name for name in state if name.startswith(f"{module}.")]


def test_shards_are_named_as_diffusers_does(tmp_path: Path) -> None:
    source = save_diffusion(tmp_path / "pixart", "pixart", shards=3)
    output = compressed(source, tmp_path / "out", max_shard_size=300_000)
    names = sorted(path.name for path in output.glob("*.safetensors"))
    assert len(names) > 1
    assert names == [f"{STEM}-{n:05d}-of-{len(names):05d}.safetensors" for n in range(1, len(names) + 1)]
    index = json.loads((output / f"{STEM}.safetensors.index.json").read_bytes())
    assert sorted(set(index["weight_map"].values())) == names
    assert "AutoModel.from_pretrained" in (output / "README.md").read_text()
    assert "library_name: diffusers" in (output / "README.md").read_text()
    assert verify_output(output)["ok"]


def test_older_folders(tmp_path: Path) -> None:
    """Pickled weights, and a class that diffusers gave another name since."""
    folder = save_diffusion(tmp_path / "dit", _class_name="Transformer2DModel")
    torch.save(load_file(folder / f"{STEM}.safetensors"), folder / f"{STEM}.bin")
    (folder / f"{STEM}.safetensors").unlink()
    with pytest.raises(InputError, match=rf"only pickled weights \({STEM}.bin\)"):
        compressed(folder, tmp_path / "out")
    output = compressed(folder, tmp_path / "out", allow_pickle=True)
    assert open_source(output).model_type == "BlrDiTTransformer2DModel"
    with pytest.raises(InputError, match="already compressed"):
        compressed(output, tmp_path / "again")


def test_a_pipeline_is_its_transformer(tmp_path: Path) -> None:
    inner = save_diffusion(tmp_path / "pipe" / "transformer")
    (tmp_path / "pipe" / "model_index.json").write_text('{"_class_name": "DiTPipeline"}')
    found = resolve_model(str(tmp_path / "pipe"))
    assert (found.folder, found.name) == (inner, "pipe")


def test_its_check_needs_diffusers(tmp_path: Path) -> None:
    with pytest.raises(CapabilityError, match=r"pip install 'blr-compress\[diffusers\]'.*--no-check"):
        compressed(save_diffusion(tmp_path / "dit"), tmp_path / "out", check=True)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"_class_name": "FluxTransformer2DModel"}, "no table in configs/; expected .*PixArt"),
        ({"_class_name": ["a", "b"]}, "the name of one model class"),
        ({"_class_name": "../evil"}, "the name of one model class"),
        ({"sample_size": 1 << 20}, "at most 1024"),
        ({"attention_head_dim": 40}, "by config.json"),
        ({"num_layers": 3}, "by config.json"),
        ({"quantization_config": {"quant_method": "x"}}, "expected a dense checkpoint"),
    ],
)
def test_what_is_no_such_model(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        compressed(save_diffusion(tmp_path / "dit", **changed), tmp_path / "out")


@pytest.mark.parametrize("option", [{"calibration": "self"}, {"heal": 1.0}])
def test_options_that_read_text(option: dict[str, Any], tmp_path: Path) -> None:
    source = save_diffusion(tmp_path / "dit")
    settings = Settings("dit", check=False, **option)
    with pytest.raises(InputError, match="a model of diffusers; --text and --heal take models"):
        compress(source, make_recipe(), tmp_path / "out", settings, Progress(quiet=True))
