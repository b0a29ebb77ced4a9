"""Launches the persistent kernel on a table and the memory of a decoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blr.kernels.attention.launch import split_count, tile_shape
from blr.kernels.gemv.launch import power_of_two
from blr.kernels.persistent.program import Table, Tuning

REGISTERS = 65536  # of a multiprocessor, from compute capability 7 on
MOST_REGISTERS = 255  # of a thread


@dataclass(frozen=True)
class Memory:
    """What all phases share. k: [rows, Hkv, L, D], any layer's keys; tokens, pos, start: [rows] int64;
    cos, sin: [L, R]; attention: of `attention_workspace`; choice: "values" and "indices"
    [rows, PARTS], and "counter" [rows]; heads: queries of one layer."""

    k: Tensor
    tokens: Tensor
    pos: Tensor
    start: Tensor
    cos: Tensor
    sin: Tensor
    attention: dict[str, Tensor]
    choice: dict[str, Tensor]
    heads: int


class TokenProgram:
    """One token as one launch.

    Args:
        table: of `program.make_table`; activation, norm: of the gated pairs, of queries and keys.
        splits: of the attention at most, a power of two.
    """

    def __init__(
        self, table: Table, memory: Memory, tuning: Tuning, *, activation: str, norm: bool, splits: int
    ) -> None:
        device = memory.k.device
        self.table, self.memory, self.tuning = table, memory, tuning
        self.words = table.words.to(device)
        self.counter = torch.zeros(1, dtype=torch.int64, device=device)
        self.generation = torch.zeros(1, dtype=torch.int64, device=device)
        self.splits = splits
        self.constants = self._constants(activation, norm)

    def run(self, rows: int, bucket: int, splits: int | None = None, phase: int | None = None) -> None:
        """A whole token of `rows` rows (1 or 2) and contexts of up to `bucket` slots; or one `phase`
        of it, as a plain kernel without a barrier.

        Raises ValueError for more splits than the program was made for.
        """
        heads = self.memory.k.shape[1]
        splits = splits or min(split_count(rows * heads, bucket), self.splits)
        if splits > self.splits:
            raise ValueError(f"{splits} splits: expected {self.splits} at most")
        if phase is None:
            self._launch(rows, splits, bucket, 0, self.table.starts[-1])
            return
        for step in range(*self.table.starts[phase : phase + 2]):
            self._launch(rows, splits, bucket, step, step + 1)

    def _launch(self, rows: int, splits: int, bucket: int, begin: int, end: int) -> None:
        from blr.kernels.persistent.triton import token_kernel

        arguments, options = self.call(rows, splits, bucket, begin, end)
        token_kernel[(self.table.programs,)](*arguments, **options)

    def call(
        self, rows: int, splits: int, bucket: int, begin: int, end: int
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The kernel's arguments and options for steps begin…end − 1."""
        m, whole = self.memory, end - begin == self.table.starts[-1]
        limit = REGISTERS // (self.tuning.programs * self.tuning.warps * 32)
        options: dict[str, Any] = {"num_warps": self.tuning.warps, "num_stages": 1}
        options |= {"maxnreg": min(limit // 8 * 8, MOST_REGISTERS)}
        options |= {"launch_cooperative_grid": True} if whole else {}
        arguments = (
            *(self.words, self.counter, self.generation, begin, end, m.k, m.cos),
            *(m.tokens, m.pos, m.start, m.cos, m.sin, m.cos.stride(0), m.attention["partial"]),
            *(m.attention["state"], m.attention["counter"], splits, -(-bucket // splits)),
            *(m.k.stride(0), m.k.stride(1), m.k.shape[1], m.k.shape[3], m.cos.shape[1]),
            *(m.choice["values"], m.choice["indices"], m.choice["counter"]),
        )
        return arguments, {"N": rows, "SYNC": whole, **self.constants, **options}

    def _constants(self, activation: str, norm: bool) -> dict[str, Any]:
        m = self.memory
        kv_heads, width = m.k.shape[1], m.k.shape[3]
        tile = tile_shape(m.heads // kv_heads, width, m.k.dtype)
        attention = {"G": m.heads // kv_heads, "GP": tile["GP"], "DP": max(power_of_two(width), 16)}
        attention |= {"BN": tile["BN"], "DOT": tile["DOT"], "SPLITS": self.splits, "NORM": norm}
        variants = tuple(number for variant in self.table.variants for number in variant)
        return {
            **{"VARIANTS": variants, "COUNT": len(self.table.variants), "ACT": activation},
            **{"PARTS": m.choice["values"].shape[1], **attention},
        }
