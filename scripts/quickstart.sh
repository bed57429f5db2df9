#!/usr/bin/env bash
# Align tiny-sd3 with AWM on two CPU cores and show the improvement. Further words go to `flowrl train`.
source "$(dirname "${BASH_SOURCE[0]}")/_environment.sh"
environment
flowrl train configs/quickstart.yaml --processes 2 "$@"
python scripts/show_result.py runs/quickstart
