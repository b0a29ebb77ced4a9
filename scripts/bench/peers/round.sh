#!/usr/bin/env bash
# SmolLM2's rows that want a GPU, in LIMIT seconds (400) on a node without an index (../bare.sh).
#   round.sh ENV SMOLLM2 TEXTS RESULTS LANE…   returns at once; a line of each job in RESULTS/proof.txt
# Lanes run side by side: "dense" in every round, "healed" and "blast-CF" with nothing else beside them:
#   healed    2.45 bits in closed form, seeds 0 and 1, healed for the time that is left
#   layers    3.45 bits, the same for all; bits by layer at 2.45, behind a refit and in closed form
#   blast-CF      as blast-1.5: fitted at that CF and healed, seed 1; both are judged
#   fit-blast-CF  that fit alone, from which blast-CF starts in a later round of the same RESULTS
#   awq, gptqmodel, gptqmodel_eora   in 4, 3, 2 bits, by the packages in RESULTS/wheels, with RESULTS/ids.pt
# RESULTS/code.txt is the third domain. Not a folder that is emptied: $OUT of a device's run is.
set -uo pipefail
: "${LIMIT:=400}" "${OWN:=1048576}" "${TOKENS:=32768}" "${SAMPLES:=64}" "${MORE:=}" "${PYTHON:=python3}"
# of healing; without a number, the time that is left
: "${MINUTES:=}"
# seconds until a healing trains, and from its end to the last line
: "${BEFORE:=100}" "${AFTER:=50}" "${START:=$(date +%s)}"
export LIMIT OWN TOKENS SAMPLES MORE PYTHON BEFORE AFTER START MINUTES
export BLR_TEXT_DIR=off HF_HUB_OFFLINE=1 OMP_NUM_THREADS=${THREADS:-2}
env=${1:?usage: round.sh ENV SMOLLM2 TEXTS RESULTS LANE…} model=${2:?} texts=${3:?} results=${4:?}
self=$(realpath "$0")
work=$results/work train=$results/work/train-prose.txt
now() { echo $(($(date +%s) - START)); }
left() { echo $((LIMIT > $(now) ? LIMIT - $(now) : 1)); }
wait_for() { until [ -e "$work/$1" ] || [ "$(now)" -ge "$LIMIT" ]; do sleep 1; done; }
job() { # NAME COMMAND…: its output in work/NAME.json, what it says in NAME.err
  local name=$1 begun=$(now) rc=0
  shift
  timeout -s KILL "$(left)" "$@" > "$work/$name.json" 2> "$results/$name.err" || rc=$?
  echo "$name rc $rc, $begun to $(now) s: ${*:4} | $(tr -d '\n' < "$work/$name.json" | cut -c1-9000)" \
    >> "$results/proof.txt"
  return $rc
}
compress() { # NAME OPTIONS…
  local name=$1
  shift
  [ -d "$work/$name" ] || job "$name" "$env/bin/blr" compress "$model" --text "$texts/calibration.txt" --samples "$SAMPLES" "$@" \
    --no-check --force --overwrite --quiet --format json -o "$work/$name"
}
heal() { # NAME FOLDER SEED
  local minutes=$MINUTES
  [ "$minutes" ] || minutes=$(awk "BEGIN { m = ($LIMIT - $(now) - $BEFORE - $AFTER) / 60; print m < .5 ? .5 : m }")
  # shellcheck disable=SC2086
  job "$1" "$env/bin/blr" heal "$work/$2" --teacher "$model" --text "$train" --lr 0.005 \
    --minutes "$minutes" --own-tokens "$OWN" --seed "$3" $MORE --save-minutes 60 --no-check --force \
    --overwrite --quiet --format json -o "$work/$1"
}
judge() { # NAME FOLDER
  [ "$1" = dense ] || wait_for kept.ok
  job "$1.eval" "$env/bin/blr" eval "$2" --against "$model" --text "$texts/heldout.txt" \
    --text "$texts/wikitext2-test.txt" --text "$results/code.txt" --max-tokens "$TOKENS" --window 512 \
    --keep-dense "$work/kept" --quiet --format json
}
healed() { # NAME SEED OPTIONS…
  compress "$1.fit" "${@:3}" && heal "$1" "$1.fit" "$2" && judge "$1" "$work/$1"
}
fitted() { compress "$@" && judge "$1" "$work/$1"; }
lane() { # NAME SEED
  local packed=(--method svd --group 64 --seed "$2") plain=(--refit 0 --finish 0) name=$1-$2
  case $1 in
    dense) judge dense "$model" && touch "$work/kept.ok" ;;
    healed) healed "$name" "$2" "${packed[@]}" --base int2 --rank 16 "${plain[@]}" ;;
    blast-*) healed "$name" "$2" --method blast --blocks 16 --cf "${1#*-}" --seed "$2"
      judge "$name.fit" "$work/$name.fit" ;;
    fit-blast-*) compress "${name#fit-}.fit" --method blast --blocks 16 --cf "${1##*-}" --seed "$2" ;;
    layers)
      fitted "all3-$2" "${packed[@]}" --base int3 --grid curved --rank 16
      fitted "layer2-$2" "${packed[@]}" --base int2 --bpw 2.4456
      fitted "closed2-$2" "${packed[@]}" --base int2 --bpw 2.4456 "${plain[@]}" ;;
    *)
      wait_for site.ok
      for bits in 4 3 2; do
        PYTHONPATH=$work/site GPTQMODEL_CPU_WORKERS=2 GPTQMODEL_OFFLINE=1 job "$1-$bits" "$PYTHON" \
          "${MAKE:-$(dirname "$self")/make.py}" "$1" "$bits" "$model" "$results/ids.pt" "$work/$1-$bits" &&
          echo "$(< "$work/$1-$bits/peer.json")" >> "$results/proof.txt" && judge "$1-$bits" "$work/$1-$bits"
      done ;;
  esac
}
if [ -n "${LANE:-}" ]; then # shellcheck disable=SC2086
  lane $LANE
  exit
fi
mkdir -p "$work"
unpack='import lzma, sys; open(sys.argv[2], "wb").write(lzma.open(sys.argv[1]).read())'
"$env/bin/python" -c "$unpack" "$texts/train-prose.txt.xz" "$train"
for name in "${@:5}"; do
  case $name in healed | layers) seeds="0 1" ;; *blast*) seeds=1 ;; *) seeds=0 ;; esac
  if [[ $name = awq || $name = gptqmodel* ]] && [ ! -e "$work/site.ok" ]; then
    "$PYTHON" -m pip install --quiet --no-index --no-deps --no-compile --target "$work/site" \
      "$results"/wheels/*.whl && touch "$work/site.ok"
  fi
  for seed in $seeds; do
    LANE="$name $seed" setsid nohup bash "$self" "$env" "$model" "$texts" "$results" \
      > "$results/lane-$name-$seed.log" 2>&1 < /dev/null &
  done
done
