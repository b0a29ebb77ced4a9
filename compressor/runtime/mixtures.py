"""The phases of a router and of the experts that it chooses, and which experts a graph can hold."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from blr.compressor.modeling.modeling_blr import Experts
from blr.compressor.modeling.stages import LayerStage, blocked
from blr.compressor.runtime.plan import Columns, Phase, StagePart
from blr.kernels.decode.gemv.segments import Run
from blr.kernels.layers.routing.launch import Routing, routed, routed_reference


def add_experts(
    mlp: nn.Module, x: Columns, norm: nn.Module, add: Callable[..., None], add_whole: Callable[..., None]
) -> None:
    """Add the router and the experts that it chooses, or a block that has more than these as a whole."""
    router = getattr(mlp, "gate", getattr(mlp, "router", None))
    if router is None or len([*mlp.children()]) > 2:
        return add_whole({"experts": (mlp, x)}, x, norm, add=True)
    logits = Columns("router", len(router.weight))
    routing = Routing(router.top_k, getattr(router, "norm_topk_prob", True))
    part = StagePart(LayerStage(blocked(router.weight), getattr(router, "bias", None)), x, logits)
    add(Phase("router", "stages", (part,)), norm)
    experts = mlp.get_submodule("experts")
    add(Phase("experts", "experts", source=logits, target=x, module=experts, routing=routing), norm)


def bound(
    phase: Phase, logits: Tensor, x: Tensor, dtype: torch.dtype, triton: bool, pdl: bool
) -> tuple[Run, bool]:
    """A function that routes by `logits` [B, experts] and adds the outputs of the chosen experts to `x`
    [B, D]; and whether it launches kernels of ours alone. Norm and choice are one kernel."""
    experts, gain, routing = phase.module, phase.gain, phase.routing
    assert experts is not None and routing is not None and gain is not None
    given = x, gain, phase.eps, logits, Routing(*routing), dtype
    route = partial(routed, *given, pdl) if triton else partial(routed_reference, *given)
    adding = getattr(experts, "adding", None) if triton else None  # of experts with kernels
    add = None if adding is None else adding(x.to(dtype), routing[0])
    if add is None:
        return lambda: x.add_(experts(*route())), False
    return lambda: add(*route(), x), True


def waits_for_the_host(model: PreTrainedModel) -> bool:
    """Whether experts of transformers' own ask the host how many tokens each has, which no CUDA graph
    holds: torch's grouped products do, but in bfloat16, and so does its loop over experts."""
    grouped = getattr(model.config, "_experts_implementation", None) != "eager"
    held = [m.experts for m in model.modules() if isinstance(getattr(m, "experts", None), nn.Module)]
    native = any(not isinstance(experts, Experts) for experts in held)
    return native and not (grouped and model.dtype == torch.bfloat16)
