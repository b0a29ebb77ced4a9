#!/usr/bin/env bash
# Models x methods x compression factors, one after the other: what fails is noted and passed by, what is
# there already is kept, what was interrupted goes on; at the end a table.
#
#   bash scripts/batch_compress.sh OUT MODELS METHODS FACTORS [options of blr compress ...]
#   bash scripts/batch_compress.sh results "llama-7b qwen3-8b" "svd blast" "1.25 2" --calibration text.txt
#
# OUT/NAME-METHOD-cfCF is an output, OUT/runs/NAME-METHOD-cfCF.{json,log} what compress said. NAME is the last
# part of a model's name, which must be its own. Lists are words, or lines where names have spaces. Options
# are given to every combination, and one that a method does not use is refused: run those methods apart.
#   BLR_EVAL=FILE    perplexity of every output on that text, in the table too
#   BLR_ONLY=N       only combination N, counted from 0: for SLURM_ARRAY_TASK_ID (scripts/batch_slurm.sh)
#   BLR_COUNT=1      only how many combinations there are
#   BLR_TABLE=1      only the table of what is there
# Exit code: 0 all done, 1 some failed, 2 usage, 128+N stopped by a signal (start it again to go on).
set -uo pipefail
if [ $# -lt 4 ]; then
  echo 'batch_compress.sh: expected OUT "MODELS" "METHODS" "FACTORS" [options of blr compress]' >&2
  exit 2
fi
out=$1 models=$2 methods=$3 factors=$4
shift 4
tab=$'\t' child='' stopped=''
exec 4>&2 # what the batch itself says, wherever a step's own words go
stop() { # 128+N: hands a signal on
  stopped=$1
  [ -z "$child" ] || kill -TERM "$child" 2>/dev/null
}
trap 'stop 129' HUP
trap 'stop 130' INT
trap 'stop 143' TERM

entries() { # of a list, a line each
  case $1 in
    *$'\n'*) printf '%s\n' "$1" | sed '/^$/d' ;;
    *) if [ -e "$1" ]; then printf '%s\n' "$1"; else printf '%s\n' $1; fi ;;
  esac
}

combinations() { # model, method, factor, name: a line each, with tabs between
  local model method factor name
  while IFS= read -r model; do
    for method in $methods; do
      for factor in $factors; do
        name=${model%/}
        printf '%s\t' "$model" "$method" "$factor"
        echo "${name##*/}-$method-cf$factor"
      done
    done
  done < <(entries "$models")
}

finish() { # runs a step; 128+N ends the batch, for nobody who pressed Ctrl-C wants the next model
  local code=0
  if [ -z "$stopped" ]; then
    "$@" &
    child=$!
    wait "$child" || code=$?
    while kill -0 "$child" 2>/dev/null; do # a signal ended the wait, and was handed on
      code=0
      wait "$child" || code=$?
    done
    child=''
  fi
  if [ -n "$stopped" ] || [ "$code" -gt 128 ]; then
    code=${stopped:-$code}
    echo "batch_compress.sh: stopped (code $code); the same command goes on" >&4
    exit "$code"
  fi
  return "$code"
}

evaluated() { # whether the result in a file is there, and none of an error
  [ -s "$1" ] && ! grep -q '"exit_code"' "$1"
}

one() { # model method factor name, then options; its exit code
  local model=$1 method=$2 factor=$3 name=$4 code=0
  shift 4
  local runs=$out/runs/$name
  if [ ! -e "$out/$name" ] || ! finish blr verify "$out/$name" >>"$runs.log" 2>&1; then
    local again=()
    if [ -e "$out/$name" ]; then again=(--overwrite); fi
    finish blr compress "$model" --method "$method" --cf "$factor" --output "$out/$name" --format json \
      "${again[@]}" "$@" >"$runs.json.new" 2>>"$runs.log" || code=$?
    mv "$runs.json.new" "$runs.json"
  fi
  if [ "$code" = 0 ] && [ -n "${BLR_EVAL:-}" ] && ! evaluated "$runs.eval.json"; then
    finish blr eval "$out/$name" --text "$BLR_EVAL" --format json >"$runs.eval.new" 2>>"$runs.log" || code=$?
    mv "$runs.eval.new" "$runs.eval.json"
  fi
  return "$code"
}

table() {
  combinations | python3 -c '
import json, pathlib, sys
def read(path):
    try:
        return json.loads(path.read_text().splitlines()[-1])
    except (OSError, ValueError, IndexError):
        return {}
out = pathlib.Path(sys.argv[1])
rows = [("name", "state", "cf", "whole model", "seconds", "perplexity")]
for name in (line.rstrip("\n").split("\t")[3] for line in sys.stdin):
    run, judged = read(out / "runs" / f"{name}.json"), read(out / "runs" / f"{name}.eval.json")
    lacks = not (out / name).is_dir()
    code = run.get("exit_code") or judged.get("exit_code")
    state = f"failed ({code})" if code else "missing" if lacks else "done"
    number = lambda table, key, form: format(table[key], form) if key in table else ""
    rows.append((name, state, number(run, "cf", ".3f"), number(run, "factor", ".3f"),
                 number(run, "seconds", ".1f"), number(judged, "perplexity", ".3f")))
wide = [max(map(len, column)) for column in zip(*rows)]
for row in rows:
    print("  ".join(cell.ljust(n) for cell, n in zip(row, wide)).rstrip())
' "$out"
}

count=$(combinations | wc -l)
if [ -n "${BLR_COUNT:-}" ]; then
  echo "$count"
  exit 0
fi
if [ "$count" = 0 ]; then
  echo "batch_compress.sh: no combination; name a model, a method and a factor at least" >&2
  exit 2
fi
if ! [[ ${BLR_ONLY:-0} =~ ^[0-9]+$ && 10#${BLR_ONLY:-0} -lt $count ]]; then
  echo "batch_compress.sh: BLR_ONLY=$BLR_ONLY, expected a number from 0 to $((count - 1))" >&2
  exit 2
fi
if [ -n "${BLR_TABLE:-}" ]; then
  table
  exit 0
fi
twice=$(combinations | cut -f 4 | sort | uniq -d | head -n 1)
if [ -n "$twice" ]; then
  echo "batch_compress.sh: two combinations are called $twice; rename a folder, or give them another OUT" >&2
  exit 2
fi
if ! command -v blr >/dev/null; then
  echo "batch_compress.sh: no blr to be found; activate the environment that has it" >&2
  exit 2
fi
mkdir -p "$out/runs" || exit 5
failed=0 number=0
while IFS=$tab read -r model method factor name <&3; do
  if [ -z "${BLR_ONLY:-}" ] || [ "$BLR_ONLY" -eq "$number" ]; then
    echo "batch_compress.sh: $name" >&2
    code=0
    one "$model" "$method" "$factor" "$name" "$@" || code=$?
    if [ "$code" != 0 ]; then
      failed=1
      echo "batch_compress.sh: $name failed (code $code): $(tail -n 1 "$out/runs/$name.log")" >&2
    fi
  fi
  number=$((number + 1))
done 3< <(combinations)
if [ -z "${BLR_ONLY:-}" ]; then table; fi
exit "$failed"
