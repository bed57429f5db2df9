#!/usr/bin/env bash
# One stage of a GPU day, at most 9 minutes: bash scripts/gpu_day/stage.sh 1 (2, 3, 4); results in $OUT.
set -uo pipefail
cd "$(dirname "$0")/../.."
source scripts/gpu_day/install.sh
python3 -m scripts.gpu_day.stage "$@"
