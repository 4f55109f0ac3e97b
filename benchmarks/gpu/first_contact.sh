#!/usr/bin/env bash
# What is to be known of a GPU, in parts that need nothing of each other:
#
#   benchmarks/gpu/first_contact.sh RESULTS PART...
#
#   check      what machine this is; logits against float32 on the host
#   tests      the backend's tests, on the device
#   figures    ceilings and an 8B-shaped model: decode, prompts, draws, with the time of each kernel
#   kernels    products and experts in all formats, by numbers of rows; attention, beside others'
#   ranks      two ranks on one GPU, through gloo: the CPU's tokens (on a pretended device without one)
#   server     `octavo serve` of a model of random weights, and its clients
#   tools      the sanitizer and the profiler, on small programs
#
# From the repository's root. For a machine without a network benchmarks/gpu/carry.sh puts what its
# Python lacks into build/gpu, and all of it is found there. A part that fails does not hold up the
# next; LIMIT=300 ends each after so many seconds. Each leaves RESULTS/PART.log.
set -u
results=$1
shift
mkdir -p "$results"
python=${PYTHON:-python3}
limit=${LIMIT:-540}
export PYTHONPATH=$PWD:$PWD/common:$PWD/engine:$PWD/router:$PWD/operator PYTHONUNBUFFERED=1
unset TRITON_INTERPRET
if ls build/gpu/wheels/*.whl >/dev/null 2>&1; then
  site=/tmp/octavo-gpu-site
  [ -d $site ] || "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir \
    --target $site build/gpu/wheels/*.whl
  export PYTHONPATH=$PYTHONPATH:$site
  cp --update=none build/gpu/engine/*.so engine/octavo_engine/ && cp --update=none build/gpu/router/*.so router/octavo_router/
fi
if [ -f build/gpu/triton-cache.tar.gz ] && [ ! -d ~/.triton/cache ]; then  # of an earlier run
  mkdir -p ~/.triton && tar xzf build/gpu/triton-cache.tar.gz -C ~/.triton
fi

part_check() {
  nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.max.sm,power.limit --format=csv
  lscpu | grep -E 'Model name|^CPU\(s\)|MHz'
  grep -m1 ^flags /proc/cpuinfo | tr ' ' '\n' | grep -E '^(avx512|amx)' | tr '\n' ' '
  echo
  "$python" -c 'import torch, triton; print(torch.__version__, torch.version.cuda, triton.__version__)'
  "$python" -c 'from benchmarks.gpu import correctness; print(correctness.check())'
}

part_tests() {
  # The real model of test_whole_engine.py is fetched, which takes a network.
  "$python" -m pytest tests/engine/backends/torch_cuda -q --ignore-glob '*/test_whole_engine.py' -p no:cacheprovider -p no:benchmark -n "${WORKERS:-8}" \
    --dist worksteal --timeout 150 ${TESTS:-}
}

part_ranks() {
  "$python" -m pytest tests/engine/backends/torch_cuda/test_ranks_on_device.py -q -n 0 -p no:cacheprovider \
    -p no:benchmark -k one_gpu
}

part_figures() {
  "$python" -m benchmarks.gpu.run --out "$results/figures.json" \
    --only ${FIGURES:-decode1 decode64 decode256 decode_long prefill prefill_8k mixed draw steps1 steps256 upload}
}

part_kernels() {
  "$python" -m benchmarks.gpu.attention --out "$results/attention.json" ${ATTENTION:-}
  "$python" -m benchmarks.gpu.run --layers 1 --out "$results/kernels.json" --only quantized experts latent
}

part_server() {
  "$python" -m benchmarks.gpu.server --out "$results/server.json" ${SERVER:-}
}

part_tools() {
  compute-sanitizer --tool memcheck --error-exitcode 9 \
    "$python" -c 'from benchmarks.gpu import correctness; print(correctness.check())'
  ncu --clock-control none --set basic -k 'regex:attend_kernel|rms_norm_kernel|turn_and_store_kernel' -c 9 \
    "$python" -c 'from benchmarks.gpu import correctness; print(correctness.check())'
}

export -f part_check part_tests part_ranks part_figures part_kernels part_server part_tools
export python results
status=0
for part in "$@"; do
  started=$SECONDS
  timeout -k 5 "$limit" bash -c "part_$part" >"$results/$part.log" 2>&1
  code=$?
  echo "== $part: exit $code after $((SECONDS - started)) s"
  tail -n "${TAIL:-25}" "$results/$part.log"
  [ $code = 0 ] || status=1
done
tar czf "$results/triton-cache.tar.gz" -C ~/.triton cache 2>/dev/null
exit $status
