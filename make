#!/bin/sh
# `./make TARGET` is `make TARGET` for a machine that may not have make: it first installs what is missing.
set -eu
cd "$(dirname "$0")"
sh scripts/setup.sh
exec make "$@"
