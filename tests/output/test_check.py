"""Success is said only of what was run: outputs are loaded and compared before they are committed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from exporting import compress_to, export_to
from fresh import blr
from pico import save_model, save_pico

from blr.compressor.base.errors import BlrError, NumericsError, OutputError
from blr.compressor.base.progress import Progress
from blr.compressor.checkpoint.source import open_source
from blr.compressor.commands.compress import Settings, Summary, compress
from blr.compressor.loading import loader
from blr.compressor.loading.smoke_run import first_trial
from blr.compressor.modeling.layers import StructuredLinear
from blr.compressor.output import check
from blr.compressor.recipe.schema import make_recipe

pytestmark = pytest.mark.fast


def compressed(source: Path, output: Path, **settings: Any) -> Summary:
    given = Settings("pico", **settings)
    recipe = make_recipe(method="svd", cf=1.5)
    return compress(source, recipe, output, given, Progress(quiet=True))


@pytest.mark.parametrize("name", ["llama", "t5", "vit", "mixtral"])
def test_the_distance_is_that_of_the_written_model(name: str, tmp_path: Path) -> None:
    found = compressed(save_pico(name, tmp_path / "dense"), tmp_path / "out").check
    assert found is not None and 0.01 < found["distance"] < 2
    trial = first_trial(loader.streamed_model(open_source(tmp_path / "dense")), "dense")
    distance = trial.distance(loader.load_written(tmp_path / "out"), "out")
    assert (found["ran"], found["distance"]) == (trial.what, pytest.approx(distance, rel=1e-4))


def fails(layer: StructuredLinear, x: torch.Tensor, bias: Any) -> torch.Tensor:
    raise RuntimeError("this layer does not run")


def overflows(layer: StructuredLinear, x: torch.Tensor, bias: Any) -> torch.Tensor:
    return torch.full((*x.shape[:-1], layer.out_features), torch.nan)


@pytest.mark.parametrize(
    ("product", "error", "said"),
    [(fails, OutputError, "this layer does not run"), (overflows, NumericsError, "NaN")],
)
def test_nothing_is_committed_of_what_does_not_run(
    product: Any, error: type[BlrError], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, output = save_pico("llama", tmp_path / "dense"), tmp_path / "out"
    with monkeypatch.context() as patched:
        patched.setattr(StructuredLinear, "product", product)
        with pytest.raises(error, match=rf"{said}.*--no-check"):
            compressed(source, output)
        assert not output.exists()
        assert compressed(source, tmp_path / "unchecked", check=False).check is None
    assert compressed(source, output).check is not None  # goes on where the failed run stopped


def test_an_export_that_does_not_run_is_not_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = compress_to(save_pico("bert", tmp_path / "dense"), tmp_path / "svd", method="svd")
    door = check.door_of(open_source(source))

    def then_break(model: Any, where: object) -> Any:
        made = first_trial(model, where)
        monkeypatch.setattr(StructuredLinear, "product", fails)
        return made

    monkeypatch.setattr(check, "door_of", lambda _: replace(door, trial=then_break))
    with pytest.raises(OutputError, match="does not run"):
        export_to(source, tmp_path / "out", check=True)
    assert not (tmp_path / "out").exists()
    export_to(source, tmp_path / "out", check=False)


@pytest.mark.parametrize("options", [{}, {"quantize": "int8"}, {"kind": "dense"}])
def test_large_outputs_run_block_by_block(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense = save_pico("llama", tmp_path / "dense")
    source = compress_to(dense, tmp_path / "ks", method="ks")
    monkeypatch.setattr(loader, "WHOLE", 0)
    trial = first_trial(loader.streamed_model(open_source(source)), source)
    folder = export_to(source, tmp_path / "out", check=True, **options)
    model = loader.load_written(folder)
    layers = model.model.layers
    assert trial.distance(model, folder) < (0.1 if options.get("quantize") else 1e-4)
    assert all(tensor.is_meta for tensor in layers.state_dict().values())


def test_what_the_command_says(tmp_path: Path) -> None:
    sizes = {"context_length": 32, "patch_length": 8, "d_model": 32, "ffn_dim": 32}
    save_model("PatchTSTConfig", sizes, "PatchTSTForPrediction", tmp_path / "dense")
    asked = ("compress", tmp_path / "dense", "-o", tmp_path / "out", "--format", "json", "-q")
    with pytest.raises(RuntimeError, match=r"exit code 4: .*'past_values' is known.*--no-check"):
        blr(*asked)
    assert not (tmp_path / "out").exists()
    assert json.loads(blr(*asked, "--no-check").out)["check"] is None
    save_pico("distilbert", tmp_path / "other")
    said = blr("compress", tmp_path / "other", "-o", tmp_path / "text", "-q").out
    assert "loaded and run on 16 tokens, " in said
