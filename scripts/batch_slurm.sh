#!/usr/bin/env bash
# The same combinations as a Slurm array, a task each (sbatch scripts/batch_slurm.sh); edit the four lines.
# A task that is requeued goes on where it was stopped. When all are done:
#   BLR_TABLE=1 bash scripts/batch_compress.sh "$out" "$models" "$methods" "$factors"
#SBATCH --job-name=blr
#SBATCH --array=0-7
#SBATCH --gpus=1
#SBATCH --cpus-per-task=8
#SBATCH --mem=64G
#SBATCH --time=12:00:00
#SBATCH --requeue
#SBATCH --signal=B:TERM@60
set -euo pipefail
out=results
models="llama-7b qwen3-8b"
methods="svd blast"
factors="1.25 2"
cd "${SLURM_SUBMIT_DIR:-$PWD}"
export BLR_ONLY=${SLURM_ARRAY_TASK_ID:?started by sbatch}
exec bash scripts/batch_compress.sh "$out" "$models" "$methods" "$factors"
