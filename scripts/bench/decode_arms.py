"""The ways to decode that `blr bench decode` times: transformers compiled, and our decoders."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blr.bench.layer_problem import RECOMPILATIONS
from blr.bench.models import CORRECTED, FEW_BITS, OWN, STRUCTURES
from blr.compressor.base.errors import UsageError
from blr.compressor.checkpoint.context import NGRAM
from blr.compressor.exporting.quantizer import KINDS
from blr.compressor.modeling.settings import cache_name
from blr.compressor.runtime.decoder import Decoder
from blr.compressor.runtime.drafted import DRAFTS, DraftedDecoder
from blr.compressor.runtime.failures import CACHES
from blr.compressor.runtime.sampling import Collector, Sampler

HF, OURS = "hf", "ours"
WHOLE, INT8 = CACHES
CACHE = "kv8"  # in arms: keys and values in int8
TOKEN = "token"  # in arms: the decoder's mode of this name
HEADS = {f"head{bits}": kind for kind, bits in KINDS.items()}  # in arms: kind of the output head


SPECULATIVE = "speculative"  # dense, with a draft: a folder's own, low rank, or corrected few bits
DRAFTED = ("1b", "pico", NGRAM)  # models of another shape, and the text so far, as drafts
SHARE = 0.9  # of drafts that are accepted of random weights
STRUCTURED = ("dense", *STRUCTURES, CORRECTED, OWN, SPECULATIVE)
ARM = re.compile(
    f"(?P<runtime>{HF}|{OURS})-(?P<structure>{'|'.join(STRUCTURED)})(?:-(?P<draft>{'|'.join(DRAFTED)}))?"
    f"(?:-(?P<share>[1-9][0-9]))?"
    f"(?:-(?P<kind>{'|'.join(FEW_BITS)}))?"
    f"(?:-(?P<head>{'|'.join(HEADS)}))?(?:-(?P<cache>{CACHE}))?(?:-(?P<mode>{TOKEN}))?"
)


@dataclass(frozen=True)
class ArmName:
    """``ours-lowrank-int4-head8``: who decodes, what structure, what quantization of the layers and
    of the output head ("" for none), the kind of the cache, the draft if it is of `DRAFTED`, the share
    of drafts that is accepted, and the decoder's mode ("" for the usual one)."""

    text: str
    runtime: str
    structure: str
    kind: str
    head: str
    cache: str
    draft: str = ""
    share: float = SHARE
    mode: str = ""

    def __str__(self) -> str:
        return self.text


