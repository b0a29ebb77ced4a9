"""Models whose large intermediates are made in chunks compute what they compute without."""

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
from structured import blast, monarch, per_head, structured_model
from tolerances import TOLERANCES
from torch import Tensor, nn
from torch.nn import functional

from blr.compressor.bench.memory import transient_bytes
from blr.compressor.modeling import chunked, settings
from blr.compressor.modeling.deferred import Deferred
from blr.compressor.modeling.layers import LowRankLinear, defer_large
from blr.compressor.modeling.products import LowRankProduct
from blr.compressor.structures.specs import LowRankSpec
from blr.kernels.common import transient

FAMILIES = [*MODELS, *MORE]
Bound = Callable[[str], None]


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> Bound:
    """Sets BLR_TRANSIENT, in MiB; chunks may be as small as they like."""
    monkeypatch.setattr(transient, "LEAST", 5)
    return lambda text: monkeypatch.setenv(transient.VARIABLE, text)


@pytest.fixture
def consumed(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often attention and layers took tensors without values."""
    counts: Counter[str] = Counter()

    def counting(name: str, function: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            counts[name] += result is not NotImplemented
            return result

        return run

    for name, function in list(chunked.CONSUMERS.items()):
        monkeypatch.setitem(chunked.CONSUMERS, name, counting(name, function))
    layers = "blr.compressor.modeling.layers.by_tokens"
    monkeypatch.setattr(layers, counting("layer", chunked.by_tokens))
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


def inputs_of(name: str, model: Any) -> dict[str, Any]:
    inputs = inputs_for(model)
    return {**inputs, "decoder_input_ids": inputs["input_ids"]} if name == "t5" else inputs


@pytest.mark.parametrize("name", FAMILIES)
def test_families_compute_the_same(name: str, bound: Bound, consumed: Counter[str]) -> None:
    model = structured_model(name)
    inputs = inputs_of(name, model)
    assert_close(*both(model, inputs, bound, "0.003"))
    if name not in ("mixtral", "qwen3-moe"):  # whose experts are no such layers
        assert consumed["layer"] + consumed["layer_norm"] >= 2, consumed
    if name not in ("gemma2", "t5"):  # whose attention needs whole scores
        assert consumed["scaled_dot_product_attention"] >= 2, consumed


@pytest.mark.parametrize("spec", [monarch, blast, per_head], ids=lambda spec: spec.__name__)
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_structures_compute_the_same(name: str, spec: Any, bound: Bound, consumed: Counter[str]) -> None:
    model = structured_model(name, spec)
    assert_close(*both(model, inputs_of(name, model), bound, "0.003"))
    assert consumed["layer"] + consumed["layer_norm"] >= 2
    assert consumed["scaled_dot_product_attention"] >= 2


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
def test_unusual_masks(name: str, kind: str, bound: Bound, consumed: Counter[str]) -> None:
    """Of four dimensions: documents side by side in a row, a bias of scores, another for every head."""
    model, heads = structured_model(name), 4
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
    assert consumed["scaled_dot_product_attention"] >= 2


@torch.no_grad()
def test_activations_write_over_products_that_nobody_else_reads(bound: Bound) -> None:
    """A product that is read again later is still what it was; half the copies, twice the tokens."""
    layer, x, y = layer_output(bound)
    expected = layer.product(x, layer.bias)
    hidden = functional.gelu(y)
    assert hidden.node.overwrites({}) and not hidden.node.overwrites({"o": (0, 4)})
    assert torch.equal(torch.cat([hidden]), functional.gelu(expected))
    assert torch.equal(torch.cat([y]), expected)
    gated = functional.silu(layer(x)) * y
    assert gated.node.overwrites({}) and not (y * y).node.overwrites({})
    again = y + 1
    assert not hidden.node.overwrites({})  # two read it now
    assert torch.allclose(torch.cat([gated]), functional.silu(expected) * expected)
    assert torch.equal(torch.cat([again]), expected + 1)


@pytest.mark.parametrize("groups", ["whole", "grouped", "heads"])
@pytest.mark.parametrize("ratio", [1, 2, 4, 8])
@pytest.mark.parametrize("width", [32, 64, 96, 128])
def test_attention_of_projections(groups: str, ratio: int, width: int, bound: Bound) -> None:
    """Heads, biases, rotations, causal and masked, one sequence that is too long for the bound."""
    torch.manual_seed(0)
    heads, length, hidden = 8, 37, 48
    x = torch.randn(2, length, hidden)
    layers = []
    for count in (heads, heads // ratio, heads // ratio):
        made = {"whole": 1, "grouped": max(count // 2, 1), "heads": count}[groups]
        layers.append(LowRankLinear(LowRankSpec(hidden, count * width, 7, made), bias=True))
        nn.init.normal_(layers[-1].bias)
    model = nn.ModuleDict(
        {"0": nn.ModuleDict(dict(zip(("q_proj", "k_proj", "v_proj"), layers, strict=True)))}
    )
    defer_large(model)
    cos, sin = torch.randn(2, 1, length, width).unbind(0)

    def attend(mask: Tensor | None, causal: bool) -> Tensor:
        q, k, v = (layer(x).view(2, length, -1, width).transpose(1, 2) for layer in layers)
        q, k = (
            t * cos + torch.cat((-t[..., width // 2 :], t[..., : width // 2]), -1) * sin for t in (q, k)
        )
        assert isinstance(q, Deferred) == (transient.transient_bytes() is not None)
        options = {"attn_mask": mask, "is_causal": causal, "enable_gqa": ratio > 1}
        return functional.scaled_dot_product_attention(q, k, v, **options)

    mask = torch.rand(2, 1, length, length) > 0.3
    for given, causal in ((None, True), (None, False), (mask, False)):
        with torch.no_grad():
            bound("off")
            expected = attend(given, causal)
            for mib in ("0.02", "0.0001"):
                bound(mib)
                assert_close(expected, attend(given, causal))


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


@torch.no_grad()
def test_what_is_rotated_is_made_once_a_chunk(bound: Bound, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotary embeddings read queries and keys three times; their products are the cost of a chunk."""
    made = Counter[int]()

    def counted(self: LowRankProduct, x: Tensor) -> Tensor:
        made[self.U.data_ptr()] += 1
        return run(self, x)

    run = LowRankProduct.__call__
    model = structured_model("llama")
    queries = [layer.U.data_ptr() for name, layer in model.named_modules() if name.endswith("q_proj")]
    inputs = inputs_of("llama", model)
    bound("0.008")  # one sequence
    monkeypatch.setattr(LowRankProduct, "__call__", counted)
    model(**inputs)
    assert [made[at] for at in queries] == [len(inputs["input_ids"])] * len(queries)


def test_said_once_where_tensors_are_whole(
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
        "blr: this model applies matmul to whole outputs of layers: right, but they take "
        "the memory that BLR_TRANSIENT would save"
    ]


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


def layer_output(bound: Bound) -> tuple[LowRankLinear, Tensor, Tensor]:
    """A layer, its input [2, 5, 8] and its deferred output [2, 5, 8]."""
    torch.manual_seed(0)
    bound("0.0001")
    layer = LowRankLinear(LowRankSpec(8, 8, 3), bias=True)
    layer.defers = True
    x = torch.randn(2, 5, 8)
    with torch.no_grad():
        y = layer(x)
    assert type(y) is Deferred
    return layer, x, y


@torch.no_grad()
def test_writing_to_one_writes_to_its_views(bound: Bound) -> None:
    layer, x, y = layer_output(bound)
    expected = layer.product(x, layer.bias)
    heads, twice = y.view(2, 5, 2, 4), y * 2
    heads.mul_(3)
    assert torch.allclose(torch.cat([y]), expected * 3)
    assert torch.allclose(torch.cat([twice]), expected * 2)
    y += 1
    heads[0, 0] = 0
    expected = expected * 3 + 1
    expected[0, 0] = 0
    assert torch.allclose(torch.cat([y]), expected)


@torch.no_grad()
def test_one_can_be_read_like_any_tensor(bound: Bound) -> None:
    layer, x, y = layer_output(bound)
    expected = layer.product(x, layer.bias)
    assert (y.shape, y.dtype, len(y), y.numel()) == (expected.shape, expected.dtype, 2, 80)
    assert y.tolist() == expected.tolist()
    assert torch.equal(copy.deepcopy(y), expected)
    assert torch.equal(pickle.loads(pickle.dumps(y)), expected)
    assert torch.equal(torch.from_numpy(y.numpy()), expected)
    out = torch.empty_like(expected)
    out.copy_(y)
    out[:, 1:2] = y[:, 1:2]
    assert torch.equal(out, expected)


@torch.no_grad()
def test_no_tokens_have_no_outputs(bound: Bound) -> None:
    """A cache of ranks has its layers give tensors without values of any size."""
    bound("1")
    layer = LowRankLinear(LowRankSpec(6, 8, 2), bias=True)
    layer.defers = layer.always = True
    with torch.no_grad():
        found = layer(torch.zeros(0, 3, 6))
        assert type(found) is Deferred
        assert functional.linear(found, torch.ones(5, 8)).shape == (0, 3, 5)


def test_an_input_that_changes_in_between_is_an_error(bound: Bound) -> None:
    _, x, y = layer_output(bound)
    x.add_(1)
    with pytest.raises(RuntimeError, match="set BLR_TRANSIENT=off"):
        y.sum()


@torch.inference_mode()
def test_inference_mode_and_factors_that_move_on(bound: Bound) -> None:
    """An offloaded layer has its weights only while it is called."""
    layer, x, y = layer_output(bound)
    expected = layer.product(x, layer.bias)
    layer.to("meta")
    assert torch.equal(torch.cat([y]), expected)


def test_models_are_copied_and_pickled(bound: Bound) -> None:
    """Norms are of classes made on demand."""
    model = structured_model("llama")
    _, found = both(model, inputs_for(model), bound, "0.001")
    norm = model.model.layers[0].input_layernorm
    assert type(norm).__name__ == "LlamaRMSNorm"
    again = pickle.loads(pickle.dumps(norm))
    assert type(again) is type(norm) and torch.equal(again.weight, norm.weight)
    with torch.no_grad():
        assert torch.equal(copy.deepcopy(model)(**inputs_for(model))[0], found)


def test_a_bound_that_is_none_is_an_error(bound: Bound) -> None:
    for text in ("-1", "0", "many", "inf"):
        bound(text)
        with pytest.raises(RuntimeError, match="expected MiB"):
            transient.transient_bytes()
