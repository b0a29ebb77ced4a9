"""`blr.compressor`: turns Hugging Face checkpoints into structured ones. Importing it loads no torch."""

from typing import Any

from blr.kernels.common.tuned import read_rules_with

__version__ = "0.1.0"


def _measured_rules(gpu: str) -> list[dict[str, Any]]:
    from blr.compressor.tuned_table import measured_rules

    return measured_rules(gpu)


read_rules_with(_measured_rules)  # kernels import nothing from here
