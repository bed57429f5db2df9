#!/usr/bin/env bash
# The tests that need a GPU: bash scripts/gpu_day/tests.sh [pytest's options]
set -uo pipefail
cd "$(dirname "$0")/../.."
source scripts/gpu_day/install.sh
python3 -m pytest tests/gpu -m gpu -q -rs -p no:cacheprovider "$@"
