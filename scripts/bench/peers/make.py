"""Makes one peer's output: an ordinary folder of dequantized float32 weights, and peer.json beside it.

Usage: PYTHON make.py PACKAGE SIZE MODEL IDS OUT, where PYTHON is of an environment with the package, and
IDS a file of calibration tokens [n, w] that torch reads.
"""

from __future__ import annotations

import json
import sys
import time
from importlib.metadata import version
from pathlib import Path

import torch
from packages import PACKAGES, Task
from transformers import AutoModelForCausalLM, AutoTokenizer

GROUP = 64


def main(package: str, size: str, folder: str, ids: str, out: str) -> None:
    """Quantize, and write the folder `out`. Seconds count the package's own work alone."""
    gpu = torch.cuda.is_available()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    task = Task(model.to("cuda" if gpu else "cpu"), tokenizer, torch.load(ids), float(size), GROUP)
    numbers = sum(layer.weight.numel() for _, layer in task.layers())
    quantize, distribution = PACKAGES[package]
    start = time.perf_counter()
    found = quantize(task)
    seconds = time.perf_counter() - start
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name, weight in found.weights.items():
        model.get_submodule(name).weight.data = weight.cpu().float()
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    about = {
        "package": distribution,
        "version": version(distribution),
        "bits": 8 * found.stored / numbers,
        "seconds": seconds,
        "device": torch.cuda.get_device_name() if gpu else f"CPU, {torch.get_num_threads()} threads",
        "tokens": task.ids.numel(),
    }
    Path(out, "peer.json").write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
