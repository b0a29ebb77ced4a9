"""The ways to decode that `blr bench decode` times: transformers compiled, and our `Decoder`."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from blr.compressor.base.errors import UsageError
from blr.compressor.bench.decode.models import CORRECTED, FEW_BITS, OWN, STRUCTURES
from blr.compressor.exporting.pack import KINDS
from blr.compressor.modeling.cache_names import cache_name
from blr.compressor.runtime.modes import CACHES, MODES

HF, OURS = "hf", "ours"
WHOLE, INT8 = CACHES
CACHE = "kv8"  # in arms: keys and values in int8
HEADS = {f"head{bits}": kind for kind, bits in KINDS.items()}  # in arms: kind of the output head
RECOMPILATIONS = 256  # of one function by torch.compile, for as many models and shapes


@dataclass(frozen=True)
class ArmName:
    """``ours-lowrank-int4-head8``: who decodes, what structure, what quantization of the layers and
    of the output head ("" for none), the kind of the cache; ``ours-lowrank-eager``: our decoder's
    mode ("" for the bench's)."""

    runtime: str
    structure: str
    kind: str = ""
    head: str = ""
    mode: str = ""
    cache: str = WHOLE

    def __str__(self) -> str:
        head = next((name for name, kind in HEADS.items() if kind == self.head), "")
        cache = CACHE if self.cache == INT8 else ""
        parts = (self.runtime, self.structure, self.kind, head, cache, self.mode)
        return "-".join(part for part in parts if part)


def parse_arm(text: str) -> ArmName:
    """Raises UsageError for an arm that does not exist."""
    runtime, _, later = text.partition("-")
    structure, *rest = later.split("-")
    kind = rest.pop(0) if rest and rest[0] in FEW_BITS else ""
    head = HEADS[rest.pop(0)] if rest and rest[0] in HEADS else ""
    cache = INT8 if rest and rest[0] == CACHE else WHOLE
    rest = rest[1:] if cache == INT8 else rest
    mode = rest.pop(0) if rest and rest[0] in MODES else ""
    structures = ("dense", *STRUCTURES, CORRECTED, OWN)
    naive = runtime == HF and (
        kind or head or mode or cache == INT8 or structure not in ("dense", "lowrank", OWN)
    )
    known = runtime in (HF, OURS) and structure in structures and not rest
    known = known and (structure != CORRECTED or kind != "")
    if not known or naive:
        raise UsageError(
            f"arm {text!r}: expected hf-dense, hf-lowrank or hf-own, or ours- with one of "
            f"{', '.join(structures)} and, if quantized (corrected: always), -int8, -int4, -int3 or "
            f"-int2, then -head8 or -head4 for a quantized output head, then -{CACHE} for keys and "
            f"values in int8, then - and a mode of {', '.join(MODES)}"
        )
    return ArmName(runtime, structure, kind, head, mode, cache)


class HfArm:
    """transformers with a static cache; the step compiled by mode="reduce-overhead" if `compiling`.

    ids: [B, T], the prompt. steps: room for new tokens.
    """

    def __init__(self, model: Any, ids: Tensor, steps: int, compiling: bool) -> None:
        from transformers import StaticCache

        self.model, self.ids = model, ids
        self.cache = StaticCache(config=model.config, max_cache_len=ids.shape[1] + steps + 1)
        self.cached = {cache_name(model): self.cache}
        self.tokens = torch.zeros(len(ids), 1, dtype=torch.int64, device=ids.device)
        self.forward = self._step
        if compiling:
            torch._dynamo.config.recompile_limit = RECOMPILATIONS
            self.forward = torch.compile(self._step, mode="reduce-overhead")

    def prefill(self) -> None:
        """Forget everything, take the prompt and choose the first token."""
        self.cache.reset()
        out = self.model(self.ids, **self.cached, use_cache=True, logits_to_keep=1)
        self.tokens.copy_(out.logits[:, -1:].argmax(-1))

    def step(self, tokens: Tensor | None = None) -> Tensor:
        """Feed `tokens` [B], or those chosen last; returns logits [B, vocab], valid until the next."""
        if tokens is not None:
            self.tokens.copy_(tokens[:, None])
        torch.compiler.cudagraph_mark_step_begin()
        chosen, logits = self.forward(self.tokens)
        self.tokens.copy_(chosen)
        return logits

    def greedy(self, count: int) -> list[list[int]]:
        """The first `count` new tokens of every row, by transformers' `generate`."""
        mask = torch.ones_like(self.ids)
        options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        generate = self.model.generate
        out = generate(self.ids, attention_mask=mask, max_new_tokens=count, **options)
        return out[:, self.ids.shape[1] :].tolist()

    def _step(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.model(tokens, **self.cached, use_cache=True).logits[:, -1]
        return logits.argmax(-1, keepdim=True), logits


class OursArm:
    """Our decoder on the model's own weights; arguments as of `HfArm`. ops: "triton" or "torch"."""

    def __init__(
        self, model: Any, ids: Tensor, steps: int, ops: str, mode: str = "auto", cache: str = WHOLE
    ) -> None:
        from blr.compressor.runtime.decoder import Decoder

        self.ids = ids
        batch, context = len(ids), ids.shape[1] + steps + 1
        self.decoder = Decoder(model, batch=batch, context=context, mode=mode, ops=ops, cache=cache)

    def prefill(self) -> None:
        """Forget everything, take the prompt and choose the first token."""
        self.decoder.prefill(self.ids)

    def step(self, tokens: Tensor | None = None) -> Tensor:
        """Feed `tokens` [B], or those chosen last; returns logits [B, vocab]."""
        chosen = self.decoder.state.tokens[: len(self.ids)]
        return self.decoder.step(chosen if tokens is None else tokens)

    def bytes_read(self) -> int:
        """Bytes that a step reads by the decoder's own count."""
        return sum(size for _, size in self.decoder.stages())

    def greedy(self, count: int) -> list[list[int]]:
        """The first `count` new tokens of every row."""
        return self.decoder.generate(self.ids, max_new_tokens=count)


def timed(arm: HfArm | OursArm, steps: int) -> float:
    """Milliseconds a step by the wall clock, host included, over `steps` steps after a prompt."""
    arm.prefill()
    _settle(arm.ids.device)
    begun = perf_counter()
    for _ in range(steps):
        arm.step()
    _settle(arm.ids.device)
    return (perf_counter() - begun) * 1e3 / steps


def reference_logits(model: Any, ids: Tensor, tokens: Tensor) -> Tensor:
    """[B, vocab] in float32 after the prompt and `tokens` [B]: transformers, eager, without a cache."""
    whole = torch.cat([ids, tokens[:, None]], 1)
    return model(whole, use_cache=False, logits_to_keep=1).logits[:, -1].float()


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
