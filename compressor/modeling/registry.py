"""Registers structured models with the Auto classes and other tables of transformers."""

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from itertools import product
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.auto_factory import _LazyAutoMapping
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from blr.compressor.modeling.modeling_blr import HOME, PREFIX, StructuredConfig, config_class
from blr.compressor.modeling.models import model_class
from blr.compressor.workspace.manifest import MANIFEST, is_output

# Of several Auto classes that give the same model, those that say most plainly what it is for
_PLAINEST = ("", "ForCausalLM", "ForSeq2SeqLM", "ForSpeechSeq2Seq", "ForMaskedLM")


def register(model_type: str) -> type:
    """Enter the structured variant of a native `model_type` in transformers' tables of models; returns
    its configuration class. Raises KeyError for a type that transformers does not have."""
    native = CONFIG_MAPPING[model_type]
    config = config_class(PREFIX + native.__name__)
    AutoConfig.register(config.model_type, config, exist_ok=True)
    mappings: list[Any] = [m for m in vars(modeling_auto).values() if isinstance(m, _LazyAutoMapping)]
    for mapping in mappings:
        if native in mapping and (names := _known(mapping[native])):
            classes = tuple(model_class(PREFIX + name) for name in names)
            # `transformers serve`, pipelines and TRL look there for the name that config.json has. To
            # import pipelines makes transformers a second time; who imported it before keeps the first
            for found, module in product(classes, (transformers, sys.modules["transformers"])):
                setattr(module, found.__name__, found)
            mapping.register(config, classes[0] if len(classes) == 1 else classes, exist_ok=True)
    return config


class _OnDemand(dict[str, type]):
    """Configurations by model type; the structured variant of one is registered when asked for first."""

    def __contains__(self, model_type: object) -> bool:
        return super().__contains__(model_type) or self._register(str(model_type))

    def _register(self, model_type: str) -> bool:
        """Register ``blr_<native>``; False for a name of another kind."""
        native = model_type.removeprefix(f"{PREFIX.lower()}_")
        if native == model_type or native not in CONFIG_MAPPING:
            return False
        with suppress(AttributeError):  # transformers keeps some classes to itself
            register(native)
            return True
        return False


def register_on_demand() -> None:
    """Let transformers find the structured variants of all its model types."""
    if not isinstance(CONFIG_MAPPING._extra_content, _OnDemand):
        CONFIG_MAPPING._extra_content = _OnDemand(CONFIG_MAPPING._extra_content)


def auto_map(model_type: str, architectures: Sequence[str] | None = None) -> dict[str, str]:
    """The `auto_map` of a structured checkpoint of a native `model_type`: our class for each Auto class.
    architectures: the classes that its config.json names, with our prefix or without. Of several of an
    Auto class (DeiT with and without a teacher) the map has the one that is named."""
    native = CONFIG_MAPPING[model_type]
    table = {"AutoConfig": f"{HOME}.{PREFIX}{native.__name__}"}
    named = {name.removeprefix(PREFIX) for name in architectures or ()}
    for auto, names in auto_classes(model_type).items():
        table[auto] = f"{HOME}.{PREFIX}{next((n for n in names if n in named), names[0])}"
    return table


def before_saving(config: PreTrainedConfig, folder: Path) -> None:
    """Complete the `auto_map` of `config`; delete an output's manifest, which describes other files."""
    config.auto_map = auto_map(config.model_type, config.architectures)
    if is_output(folder):
        (folder / MANIFEST).unlink()


StructuredConfig.before_saving = staticmethod(before_saving)


def auto_name(config: Mapping[str, Any]) -> str:
    """The Auto class for the model, with its head, that config.json names; else AutoModel."""
    named = next(iter(config.get("architectures") or ()), None)
    found = [auto for auto, name in config["auto_map"].items() if name.rpartition(".")[2] == named]
    plainest = (auto for task in _PLAINEST if (auto := f"AutoModel{task}") in found)
    return next(plainest, min(found, default="AutoModel"))


def declared_keys(model_type: str) -> set[str]:
    """The keys of config.json that the native configuration class declares, with their other names."""
    native = CONFIG_MAPPING[model_type]
    names = {field.name for field in fields(native)} if is_dataclass(native) else set()
    known = {"model_type", "tokenizer_class", "torch_dtype", *names, *native.attribute_map}
    with suppress(Exception):  # some cannot be made from defaults
        known |= native().to_dict().keys()
    return known


def auto_classes(model_type: str) -> dict[str, tuple[str, ...]]:
    """For each Auto class the names of the model classes that it has for a native `model_type`."""
    native, found = CONFIG_MAPPING[model_type], {}
    for name in dir(modeling_auto):
        mapping = getattr(getattr(modeling_auto, name), "_model_mapping", None)
        if not name.startswith("AutoModel") or mapping is None or native not in mapping:
            continue
        if (known := _known(mapping[native])) and hasattr(transformers, name):
            found[name] = known
    return found


def _known(classes: object) -> tuple[str, ...]:
    """The names of those classes, one or several, that transformers exports."""
    listed = classes if isinstance(classes, tuple | list) else (classes,)
    return tuple(c.__name__ for c in listed if hasattr(transformers, c.__name__))
