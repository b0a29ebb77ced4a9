"""The environment variable BLR_KERNELS: whether Triton kernels run.

`auto` (the default) uses them on NVIDIA GPUs of compute capability 8 and later where Triton is
installed, `torch` never, `triton` insists on them (an error where there is no Triton) and, under
TRITON_INTERPRET=1, runs them on the CPU in Triton's interpreter.
"""

import os
from collections.abc import Sequence

VARIABLE = "BLR_KERNELS"
MODES = ("auto", "torch", "triton")
NO_TRITON = f"{VARIABLE} is 'triton', but there is no triton; install it or unset that"


def kernels_mode() -> str:
    """The value of BLR_KERNELS. Raises RuntimeError for one that is not in `MODES`."""
    return setting(VARIABLE, MODES)


def setting(variable: str, known: Sequence[str]) -> str:
    """The value of a variable, "auto" where it is unset. Raises RuntimeError for one not in `known`."""
    value = os.environ.get(variable, "auto")
    if value not in known:
        raise RuntimeError(
            f"{variable} is {value!r}: expected one of {', '.join(known)}; set one of these, or unset it"
        )
    return value
