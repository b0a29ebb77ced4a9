"""Exports the forward pass of a model as a plain function of tensors, in two forms. `model.pt2`, of an
encoder, is compiled ahead of time by AOTInductor: it runs without transformers and `blr`, on machines
like the one it was made on. `model.onnx` is a graph for engines other than torch; that of a decoder
returns logits and keeps no cache; writing it takes the whole model in memory. In both, structured layers
are plain products; batch and, for text, length are free."""

import logging
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager, redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from blr.compressor.base.disk import flush, scratch_folder, sha256_file
from blr.compressor.base.errors import CapabilityError
from blr.compressor.base.exhaustion import is_missing
from blr.compressor.base.progress import Progress
from blr.compressor.base.quoting import first_line
from blr.compressor.checkpoint.context import UNLIMITED, context_of
from blr.compressor.exporting.options import COMPILED, GRAPH
from blr.compressor.output.files import Written

EXAMPLE = (2, 16)  # sequences or images, tokens: what is traced, not what may be passed
DRIFT = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}  # of a compiled pass
CHECKER, PIP = "onnxruntime", "pip install 'blr-compress[onnx]'"
Free = dict[str, dict[int, object]]  # axes of inputs to their `torch.export.Dim`
ROWS, TOKENS = 3, 9  # of the check: other sizes than those traced
COMPILERS = ("g++", "clang++", "c++")
# Loads a package and runs it: package, inputs and outputs are the arguments.
RUN = """
import sys, torch
package = torch._inductor.aoti_load_package(sys.argv[1])
with torch.no_grad():
    found = package(**torch.load(sys.argv[2]))
torch.save({name: tensor.cpu() for name, tensor in found.items()}, sys.argv[3])
"""


@contextmanager
def traced(model: PreTrainedModel, kind: str) -> Iterator[None]:
    """While active, turn errors of a tracer or compiler on `model` into CapabilityError."""
    try:
        yield
    except Exception as error:
        reason = first_line(error, 200)
        why = f"{type(model).__name__} does not compile ({type(error).__name__}: {reason})"
        raise CapabilityError(f"--as {kind}: {why}; leave the option out") from error


def example_inputs(model: PreTrainedModel, kind: str) -> tuple[dict[str, Tensor], Free]:
    """Make inputs to trace with, and tell which of their axes are free. Raises CapabilityError for a
    model that takes neither token ids nor images."""
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
    found = f"{type(model).__name__} takes {model.main_input_name}"
    expected = "expected token ids or images of one size"
    raise CapabilityError(f"--as {kind}: {found}; {expected}; leave the option out")


class ForwardPass(nn.Module):
    """A model whose results are a plain dict of tensors, so that loading it needs no transformers."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.eval()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        pixel_values: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Results by name for ids and mask [batch, tokens], or images [batch, channels, h, w]."""
        text = {"input_ids": input_ids, "attention_mask": attention_mask}
        found = self.model.forward(**text if pixel_values is None else {"pixel_values": pixel_values})
        return {name: value for name, value in found.items() if isinstance(value, Tensor)}


def compare(found: dict[str, Tensor], expected: dict[str, Tensor], kind: str) -> None:
    """Raise CapabilityError when a compiled pass drifts from the eager one."""
    for name, exact in expected.items():
        exact = exact.float().cpu()
        error = float((found[name].float() - exact).norm() / exact.norm())
        most = DRIFT.get(found[name].dtype, 1e-3)
        if not error <= most:
            off = f"{name} of the compiled pass is off by {error:.2g}, expected less than {most:g}"
            raise CapabilityError(f"--as {kind}: {off}; leave the option out")


def write_onnx(model: PreTrainedModel, folder: Path, progress: Progress) -> Written:
    """Trace `model`, which is on the CPU, into `folder`, and compare with it what onnxruntime computes.
    Weights in bfloat16, which onnxruntime multiplies nowhere on a CPU, are written in float32. Raises
    CapabilityError: the exporter does not take the model, or the graph gives other results."""
    if model.dtype == torch.bfloat16:
        model = model.float()
    model.config.use_cache = False
    before = {path.name for path in folder.iterdir()}
    _check_graph(model, folder / GRAPH, _trace(model, folder / GRAPH), progress)
    return _written(folder, sorted({path.name for path in folder.iterdir()} - before))


def _written(folder: Path, names: Collection[str]) -> Written:
    """Size and SHA-256 of files by name, once they are on the disk."""
    for name in names:
        with open(folder / name, "rb+") as file:
            flush(file.fileno())
    return {name: ((folder / name).stat().st_size, sha256_file(folder / name)) for name in names}


