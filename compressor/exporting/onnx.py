"""The forward pass of a model as an ONNX graph, for engines that are no torch.

`model.onnx` holds structured layers as the plain products of their references. Batch and, for text,
length are free; a decoder gives logits and keeps no cache. The whole model is in memory for it.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blr.compressor.base.disk import flush, sha256_file
from blr.compressor.base.packages import is_missing
from blr.compressor.base.progress import Progress
from blr.compressor.exporting.forward import compare, example_inputs, plain_forward, traced
from blr.compressor.exporting.options import GRAPH

CHECKER, PIP = "onnxruntime", "pip install 'blr-compress[onnx]'"
ROWS, TOKENS = 3, 9  # of the check: other sizes than those traced


def write_onnx(model: Any, folder: Path, progress: Progress) -> dict[str, tuple[int, str]]:
    """Trace `model`, which is on the CPU, into `folder`, and compare with it what onnxruntime computes.

    Weights in bfloat16, which onnxruntime multiplies nowhere on a CPU, are written in float32.

    Returns:
        File name to size and SHA-256.

    Raises:
        CapabilityError: the exporter does not take the model, or the graph gives other results.
    """
    if model.dtype == torch.bfloat16:
        model = model.float()
    model.config.use_cache = False
    before = {path.name for path in folder.iterdir()}
    names = _trace(model, folder / GRAPH)
    _check(model, folder / GRAPH, names, progress)
    written = sorted({path.name for path in folder.iterdir()} - before)
    for name in written:
        with open(folder / name, "rb+") as file:
            flush(file.fileno())
    return {name: ((folder / name).stat().st_size, sha256_file(folder / name)) for name in written}


def _trace(model: Any, path: Path) -> list[str]:
    """Write the graph of `model`; the names of its results."""
    inputs, free = example_inputs(model, "onnx")
    forward = plain_forward(model)
    with traced(model, "onnx"), torch.no_grad(), _quiet():
        names = list(forward(**inputs))
        options: dict[str, Any] = {"dynamic_shapes": free, "output_names": names, "verbose": False}
        program: Any = torch.onnx.export(forward, (), kwargs=inputs, dynamo=True, **options)
        for node in program.model.graph.all_nodes():
            node.metadata_props.clear()  # stack traces, with the paths of this machine
        program.save(path, external_data=True)
    return names


def _check(model: Any, path: Path, names: list[str], progress: Progress) -> None:
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
        compare(found, plain_forward(model)(**inputs), "onnx")


def _resized(example: Tensor) -> Tensor:
    """Another number of rows, and of tokens if it has them, of values that differ."""
    if example.dim() > 2:
        return example.flip(-1)[:1].repeat(ROWS, 1, 1, 1)
    return example[:1, :TOKENS].repeat(ROWS, 1)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporter's advice on packages that are no part of the work."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"), redirect_stdout(StringIO()):
            yield
    finally:
        logger.setLevel(level)
