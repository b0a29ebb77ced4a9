"""Runs a function as soon as another package has been imported, without importing it."""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def after_import(package: str, run: Callable[[], None]) -> None:
    """Call `run` now if `package` is imported already, else right after its first import."""
    if package in sys.modules:
        run()
    else:
        sys.meta_path.insert(0, _Waiting(package, run))


class _Waiting(MetaPathFinder):
    """Finds one package as the finders behind it do, and runs a function after the package's code.
    Several may wait for one package: every copy of our modules in a process has its own."""

    def __init__(self, package: str, run: Callable[[], None]) -> None:
        self.package, self.run = package, run

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self.package:
            return None
        spec = self._others_find(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: object) -> None:
            execute(module)
            sys.meta_path.remove(self)  # not before: others ask where a package is, and do not import it
            self.run()

        loader.exec_module = exec_module
        return spec

    def _others_find(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        behind = (f for f in sys.meta_path[sys.meta_path.index(self) + 1 :] if hasattr(f, "find_spec"))
        found = (finder.find_spec(name, path, target) for finder in behind)
        return next((spec for spec in found if spec is not None), None)
