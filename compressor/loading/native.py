"""Classes of transformers: the one that a checkpoint names, checked before use, and its linear layers. A
family without a table in `configs/` has its layers found on the meta device."""

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, redirect_stdout
from io import StringIO
from types import ModuleType
from typing import Any

import torch
import transformers
from accelerate import init_empty_weights
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES,
)
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging

from blr.compressor.base.errors import CapabilityError
from blr.compressor.base.exhaustion import raise_exhausted
from blr.compressor.base.quoting import first_line, quote
from blr.compressor.checkpoint.config import REMEDY
from blr.compressor.checkpoint.context import context_of
from blr.compressor.checkpoint.extras import is_number
from blr.compressor.checkpoint.regular import refuse
from blr.compressor.checkpoint.source import Source
from blr.compressor.modeling.modeling_blr import PREFIX, module_names
from blr.compressor.recipe.architectures import Family, find_family


def native_class(source: Source) -> type[PreTrainedModel]:
    """The class under `architectures`. Raises as `check_type`, and InputError for an unknown one."""
    check_type(source)
    path, names = source.folder / "config.json", source.config.get("architectures")
    if not names:
        refuse(path, "no architectures", "the name of a model class of transformers", REMEDY)
    named = None if names[0].startswith(PREFIX) else getattr(transformers, names[0], None)
    if not isinstance(named, type) or not issubclass(named, transformers.PreTrainedModel):
        refuse(path, f"architecture {quote(names[0])}", "a model class of transformers", REMEDY)
    return named


def check_type(source: Source) -> None:
    """Raise InputError for an unknown model type, CapabilityError for one of borrowed classes."""
    path, model_type = source.folder / "config.json", source.config["model_type"]
    if model_type not in CONFIG_MAPPING:
        refuse(path, f"model type {quote(model_type)}", "one that transformers has", REMEDY)
    _check_own(source)


def _check_own(source: Source) -> None:
    """Refuse a type that transformers makes of another family's classes, as EXAONE 3 of Llama's: what we
    write would load only where blr is installed."""
    kind, classes = source.model_type, transformers.AutoModel._model_mapping
    own: Any = CONFIG_MAPPING[kind]
    try:
        found: Any = classes.get(own, None)
        found = found[0] if isinstance(found, tuple | list) else found
        theirs = getattr(found, "config_class", None) or own
    except (ImportError, ValueError):  # whoever asks for the class will hear why
        return
    if theirs is not own and theirs not in own.sub_configs.values():
        raise CapabilityError(
            f"{source.folder}: transformers makes {quote(kind)} of another family's classes "
            f"({found.__name__}); expected a type that has its own; take another model"
        )


def continues_text(source: Source) -> bool:
    """Whether the class under `architectures` is a causal language model, also one that reads images."""
    return _among(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, source) or sees_and_writes(source)


def sees_and_writes(source: Source) -> bool:
    """Whether that class reads images beside text and is not listed as a causal language model."""
    causal = _among(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, source)
    return not causal and _among(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, source)


def has_encoder(source: Source) -> bool:
    """Whether it is an encoder-decoder whose encoder has a class of its own, as T5."""
    kind = source.model_type.removeprefix(f"{PREFIX.lower()}_")
    return MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES.get(kind, "").endswith("EncoderModel")


def _among(known: Mapping[str, str | tuple[str, ...]], source: Source) -> bool:
    names = source.config.get("architectures") or [""]
    classes = {n for name in known.values() for n in ((name,) if isinstance(name, str) else name)}
    return names[0].removeprefix(PREFIX) in classes


def read_context(source: Source) -> int:
    """Tokens that the model has positions for. Raises InputError as `made_config`."""
    return context_of(made_config(source).to_dict())


def made_config(source: Source) -> PreTrainedConfig:
    """The configuration as transformers makes it. Raises InputError where it cannot."""
    with native_errors(source):
        return CONFIG_MAPPING[source.model_type].from_dict(decoded(source.config))


@contextmanager
def native_errors(source: Source) -> Iterator[None]:
    """Turn what transformers raises while it builds a model from config.json into InputError."""
    try:
        yield
    except Exception as error:  # the values of a config are passed on unchecked
        raise_exhausted(error)
        reason = quote(first_line(error), 160)[1:-1]
        found = f"values that {quote(source.model_type)} cannot be built from ({reason})"
        refuse(source.folder / "config.json", found, "those of a trained model", REMEDY)


def decoded(value: Any) -> Any:
    """A configuration with {"__float__": "Infinity"} and the like as numbers."""
    if is_number(value):
        return float(value["__float__"])
    if isinstance(value, Mapping):
        return {key: decoded(item) for key, item in value.items()}
    return [decoded(item) for item in value] if isinstance(value, list) else value


def family_of(source: Source) -> Family:
    """The table that lists the model type, else one that is discovered. Raises as `discover_family`."""
    return find_family(source.model_type) or discover_family(source)


