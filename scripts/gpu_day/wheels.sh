#!/usr/bin/env bash
# Download the packages that a GPU machine without network may lack, as wheels of CPython 3.12 on x86-64 Linux, into
# the ignored folder .whl (about 15 MB): bash scripts/gpu_day/wheels.sh [further packages]. install.sh reads them there.
set -euo pipefail
cd "$(dirname "$0")/../.."
packages=(diffusers==0.42.1 pydantic==2.14.3 pydantic-core==2.50.4 annotated-types typing-inspection typing-extensions
    importlib-metadata zipp open-clip-torch ftfy wcwidth torchao==0.17.0)
platforms=()
for kind in manylinux_2_28 manylinux_2_27 manylinux_2_17 manylinux2014 manylinux1; do
    platforms+=(--platform "${kind}_x86_64")
done
python3 -m pip download --no-deps --only-binary=:all: --python-version 3.12 --implementation cp "${platforms[@]}" \
    -d .whl "${packages[@]}" "$@"
