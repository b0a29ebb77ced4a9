"""What config.json says of exports and caches, and what transformers calls a cache."""

import logging
from dataclasses import dataclass, field, fields
from inspect import signature

from torch import nn

from blr.compressor.structures.cached import KV_CACHES

CACHE_NAMES = ("cache", "past_key_values")  # the first since transformers 5.24
_said: set[str] = set()


@dataclass(frozen=True)
class ExportSettings:
    """The entry ``config.blr["export"]`` of an export.

    gpu: a name of configs/gpus.yaml. batch, context: the sequences, and tokens of prompt and answer
    (None: not a decoder), that generation is prepared for. cache: how the runtime keeps keys and values,
    "whole" or "int8". quantize: "int8", "int4" or None. dense: modules with a dense weight that is
    packed, and its shape [out, in]. plain: structured modules that packing makes no smaller, which are
    left as they are. head: the output head, if it is packed by itself, and its entry of the table of
    layers. draft: the class of the model that proposes tokens, if the folder has one, or "ngram"."""

    layout: int
    gpu: str
    batch: int
    blr_version: str
    context: int | None = None
    cache: str = "whole"
    quantize: str | None = None
    dense: dict[str, list[int]] = field(default_factory=dict)
    plain: list[str] = field(default_factory=list)
    head: dict[str, dict[str, object]] = field(default_factory=dict)
    draft: str | None = None


def export_settings(config: object) -> ExportSettings | None:
    """The export settings in a configuration of transformers; None for a model that is no export."""
    found = (getattr(config, "blr", None) or {}).get("export")
    if found is None:
        return None
    known = {field.name for field in fields(ExportSettings)}
    return ExportSettings(**{key: value for key, value in found.items() if key in known})


def caches_ranks(config: object) -> str | None:
    """The kind of cache that ``config.blr["kv_cache"]`` asks for, of `KV_CACHES`; None: whole keys and
    values. Raises ValueError for an unknown kind."""
    found = (getattr(config, "blr", None) or {}).get("kv_cache")
    if found not in (None, *KV_CACHES):
        raise ValueError(f"config.blr.kv_cache is {found!r}: expected one of {', '.join(KV_CACHES)}")
    return found if found is None else str(found)


def cache_name(model: nn.Module) -> str:
    """The name of the argument by which a call of `model` takes a cache."""
    taken = signature(model.forward).parameters
    return next((name for name in CACHE_NAMES if name in taken), CACHE_NAMES[-1])


def warn_once(message: str) -> None:
    if message not in _said:
        _said.add(message)
        logging.getLogger("blr").warning("blr: %s", message)
