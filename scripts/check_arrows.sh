#!/bin/sh
# Sees that dependencies between the workspace's crates point as docs/architecture.md says, and nowhere else:
#
#   ir <- passes <- codegen <- cli      ir <- torch <- cli      passes <- trace <- cli
#   artifact <- passes, codegen, runtime   runtime <- cli, tests    ptx <- tests
#
# lighterage-mlir, the kernel generator, depends on none of them and is a program of its own: what links it links LLVM.
#
# Dependencies of builds and of tests count too, and those behind every feature.
set -eu
cd "$(dirname "$0")/.."
here=$(pwd -P)

# What a crate may depend on. A crate that is not here is an error.
allowed() {
    case $1 in
    ir | artifact | lighterage_alloc | lighterage-mlir | ptx) echo ;;
    torch) echo ir ;;
    passes) echo ir artifact ;;
    trace) echo passes ;;
    codegen) echo ir passes artifact ;;
    runtime) echo artifact ;;
    lighterage | tests) echo ir passes codegen torch trace artifact runtime lighterage_alloc ptx ;;
    *) return 1 ;;
    esac
}

# `NAME VERSION (PATH)`, a line a crate; the path stands behind crates of the workspace alone.
tree() {
    "${CARGO:-cargo}" tree --quiet --locked --prefix none --all-features -e normal,build,dev "$@"
}
names() {
    printf '%s\n' "$1" | grep -F "($here/" | cut -d ' ' -f 1 | sort -u
}

status=0
lines=$(tree --workspace --depth 0)
for member in $(names "$lines"); do
    if ! may=$(allowed "$member"); then
        echo "check_arrows: the crate $member has no line in scripts/check_arrows.sh" >&2
        status=1
        continue
    fi
    lines=$(tree --package "$member" --depth 1)
    for used in $(names "$lines"); do
        case " $member $may " in
        *" $used "*) ;;
        *)
            echo "check_arrows: $member must not depend on $used; it may depend on: ${may:-no crate of the workspace}" >&2
            status=1
            ;;
        esac
    done
done
exit $status
