"""Quantizes the linear layers inside a model's blocks by another package: each function returns the
weights that the package's numbers stand for, and the bytes that these numbers take.

Everything runs in an environment of that package, so this file imports nothing of ours. Bytes are of the
package's own tensors, except where a comment says that it keeps them unpacked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

HALF = 2  # bytes of a scale
CORRECTION = 16  # rank beside GPTQ


@dataclass(frozen=True)
class Task:
    """A `model` on its device, its `tokenizer`, calibration tokens `ids` [n, w], the `size` in bits or
    as a CF, and the `group` of numbers that share a scale."""

    model: Any
    tokenizer: Any
    ids: Tensor
    size: float
    group: int

    @property
    def bits(self) -> int:
        """The bits of a number."""
        return int(self.size)

    def layers(self) -> Iterator[tuple[str, nn.Linear]]:
        """The linear layers inside the blocks, by name."""
        for name, module in self.model.named_modules():
            if isinstance(module, nn.Linear) and ".layers." in name:
                yield name, module

    def rows(self) -> list[dict[str, Tensor]]:
        """The calibration as a model takes it, a window at a time."""
        return [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in self.ids]


class Found(NamedTuple):
    """Dequantized `weights` by layer, and the bytes `stored` for them."""

    weights: dict[str, Tensor]
    stored: int


Package = Callable[[Task], Found]
Scaling = Callable[[str], tuple[Tensor, Tensor]]  # of a layer's inputs, and its inverse


def hqq(task: Task) -> Found:
    """HQQ: scales and zeros by half-quadratic splitting, without a text."""
    from hqq.core.quantize import Quantizer

    weights, stored = dict[str, Tensor](), 0
    for name, layer in task.layers():
        given = {"nbits": task.bits, "group_size": task.group, "channel_wise": True, "axis": 1}
        place = str(layer.weight.device)
        packed, meta = Quantizer.quantize(
            layer.weight.data, **given, optimize=True, compute_dtype=torch.float16, device=place
        )
        stored += packed.nbytes + HALF * (meta["scale"].numel() + meta["zero"].numel())
        weights[name] = Quantizer.dequantize(packed, meta)
    return Found(weights, stored)


def torchao(task: Task) -> Found:
    """torchao: rounding to the nearest integer, without a text."""
    from torchao.quantization import IntxWeightOnlyConfig, quantize_
    from torchao.quantization.granularity import PerGroup

    dtype = getattr(torch, f"int{task.bits}")
    names = {name for name, _ in task.layers()}
    config = IntxWeightOnlyConfig(weight_dtype=dtype, granularity=PerGroup(task.group))
    quantize_(task.model, config, filter_fn=lambda _, name: name in names)
    weights, stored = dict[str, Tensor](), 0
    for name, layer in task.layers():
        weight: Any = layer.weight
        # it keeps them in int8 unpacked; its kernels pack them to `bits`
        stored += weight.qdata.numel() * task.bits // 8 + HALF * weight.scale.numel()
        weights[name] = weight.dequantize()
    return Found(weights, stored)


def gptq(task: Task) -> Found:
    """llm-compressor: GPTQ, symmetric."""
    from llmcompressor.modifiers.gptq import GPTQModifier

    return _llmcompressor(task, GPTQModifier, symmetric=True)


def awq(task: Task) -> Found:
    """llm-compressor: AWQ, asymmetric."""
    from llmcompressor.modifiers.awq import AWQModifier

    if not torch.cuda.is_available():  # 0.14 pins its inputs for a GPU, also where there is none
        torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign]
    return _llmcompressor(task, AWQModifier, symmetric=False)


def _llmcompressor(task: Task, modifier: Any, symmetric: bool) -> Found:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme, fake_quantize
    from llmcompressor import oneshot
    from torch.utils.data import DataLoader

    form = {"type": "int", "strategy": "group", "group_size": task.group, "symmetric": symmetric}
    weights = QuantizationArgs(num_bits=task.bits, **form)
    rows: Any = task.rows()
    groups = {"group_0": QuantizationScheme(targets=["Linear"], weights=weights)}
    oneshot(
        model=task.model,
        dataset=DataLoader(rows),
        recipe=[modifier(config_groups=groups, ignore=["lm_head"])],
        num_calibration_samples=len(task.ids),
        max_seq_length=task.ids.shape[1],
    )
    inside = [(name, module) for name, module in task.model.named_modules() if ".layers." in name]
    weights = {  # norms as well, into which AWQ puts the scales of inputs
        name: module.weight.detach().clone()
        for name, module in inside
        if isinstance(getattr(module, "weight", None), Tensor)
    }
    for name, layer in task.layers():  # AWQ leaves the rounding to what saves
        rounded: Any = layer
        given = (rounded.weight_scale, rounded.weight_zero_point, rounded.quantization_scheme.weights)
        weights[name] = fake_quantize(weights[name], *given)
    return Found(
        weights, _saved(lambda folder: task.model.save_pretrained(folder, save_compressed=True))
    )


def gptqmodel(task: Task) -> Found:
    """GPTQModel: GPTQ, symmetric, with columns ordered by activation inside their groups."""
    return _gptqmodel(task, 0)


def gptqmodel_eora(task: Task) -> Found:
    """The same, and its EoRA: low rank in 16 bits, of the rank that others here have."""
    return _gptqmodel(task, CORRECTION)


def _gptqmodel(task: Task, rank: int) -> Found:
    from gptqmodel import BACKEND, GPTQConfig, GPTQModel
    from gptqmodel.adapter.adapter import Lora

    dense, place = task.model.name_or_path, task.model.device.type
    rows = [{"input_ids": row, "attention_mask": [1] * len(row)} for row in task.ids.tolist()]
    config = GPTQConfig(bits=task.bits, group_size=task.group, device=place, offload_to_disk=False)
    with TemporaryDirectory() as folder:
        model = GPTQModel.load(dense, config, dtype=torch.float32)
        model.quantize(rows, batch_size=1)
        model.save(folder)
        # without g_idx, which says no more than the group's size
        stored = _stored(Path(folder), ("qweight", "qzeros", "scales"))
        given: dict[str, Any] = {"backend": BACKEND.GPTQ_TORCH, "device": place, "dtype": torch.float16}
        if rank:
            given["adapter"] = Lora(rank=rank, path=f"{folder}/eora")
            GPTQModel.adapter.generate(
                adapter=Lora(rank=rank, path=f"{folder}/eora"),
                model_id_or_path=dense,
                quantized_model_id_or_path=folder,
                calibration_dataset=rows,
                calibration_dataset_concat_size=0,
            )
        made = dict(GPTQModel.load(folder, **given).model.named_modules())
    weights = dict[str, Tensor]()
    for name, _ in task.layers():
        layer: Any = made[name]
        weights[name] = layer.dequantize_weight().detach().float().T
        if rank:
            right, left = layer.adapter.lora_A.detach(), layer.adapter.lora_B.detach()
            weights[name] = weights[name] + (right.float() @ left.float()).T
            stored += HALF * (right.numel() + left.numel())
    return Found(weights, stored)


def autoround(task: Task) -> Found:
    """AutoRound: rounding learned by signed gradients in 200 steps a block, symmetric."""
    from auto_round import AutoRound

    rows = [{name: tensor[None] for name, tensor in row.items()} for row in task.rows()]
    rounding = AutoRound(
        task.model,
        task.tokenizer,
        scheme=f"W{task.bits}A16",
        bits=task.bits,
        group_size=task.group,
        sym=True,
        nsamples=len(rows),
        seqlen=task.ids.shape[1],
        dataset=rows,
        enable_torch_compile=False,
        device_map=str(task.model.device),
    )
    found, _ = rounding.quantize()
    made = dict(found.named_modules())
    weights, stored = dict[str, Tensor](), 0
    for name, _ in task.layers():
        layer = made[name]
        scale = layer.scale.to(layer.weight.device, torch.float32)[..., None]
        grouped = layer.weight.detach().float().unflatten(1, (-1, task.group))  # which it rounds to bf16
        weights[name] = ((grouped / scale).round() * scale).flatten(1)
        # what its exports hold: integers, and a scale and a zero of a group
        groups = layer.scale.numel()
        stored += (layer.weight.numel() + groups) * task.bits // 8 + groups * HALF
    return Found(weights, stored)


# Types of ggml by bits, and what llama.cpp takes for rows that are no multiple of 256
K_QUANTS = {2: ("Q2_K", "IQ4_NL"), 3: ("Q3_K", "IQ4_NL"), 4: ("Q4_K", "Q5_0")}
IQ_QUANTS = {2: ("IQ2_S", "IQ4_NL"), 3: ("IQ3_S", "IQ4_NL"), 4: ("IQ4_XS", "IQ4_NL")}


def llamacpp(task: Task) -> Found:
    """llama.cpp's library: one K-quant for all layers, with an importance matrix of the calibration."""
    return _ggml(task, *K_QUANTS[task.bits])


