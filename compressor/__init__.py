"""`blr.compressor`: turns Hugging Face checkpoints into structured ones.

`compress`, `heal`, `export`, `load`, `evaluate` and `Recipe` are its interface, and `register`, after
which transformers loads outputs without remote code. Importing this loads no torch, and next to nothing
else: a signal before `__main__` has a handler would be a traceback.
"""

from __future__ import annotations

from blr.kernels.common.tuned import read_rules_with

TYPE_CHECKING = False  # not from typing, which takes longer than all the rest
if TYPE_CHECKING:
    from typing import Any

    from blr.compressor.commands.api import compress, evaluate, export, heal, load
    from blr.compressor.modeling import register
    from blr.compressor.recipe.schema import Recipe

__all__ = ["Recipe", "compress", "evaluate", "export", "heal", "load", "register"]
__version__ = "0.2.0"
_ELSEWHERE = {"Recipe": "recipe.schema", "register": "modeling"}  # than in commands/api.py


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_ELSEWHERE.get(name, 'commands.api')}"), name)


def _measured_rules(gpu: str) -> list[dict[str, object]]:
    from blr.compressor.recipe.tuned_table import measured_rules

    return measured_rules(gpu)


read_rules_with(_measured_rules)  # kernels import nothing from here
