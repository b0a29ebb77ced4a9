"""Losses made in parts are those of the whole logits, their gradients too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import MambaConfig, MambaForCausalLM

from blr.compressor.healing import objective
from blr.compressor.healing.objective import (
    Measure,
    Readout,
    Replies,
    kl,
    kl_of_top,
    lm,
    missed_states,
    summed,
    variation,
)

ROWS, WIDTH, VOCABULARY = 7, 5, 11
MEASURES: dict[str, Measure] = {"kl": kl, "top 3": kl_of_top(3), "lm": lm, "variation": variation}


def case() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(ROWS, WIDTH, requires_grad=True)
    weight = torch.randn(VOCABULARY, WIDTH, requires_grad=True)
    theirs, their_weight = torch.randn(ROWS, 4), torch.randn(VOCABULARY, 4)
    return hidden, weight, theirs, their_weight, torch.randint(VOCABULARY, (ROWS,))


@pytest.mark.parametrize("name", MEASURES)
@pytest.mark.parametrize("rows", [2, 100])
def test_in_parts_as_in_one(name: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objective, "CHUNK", rows * VOCABULARY)
    hidden, weight, theirs, their_weight, targets = case()
    whole = MEASURES[name](hidden @ weight.mT, theirs @ their_weight.mT, targets)
    expected = torch.autograd.grad(3 * whole, (hidden, weight))
    found = summed(hidden, Readout(weight), (theirs, Readout(their_weight)), targets, MEASURES[name])
    torch.testing.assert_close(found, whole)
    torch.testing.assert_close(torch.autograd.grad(3 * found, (hidden, weight)), expected)
    with torch.no_grad():
        again = summed(hidden, Readout(weight), (theirs, Readout(their_weight)), targets, MEASURES[name])
    torch.testing.assert_close(again, whole)


def test_a_frozen_head_gets_no_gradient() -> None:
    hidden, weight, theirs, their_weight, targets = case()
    loss = summed(hidden, Readout(weight.detach()), (theirs, Readout(their_weight)), targets, kl)
    loss.backward()
    assert hidden.grad is not None and weight.grad is None


def test_divergence_is_that_of_distributions() -> None:
    logits, other = torch.randn(3, VOCABULARY), torch.randn(3, VOCABULARY)
    targets = torch.zeros(3, dtype=torch.long)
    p, q = logits.softmax(-1), other.softmax(-1)
    torch.testing.assert_close(kl(other, logits, targets), (p * (p / q).log()).sum())
    assert float(kl(logits, logits + 5, targets)) == pytest.approx(0, abs=1e-6)
    almost = kl_of_top(VOCABULARY - 1)(other, logits, targets)
    torch.testing.assert_close(almost, kl(other, logits, targets), rtol=1e-4, atol=1e-5)
    assert 0 < kl_of_top(2)(other, logits, targets) < kl(other, logits, targets)


def test_missed_states_are_relative() -> None:
    states = tuple(torch.randn(2, 3, WIDTH) for _ in range(2))
    doubled = (2 * states[0], states[1])
    assert float(missed_states(doubled, states)) == pytest.approx(6 / 2)  # six tokens, one of two blocks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_missed_states(dtype: torch.dtype) -> None:
    """They keep no float32 copy of what they compare, and are those of the formula."""
    torch.manual_seed(0)
    ours, theirs = (tuple(torch.randn(2, 3, WIDTH).to(dtype) for _ in range(2)) for _ in range(2))
    mine = [state.requires_grad_() for state in ours]
    exact = [state.detach().float().requires_grad_() for state in ours]
    pairs = [(a - b.float(), b.float()) for a, b in zip(exact, theirs, strict=True)]
    expected = sum((d.square().sum(-1) / b.square().sum(-1)).sum() for d, b in pairs) / len(pairs)
    assert isinstance(expected, Tensor)
    found = missed_states(ours, theirs)
    torch.testing.assert_close(found, expected)
    for total in (found, expected):
        (5 * total).backward()
    for a, b in zip(mine, exact, strict=True):
        assert a.grad is not None and b.grad is not None
        torch.testing.assert_close(a.grad, b.grad.to(dtype))


def test_a_head_takes_states_of_a_wider_dtype() -> None:
    """Mamba's last norm gives float32, whatever the model is held in."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 8, "state_size": 4, "num_hidden_layers": 2}
    torch.manual_seed(0)
    model = MambaForCausalLM(MambaConfig(**sizes, pad_token_id=0)).bfloat16().eval()
    ids = torch.arange(1, 7)[None]
    answers = Replies(model, ids)
    hidden, _ = answers.run(ids)
    assert answers.plain and hidden.dtype == torch.float32
    loss = summed(hidden[0], answers.head, (hidden[0], answers.head), ids[0], kl)
    loss.backward()
    gradient = model.backbone.layers[0].mixer.in_proj.weight.grad
    assert float(loss.detach()) == 0 and gradient is not None and bool(gradient.isfinite().all())


@pytest.mark.parametrize("trained", ["weight", "bias", "both"])
def test_a_bias_of_the_head_is_trained(trained: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In parts as in one, and by itself."""
    monkeypatch.setattr(objective, "CHUNK", 2 * VOCABULARY)
    hidden, weight, theirs, their_weight, targets = case()
    bias = torch.randn(VOCABULARY, requires_grad=True)
    hidden = hidden.detach()
    if trained != "both":
        (weight if trained == "bias" else bias).requires_grad_(False)
    leaves = [tensor for tensor in (weight, bias) if tensor.requires_grad]
    whole = kl(torch.nn.functional.linear(hidden, weight, bias), theirs @ their_weight.mT, targets)
    expected = torch.autograd.grad(whole, leaves)
    found = summed(hidden, Readout(weight, bias), (theirs, Readout(their_weight)), targets, kl)
    torch.testing.assert_close(torch.autograd.grad(found, leaves), expected)


def test_variation_is_the_share_of_a_drafts_tokens_that_its_model_rejects() -> None:
    """One token drawn by q is accepted with min(1, p / q)."""
    logits, other = torch.randn(3, VOCABULARY), torch.randn(3, VOCABULARY)
    p, q = logits.softmax(-1), other.softmax(-1)
    rejected = (q * (1 - p / q).clamp_min(0)).sum()
    torch.testing.assert_close(variation(other, logits, torch.zeros(3, dtype=torch.long)), rejected)