def llamacpp_iq(task: Task) -> Found:
    """The same with an IQ-quant."""
    return _ggml(task, *IQ_QUANTS[task.bits])


def _ggml(task: Task, usual: str, of_short_rows: str) -> Found:
    from ctypes import CDLL, c_float, c_int64, c_size_t, c_void_p
    from importlib.util import find_spec

    import numpy as np
    from gguf import GGMLQuantizationType, dequantize

    spec = find_spec("llama_cpp")
    assert spec is not None
    assert spec.origin is not None
    library = Path(spec.origin).parent / "lib" / "libggml-base.so"
    quantize = CDLL(str(library)).ggml_quantize_chunk
    quantize.restype, quantize.argtypes = (
        c_size_t,
        [*(c_int64, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p)],
    )
    importance = _means(task, lambda rows: rows.square().mean(0))

    def one(named: tuple[str, nn.Linear]) -> tuple[str, Tensor, int]:
        name, layer = named
        rows = np.ascontiguousarray(layer.weight.detach().cpu().float().numpy())
        o, i = rows.shape
        kind = GGMLQuantizationType[of_short_rows if i % 256 else usual]
        packed, costs = np.empty(rows.nbytes, np.uint8), importance[name].cpu().numpy()
        given = (c_float * i).from_buffer(costs)
        size = quantize(kind, rows.ctypes.data, packed.ctypes.data, 0, o, i, given)
        return name, torch.from_numpy(dequantize(packed[:size].reshape(o, -1), kind)), size

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        made = list(pool.map(one, task.layers()))
    return Found({name: weight for name, weight, _ in made}, sum(size for *_, size in made))


