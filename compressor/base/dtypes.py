"""What weights are stored and computed in, by torch's names."""

from __future__ import annotations

from typing import Literal, get_args

Dtype = Literal["bfloat16", "float16", "float32"]
DTYPES: tuple[str, ...] = get_args(Dtype)
COMPUTED = (*DTYPES, "float64")  # what a model can be loaded in
CODES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}  # safetensors' names
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
