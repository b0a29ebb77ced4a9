"""config.json, read as hostile input: plain JSON whose counts and sizes some model could have."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blr.compressor.base.quoting import quote
from blr.compressor.checkpoint.regular import inside, read_json, refuse

# What an older diffusers called one class, by the modulation that the configuration names
_OLDER = {"ada_norm_zero": "DiTTransformer2DModel", "ada_norm_single": "PixArtTransformer2DModel"}
REMEDY = "take the config.json of the model's own repository"
MAX_BYTES = 1_000_000
MAX_LAYERS = 4096
# Counts and sizes that a model is built from, whatever its family calls them, and what none exceeds.
# Without these bounds building it, even without weights, takes all of the time or memory there is.
_TYPE = re.compile(r"(blr_)?(?!blr_)[a-z0-9_.-]{1,64}")
_CLASS = re.compile(r"[A-Z][A-Za-z0-9]{0,63}")
MAX_LATENT = 1024  # rows and columns of what a diffusion model denoises
_LAYERS = re.compile(r"(^|_)(layers?|blocks?|depths?)$")
_EXPERTS = re.compile(r"(^|_)experts?$")
_SIZES = re.compile(r"(^|_)(dim|size|width|positions|position_embeddings|ctx)$")
LIMITS = ((_LAYERS, MAX_LAYERS), (_EXPERTS, 2**16), (_SIZES, 2**24))
# What a checkpoint of few tensors may announce all the same: thresholds are named like counts, and
# the defaults of a family like a model that is larger
FEW_LAYERS, FEW_EXPERTS = 128, 1024


@dataclass(frozen=True)
class Library:
    """A library of models. `kind` is the key of config.json that names the model, `weights` what its
    files begin with, `single` the file of all, `index` the list of several; the rest are pickles."""

    name: str
    kind: str
    weights: str
    single: str
    index: str
    pickle: str
    pickle_index: str


def _library(name: str, kind: str, weights: str, pickled: str) -> Library:
    single, pickle = f"{weights}.safetensors", f"{pickled}.bin"
    return Library(name, kind, weights, single, f"{single}.index.json", pickle, f"{pickle}.index.json")


TRANSFORMERS = _library("transformers", "model_type", "model", "pytorch_model")
DIFFUSERS = _library("diffusers", "_class_name", *("diffusion_pytorch_model",) * 2)


def library_of(config: Mapping[str, object]) -> Library:
    """Whose a parsed config.json is."""
    ours = DIFFUSERS.kind in config and TRANSFORMERS.kind not in config
    return DIFFUSERS if ours else TRANSFORMERS


def kind_of(config: Mapping[str, object]) -> str:
    """The model type of a checked config.json; of a model of diffusers, its class."""
    kind = str(config[library_of(config).kind])
    return _OLDER.get(str(config.get("norm_type")), kind) if kind == "Transformer2DModel" else kind


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of `folder`, checked. Raises InputError for a hostile one, or no model type."""
    path = inside(folder, "config.json")
    config = read_json(path, MAX_BYTES, constants=True)
    if library_of(config) is DIFFUSERS:
        kind, size = config[DIFFUSERS.kind], config.get("sample_size")
        if type(kind) is not str or not _CLASS.fullmatch(kind):
            refuse(path, f"_class_name {quote(kind)}", "the name of one model class", REMEDY)
        if type(size) is int and size > MAX_LATENT:
            refuse(path, f"sample_size {size}", f"at most {MAX_LATENT}", REMEDY)
    else:
        _check_names(config, path)
    _check_implementations(config, path)
    for key, value in _integers(config):
        for pattern, limit in LIMITS:
            if value > limit and pattern.search(key):
                refuse(path, f"{quote(key, 40)[1:-1]} {quote(value)}", f"at most {limit}", REMEDY)
    return config


def check_counts(config: dict[str, object], folder: Path, tensors: int) -> None:
    """Raise InputError for a config with more layers than tensors, or countless experts."""
    limits = ((_LAYERS, max(tensors, FEW_LAYERS)), (_EXPERTS, max(tensors, FEW_EXPERTS)))
    native = {key: value for key, value in config.items() if key != "blr"}  # whose blocks are others
    for key, value in _integers(native):
        for pattern, limit in limits:
            if value > limit and pattern.search(key):
                found = f"{quote(key, 40)[1:-1]} {quote(value)} with {tensors} tensors"
                remedy = "take config.json and weights from the same model"
                refuse(folder / "config.json", found, f"at most {limit}", remedy)


def _check_names(config: dict[str, object], path: Path) -> None:
    kind = config.get("model_type")
    if type(kind) is not str or not _TYPE.fullmatch(kind):
        found = f"model_type {quote(kind)}" if "model_type" in config else "no model_type"
        refuse(path, found, "a short name of a-z 0-9 _ . - (blr_ once at most)", REMEDY)
    names = config.get("architectures")
    are_names = type(names) is list and all(type(n) is str and n.isidentifier() for n in names)
    if names is not None and not are_names:
        refuse(path, f"architectures {quote(names)}", "a list of names of model classes", REMEDY)


def _check_implementations(config: dict[str, object], path: Path) -> None:
    """Refuse an attention that is a repository of the hub: building the model would run its code."""
    for key, value in config.items():
        if isinstance(value, dict):
            _check_implementations(value, path)
        elif isinstance(value, str) and "implementation" in key and not value.isidentifier():
            found = f"{quote(key, 40)[1:-1]} {quote(value, 60)}, code of another repository"
            refuse(path, found, "a name like 'sdpa', or none", "remove the key")


def _integers(value: object, key: str = "") -> Iterator[tuple[str, int]]:
    """Every integer of a parsed configuration with its key, those in lists too."""
    if type(value) is int:
        yield key, value
    elif type(value) is dict:
        for name, held in value.items():
            yield from _integers(held, name)
    elif type(value) is list:
        for item in value:
            yield from _integers(item, key)
