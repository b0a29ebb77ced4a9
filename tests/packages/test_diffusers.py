"""diffusers loads what is made of its models: by itself, in a pipeline, and where it was saved again."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bare
import diffusers
import pytest
import torch
from diffusers_folders import WIDTH, save_diffusion
from exporting import compress_to

from blr.compressor.base.errors import InputError
from blr.compressor.base.progress import Progress
from blr.compressor.commands.compress import Settings, compress
from blr.compressor.loading.diffusion import load_diffusion, trial_inputs
from blr.compressor.loading.native import quiet_diffusers
from blr.compressor.loading.smoke_run import run
from blr.compressor.modeling.layers import StructuredLinear
from blr.compressor.recipe.schema import make_recipe

EXACT = {  # ranks and chains that hold any matrix of the models
    "svd": {"rank": WIDTH},
    "monarch": {"rank": WIDTH, "blocks": 1},
    "blast": {"rank": WIDTH, "blocks": 1},
}
LOSSY: dict[str, dict[str, Any]] = {
    **{"svd": {"cf": 1.3}, "monarch": {"blocks": 4}, "blast": {"blocks": 9, "rounds": 1}, "ks": {}},
    "dense": {"quantize": "int8"},
}
# Loads a folder where blr cannot be imported, saves what the model makes of an input
WITHOUT_BLR = (
    bare.without("blr")
    + """
import torch
from diffusers import AutoModel
folder, inputs, result = sys.argv[1:]
model = AutoModel.from_pretrained(folder, trust_remote_code=True)
with torch.no_grad():
    torch.save(model(**torch.load(inputs)).sample, result)
"""
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Copies of code go into a folder of the test's own."""
    monkeypatch.setattr("diffusers.utils.dynamic_modules_utils.HF_MODULES_CACHE", str(tmp_path / "code"))
    yield
    for name in [name for name in sys.modules if name.startswith("diffusers_modules")]:
        del sys.modules[name]


def loaded(folder: Path, **options: Any) -> Any:
    """As diffusers does by itself, which takes a path as a text only."""
    return diffusers.AutoModel.from_pretrained(str(folder), **options)


def computed(model: Any) -> torch.Tensor:
    return run(model, trial_inputs(model))


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("kind", ["dit", "pixart"])
@pytest.mark.parametrize("method", EXACT)
def test_factors_of_full_rank_compute_what_the_dense_model_does(
    method: str, kind: str, tmp_path: Path
) -> None:
    source = save_diffusion(tmp_path / kind, kind)
    output = compress_to(source, tmp_path / "out", method=method, **EXACT[method])
    dense = computed(loaded(source))
    model = loaded(output, trust_remote_code=True)
    assert type(model).__name__.startswith("Blr")
    assert distance(computed(model), dense) < 1e-4


@pytest.mark.parametrize("method", LOSSY)
def test_both_doors_compute_the_same(method: str, tmp_path: Path) -> None:
    source = save_diffusion(tmp_path / "dit", shards=2)
    output = compress_to(source, tmp_path / "out", method=method, **LOSSY[method])
    ours = load_diffusion(output, device="cpu")
    theirs = loaded(output, trust_remote_code=True)
    assert distance(computed(ours), computed(theirs)) < 1e-6  # ours by kernels
    assert any(isinstance(module, StructuredLinear) for module in ours.modules()) or method == "dense"
    half = load_diffusion(output, dtype="bfloat16", device="cpu")
    assert half.dtype == torch.bfloat16
    assert distance(computed(half), computed(ours)) < 0.05


def test_where_blr_is_not_installed(tmp_path: Path) -> None:
    output = compress_to(save_diffusion(tmp_path / "dit"), tmp_path / "out", method="blast", blocks=9)
    ours = load_diffusion(output, device="cpu")
    torch.save(trial_inputs(ours), tmp_path / "inputs.pt")
    given = {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1", "PATH": ""}
    given["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
    files = output, tmp_path / "inputs.pt", tmp_path / "result.pt"
    done = bare.run(WITHOUT_BLR, *files, cwd=tmp_path, env=given)
    assert done.returncode == 0, done.stderr
    assert distance(torch.load(tmp_path / "result.pt"), computed(ours)) < 1e-6


def test_the_native_class_refuses(tmp_path: Path) -> None:
    """It would take random weights for those that are not there."""
    output = compress_to(save_diffusion(tmp_path / "dit"), tmp_path / "out", method="svd")
    with pytest.raises(ValueError, match="blr"):
        diffusers.DiTTransformer2DModel.from_pretrained(output)
    with pytest.raises(ValueError, match="trust_remote_code"):
        loaded(output)


def test_a_pipeline_is_saved_and_loaded_again(tmp_path: Path) -> None:
    output = compress_to(save_diffusion(tmp_path / "dit"), tmp_path / "out", method="svd")
    model = loaded(output, trust_remote_code=True)
    vae = diffusers.AutoencoderKL(block_out_channels=(32,), latent_channels=4)
    made = diffusers.DiTPipeline(transformer=model, vae=vae, scheduler=diffusers.DDIMScheduler())
    made.save_pretrained(tmp_path / "pipe")
    pipe = diffusers.DiTPipeline.from_pretrained(tmp_path / "pipe", trust_remote_code=True)
    assert torch.equal(computed(pipe.transformer), computed(model))
    pipe.set_progress_bar_config(disable=True)
    (image,) = pipe([1], num_inference_steps=2, output_type="np").images
    assert image.shape[-1] == 3
    saved = json.loads((tmp_path / "pipe" / "transformer" / "config.json").read_bytes())
    assert saved["blr"] == json.loads((output / "config.json").read_bytes())["blr"]


def test_older_names_are_the_class_of_today(tmp_path: Path) -> None:
    source = save_diffusion(tmp_path / "dit", _class_name="Transformer2DModel")
    output = compress_to(source, tmp_path / "out", method="svd", rank=WIDTH)
    dense = loaded(source)
    assert type(dense) is diffusers.DiTTransformer2DModel
    assert distance(computed(load_diffusion(output, device="cpu")), computed(dense)) < 1e-4


def test_weights_of_another_class(tmp_path: Path) -> None:
    source = save_diffusion(tmp_path / "dit", attention_bias=False)
    with pytest.raises(InputError, match="unexpected keys"):
        compress(source, make_recipe(), tmp_path / "out", Settings("dit"), Progress(quiet=True))


@pytest.mark.parametrize("bars", [True, False])
def test_what_diffusers_says_is_what_it_said_before(bars: bool) -> None:
    from diffusers.utils import logging

    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    try:
        logging.set_verbosity_info()
        (logging.enable_progress_bar if bars else logging.disable_progress_bar)()
        with quiet_diffusers():
            inside = logging.get_verbosity(), logging.is_progress_bar_enabled()
        assert inside == (logging.ERROR, False)
        assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == (logging.INFO, bars)
    finally:
        logging.set_verbosity(before[0])
        (logging.enable_progress_bar if before[1] else logging.disable_progress_bar)()
