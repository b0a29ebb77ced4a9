"""The Python files inside a checkpoint, so that it loads where `blr` is not installed.

A few readable files made of the package's own modules (`blr.compressor.bundling`): constant bytes
for a version of `blr`, whatever the model, whose layer names live only in `config.json`. A compressed
checkpoint has four, an export six at most: without the kernels of structures that it has not, of
quantized weights if it has none, of a whole token in one kernel unless the table of its GPU asks for
that, and without the decoding runtime if it does not generate.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pprint import pformat

from blr.compressor import __version__
from blr.compressor.bundling.bundle import bundle, reached
from blr.compressor.bundling.module import BundleError, Module
from blr.compressor.modeling.settings import ExportSettings
from blr.compressor.recipe.tuned_table import read_table, shipped_gpus, shipped_table
from blr.compressor.structures.specs import SPECS, Spec, families
from blr.kernels.common.names import FOLDERS

# File to the module that, with what it needs at its top, makes it; of what they import inside
# functions, kernels make a file of their own, and the rest is the runtime.
ROOTS = {
    "configuration_blr": "blr.compressor.modeling.configuration_blr",
    "layers_blr": "blr.compressor.modeling.layers",
    "modeling_blr": "blr.compressor.modeling.modeling_blr",
}
EXPORTED = "exported_blr"  # what `auto_map` of an export names
EXPORT_ROOTS = {**ROOTS, EXPORTED: "blr.compressor.modeling.exported"}
KERNELS, RUNTIME = "kernels_blr", "runtime_blr"
DIFFUSION = "diffusion_blr"  # what `auto_map` of a model of diffusers names
DIFFUSION_ROOTS = {
    "layers_blr": "blr.compressor.modeling.table",
    DIFFUSION: "blr.compressor.modeling.diffusion",
}
PLAIN = "modeling_plain"  # what `auto_map` of pairs of linear layers names
PLAIN_ROOTS = {
    "configuration_blr": "blr.compressor.modeling.configuration_blr",
    PLAIN: "blr.compressor.modeling.plain",
}
ABOUT = {
    "configuration_blr": "The configuration: a native one with a table of structured layers.",
    "layers_blr": "The structured layers in plain torch, and the choice of their kernels.",
    "modeling_blr": "The models: native ones of transformers with structured layers.",
    EXPORTED: "The models of an export: factors in the order of the kernels, or packed.",
    PLAIN: "The models: native ones of transformers whose low-rank layers are pairs of linear ones.",
    KERNELS: "The Triton kernels, imported where there is a GPU that runs them.",
    # diffusers copies out of a folder the files that this one names, and none that those name
    DIFFUSION: "The models: native ones of diffusers with structured layers, by way of\n\n"
    "    from .kernels_blr import *",
    RUNTIME: "Decoding of the export: what `generate` runs on a GPU.",
}
ORIGIN = """{about}

