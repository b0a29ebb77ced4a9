"""The relative distance of rows of states and its gradient, in plain torch."""

from torch import Tensor

LEAST = 1e-12  # of what is divided by: rows of zeros


def distances(mine: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """‖h − h'‖² / ‖h'‖² and ‖h'‖², [...] in float32, of rows of states [..., d]."""
    size = wanted.float().square().sum(-1).clamp_min(LEAST)
    return (mine.float() - wanted).square().sum(-1) / size, size


def distances_back(mine: Tensor, wanted: Tensor, size: Tensor, g: Tensor) -> Tensor:
    """The gradient 2 g (h − h') / ‖h'‖² of h, in its dtype; size: from `distances`, g: [...]."""
    return (mine.float() - wanted).mul_((2 * g / size)[..., None]).to(mine.dtype)
