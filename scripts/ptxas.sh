#!/bin/sh
# Prints the path of ptxas, NVIDIA's assembler, which needs no GPU: the system's, or NVIDIA's Python package, which is
# installed into target/ptxas. Fails with one line if it is not available.
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
    # The first process installs it.
    mv -T "$folder.$$" "$folder" 2>/dev/null || rm -rf "$folder.$$"
fi
echo "$ptxas"
