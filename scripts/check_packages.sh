#!/usr/bin/env bash
# The tests with the packages that people use our outputs with (tests/packages), in a fresh environment
# with their tested versions. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
bash scripts/copy_tracked.sh "$work/source"
cd "$work/source"
python3 -m venv "$work/env"
"$work/env/bin/python" -m pip install --quiet --constraint tests/constraints.txt ".[packages]"
rm -rf build ./*.egg-info
"$work/env/bin/python" -m pip list --format freeze |
  grep -iE '^(torch|transformers|accelerate|peft|sentence-transformers|onnx|onnxruntime|onnxscript|lm_eval|model-signing|diffusers)='
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false BLR_PACKAGES=1
"$work/env/bin/python" -m pytest -q -n 2 --dist loadfile tests/packages "$@"
