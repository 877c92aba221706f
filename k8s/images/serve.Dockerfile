# The prediction service: Python, the locked requirements, our source and one bundle. `pipe package` sets the ARGs.
ARG BASE=python:3.11-slim
FROM ${BASE} AS packages
ARG ACCELERATOR=cpu
# The package index comes from the builder's environment; it is in neither the context nor the image.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_TRUSTED_HOST
COPY requirements-${ACCELERATOR}.txt slim.py /build/
COPY wheels /build/wheels
# The requirements are complete, except the CUDA libraries, which pip chooses as the dependencies of two packages.
RUN python3 -m venv --without-pip /venv \
 && install="python3 -m pip --python /venv/bin/python install --no-cache-dir --no-compile \
    --disable-pip-version-check --find-links /build/wheels" \
 && grep -E '^(onnxruntime|torch)' /build/requirements-${ACCELERATOR}.txt > /build/runtimes.txt \
 && $install --no-deps -r /build/requirements-${ACCELERATOR}.txt \
 && $install -r /build/runtimes.txt
COPY app /app
RUN python3 /build/slim.py /venv /app

FROM ${BASE}
ARG BASE=python:3.11-slim
ARG ACCELERATOR=cpu
ARG NAME=model
ARG VERSION=unbuilt
ARG BUNDLE=unbuilt
LABEL org.opencontainers.image.title="${NAME}" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.base.name="${BASE}" \
      pipe-road.bundle="${BUNDLE}"
ENV PATH=/venv/bin:$PATH \
    PYTHONSAFEPATH=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    PYTHONPATH=/app \
    HOME=/tmp
COPY --from=packages /venv /venv
COPY --from=packages /app /app
COPY bundle /bundle
USER 10001:10001
# Start the service once, on the CPU where the machine that builds has no GPU: an image that cannot start is not built.
RUN [ "$ACCELERATOR" = cpu ] || provider="--provider auto"; python -m serve /bundle --check $provider
EXPOSE 8080 8081
ENTRYPOINT ["python", "-m", "serve", "/bundle", "--host", "0.0.0.0", "--port", "8080", "--grpc-port", "8081"]