def svdllm(task: Task) -> Found:
    """As SVD-LLM (2403.07378): low rank of the weight times a Cholesky factor of its inputs' Gram
    matrix, in closed form, without what the paper trains afterwards."""
    return _low_rank(task, _whitening(task))


def eora(task: Task) -> Found:
    """llm-compressor's GPTQ, and as EoRA (2410.21271) low rank of what it leaves, in closed form."""
    dense = {name: layer.weight.detach().clone() for name, layer in task.layers()}
    scaled, (weights, stored) = _whitening(task), gptq(task)
    for name, weight in dense.items():
        weights[name] = weights[name].to(weight)
        addition, more = _factored(weight - weights[name], scaled(name), CORRECTION)
        weights[name], stored = weights[name] + addition, stored + more
    return Found(weights, stored)


def asvd(task: Task) -> Found:
    """As ASVD (2312.05821): low rank of the weight whose columns are scaled by the square root of their
    input's mean magnitude; one rank for all layers of a shape."""
    sizes = _means(task, lambda rows: rows.abs().mean(0))

    def scaling(name: str) -> tuple[Tensor, Tensor]:
        scale = sizes[name].double().sqrt().clamp_min(1e-6)
        return scale.diag(), scale.reciprocal().diag()

    return _low_rank(task, scaling)