def parse_arm(text: str) -> ArmName:
    """Raises UsageError for an arm that does not exist."""
    found = ARM.fullmatch(text)
    parts = {} if found is None else found.groupdict(default="")
    if parts and parts["runtime"] == HF:  # has nothing of ours
        plain = not any(parts[name] for name in ("kind", "head", "cache", "mode"))
        known = plain and parts["structure"] in ("dense", OWN)
    else:
        known = bool(parts) and (parts["structure"] != CORRECTED or bool(parts["kind"]))
        if known and parts["structure"] == SPECULATIVE:
            known = not (parts["head"] or parts["mode"]) and not (parts["draft"] and parts["kind"])
        elif parts.get("share") or parts.get("draft"):
            known = False
    if not known:
        raise UsageError(
            f"arm {text!r}: expected hf-dense or hf-own, or ours- with one of "
            f"{', '.join(STRUCTURED)} and, if quantized (corrected: always), -int8, -int4, -int3 or "
            f"-int2, then -head8 or -head4 for a quantized output head, then -{CACHE} for keys and "
            f"values in int8, then -{TOKEN} for all layers in one kernel; "
            f"ours-{SPECULATIVE} may first name a draft ({', '.join(DRAFTED)}), then a percentage of "
            "right ones, as -90"
        )
    head, cache = HEADS.get(parts["head"], ""), INT8 if parts["cache"] else WHOLE
    share = int(parts.pop("share") or 100 * SHARE) / 100
    return ArmName(text, **{**parts, "head": head, "cache": cache}, share=share)


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

    def run(self, steps: int) -> None:
        """Decode `steps` tokens after a prompt."""
        for _ in range(steps):
            self.step()

    def greedy(self, count: int) -> list[list[int]]:
        """The first `count` new tokens of every row, by transformers' `generate`."""
        options: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        mask = torch.ones_like(self.ids)
        out = self.model.generate(self.ids, attention_mask=mask, max_new_tokens=count, **options)
        found: list[list[int]] = out[:, self.ids.shape[1] :].tolist()
        return found

    def _step(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.model(tokens, **self.cached, use_cache=True).logits[:, -1]
        return logits.argmax(-1, keepdim=True), logits


class OursArm:
    """Our decoder on the model's own weights, by kernels on a GPU; arguments as of `HfArm`."""

    def __init__(self, model: Any, ids: Tensor, steps: int, cache: str = WHOLE, mode: str = "") -> None:
        self.ids = ids
        batch, context = len(ids), ids.shape[1] + steps + 1
        ops = "triton" if ids.is_cuda else "torch"
        self.decoder: Decoder = Decoder(
            model, batch=batch, context=context, mode=mode or "auto", ops=ops, cache=cache
        )

    def prefill(self) -> None:
        """Forget everything, take the prompt and choose the first token."""
        self.decoder.prefill(self.ids)

    def step(self, tokens: Tensor | None = None) -> Tensor:
        """Feed `tokens` [B], or those chosen last; returns logits [B, vocab]."""
        chosen = self.decoder.state.tokens[: len(self.ids)]
        return self.decoder.step(chosen if tokens is None else tokens)

    def run(self, steps: int) -> None:
        """Decode `steps` tokens after a prompt."""
        for _ in range(steps):
            self.step()

    def bytes_read(self) -> int:
        """Bytes that a step reads by the decoder's own count."""
        return sum(map(self.decoder.bytes_of, self.decoder.plan.phases))

    def greedy(self, count: int) -> list[list[int]]:
        """The first `count` new tokens of every row."""
        return self.decoder.generate(self.ids, max_new_tokens=count)


class SetShare(DraftedDecoder):
    """Accepts a set `share` of drafts, for models of random weights."""

    share: float = SHARE

    def hits(self, chosen: Tensor, proposed: Tensor) -> Tensor:
        """Draws which drafts count as right."""
        return torch.rand(proposed.shape, device=proposed.device) < self.share


class SpeculativeArm(OursArm):
    """Our decoder with a draft. share: of drafts that is accepted; None: those that are right."""

    def __init__(
        self, model: Any, draft: Any, ids: Tensor, steps: int, cache: str, share: float | None
    ) -> None:
        self.ids = ids
        ops = "triton" if ids.is_cuda else "torch"
        options: dict[str, Any] = {"batch": len(ids), "context": ids.shape[1] + steps + 1}
        options |= {"ops": ops, "cache": cache, "choices": DRAFTS}
        kind = DraftedDecoder if share is None else SetShare
        self.decoder: DraftedDecoder = kind(model, draft, **options)
        if isinstance(self.decoder, SetShare) and share is not None:
            self.decoder.share = share

    def prefill(self) -> None:
        """As of `OursArm`; no graph is captured later, while steps are timed."""
        self.logits = self.decoder.prefill(self.ids)
        with torch.no_grad():
            self.decoder.capture()

    def run(self, steps: int) -> None:
        """Decode `steps` tokens after a prompt, by rounds."""
        collector = Collector(len(self.ids), steps + 1)
        self.decoder.proceed(self.logits, Sampler(), collector, steps + 1, 0)

    def said(self) -> str:
        """How many drafts were accepted in the last run."""
        found = self.decoder.acceptance
        return f"{found.total} of {found.drafts} drafts accepted in {found.rounds} rounds"


def compare_tokens(
    found: list[list[int]], plain: HfArm, model: Any, limit: float
) -> tuple[int, str | None, bool]:
    """How many leading tokens are equal, what is to be said of it, and whether that is wrong.

    Tokens may part where two logits of transformers are as near as the two paths' rounding: from
    there on both continuations are right.
    """
    equal, note = len(found[0]), None
    for ids, ours, theirs in zip(plain.ids, found, plain.greedy(len(found[0])), strict=True):
        same = next((n for n, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)
        if same is None:
            continue
        equal = min(equal, same)
        prefix = torch.cat([ids, ids.new_tensor(theirs[:same])])[None]
        logits = model(prefix, use_cache=False, logits_to_keep=1).logits[0, -1].float()
        gap = float(logits[theirs[same]] - logits[ours[same]])
        if gap > limit * float(logits.square().mean().sqrt()):
            return equal, f"greedy tokens differ after {same}, by {gap:.2g} in the logits", True
        note = f"greedy tokens part after {same} at a near tie (logits differ by {gap:.2g})"
    return equal, note, False
