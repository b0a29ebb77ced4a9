"""LoRA of peft on layers of ours, under the names that the dense model's layers have.

An adapter is merged where the structure holds the sum exactly: ``U Vᵀ + B A`` is low-rank with r' more
columns, and BLAST with couplings of one for them. So is taken out of a layer what an initialization
(PiSSA, OLoRA) puts into its adapter. All else is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any, TypeGuard

import torch
from peft import LoraConfig, PeftType
from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING
from peft.tuners.lora import LoraModel
from peft.tuners.lora.layer import Linear as LoraLinear
from peft.tuners.tuners_utils import (
    BaseTuner,
    BaseTunerLayer,
    _maybe_include_all_linear_layers,
    check_adapters_to_merge,
)
from peft.utils import constants
from torch import Tensor, nn

from blr.compressor.modeling.layers import Replaced, StructuredLinear, prepare_layers
from blr.compressor.modeling.modeling_blr import PREFIX

ALL = "all-linear"
# Initializations (`init_lora_weights`) that leave the layer as it is, and those that take B A out of it
KEEP = frozenset(("true", "false", "gaussian", "eva", "orthogonal", "mica"))
SUBTRACT = ("pissa", "olora")


class StructuredLora(LoraLinear):
    """``y = layer(x) + B A x`` for a layer of ours."""

    def _get_in_out_features(self, module: nn.Module) -> Any:
        return module.in_features, module.out_features

    def update_layer(
        self, adapter_name: str, r: int, lora_alpha: int, config: LoraConfig, **kwargs: object
    ) -> None:
        """As of peft; an initialization that changes a dense weight changes the factors. Raises
        ValueError if the structure cannot follow."""
        way, layer = str(config.init_lora_weights).lower(), self.get_base_layer()
        if way in KEEP:
            super().update_layer(adapter_name, r, lora_alpha, config, **kwargs)
            return
        if not (way.startswith(SUBTRACT) and takes_products(layer)):
            found = f"init_lora_weights={config.init_lora_weights!r} for a layer of {described(layer)}"
            raise ValueError(
                f"{found}, which cannot change as it asks; take True or one of {', '.join(sorted(KEEP))}"
            )
        self.base_layer = stand_in(layer)
        try:
            super().update_layer(adapter_name, r, lora_alpha, config, **kwargs)
        finally:
            self.base_layer = layer
        A, B = self._factors(adapter_name)
        add_product(layer, -self.scaling[adapter_name] * B, A)

    def _factors(self, adapter_name: str) -> tuple[Tensor, Tensor]:
        """A [r', i] and B [o, r'] of an adapter."""
        a, b = self.lora_A[adapter_name], self.lora_B[adapter_name]
        return a.get_parameter("weight"), b.get_parameter("weight")

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Add the adapters into the factors, whose rank grows. Raises ValueError for another adapter
        than ``B A``, for NaN (if `safe_merge`), and as `add_product`."""
        for name in check_adapters_to_merge(self, adapter_names):
            if name not in self.lora_A:
                continue
            if name in self.lora_variant or self.lora_bias[name]:
                raise ValueError(f"adapter {name!r} is no plain LoRA, which structured layers merge")
            A, B = self._factors(name)
            product = B * self.scaling[name], A
            if safe_merge and not all(bool(torch.isfinite(factor).all()) for factor in product):
                raise ValueError(f"NaNs detected in the adapter {name}, which seems to be broken")
            add_product(self.get_base_layer(), *product)
            self.merged_adapters.append(name)

    def unmerge(self) -> None:
        while self.merged_adapters:
            name = self.merged_adapters.pop()
            if name in self.lora_A:
                cut_columns(self.get_base_layer(), self._factors(name)[0].shape[0])


class StructuredLoraModel(LoraModel):
    """peft's tuner, for models with structured layers as for all others."""

    def _prepare_model(self, peft_config: Any, model: nn.Module) -> None:
        super()._prepare_model(peft_config, model)
        layers = {name for name, m in model.named_modules() if isinstance(m, Replaced)}
        layers = {name for name in layers if name.rpartition(".")[0] not in layers}  # no parts of any
        if not layers:
            return
        named = peft_config.target_modules
        if isinstance(named, str) and named.lower() == ALL:
            found: Any = _maybe_include_all_linear_layers(peft_config, model)
            around = {name for name, m in model.named_modules() if isinstance(m, StructuredLora)}
            outer = {name for name in layers if name.removesuffix(".base_layer") not in around}
            peft_config.target_modules = {*found.target_modules, *around, *outer}

    @staticmethod
    def _create_new_module(
        lora_config: LoraConfig, adapter_name: str, target: nn.Module, **options: Any
    ) -> nn.Module:
        layer = target.get_base_layer() if isinstance(target, BaseTunerLayer) else target
        if options.get("parameter_name") is None and isinstance(layer, Replaced):
            return StructuredLora(target, adapter_name, config=lora_config, **options)
        return LoraModel._create_new_module(lora_config, adapter_name, target, **options)

    def _check_merge_allowed(self) -> None:
        super()._check_merge_allowed()
        for module in self.model.modules():
            if isinstance(module, StructuredLora):
                check_takes_products(module.get_base_layer())


