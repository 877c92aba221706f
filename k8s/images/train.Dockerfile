# The training pods: Python, torch, our whole source and the user's project. Every step's command runs in it as it runs
# on a laptop: `docker run IMAGE python -m pipeline.training.node runs/RUN`. The packager fills the defaults;
# `--build-arg ACCELERATOR=gpu` takes CUDA's builds of torch and ONNX Runtime in the place of those for CPU.
ARG BASE=python:3.11-slim
FROM ${BASE} AS packages
ARG ACCELERATOR=cpu
# Where pip looks is the builder's business: read while building, kept nowhere in the context and not in the image.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_TRUSTED_HOST
COPY requirements-${ACCELERATOR}.txt /build/
COPY wheels /build/wheels
RUN python3 -m venv --without-pip /venv \
 && python3 -m pip --python /venv/bin/python install --no-cache-dir --disable-pip-version-check \
    --find-links /build/wheels -r /build/requirements-${ACCELERATOR}.txt

FROM ${BASE}
ARG BASE=python:3.11-slim
ARG NAME=model
ARG VERSION=unbuilt
ARG PROJECT=unbuilt
LABEL org.opencontainers.image.title="${NAME}" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.base.name="${BASE}" \
      pipe-road.project="${PROJECT}"
ENV PATH=/venv/bin:$PATH \
    PYTHONSAFEPATH=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    PYTHONPATH=/app \
    HOME=/tmp
COPY --from=packages /venv /venv
COPY app /app
COPY project /project
WORKDIR /project
USER 10001:10001
CMD ["python", "-m", "pipeline.training.node", "--help"]
