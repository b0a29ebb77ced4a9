"""Files made of modules: each module's text as it is but for imports and names that clash.

A file is its header, the imports of its modules merged, and the modules in the order in which they
need each other. The result depends on the sources alone: the same bytes each time.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from blr.compressor.bundling.module import BundleError, Imported, Module, imported
from blr.compressor.bundling.names import KEPT, Names

# Linters and type checkers of whoever reads the file leave it alone.
HEAD = """# type: ignore
# ruff: noqa
# flake8: noqa
# pylint: skip-file
# fmt: off
# isort: skip_file
"""
WIDTH = 100
RULE = "# " + "=" * 20
LEFT_OUT = '{names} = None; raise ImportError("{module} is not part of this folder, which does without")'
Edit = tuple[int, int, bytes]  # from, to, what stands there instead


def bundle(
    files: Mapping[str, Sequence[str]],
    modules: Mapping[str, Module],
    abouts: Mapping[str, str],
    verbatim: Collection[str] = (),
) -> dict[str, bytes]:
    """Contents by file name.

    Args:
        files: name without ``.py`` to the names of its modules; a file may need those before it at
            import, and any inside functions.
        modules: by name; what a module imports inside functions and is not there is left out: the
            import raises ImportError.
        abouts: what each file says of itself at its top.
        verbatim: files that are their one module as it is.

    Raises BundleError for modules that cannot be joined as they are.
    """
    names = Names(modules, {files[file][0] for file in verbatim})
    homes = {module: file for file, held in files.items() for module in held}
    done: dict[str, bytes] = {}
    for file, held in files.items():
        if file in verbatim:
            done[file] = modules[held[0]].data
            continue
        writer = _Writer(file, names, homes, earlier=set(done))
        done[file] = writer.text(abouts[file], in_order(held, modules)).encode()
    return {f"{file}.py": data for file, data in done.items()}


def reached(roots: Iterable[str], modules: Mapping[str, Module]) -> list[str]:
    """`roots` and all that they import at the top, sorted."""
    return sorted(_visit(sorted(roots), modules, set(modules)))


def in_order(held: Iterable[str], modules: Mapping[str, Module]) -> list[str]:
    """Modules after those of them that they need at the top. Raises BundleError for a circle."""
    return _visit(sorted(held), modules, set(held))


def _visit(roots: Iterable[str], modules: Mapping[str, Module], among: set[str]) -> list[str]:
    done: dict[str, None] = {}
    open_: list[str] = []

    def visit(name: str) -> None:
        if name in open_:
            raise BundleError(f"{' -> '.join([*open_, name])}: modules import each other in a circle")
        if name in done or name not in among:
            return
        open_.append(name)
        for needed in modules[name].eager:
            visit(needed)
        open_.pop()
        done[name] = None

    for root in roots:
        visit(root)
    return list(done)


class _Writer:
    """Writes one file."""

    def __init__(self, file: str, names: Names, homes: Mapping[str, str], earlier: set[str]) -> None:
        self.file, self.names, self.homes, self.earlier = file, names, homes, earlier

    def text(self, about: str, order: Sequence[str]) -> str:
        held = [self.names.modules[name] for name in order]
        if sum(not KEPT.isdisjoint(module.defined) for module in held) > 1:
            raise BundleError(f"{self.file}: two of {', '.join(order)} define {', '.join(KEPT)}")
        parts = [f'{HEAD}"""{about}\n"""']
        parts.append("from __future__ import annotations\n\n" + self._imports(held))
        parts += [f"{RULE} {module.name}\n{self._section(module)}" for module in held]
        return "\n\n".join(part.strip("\n") for part in parts) + "\n"

    def _imports(self, held: Sequence[Module]) -> str:
        plain = {one for module in held for one in module.others}
        guarded = {one for module in held for one in module.guarded}
        blocks = [*_by_origin(plain - guarded), _guard(self.file, guarded), self._siblings(held)]
        return "\n".join(block for block in blocks if block)

    def _siblings(self, held: Sequence[Module]) -> str:
        """Imports of what earlier files define."""
        needed: dict[str, set[str]] = defaultdict(set)
        for module in held:
            for one in module.ours:
                home = self.homes[self.names.home(one.module, one.name)]
                if home != self.file:
                    needed[home].add(self.names.of(one.module, one.name))
        if late := sorted(needed.keys() - self.earlier):
            raise BundleError(f"{self.file} needs {late[0]}, which comes after it, at its top")
        return "".join(_from(f".{home}", sorted(found)) for home, found in sorted(needed.items()))

    def _section(self, module: Module) -> str:
        edits = [_span(module, node, b"") for node in module.dropped]
        edits += [_span(module, node, self._inner(module, node)) for node in module.inner]
        edits += _renamings(module, self.names.changed(module))
        data = module.data
        for start, end, new in sorted(edits, reverse=True):
            data = data[:start] + new + data[end:]
        return re.sub(r"\n{3,}", "\n\n", data.decode())

    def _inner(self, module: Module, node: ast.ImportFrom) -> bytes:
        """What stands for an import inside a function."""
        target = node.module or ""
        if target not in self.homes:
            names = " = ".join(one.alias for one in imported(node))
            return LEFT_OUT.format(names=names, module=target).encode()
        found = [(self.names.of(i.module, i.name), i.alias) for i in imported(node)]
        home = self.homes[target]
        if home != self.file:
            return f"from .{home} import {', '.join(_as(*pair) for pair in found)}".encode()
        indent = "\n" + " " * node.col_offset
        _check_dropped(module, node, [alias for name, alias in found if name == alias])
        return indent.join([f"{alias} = {n}" for n, alias in found if n != alias] or ["pass"]).encode()


def _check_dropped(module: Module, node: ast.ImportFrom, dropped: list[str]) -> None:
    """Refuse a name that is local elsewhere in its function: the global would not be seen."""
    function = next(
        f for f in ast.walk(module.tree) if isinstance(f, ast.FunctionDef) and node in list(ast.walk(f))
    )
    others = [n for n in ast.walk(function) if n is not node]
    bound = {n.id for n in others if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    bound |= {a.asname or a.name for n in others if isinstance(n, ast.ImportFrom) for a in n.names}
    if clash := sorted(bound & set(dropped)):
        raise BundleError(f"{module.name}, line {node.lineno}: {clash[0]} is bound twice; use two names")


def _renamings(module: Module, changed: Mapping[str, str]) -> list[Edit]:
    edits = []
    for use in module.uses:
        new = changed.get(use.name)
        if new is None:
            continue
        where = f"{module.name}, line {use.line}: {use.name}"
        if use.unclear:
            raise BundleError(f"{where} may be the class's or the module's; rename one of them")
        if new in use.hidden:
            raise BundleError(f"{where} becomes {new}, which is local there; rename the local one")
        start = module.starts[use.line - 1] + use.column
        end = start + len(use.name.encode())
        if module.data[start:end] != use.name.encode():
            raise BundleError(f"{where} cannot be renamed inside a string; take it out of it")
        edits.append((start, end, new.encode()))
    return edits


def _span(module: Module, node: ast.stmt, new: bytes) -> Edit:
    """`new` in the place of a statement; with its lines where it stands alone."""
    start = module.starts[node.lineno - 1] + node.col_offset
    last = node.end_lineno or node.lineno
    if not new and node.col_offset == 0:
        return start, module.starts[last], new
    return start, module.starts[last - 1] + (node.end_col_offset or 0), new


def _by_origin(found: set[Imported]) -> list[str]:
    """Import statements of the standard library, then of packages."""
    standard = {one for one in found if _top(one) in sys.stdlib_module_names}
    return [_statements(standard), _statements(found - standard)]


def _top(one: Imported) -> str:
    return (one.module or one.name).partition(".")[0]


def _statements(found: Iterable[Imported]) -> str:
    whole = sorted(f"import {_as(one.name, one.alias)}\n" for one in found if not one.module)
    parts: dict[str, list[str]] = defaultdict(list)
    for one in sorted(found):
        if one.module:
            parts[one.module].append(_as(one.name, one.alias))
    return "".join(whole) + "".join(_from(module, names) for module, names in sorted(parts.items()))


def _guard(file: str, found: set[Imported]) -> str:
    if not found:
        return ""
    packages = ", ".join(sorted({_top(one) for one in found}))
    body = "".join(f"    {line}\n" for line in _statements(found).splitlines())
    failure = f'raise ImportError("{file}.py needs {packages}") from error'
    return f"try:\n{body}except ImportError as error:\n    {failure}\n"


def _from(module: str, names: Sequence[str]) -> str:
    line = f"from {module} import {', '.join(names)}\n"
    if len(line) <= WIDTH:
        return line
    return f"from {module} import (\n" + "".join(f"    {name},\n" for name in names) + ")\n"


def _as(name: str, alias: str) -> str:
    return name if name == alias else f"{name} as {alias}"
