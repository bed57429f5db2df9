#!/usr/bin/env bash
# The whole GPU day, about 36 minutes on one H200: bash scripts/gpu_day/all.sh; results in $OUT or runs/gpu_day.
set -uo pipefail
for stage in 1 2 3 4; do
    bash "$(dirname "$0")/stage.sh" "$stage" "$@"
done
