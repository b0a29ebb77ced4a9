"""Binds phases to memory: makes a function without arguments of each, by kernels or in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from blr.compressor.modeling.modeling_blr import is_number
from blr.compressor.modeling.stages import Packed
from blr.compressor.runtime.memory import CHOICE_BLOCK, DecoderState
from blr.compressor.runtime.plan import Columns, Phase, StagePart
from blr.kernels.decode.gemv.segments import (
    ACTIVATIONS,
    SEVERAL,
    Correction,
    How,
    QuantizedSegment,
    Run,
    Segment,
    dual,
    grouped,
    in_turn,
)

# Kinds of phases that are kernels of ours, as the others are torch's.
KERNELS = ("embed", "stages", "dual", "attention", "choose")


@dataclass(frozen=True)
class Binder:
    """Binds phases for the first `rows` rows of `state` and contexts of up to `bucket` slots. tokens: of
    each sequence, in rows as `DecoderState` says. like: rows of a pass in which a token has the same
    sums, bit for bit, by kernels. triton: by kernels, else by the references. pdl: kernels start while
    the kernel before them ends. halved: slots whose numbers are in the model's dtype. ordered: slots
    whose numbers are also in the order of the packed weights that read them."""

    state: DecoderState
    rows: int
    bucket: int
    triton: bool
    pdl: bool = False
    tokens: int = 1
    like: int = 1
    halved: set[Columns] = field(default_factory=set)
    ordered: set[Columns] = field(default_factory=set)

    def bind_all(self, phases: Sequence[Phase]) -> list[Run]:
        """The functions that run `phases` one after the other. The first never overlaps with a kernel
        before it, so that all kernels see what earlier tokens wrote; nor does any overlap with torch's
        kernels."""
        runs, overlap = [], False
        for phase in phases:
            binder = replace(self, pdl=self.pdl and overlap)
            if phase.kind == "experts":
                run, overlap = binder.experts(phase)
            else:
                run, overlap = binder.bind(phase), phase.kind in KERNELS
            runs.append(run)
        return runs

    def bind(self, phase: Phase) -> Run:
        if phase.kind not in ("stages", "dual"):
            self.ordered.discard(phase.target)
        return getattr(self, f"_{phase.kind}")(phase)

    def _segment(self, part: StagePart) -> Segment | QuantizedSegment:
        if self._order(part) is not None:
            self.halved.add(part.target)
        x, y = self._view(part.source), self._view(part.target)
        stage, w = part.stage, part.stage.w
        if not isinstance(w, Packed):
            return Segment(x, w, y, stage.bias, stage.mix, stage.part)
        correction = None
        if stage.correction is not None and part.first is not None:
            correction = Correction(self._segment(part.first), stage.correction.u)
        return QuantizedSegment(
            *(x, w.packed, w.scale, w.bits, w.K, y, stage.bias, stage.mix, stage.part),
            group=w.group,
            correction=correction,
            curved=w.curved,
        )

    def _order(self, part: StagePart) -> tuple[int, int] | None:
        """The order in which packed weights read a target; None unless tensor cores compute them."""
        least = SEVERAL if part.order is None or part.order[0] == 4 else SEVERAL + 1
        return part.order if self.triton and self.rows >= least else None

    def _stages(self, phase: Phase) -> Run:
        segments, gain, eps = [self._segment(part) for part in phase.parts], phase.gain, phase.eps
        if not self.triton:
            if phase.activation:
                return partial(dual, *segments, activation=phase.activation, gain=gain, eps=eps)
            if phase.add:
                return lambda: [s.y.add_(s.product(gain, eps)) for s in segments]
            return partial(grouped, segments, gain=gain, eps=eps)
        how = How(gain, eps, phase.add, phase.activation, self.pdl)
        targets = {part.target for part in phase.parts}
        self.ordered.difference_update(targets)
        from blr.kernels.decode.choice import kernels_for, stages

        on_cores = kernels_for(segments, self.like) == "skinny"
        run = self._tensor_cores(phase, segments, how) if on_cores else None
        return run or stages(segments, how)

    _dual = _stages

    def _tensor_cores(
        self, phase: Phase, segments: list[Segment | QuantizedSegment], how: How
    ) -> Run | None:
        """Runs segments on tensor cores and records the order of targets; None if they cannot."""
        from blr.kernels.decode.skinny.bound import OnCores, stages
        from blr.kernels.decode.skinny.launch import PartialSums

        dtype, order = self.state.kv.dtype, self._order(phase.parts[0])
        order = order if segments[0].y.dtype == dtype else None
        ordered = all(part.source in self.ordered for part in phase.parts)
        given = OnCores(**vars(how), workspace=PartialSums(self.state.sums), dtype=dtype, order=order,
                        ordered=ordered, like=self.like)  # fmt: skip
        run = stages(segments, given)
        assert run is not None or not ordered, "inputs in an order that nothing reads"
        if run is not None and order is not None:
            self.ordered.update(part.target for part in phase.parts)
        return run

    def _slots(self, phase: Phase) -> tuple[Tensor, Tensor]:
        return self._view(phase.source), self._view(phase.target)

    def _view(self, slot: Columns) -> Tensor:
        """A slot, in the model's dtype where packed weights or tensor cores read it."""
        half = self.like >= SEVERAL or slot in self.halved
        return self.state.view(slot, self.rows, self.triton and half)

    def _gate(self, phase: Phase) -> Run:
        source, target = self._slots(phase)
        gate, up = source.chunk(2, -1)
        return lambda: torch.mul(ACTIVATIONS[phase.activation](gate), up, out=target)

    def _norm(self, phase: Phase) -> Run:
        (source, target), gain = self._slots(phase), phase.gain
        assert gain is not None

        def norm() -> None:
            x = source * torch.rsqrt(source.square().mean(-1, keepdim=True) + phase.eps)
            torch.mul(x, gain.float(), out=target)

        return norm

    def _module(self, phase: Phase) -> Run:
        (source, target), module = self._slots(phase), phase.module
        assert module is not None
        stored = (*module.parameters(), *module.buffers())
        dtype = next((t.dtype for t in stored if is_number(t)), source.dtype)

        def call() -> None:
            y = module(source.to(dtype)[None])[0]  # as one sequence, which mixtures of experts expect
            target.add_(y) if phase.add else target.copy_(y)

        return call

    def experts(self, phase: Phase) -> tuple[Run, bool]:
        """As of `mixtures.bound`."""
        from blr.compressor.runtime.mixtures import bound

        self.ordered.discard(phase.target)
        return bound(phase, *self._slots(phase), self.state.kv.dtype, self.triton, self.pdl)

    def _attention(self, phase: Phase) -> Run:
        """Several tokens of a sequence read what each of them appends: in turn, or by a second launch of
        the kernel after one that is of use for what it appends alone."""
        rows, whole = self.rows // self.tokens, slice(0, self.rows)
        if self.tokens == 1:
            return self._attend(phase, whole, self.pdl)
        if self.triton:
            return partial(in_turn, [self._attend(phase, whole, pdl) for pdl in (self.pdl, False)])
        parts = [slice(at, at + rows) for at in range(0, self.rows, rows)]
        return partial(in_turn, [self._attend(phase, part, False) for part in parts])

    def _attend(self, phase: Phase, rows: slice, pdl: bool) -> Run:
        state, heads, slots = self.state, phase.heads, self._slots(phase)
        assert heads is not None
        source, target, pos, start = (t[rows] for t in (*slots, state.pos, state.start))
        sequences = self.rows // self.tokens
        inputs = (source, *state.kv.layer(heads.layer, sequences), state.cos, state.sin, pos, start)
        options = {name: value for name, value in vars(heads).items() if name not in ("layer", "width")}
        options |= {"scales": state.kv.scales(heads.layer, sequences)}
        if self.triton:
            from blr.kernels.decode.attention.launch import decode_attention

            options |= {"workspace": state.attention, "bucket": self.bucket}
            options |= {"exact": state.kv.dtype == torch.float32}
            return partial(decode_attention, *inputs, **options, out=target, pdl=pdl)
        from blr.kernels.decode.attention.reference import decode_attention as attend

        return lambda: target.copy_(attend(*inputs, **options))

    def _embed(self, phase: Phase) -> Run:
        tokens, table = self.state.tokens[: self.rows], phase.weight
        assert table is not None
        x = self.state.view(phase.target, self.rows)
        if not self.triton:
            return lambda: x.copy_(table[tokens])
        from blr.compressor.runtime.ends_triton import embed_kernel

        grid = (self.rows, -(-x.shape[1] // 1024))
        arguments = (tokens, table, table.stride(0), x, x.stride(0), x.shape[1])
        return lambda: embed_kernel[grid](*arguments, BLOCK=1024)

    def _choose(self, phase: Phase) -> Run:
        state, logits = self.state, self.state.view(phase.source, self.rows)
        tokens, pos = state.tokens[: self.rows], state.pos[: self.rows]
        if not self.triton:
            return lambda: (tokens.copy_(logits.argmax(-1)), pos.add_(1))
        from blr.compressor.runtime.ends_triton import choose_kernel

        values, indices, counter = state.choice
        grid = (self.rows, -(-logits.shape[1] // CHOICE_BLOCK))
        arguments = (logits, logits.stride(0), logits.shape[1], values, indices, counter, tokens, pos)
        options: dict[str, object] = {"BLOCK": CHOICE_BLOCK, "PARTS": values.shape[1], "PDL": self.pdl}
        options |= {"launch_pdl": True} if self.pdl else {}
        return lambda: choose_kernel[grid](*arguments, **options)
