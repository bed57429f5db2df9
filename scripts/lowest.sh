#!/usr/bin/env bash
# Install the lowest versions of the main libraries that pyproject.toml allows, apart from .venv, and run the fast tests.
#
#   bash scripts/lowest.sh [FOLDER] [words for pytest]      FOLDER: of the environment; default: .lowest
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder="${1:-.lowest}"
shift || true
python="${PYTHON:-python3.11}"

lowest() { # the lower bound of each of the libraries, as a constraint
    "$python" - <<'PY'
import re, tomllib

with open("pyproject.toml", "rb") as file:
    listed = tomllib.load(file)["project"]["dependencies"]
bounds = dict(re.match(r"([\w-]+)>=([\w.]+)", line).groups() for line in listed)
for name in ("torch", "torchvision", "diffusers", "transformers", "accelerate", "peft"):
    print(f"{name}=={bounds[name]}.*" if bounds[name].count(".") == 1 else f"{name}=={bounds[name]}")
PY
}

if [ ! -f "$folder/versions" ] || ! diff -q <(lowest) "$folder/versions" >/dev/null; then
    "$python" -m venv --clear "$folder"
    lowest > "$folder/constraints"
    "$python" scripts/install.py "$folder" "$folder/constraints" '.[data,ocr,serve,video,vlm]' \
        "pytest>=8" "pytest-xdist>=3.6" "hypothesis>=6" "hatchling>=1.25"
    mv "$folder/constraints" "$folder/versions"
fi
cat "$folder/versions"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PATH="$folder/bin:$PATH"
# The extra `trackers` asks for a newer accelerate, so its tests are left out.
"$folder/bin/python" -m pytest --numprocesses "${FLOWRL_TEST_WORKERS:-2}" --dist loadfile -m "not slow and not gpu" \
    --ignore tests/run/test_trackers.py --ignore tests/run/test_tracker_libraries.py \
    --ignore tests/e2e/test_trackers.py "$@"
