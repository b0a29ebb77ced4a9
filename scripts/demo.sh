#!/usr/bin/env bash
# The main job on the bundled checkpoint: install, compress, heal, and compare with the dense model and plain int4.
# It fits and heals on tests/data/calibration.txt and judges on tests/data/sample.txt, which nothing was fitted to.
# Run it any number of times: it replaces what an earlier run wrote.
# Writes folders in $1, or tiny-llama-* in the clone; runs $2, or .venv/bin/blr.
set -euo pipefail
out=${1:+$(realpath -m "$1")/}tiny-llama
cd "$(dirname "$0")/.."
if ! [ -x .venv/bin/blr ] || [ -n "$(find compressor kernels configs recipes scripts/bench pyproject.toml -newer .venv/bin/blr)" ]; then
  echo "Installing blr and its packages into .venv: about 2 GB for a CPU, 7 GB with CUDA; some minutes the first time."
  [ -d .venv ] || python3 -m venv .venv
  .venv/bin/python -m pip install --disable-pip-version-check --constraint tests/constraints.txt . | grep -v '^Requirement already'
fi
blr=${2:-.venv/bin/blr} model=tests/data/tiny-llama text=tests/data/calibration.txt judged=tests/data/sample.txt
export HF_HUB_OFFLINE=1
set -x
$blr compress $model --base int3 --method svd --rank 16 --group 64 --text $text --samples 96 --output "$out-int3" --overwrite --restart
$blr heal "$out-int3" --teacher $model --text $text --mix 0 --window 128 --batch 2048 --minutes 0.25 --lr 0.005 --output "$out-healed" --overwrite --restart
$blr compress $model --quantize int4 --output "$out-int4" --overwrite --restart
$blr generate "$out-healed" "The protocol is" --max-new-tokens 32
{ set +x; } 2>/dev/null
echo
printf '%-42s %10s %12s\n' "on tests/data/sample.txt" "MB" "perplexity"
row() { # NAME FOLDER
  local perplexity
  perplexity=$($blr eval "$2" --text $judged --quiet | sed -n 's/^perplexity: //p')
  printf '%-42s %10.2f %12s\n' "$1" "$(awk "BEGIN {print $(cat "$2"/*.safetensors | wc -c) / 1e6}")" "$perplexity"
}
row "dense" $model
row "int3, corrected by low rank 16, healed" "$out-healed"
row "plain int4" "$out-int4"
