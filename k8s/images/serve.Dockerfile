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
RUN python3 -m venv --without-pip /venv \
 && python3 -m pip --python /venv/bin/python install --no-cache-dir --no-compile --disable-pip-version-check \
    --find-links /build/wheels -r /build/requirements-${ACCELERATOR}.txt
COPY app /app
RUN python3 /build/slim.py /venv /app

FROM ${BASE}
ARG BASE=python:3.11-slim
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
EXPOSE 8080 8081
ENTRYPOINT ["python", "-m", "serve", "/bundle", "--host", "0.0.0.0", "--port", "8080", "--grpc-port", "8081"]
