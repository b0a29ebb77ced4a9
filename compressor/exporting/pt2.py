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
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blr.compressor.base.disk import flush, sha256_file
from blr.compressor.base.errors import CapabilityError
from blr.compressor.base.scratch import scratch_folder
from blr.compressor.exporting.forward import (
    compare,
    eager_attention,
    example_inputs,
    plain_forward,
    traced,
)
from blr.compressor.exporting.options import COMPILED

COMPILERS = ("g++", "clang++", "c++")
# Loads a package and runs it: package, inputs and outputs are the arguments.
RUN = """
import sys, torch
package = torch._inductor.aoti_load_package(sys.argv[1])
with torch.no_grad():
    found = package(**torch.load(sys.argv[2]))
torch.save({name: tensor.cpu() for name, tensor in found.items()}, sys.argv[3])
"""


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
    path = folder / COMPILED
    inputs, free = example_inputs(model, "pt2")
    with traced(model, "pt2"):
        program = export_program(model, inputs, free)
        torch._inductor.aoti_compile_and_package(program, package_path=str(path))
    found = _results(path, inputs)
    with torch.no_grad():
        compare(found, plain_forward(model)(**inputs), "pt2")
    with open(path, "rb+") as file:
        flush(file.fileno())
    return {COMPILED: (path.stat().st_size, sha256_file(path))}


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
    with scratch_folder() as folder:
        given, found = folder / "inputs", folder / "outputs"
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
