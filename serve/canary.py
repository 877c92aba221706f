"""`python -m serve.canary`: compare a canary's pods with the stable version's, for a controller that shifts requests.

Each host name stands for all ready pods of a version, as that of a headless Service. Exit status 0 promotes the canary.
"""

from __future__ import annotations

import argparse
import http.client
import socket
import sys
from collections.abc import Sequence
from contextlib import closing

from pipeline.contract.canary import RequestCounts, observe, parse_request_counts
from pipeline.contract.settings.access import Access
from pipeline.contract.settings.cluster import Rollout
from pipeline.system.errors import PipelineError, StageError

_TIMEOUT_SECONDS = 10.0
_HTTP_OK = 200


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("python -m serve.canary", description=__doc__, allow_abbrev=False)
    for name in ("--stable", "--canary"):
        parser.add_argument(name, required=True, metavar="HOST:PORT")
    parser.add_argument("--name", required=True, help="of the model")
    for name, kind in (("--min-requests", int), ("--margin", float), ("--observe-seconds", int)):
        parser.add_argument(name, type=kind, required=True, help="as in the section rollout of pipe.yaml")
    for name in ("--api-keys", "--tls-certificate", "--tls-key"):
        parser.add_argument(name, default="", metavar="FILE", help="as of python -m serve")
    args = parser.parse_args(argv)
    access = Access(api_keys=args.api_keys, tls_certificate=args.tls_certificate)

    def read() -> tuple[dict[str, RequestCounts], dict[str, RequestCounts]]:
        stable, canary = (_read_pods(address, args.name, access) for address in (args.stable, args.canary))
        # Until DNS follows, the canary's name means stable pods; none is compared with itself.
        return {pod: counts for pod, counts in stable.items() if pod not in canary}, canary

    settings = Rollout(min_requests=args.min_requests, margin=args.margin, observe_seconds=args.observe_seconds)
    try:
        result = observe(read, settings, print)
    except PipelineError as error:
        print(f"error: {error}")
        return error.exit_code
    print(f"canary: {result.outcome}: {result.text}")
    return 0 if result.outcome == "promote" else 1


def _read_pods(address: str, model: str, access: Access) -> dict[str, RequestCounts]:
    """Return the counters of all pods behind a host name; those that were removed meanwhile are skipped."""
    host, _, port = address.rpartition(":")
    try:
        resolved = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except socket.gaierror:  # no pod is ready
        return {}
    counts = {}
    for pod in sorted({str(entry[4][0]) for entry in resolved}):
        try:
            with closing(access.connection(pod, int(port), _TIMEOUT_SECONDS)) as connection:
                connection.request("GET", "/metrics", headers=access.headers())
                response = connection.getresponse()
                text = response.read().decode()
        except (OSError, http.client.HTTPException) as error:
            print(f"{pod}: GET /metrics failed: {error!r}")
            continue
        if response.status != _HTTP_OK:
            raise StageError(f"{pod}: GET /metrics returned {response.status}; a canary needs them to be measured")
        counts[f"{pod}:{port}"] = parse_request_counts(text, model)
    return counts


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
