# The prediction service: Python, the locked requirements, our source and one bundle. The packager fills the defaults.
ARG BASE=python:3.11-slim
FROM ${BASE}
ARG BASE=python:3.11-slim
ARG NAME=model
ARG VERSION=unbuilt
ARG BUNDLE=unbuilt
LABEL org.opencontainers.image.title="${NAME}" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.base.name="${BASE}" \
      pipe-road.bundle="${BUNDLE}"

# Where pip looks is the builder's business: read while building, kept nowhere in the context.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_TRUSTED_HOST
COPY requirements.txt /requirements.txt
RUN python -m pip install --no-cache-dir --disable-pip-version-check -r /requirements.txt

ENV PYTHONSAFEPATH=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    PYTHONPATH=/app \
    HOME=/tmp
COPY app /app
COPY bundle /bundle
USER 10001:10001
EXPOSE 8080 8081
ENTRYPOINT ["python", "-m", "serve", "/bundle", "--host", "0.0.0.0", "--port", "8080", "--grpc-port", "8081"]
