"""The forward pass of a model as a plain function of tensors: what `--as pt2` and `--as onnx` trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from blr.compressor.base.errors import CapabilityError
from blr.compressor.base.quoting import first_line
from blr.compressor.checkpoint.context import UNLIMITED, context_of

EXAMPLE = (2, 16)  # sequences or images, tokens: what is traced, not what may be passed
DRIFT = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}  # of a compiled pass


@contextmanager
def traced(model: Any, kind: str) -> Iterator[None]:
    """Raise CapabilityError for whatever of `model` a tracer or compiler does not take."""
    try:
        yield
    except Exception as error:
        reason = first_line(error, 200)
        raise CapabilityError(
            f"--as {kind}: {type(model).__name__} does not compile ({type(error).__name__}: {reason}); "
            "leave the option out"
        ) from error


@contextmanager
def eager_attention(model: Any) -> Iterator[None]:
    """Attention as plain products and a softmax while active."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def example_inputs(model: Any, kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Inputs to trace with, and which of their axes are free.

    Raises CapabilityError for a model that takes neither token ids nor images.
    """
    batch, tokens = EXAMPLE
    rows, config = torch.export.Dim("batch", min=1), model.config
    if model.main_input_name == "input_ids":
        limit = context_of(config.to_dict())
        columns = torch.export.Dim("tokens", min=2, max=512 if limit == UNLIMITED else limit)
        ids = torch.full((batch, tokens), 3, device=model.device)
        axes = {0: rows, 1: columns}
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        return inputs, dict.fromkeys(inputs, axes)
    if model.main_input_name == "pixel_values" and isinstance(config.image_size, int):
        size = (batch, config.num_channels, config.image_size, config.image_size)
        image = torch.linspace(-1, 1, batch * size[1] * size[2] ** 2, device=model.device)
        return {"pixel_values": image.view(size).to(model.dtype)}, {"pixel_values": {0: rows}}
    raise CapabilityError(
        f"--as {kind}: {type(model).__name__} takes {model.main_input_name}; expected token ids or "
        "images of one size; leave the option out"
    )


class TextForward(nn.Module):
    """A text encoder whose results are a plain dict of tensors, which needs no transformers to load."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        """Results by name for ids and mask [batch, tokens]."""
        return tensors(self.model.forward(input_ids=input_ids, attention_mask=attention_mask))


class ImageForward(nn.Module):
    """The same of a vision encoder."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor) -> dict[str, Tensor]:
        """Results by name for images [batch, channels, height, width]."""
        return tensors(self.model.forward(pixel_values=pixel_values))


def plain_forward(model: Any) -> nn.Module:
    """`model` with named inputs and a dict of tensors as result."""
    return (TextForward if model.main_input_name == "input_ids" else ImageForward)(model).eval()


def tensors(found: Any) -> dict[str, Tensor]:
    """Those of a model's results, by name."""
    return {name: value for name, value in found.items() if isinstance(value, Tensor)}


def compare(found: dict[str, Tensor], expected: dict[str, Tensor], kind: str) -> None:
    """Raise CapabilityError when a compiled pass drifts from the eager one."""
    for name, exact in expected.items():
        exact = exact.float().cpu()
        error = float((found[name].float() - exact).norm() / exact.norm())
        if not error <= DRIFT.get(found[name].dtype, 1e-3):
            raise CapabilityError(
                f"--as {kind}: {name} of the compiled pass is off by {error:.2g}, expected less than "
                f"{DRIFT.get(found[name].dtype, 1e-3):g}; leave the option out"
            )
