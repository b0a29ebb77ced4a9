"""Folders of small models of diffusers, written without it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

WIDTH, HEADS, LAYERS, CLASSES, TEXT = 72, 2, 2, 1000, 40
_SHARED = {
    **{"num_attention_heads": HEADS, "attention_head_dim": WIDTH // HEADS, "in_channels": 4},
    **{"out_channels": 8, "num_layers": LAYERS, "sample_size": 8, "patch_size": 2},
    **{"_diffusers_version": "0.42.1", "attention_bias": True, "activation_fn": "gelu-approximate"},
}
CONFIGS: dict[str, dict[str, Any]] = {
    "dit": {
        **_SHARED,
        **{"_class_name": "DiTTransformer2DModel", "norm_type": "ada_norm_zero"},
        "num_embeds_ada_norm": CLASSES,
    },
    "pixart": {
        **_SHARED,
        **{"_class_name": "PixArtTransformer2DModel", "norm_type": "ada_norm_single"},
        **{"cross_attention_dim": WIDTH, "caption_channels": TEXT, "use_additional_conditions": True},
    },
}
LINEAR = {  # layers of a block, [out, in], by class
    "dit": {
        **dict.fromkeys(("attn1.to_q", "attn1.to_k", "attn1.to_v", "attn1.to_out.0"), (WIDTH, WIDTH)),
        **{"ff.net.0.proj": (4 * WIDTH, WIDTH), "ff.net.2": (WIDTH, 4 * WIDTH)},
        "norm1.linear": (6 * WIDTH, WIDTH),
    },
    "pixart": {
        f"{part}.{name}": (WIDTH, WIDTH)
        for part in ("attn1", "attn2")
        for name in ("to_q", "to_k", "to_v", "to_out.0")
    }
    | {"ff.net.0.proj": (4 * WIDTH, WIDTH), "ff.net.2": (WIDTH, 4 * WIDTH)},
}
_BLOCK = {  # and those that stay dense
    "dit": {
        "norm1.emb.timestep_embedder.linear_1": (WIDTH, 256),
        "norm1.emb.timestep_embedder.linear_2": (WIDTH, WIDTH),
    },
    "pixart": {},
}
_WHOLE = {
    "dit": {"proj_out_1": (2 * WIDTH, WIDTH), "proj_out_2": (32, WIDTH)},
    "pixart": {
        "proj_out": (32, WIDTH),
        "adaln_single.linear": (6 * WIDTH, WIDTH),
        **{f"adaln_single.emb.{n}_embedder.linear_1": (w, 256) for n, w in (("timestep", WIDTH),)},
        "adaln_single.emb.timestep_embedder.linear_2": (WIDTH, WIDTH),
        **{
            f"adaln_single.emb.{n}_embedder.linear_{k}": (WIDTH // 3, 256 if k == 1 else WIDTH // 3)
            for n in ("resolution", "aspect_ratio")
            for k in (1, 2)
        },
        "caption_projection.linear_1": (WIDTH, TEXT),
        "caption_projection.linear_2": (WIDTH, WIDTH),
    },
}


def state_of(kind: str) -> dict[str, torch.Tensor]:
    """Random tensors of the model `kind` by name."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.3 / shape[-1] ** 0.5

    linear = dict(_WHOLE[kind])
    for n in range(LAYERS):
        linear |= {f"transformer_blocks.{n}.{k}": s for k, s in {**LINEAR[kind], **_BLOCK[kind]}.items()}
    state = {f"{name}.weight": random(*shape) for name, shape in linear.items()}
    state |= {f"{name}.bias": random(shape[0]) for name, shape in linear.items()}
    state |= {"pos_embed.proj.weight": random(WIDTH, 4, 2, 2), "pos_embed.proj.bias": random(WIDTH)}
    tables = "norm1.emb.class_embedder.embedding_table.weight", (CLASSES + 1, WIDTH)
    if kind == "pixart":
        state["scale_shift_table"] = random(2, WIDTH)
        tables = "scale_shift_table", (6, WIDTH)
    return state | {f"transformer_blocks.{n}.{tables[0]}": random(*tables[1]) for n in range(LAYERS)}


def save_diffusion(folder: Path, kind: str = "dit", shards: int = 1, **changed: Any) -> Path:
    """Write the model `kind` into `folder`, in one file or several; `changed` keys of its config."""
    folder.mkdir(parents=True)
    config = {k: v for k, v in {**CONFIGS[kind], **changed}.items() if v is not None}
    (folder / "config.json").write_text(json.dumps(config))
    state, stem = state_of(kind), "diffusion_pytorch_model"
    if shards == 1:
        save_file(state, folder / f"{stem}.safetensors", metadata={"format": "pt"})
        return folder
    places = {name: n * shards // len(state) for n, name in enumerate(sorted(state))}
    files = [f"{stem}-{n + 1:05d}-of-{shards:05d}.safetensors" for n in range(shards)]
    for n, file in enumerate(files):
        part = {name: tensor for name, tensor in state.items() if places[name] == n}
        save_file(part, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: files[n] for name, n in places.items()}}
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index))
    return folder
