"""`blr.compressor`: turns Hugging Face checkpoints into structured ones. Importing it loads no torch,
and next to nothing else: a signal before `__main__` has a handler would be a traceback."""

from __future__ import annotations

from blr.kernels.common.tuned import read_rules_with

TYPE_CHECKING = False  # not from typing, which takes longer than all the rest
if TYPE_CHECKING:
    from typing import Any

__version__ = "0.1.0"


def _measured_rules(gpu: str) -> list[dict[str, Any]]:
    from blr.compressor.recipe.tuned_table import measured_rules

    return measured_rules(gpu)


read_rules_with(_measured_rules)  # kernels import nothing from here
