"""The API server is gone for 30 seconds in the middle of each phase of a deployment and of a step; a kubelet stops."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
from collections.abc import Mapping

import pytest

from k8s.cluster.api import connect
from k8s.cluster.canary import canary_name
from k8s.objects.jobs import StepJob, step_job
from k8s.objects.manifests import BUNDLE_ANNOTATION
from k8s.step_runner import StepRunner
from pipeline.system.errors import PipelineError, StageError

from .images import NAME
from .load import send_load
from .place import DEPLOYMENT, Place, Reports, wait_until
from .tcp_proxy import TcpProxy

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.usefixtures("image")]

OUTAGE_SECONDS = 30
CANARY = {"canary_percent": 30, "auto": True, "observe_seconds": 10, "min_requests": 0, "margin": 0.5}
# The messages with which phases begin.
PHASES = {"lease": "deploying to", "apply": "plan:", "wait": "applied", "golden requests": "replicas available"}
CANARY_PHASES = {"scale": "canary: ", "pods": "deployment/twice-canary", "observe": "golden requests answered"}


@pytest.mark.parametrize("phase", PHASES)
def test_deployment_during_an_outage_ends_and_can_be_repeated(
    place: Place, reports: Reports, proxy: TcpProxy, phase: str
) -> None:
    place.deploy("stable", reports)
    deploy_through_outage(place, reports, proxy, PHASES[phase], {}, must_succeed=phase == "wait")


@pytest.mark.parametrize("phase", CANARY_PHASES)
def test_canary_during_an_outage_ends_and_can_be_repeated(
    place: Place, reports: Reports, proxy: TcpProxy, phase: str
) -> None:
    place.deploy("slow", reports)  # equal versions differ by chance on a busy machine
    deploy_through_outage(place, reports, proxy, CANARY_PHASES[phase], CANARY, must_succeed=False)
    canary = {**DEPLOYMENT, "metadata": {"name": canary_name(NAME)}}
    assert place.cluster.read(canary) is None


def deploy_through_outage(
    place: Place, reports: Reports, proxy: TcpProxy, trigger: str, rollout: Mapping[str, object], must_succeed: bool
) -> None:
    """Deploy; whatever the outage did to it, no request is lost and the next deployment succeeds."""
    config = place.config(rollout=rollout)
    reports.on[trigger] = lambda: proxy.fail_for(OUTAGE_SECONDS)
    with send_load(place) as load:
        with contextlib.nullcontext() if must_succeed else contextlib.suppress(PipelineError):
            place.deploy("candidate", reports, config)
        assert proxy.outages == 1, f"nothing reported {trigger!r}"
        proxy.wait_until_up()
        place.deploy("candidate", reports, config)
        load.check()
    live = place.cluster.read(DEPLOYMENT)
    assert live is not None
    assert live["metadata"]["annotations"][BUNDLE_ANNOTATION] == place.bundles["candidate"].digest


def test_node_whose_kubelet_is_frozen_is_named(place: Place, reports: Reports) -> None:
    """PIPE_TEST_KUBELET is a command that sends the signal, which is appended, to the kubelet of one node."""
    if not (command := shlex.split(os.environ.get("PIPE_TEST_KUBELET", ""))):
        pytest.skip("needs PIPE_TEST_KUBELET, and two nodes")
    place.deploy("stable", reports)
    subprocess.run([*command, "STOP"], check=True)
    try:
        with pytest.raises(StageError, match=r"twice-\S+: node \S+ (has not responded|is not ready, .*) since \d"):
            place.deploy("candidate", reports, place.config({"timeout_seconds": 90}))
    finally:
        subprocess.run([*command, "CONT"], check=True)
    place.deploy("candidate", reports)


PROGRAM = "import time\nfor i in range(60): print('line', i, flush=True); time.sleep(1)"


def make_step(place: Place) -> StepJob:
    """A step that prints a line each second for a minute, in the image of the service."""
    config = place.config()
    train = config.train.model_copy(update={"image": place.image_of("stable")})
    argv = ("python", "-c", PROGRAM, "runs/run-1")
    return step_job(config.model_copy(update={"train": train}), "prepare", "run-1", "k" * 64, argv, {})


@pytest.mark.parametrize("phase", ["start", "run", "end"])
def test_step_outlives_an_outage_with_all_its_lines(
    place: Place, reports: Reports, proxy: TcpProxy, phase: str
) -> None:
    job, folder = make_step(place), place.folder
    folder.mkdir()
    spec = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "16Mi"}}}
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": job.claim}, "spec": spec}
    place.create("persistentvolumeclaims", claim)
    connection = connect("")
    runner = StepRunner(
        connection, place.namespace, job, folder / "logs", folder / "log", 120, reports, lambda: fail_at_line()
    )

    def fail_at_line() -> None:
        lines = runner.log.read_text().splitlines() if runner.log.exists() else []
        if proxy.outages == 0 and len(lines) >= {"start": 0, "run": 20, "end": 50}[phase]:
            proxy.fail_for(OUTAGE_SECONDS)

    runner.start()
    assert runner.follow().status == 0
    runner.remove()
    assert proxy.outages == 1
    assert [line.split()[-1] for line in runner.log.read_text().splitlines()] == [str(i) for i in range(60)]
    wait_until(lambda: not place.pods(job.selector), "the end of the pods")
    connection.pool.clear()
