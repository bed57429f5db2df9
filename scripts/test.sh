#!/usr/bin/env bash
# Lint and every test that is not marked slow; further words go to pytest.
source "$(dirname "${BASH_SOURCE[0]}")/_environment.sh"
environment
ruff check .
ruff format --check .
python -m pytest -m "not slow and not gpu" "$@"
