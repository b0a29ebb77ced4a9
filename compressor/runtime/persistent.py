"""A whole token in one kernel: the phases of a plan as the table of the persistent kernel."""

from __future__ import annotations

from math import e, log2
from typing import Any

import torch

from blr.compressor.modeling.quantized import Packed
from blr.compressor.runtime.failures import UnsupportedError
from blr.compressor.runtime.memory import State, bucket_of
from blr.compressor.runtime.plan import Part, Phase, Plan
from blr.kernels.attention.launch import MAX_SPLITS, split_count
from blr.kernels.gemv.segments import Segment
from blr.kernels.persistent.launch import Memory, TokenProgram
from blr.kernels.persistent.program import (
    Piece,
    Tuning,
    attention_piece,
    choose_piece,
    embed_piece,
    make_table,
    pairs_piece,
    rows_piece,
)

MOST_ROWS = 2
FUSED = ("embed", "stages", "dual", "attention", "choose")


def refusal(plan: Plan, batch: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why a token of `plan` cannot be one kernel, in one line; None if it can."""
    if batch > MOST_ROWS:
        return f"mode 'persistent' with batch {batch}: expected 1 or {MOST_ROWS}"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (7, 0):
        name = torch.cuda.get_device_name(device)
        return f"mode 'persistent' on {name}: expected compute capability 7"
    for phase in plan.phases:
        if phase.kind not in FUSED:
            return f"mode 'persistent': {phase.name} is of kind {phase.kind!r}, which is no part of it"
        for part in phase.parts:
            reason = _weights_refusal(part, dtype)
            if reason is not None:
                return f"mode 'persistent': {phase.name} has {reason}"
    return None


def _weights_refusal(part: Part, dtype: torch.dtype) -> str | None:
    stage = part.stage
    if isinstance(stage.w, Packed):
        return "quantized weights: expected plain ones"
    if stage.w.stride(2) != 1 and stage.w.shape[2] > 1:
        return "columns that are not contiguous: expected kernel layout, as on a GPU"
    found = {t.dtype for t in (stage.w, stage.bias, stage.mix) if t is not None}
    return None if found == {dtype} else f"tensors of {found}: expected {dtype}"


def default_programs(device: torch.device, tuning: Tuning) -> int:
    """One program in the interpreter; on a GPU as many as run at the same time."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count * tuning.programs


class PersistentToken:
    """The token of a plan on the memory of a decoder.

    Args:
        fixed: splits of the attention for a bucket of the context, None for the launcher's choice.
        programs: in place of `default_programs`.

    Raises:
        UnsupportedError: with the reason that `refusal` gives, or for sizes that no table holds.
    """

    def __init__(
        self,
        plan: Plan,
        state: State,
        model: Any,
        context: int,
        *,
        fixed: Any = None,
        tuning: Tuning | None = None,
        programs: int | None = None,
    ) -> None:
        batch = len(state.tokens)
        reason = refusal(plan, batch, model.dtype, model.device)
        if reason is not None:
            raise UnsupportedError(f"{reason}; use mode 'graph'")
        self.plan, self.state, self.tuning = plan, state, tuning or Tuning()
        self.fixed = fixed or (lambda bucket: None)
        if state.kv.scale_data is not None:
            raise UnsupportedError("mode 'persistent' with keys and values in int8; use mode 'graph'")
        count = programs or default_programs(model.device, self.tuning)
        try:
            table = make_table([self._pieces(phase) for phase in plan.phases], count, self.tuning)
        except ValueError as error:
            raise UnsupportedError(f"mode 'persistent': {error}; use mode 'graph'") from error
        k, _ = state.kv.layer(0, batch)
        heads = model.config.num_attention_heads
        memory = Memory(k, state.tokens, state.pos, state.start, state.cos, state.sin, state.attention,
                        state.choice, heads)  # fmt: skip
        gated = {phase.activation for phase in plan.phases if phase.kind == "dual"}
        norm = any(phase.heads.q_gain is not None for phase in plan.phases if phase.heads)
        longest = bucket_of(context)
        most = self.fixed(longest) or split_count(k.shape[1], longest)
        most = min(1 << (most - 1).bit_length(), MAX_SPLITS)
        self.program = TokenProgram(
            table, memory, self.tuning, activation="".join(gated), norm=norm, splits=most
        )

    def run(self, rows: int, bucket: int) -> None:
        """One token of `rows` rows in contexts of up to `bucket` slots."""
        self.program.run(rows, bucket, self.fixed(bucket))

    def _pieces(self, phase: Phase) -> list[Piece]:
        return getattr(self, f"_{phase.kind}")(phase)

    def _segment(self, part: Part) -> Segment:
        rows, stage = len(self.state.tokens), part.stage
        assert not isinstance(stage.w, Packed)  # as `refusal` says
        x, y = self.state.view(part.source, rows), self.state.view(part.target, rows)
        return Segment(x, stage.w, y, stage.bias, stage.mix, stage.part)

    def _stages(self, phase: Phase) -> list[Piece]:
        segments = map(self._segment, phase.parts)
        return [rows_piece(s, phase.gain, phase.eps, phase.add) for s in segments]

    def _dual(self, phase: Phase) -> list[Piece]:
        gate, up = map(self._segment, phase.parts)
        return [pairs_piece(gate, up, phase.gain, phase.eps)]

    def _attention(self, phase: Phase) -> list[Piece]:
        heads, rows = phase.heads, len(self.state.tokens)
        assert heads is not None
        source, target = (self.state.view(slot, rows) for slot in (phase.source, phase.target))
        k, v = self.state.kv.layer(heads.layer, rows)
        norm = (heads.q_gain, heads.k_gain, heads.eps)
        return [attention_piece(source, target, k, v, heads.scale * log2(e), *norm, heads.window)]

    def _embed(self, phase: Phase) -> list[Piece]:
        assert phase.weight is not None
        return [embed_piece(phase.weight, self.state.view(phase.target, len(self.state.tokens)))]

    def _choose(self, phase: Phase) -> list[Piece]:
        return [choose_piece(self.state.view(phase.source, len(self.state.tokens)))]
