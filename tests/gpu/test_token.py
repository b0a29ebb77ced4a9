"""All layers of a token in one kernel give what the graph of their phases gives."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from blr.compressor.modeling.layers import KernelLinear
from blr.compressor.modeling.models import replace_layers
from blr.compressor.runtime.decoder import Decoder
from blr.compressor.runtime.failures import ContextError, StalledError

pytestmark = pytest.mark.gpu
SMALL = {"hidden_size": 256, "intermediate_size": 648, "num_hidden_layers": 2, "vocab_size": 512}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
LARGE = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 4, "vocab_size": 8192}
LARGE |= {"num_attention_heads": 16, "num_key_value_heads": 8, "max_position_embeddings": 4096}
ODD = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 4, "vocab_size": 49152}
ODD |= {"num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 512}
CASES: dict[str, tuple[str, dict[str, Any], int]] = {
    "heads-of-64": ("Llama", SMALL, 0),
    "window": ("Mistral", {**SMALL, "sliding_window": 40}, 0),
    "biases": ("Qwen2", SMALL, 0),
    "head-norms": ("Qwen3", {**SMALL, "head_dim": 128}, 0),
    "low-rank": ("Llama", SMALL, 136),
    "nine-heads": ("Llama", {**ODD, "tie_word_embeddings": True}, 0),
    "nine-heads-low-rank": ("Llama", ODD, 136),
    "massive": ("Llama", SMALL, 0),
    "one-layer": ("Mistral", {**SMALL, "num_hidden_layers": 1}, 0),
    "large-tied-vocabulary": ("Qwen2", {**SMALL, "vocab_size": 151936, "tie_word_embeddings": True}, 0),
    "ranks-of-1496": ("Llama", LARGE, 1496),
    "large": ("Llama", LARGE, 0),
    "large-low-rank": ("Llama", LARGE, 712),
}


def make_model(case: str, device: str, dtype: torch.dtype) -> Any:
    family, settings, rank = CASES[case]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**settings)
    with torch.device(device):
        model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
        if rank:
            linear = [(n, m) for n, m in model.model.named_modules() if type(m) is nn.Linear]
            sizes = {
                n: {"in_features": m.in_features, "out_features": m.out_features} for n, m in linear
            }
            entries = {f"model.{n}": {"structure": "svd", "rank": rank, **s} for n, s in sizes.items()}
            replace_layers(model, entries)
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.02)
    if case == "massive":
        make_massive(model.model)
    for module in model.to(device, dtype).modules():
        if isinstance(module, KernelLinear):
            module.relayout_()
    return model


def make_massive(model: Any) -> None:
    """One channel of the residual stream is large, with its norms' gains beyond float16, and not seen by
    the head."""
    model.embed_tokens.weight.data[:, 5] = 30_000
    for layer in model.layers:
        layer.input_layernorm.weight.data[5] = layer.post_attention_layernorm.weight.data[5] = 2.5
    model.norm.weight.data[5] = 0


def logits(decoder: Decoder, ids: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """[n, vocab], after a prompt and each of these tokens."""
    decoder.prefill(ids)
    return torch.cat([decoder.step(token[None]) for token in tokens])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_graph(case: str, dtype: torch.dtype, on_cuda: str) -> None:
    model = make_model(case, on_cuda, dtype)
    whole, graph = (Decoder(model, context=400, mode=mode) for mode in ("token", "graph"))
    ids = torch.randint(2, 500, (1, 100))
    tokens = torch.randint(2, 500, (200,), device=on_cuda)
    found, expected = (logits(decoder, ids, tokens) for decoder in (whole, graph))
    limit = 2e-2 if dtype == torch.bfloat16 else 4e-3  # the graph rounds activations
    assert float((found - expected).norm() / expected.norm()) < limit
    assert torch.equal(logits(whole, ids, tokens), found), "the same sums each time"


def test_tokens_are_those_of_the_graph_but_for_near_ties(on_cuda: str) -> None:
    model = make_model("large", on_cuda, torch.bfloat16)
    whole, graph = (Decoder(model, context=400, mode=mode) for mode in ("token", "graph"))
    ids = torch.randint(2, 500, (1, 100))
    (found,), (expected,) = (d.generate(ids, max_new_tokens=64) for d in (whole, graph))
    at = next((n for n, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b), None)
    if at is not None:
        text = torch.cat((ids[0], torch.tensor(expected[:at])))[None]
        scores = graph.prefill(text)[0]
        chosen = scores[[found[at], expected[at]]]
        assert float(scores.max() - chosen.min()) < 2e-2 * float(scores.abs().max())


def test_many_launches_beside_other_work(on_cuda: str) -> None:
    """10,000 of them, while another stream multiplies; all leave the same."""
    model = make_model("heads-of-64", on_cuda, torch.bfloat16)
    decoder = Decoder(model, context=400, mode="token")
    ids, token = torch.randint(2, 500, (1, 100)), torch.tensor([7], device=on_cuda)
    other, a = torch.cuda.Stream(), torch.randn(2048, 2048, device=on_cuda)
    expected = None
    for _ in range(50):
        decoder.prefill(ids)
        with torch.cuda.stream(other):
            for _ in range(20):
                a @ a
        for _ in range(200):
            decoder.step(token)
        now = decoder.state.buffers["logits"].clone()
        expected = now if expected is None else expected
        assert torch.equal(now, expected)


OTHER = """
import torch
a = torch.randn(4096, 4096, device="cuda")
torch.cuda.synchronize()
print("ready", flush=True)
while True:
    for _ in range(8):
        a @ a
    torch.cuda.synchronize()