Made by blr {version} from its modules, in this order (change those, not this file; a name that
several modules have carries its module's):"""
TUNED = "blr.kernels.common.tuned"  # reads YAML files that a checkpoint has not
_TUNED_TEXT = '''"""Measured kernel tables, as shipped with this version of blr in configs/tuned/."""

from __future__ import annotations

from typing import Any

TABLE: dict[str, list[dict[str, Any]]] = {table}


def tuned_rules(gpu: str) -> list[dict[str, Any]]:
    """Rules for a GPU by its key; [] if nobody measured it."""
    return TABLE.get(gpu, [])


def forget_rules() -> None:
    """Nothing: the table stays as it is."""
'''


@dataclass(frozen=True)
class Contents:
    """What an export holds, by which it needs kernels.

    structures: names of its specs. gpu: key of a GPU, as "h200".
    """

    structures: frozenset[str]
    gpu: str
    quantized: bool
    generates: bool

    def left_out(self) -> frozenset[str]:
        """Modules and packages that it can do without."""
        absent = {f"blr.kernels.layers.{FOLDERS[s]}.variants" for s in SPECS.keys() - self.structures}
        if not self.quantized:
            absent.update(
                f"blr.kernels.decode.quantized.{part}" for part in ("corrected", "grouped", "launch")
            )
            absent.update(f"blr.kernels.decode.integer.{part}" for part in ("form", "launch", "looped"))
        if not self.generates:
            absent.add("blr.compressor.runtime")
        return frozenset(absent)


def contents_of(specs: Iterable[Spec], settings: ExportSettings) -> Contents:
    """Those of an export with layers of `specs`."""
    specs = list(specs)
    return Contents(
        structures=frozenset(name for spec in specs for name in families(spec)),
        gpu=settings.gpu.replace("-", ""),
        quantized=bool(settings.quantize or settings.head) or any(spec.quantized for spec in specs),
        generates=settings.context is not None,
    )


def exported_classes(auto_map: Mapping[str, str], file: str = EXPORTED) -> dict[str, str]:
    """The `auto_map` of an export, from that of a checkpoint. file: where its models are."""
    return {auto: name.replace("modeling_blr.", f"{file}.") for auto, name in auto_map.items()}


def vendored_files(contents: Contents | None = None) -> dict[str, bytes]:
    """File name to contents of everything `from_pretrained(..., trust_remote_code=True)` runs.

    Args:
        contents: of an export, None for a compressed checkpoint.

    Raises BundleError for modules that cannot be joined (a mistake in the sources).
    """
    return _made(frozenset() if contents is None else contents.left_out(), contents is not None)


def plain_files() -> dict[str, bytes]:
    """The same of low-rank layers as pairs of linear ones."""
    return _bundled(frozenset(), tuple(PLAIN_ROOTS.items()))


def diffusion_files() -> dict[str, bytes]:
    """The same of a model of diffusers."""
    return _bundled(frozenset({"blr.compressor.loading"}), tuple(DIFFUSION_ROOTS.items()))


def _made(left_out: frozenset[str], exported: bool) -> dict[str, bytes]:
    return _bundled(left_out, tuple((EXPORT_ROOTS if exported else ROOTS).items()))


@cache
def _bundled(left_out: frozenset[str], named: tuple[tuple[str, str], ...]) -> dict[str, bytes]:
    roots = dict(named)
    modules = read_modules(roots.values(), left_out)
    held = {file: names for file, names in assigned(roots, modules).items() if names}
    abouts = {file: ORIGIN.format(about=ABOUT[file], version=__version__) for file in held}
    return dict(sorted(bundle(held, modules, abouts).items()))


def read_modules(roots: Iterable[str], left_out: frozenset[str] = frozenset()) -> dict[str, Module]:
    """The modules that `roots` import, at the top or inside functions, and what these import.

    Raises BundleError when a module of `left_out` is needed at the top of another.
    """
    found: dict[str, Module] = {}
    waiting = list(roots)
    while waiting:
        name = waiting.pop()
        if name not in found:
            module = found[name] = _module(name)
            if needless := [other for other in module.eager if _within(other, left_out)]:
                raise BundleError(f"{name} imports {needless[0]} at its top, which is to be left out")
            waiting += [*module.eager, *(other for other in module.lazy if not _within(other, left_out))]
    return found


def assigned(roots: Mapping[str, str], modules: Mapping[str, Module]) -> dict[str, list[str]]:
    """The modules of every file: each stands in the first that needs it at its top."""
    starts = {file: [root] for file, root in roots.items()}
    starts[KERNELS] = [name for name in modules if name.startswith("blr.kernels.")]
    starts[RUNTIME] = list(modules)
    done: set[str] = set()
    held: dict[str, list[str]] = {}
    for file, start in starts.items():
        held[file] = [name for name in reached(start, modules) if name not in done]
        done.update(held[file])
    return held


def _within(module: str, packages: frozenset[str]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


@cache
def _module(name: str) -> Module:
    """Read once for the bundles of all exports, which leave it as it is."""
    return Module(name, _tuned_text() if name == TUNED else _source(name))


def _source(module: str) -> str:
    package, _, name = module.rpartition(".")
    path = files(package).joinpath(f"{name}.py")
    if not path.is_file():
        raise BundleError(f"{module}: expected a module, not a package")
    return path.read_text("utf-8")


def _tuned_text() -> str:
    table = {gpu: read_table(shipped_table(gpu)) for gpu in shipped_gpus()}
    return _TUNED_TEXT.replace("{table}", pformat(table, width=100, sort_dicts=False))
