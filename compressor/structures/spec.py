"""The base of the specs of all structures, without torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from blr.compressor.structures.specs import QuantizedSpec

Shape = tuple[int, ...]
# Bits of an element by safetensors' name of its dtype
WIDTHS = {"U8": 8, "I8": 8, "F8_E4M3": 8}


class Stored(NamedTuple):
    """A tensor in a file. dtype: safetensors' name, None for that of the weight that is replaced."""

    shape: Shape
    dtype: str | None = None


@dataclass(frozen=True)
class Spec:
    """The form of one linear layer from `in_features` to `out_features`, of whatever structure."""

    in_features: int
    out_features: int
    structure = ""  # its name, as recipes and files write it

    def shapes(self) -> dict[str, Shape]:
        """The shape of each factor by its name (``U``, ``factors.0``), in the order of storage."""
        raise NotImplementedError

    def stored(self) -> dict[str, Stored]:
        """Every tensor that a file holds, by name: of plain layers the factors."""
        return {name: Stored(shape) for name, shape in self.shapes().items()}

    def stored_bits(self, width: int = 16) -> int:
        """The bits of all that is stored, with `width` bits for a number of the weight's own dtype."""
        return sum(prod(s.shape) * WIDTHS.get(s.dtype or "", width) for s in self.stored().values())

    @property
    def plain(self) -> Spec:
        """The spec without packing: itself, unless its factors are packed."""
        return self

    @property
    def packing(self) -> QuantizedSpec | None:
        """The spec that says how its factors are packed; None if they are not."""
        return None

    def parts(self) -> tuple[tuple[str, Spec], ...]:
        """The specs that a layer is the sum of, by the name of their module; "" is the layer itself."""
        return (("", self),)

    @property
    def corrected(self) -> bool:
        """Whether it is the sum of a base in few bits and a correction."""
        return len(self.parts()) > 1

    @property
    def added(self) -> Spec:
        """The correction beside a base in few bits; itself in a layer without one."""
        return self.parts()[-1][1]

    def start(self) -> Spec:
        """The spec whose fit a correction of this structure starts from."""
        return self

    def fitted(self) -> Spec:
        """The plain structure that is fitted: low rank for corrections by BLAST."""
        return self.added.plain.start() if self.corrected else self.plain

    @property
    def quantized(self) -> bool:
        """Whether some factor is stored in few bits or float8."""
        return any(stored.dtype is not None for stored in self.stored().values())

    @property
    def parameters(self) -> int:
        """The number of parameters, without bias, which stays as it is."""
        return sum(prod(shape) for shape in self.shapes().values())

    @property
    def dense_parameters(self) -> int:
        """The number of parameters of the dense weight."""
        return self.in_features * self.out_features

    def to_dict(self) -> dict[str, Any]:
        """The entry of a layer table in JSON; `spec_from_dict` is the inverse."""
        return {"structure": self.structure, **asdict(self)}

    def describe(self) -> str:
        """The rank or pattern in words."""
        raise NotImplementedError
