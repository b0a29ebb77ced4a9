"""A decoder divided into its hidden states and the head that makes logits of them.

Logits are by far the largest tensors of a pass. From hidden states they are made for some thousand
tokens at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from blr.compressor.base.exhaustion import raise_exhausted
from blr.compressor.modeling.masks import unpacked
from blr.compressor.modeling.modeling_blr import DenseWeight
from blr.compressor.planning.training_sizes import CHUNK


@dataclass
class Readout:
    """The output head: `weight` [v, d], in whose dtype it computes, and `bias` [v]. Without a weight
    the hidden states are logits already."""

    weight: Tensor | None
    bias: Tensor | None = None

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [n, v] of `hidden` [n, d]."""
        if self.weight is None:
            return hidden
        return linear(hidden.to(self.weight.dtype), self.weight, self.bias)

    def chunks(self, hidden: Tensor) -> list[slice]:
        """The rows of `hidden` [n, d] in parts of about `CHUNK` logits each."""
        width = hidden.shape[1] if self.weight is None else self.weight.shape[0]
        step = max(CHUNK // width, 1)
        return [slice(n, n + step) for n in range(0, len(hidden), step)]


class DividedDecoder:
    """A causal language model in two parts, body and head. A model that scales or caps its logits is
    run whole, and its logits stand for hidden states."""

    def __init__(self, model: Any, probe: Tensor) -> None:
        self.model, self.body = model, model.base_model
        with torch.no_grad():
            whole = model(probe, use_cache=False).logits
            self.plain = self._fits(probe, whole)

    def _fits(self, probe: Tensor, whole: Tensor) -> bool:
        """Whether body and head give the logits `whole` of a `probe`."""
        head = self.model.get_output_embeddings()
        if not isinstance(getattr(head, "weight", None), Tensor) or self.body is self.model:
            return False  # no head, or one that is not one matrix
        try:
            hidden = self.body(probe, use_cache=False).last_hidden_state
            return torch.equal(head(hidden.to(head.weight.dtype)).float(), whole.float())
        except Exception as error:  # of a body that takes or gives other things than the model
            raise_exhausted(error)
            return False

    @property
    def head(self) -> Readout:
        """What turns the states of `hidden` into logits."""
        if not self.plain:
            return Readout(None)
        module = self.model.get_output_embeddings()
        weight = module.weight
        if isinstance(weight, DenseWeight):  # itself no function of the factors that are trained
            weight = module.composed()
        return Readout(weight, getattr(module, "bias", None))

    def hidden(self, ids: Tensor) -> Tensor:
        """The states that enter the head [m, w, d]."""
        with unpacked():
            found: Tensor = (
                self.body(ids, use_cache=False).last_hidden_state
                if self.plain
                else self.model(ids, use_cache=False).logits
            )
        return found
