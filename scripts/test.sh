#!/usr/bin/env bash
# Lint and every test that is not marked slow, two files at a time; further words go to pytest.
source "$(dirname "${BASH_SOURCE[0]}")/_environment.sh"
environment dev
ruff check .
ruff format --check .
# A file stays on one worker, since its fixtures are shared; tests are single-threaded, so a worker takes one core.
python -m pytest --numprocesses "${FLOWRL_TEST_WORKERS:-2}" --dist loadfile -m "not slow and not gpu" "$@"
