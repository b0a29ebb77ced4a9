"""One name for every definition of several modules: a name that two of them have gets a prefix."""

from __future__ import annotations

import builtins
from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from blr.compressor.bundling.module import BundleError, Imported, Module

KEPT = {"__getattr__"}  # what Python looks up in a module by name


class Names:
    """What definitions are called where `modules` are joined; those of `kept` as they are.

    Raises BundleError when two modules import different things under one name, or prefixes do not
    tell two names apart.
    """

    def __init__(self, modules: Mapping[str, Module], kept: Collection[str] = ()) -> None:
        self.modules = modules
        foreign = _foreign(modules.values())
        known = Counter(name for module in modules.values() for name in module.defined)
        taken = set(dir(builtins)) | set(foreign)
        self.final = {
            (module.name, name): qualified(module.name, name)
            if {name, module.name}.isdisjoint((*KEPT, *kept)) and (known[name] > 1 or name in taken)
            else name
            for module in modules.values()
            for name in module.defined
        }
        counts = Counter(name for name in self.final.values() if name not in KEPT)
        twice = sorted(n for n, count in counts.items() if count > 1 or n in taken)
        if twice:
            raise BundleError(f"{', '.join(twice)}: one name for two things; rename one of them")

    def of(self, module: str, name: str) -> str:
        """What `name`, defined or imported by `module`, is called.

        Raises BundleError for a name that it has not.
        """
        if (module, name) in self.final:
            return self.final[module, name]
        held = self.modules[module]
        for found in held.ours:
            if found.alias == name:
                return self.of(found.module, found.name)
        if any(found.alias == name for found in (*held.others, *held.guarded)):
            return name
        raise BundleError(f"{module} has no {name}, which another module imports from it")

    def home(self, module: str, name: str) -> str:
        """The module that defines what `module` knows as `name`."""
        for found in () if (module, name) in self.final else self.modules[module].ours:
            if found.alias == name:
                return self.home(found.module, found.name)
        return module

    def changed(self, module: Module) -> dict[str, str]:
        """Global names in the text of `module` that are called otherwise."""
        mine = {name: self.final[module.name, name] for name in module.defined}
        typing = [found for found in module.typing if found.module in self.modules]
        theirs = {i.alias: self.of(i.module, i.name) for i in (*module.ours, *typing)}
        return {old: new for old, new in {**mine, **theirs}.items() if old != new}


def qualified(module: str, name: str) -> str:
    """`name` with the last two parts of its module in front, in the case of its kind."""
    bare = name.lstrip("_")
    hidden = name[: len(name) - len(bare)]
    words = dict.fromkeys(part.removesuffix("_blr") for part in module.split(".")[-2:])
    words.pop(bare.lower(), None)  # `VARIANTS` of blast.variants is `BLAST_VARIANTS`
    prefix = "_".join(words)
    if bare.isupper():
        return f"{hidden}{prefix.upper()}_{bare}"
    if bare[0].isupper():
        return f"{hidden}{prefix.title().replace('_', '')}{bare}"
    return f"{hidden}{prefix}_{bare}"


def _foreign(modules: Iterable[Module]) -> dict[str, Imported]:
    """Names imported from other packages. Raises BundleError for one of two meanings."""
    found: dict[str, Imported] = {}
    for module in modules:
        for one in (*module.others, *module.guarded):
            other = found.setdefault(one.alias, one)
            if other != one:
                raise BundleError(
                    f"{module.name} imports {one.name!r} of {one.module!r} as {one.alias!r}, which"
                    f" another module has from {other.module!r}; give one of them another name"
                )
    return found
