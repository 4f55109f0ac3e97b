#!/usr/bin/env bash
# What a GPU machine without a network lacks, into build/gpu: packages of Octavo that its Python does
# not have, and the native modules, compiled for that Python. Run it where there is a network, with a
# Python of the same version:
#
#   PYTHON=python3.12 benchmarks/gpu/carry.sh
#
# Then copy the checkout with build/gpu there and run benchmarks/gpu/first_contact.sh.
set -eu
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3.12}
# An image for machine learning has torch, triton, numpy, transformers, pillow, pytest and theirs.
packages="msgspec llguidance starlette uvicorn httptools openai gguf distro jiter sniffio pydantic
          pydantic_core annotated-types compressed-tensors"
platforms=$(printf -- '--platform manylinux_2_%s_x86_64 ' 28 27 17)
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
mkdir -p build/gpu/wheels build/gpu/engine build/gpu/router
rm -f build/gpu/wheels/*.whl
"$python" -m venv build/gpu/venv
build/gpu/venv/bin/pip install -q nanobind scikit-build-core cmake ninja
# Each by itself: what it needs is named above, or there.
build/gpu/venv/bin/pip download -q --no-deps --only-binary=:all: --python-version "$version" \
  --implementation cp $platforms --platform manylinux2014_x86_64 --platform manylinux1_x86_64 \
  -d build/gpu/wheels $packages
PATH=$PWD/build/gpu/venv/bin:$PATH
cmake -S csrc -B build/gpu/native -G Ninja -DCMAKE_BUILD_TYPE=Release \
  -DPython_EXECUTABLE="$PWD/build/gpu/venv/bin/python" -DOCTAVO_ONLY_ISAS="${ISAS:-avx2;avx512bf16;amx}"
cmake --build build/gpu/native
cp build/gpu/native/_native*.so build/gpu/engine/
cp build/gpu/native/_fast*.so build/gpu/router/
du -sh build/gpu/wheels build/gpu/engine build/gpu/router
