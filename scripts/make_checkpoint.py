"""Writes a synthetic sharded checkpoint of a published shape: random bfloat16 weights, no download.

    python scripts/make_checkpoint.py 1b /tmp/llama-1b

For measuring memory and time; the weights mean nothing, and are others where there is a GPU. Spectra
fall as k^-0.5, as trained weights roughly do.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from blr.bench.models import known_models


def weight(rows: int, columns: int, generator: torch.Generator) -> torch.Tensor:
    """A random matrix [rows, columns] whose rows fall off in size."""
    where = generator.device
    drawn = torch.randn(rows, columns, generator=generator, device=where)
    sizes = 0.02 * torch.arange(1, rows + 1, device=where)[:, None] ** -0.25
    return (drawn * sizes).to(torch.bfloat16).cpu()


def layer(config: dict, n: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """The tensors of decoder layer `n`."""
    d, f, h = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * h, config["num_key_value_heads"] * h
    sizes = {"self_attn.q_proj": (q, d), "self_attn.k_proj": (kv, d), "self_attn.v_proj": (kv, d)}
    sizes |= {"self_attn.o_proj": (d, q), "mlp.gate_proj": (f, d), "mlp.up_proj": (f, d)}
    sizes |= {"mlp.down_proj": (d, f)}
    prefix = f"model.layers.{n}"
    tensors = {f"{prefix}.{k}.weight": weight(*s, generator) for k, s in sizes.items()}
    for norm in ("input_layernorm", "post_attention_layernorm"):
        tensors[f"{prefix}.{norm}.weight"] = torch.ones(d, dtype=torch.bfloat16)
    return tensors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=known_models())
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, help="fewer decoder layers than the model has")
    parser.add_argument("--tokenizer", type=Path, help="a checkpoint whose tokenizer is copied")
    arguments = parser.parse_args()
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False}
    config |= known_models()[arguments.shape]
    config["head_dim"] = config["hidden_size"] // config["num_attention_heads"]
    config["num_hidden_layers"] = arguments.layers or config["num_hidden_layers"]
    config |= {"dtype": "bfloat16", "rms_norm_eps": 1e-5, "max_position_embeddings": 2048}
    arguments.folder.mkdir(parents=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"  # 8B numbers take minutes on a CPU
    generator = torch.Generator(device).manual_seed(0)
    vocabulary, hidden = config["vocab_size"], config["hidden_size"]
    ends = {"model.embed_tokens.weight": weight(vocabulary, hidden, generator)}
    ends["model.norm.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    if not config["tie_word_embeddings"]:
        ends["lm_head.weight"] = weight(vocabulary, hidden, generator)
    shards = [ends] + [layer(config, n, generator) for n in range(config["num_hidden_layers"])]
    weight_map = {}
    for n, tensors in enumerate(shards, 1):
        name = f"model-{n:05d}-of-{len(shards):05d}.safetensors"
        save_file(tensors, arguments.folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
    index = {"metadata": {}, "weight_map": weight_map}
    (arguments.folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (arguments.folder / "config.json").write_text(json.dumps(config, indent=2))
    for file in arguments.tokenizer.glob("tokenizer*.json") if arguments.tokenizer else ():
        shutil.copy(file, arguments.folder)


if __name__ == "__main__":
    main()
