#!/bin/sh
# Checks the tools of a build and installs missing ones; silent if none is missing.
#
#   setup.sh         make, a C compiler (Rust links with it), cargo, LLVM and MLIR 22 (the kernel generator links them)
#   setup.sh lint    rustfmt and clippy too
#
# Installs on Debian and its derivatives, as root or through sudo. Rust comes from rustup and is not installed here.
set -eu

say() { printf 'setup: %s\n' "$*" >&2; }
fail() {
    say "$*"
    exit 1
}
have() { command -v "$1" >/dev/null 2>&1; }

# A compiler may exist without the C library's files and cannot link then, so test linking.
links() {
    have cc || return 1
    dir=$(mktemp -d)
    echo 'int main(void) { return 0; }' >"$dir/main.c"
    status=0
    cc -o "$dir/main" "$dir/main.c" >/dev/null 2>&1 || status=1
    rm -rf "$dir"
    return $status
}

# The kernel generator needs these; .cargo/config.toml names the folder.
llvm=/usr/lib/llvm-22
mlir() {
    [ -e $llvm/lib/libMLIRIR.a ] && [ -e $llvm/lib/libLLVMCore.a ] && [ -x $llvm/bin/mlir-tblgen ] &&
        [ -e $llvm/lib/libPolly.a ] && [ -e $llvm/lib/libclang.so ] && have c++ &&
        [ -e /usr/include/zstd.h ] && [ -e /usr/include/zlib.h ] && [ -d /usr/include/libxml2 ]
}

packages() {
    wanted=
    have make || wanted="$wanted make"
    links || wanted="$wanted gcc libc6-dev"
    mlir || wanted="$wanted g++ libmlir-22-dev mlir-22-tools llvm-22-dev libpolly-22-dev libclang-22-dev libzstd-dev zlib1g-dev libxml2-dev"
    echo "$wanted"
}

as_root() {
    if [ "$(id -u)" -eq 0 ]; then
        "$@"
    elif [ -t 0 ]; then
        sudo "$@"
    else
        sudo -n "$@" # Nobody is there to type a password: fail rather than wait.
    fi
}

missing=$(packages)
if [ -n "$missing" ]; then
    have apt-get || fail "please install:$missing (there is no apt-get here to do it)"
    [ "$(id -u)" -eq 0 ] || have sudo || fail "please run as root: apt-get install$missing (there is no sudo here)"
    say "installing$missing with apt-get"
    # The lists of a fresh machine are empty.
    as_root apt-get -qq update || fail "apt-get update failed; as root: apt-get update && apt-get install$missing"
    # $missing is a list of words.
    # shellcheck disable=SC2086
    as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends $missing >/dev/null ||
        fail "apt-get install failed; please run as root: apt-get install$missing
  (LLVM and MLIR 22 are in Debian 12 with its security updates, and later)"
    missing=$(packages)
    [ -z "$missing" ] || fail "apt-get has run, and this is still missing:$missing"
fi

PATH="$PATH:${CARGO_HOME:-$HOME/.cargo}/bin"
have cargo || fail "Rust is missing; install it with
  curl --proto '=https' --tlsv1.2 -sSf https://sh.rustup.rs | sh"
cargo --version >/dev/null || fail "cargo does not run; if no toolchain is set: rustup default stable"

if [ "${1:-}" = lint ]; then
    if ! { cargo fmt --version && cargo clippy --version; } >/dev/null 2>&1; then
        have rustup || fail "rustfmt or clippy is missing, and there is no rustup here to add them"
        say "adding rustfmt and clippy with rustup"
        rustup --quiet component add rustfmt clippy
    fi
fi
