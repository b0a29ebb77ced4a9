"""`blr export --as dense`: an ordinary checkpoint that computes what the structured one does."""

from __future__ import annotations

import json
from pathlib import Path

import bare
import pytest
import torch
import transformers
from exporting import compress_to, export_to
from pico import inputs_for, save_pico
from running import Invoke
from tolerances import TOLERANCES
from transformers import AutoModelForCausalLM

from blr.compressor import register

register()

# Loads folders as a tool does that knows nothing of blr, and prints the class and the logits of each.
WITHOUT_BLR = (
    bare.without("blr")
    + """
import json
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
for folder in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(folder)("The protocol is", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        print(json.dumps([type(model).__name__, ids.tolist(), model(ids).logits.tolist()]))
"""
)


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def test_any_tool_loads_it_and_computes_the_same(sources: dict[str, Path], tmp_path: Path) -> None:
    """Of every structure, without blr: the class, the tokens, the logits."""
    methods = [name for name in sources if name != "dense"]
    dtype = {"dtype": "float32"}  # so that products are not rounded to the factors' dtype
    made = [export_to(sources[m], tmp_path / m, kind="dense", **dtype) for m in methods]
    done = bare.run(WITHOUT_BLR, *made, cwd=tmp_path)
    assert done.returncode == 0 and "custom code" not in done.stdout + done.stderr, done.stderr
    for method, line in zip(methods, done.stdout.splitlines(), strict=True):
        name, ids, logits = json.loads(line)
        model = AutoModelForCausalLM.from_pretrained(sources[method], dtype=torch.float64)
        with torch.no_grad():
            expected = model(torch.tensor(ids)).logits
        assert name == "LlamaForCausalLM"
        assert relative(torch.tensor(logits), expected) < 10 * TOLERANCES[torch.float32]  # of a model


@pytest.mark.parametrize(
    ("name", "auto"), [("gpt2", "AutoModelForCausalLM"), ("vit", "AutoModelForImageClassification")]
)
def test_weights_lie_as_the_family_stores_them(name: str, auto: str, tmp_path: Path) -> None:
    """Conv1D transposed, modules under their names on disk; shards as asked."""
    source = compress_to(save_pico(name, tmp_path / "dense"), tmp_path / "c", method="ks", cf=1.5)
    made = export_to(source, tmp_path / "out", kind="dense", max_shard_size=60_000)
    assert len(list(made.glob("*.safetensors"))) > 1 and not list(made.glob("*.py"))
    original, config = (json.loads((f / "config.json").read_bytes()) for f in (tmp_path / "dense", made))
    assert config == {**original, "architectures": config["architectures"]}
    found, expected = (getattr(transformers, auto).from_pretrained(f).eval() for f in (made, source))
    assert type(found).__module__.startswith("transformers.")
    with torch.no_grad():
        logits = [model(**inputs_for(model))[0] for model in (found, expected)]
    assert relative(logits[0], logits[1].double()) < 10 * TOLERANCES[torch.float32]


def test_the_commands_take_it(sources: dict[str, Path], tmp_path: Path, invoke: Invoke) -> None:
    arguments = ("-o", tmp_path / "out", "--as", "dense", "--quiet")
    code, out, err = invoke("export", sources["blast"], *arguments)
    assert (code, err) == (0, "") and "28 structured, made dense" in out
    assert invoke("verify", tmp_path / "out")[0] == 0
    again = (
        "compress",
        tmp_path / "out",
        "-o",
        tmp_path / "again",
        "--method",
        "svd",
        "--quiet",
        "--force",
    )
    assert invoke(*again)[0] == 0
