"""Which batches a CUDA graph of the first one serves."""

from __future__ import annotations

from dataclasses import replace

import torch

from blr.compressor.fitting.block_passes import Batch, alike


def test_batches_that_differ_in_more_than_their_states_are_not_captured() -> None:
    states, mask = torch.zeros(2, 3, 4), torch.ones(2, 3, dtype=torch.bool)
    places = (torch.arange(6.0), torch.ones(3))
    first = Batch(states, states, (((), {"places": places, "mask": None}),), mask)
    same = Batch(
        states + 1, states, (((), {"places": (torch.arange(6.0), places[1]), "mask": None}),), mask
    )
    padded = replace(first, mask=mask.clone().index_fill_(1, torch.tensor(2), False))
    fewer = replace(first, mask=mask[:1])
    moved = replace(first, arguments=(((), {"places": (places[0] + 1, places[1]), "mask": None}),))
    masked = replace(first, arguments=(((), {"places": places, "mask": torch.ones(1)}),))
    found = alike([first, same, padded, fewer, moved, masked])
    assert found == [True, True, False, False, False, False]


def test_rows_are_those_of_real_tokens() -> None:
    states, mask = (
        torch.arange(12.0).view(2, 3, 2),
        torch.tensor([[True, True, False], [True, True, True]]),
    )
    batch = Batch(states, states, (((), {}),), mask)
    assert torch.equal(batch.rows(states), states[mask]) and batch.tokens == 5
    assert torch.equal(replace(batch, mask=torch.ones_like(mask)).rows(states), states.flatten(0, 1))
