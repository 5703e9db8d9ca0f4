# The image of kvcache-exporter: any UID, read-only root, nothing to write, no shell, no init.
# A digest can be given for the base: --build-arg PYTHON_IMAGE=docker.io/library/python:…@sha256:…
ARG PYTHON_IMAGE=docker.io/library/python:3.13.16-slim-trixie

FROM ${PYTHON_IMAGE} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_ROOT_USER_ACTION=ignore
WORKDIR /source

# Everything from outside comes in here, by hash and as a wheel; until a lock changes, builds take this from the cache.
COPY requirements/build.lock requirements/runtime.lock ./requirements/
RUN python -m venv --without-pip /opt/kvcache-exporter \
    && pip install --require-hashes --no-deps --only-binary :all: --requirement requirements/build.lock \
    && pip --python /opt/kvcache-exporter install --require-hashes --no-deps --only-binary :all: --no-compile \
        --requirement requirements/runtime.lock

COPY pyproject.toml README.md LICENSE ./
COPY exporter ./exporter
# `check` finds what a lock has left out. Unchecked bytecode is good whatever happens to the times of files in a registry.
RUN pip wheel --no-deps --no-index --no-build-isolation --wheel-dir dist . \
    && pip --python /opt/kvcache-exporter install --no-deps --no-index --no-compile dist/*.whl \
    && pip --python /opt/kvcache-exporter check \
    && python -m compileall -q --invalidation-mode unchecked-hash /opt/kvcache-exporter/lib

FROM ${PYTHON_IMAGE}
# The base has no bytecode of the standard library, and on a read-only root none can be kept: without this, each start
# spends a second of CPU time on it. -B, or what this imports itself would be checked by time.
RUN python -B -m compileall -q --invalidation-mode unchecked-hash \
        -x 'ensurepip|idlelib|site-packages|tkinter|turtledemo' /usr/local/lib/python3.*
COPY --from=build /opt/kvcache-exporter /opt/kvcache-exporter

# NVML's library comes from the NVIDIA container runtime, which is to add nothing but that. Which GPUs are seen is for
# whoever starts the container to say (`--gpus`, NVIDIA_VISIBLE_DEVICES): by itself the image takes none.
ENV NVIDIA_DRIVER_CAPABILITIES=utility \
    PATH=/opt/kvcache-exporter/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1
USER 65532:65532
EXPOSE 9948
STOPSIGNAL SIGTERM
ENTRYPOINT ["kvcache-exporter"]
CMD ["serve"]

ARG VERSION
ARG REVISION
ARG CREATED
LABEL org.opencontainers.image.title="kvcache-exporter" \
      org.opencontainers.image.description="Prometheus exporter for the KV cache of vLLM engines: capacity, headroom and remaining request slots" \
      org.opencontainers.image.source="https://github.com/kvcache-exporter/kvcache-exporter" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.created="${CREATED}"
