"""Other implementations timed beside ours, from `--peer PATH`.

A peer is a Python file or a package folder that defines

    def blr_peer() -> dict[str, Callable]

whose keys are structures ("svd", "monarch", "blast", "ks") and whose values are called as
f(x, *factors) -> y, without gradients, x [n, i] (with --batch-last [i, n], y [o, n]). Factors are
those of `compressor/structures/specs.py`, contiguous: svd U, V; monarch U, V; blast U, S, V; ks the
factors of the chain, the output side first. A key "<structure>.prepare" may hold a function of the
factors that returns the tensors to pass in their place; it runs once, before the timing. The file
is run: take peers only from where you would run a program from.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from blr.compressor.base.errors import UsageError
from blr.compressor.base.quoting import named_line
from blr.compressor.structures.registry import TUNED

if TYPE_CHECKING:
    from torch import Tensor

KEYS = {key for name in TUNED for key in (name, f"{name}.prepare")}


@dataclass(frozen=True)
class Peer:
    """`functions` as `blr_peer` returned them."""

    name: str
    functions: dict[str, Callable[..., Any]]

    def prepared(self, structure: str, factors: Iterable[Tensor]) -> tuple[Tensor, ...]:
        """The tensors that this peer wants in place of the factors."""
        prepare = self.functions.get(f"{structure}.prepare")
        return tuple(factors) if prepare is None else tuple(prepare(*factors))


def load_peers(paths: Iterable[Path]) -> list[Peer]:
    """Every peer, under names that differ. Raises UsageError for one that cannot be used."""
    peers: list[Peer] = []
    for path in paths:
        peer = load_peer(path)
        same = sum(peer.name == other.name.partition("#")[0] for other in peers)
        peers.append(Peer(f"{peer.name}#{same + 1}", peer.functions) if same else peer)
    return peers


def load_peer(path: Path) -> Peer:
    """The peer at `path`. Raises UsageError saying what is missing."""
    module = _import(path)
    entry = getattr(module, "blr_peer", None)
    if not callable(entry):
        raise UsageError(f"peer {path}: no function blr_peer(); see blr bench layers --help")
    try:
        functions = entry()
    except Exception as error:
        remedy = "mend blr_peer() there, or leave out this --peer"
        raise UsageError(f"peer {path}: blr_peer() failed: {named_line(error)}; {remedy}") from error
    _check(path, functions)
    return Peer(path.resolve().stem, functions)


def _import(path: Path) -> ModuleType:
    source = path / "__init__.py" if path.is_dir() else path
    if not source.is_file() or source.suffix != ".py":
        raise UsageError(f"peer {path}: expected a .py file or a folder with __init__.py")
    name = f"blr_peer_{path.resolve().stem}"
    spec = importlib.util.spec_from_file_location(
        name, source, submodule_search_locations=[str(path)] if path.is_dir() else None
    )
    assert spec is not None and spec.loader is not None  # of a Python file always
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if (folder := str(path.resolve().parent)) not in sys.path:
        sys.path.append(folder)  # what lies beside it can be imported; nothing is shadowed
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        remedy = "make `import` of it work, or leave out this --peer"
        raise UsageError(f"peer {path}: cannot be imported: {named_line(error)}; {remedy}") from error
    return module


def _check(path: Path, functions: object) -> None:
    if not isinstance(functions, dict) or not functions:
        raise UsageError(f"peer {path}: blr_peer() must return a dict of functions by structure")
    for key, function in functions.items():
        if key not in KEYS or not callable(function):
            raise UsageError(
                f"peer {path}: blr_peer() returned {key!r}: expected functions under some of "
                f"{', '.join(TUNED)} (and NAME.prepare)"
            )
