# The training pods: Python, torch, our whole source and the user's project. The command of every step is the local one:
# `docker run IMAGE python -m pipeline.training.node runs/RUN`. `pipe package` sets the ARGs; with
# `--build-arg ACCELERATOR=gpu` the image has the CUDA builds of torch and ONNX Runtime.
ARG BASE=python:3.11-slim
FROM ${BASE} AS packages
ARG ACCELERATOR=cpu
# The package index comes from the builder's environment; it is in neither the context nor the image.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_TRUSTED_HOST
# For torch and its packages in an image for the CPU, unless the project has a wheel of torch.
ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
COPY requirements-${ACCELERATOR}.txt /build/
COPY wheels /build/wheels
RUN python3 -m venv --without-pip /venv \
 && install="python3 -m pip --python /venv/bin/python install --no-cache-dir --disable-pip-version-check \
    --find-links /build/wheels" \
 && if [ "$ACCELERATOR" = cpu ] && ! ls /build/wheels/torch-*.whl > /dev/null 2>&1; then \
    $install --no-deps --index-url "$TORCH_INDEX_URL" \
    $(sed -nE 's/^torch(audio|vision)?==.*/&+cpu/p' /build/requirements-cpu.txt); fi \
 && $install -r /build/requirements-${ACCELERATOR}.txt

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
