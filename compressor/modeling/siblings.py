"""Finds the layers of a model that read the same input."""

from collections.abc import Iterator

from torch import nn

from blr.compressor.recipe.architectures import SIBLINGS


def siblings(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Every group of layers with one input, in the order of their block. Encoder-decoder models have
    none: keys and values may have another input than queries."""
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return
    for parent in model.modules():
        for names in SIBLINGS:
            found = [child for name, child in parent.named_children() if name in names]
            if len(found) > 1:
                yield found
