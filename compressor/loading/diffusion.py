"""Models of diffusers: the class that a folder names, the dense model in it, ours; what they run on."""

from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn

from blr.compressor.base.device import pick_device
from blr.compressor.base.errors import CapabilityError
from blr.compressor.base.exhaustion import raise_exhausted
from blr.compressor.base.quoting import first_line, quote
from blr.compressor.checkpoint.config import DIFFUSERS, REMEDY
from blr.compressor.checkpoint.header import TORCH_NAMES
from blr.compressor.checkpoint.regular import refuse
from blr.compressor.checkpoint.source import Source, open_source
from blr.compressor.loading.loader import misfit
from blr.compressor.loading.native import native_errors, quiet_diffusers
from blr.compressor.loading.smoke_run import NO_CHECK, Trial, check_model, refuse_model, trial_of
from blr.compressor.workspace.manifest import check_listed

PREFIX = "Blr"
LATENT, CAPTION = 16, 8  # rows and columns, tokens of text, that a model is tried on


def load_diffusion(folder: Path, *, dtype: str | None = None, device: str = "auto") -> nn.Module:
    """Load the model of diffusers in an output of blr, in evaluation mode, after comparing it with its
    manifest. dtype: name of a torch dtype, as "bfloat16"; None: as stored. device: "auto" or a torch
    device. Raises CapabilityError without diffusers or the device, InputError for another folder or
    other bytes, NumericsError for weights that are not finite or factors that overflow."""
    check_listed(folder, "all")
    source = open_source(folder)
    if source.library is not DIFFUSERS or not source.model_type.startswith(PREFIX):
        refuse(folder, source.model_type, "an output of blr for diffusers", "compress one first")
    model = _structured(source, dtype).to(pick_device(device))
    check_model(model, folder)
    return model


def load_written(folder: Path) -> object:
    return _structured(open_source(folder), None)


def _structured(source: Source, dtype: str | None) -> nn.Module:
    cls = structured_class(source.model_type, source)
    stored = getattr(torch, dtype) if dtype else stored_dtype(source)
    with native_errors(source), quiet_diffusers():
        return cls.from_pretrained(source.folder, torch_dtype=stored, local_files_only=True)


def dense_model(source: Source, *, meta: bool = False) -> nn.Module:
    """Load the dense model in `source`, as stored; with `meta` without its weights. Raises
    CapabilityError without diffusers; InputError for an unknown class, or tensors of another one."""
    cls = dense_class(source)
    config = {**source.config, DIFFUSERS.kind: source.model_type}
    with native_errors(source), quiet_diffusers(), init_empty_weights(include_buffers=False):
        model = cls.from_config(config)
    found = {name: tuple(entry.shape) for name, entry in source.entries.items()}
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    odd = {"missing_keys": wanted.keys() - found.keys(), "unexpected_keys": found.keys() - wanted.keys()}
    odd["mismatched_keys"] = {n for n in wanted.keys() & found.keys() if wanted[n] != found[n]}
    if wrong := misfit(odd, "missing", "unexpected", "mismatched"):
        refuse(source.folder, f"{wrong} for {cls.__name__}", "the tensors of one model", REMEDY)
    if not meta:
        state = {name: source.load_tensor(entry) for name, entry in source.entries.items()}
        model.load_state_dict(state, assign=True)
    return model.eval()


def dense_class(source: Source) -> Any:
    diffusers = _diffusers(source)
    named = getattr(diffusers, source.model_type, None)
    if not isinstance(named, type) or not issubclass(named, diffusers.ModelMixin):
        found = f"_class_name {quote(source.model_type)}"
        refuse(source.folder / "config.json", found, "a model class of diffusers", REMEDY)
    return named


def structured_class(name: str, source: Source) -> Any:
    """The structured class called `name`. Raises as `dense_model`."""
    _diffusers(source)
    from blr.compressor.modeling.diffusion import diffusion_class

    try:
        return diffusion_class(name)
    except AttributeError as error:
        refuse(source.folder / "config.json", str(error), "a model class of diffusers", REMEDY)


def _diffusers(source: Source) -> Any:
    try:
        import diffusers
    except ImportError:
        raise CapabilityError(
            f"{source.folder}: {source.model_type} runs with diffusers, which is not installed: "
            f"pip install 'blr-compress[diffusers]' ({NO_CHECK})"
        ) from None
    return diffusers


def stored_dtype(source: Source) -> torch.dtype:
    sizes: dict[str, int] = {}
    for entry in source.entries.values():
        if entry.is_float:
            sizes[entry.dtype] = sizes.get(entry.dtype, 0) + entry.nbytes
    return getattr(torch, TORCH_NAMES[max(sizes, key=lambda dtype: sizes[dtype])])


def diffusion_trial(model: Any, where: object) -> Trial:
    """Run `model` on a random latent image, a time step, and a class or a text. Raises InputError if it
    does not run, NumericsError for no finite result."""
    try:
        with quiet_diffusers():
            return trial_of(model, trial_inputs(model), "a latent image at one time step", where)
    except Exception as error:  # whatever a model raises at what it does not take
        raise_exhausted(error)
        refuse_model(model, where, first_line(error))


def trial_inputs(model: Any) -> dict[str, object]:
    """Small inputs: latents [1, c, h, w], time steps [1], classes [1] or a text [1, t, d]."""
    config, generator = model.config, torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    side = min(int(config.sample_size), LATENT)
    inputs: dict[str, object] = {
        "hidden_states": random(1, config.in_channels, side, side),
        "timestep": torch.tensor([500]),
    }
    if config.norm_type == "ada_norm_zero":
        return {**inputs, "class_labels": torch.tensor([1])}
    width = config.caption_channels or config.cross_attention_dim
    inputs["encoder_hidden_states"] = random(1, CAPTION, width)
    inputs["added_cond_kwargs"] = {"resolution": None, "aspect_ratio": None}
    if model.use_additional_conditions:
        inputs["added_cond_kwargs"] = {
            "resolution": torch.full((1, 2), 8.0 * side),
            "aspect_ratio": torch.ones(1, 1),
        }
    return inputs
