#!/usr/bin/env bash
# Makes a virtual environment and installs this checkout into it, editable.
#
#   scripts/setup_venv.sh VENV EXTRAS        for example: scripts/setup_venv.sh .venv dev
#
# Does nothing when the environment already holds what pyproject.toml asks for. PYTHON names the
# interpreter to use (python3).
set -euo pipefail
cd "$(dirname "$0")/.."

venv=$1
extras=$2
python="$venv/bin/python"
cpu_torch="torch==2.13.0"
cpu_index="https://download.pytorch.org/whl/cpu"

say() { printf '==> %s\n' "$*"; }

stamp="$venv/.installed-$extras"
if [ -e "$stamp" ] && cmp -s "$stamp" pyproject.toml; then
  exit 0
fi

if [ ! -x "$python" ]; then
  say "making $venv"
  "${PYTHON:-python3}" -m venv "$venv"
fi

# On Linux the default torch brings gigabytes of CUDA libraries. Without an NVIDIA GPU they are of no
# use, so the CPU build is asked for first: by version and without dependencies, so that
# neither another index's newer CUDA build nor its libraries can be chosen. Where torch's own index
# is out of reach, the same version from the configured index has the last word.
if "$python" -c "import torch" 2>/dev/null; then
  say "torch is there"
elif [ "$(uname -s)" = Linux ] && ! nvidia-smi -L >/dev/null 2>&1; then
  say "no NVIDIA GPU: installing the CPU build of torch"
  "$python" -m pip install --no-deps --retries 0 --timeout 20 --index-url "$cpu_index" "$cpu_torch" ||
    "$python" -m pip install "$cpu_torch"
else
  say "installing torch"
  "$python" -m pip install "torch>=2.11"
fi

say "installing streambp-fx[$extras] and what it needs"
"$python" -m pip install --editable ".[$extras]"
cp pyproject.toml "$stamp"
