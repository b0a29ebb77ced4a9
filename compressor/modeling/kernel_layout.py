"""Names of factors that an export stores as the kernels read them, and the order of their axes."""

from __future__ import annotations

from blr.compressor.structures.specs import Spec
from blr.kernels.common.orders import Order, order_of

SUFFIX = "_kernel"


def stored_name(factor: str) -> str:
    """``V`` -> ``V_kernel``, ``factors.0`` -> ``factors_kernel.0``."""
    stem, dot, index = factor.partition(".")
    return f"{stem}{SUFFIX}{dot}{index}"


def orders(spec: Spec) -> dict[str, Order]:
    """Factor to the order of its axes in kernel layout, as ``{"U": (0, 1), "V": (1, 0)}``."""
    return {name: order_of(name, len(shape)) for name, shape in spec.shapes().items()}
