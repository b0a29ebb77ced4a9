"""One process of those that hold a model together: what it computes, beside the whole model."""

from __future__ import annotations

import json
import os

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from transformers.utils import logging

from blr.compressor import register
from blr.compressor.modeling.layers import StructuredLinear
from blr.compressor.modeling.modeling_blr import Pair

register()


def main(folder: str) -> None:
    """Print it as JSON; where the others are is in the environment, as torchrun has it."""
    dist.init_process_group("gloo")
    logging.disable_progress_bar()
    split = DistributedConfig(tp_size=int(os.environ["WORLD_SIZE"]))
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=split).eval()
    whole = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = torch.arange(2, 26)[None]
    with torch.no_grad():
        expected, found = whole(ids).logits, model(ids).logits
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    tokens = [m.generate(ids, **options).tolist() for m in (whole, model)]
    layers, complete = (
        [m for m in found.modules() if isinstance(m, StructuredLinear | Pair)]
        for found in (model, whole)
    )
    held = sum(getattr(p, "_local_tensor", p).numel() for m in layers for p in m.parameters())
    result = {
        "distance": float((found - expected).norm() / expected.norm()),
        "same tokens": tokens[0] == tokens[1],
        "share": held / sum(p.numel() for m in complete for p in m.parameters()),
        "trains": any(p.requires_grad for m in layers for p in m.parameters()),
    }
    dist.destroy_process_group()
    os.write(1, f"{json.dumps(result)}\n".encode())  # at once: the others write there too
