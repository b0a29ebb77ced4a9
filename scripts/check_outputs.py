"""Checks outputs of `blr compress` against their source: both doors, logits, cache, tokenizer.

    python scripts/check_outputs.py SOURCE OUTPUT... --without-blr PYTHON

PYTHON is the interpreter of an environment that has torch and transformers but not blr. Prints a
row an output and exits 1 if any check fails.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file

import blr.compressor.modeling  # noqa: F401
from blr.compressor.checkpoint.source import open_source
from blr.compressor.finish import token_ids
from blr.compressor.inspect import inspect_output
from blr.compressor.modeling.modeling_blr import module_name
from blr.compressor.structures import family
from blr.compressor.structures.specs import spec_from_dict

DOOR = """
import json, sys
try:
    import blr
    sys.exit("this environment has blr")
except ImportError:
    pass
import torch, transformers
folder, task, inputs = sys.argv[1], sys.argv[2], torch.load(sys.argv[3])
cls = getattr(transformers, task)
model = cls.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32).eval()
with torch.inference_mode():
    torch.save(model(**inputs)[0], sys.argv[3])
"""


def dense_twin(source: Path, output: Path, task: str) -> torch.nn.Module:
    """The native model with each compressed weight replaced by the product of its stored factors."""
    model = getattr(transformers, task).from_pretrained(source, dtype=torch.float32).eval()
    modules = dict(model.named_modules())
    stored = {k: v for f in sorted(output.glob("*.safetensors")) for k, v in load_file(f).items()}
    for name, fields in json.loads((output / "config.json").read_text())["blr"]["layers"].items():
        spec = spec_from_dict(fields)
        factors = {s: stored[f"{name}.{s}"].double() for s in spec.shapes()}
        weight = family(spec.structure).reconstruct(factors, spec).float()
        target = modules[module_name(model, name)].weight
        conv1d = model.config.model_type == "gpt2"  # keeps its weights [in, out]
        target.data = weight.T.contiguous() if conv1d else weight
    return model


def sample_inputs(config: transformers.PretrainedConfig) -> dict[str, torch.Tensor]:
    """A batch that a model of this configuration accepts."""
    torch.manual_seed(0)
    if hasattr(config, "image_size"):
        size = config.image_size
        return {"pixel_values": torch.randn(2, config.num_channels, size, size)}
    return {"input_ids": torch.randint(5, config.vocab_size, (2, 64))}


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def second_door(python: str, output: Path, task: str, inputs: dict) -> torch.Tensor:
    """First output of the model loaded without blr, in a process of that environment."""
    exchange = output.parent / f"{output.name}.exchange.pt"
    torch.save(inputs, exchange)
    subprocess.run([python, "-c", DOOR, str(output), task, str(exchange)], check=True)
    found = torch.load(exchange)
    exchange.unlink()
    return found


def check(source: Path, output: Path, task: str, python: str, cf: float | None) -> dict[str, object]:
    """Every figure of one output."""
    model = getattr(transformers, task).from_pretrained(output, dtype=torch.float32).eval()
    inputs = sample_inputs(model.config)
    with torch.inference_mode():
        first = model(**inputs)[0]
        twin = dense_twin(source, output, task)(**inputs)[0]
    row = {"output": output.name, "cf": round(inspect_output(output)["cf"], 4)}
    row["logits"] = relative(first, twin)
    row["second_door"] = relative(second_door(python, output, task, inputs), first)
    row["tokenizer"] = (token_ids(source) or (0, 0))[1] == (token_ids(output) or (0, 0))[1]
    row["cache"] = not model.can_generate() or cache_is_consistent(model, inputs["input_ids"][:1, :16])
    close = cf is None or abs(row["cf"] / cf - 1) < 0.02
    good = row["logits"] < 1e-4 and row["second_door"] < 1e-6
    row["pass"] = bool(good and close and row["tokenizer"] and row["cache"])
    return row


def cache_is_consistent(model: torch.nn.Module, prompt: torch.Tensor) -> bool:
    """Greedy generation with the cache equals generation without."""
    options = {"max_new_tokens": 32, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    runs = [model.generate(prompt, use_cache=cached, **options) for cached in (True, False)]
    return torch.equal(*runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("outputs", type=Path, nargs="+")
    parser.add_argument("--without-blr", required=True, metavar="PYTHON")
    parser.add_argument("--task", default="AutoModelForCausalLM")
    parser.add_argument("--cf", type=float, help="the factor that was asked for")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    open_source(arguments.source)
    passed = True
    for output in arguments.outputs:
        row = check(arguments.source, output, arguments.task, arguments.without_blr, arguments.cf)
        print(json.dumps(row), flush=True)
        passed &= bool(row["pass"])
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
