# shellcheck shell=bash disable=SC2034
# Sourced by the scripts of this repository (bash).
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
CACHE=${LONGKV_CACHE:-$ROOT/.cache}
# Objects of one source are the same in every clone.
export CCACHE_BASEDIR=${CCACHE_BASEDIR-$ROOT} CCACHE_NOHASHDIR=${CCACHE_NOHASHDIR-1}
MODELS=${LONGKV_MODELS:-$CACHE/models}

say() { printf '%s\n' "$*" >&2; }
die() { say "error: $*"; exit 1; }

# need PROGRAM PURPOSE
need() { command -v "$1" >/dev/null || die "$1 is not installed (needed $2); run scripts/setup"; }

# sha256_is FILE HEX
sha256_is() { [ -f "$1" ] && [ "$(sha256sum "$1" | cut -d' ' -f1)" = "$2" ]; }

# An own virtual environment for pip, since Debian's Python refuses to be changed.
fetch_venv() {
  if [ ! -x "$CACHE/fetch-venv/bin/pip" ]; then
    need python3 "to fetch files from the Python index"
    rm -rf "$CACHE/fetch-venv"
    python3 -m venv "$CACHE/fetch-venv" || die "python3 -m venv failed; run scripts/setup (package python3-venv)"
  fi
}

# fetch_package DIRECTORY PIP_ARGUMENT... PACKAGE: downloads from the configured Python index, without dependencies.
fetch_package() {
  local into=$1
  shift
  fetch_venv
  "$CACHE/fetch-venv/bin/pip" download -q --disable-pip-version-check --no-deps -d "$into" "$@" ||
    die "cannot fetch '${*: -1}' from the Python index: is there a network, and is pip configured for it (pip config list)?"
}
