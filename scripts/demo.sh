#!/usr/bin/env bash
# The main job on the bundled checkpoint: install, compress, generate, perplexity before and after.
# Any number of times: what an earlier run of it wrote is replaced, whole or not.
# Writes tiny-llama-blast in the clone, or the folder $1.
set -euo pipefail
[ $# = 0 ] || set -- "$(realpath -m "$1")"
cd "$(dirname "$0")/.."
[ -d .venv ] || python3 -m venv .venv
.venv/bin/python -m pip install --quiet --constraint tests/constraints.txt .
blr=.venv/bin/blr model=tests/data/tiny-llama out=${1:-tiny-llama-blast}
export HF_HUB_OFFLINE=1
set -x
$blr compress $model --method blast --cf 1.25 --output "$out" --overwrite --restart
$blr generate "$out" "The protocol is" --max-new-tokens 32
$blr eval $model --text tests/data/sample.txt
$blr eval "$out" --text tests/data/sample.txt
