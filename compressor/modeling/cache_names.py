"""What transformers calls a cache of keys and values: `cache` since 5.24, before `past_key_values`."""

from inspect import signature

from torch import nn

NAMES = ("cache", "past_key_values")


def cache_name(model: nn.Module) -> str:
    """The name of the argument by which a call of `model` takes a cache."""
    taken = signature(model.forward).parameters
    return next((name for name in NAMES if name in taken), NAMES[-1])