"""


@pytest.mark.parametrize("mode", ["graph", "token"])
def test_a_second_process_changes_no_token(mode: str, on_cuda: str) -> None:
    """2,000 launches while it multiplies on the same GPU."""
    decoder = Decoder(make_model("heads-of-64", on_cuda, torch.bfloat16), context=400, mode=mode)
    ids, tokens = torch.randint(2, 500, (1, 100)), torch.randint(2, 500, (200,), device=on_cuda)
    expected = logits(decoder, ids, tokens)
    with subprocess.Popen((sys.executable, "-c", OTHER), stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == "ready\n"
            for _ in range(10):
                assert torch.equal(logits(decoder, ids, tokens), expected)
            assert other.poll() is None, "it went on meanwhile"
        finally:
            other.kill()


@pytest.mark.parametrize("mode", ["graph", "token"])
def test_an_exception_in_between_changes_no_token(mode: str, on_cuda: str) -> None:
    """Of whoever takes the tokens, of a prompt too long, of a product of other work."""
    decoder = Decoder(make_model("heads-of-64", on_cuda, torch.bfloat16), context=400, mode=mode)
    ids = torch.randint(2, 500, (1, 100))
    expected = decoder.generate(ids, max_new_tokens=64)

    def stop(row: int, token: int) -> None:
        raise KeyboardInterrupt

    def multiply(row: int, token: int) -> None:
        torch.ones(2, 3, device=on_cuda) @ torch.ones(2, 3, device=on_cuda)

    for taker, error in ((stop, KeyboardInterrupt), (multiply, RuntimeError)):
        with pytest.raises(error):
            decoder.generate(ids, max_new_tokens=64, on_token=taker)
        assert decoder.generate(ids, max_new_tokens=64) == expected
    with pytest.raises(ContextError):
        decoder.generate(ids.repeat(1, 5), max_new_tokens=64)
    assert decoder.generate(ids, max_new_tokens=64) == expected


def test_programs_that_wait_in_vain_are_told(on_cuda: str) -> None:
    model = make_model("heads-of-64", on_cuda, torch.bfloat16)
    decoder = Decoder(model, context=400, mode="token")
    ids, tokens = torch.randint(2, 500, (1, 100)), torch.randint(2, 500, (4,), device=on_cuda)
    expected = logits(decoder, ids, tokens)
    assert decoder.whole is not None
    decoder.whole.token.state[0] = 1
    decoder.whole.token.counter[0] = -1_000_000
    assert logits(decoder, ids, tokens[:1]).isnan().all()
    with pytest.raises(StalledError, match="before step 0: expected all of them"):
        decoder.prefill(ids)
    assert torch.equal(logits(decoder, ids, tokens), expected)
