"""Steps and tables of the kernel of a whole token, carried out word by word in torch, give what the
phases give."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from blr.compressor.modeling.layers import KernelLinear
from blr.compressor.modeling.models import replace_layers
from blr.compressor.runtime import whole
from blr.compressor.runtime.decoder import Decoder
from blr.compressor.runtime.drafted import DraftedDecoder
from blr.compressor.runtime.failures import UnsupportedError
from blr.kernels.decode.attention.reference import decode_attention
from blr.kernels.decode.token.tables import GATE, NORM, PARTS, Step, Stores, make_table, parts_of

SIZES = {"hidden_size": 256, "intermediate_size": 656, "num_hidden_layers": 2, "vocab_size": 512}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
FAMILIES: dict[str, dict[str, Any]] = {"Llama": {}, "Mistral": {"sliding_window": 16}, "Qwen2": {}}
FAMILIES["Qwen3"] = {"head_dim": 128}
ODD = {"hidden_size": 576, "intermediate_size": 648, "num_attention_heads": 9, "num_key_value_heads": 3}
FAMILIES["Llama-odd"] = ODD
EXPONENTS = 1 << 16  # where they lie: nothing reads them here


def make_model(family: str, ranks: tuple[int, ...] = (), dtype: torch.dtype = torch.bfloat16) -> Any:
    """ranks: of the layers in turn, 0 for one that stays dense."""
    torch.manual_seed(0)
    name = family.removesuffix("-odd")
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **FAMILIES[family]})
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    layers, linear = {}, [(n, m) for n, m in model.model.named_modules() if type(m) is nn.Linear]
    for number, (name, module) in enumerate(linear):
        rank = ranks[number % len(ranks)] if ranks else 0
        if rank:
            sizes = {"in_features": module.in_features, "out_features": module.out_features}
            layers[f"model.{name}"] = {"structure": "svd", "rank": rank, **sizes}
    replace_layers(model, layers)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model = model.to(dtype)
    for module in model.modules():
        if isinstance(module, KernelLinear):
            module.relayout_()
    return model


class ByWords:
    """A table's words, program after program."""

    def __init__(self, decoder: Decoder, programs: int) -> None:
        self.state, plan = decoder.state, decoder.plan
        self.steps, self.gains, size = whole.make_steps(plan, EXPONENTS)
        self.weights = [product.w for step in self.steps for product in step.products]
        self.stores = Stores(self.weights)
        self.heads = [phase.heads for phase in plan.phases if phase.heads]
        count = plan.buffers["heads"] // self.heads[0].width
        self.table = make_table(
            self.steps, self.stores, programs, count, parts_of(count, programs)
        ).tolist()
        self.sums = torch.full((size,), torch.nan, dtype=torch.float64)
        self.bias = whole._biases(whole.layers(plan), len(self.heads), plan.buffers["qkv"])
        self.eps = next(phase.eps for phase in plan.phases if phase.gain is not None)

    def run(self) -> Tensor:
        """[hidden]: what all steps make of the residual stream."""
        x = self.state.buffers["x"][0]
        self.sums[: len(x)] = x
        self.zero(0)
        for number, step in enumerate(self.steps, 1):
            self.zero(number)
            if step.attention:
                self.attend(step)
                continue
            square = self.sums[: len(x)].square().mean()
            factor = torch.rsqrt(square + self.eps) if step.flags & NORM else 1.0
            for words in self.table[number]:
                self.multiply(words, factor)
        return self.sums[: len(x)]

    def zero(self, number: int) -> None:
        for words in self.table[number]:
            self.sums[words[9] : words[9] + words[10]] = 0

    def attend(self, step: Step) -> None:
        heads, state = self.heads[step.layer], self.state
        qkv = self.sums[step.x :][None, : state.buffers["qkv"].shape[1]].clone()
        qkv += 0 if self.bias is None else self.bias[step.layer]
        options = {"q_gain": heads.q_gain, "k_gain": heads.k_gain, "eps": heads.eps}
        options |= {"scale": heads.scale, "window": None if step.gain == 1 << 30 else step.gain}
        cache = state.kv.layer(step.layer, 1)
        given = qkv, *cache, state.cos, state.sin, state.pos[:1], state.start[:1]
        self.attended = decode_attention(*given, **options)[0]

    def multiply(self, words: list[int], factor: Any) -> None:
        n, k, wide, eighths, x, up, y, row, rows = words[:9]
        flags, gain, (which, r0, c0), K = words[11], words[12], words[16:19], eighths * 8
        for _ in range(n):
            column = min(k * 128, K - 128)
            at = torch.arange(column, column + 128)
            a = self.attended[at] if flags & PARTS else self.sums[x * 8 + at]
            a = a * self.gains[gain, at] * factor if flags & NORM else a
            a = nn.functional.silu(a) * self.sums[up * 8 + at] if flags & GATE else a
            a = torch.where(at >= k * 128, a, 0)
            first = min(row, rows - 128)
            found = self.tile(which, r0 + first, c0 + column).double() @ a.double()
            new = torch.arange(first, first + 128) >= row
            self.sums[y + first : y + first + 128] += torch.where(new, found, 0)
            k = (k + 1) % wide
            row += 128 if k == 0 else 0

    def tile(self, which: int, row: int, column: int) -> Tensor:
        """[128, 128], of one matrix as a whole."""
        base = list(self.stores.first.values())[which]
        K, size = base.stride(0), base.element_size()
        address = base.data_ptr() + (row * K + column) * size
        w = next(
            w for w in self.weights
            if w.stride(0) == K and w.data_ptr() <= address < w.data_ptr() + w.nbytes
        )  # fmt: skip
        r, c = divmod((address - w.data_ptr()) // size, K)
        found = w[r : r + 128, c : c + 128]
        assert found.shape == (128, 128)
        return found


@pytest.mark.parametrize("programs", [9, 40])
@pytest.mark.parametrize(
    ("family", "ranks"),
    [*((family, ()) for family in FAMILIES), ("Llama", (136,)), ("Qwen2", (128, 0, 160))],
)
@torch.no_grad()
def test_words_do_what_phases_do(family: str, ranks: tuple[int, ...], programs: int) -> None:
    decoder = Decoder(make_model(family, ranks), context=64, ops="torch")
    state = decoder.state
    state.buffers["inner"] = state.buffers["inner"].float()
    assert whole.lacks(decoder.plan, state, programs) is None
    decoder.prefill(torch.randint(2, 500, (1, 30)), torch.tensor([27]))
    before, _ = whole.ends(decoder.plan)
    for run in decoder.launches(1, 64, before):
        run()
    found, appended = ByWords(decoder, programs).run(), state.kv.data.clone()
    for run in decoder.launches(1, 64, whole.layers(decoder.plan)):
        run()
    expected = state.buffers["x"][0]
    assert float((found - expected).norm() / expected.norm()) < 1e-5
    torch.testing.assert_close(appended, state.kv.data, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"dtype": torch.float32}, "keys and values in torch.float32"),
        ({"ranks": (96,)}, r"weights \[96, 256\]"),
        ({"ranks": (132,)}, r"weights \[256, 132\]"),
        ({"cache": "int8"}, "keys and values in torch.int8"),
        ({"batch": 2}, "for 2 sequences"),
        ({"programs": 3}, "more heads than the 3"),
    ],
    ids=["dtype", "few-rows", "odd-rank", "cache", "batch", "programs"],
)
def test_what_it_lacks_is_said(change: dict[str, Any], said: str) -> None:
    change = dict(change)
    programs, options = change.pop("programs", 9), {"context": 64, "ops": "torch"}
    options |= {name: change.pop(name) for name in ("batch", "cache") if name in change}
    decoder = Decoder(make_model("Llama", **change), **options)
    assert re.search(said, whole.lacks(decoder.plan, decoder.state, programs) or "")


def test_the_mode_is_for_a_gpu_and_without_drafts() -> None:
    model = make_model("Llama")
    said = (
        "mode 'token': found cpu, expected a GPU of capability 9; use mode 'graph', or unset BLR_DECODE"
    )
    with pytest.raises(UnsupportedError, match=said):
        Decoder(model, context=64, ops="torch", mode="token")
    with pytest.raises(UnsupportedError, match="mode 'token': found a draft"):
        DraftedDecoder(model, None, context=64, ops="torch", mode="token")
