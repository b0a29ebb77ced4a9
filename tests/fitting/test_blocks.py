"""Running a model block by block is running the model, and what is measured on the way is right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from calibrating import CPU, TEXT_MODELS, assert_parts_are_rows, block_model, calibration, native, opened
from pico import MODELS, MORE, SEEING, VOCAB, save_model, save_pico, save_seeing, small
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from blr.compressor.base.errors import CapabilityError
from blr.compressor.base.processes import Processes, sum_in_order
from blr.compressor.base.progress import Progress
from blr.compressor.checkpoint.source import open_source
from blr.compressor.fitting.block_passes import run_block, window_rows
from blr.compressor.fitting.blocks import BlockModel
from blr.compressor.fitting.factorize import Work, layer_seed
from blr.compressor.fitting.moments import RIDGE, Moments, products
from blr.compressor.fitting.sensitivity import curve, draw_tokens, measure
from blr.compressor.loading.native import family_of
from blr.compressor.recipe.architectures import families
from blr.compressor.recipe.schema import Recipe
from blr.compressor.structures.linalg import cholesky
from blr.compressor.workspace.journal import Journal

pytestmark = pytest.mark.fast


KINDS = ["sliding_attention", "full_attention"]
ALTERNATING = {
    "gemma2": {"sliding_window": 4, "layer_types": KINDS},
    "gemma3": {"sliding_window": 4, "layer_types": KINDS},  # each also rotates in its own way
    "qwen2": {"use_sliding_window": True, "sliding_window": 4, "layer_types": KINDS},
}


@pytest.mark.parametrize("name", ALTERNATING)
@torch.no_grad()
def test_every_block_is_given_what_the_model_gives_it(name: str, tmp_path: Path) -> None:
    """Masks and rotations, where blocks that attend to a window lie between others."""
    config, settings, kind = {**MODELS, **MORE}[name]
    save_model(config, {**settings, **ALTERNATING[name], "num_hidden_layers": 2}, kind, tmp_path)
    model = opened(tmp_path)
    whole, given = native(name, tmp_path), calibration()
    for ids, batch in zip(given.ids, model.start(given), strict=True):
        assert len(batch.arguments) == 2 and batch.kinds == (0, 1)
        every = nn.ModuleList([model.load_block(index) for index in range(2)])
        found = model.logits(run_block(every, batch.hidden, batch))
        torch.testing.assert_close(found, whole(input_ids=ids).logits, rtol=1e-4, atol=1e-4)
        first = run_block(model.load_block(0), batch.hidden[1:2], window_rows(batch, torch.tensor([1])))
        torch.testing.assert_close(first, run_block(model.load_block(0), batch.hidden, batch)[1:2])


SMALL = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 8, "vocab_size": VOCAB, "sliding_window": 4},
    **{"logits_scaling": 4.0, "residual_multiplier": 0.5, "logit_scale": 0.25, "pad_token_id": 0},
}


OF_ITS_OWN = {
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "conv"]},
    **{name: {"num_key_value_heads": 4} for name in ("deepseek_v2", "deepseek_v3")},
}
UNLISTED = {  # that have a few outputs, or choose experts
    *("linear_attn.in_proj_a", "linear_attn.in_proj_b", "linear_attn.in_proj_ba"),
    *("mlp.shared_expert_gate", "mlp.router", "mlp.gate.wg"),
}
TABLES = (
    *("llama", "ungated", "glm", "starcoder2", "phi"),
    *("neox", "bloom", "gptj", "gptneo", "bigcode", "opt", "hybrid", "moe", "experts"),
)
SMALL |= {
    **{"n_embd": 32, "n_layer": 4, "n_head": 4, "n_inner": 48, "rotary_dim": 8, "ffn_dim": 48},
    **{"num_layers": 4, "num_heads": 4, "word_embed_proj_dim": 32, "max_position_embeddings": 64},
    **{"n_positions": 64, "n_ctx": 64, "attention_types": [[["global", "local"], 2]], "window_size": 4},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "full_attention_interval": 2},
    **{"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2},
    **{"moe_num_experts": 4, "moe_k": 2, "moe_topk": 2, "moe_intermediate_size": 16, "n_group": 1},
    **{"shared_expert_intermediate_size": 24, "first_k_dense_replace": 1, "topk_group": 1},
    **{"kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8},
    **{"v_head_dim": 8, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "layer_types": None},
}


@pytest.mark.parametrize(
    "model_type", [t for f in families() if f.name in TABLES for t in f.model_types]
)
@torch.no_grad()
def test_decoders_however_they_scale_normalize_or_mask(model_type: str, tmp_path: Path) -> None:
    """Their blocks in turn are the model, logits and all."""
    if model_type not in CONFIG_MAPPING:
        pytest.skip("not in this release of transformers")
    config = small(CONFIG_MAPPING[model_type](), {**SMALL, **OF_ITS_OWN.get(model_type, {})})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model = opened(tmp_path)
    whole, given = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32), calibration()
    every = nn.ModuleList([model.load_block(index) for index in range(len(model))])
    for ids, batch in zip(given.ids, model.start(given), strict=True):
        found = model.logits(run_block(every, batch.hidden, batch))
        torch.testing.assert_close(found, whole(input_ids=ids).logits, rtol=1e-4, atol=1e-4)
        assert_parts_are_rows(every, batch)
    for block in every:
        names = {name for group in model.groups(block) for name in group.modules}
        assert (
            names == {n for n, m in block.named_modules() if isinstance(m, torch.nn.Linear)} - UNLISTED
        )


ENCODERS = [t for f in families() if f.name in ("bert", "mpnet", "encoders") for t in f.model_types]


@pytest.mark.parametrize("model_type", ENCODERS)
@torch.no_grad()
def test_encoders_by_the_states_behind_their_blocks(model_type: str, tmp_path: Path) -> None:
    """Padded texts, too; ModernBERT has windows in two of three blocks."""
    more = {"embedding_size": 32, "local_attention": 4, "num_key_value_heads": 4}
    config = small(CONFIG_MAPPING[model_type](), {**SMALL, **more})
    torch.manual_seed(0)
    AutoModel.from_config(config).save_pretrained(tmp_path)
    model = opened(tmp_path)
    whole, given = AutoModel.from_pretrained(tmp_path, dtype=torch.float32), calibration(padded=True)
    every = nn.ModuleList([model.load_block(index) for index in range(len(model))])
    norm = getattr(whole, "final_norm", getattr(whole, "norm", torch.nn.Identity()))
    for ids, mask, batch in zip(given.ids, given.masks, model.start(given), strict=True):
        found = norm(run_block(every, batch.hidden, batch))
        expected = whole(input_ids=ids, attention_mask=mask).last_hidden_state
        torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], rtol=1e-4, atol=1e-4)
        assert_parts_are_rows(every, batch)
    for block in every:
        names = {name for group in model.groups(block) for name in group.modules}
        assert names == {n for n, m in block.named_modules() if isinstance(m, torch.nn.Linear)}


@pytest.mark.parametrize("model_type", SEEING)
@torch.no_grad()
def test_what_reads_text_of_a_model_that_reads_images(model_type: str, tmp_path: Path) -> None:
    model = opened(save_seeing(model_type, tmp_path))
    whole = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32)
    given, every = calibration(), nn.ModuleList([model.load_block(index) for index in range(len(model))])
    for ids, batch in zip(given.ids, model.start(given), strict=True):
        found = model.logits(run_block(every, batch.hidden, batch))
        torch.testing.assert_close(found, whole(input_ids=ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", TEXT_MODELS)
@torch.no_grad()
def test_blocks_one_by_one_give_the_models_hidden_states(name: str, tmp_path: Path) -> None:
    model = block_model(name, tmp_path)
    padded = not model.model.can_generate()
    given = calibration(padded)
    batches = model.start(given)
    states = [batch.hidden for batch in batches]
    for index in range(len(model)):
        block = model.load_block(index)
        states = [run_block(block, s, b) for s, b in zip(states, batches, strict=True)]
    whole = native(name, tmp_path)
    for ids, mask, state in zip(given.ids, given.masks, states, strict=True):
        out = whole(input_ids=ids, attention_mask=mask, output_hidden_states=True)
        base = whole.base_model
        norm = next(
            (getattr(base, n) for n in ("norm", "ln_f") if hasattr(base, n)), torch.nn.Identity()
        )
        keep = mask.bool()
        torch.testing.assert_close(norm(state)[keep], out.hidden_states[-1][keep], rtol=1e-4, atol=1e-4)
        if not padded:
            torch.testing.assert_close(model.logits(state), out.logits, rtol=1e-4, atol=1e-4)


def test_a_family_without_blocks_is_refused(tmp_path: Path) -> None:
    source = open_source(save_pico("vit", tmp_path))
    with pytest.raises(CapabilityError, match="calibration"):
        BlockModel(source, family_of(source), CPU)


def test_sensitivities_are_the_gradients_of_the_whole_model(tmp_path: Path) -> None:
    model = block_model("llama", tmp_path / "model")
    given = calibration()
    (tmp_path / "journal").mkdir()
    work = Work(model.source, Recipe(), Journal(tmp_path / "journal"), Progress(quiet=True), "cpu")
    batches = model.start(given)
    found = measure(work, model, batches, "key")
    whole = native("llama", tmp_path / "model")
    layer = whole.model.layers[0].mlp.down_proj
    total = torch.zeros(32, 32, dtype=torch.float64)

    def keep(module: Any, inputs: Any, output: torch.Tensor) -> None:
        output.retain_grad()
        layer.kept = output

    layer.register_forward_hook(keep)
    for n, ids in enumerate(given.ids):
        generator = torch.Generator().manual_seed(layer_seed(0, f"loss:{n}"))
        logits = whole(ids, use_cache=False).logits.flatten(0, 1)
        drawn = draw_tokens(logits.detach(), generator)
        torch.nn.functional.cross_entropy(logits, drawn, reduction="sum").backward()
        gradient = layer.kept.grad.flatten(0, 1).double()
        total += gradient.T @ gradient
    total /= total.diagonal().mean()
    torch.testing.assert_close(
        found.read(0)["model.layers.0.mlp.down_proj"].double(), total, rtol=1e-3, atol=1e-3
    )
    rows = measure(work, model, batches, "rows", lambda module: "down_proj" not in module).read(0)
    found_rows = rows["model.layers.0.mlp.down_proj"].double()  # kept in float32
    torch.testing.assert_close(found_rows, total.diagonal(), rtol=1e-6, atol=1e-6)
    again = measure(work, model, [], "key")  # read from the journal
    assert all(again.curves[name].equal(values) for name, values in found.curves.items())


def test_curve_is_the_spectrum_of_the_weighted_weight() -> None:
    torch.manual_seed(0)
    weight = torch.randn(5, 8, dtype=torch.float64)
    root_h, root_g = torch.randn(8, 8, dtype=torch.float64), torch.randn(5, 5, dtype=torch.float64)
    expected = torch.linalg.svdvals(root_g.T @ weight @ root_h).square()
    found = curve(weight, cholesky(root_h @ root_h.T), root_g @ root_g.T).double()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def summed(*batches: dict[str, torch.Tensor]) -> Moments:
    asked = Processes("cpu"), len(batches), batches.__getitem__, batches[0], torch.float64
    return Moments(**sum_in_order(*asked))


def test_target_is_the_least_squares_solution_with_a_ridge_towards_the_weight() -> None:
    torch.manual_seed(0)
    weight = torch.randn(4, 6, dtype=torch.float64)
    dense, student, drift = torch.randn(50, 6), torch.randn(50, 6), torch.randn(50, 4)
    starts = [slice(n, n + 10) for n in range(0, 50, 10)]
    moments = summed(*(products(student[rows], dense[rows], drift[rows]) for rows in starts))
    wanted = dense.double() @ weight.T + drift.double()
    ridge = (RIDGE * student.double().square().sum() / 6) ** 0.5 * torch.eye(6, dtype=torch.float64)
    inputs, outputs = torch.cat([student.double(), ridge]), torch.cat([wanted, ridge @ weight.T])
    expected = torch.linalg.lstsq(inputs, outputs).solution.T
    found = moments.target(weight)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_target_does_not_explode_where_inputs_are_nearly_dependent() -> None:
    """Massive activations: without the ridge the weight of a direction hardly shown grows at will."""
    torch.manual_seed(0)
    dense = torch.randn(500, 6)
    dense[:, 0] *= 1000
    student = dense.clone()
    student[:, 5] = student[:, 4] + 1e-3 * torch.randn(500)
    weight = torch.randn(4, 6, dtype=torch.float64)
    moments = summed(products(student, dense))
    assert float((moments.target(weight) - weight).norm()) < float(weight.norm())


def test_target_keeps_the_weight_where_no_token_went() -> None:
    weight = torch.randn(3, 6, dtype=torch.float64)
    student = torch.zeros(4, 6)
    student[:, 0] = 1
    moments = summed(products(student, student.clone()))
    assert moments.target(weight).equal(weight)
