#!/bin/sh
# `./make TARGET` is `make TARGET` for a machine that may not have make yet: it installs what is missing first.
set -eu
cd "$(dirname "$0")"
sh scripts/setup.sh
exec make "$@"