def _whitening(task: Task) -> Scaling:
    from blr.compressor.structures.linalg import cholesky, solve_upper

    grams = _means(task, lambda rows: rows.mT @ rows / len(rows))

    def whitening(name: str) -> tuple[Tensor, Tensor]:
        gram = grams[name].double()
        some = gram.diagonal().mean() * 1e-6 * torch.eye(len(gram), device=gram.device)
        root = cholesky(gram + some)
        return root, solve_upper(root.mT, torch.eye(len(gram), device=gram.device).double()).mT

    return whitening


def _low_rank(task: Task, scaled: Scaling) -> Found:
    weights, stored = dict[str, Tensor](), 0
    for name, layer in task.layers():
        o, i = layer.weight.shape
        rank = int(o * i / task.size / (o + i))
        weights[name], more = _factored(layer.weight, scaled(name), rank)
        stored += more
    return Found(weights, stored)


def _factored(weight: Tensor, scaling: tuple[Tensor, Tensor], rank: int) -> tuple[Tensor, int]:
    """The best of this rank where errors are multiplied by a scale, whose inverse is there, too; and the
    bytes of its factors in bf16."""
    from blr.compressor.structures.linalg import truncated_svd

    scale, inverse = scaling
    left, right = truncated_svd(weight.detach().double() @ scale, rank)
    right = right.mT @ inverse
    return left.bfloat16().float() @ right.bfloat16().float(), rank * sum(weight.shape) * HALF


def _means(task: Task, of: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """What `of` finds of every layer's inputs [n, i], its mean over the calibration."""
    sums: dict[str, Tensor] = {}

    def hook(name: str) -> Any:
        def add(_: nn.Module, given: tuple[Tensor, ...]) -> None:
            sums[name] = sums.get(name, 0) + of(given[0].float().flatten(0, -2)) / len(task.ids)

        return add

    hooks = [layer.register_forward_pre_hook(hook(name)) for name, layer in task.layers()]
    with torch.no_grad():
        for row in task.ids:
            task.model.model(row[None].to(task.model.device))
    for handle in hooks:
        handle.remove()
    return sums


def _saved(save: Callable[[str], object]) -> int:
    """The bytes of the blocks' linear layers in the files of a saved model."""
    with TemporaryDirectory() as folder:
        save(folder)
        return _stored(Path(folder), ("weight_packed", "weight_scale", "weight_zero_point"))


def _stored(folder: Path, parts: tuple[str, ...]) -> int:
    """The bytes of these parts of layers in the files of a folder."""
    from safetensors import safe_open

    stored = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as tensors:
            names = [name for name in tensors.keys() if name.rpartition(".")[2] in parts]  # noqa: SIM118
            found = {name: tensors.get_tensor(name) for name in names}
        for tensor in found.values():
            wide = tensor.dtype == torch.float32  # a scale of a model that was read in float32
            stored += tensor.numel() * HALF if wide else tensor.nbytes
    return stored


PACKAGES: dict[str, tuple[Package, str]] = {
    "hqq": (hqq, "hqq"),
    "torchao": (torchao, "torchao"),
    "gptq": (gptq, "llmcompressor"),
    "awq": (awq, "llmcompressor"),
    "gptqmodel": (gptqmodel, "gptqmodel"),
    "gptqmodel_eora": (gptqmodel_eora, "gptqmodel"),
    "autoround": (autoround, "auto-round"),
    "llamacpp": (llamacpp, "llama-cpp-python"),
    "llamacpp_iq": (llamacpp_iq, "llama-cpp-python"),
    "eora": (eora, "llmcompressor"),
    "svdllm": (svdllm, "torch"),
    "asvd": (asvd, "torch"),
}
