#!/bin/sh
# Checks that dependencies between the workspace's crates have the directions of docs/architecture.md:
#
#   ir <- placement; ir, artifact, papers, placement <- passes <- codegen <- lighterage, cli
#   placement <- papers, addresses <- trace <- cli      ir <- lower <- torch, onnx, config, trace <- cli
#   passes, torch <- report <- cli, python      papers, codegen, runtime <- python
#   codegen, runtime, report <- gpu <- measure <- cli, python
#   artifact <- codegen, runtime                        runtime <- cli, tests    ptx <- standin <- tests
#   artifact <- checkpoint <- cli                       columns <- cli
#   ops <- ir, runtime
#
# ops is the table of operations, which compiler and runtime share: plain data without dependencies,
# so that neither has to depend on the other.
#
# lighterage-mlir, the kernel generator, depends on none of them. It is a separate program because
# it is the only one that links LLVM.
#
# Build and test dependencies count too, and so do those behind features.
set -eu
cd "$(dirname "$0")/.."
here=$(pwd -P)

# Allowed dependencies of each crate, without the prefix `lighterage-`. A crate that is not listed is an error.
allowed() {
    case $1 in
    ops | artifact | alloc | mlir | ptx | structure | columns) echo ;;
    ir) echo ops ;;
    lower) echo ir ;;
    torch | onnx | config) echo ir lower ;;
    placement) echo ir ;;
    papers) echo ir placement ;;
    # Its tests compare planners, including STAlloc.
    addresses) echo ir placement papers ;;
    passes) echo ir artifact papers placement ;;
    trace) echo addresses lower placement ;;
    report) echo ir passes torch ;;
    gpu) echo ir passes codegen runtime report ;;
    measure) echo ir passes codegen artifact runtime gpu ;;
    python) echo ir papers passes codegen runtime artifact torch report gpu measure ;;
    lighterage) echo ir passes codegen trace papers placement ;;
    codegen) echo ir passes artifact ;;
    runtime) echo ops artifact ;;
    checkpoint) echo artifact ;;
    standin) echo ptx ;;
    cli | tests) echo columns ops ir passes codegen lower torch onnx config trace report gpu measure artifact runtime checkpoint alloc ptx standin placement addresses papers ;;
    *) return 1 ;;
    esac
}

# `NAME VERSION (PATH)`, one crate per line; only crates of the workspace have a path.
tree() {
    "${CARGO:-cargo}" tree --quiet --locked --prefix none --all-features -e normal,build,dev "$@"
}
names() {
    printf '%s\n' "$1" | grep -F "($here/" | cut -d ' ' -f 1 | sed 's/^lighterage-//' | sort -u
}

status=0
lines=$(tree --workspace --depth 0)
for member in $(names "$lines"); do
    if ! may=$(allowed "$member"); then
        echo "check_arrows: the crate lighterage-$member has no line in scripts/check_arrows.sh" >&2
        status=1
        continue
    fi
    package=lighterage-$member
    [ "$member" = lighterage ] && package=lighterage
    lines=$(tree --package "$package" --depth 1)
    for used in $(names "$lines"); do
        case " $member $may " in
        *" $used "*) ;;
        *)
            echo "check_arrows: $member must not depend on $used; it may depend on: ${may:-none}" >&2
            status=1
            ;;
        esac
    done
done
exit $status
