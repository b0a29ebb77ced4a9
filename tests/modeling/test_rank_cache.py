"""Generation with a cache that holds the ranks of keys and values."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from exporting import compress_to, tokens_without_blr
from pico import MODELS, MORE
from structured import low_rank, per_head, structured_model
from tolerances import TOLERANCES
from transformers import AutoModelForCausalLM, DynamicCache

from blr.compressor import register
from blr.compressor.base.errors import UsageError
from blr.compressor.modeling.rank_attention import keep_ranks
from blr.compressor.modeling.rank_cache import RankCache, RankLayer, rank_cache
from blr.compressor.structures.cached import KV_CACHES
from blr.compressor.structures.specs import LowRankSpec, Spec

register()

LENGTH, NEW = 21, 9


def one_group_for_two(inputs: int, outputs: int) -> Spec:
    return LowRankSpec(inputs, outputs, 5, 2)


def caching(name: str, spec: Any, kind: str | None, **changes: Any) -> Any:
    """The model with a cache of ranks."""
    model = structured_model(name, spec, **changes)
    model.config.blr["kv_cache"] = kind
    keep_ranks(model)
    return model


def prompts(masked: bool = True) -> dict[str, torch.Tensor]:
    """Two prompts, the second padded on the left."""
    torch.manual_seed(3)
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, : 7 if masked else 0] = 0
    return {"input_ids": torch.randint(2, 128, (2, LENGTH)), "attention_mask": mask}


def generated(model: Any, **options: Any) -> Any:
    return model.generate(
        **{**prompts(), **options},
        **{"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "eos_token_id": None},
        return_dict_in_generate=True,
    )


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("llama", per_head),
        ("llama", low_rank),
        ("llama", one_group_for_two),
        ("qwen3", per_head),
        ("gpt2", low_rank),
        ("gpt2", lambda i, o: LowRankSpec(i, o, 3, 12 if o == 96 else 4)),
        ("mistral", per_head),  # whose window of 16 tokens has a cache of its own
        ("opt", per_head),
        ("olmo2", low_rank),  # what norms its keys is held for every sequence
    ],
)
def test_tokens_are_those_of_a_whole_cache(name: str, spec: Any, beams: int) -> None:
    expected = generated(caching(name, spec, None), num_beams=beams)
    found = generated(caching(name, spec, "ranks"), num_beams=beams)
    assert torch.equal(found.sequences, expected.sequences)
    held = found.past_key_values
    assert type(expected.past_key_values) is DynamicCache and type(held) is RankCache
    assert held.get_seq_length() == LENGTH + NEW - 1
    if name != "mistral":
        assert all(type(layer) is RankLayer and layer.nbytes for layer in held.layers)


def steps(model: Any, cache: Any, masked: bool) -> torch.Tensor:
    """Logits of a prompt and three more tokens, one after the other."""
    inputs, logits = prompts(masked), []
    for start, stop in ((0, LENGTH - 3), *((n, n + 1) for n in range(LENGTH - 3, LENGTH))):
        step = {
            "input_ids": inputs["input_ids"][:, start:stop],
            "attention_mask": inputs["attention_mask"][:, :stop],
        }
        with torch.no_grad():
            logits.append(model(**step, past_key_values=cache, use_cache=True).logits)
    return torch.cat(logits, 1)[0]


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_logits_and_sizes(ratio: int, masked: bool) -> None:
    """Half the rank is half the cache, int8 a quarter and the scales, int4 less and two scales."""
    heads = {"num_key_value_heads": 4 // ratio, "attention_bias": True}

    def spec(inputs: int, outputs: int) -> Spec:
        return (
            LowRankSpec(inputs, outputs, 4, 4 // ratio)
            if outputs == 32 // ratio
            else low_rank(inputs, outputs)
        )

    models = {kind: caching("llama", spec, kind, **heads) for kind in (None, *KV_CACHES)}
    whole = models.pop(None)
    caches = [rank_cache(DynamicCache(config=whole.config), whole.config, kind) for kind in KV_CACHES]
    dense = DynamicCache(config=whole.config)
    expected = steps(whole, dense, masked)
    found = [steps(model, cache, masked) for model, cache in zip(models.values(), caches, strict=True)]
    for logits, most in zip(found, (TOLERANCES[torch.float32], 0.05, 0.3), strict=True):
        assert (logits - expected).norm() <= most * expected.norm()
    size = sum(layer.keys.nbytes + layer.values.nbytes for layer in dense.layers)
    assert caches[0].nbytes * 2 == size
    assert caches[1].nbytes == size / 2 / 4 + size / 2 / 4  # four ranks a scale, in float32
    assert caches[2].nbytes == size / 2 / 4 * 3 / 4 + size / 2 / 2  # two ranks in int8, two in int4


@pytest.mark.parametrize("kind", ["ranks", "int4"])
def test_a_cache_can_be_cropped_reset_and_moved(kind: str) -> None:
    model = caching("llama", per_head, kind)
    cache = rank_cache(DynamicCache(config=model.config), model.config, kind)
    expected = steps(model, cache, True)
    cache.crop(-3)
    assert cache.get_seq_length() == LENGTH - 3
    for layer in cache.layers:
        layer.offload()
        layer.prefetch()
    inputs = prompts()
    with torch.no_grad():
        again = model(
            input_ids=inputs["input_ids"][:, -3:],
            attention_mask=inputs["attention_mask"],
            past_key_values=cache,
        ).logits[0]
    assert (again - expected[-3:]).norm() <= TOLERANCES[torch.float32] * expected.norm()
    cache.reset()
    assert cache.get_seq_length() == 0
    assert torch.equal(steps(model, cache, True), expected)


@pytest.mark.parametrize("name", ["llama", "olmo2"])
def test_a_cache_of_one_prompt_becomes_that_of_several_answers(name: str) -> None:
    model = caching(name, low_rank, "ranks")
    caches = [rank_cache(DynamicCache(config=model.config), model.config, "ranks"), DynamicCache()]
    ids = prompts()["input_ids"]
    with torch.no_grad():
        for cache in caches:
            model(input_ids=ids[:1], past_key_values=cache)
            cache.batch_repeat_interleave(3)
            cache.batch_select_indices(torch.tensor([2, 0]))
        found, expected = (
            model(input_ids=ids[:, -2:], past_key_values=cache).logits for cache in caches
        )
    assert (found - expected).norm() <= TOLERANCES[torch.float32] * expected.norm()


def test_whole_keys_end_the_ranks() -> None:
    """A step with gradients cannot be held by ranks; what was held is made whole."""
    model = caching("llama", per_head, "ranks")
    inputs = prompts()
    expected = model(**inputs).logits
    cache = rank_cache(DynamicCache(config=model.config), model.config, "ranks")
    with torch.no_grad():
        model(
            input_ids=inputs["input_ids"][:, :-4],
            attention_mask=inputs["attention_mask"][:, :-4],
            past_key_values=cache,
        )
    found = model(
        input_ids=inputs["input_ids"][:, -4:],
        attention_mask=inputs["attention_mask"],
        past_key_values=cache,
    )
    assert found.logits.requires_grad and cache.get_seq_length() == LENGTH
    close = TOLERANCES[torch.float32] * expected[0].norm()
    assert (found.logits[0] - expected[0, -4:]).norm() <= close


@pytest.mark.parametrize("kind", KV_CACHES)
def test_a_cache_goes_on_from_a_copy_and_from_a_file(kind: str) -> None:
    """As prompts that are read again and again are kept."""
    model = caching("qwen3", per_head, kind)
    caches = [rank_cache(DynamicCache(config=model.config), model.config, kind)]
    ids = prompts()["input_ids"][:1]
    with torch.no_grad():
        model(input_ids=ids[:, :-2], past_key_values=caches[0])
        caches += copy.deepcopy(caches[0]), pickle.loads(pickle.dumps(caches[0]))
        expected, *found = (
            model(input_ids=ids[:, -2:], past_key_values=cache).logits for cache in caches
        )
    assert caches[0].nbytes == caches[1].nbytes == caches[2].nbytes > 0
    assert all(torch.equal(logits, expected) for logits in found)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "held"), [(None, 32 * 4), ("int4", 8 + 24 // 2 + 2 * 4)])
def test_compressed_for_its_cache(tiny: Path, tmp_path: Path, kind: str | None, held: int) -> None:
    """`--kv-cf 2`: k and v of heads together, all else dense; loads where blr is not, with whole keys
    and values. `held`: bytes of a token's keys."""
    output = compress_to(tiny, tmp_path / "out", method="dense", kv_cf=2.0, kv_quantize=kind)
    table = json.loads((output / "config.json").read_text())["blr"]
    assert table["kv_cache"] == (kind or "ranks")
    assert {name.rpartition(".")[2] for name in table["layers"]} == {"k_proj", "v_proj"}
    assert {(f["rank"], f.get("groups", 1)) for f in table["layers"].values()} == {(32, 1)}
    model = AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32)
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    options = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
    found = model.generate(ids, **options, return_dict_in_generate=True)
    config = model.config
    assert found.past_key_values.nbytes == config.num_hidden_layers * (5 + 23) * 2 * held
    model.config.blr["kv_cache"] = None
    whole = model.generate(ids, **options)
    assert kind is not None or torch.equal(whole, found.sequences)
    outside = tokens_without_blr({"out": output}, ids[0].tolist(), tmp_path / "scratch")
    assert list(outside.values()) == [whole[0].tolist()]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_cf": 2.0, "kv_rank": 4}, "sized by kv_rank or kv_cf, not both"),
        ({"kv_quantize": "int8"}, "kv_quantize belongs to a cache of ranks"),
    ],
)
def test_settings_that_do_not_fit(tiny: Path, tmp_path: Path, settings: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        compress_to(tiny, tmp_path / "out", **settings)


def test_models_without_such_a_cache_say_so(tmp_path: Path) -> None:
    from pico import save_pico

    source = save_pico("bert", tmp_path / "bert")
    with pytest.raises(UsageError, match="are for decoders"):
        compress_to(source, tmp_path / "out", method="svd", kv_cf=2.0)


def test_a_positive_crop_keeps_as_many() -> None:
    model = caching("llama", per_head, "ranks")
    cache = rank_cache(DynamicCache(config=model.config), model.config, "ranks")
    steps(model, cache, True)
    for number in (LENGTH + 1, LENGTH - 2):
        cache.crop(number)
        assert cache.get_seq_length() == min(number, LENGTH)


def test_whoever_gives_a_cache_has_it_filled() -> None:
    model = caching("llama", low_rank, "ranks")
    cache = DynamicCache(config=model.config)
    found = model.generate(**prompts(), past_key_values=cache, max_new_tokens=2, do_sample=False)
    assert cache.get_seq_length() == found.shape[1] - 1


@pytest.mark.parametrize("name", ["llama", "olmo2", "gpt2"])
def test_whole_keys_end_the_ranks_of_a_cache_that_was_changed(name: str) -> None:
    """Cropped, for several answers, and moved, and then a step with gradients."""
    model = caching(name, low_rank, "ranks")
    caches = [rank_cache(DynamicCache(config=model.config), model.config, "ranks"), DynamicCache()]
    ids, found = prompts()["input_ids"], []
    for cache in caches:
        with torch.no_grad():
            model(input_ids=ids[:1], past_key_values=cache)
        cache.crop(-3)
        cache.batch_repeat_interleave(2)
        for layer in cache.layers:
            layer.offload()
            layer.prefetch()
        found.append(model(input_ids=ids[:, -3:], past_key_values=cache).logits)
        assert found[-1].requires_grad and cache.get_seq_length() == LENGTH
    assert (found[0] - found[1]).norm() <= TOLERANCES[torch.float32] * found[1].norm()


def test_layers_that_have_their_weights_only_while_they_are_called() -> None:
    """As where accelerate keeps them on the CPU or on disk."""
    model = caching("qwen3", per_head, "ranks")
    expected = generated(model)
    cpu_offload(model, execution_device=torch.device("cpu"), offload_buffers=True)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    found = generated(model)
    assert torch.equal(found.sequences, expected.sequences)
    assert found.past_key_values.nbytes == expected.past_key_values.nbytes > 0


@pytest.mark.parametrize(
    ("config", "settings", "model"),
    [
        ("PhiConfig", {"partial_rotary_factor": 0.5, "qk_layernorm": True}, "PhiForCausalLM"),
        ("GlmConfig", {"head_dim": 8, "partial_rotary_factor": 0.5}, "GlmForCausalLM"),
        ("HunYuanDenseV1Config", {"head_dim": 8}, "HunYuanDenseV1ForCausalLM"),
        ("SmolLM3Config", {"num_hidden_layers": 4}, "SmolLM3ForCausalLM"),
        ("GPTJConfig", {"rotary_dim": 4}, "GPTJForCausalLM"),
        ("OlmoConfig", {"clip_qkv": 1.0}, "OlmoForCausalLM"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.endswith("LM") else "",
)
def test_keys_of_other_families(
    config: str, settings: dict[str, Any], model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part that is rotated, norms behind rotations, layers without any, pairs of features; keys that
    are clipped in place are whole."""
    shape = {**MODELS["llama"][1], **settings}
    monkeypatch.setitem(MORE, "other", (config, shape, model))
    expected = generated(caching("other", low_rank, None))
    found = generated(caching("other", low_rank, "ranks"))
    assert torch.equal(found.sequences, expected.sequences)
    assert all(
        (layer.nbytes > 0) == ("clip_qkv" not in settings) for layer in found.past_key_values.layers
    )
