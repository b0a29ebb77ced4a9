"""Launches of Triton kernels, recorded instead of run: what a GPU would be asked to compile.

A host function called with meta tensors decides everything it decides on a GPU: grid, block sizes,
strides. `Recorder` stands in for a kernel, keeps its launches, and turns one into the arguments of
`compiling.compile_for`, specialized as Triton's launcher does (1 is a constant, 16 divides).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compiling import compile_for

OPTIONS = ("num_warps", "num_stages")
POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}


class Recorder:
    """Takes the place of `module.kernel` while a test runs; `launches` holds what was asked of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: str, kernel: str) -> None:
        self.module, self.kernel = module, kernel
        self.names: list[str] = _names(module, kernel)
        self.launches: list[dict[str, Any]] = []
        self.constants: list[dict[str, Any]] = []  # passed by name: block sizes, flags, options
        monkeypatch.setattr(f"{module}.{kernel}", self)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def record(*args: Any, **named: Any) -> None:
            self.launches.append(dict(zip(self.names, args, strict=False)))
            self.constants.append(named)

        return record

    def compile(self, launch: int, capability: int) -> dict[str, Any]:
        """`compile_for` of one recorded launch: arguments by position are runtime, by name constants."""
        constants = dict(self.constants[launch])
        options = {name: constants.pop(name) for name in OPTIONS if name in constants}
        signature, divisible = {}, []
        for name, value in self.launches[launch].items():
            if isinstance(value, torch.Tensor):
                signature[name] = POINTERS[value.dtype]
                divisible.append(name)
            elif value == 1:
                constants[name] = value
            else:
                signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
                divisible += [name] if value % 16 == 0 else []
        return compile_for(
            self.module,
            self.kernel,
            signature,
            constants,
            capability,
            divisible=tuple(divisible),
            **options,
        )


def _names(module: str, kernel: str) -> list[str]:
    from importlib import import_module

    return list(getattr(import_module(module), kernel).arg_names)
