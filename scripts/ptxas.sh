#!/bin/sh
# Prints where ptxas is, NVIDIA's assembler, which needs no GPU: the system's, or that of NVIDIA's Python package, which is
# installed into target/ptxas. Fails with one line if it cannot be had.
set -eu
cd "$(dirname "$0")/.."
folder=$PWD/target/ptxas
ptxas=$folder/nvidia/cu13/bin/ptxas
if [ ! -x "$ptxas" ]; then
    if command -v ptxas; then
        exit
    fi
    python3 -m pip install --quiet --disable-pip-version-check --no-deps --target "$folder.$$" nvidia-cuda-nvcc==13.0.88 \
        >/dev/null 2>&1 || {
        rm -rf "$folder.$$"
        echo "ptxas: neither on this machine nor to be had with: python3 -m pip install nvidia-cuda-nvcc==13.0.88" >&2
        exit 1
    }
    # Whoever comes first has it.
    mv -T "$folder.$$" "$folder" 2>/dev/null || rm -rf "$folder.$$"
fi
echo "$ptxas"
