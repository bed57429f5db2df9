# Sourced by the other scripts: make .venv with this project and what it needs, once per set of pins.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

find_python() {
    for candidate in "${PYTHON:-}" python3.11 python3.12 python3.13 python3; do
        [ -n "$candidate" ] || continue
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "flowrl needs Python 3.11 or newer; set PYTHON=/path/to/python" >&2
    exit 2
}

# `environment` has what runs flowrl; `environment dev` what its tests need too.
environment() {
    local python stamps
    stamps=(".venv/flowrl-$(cat pyproject.toml constraints.txt | cksum | cut -d' ' -f1)"{,-run}.stamp)
    [ "${1:-}" != dev ] || unset "stamps[1]"
    if [ -z "$(ls "${stamps[@]}" 2>/dev/null)" ]; then
        python="$(find_python)"
        echo "making .venv with $python (about 7 GB with the libraries' GPU parts)"
        "$python" scripts/install.py .venv constraints.txt ".${1:+[$1]}"
        touch "${stamps[-1]}"
    fi
    # One thread per process: two single-thread processes use two cores better than two threads.
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" PATH="$PWD/.venv/bin:$PATH"
    export HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}" TOKENIZERS_PARALLELISM=false
}
