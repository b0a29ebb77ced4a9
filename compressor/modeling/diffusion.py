"""Models of diffusers where the package is installed: those of `diffusion_blr.py`, with kernels."""

from blr.compressor.modeling.diffusion_blr import StructuredDiffusion
from blr.compressor.modeling.diffusion_blr import diffusion_class as structured_class
from blr.compressor.modeling.float8 import share_rows
from blr.compressor.modeling.layers import make_layer, prepare_layers


class KernelDiffusion(StructuredDiffusion):
    """Mixin of models of diffusers whose layers are kernels."""

    make_layer = staticmethod(make_layer)

    def finish_loading(self) -> None:
        """Give weights that were loaded onto a GPU their kernel layout."""
        share_rows(self)
        prepare_layers(self)


def diffusion_class(name: str) -> type:
    """The model class ``Blr<Native>``. Raises AttributeError for a name that is none."""
    return structured_class(name, KernelDiffusion)