def _trace(model: PreTrainedModel, path: Path) -> list[str]:
    inputs, free = example_inputs(model, "onnx")
    forward = ForwardPass(model)
    with traced(model, "onnx"), torch.no_grad(), _quiet():
        names = list(forward(**inputs))
        options = {"dynamic_shapes": free, "output_names": names, "verbose": False}
        program = torch.onnx.export(forward, (), kwargs=inputs, dynamo=True, **options)
        for node in program.model.graph.all_nodes():
            node.metadata_props.clear()  # stack traces, with the paths of this machine
        program.save(path, external_data=True)
    return names


def _check_graph(model: PreTrainedModel, path: Path, names: list[str], progress: Progress) -> None:
    """Compare the graph with the model at sizes that were not traced."""
    if is_missing(CHECKER):
        progress.notes([f"{CHECKER} not installed: {path.name} is not compared with the model; {PIP}"])
        return
    import onnxruntime

    inputs = {name: _resized(tensor) for name, tensor in example_inputs(model, "onnx")[0].items()}
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    given = {name: tensor.numpy() for name, tensor in inputs.items()}
    found = {n: torch.from_numpy(y) for n, y in zip(names, session.run(names, given), strict=True)}
    with torch.no_grad():
        compare(found, ForwardPass(model)(**inputs), "onnx")


def _resized(example: Tensor) -> Tensor:
    """An input like `example` with other numbers of rows and tokens, and other values for images."""
    if example.dim() > 2:
        return example.flip(-1)[:1].repeat(ROWS, 1, 1, 1)
    return example[:1, :TOKENS].repeat(ROWS, 1)


@contextmanager
def _quiet() -> Iterator[None]:
    """While active, silence the exporter's advice on packages that the work does not need."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"), redirect_stdout(StringIO()):
            yield
    finally:
        logger.setLevel(level)


def check_pt2(name: str, generates: bool) -> None:
    """Raise CapabilityError where no compiled forward pass can be made of the model class `name`."""
    if generates:
        said = f"{name} generates text, and a compiled forward pass holds no cache"
        remedy = "leave it out, the exported folder has a decoding runtime"
        raise CapabilityError(f"--as pt2: {said}; {remedy}")
    wanted = (os.environ["CXX"],) if os.environ.get("CXX") else COMPILERS
    if not any(map(shutil.which, wanted)):
        said = f"no C++ compiler ({' or '.join(wanted)}), AOTInductor needs one"
        raise CapabilityError(f"--as pt2: {said}; install it, or leave the option out")


def write_pt2(model: PreTrainedModel, folder: Path) -> Written:
    """Compile the forward pass of `model` into `folder`, load it again and compare. Raises
    CapabilityError: torch.export or AOTInductor does not take the model, or what it makes does not run
    here or gives other results."""
    path = folder / COMPILED
    inputs, free = example_inputs(model, "pt2")
    with traced(model, "pt2"):
        program = export_program(model, inputs, free)
        torch._inductor.aoti_compile_and_package(program, package_path=str(path))
    found = _results(path, inputs)
    with torch.no_grad():
        compare(found, ForwardPass(model)(**inputs), "pt2")
    return _written(folder, [COMPILED])


def export_program(
    model: PreTrainedModel, inputs: dict[str, Tensor], free: Free
) -> torch.export.ExportedProgram:
    """The forward pass as a `torch.export` program of torch's own operators."""
    trace = partial(torch.export.export, args=(), kwargs=inputs, dynamic_shapes=free, strict=False)
    with torch.no_grad():
        try:
            return trace(ForwardPass(model))
        except torch._dynamo.exc.UserError:  # fused attention of some GPUs fixes the length of a mask
            model.set_attn_implementation("eager")
            return trace(ForwardPass(model))


def _results(path: Path, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Compute with a package in a process of its own, with torch alone. Raises CapabilityError where the
    package cannot be loaded or run, for some versions of torch crash then."""
    with scratch_folder() as folder:
        given, found = folder / "inputs", folder / "outputs"
        torch.save(inputs, given)
        command = [sys.executable, "-c", RUN, str(path), str(given), str(found)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode == 0:
            return torch.load(found)
    said = (done.stderr.strip().splitlines() or ["no message"])[-1][:200]
    why = f"signal {-done.returncode}" if done.returncode < 0 else said
    fails = f"the compiled pass does not run here with torch {torch.__version__} ({why})"
    raise CapabilityError(f"--as pt2: {fails}; leave the option out, or try another version of torch")