def register() -> None:
    """Make peft take structured layers; names by default are those of the native model type."""
    PEFT_TYPE_TO_TUNER_MAPPING[PeftType.LORA] = StructuredLoraModel
    tuner: Any = BaseTuner
    if not hasattr(tuner.inject_adapter, "__wrapped__"):
        tuner.inject_adapter = _refusing(tuner.inject_adapter)
    for name, table in vars(constants).items():
        if name.startswith("TRANSFORMERS_MODELS_TO_") and isinstance(table, dict):
            table.update({f"{PREFIX.lower()}_{kind}": found for kind, found in list(table.items())})


def _refusing(inject: Callable[..., object]) -> object:
    """`inject_adapter` that raises ValueError if layers of blr were to be adapted and are not."""

    @wraps(inject)
    def inject_adapter(self: BaseTuner, model: nn.Module, *arguments: object, **options: object) -> None:
        inject(self, model, *arguments, **options)
        modules, named = dict(model.named_modules()), self.targeted_module_names
        if left := [name for name in named if isinstance(modules.get(name), Replaced)]:
            found = f"{described(modules[left[0]])} as {left[0]} ({len(left)} in all)"
            raise ValueError(f"{type(self).__name__} does not adapt {found}; take LoraConfig")

    return inject_adapter


def stand_in(layer: Any) -> nn.Linear:
    with torch.no_grad():
        weight = layer.composed()
    outputs, inputs = weight.shape
    dense = nn.Linear(inputs, outputs, layer.bias is not None, device="meta", dtype=weight.dtype)
    dense.weight, dense.bias = nn.Parameter(weight, requires_grad=False), layer.bias
    return dense


def takes_products(layer: object) -> TypeGuard[StructuredLinear]:
    """Whether a layer holds the sum of itself and a product of low rank."""
    if not isinstance(layer, StructuredLinear) or not layer.kernels.widens:
        return False
    return layer.has_own_layout and getattr(layer.spec, "groups", 1) == 1


def check_takes_products(layer: object) -> None:
    """Raise ValueError for a layer without room for an adapter that is merged."""
    if not takes_products(layer):
        raise ValueError(
            f"LoRA cannot be merged into a layer of structure {described(layer)}: keep the adapter "
            "beside the model, as save_pretrained of the peft model writes it"
        )


def described(layer: Any) -> str:
    return f"{layer.described.structure} ({layer.described.describe()})"


@torch.no_grad()
def add_product(layer: Any, B: Tensor, A: Tensor) -> None:
    """Add ``B A``, [o, r'] and [r', i], as r' more columns. Raises as `check_takes_products`."""
    check_takes_products(layer)
    added: dict[str, Tensor] = {"U": B, "V": A.mT}
    if "S" in layer.held:
        blocks = layer.S.shape[0]
        added = {name: factor.unflatten(0, (blocks, -1)) for name, factor in added.items()}
        added["S"] = layer.S.new_ones(blocks, blocks, A.shape[0])
    factors = {n: torch.cat((getattr(layer, n), factor.to(layer.U)), -1) for n, factor in added.items()}
    _set_factors(layer, factors)


@torch.no_grad()
def cut_columns(layer: Any, count: int) -> None:
    """Undo `add_product` of `count` columns."""
    _set_factors(layer, {name: getattr(layer, name)[..., :-count] for name in layer.spec.shapes()})


def _set_factors(layer: Any, factors: dict[str, Tensor]) -> None:
    for name, factor in factors.items():
        before = getattr(layer, name)
        setattr(layer, name, nn.Parameter(factor.contiguous(), requires_grad=before.requires_grad))
    layer.respecify(replace(layer.spec, rank=layer.U.shape[-1]))
    prepare_layers(layer)
