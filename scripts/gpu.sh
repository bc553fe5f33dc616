#!/bin/sh
# What a machine with a GPU has to tell, as one JSON file.
#
#   scripts/gpu.sh pack [MODEL.pt2|MODEL.ir ...]   here, with Rust: makes the folder .gpu
#   scripts/gpu.sh run [OUT.json] [SECTION ...]    there, with Python and NVIDIA's driver; torch is optional
#   scripts/gpu.sh --dry [OUT.json]                both, on the library that replaces the driver in tests
#
# .gpu has the stripped command, the kernel generator, the run-time allocator and Python's module (compressed), kernels with stored
# results, compiled steps of tiny models, of a GPT-2 124M if PYTHON names a Python with PyTorch, and of the models given
# at three budgets: less than 44 MiB. git ignores it. DEVICE is the machine that models are planned for (h100).
# BESIDE names models of benches/gpu_train.py, such as "124m xl", that are compared with PyTorch's ways.
# LIGHTERAGE names a command that is built already, STANDIN the library that replaces the driver.
set -eu
cd "$(dirname "$0")/.."

mode=${1:-}
[ $# -gt 0 ] && shift
folder=${GPU_FOLDER:-.gpu}
device=${DEVICE:-h100}

pack() {
    rm -rf "$folder"
    mkdir -p "$folder"
    if [ -z "${LIGHTERAGE:-}" ]; then
        cargo build --release --locked -p lighterage-cli -p lighterage-mlir -p lighterage-alloc -p lighterage-python
        LIGHTERAGE=target/release/lighterage
    fi
    export LIGHTERAGE
    cp "$LIGHTERAGE" "$folder/lighterage"
    strip "$folder/lighterage" 2>/dev/null || true
    if [ -z "${NO_KERNELS:-}" ]; then
        cargo run -q --locked -p lighterage-tests --example gpu_kernels -- sm_90 "$folder/kernels"
    fi
    # shellcheck disable=SC2086
    python3 benches/gpu_train.py pack --device "$device" ${PYTHON:+--gpt2} ${BESIDE:+--beside $BESIDE --} "$folder" "$@"
    if [ -z "${DRY:-}" ]; then
        for each in lighterage-mlir liblighterage_alloc.so; do
            cp "$(dirname "$LIGHTERAGE")/$each" "$folder/$each"
            strip "$folder/$each"
        done
        cp "$(dirname "$LIGHTERAGE")/lib_lighterage.so" "$folder/_lighterage.abi3.so"
        strip "$folder/_lighterage.abi3.so"
        xz -9 -T0 -f "$folder"/kernels/* "$folder"/*.pt2 "$folder/lighterage" "$folder/lighterage-mlir" \
            "$folder/_lighterage.abi3.so"
    fi
    size=$(du -sm "$folder" | cut -f1)
    echo "$folder: $size MiB"
    [ "$size" -lt 44 ] || [ -n "${DRY:-}" ] || { echo "$folder is larger than 43 MiB" >&2; exit 1; }
}

case "$mode" in
    pack) pack "$@" ;;
    run)
        out=${1:-gpu.json}
        [ $# -gt 0 ] && shift
        python3 benches/gpu_train.py run "$folder" --out "$out" --only "$@"
        ;;
    --dry)
        DRY=1
        export DRY
        if [ -z "${LIGHTERAGE:-}" ] || [ -z "${STANDIN:-}" ]; then
            cargo build --locked -p lighterage-cli -p lighterage-mlir -p lighterage-standin
            LIGHTERAGE=target/debug/lighterage
            STANDIN=$PWD/target/debug/liblighterage_standin.so
        else
            NO_KERNELS=1 # they take longer than the rest
        fi
        out=${1:-gpu.json}
        pack frontends/cli/tests/data/mlp.ir
        LIGHTERAGE_MLIR=$(dirname "$LIGHTERAGE")/lighterage-mlir
        export LIGHTERAGE_MLIR
        LIGHTERAGE_CUDA=$STANDIN python3 benches/gpu_train.py run "$folder" --out "$out" --dry
        ;;
    *) sed -n '2,13s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac
