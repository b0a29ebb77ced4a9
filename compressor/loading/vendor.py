"""The Python files that a folder carries, so that it loads where `blr` is not installed.

One, `modeling/modeling_blr.py`, for every model. `blr export --self-contained` adds what
`blr.compressor.bundling` joins: the decoding runtime and those kernels that the folder needs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files

from blr.compressor import __version__
from blr.compressor.bundling.bundle import BundleError, Module, bundle, reached
from blr.compressor.modeling.modeling_blr import HOME
from blr.compressor.modeling.settings import ExportSettings
from blr.compressor.structures.specs import Spec, families
from blr.kernels.decode.gemv.segments import SEVERAL

MODELING = "blr.compressor.modeling"
DIFFUSION = "diffusion_blr"  # what `auto_map` of a model of diffusers names
# File of a self-contained export to the module that, with what it needs at its top, makes it; of what
# they import inside functions, kernels make a file of their own, and the rest is the runtime.
EXPORTED = "exported_blr"  # what `auto_map` names
ROOTS = {HOME: f"{MODELING}.{HOME}", EXPORTED: f"{MODELING}.exported"}
KERNELS, RUNTIME = "kernels_blr", "runtime_blr"
ABOUT = {
    HOME: "",  # says of itself what it is
    EXPORTED: "The models of an export, which decode in the runtime.",
    KERNELS: "The Triton kernels, imported where there is a GPU that runs them.",
    RUNTIME: "Decoding of the export: what `generate` runs on a GPU.",
}
ORIGIN = """{about}

Made by blr {version} from the modules that its headings name: change those, not this file. A name that
several modules have carries its module's."""


def code_files(*more: str) -> dict[str, bytes]:
    return {f"{name}.py": _source(f"{MODELING}.{name}").encode() for name in (HOME, *more)}


def diffusion_files() -> dict[str, bytes]:
    """The same for a model of diffusers."""
    return code_files(DIFFUSION)


DRAFTED = ("runtime.drafted", "runtime.proposals")


def left_out(
    structures: Collection[str],
    quantized: bool = False,
    rows: int = 1,
    drafted: bool = False,
    experts: bool = False,
) -> frozenset[str]:
    """The modules that an export does without. structures: names of its specs. quantized: whether
    weights are in few bits. rows: sequences decoded at once, 0 for a model that generates nothing.
    drafted: whether tokens are proposed. experts: whether it is a mixture of them."""
    absent = {f"decode.{kind}.reference" for kind in ("attention", "quantized")}  # no GPU's
    absent.add("decode.token")  # needs a later Triton at its top than others
    if not quantized:
        absent |= {"decode.quantized.launch", "decode.integer.launch"}
    if rows < SEVERAL:
        absent.add("decode.skinny")
    if "blast" not in structures:
        absent.add("decode.skinny.mix")
    others = {"blr.compressor.runtime" if rows == 0 else "blr.compressor.runtime.whole"}
    if not drafted:
        others |= {f"blr.compressor.{part}" for part in DRAFTED}
    if not experts:
        absent.add("layers.routing")
        others.add("blr.compressor.runtime.mixtures")
    return frozenset({f"blr.kernels.{name}" for name in absent} | others)


def needless(specs: Sequence[Spec], settings: ExportSettings, config: Iterable[str]) -> frozenset[str]:
    """`left_out` of an export with layers of `specs` and these settings in its config.json."""
    return left_out(
        {name for spec in specs for name in families(spec)},
        quantized=bool(settings.quantize or settings.head) or any(spec.quantized for spec in specs),
        rows=0 if settings.context is None else max(settings.batch, SEVERAL * bool(settings.draft)),
        drafted=settings.draft is not None,
        experts=any(name.endswith("_experts") for name in config),
    )


def exported_classes(auto_map: Mapping[str, str]) -> dict[str, str]:
    """The `auto_map` of a self-contained export, from that of a checkpoint."""
    return {
        auto: name if auto == "AutoConfig" else name.replace(f"{HOME}.", f"{EXPORTED}.")
        for auto, name in auto_map.items()
    }


@cache
def runtime_files(left_out: frozenset[str]) -> dict[str, bytes]:
    """The files of a self-contained export. Raises BundleError, which is a bug."""
    modules = read_modules(ROOTS.values(), left_out)
    held = {file: names for file, names in assigned(ROOTS, modules).items() if names}
    abouts = {file: ORIGIN.format(about=ABOUT[file], version=__version__) for file in held}
    return dict(sorted(bundle(held, modules, abouts).items()))


def read_modules(roots: Iterable[str], left_out: frozenset[str] = frozenset()) -> dict[str, Module]:
    """All modules that `roots` import. Raises BundleError if the top of one needs one `left_out`."""
    found: dict[str, Module] = {}
    waiting = list(roots)
    while waiting:
        name = waiting.pop()
        if name not in found:
            module = found[name] = _module(name)
            if lacking := [other for other in module.eager if _within(other, left_out)]:
                raise BundleError(f"{name} imports {lacking[0]} at its top, which is to be left out")
            waiting += [*module.eager, *(other for other in module.lazy if not _within(other, left_out))]
    return found


def assigned(roots: Mapping[str, str], modules: Mapping[str, Module]) -> dict[str, list[str]]:
    """The modules of every file: each stands in the first file that needs it at its top."""
    starts = {file: [root] for file, root in roots.items()}
    starts[KERNELS] = [name for name in modules if name.startswith("blr.kernels.")]
    starts[RUNTIME] = list(modules)
    done: set[str] = set()
    held: dict[str, list[str]] = {}
    for file, start in starts.items():
        held[file] = [name for name in sorted(reached(start, modules)) if name not in done]
        done.update(held[file])
    return held


def _within(module: str, packages: frozenset[str]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


@cache
def _module(name: str) -> Module:
    return Module(name, _source(name))


def _source(module: str) -> str:
    package, _, name = module.rpartition(".")
    path = files(package).joinpath(f"{name}.py")
    if not path.is_file():
        raise BundleError(f"{module}: expected a module, not a package")
    return path.read_text("utf-8")
