#!/usr/bin/env bash
# Measures on a GPU, from a checkout and with nothing installed but torch and transformers:
#     benchmarks/gpu.sh FOLDER [--part NAME]... [--size full|tiny] [--seconds N]
# PYTHON names the interpreter. See benchmarks/gpu.py.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
export HF_HUB_OFFLINE=1
exec "${PYTHON:-python3}" -m benchmarks.gpu "$@"
