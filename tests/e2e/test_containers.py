"""Real images: built on a base made here, pushed, pulled by digest, and run like restricted pods."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from k8s.images.registry import Repository, parse_reference
from pipeline.contract.bundle import open_bundle
from pipeline.contract.run import Run, all_runs, sealed_text
from pipeline.plan import CLUSTER_STEPS
from pipeline.service.process import check_golden, send_request
from tests.ports import free_port

from .containers import BASE, Containers, megabytes, registry, wheel_for_cpu, why_not
from .project_folder import ProjectFolder, wait_for

LIMIT_MEGABYTES = 220
QUESTION = {"instances": [[0.0, 0.9]]}

pytestmark = [
    pytest.mark.container,
    pytest.mark.long,
    pytest.mark.skipif(bool(why_not()), reason=f"no containers here: {why_not()}"),
]


@pytest.fixture(scope="module")
def containers() -> Iterator[Containers]:
    """Container tools with a base image, in a short path: the tools create sockets below it."""
    folder = Path(tempfile.mkdtemp(prefix="pipe-"))
    made = Containers.make(folder)
    try:
        made.make_base()
        yield made
        made.clear()
    finally:
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def address(containers: Containers) -> Iterator[str]:
    with registry(containers.folder) as host:
        yield host


@pytest.fixture(scope="module")
def project(finished: ProjectFolder, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProjectFolder]:
    project = finished.copy(tmp_path_factory.mktemp("packed") / "sides")
    yield project
    project.stop()


@pytest.fixture(scope="module")
def packed(project: ProjectFolder, containers: Containers, address: str) -> dict[str, Any]:
    """The record of `pipe package` after it built and pushed an image and a modelcar."""
    containers.call("buildah", "push", "--tls-verify=false", BASE, f"docker://{address}/base:1")
    words = [f"package.base_image={address}/base:1", "package.builder=buildah"]
    options = ("--push", "--modelcar", "-o", "json")
    named = f"package.image={address}/team/sides"
    done = project.pipe("package", *words, named, *options, env=containers.env, seconds=1200)
    record: dict[str, Any] = json.loads(done.stdout)
    containers.call("podman", "rmi", "--force", record["image"])
    containers.call(
        "buildah", "pull", "--tls-verify=false", record["reference"]
    )  # so that the image comes from the registry
    return record


@pytest.fixture
def run(project: ProjectFolder, packed: dict[str, Any]) -> Run:
    return Run(project.runs / packed["run"])


def test_serving_image_is_small_and_has_no_torch(containers: Containers, packed: dict[str, Any]) -> None:
    with containers.mounted(packed["reference"]) as root, containers.mounted(BASE) as base:
        size = megabytes(root) - megabytes(base)
        packages = next(root.glob("venv/lib/python3*/site-packages"))
        assert (packages / "uvloop").is_dir(), "the right folder"
        assert not list(packages.glob("torch*"))
        assert not list(packages.glob("nvidia*"))
    print(f"{size:.0f} MB beyond the base")
    assert size <= LIMIT_MEGABYTES


def test_build_of_an_image_with_a_changed_bundle_fails(containers: Containers, run: Run, tmp_path: Path) -> None:
    context = Path(shutil.copytree(run.output("package") / "context", tmp_path / "context"))
    (context / "bundle" / "golden.json").write_text("{}")
    argv = ["buildah", "build", "--tag", "broken", "--build-arg", f"BASE={BASE}", str(context)]
    done = subprocess.run(argv, env={**os.environ, **containers.env}, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "golden.json: content changed since export" in done.stdout + done.stderr


def test_image_serves_in_a_restricted_pod_and_drains_all_requests(
    containers: Containers, packed: dict[str, Any], run: Run
) -> None:
    port = free_port()
    options = ("--host", "127.0.0.1", "--port", str(port), "--grpc-port", str(port + 1))
    with containers.running("--name", "service", packed["reference"], *options) as process:
        wait_for(lambda: process.poll() is not None or ready(port), 60)
        assert process.poll() is None, process.stdout.read() if process.stdout else ""
        assert check_golden("127.0.0.1", port, run.bundle()) > 0
        with Clients(port) as clients:
            wait_for(lambda: len(clients.answers) > 50)
            containers.call("podman", "kill", "--signal", "TERM", "service")
            assert process.wait(timeout=300) == 0
        assert set(clients.answers) <= {200, 503}
        assert clients.lost == []


def test_service_runs_unprivileged_and_can_write_only_to_tmp(containers: Containers, packed: dict[str, Any]) -> None:
    program = "import os; print(os.getuid(), [p for p in ('/', '/app', '/bundle', '/venv', '/etc') if os.access(p, 2)])"
    assert containers.run("--entrypoint", "python", packed["reference"], "-c", program) == "10001 []"


def test_image_is_annotated_with_its_bundle_and_base(
    containers: Containers, packed: dict[str, Any], run: Run, address: str
) -> None:
    reference = parse_reference(packed["reference"])
    manifest = Repository(reference, None).manifest(reference.digest)
    assert manifest["annotations"]["pipe-road.bundle"] == packed["bundle"] == run.bundle().digest
    base = manifest["annotations"]["org.opencontainers.image.base.digest"]
    assert base == packed["base_digest"] == Repository(parse_reference(f"{address}/base"), None).digest_of("1")
    labels = json.loads(containers.call("podman", "inspect", "--format", "{{json .Labels}}", packed["reference"]))
    assert labels["pipe-road.bundle"] == packed["bundle"]
    with containers.mounted(packed["reference"]) as root:
        assert open_bundle(root / "bundle").digest == packed["bundle"]


def test_the_bill_of_materials_lists_what_is_installed(
    containers: Containers, packed: dict[str, Any], run: Run
) -> None:
    text = (run.output("package") / packed["sbom"]).read_text()
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    listed = {part["purl"] for part in json.loads(text)["components"] if "purl" in part}
    program = (
        "from importlib.metadata import distributions as d\n"
        "print(*(f'pkg:pypi/{x.name.lower().replace(chr(95), chr(45))}@{x.version}' for x in d()))"
    )
    installed = set(containers.run("--entrypoint", "python", packed["reference"], "-c", program).split())
    assert len(installed) > 20
    assert installed <= listed


def test_pulled_modelcar_is_served(containers: Containers, packed: dict[str, Any]) -> None:
    car = packed["modelcar"]
    assert car["uri"] == f"oci://{car['reference']}"
    containers.call("buildah", "pull", "--tls-verify=false", car["reference"])
    port = free_port()
    options = ("--host", "127.0.0.1", "--port", str(port), "--grpc-port", str(port + 1))
    with containers.mounted(car["reference"]) as root:
        assert open_bundle(root / "models").digest == packed["bundle"]
        served = ("-v", f"{root}/models:/mnt/models:ro", "--entrypoint", "python", packed["reference"])
        with containers.running(*served, "-m", "serve", "/mnt/models", *options) as process:
            wait_for(lambda: process.poll() is not None or ready(port), 60)
            assert check_golden("127.0.0.1", port, open_bundle(root / "models")) > 0


def test_every_step_runs_in_the_training_image(containers: Containers, project: ProjectFolder) -> None:
    wheel = wheel_for_cpu(os.environ)
    if wheel is None:
        pytest.skip("no wheel of torch for CPU in a folder of PIP_FIND_LINKS")
    (project.folder / "wheels").mkdir()
    (project.folder / "wheels" / wheel.name).symlink_to(wheel)
    words = (f"package.base_image={BASE}", "package.builder=buildah")
    done = project.pipe("package", "--train", *words, "-o", "json", env=containers.env, seconds=1200)
    image = json.loads(done.stdout)["image"]
    fresh = project.folder / "runs" / "in-pods"
    fresh.mkdir(mode=0o777)
    fresh.chmod(0o777)
    body = (
        all_runs(project.runs)[-1].read().model_copy(update={"steps": {}})
    )  # their records do not match these outputs
    (fresh / "run.json").write_text(sealed_text(body, None))
    (fresh / "run.json").chmod(0o666)
    (fresh / "logs").mkdir()
    (fresh / "logs").chmod(0o777)
    for step, module in ((step, STEPS[step]) for step in CLUSTER_STEPS):
        containers.run("-v", f"{project.runs}:/project/runs", image, "python", "-m", module, "runs/in-pods")
        Run(fresh).partial(step).rename(Run(fresh).output(step))
    assert open_bundle(Run(fresh).bundle_path).manifest.verdict in ("pass", "no-baseline")


STEPS = {
    "check": "pipeline.steps.check",
    "prepare": "pipeline.steps.prepare",
    "train": "pipeline.training.node",
    "evaluate": "pipeline.evaluate",
    "export": "export",
    "package": "pipeline.steps.package",
}


def ready(port: int) -> bool:
    try:
        return send_request("127.0.0.1", port, "GET", "/v2/health/ready")[0] == 200
    except OSError:
        return False


class Clients:
    """Send one request after the other until the port is closed; each accepted request must be answered."""

    def __init__(self, port: int) -> None:
        self._port, self._thread = port, threading.Thread(target=self._ask)
        self.answers: list[int] = []
        self.lost: list[OSError] = []

    def _ask(self) -> None:
        while True:
            try:
                self.answers.append(
                    send_request("127.0.0.1", self._port, "POST", "/v1/models/sides:predict", QUESTION)[0]
                )
            except ConnectionRefusedError:
                return  # the service has ended
            except OSError as error:
                self.lost.append(error)

    def __enter__(self) -> Clients:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join()
