#!/usr/bin/env bash
# Writes the lock files again, with the newest versions that fit pyproject.toml; needs uv.
set -euo pipefail
cd "$(dirname "$0")"

lock() {
  local file=$1
  shift
  uv pip compile --quiet --universal --upgrade --python-version 3.11 --generate-hashes --no-annotate \
    --no-header --output-file "$file.txt" "$@"
}

lock build build.in
lock engine-cpu ../pyproject.toml --extra kv-events --extra encryption
lock engine-cuda ../pyproject.toml --extra kv-events --extra encryption --extra cuda
lock router router.in
lock operator operator.in
lock demo --no-deps demo.in
lock media --no-deps media.in
