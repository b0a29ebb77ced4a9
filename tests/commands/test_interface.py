"""The public interface: what the commands do, as functions that are imported from `blr.compressor`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import bare
import pytest
import torch
from heal_models import save_dense, write_text
from pico import save_pico
from running import Invoke

from blr.compressor import Recipe, compress, evaluate, export, heal, load
from blr.compressor.base.errors import InputError, OutputError, UsageError
from blr.compressor.workspace.manifest import read_manifest, verify_files

NAMES = "Recipe, compress, evaluate, export, heal, load, register"


def test_from_a_dense_model_to_figures_of_its_export(tmp_path: Path, invoke: Invoke) -> None:
    dense, text = save_dense(tmp_path / "dense"), write_text(tmp_path / "text.txt")
    small, healed, fast = (tmp_path / name for name in ("small", "healed", "fast"))
    recipe = Recipe(method="svd", cf=1.25, seq_len=16)
    made = compress(dense, small, recipe, calibration=text, effort="quick", cf=1.5, samples=8)
    assert made is not None and made.cf == pytest.approx(1.5, rel=0.1) and made.output == str(small)
    trained = heal(small, healed, data=text, mix=0.0, steps=2, window=16, batch=64, device="cpu")
    assert trained is not None and trained.steps == 2
    exported = export(healed, fast, check=False)
    assert exported.layers == made.layers
    for folder in (small, healed, fast):
        assert verify_files(folder, read_manifest(folder)) == []
    model = load(healed)
    with torch.no_grad():
        assert model(torch.arange(8)[None]).logits.isfinite().all()
    found = evaluate(healed, text, window=16, max_tokens=64)
    assert found["perplexity"] > 1 and found["checkpoint"]["name"] == "healed"
    code, out, err = invoke(
        *("eval", healed, "--text", text, "--window", 16, "--max-tokens", 64, "--format", "json", "-q")
    )
    assert code == 0 and f'"perplexity": {found["perplexity"]}' in out, err


def test_what_is_wrong_is_an_error_of_its_kind(tmp_path: Path) -> None:
    dense = save_pico("llama", tmp_path / "dense")
    with pytest.raises(UsageError, match="--refit 2: nothing would use it"):
        compress(dense, tmp_path / "out", refit=2)
    with pytest.raises(UsageError, match="--effort some: expected one of quick, normal, best"):
        compress(dense, tmp_path / "out", effort="some", calibration="self")
    with pytest.raises(UsageError, match="--effort best: nothing would use it"):
        compress(dense, tmp_path / "out", effort="best")
    with pytest.raises(OutputError, match="the model itself"):
        compress(dense, dense)
    with pytest.raises(UsageError, match="--window is 4, expected a number of at least 8"):
        heal(dense, tmp_path / "out", window=4)
    with pytest.raises(InputError, match="no such folder"):
        load(tmp_path / "nothing")
    with pytest.raises(InputError, match="an empty name: no such file"):
        compress(dense, tmp_path / "out", calibration="")
    assert [path.name for path in tmp_path.iterdir()] == ["dense"]


@pytest.mark.parametrize(
    ("call", "found", "expected"),
    [
        (compress, {"threads": "2"}, "threads is '2', expected it to be a valid integer"),
        (compress, {"threads": 0}, "--threads is 0, expected a number of at least 1 and at most 1024"),
        (compress, {"device": torch.device("cpu")}, "device is .*a valid string"),
        (compress, {"overwrite": "no"}, "overwrite is 'no', expected it to be a valid boolean"),
        (compress, {"heal": "3"}, "--heal is '3', expected it to be a valid number"),
        (heal, {"steps": True}, "steps is True, expected it to be a valid integer"),
        (heal, {"rate": "fast"}, "rate is 'fast', expected it to be a valid number"),
        (heal, {"vary": 1.0}, "--vary is 1, expected a number of at least 0 and below 1"),
        (export, {"kind": None}, "a valid string"),
        (export, {"text": 5}, "text is 5, expected a path"),
    ],
)
def test_values_of_another_type_are_refused(
    call: Callable[..., object], found: dict[str, object], expected: str, tmp_path: Path
) -> None:
    """Before anything is read or written; what an option would refuse, too."""
    with pytest.raises(UsageError, match=expected):
        call(tmp_path / "dense", tmp_path / "out", **found)
    assert not any(tmp_path.iterdir())


def test_an_encoder_loads_as_what_it_is(tmp_path: Path) -> None:
    assert type(load(save_pico("bert", tmp_path / "dense"))).__name__ == "BertModel"


def test_importing_the_package_loads_next_to_nothing() -> None:
    code = (
        "import sys, blr.compressor; print(*{'torch', 'pydantic', 'typer', 'typing'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"


def test_names_come_whatever_was_imported_before() -> None:
    """Folders and modules of the package have other names."""
    code = f"""
import blr.compressor.commands.compress, blr.compressor.commands.evaluate, blr.compressor.commands.heal
import blr.compressor.exporting.job, blr.compressor.loading.load
from blr.compressor import {NAMES}
assert all(map(callable, ({NAMES})))
"""
    assert (done := bare.run(code)).returncode == 0, done.stderr


def test_nothing_is_registered_before_it_is_asked_for(tmp_path: Path) -> None:
    """A script of an earlier version, which imports the models alone, goes on loading outputs."""
    compress(save_pico("llama", tmp_path / "dense"), tmp_path / "out", method="svd", cf=1.5, force=True)
    code = """
import sys
before = list(sys.meta_path)
import blr.compressor
assert sys.meta_path == before and "transformers" not in sys.modules
from transformers import AutoModelForCausalLM
try:
    AutoModelForCausalLM.from_pretrained(sys.argv[1])
except ValueError as error:
    assert "trust_remote_code=True" in str(error), error
else:
    raise AssertionError
kinds = [type(AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True))]
import blr.compressor.modeling
blr.compressor.register()
kinds.append(type(AutoModelForCausalLM.from_pretrained(sys.argv[1])))
print(*(kind.__module__.partition(".")[0] for kind in kinds))
"""
    done = bare.run(code, tmp_path / "out", env={"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-2:] == ["transformers_modules", "blr"]
