"""The libraries whose checkpoints are taken, and how each names what is in a folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Library:
    """`weights` and `pickled` are what its files of weights begin with, `kind` is the key of config.json
    that names the model."""

    name: str
    weights: str
    pickled: str
    kind: str

    @property
    def single(self) -> str:
        """The file of all weights."""
        return f"{self.weights}.safetensors"

    @property
    def index(self) -> str:
        """What lists the files of weights where there are several."""
        return f"{self.single}.index.json"

    @property
    def pickle(self) -> str:
        """As `single`, of an older checkpoint."""
        return f"{self.pickled}.bin"

    @property
    def pickle_index(self) -> str:
        """As `index`, of an older checkpoint."""
        return f"{self.pickle}.index.json"


# What an older diffusers called one class, by the modulation that the configuration names
_OLDER = {"ada_norm_zero": "DiTTransformer2DModel", "ada_norm_single": "PixArtTransformer2DModel"}
TRANSFORMERS = Library("transformers", "model", "pytorch_model", "model_type")
DIFFUSERS = Library("diffusers", *("diffusion_pytorch_model",) * 2, "_class_name")


def library_of(config: Mapping[str, Any]) -> Library:
    """Whose a parsed config.json is."""
    ours = DIFFUSERS.kind in config and TRANSFORMERS.kind not in config
    return DIFFUSERS if ours else TRANSFORMERS


def kind_of(config: Mapping[str, Any]) -> str:
    """The type of model that a checked config.json names: of a model of diffusers, the class."""
    kind = str(config[library_of(config).kind])
    return _OLDER.get(str(config.get("norm_type")), kind) if kind == "Transformer2DModel" else kind
