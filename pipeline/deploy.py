"""The deploy step: a proven bundle becomes the service that answers, here or on a cluster."""

from __future__ import annotations

import http.client
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

from pipeline.champion import promote
from pipeline.history import now
from pipeline.service import (
    Live,
    any_port,
    end,
    free_port,
    port_is_free,
    process_started,
    read_live,
    request,
    service_environment,
    spawn,
    write_live,
)
from pipeline.smoke import check_golden, latency, wait_until_ready
from pipeline.spec.access import Access
from pipeline.spec.bundle import Bundle
from pipeline.spec.config import Config
from pipeline.spec.errors import ClusterError, StageError
from pipeline.spec.files import write_json
from pipeline.spec.run import Run
from pipeline.spec.sections import Deploy, watching
from pipeline.spec.step import run_step

_SWITCH_SECONDS = 10.0


def deploy(run: Run, root: Path) -> None:
    bundle, access = run.bundle(), Access.of(run.config.serve, root)
    record = (_on_cluster if run.config.deploy.target == "kubernetes" else _locally)(run, bundle, access)
    write_json(run.partial("deploy") / "deploy.json", record)
    if record["live"] and bundle.manifest.verdict == "forced":
        _say("forced past the gate: it serves, but the champion that candidates must beat stays as it was")
    elif record["live"]:
        promote(run, bundle)


def _on_cluster(run: Run, bundle: Bundle, access: Access) -> dict[str, Any]:
    from k8s.deploy import deploy as deploy_to_cluster  # the local road does without

    image = run.config.deploy.image or json.loads((run.output("package") / "image.json").read_text())["image"]
    directory, render = run.partial("deploy") / "manifests", run.config.deploy.render

    def final(text: str) -> str:
        """The directory gets its real name when the step is over; that is the one to tell."""
        return text.replace(str(run.partial("deploy")), str(run.output("deploy")))

    try:
        record = deploy_to_cluster(run.config, bundle, image, directory, render, lambda text: _say(final(text)), access)
    except ClusterError as error:
        raise ClusterError(final(str(error))) from error
    return {**record, "live": not render}


def _locally(run: Run, bundle: Bundle, access: Access) -> dict[str, Any]:
    live = read_live(run.runs)
    if live and live.alive and live.bundle == bundle.digest and _is_as_asked(live, run.config, access):
        asked = check_golden(live.host, live.port, bundle, access)
        _say(f"already live at {live.url}; golden answers are equal")
    else:
        live, asked = _start(run, bundle, access, live if live and live.alive else None)
        _say(f"live at {live.url} (gRPC {live.grpc_port}, pid {live.pid})")
    return {
        "target": "local",
        "live": True,
        "url": live.url,
        "grpc_port": live.grpc_port,
        "pid": live.pid,
        "bundle": bundle.digest,
        "golden": {"requests": asked},
        "latency_ms": latency(live.host, live.port, bundle, access),
    }


def _is_as_asked(live: Live, config: Config, access: Access) -> bool:
    deploy = config.deploy
    place = (live.host, live.asked_port) == (deploy.host, deploy.port) and deploy.grpc_port in (0, live.grpc_port)
    return place and live.access == access and list(live.watching) == watching(config.serve)


def _start(run: Run, bundle: Bundle, access: Access, old: Live | None) -> tuple[Live, int]:
    """Start beside the old service, prove it, let it take the port over, end the old one."""
    config = run.config.deploy
    port, grpc_port = choose_ports(config, old)
    if port != config.port and old is None:
        _say(f"port {config.port} is taken; using {port}")
    standby, log = any_port(), run.path / "logs" / "service.log"
    process = spawn(_argv(run, access, port, grpc_port, standby), log, service_environment())
    started = process_started(process.pid)
    try:
        wait_until_ready(process, standby, log, config.timeout_seconds)
        asked = check_golden("127.0.0.1", standby, bundle, access.without_tls)
        _say(f"{asked} golden requests answered as at export")
        process.send_signal(signal.SIGUSR1)
        _wait_for_switch(config.host, port, process.pid, log, access)
    except BaseException:
        end(process.pid, started, grace_seconds=5)
        raise
    live = Live(
        name=bundle.name,
        run=run.id,
        bundle=bundle.digest,
        pid=process.pid,
        process_started=started,
        host=config.host,
        port=port,
        grpc_port=grpc_port,
        asked_port=config.port,
        since=now(),
        log=str(log),
        access=access,
        watching=tuple(watching(run.config.serve)),
    )
    write_live(run.runs, live)
    if old is not None:
        end(old.pid, old.process_started)
        _say(f"took over from pid {old.pid} (bundle {old.bundle[:12]})")
    return live, asked


def _argv(run: Run, access: Access, port: int, grpc_port: int, standby: int) -> list[str]:
    ports = ["--port", str(port), "--grpc-port", str(grpc_port), "--standby", str(standby)]
    options = [*access.options, "--log-format", "text"]  # a file that people read
    options += watching(run.config.serve)
    return ["-m", "serve", str(run.bundle_path.resolve()), "--host", run.config.deploy.host, *ports, *options]


def choose_ports(config: Deploy, old: Live | None) -> tuple[int, int]:
    """The old service's own ports when it was asked for the same one, else the next free pair."""
    if old is not None and (old.asked_port, old.host) == (config.port, config.host):
        return old.port, config.grpc_port or old.grpc_port
    port = free_port(config.host, config.port)
    grpc_port = config.grpc_port or free_port(config.host, port + 1)
    if config.grpc_port and not port_is_free(config.host, config.grpc_port):
        raise StageError(f"deploy.grpc_port={config.grpc_port} is taken on {config.host}")
    return port, grpc_port


def _wait_for_switch(host: str, port: int, pid: int, log: Path, access: Access) -> None:
    """Until the new process has answered on the public port."""
    deadline = time.monotonic() + _SWITCH_SECONDS
    while time.monotonic() < deadline:
        try:
            _, headers, _ = request(host, port, "GET", "/v2/health/ready", timeout_seconds=2, access=access)
            if headers.get("x-served-by") == str(pid):
                return
        except (OSError, http.client.HTTPException):
            pass  # not listening yet: that is what is waited for
        time.sleep(0.01)
    raise StageError(f"the new service did not take over port {port} (log: {log})")


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(run_step("deploy", deploy, sys.argv[1:]))
