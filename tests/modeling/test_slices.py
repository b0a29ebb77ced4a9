"""Models whose large intermediates are made in slices compute what they compute without."""

from __future__ import annotations

import copy
import logging
import pickle
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pico import MODELS, MORE, inputs_for
from plain_kernels import activated as reference
from structured import blast, monarch, per_head, structured_model
from tolerances import TOLERANCES
from torch import Tensor, nn

from blr.bench.memory import transient_bytes
from blr.compressor.modeling import fused, settings, slices
from blr.compressor.structures.specs import LowRankSpec
from blr.kernels.common import transient

FAMILIES = [*MODELS, *MORE]
Bound = Callable[[str], None]


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> Bound:
    """Sets BLR_TRANSIENT, in MiB; slices may be as small as they like."""
    monkeypatch.setattr(transient, "LEAST", 5)
    return lambda text: monkeypatch.setenv(transient.VARIABLE, text)


@pytest.fixture
def sliced(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many slices of rows and of tokens were computed, and how often some heads."""
    counts: Counter[str] = Counter()

    def counting(name: str, function: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return function(*args, **kwargs)

        return run

    monkeypatch.setattr(slices, "_rows", counting("rows", slices._rows))
    monkeypatch.setattr(slices, "_attended", counting("heads", slices._attended))
    native = slices.by_tokens

    def by_tokens(module: Any, compute: Any, x: Tensor, width: int, limit: int) -> Any:
        parts: list[int] = []

        def part(x: Tensor) -> Any:
            parts.append(1)
            return compute(x)

        made = native(module, part, x, width, limit)
        counts["tokens"] += len(parts) > 1
        return made

    monkeypatch.setattr(slices, "by_tokens", by_tokens)
    return counts


def both(model: Any, inputs: dict[str, Any], bound: Bound, mib: str) -> tuple[Tensor, Tensor]:
    """The first output without a bound and with one."""
    found = []
    with torch.no_grad():
        for text in ("off", mib):
            bound(text)
            found.append(model(**inputs)[0])
    return found[0], found[1]


def assert_close(expected: Tensor, found: Tensor) -> None:
    assert type(found) is Tensor
    assert torch.equal(expected.isnan(), found.isnan())
    expected, found = expected.nan_to_num(), found.nan_to_num()
    assert (found - expected).norm() <= TOLERANCES[found.dtype] * expected.norm()


def inputs_of(name: str, model: Any, rows: int = 2) -> dict[str, Any]:
    inputs = {key: tensor[:rows] for key, tensor in inputs_for(model).items()}
    return {**inputs, "decoder_input_ids": inputs["input_ids"]} if name == "t5" else inputs


@pytest.mark.parametrize("name", FAMILIES)
def test_families_compute_the_same(name: str, bound: Bound, sliced: Counter[str]) -> None:
    """Two sequences, and one that is too long by itself."""
    model = structured_model(name)
    if "use_cache" in model.config:
        model.config.use_cache = False
    assert_close(*both(model, inputs_of(name, model), bound, "0.003"))
    assert sliced["rows"] >= 2 or name == "t5", sliced  # whose blocks give their bias of positions, too
    sliced.clear()
    assert_close(*both(model, inputs_of(name, model, 1), bound, "0.002"))
    if name not in ("mixtral", "qwen3-moe", "opt", "vit"):  # experts; the block's own layers; few tokens
        assert sliced["tokens"] >= 2, sliced
    whole = ("gpt2", "phi3", "opt", "t5", "gemma2", "olmo2", "olmoe", "gpt-oss", "deepseek-v3")
    assert (sliced["heads"] >= 2) == (name not in whole), sliced


@pytest.mark.parametrize("spec", [monarch, blast, per_head], ids=lambda spec: spec.__name__)
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_structures_compute_the_same(name: str, spec: Any, bound: Bound, sliced: Counter[str]) -> None:
    model = structured_model(name, spec)
    assert_close(*both(model, inputs_of(name, model), bound, "0.003"))
    assert sliced["tokens"] >= 2, sliced


@pytest.mark.parametrize("implementation", ["sdpa", "blr", "eager"])
@pytest.mark.parametrize("padding", ["left", "right", "masked row"])
@pytest.mark.parametrize("name", ["bert", "llama", "mistral", "gpt2"])
def test_padding(name: str, padding: str, implementation: str, bound: Bound) -> None:
    """A sliding window (mistral's is 16 of 23 tokens) is one more mask."""
    model = structured_model(name, attn_implementation=implementation)
    assert model.config._attn_implementation == implementation
    mask = torch.ones(3, 23, dtype=torch.long)
    mask[1, slice(0, 9) if padding == "left" else slice(14, None)] = 0
    if padding == "masked row":
        mask[2] = 0
    torch.manual_seed(2)
    inputs = {"input_ids": torch.randint(2, 128, (3, 23)), "attention_mask": mask}
    assert_close(*both(model, inputs, bound, "0.006"))


@pytest.mark.parametrize("kind", ["packed", "biased", "by head"])
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_unusual_masks(name: str, kind: str, bound: Bound, sliced: Counter[str]) -> None:
    """Of four dimensions: documents side by side in a row, a bias of scores, another for every head."""
    model, heads = structured_model(name), 4
    model.config.use_cache = False
    torch.manual_seed(2)
    document = torch.arange(23) // 9
    seen = document[:, None] == document
    if name == "llama":
        seen = seen.tril()
    mask: Tensor = seen[None, None].expand(3, 1, 23, 23)
    if kind != "packed":
        bias = torch.randn(3, 1 if kind == "biased" else heads, 23, 23)
        mask = bias.masked_fill(~mask, torch.finfo(torch.float32).min)
    inputs = {"input_ids": torch.randint(2, 128, (3, 23)), "attention_mask": mask}
    assert_close(*both(model, inputs, bound, "0.006"))
    assert sliced["rows"] >= 2
    alone = {key: tensor[1:2] for key, tensor in inputs.items()}
    assert_close(*both(model, alone, bound, "0.003"))
    assert sliced["heads"] >= 2


@pytest.mark.parametrize("groups", ["whole", "grouped", "heads"])
@pytest.mark.parametrize("ratio", [1, 2, 4, 8])
@pytest.mark.parametrize("width", [32, 64, 96, 128])
def test_attention_of_heads(groups: str, ratio: int, width: int, bound: Bound) -> None:
    """Biases, rotations, causal and masked, sequences that are too long for the bound."""

    def spec(inputs: int, outputs: int) -> LowRankSpec:
        count = outputs // width if outputs % width == 0 else 1
        return LowRankSpec(
            inputs, outputs, 7, {"whole": 1, "grouped": max(count // 2, 1), "heads": count}[groups]
        )

    changes = {"num_attention_heads": 8, "num_key_value_heads": 8 // ratio, "head_dim": width}
    model = structured_model("llama", spec, **changes, hidden_size=40, attention_bias=True)
    attention, length = model.model.layers[0].self_attn, 37
    x = torch.randn(2, length, 40)
    angles = model.model.rotary_emb(x, torch.arange(length)[None])
    mask = torch.rand(2, 1, length, length) > 0.3
    for given in (None, mask):
        with torch.no_grad():
            bound("off")
            expected = attention(x, position_embeddings=angles, attention_mask=given)[0]
            for mib in ("0.02", "0.0001"):
                bound(mib)
                found = attention(x, position_embeddings=angles, attention_mask=given)[0]
                assert_close(expected, found)
    assert attention.apart


def test_memory_is_bounded(bound: Bound) -> None:
    """Peaks of a BERT shape: hidden states around a chunk, not the middle of the MLP."""
    model = structured_model("bert", hidden_size=64, intermediate_size=256, max_position_embeddings=256)
    inputs = {"input_ids": torch.randint(2, 128, (16, 256))}
    peaks = {}
    with torch.no_grad():
        for mib in ("off", "0.5"):
            bound(mib)
            model(**inputs)
            peaks[mib] = transient_bytes(lambda: model(**inputs), torch.device("cpu"))
    assert peaks["0.5"] <= 0.45 * peaks["off"]


def test_layers_of_a_block_are_counted(bound: Bound) -> None:
    """OPT has those of its MLP in the block itself: sequences are as few as these leave room for."""
    model = structured_model("opt", ffn_dim=1024, max_position_embeddings=256)
    inputs = {"input_ids": torch.randint(2, 128, (16, 128)), "use_cache": False}
    peaks = {}
    with torch.no_grad():
        for mib in ("off", "2"):
            bound(mib)
            model.model(**inputs)
            peaks[mib] = transient_bytes(lambda: model.model(**inputs), torch.device("cpu"))
    assert peaks["2"] <= 0.3 * peaks["off"]


def test_heads_are_reconstructed_few_at_a_time(bound: Bound) -> None:
    """One long sequence: neither q, k, v nor a copy of them is ever whole."""
    settings = {
        "hidden_size": 64,
        "num_attention_heads": 8,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
    }
    model = structured_model("vit", **settings, image_size=64, patch_size=2)
    attention = model.vit.layers[0].attention if hasattr(model.vit, "layers") else None
    if attention is None:
        attention = next(m for n, m in model.named_modules() if n.endswith("0.attention"))
    x = torch.randn(1, 4096, 64)  # 1 MiB
    with torch.no_grad():
        bound("0.25")
        attention(x)
        taken = transient_bytes(lambda: attention(x), torch.device("cpu"))
    assert (
        taken < 3.9 * 2**20
    )  # ranks of three projections 1.5, attention's output 1, o's output 1 + ranks


def test_said_once_where_heads_need_each_other(
    bound: Bound, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "_said", set())
    model = structured_model("bert", attn_implementation="eager")
    inputs = {**inputs_for(model), "output_attentions": True}
    bound("0.004")
    with caplog.at_level(logging.WARNING, "blr"), torch.no_grad():
        found = model(**inputs)
        model(**inputs)
    assert [t.shape for t in found.attentions] == [(2, 4, 24, 24)] * 2
    assert caplog.messages == [
        "blr: BertSelfAttention computes all heads at once: right, but above the bound of BLR_TRANSIENT"
    ]


@torch.no_grad()
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_whoever_looks_on_sees_whole_tensors(name: str, bound: Bound) -> None:
    """Hooks of modules inside a block are called once, with all tokens."""
    model = structured_model(name)
    seen: list[Any] = []
    layers = [m for m in model.modules() if isinstance(m, nn.Module) and hasattr(m, "spec")]
    for layer in layers:
        layer.register_forward_hook(lambda module, args, y: seen.append(args[0].shape[:-1]))
    bound("0.003")
    model(**inputs_for(model))
    assert seen == [(2, 24)] * len(layers)
    states = model(**inputs_for(model), output_hidden_states=True).hidden_states
    assert [state.shape for state in states] == [(2, 24, 32)] * 3


@torch.no_grad()
@pytest.mark.parametrize("name", ["bert", "distilbert", "gpt2", "vit", "llama"])
def test_activations_are_computed_with_their_layer(
    name: str, bound: Bound, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one kernel, where one layer's outputs are all that the activation is given."""
    seen: list[str] = []

    def kernel(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
        seen.append(activation)
        return reference(x, weight, bias, activation)

    monkeypatch.setattr(fused, "activated", kernel)
    model = structured_model(name)
    assert_close(*both(model, inputs_of(name, model), bound, "1"))
    expected = {"gpt2": ["gelu_tanh"] * 2, "llama": []}
    assert seen == expected.get(name, ["gelu"] * 2)


def test_gradients_and_generation_are_as_ever(bound: Bound) -> None:
    bound("0.001")
    model = structured_model("llama")
    ids = inputs_for(model)["input_ids"]
    model.gradient_checkpointing_enable()
    model.train()
    model(input_ids=ids, labels=ids).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    model.eval()
    answers = []
    for text in ("off", "0.0001"):
        bound(text)
        answers.append(
            model.generate(ids, max_new_tokens=6, do_sample=False, num_beams=2, pad_token_id=0)
        )
    assert torch.equal(*answers)


def test_models_are_copied_and_pickled(bound: Bound) -> None:
    """Norms, MLPs, attention and blocks are of classes made on demand."""
    model = structured_model("llama")
    _, found = both(model, inputs_for(model), bound, "0.001")
    block = model.model.layers[0]
    assert type(block).__name__ == "LlamaDecoderLayer"
    again = pickle.loads(pickle.dumps(block))
    assert [type(m) for m in again.modules()] == [type(m) for m in block.modules()]
    assert torch.equal(again.input_layernorm.weight, block.input_layernorm.weight)
    with torch.no_grad():
        assert torch.equal(copy.deepcopy(model)(**inputs_for(model))[0], found)


def test_a_bound_that_is_none_is_an_error(bound: Bound) -> None:
    for text in ("-1", "0", "many", "inf"):
        bound(text)
        with pytest.raises(RuntimeError, match="expected MiB"):
            transient.transient_bytes()