def discover_family(source: Source) -> Family:
    """Make a family's table from the model itself: all linear layers of its blocks, the others as heads.
    `blocks` is the one list of blocks of a model that reads text. Raises InputError for a model type or
    architecture that transformers does not know."""
    model = meta_model(source)
    inner, outer = linear_layers(model)
    transposed = any(isinstance(module, Conv1D) for module in inner.values())
    stored = {name.rpartition(".")[0] for name in source.entries if name.endswith(".weight")}
    found = module_names(model, sorted(stored))
    modules = {n: n.rpartition(".")[2] for n, module in found.items() if module in inner}
    heads = [n for n, module in found.items() if module in outer]
    alike = [n for n in heads if isinstance(outer[found[n]], Conv1D) == transposed]
    model_type = source.model_type
    blocks = _blocks(model, inner)
    return Family(model_type, (model_type,), modules, tuple(alike), {}, transposed, blocks)


def _blocks(model: PreTrainedModel, inner: Collection[str]) -> str | None:
    """The name of the one list of modules around all layers `inner` that read text, or None."""
    if getattr(model, "main_input_name", "") != "input_ids":
        return None
    reads = getattr(model, "get_decoder", None)  # of what sees, too, the language model
    reader = reads() if reads else model
    names = {module: name for name, module in model.named_modules()}
    start = f"{names[reader]}." if names.get(reader) else ""
    lists = {name for name, module in model.named_modules() if type(module) is nn.ModuleList}
    read = [name for name in inner if name.startswith(start)] or inner
    within = [{up for up in _above(name) if up in lists} for name in read]
    shared = set.intersection(*within) if within else set()
    return min(shared, key=len, default=None)


def _above(name: str) -> list[str]:
    return [name[: dot.start()] for dot in re.finditer(r"\.", name)]


def linear_layers(model: PreTrainedModel) -> tuple[dict[str, nn.Module], dict[str, nn.Module]]:
    """The linear layers of the blocks of `model`, and all others, by name; not those of routers. Blocks
    are members of lists of modules in the base model. Layers for a task stand outside of the base model,
    poolers outside of lists. In a list of heads the members are layers, or classes named a head."""
    prefix = f"{model.base_model_prefix}." if model.base_model is not model else ""
    every = dict(model.named_modules(remove_duplicate=False))
    lists = {name for name, m in every.items() if isinstance(m, nn.ModuleList | nn.Sequential)}
    task = {module for name, module in every.items() if not name.startswith(prefix)}
    heads = {name for name, module in every.items() if type(module).__name__.endswith("Head")}
    found: tuple[dict[str, nn.Module], dict[str, nn.Module]] = ({}, {})
    for name, module in model.named_modules():
        if _is_linear(module) and "router" not in name.split("."):
            member = name.rpartition(".")[0]
            holders = set(_above(member))
            outside = module in task or not holders & lists or bool({*holders, member} & heads)
            found[outside][name] = module
    return found


_MULTIPLIES: dict[type, bool] = {}  # by class


def _is_linear(module: nn.Module) -> bool:
    """Whether a module computes x Wᵀ + bias: some `nn.Linear`s do not (Llama 4's router)."""
    if not isinstance(module, nn.Linear):
        return isinstance(module, Conv1D)
    kind = type(module)
    if kind not in _MULTIPLIES:
        _MULTIPLIES[kind] = kind.forward is nn.Linear.forward or _multiplies(module)
    return _MULTIPLIES[kind]


def _multiplies(module: nn.Linear) -> bool:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(2, module.in_features, generator=draw)
    given = {name: torch.randn(p.shape, generator=draw) for name, p in module.named_parameters()}
    try:
        found = torch.func.functional_call(module, given, (x,))
        usual = nn.functional.linear(x, given["weight"], given.get("bias"))
        return bool(torch.allclose(found, usual, rtol=1e-3, atol=1e-3))
    except Exception:  # whatever it asks for beside x, or gives beside y
        return False


def meta_model(source: Source, *, buffers: bool = False) -> PreTrainedModel:
    """The native model of a checkpoint without weights; with `buffers`, those that no checkpoint stores
    are real. Raises InputError for a type that transformers does not know."""
    native = native_class(source)
    config = {key: value for key, value in decoded(source.config).items() if key != "model_type"}
    empty = init_empty_weights(include_buffers=False) if buffers else torch.device("meta")
    with native_errors(source), empty:
        return native(CONFIG_MAPPING[source.model_type].from_dict(config))


def quiet_transformers() -> AbstractContextManager[None]:
    return _quiet(logging)


def quiet_diffusers() -> AbstractContextManager[None]:
    from diffusers.utils import logging as its

    return _quiet(its)


@contextmanager
def _quiet(logging: ModuleType) -> Iterator[None]:
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with redirect_stdout(StringIO()):
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
