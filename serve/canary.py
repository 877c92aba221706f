"""`python -m serve.canary`: compare a canary's pods with the stable version's, for a controller that shifts requests.

Each host name stands for all ready pods of a version, as that of a headless Service. Exit status 0 promotes the canary.
"""

from __future__ import annotations

import argparse
import http.client
import socket
import sys
from collections.abc import Sequence

from pipeline.contract.canary import RequestCounts, observe, parse_request_counts
from pipeline.contract.settings.access import Access
from pipeline.contract.settings.cluster import Rollout
from pipeline.system.errors import PipelineError, StageError

_TIMEOUT_SECONDS = 10.0
_HTTP_OK = 200


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("python -m serve.canary", description=__doc__, allow_abbrev=False)
    for name in ("stable", "canary"):
        parser.add_argument(f"--{name}", required=True, metavar="HOST:PORT")
    parser.add_argument("--name", required=True, help="name of the model")
    settings = {"min_requests": int, "margin": float, "observe_seconds": int}
    for name, kind in settings.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, required=True, help=f"as rollout.{name}")
    files = ("api_keys", "tls_certificate", "tls_key")
    for name in files:
        parser.add_argument(f"--{name.replace('_', '-')}", default="", metavar="FILE", help="as of python -m serve")
    options = vars(parser.parse_args(argv))
    access = Access(**{name: options[name] for name in files})

    def read() -> tuple[dict[str, RequestCounts], dict[str, RequestCounts]]:
        stable, canary = (_read_pods(options[name], options["name"], access) for name in ("stable", "canary"))
        # The canary's name means the stable pods until DNS has followed; no pod is compared with itself.
        return {pod: counts for pod, counts in stable.items() if pod not in canary}, canary

    try:
        result = observe(read, Rollout(**{name: options[name] for name in settings}), _report)
    except PipelineError as error:
        _report(f"error: {error}")
        return error.exit_code
    _report(f"canary: {result.outcome}: {result.text}")
    return 0 if result.outcome == "promote" else 1


def _read_pods(address: str, model: str, access: Access) -> dict[str, RequestCounts]:
    """Return the counters of all pods behind a host name; those that were removed meanwhile are skipped."""
    host, _, port = address.rpartition(":")
    try:
        resolved = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        _report(f"{host}: no pod is ready: {error}")
        return {}
    counts = {}
    for pod in sorted({str(entry[4][0]) for entry in resolved}):
        connection = access.connection(pod, int(port), _TIMEOUT_SECONDS)
        try:
            connection.request("GET", "/metrics", headers=access.headers())
            response = connection.getresponse()
            text = response.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            _report(f"{pod}: GET /metrics failed: {error!r}")
            continue
        finally:
            connection.close()
        if response.status != _HTTP_OK:
            raise StageError(f"{pod}: GET /metrics returned {response.status}; a canary needs them to be measured")
        counts[f"{pod}:{port}"] = parse_request_counts(text, model)
    return counts


def _report(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
