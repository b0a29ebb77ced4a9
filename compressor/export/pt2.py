"""The forward pass of an encoder, compiled ahead of time by AOTInductor into one file.

`model.pt2` runs without transformers and without `blr`: structured layers trace as the plain torch
products of their references, which Inductor compiles for the machine it runs on, a GPU if
there is one. Batch and, for text, length are free.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from blr.compressor.checkpoint.disk import flush, sha256_file
from blr.compressor.errors import CapabilityError
from blr.compressor.export.export import COMPILED

FILE = COMPILED
COMPILERS = ("g++", "clang++", "c++")
EXAMPLE = (2, 16)  # sequences or images, tokens: what is traced, not what may be passed
# Loads a package and runs it: package, inputs and outputs are the arguments.
RUN = """
import sys, torch
package = torch._inductor.aoti_load_package(sys.argv[1])
with torch.no_grad():
    found = package(**torch.load(sys.argv[2]))
torch.save({name: tensor.cpu() for name, tensor in found.items()}, sys.argv[3])
"""
DRIFT = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}  # of a compiled pass


def check_pt2(name: str, generates: bool) -> None:
    """Raise CapabilityError where no compiled forward pass can be made of the model class `name`."""
    if generates:
        raise CapabilityError(
            f"--as pt2: {name} generates text, and a compiled forward pass holds no cache; "
            "leave it out, the exported folder has a decoding runtime"
        )
    wanted = (os.environ["CXX"],) if os.environ.get("CXX") else COMPILERS
    if not any(map(shutil.which, wanted)):
        raise CapabilityError(
            f"--as pt2: no C++ compiler ({' or '.join(wanted)}), AOTInductor needs one; install "
            "it, or leave the option out"
        )


def write_pt2(model: Any, folder: Path) -> dict[str, tuple[int, str]]:
    """Compile the forward pass of `model` into `folder`, load it again and compare.

    Returns:
        The file's name to size and SHA-256.

    Raises:
        CapabilityError: torch.export or AOTInductor does not take the model, or what it makes does
            not run here or gives other results.
    """
    path = folder / FILE
    inputs, free = example_inputs(model)
    try:
        program = export_program(model, inputs, free)
        torch._inductor.aoti_compile_and_package(program, package_path=str(path))
    except Exception as error:  # whatever in a model the compiler does not take
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise CapabilityError(
            f"--as pt2: {type(model).__name__} does not compile ({type(error).__name__}: {reason}); "
            "leave the option out"
        ) from error
    found = _results(path, inputs)
    with torch.no_grad():
        _compare(found, plain_forward(model)(**inputs))
    with open(path, "rb+") as file:
        flush(file.fileno())
    return {FILE: (path.stat().st_size, sha256_file(path))}


def export_program(model: Any, inputs: dict[str, Tensor], free: dict[str, Any]) -> Any:
    """The forward pass as a `torch.export` program of torch's own operators.

    Args:
        inputs: by name. free: the same names to axes and their `torch.export.Dim`.
    """
    trace = partial(torch.export.export, args=(), kwargs=inputs, dynamic_shapes=free, strict=False)
    with torch.no_grad():
        try:
            return trace(plain_forward(model))
        except torch._dynamo.exc.UserError:  # fused attention of some GPUs fixes the length of a mask
            with eager_attention(model):
                return trace(plain_forward(model))


def _results(path: Path, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """What a package computes in a process of its own, with torch alone, on the CPU.

    Raises CapabilityError where it cannot be loaded or run: some versions of torch crash there.
    """
    with TemporaryDirectory() as folder:
        given, found = Path(folder) / "inputs", Path(folder) / "outputs"
        torch.save(inputs, given)
        command = [sys.executable, "-c", RUN, str(path), str(given), str(found)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode == 0:
            return torch.load(found)
    said = (done.stderr.strip().splitlines() or ["no message"])[-1][:200]
    why = f"signal {-done.returncode}" if done.returncode < 0 else said
    raise CapabilityError(
        f"--as pt2: the compiled pass does not run here with torch {torch.__version__} ({why}); "
        "leave the option out, or try another version of torch"
    )


@contextmanager
def eager_attention(model: Any) -> Iterator[None]:
    """Attention as plain products and a softmax while active."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def example_inputs(model: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Inputs to trace with, and which of their axes are free.

    Raises CapabilityError for a model that takes neither token ids nor images.
    """
    batch, tokens = EXAMPLE
    rows, config = torch.export.Dim("batch", min=1), model.config
    if model.main_input_name == "input_ids":
        limit = getattr(config, "max_position_embeddings", None) or 512
        # RoBERTa's positions begin behind the padding id
        reserved = (config.pad_token_id or 0) + 1 if "roberta" in config.model_type else 0
        columns = torch.export.Dim("tokens", min=2, max=limit - reserved)
        ids = torch.full((batch, tokens), 3, device=model.device)
        axes = {0: rows, 1: columns}
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        return inputs, dict.fromkeys(inputs, axes)
    if model.main_input_name == "pixel_values" and isinstance(config.image_size, int):
        size = (batch, config.num_channels, config.image_size, config.image_size)
        image = torch.linspace(-1, 1, batch * size[1] * size[2] ** 2, device=model.device)
        return {"pixel_values": image.view(size).to(model.dtype)}, {"pixel_values": {0: rows}}
    raise CapabilityError(
        f"--as pt2: {type(model).__name__} takes {model.main_input_name}; expected token ids or "
        "images of one size; leave the option out"
    )


class TextForward(nn.Module):
    """A text encoder whose results are a plain dict of tensors, which needs no transformers to load."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        """Results by name for ids and mask [batch, tokens]."""
        return _tensors(self.model.forward(input_ids=input_ids, attention_mask=attention_mask))


class ImageForward(nn.Module):
    """The same of a vision encoder."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor) -> dict[str, Tensor]:
        """Results by name for images [batch, channels, height, width]."""
        return _tensors(self.model.forward(pixel_values=pixel_values))


def plain_forward(model: Any) -> nn.Module:
    """`model` with named inputs and a dict of tensors as result."""
    return (TextForward if model.main_input_name == "input_ids" else ImageForward)(model)


def _tensors(found: Any) -> dict[str, Tensor]:
    return {name: value for name, value in found.items() if isinstance(value, Tensor)}


def _compare(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Raise CapabilityError when a compiled pass drifts from the eager one."""
    for name, exact in expected.items():
        exact = exact.float().cpu()
        error = float((found[name].float() - exact).norm() / exact.norm())
        if not error <= DRIFT.get(found[name].dtype, 1e-3):
            raise CapabilityError(
                f"--as pt2: {name} of the compiled pass is off by {error:.2g}, expected less than "
                f"{DRIFT.get(found[name].dtype, 1e-3):g}; leave the option out"
            )
