"""What the specs of all structures share, without torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from blr.compressor.structures.specs import QuantizedSpec

Shape = tuple[int, ...]
INDEX = "I32"  # of tensors that say where something goes
# Bits of an element by safetensors' name of its dtype
WIDTHS = {"U8": 8, "I8": 8, "F8_E4M3": 8, INDEX: 32}


class Stored(NamedTuple):
    """A tensor in a file. dtype: safetensors' name, None for that of the weight that is replaced."""

    shape: Shape
    dtype: str | None = None


@dataclass(frozen=True)
class Spec:
    """What every family shares: a layer mapping `in_features` to `out_features`."""

    in_features: int
    out_features: int
    structure = ""  # its family, as recipes and files write it

    def shapes(self) -> dict[str, Shape]:
        """Tensor suffix (``U``, ``factors.0``, …) to shape, in the order they are stored."""
        raise NotImplementedError

    def indices(self) -> dict[str, Shape]:
        """Suffix to shape of tensors of whole numbers beside those, which nothing trains or casts."""
        return {}

    def stored(self) -> dict[str, Stored]:
        """Suffix to what a file holds under it; of plain layers the tensors of `shapes`, and indices."""
        factors = {name: Stored(shape) for name, shape in self.shapes().items()}
        return factors | {name: Stored(shape, INDEX) for name, shape in self.indices().items()}

    def stored_bits(self, width: int = 16) -> int:
        """Bits of all that is stored, where a number of the weight's own dtype takes `width`."""
        return sum(prod(s.shape) * WIDTHS.get(s.dtype or "", width) for s in self.stored().values())

    @property
    def plain(self) -> Spec:
        """The structure whose factors are stored: itself, but where they are packed."""
        return self

    @property
    def packing(self) -> QuantizedSpec | None:
        """How its factors are packed, None if they are not."""
        return None

    def parts(self) -> tuple[tuple[str, Spec], ...]:
        """The specs that a layer is the sum of, by module in it; "" is the layer itself."""
        return (("", self),)

    def low_rank(self) -> Spec:
        """The same function by whole factors."""
        return self

    @property
    def quantized(self) -> bool:
        """Whether some of it is stored in fewer bits than its dtype has."""
        return any(stored.dtype not in (None, INDEX) for stored in self.stored().values())

    @property
    def parameters(self) -> int:
        """Number of parameters; neither the bias, which stays dense and unchanged, nor indices."""
        return sum(prod(shape) for shape in self.shapes().values())

    @property
    def dense_parameters(self) -> int:
        """Number of parameters of the dense weight this spec replaces."""
        return self.in_features * self.out_features

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready description; `spec_from_dict` is the inverse."""
        return {"structure": self.structure, **asdict(self)}

    def describe(self) -> str:
        """The rank or pattern as a person writes it."""
        raise NotImplementedError
