"""Steps on the test API server: followed to their end, cancelled, resumed, refused, and run by other controllers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from k8s.cluster.pending_reasons import PendingReasons
from k8s.cluster.rollout_status import JobResult
from k8s.step_runner import StepRunner
from pipeline.system.errors import PipelineError, ResourceError, StageError

from .api_requests import ApiRequest
from .api_server import ApiServer, Fault
from .mock_pods import MockPod
from .object_store import Object
from .step_runners import MakeStepRunner, Reports, log_lines, log_lines_so_far, printing, run_step


@pytest.fixture(autouse=True)
def _frequent_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PendingReasons, "refresh_seconds", 0.02)


def test_a_step_runs_to_its_end_and_leaves_only_its_log(
    api: ApiServer, make_runner: MakeStepRunner, claim: str
) -> None:
    api.nodes.program = printing("counting", "done")
    step = make_runner()
    assert run_step(step) == JobResult(0)
    assert log_lines(step) == ["counting", "done"]
    assert list(api.objects) == [claim]
    (kept,) = step.logs.iterdir()
    assert [line.split(" ", 1)[1] for line in kept.read_text().splitlines()] == ["counting", "done"]


def test_a_pod_runs_the_local_command(api: ApiServer, make_runner: MakeStepRunner) -> None:
    seen: list[Any] = []

    def program(pod: MockPod) -> int:
        seen.append(pod.spec["containers"][0])
        return 0

    api.nodes.program = program
    run_step(make_runner())
    (container,) = seen
    assert container["command"] == ["python", "-m", "pipeline.steps.prepare", "runs/run-1"]
    assert container["workingDir"] == "/project"
    assert {"name": "runs", "mountPath": "/project/runs"} in container["volumeMounts"]


def test_objects_are_applied_by_our_manager_after_a_dry_run(api: ApiServer, make_runner: MakeStepRunner) -> None:
    run_step(make_runner())
    patches = [query for method, _, query, _ in api.requests if method == "PATCH"]
    assert [query.get("dryRun") for query in patches] == ["All", None]
    assert {query["fieldManager"] for query in patches} == {"pipe"}


def test_lines_of_several_pods_are_marked_with_their_rank(api: ApiServer, make_runner: MakeStepRunner) -> None:
    api.nodes.program = printing("here is {}")
    train = make_runner("train", nodes=2, processes=1)
    assert run_step(train) == JobResult(0)
    assert sorted(log_lines(train)) == ["[0] here is 0", "[1] here is 1"]


def test_a_failed_container_gives_exit_status_and_reason(api: ApiServer, make_runner: MakeStepRunner) -> None:
    def program(pod: MockPod) -> int:
        pod.log("no memory")
        pod.end(137, "OOMKilled")
        return 137

    api.nodes.program = program
    step = make_runner()
    result = run_step(step)
    assert result.status == 137
    assert "the container ended with OOMKilled, exit code 137; it needs more memory than its limit" in result.reason
    assert log_lines(step) == ["no memory"]
    assert not [path for path in api.objects if "/jobs/" in path]


def test_cut_streams_neither_lose_nor_repeat_lines(api: ApiServer, make_runner: MakeStepRunner) -> None:
    lines = [f"line {i}" for i in range(200)]
    api.nodes.program = printing(*lines)
    api.cut_after = [0, 1, 3, 50, 2]
    step = make_runner()
    assert run_step(step) == JobResult(0)
    assert log_lines(step) == lines


def test_an_expired_watch_lists_again(api: ApiServer, make_runner: MakeStepRunner, reports: Reports) -> None:
    followed = threading.Event()

    def requests(*, watch: bool) -> int:
        paths = [path for _, path, query, _ in api.requests if ("watch" in query) is watch]
        return sum(path.endswith(("/jobs", "/pods")) for path in paths)

    def program(pod: MockPod) -> int:
        assert followed.wait(30)
        lists = requests(watch=False)
        api.store.expire()
        while requests(watch=False) < lists + 2:
            if pod.gone.wait(0.01):
                return 1
        return 0

    def tick() -> None:
        assert requests(watch=True) < 50, "the expired watches begin again and again"

    api.nodes.program = program
    reports.on["its pod runs"] = followed.set
    step = make_runner()
    step.tick = tick
    assert run_step(step) == JobResult(0)


def test_requests_are_retried_when_the_server_is_busy_or_breaks(
    api: ApiServer, make_runner: MakeStepRunner, reports: Reports
) -> None:
    api.fail("PATCH", "/jobs/", status=429, headers={"Retry-After": "0"})
    api.fail("PATCH", "/jobs/", drop=True)
    api.fail("GET", "watch=true", status=503, times=8)
    again = threading.Event()
    reports.on["the cluster answers again"] = again.set
    api.nodes.program = lambda pod: 0 if again.wait(30) else 1
    assert run_step(make_runner()) == JobResult(0)
    assert [line for line in reports.lines if "does not answer (503" in line]


def test_a_slow_server_is_waited_for(api: ApiServer, make_runner: MakeStepRunner) -> None:
    api.fail("GET", "/jobs", seconds=0.2, times=2)
    assert run_step(make_runner()) == JobResult(0)


def test_a_second_process_follows_the_job_and_continues_its_log(
    api: ApiServer, make_runner: MakeStepRunner, reports: Reports
) -> None:
    gone, back = threading.Event(), threading.Event()

    def program(pod: MockPod) -> int:
        pod.log("before")
        gone.set()
        back.wait(30)
        pod.log("after")
        return 0

    class Killed(BaseException):
        pass

    def die() -> None:
        if log_lines_so_far(first) == ["before"]:
            raise Killed

    api.nodes.program = program
    first = make_runner()
    first.tick = die
    first.start()
    with pytest.raises(Killed):
        first.follow()
    second = make_runner()
    assert second.find() is not None
    back.set()
    assert second.follow() == JobResult(0)
    assert log_lines(second) == ["before", "after"]


def test_a_job_with_another_key_is_not_followed(api: ApiServer, make_runner: MakeStepRunner) -> None:
    api.nodes.program = lambda pod: 0 if pod.gone.wait(30) else 1
    make_runner(key="a" * 64).start()
    assert make_runner(key="b" * 64).find() is None


def test_a_job_that_is_being_deleted_is_not_followed(api: ApiServer, make_runner: MakeStepRunner) -> None:
    api.nodes.program = lambda pod: 0 if pod.gone.wait(30) else 1
    step = make_runner()
    step.start()
    assert step.find() is not None
    deleted = {"deletionTimestamp": "2026-01-01T00:00:30Z"}
    api.store.change(job_path(step, api), lambda item: item["metadata"].update(deleted))
    assert step.find() is None


def test_cancelling_waits_for_pods_and_keeps_their_last_lines(
    api: ApiServer, make_runner: MakeStepRunner, claim: str
) -> None:
    begun = threading.Event()

    def program(pod: MockPod) -> int:
        pod.log("training")
        begun.set()
        assert pod.gone.wait(30)
        pod.log("checkpoint made")
        return 143

    api.nodes.program = program
    step = make_runner("train")
    step.start()
    assert begun.wait(30), "a pod that never ran has no log"
    step.cancel()
    assert list(api.objects) == [claim]
    assert log_lines(step)[-1] == "checkpoint made"


def test_finished_step_survives_errors_of_the_api_server(
    api: ApiServer, make_runner: MakeStepRunner, reports: Reports
) -> None:
    followed = threading.Event()

    def program(pod: MockPod) -> int:
        pod.log("last line")
        assert followed.wait(30), "otherwise the lists before the watches fail, not those after the end"
        api.fail("GET", "/pods?labelSelector", status=503, times=3)
        api.fail("GET", "/jobs?labelSelector", status=503, times=2)
        return 0

    api.nodes.program = program
    reports.on["its pod runs"] = followed.set
    step = make_runner()
    assert run_step(step) == JobResult(0)
    assert log_lines(step) == ["last line"]
    assert not [path for path in api.objects if "/jobs/" in path]


def test_removing_leaves_jobs_of_other_runs(api: ApiServer, make_runner: MakeStepRunner) -> None:
    labels = {"pipe-road/run": "run-2", "pipe-road/step": "prepare", "pipe-road/key": "k" * 16}
    other = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "another", "labels": labels}, "spec": {}}
    path = api.add(other)
    run_step(make_runner())
    assert path in api.objects


def test_a_job_made_meanwhile_under_the_same_name_is_left(api: ApiServer, make_runner: MakeStepRunner) -> None:
    step = make_runner()
    step.start()
    path = job_path(step, api)

    def made_again(request: ApiRequest) -> bool:
        if request.method == "DELETE" and request.path == path:
            other = api.store.delete(path)
            api.store.create(path, {**other, "metadata": {**other["metadata"], "uid": ""}})
        return False

    api.faults.append(Fault(made_again))
    step.remove()
    assert path in api.objects


def test_a_job_deleted_by_others_fails_the_step(api: ApiServer, make_runner: MakeStepRunner) -> None:
    def program(pod: MockPod) -> int:
        api.store.delete(pod.job)
        api.nodes.on_delete(pod.job)
        return 0

    api.nodes.program = program
    step = make_runner()
    step.start()
    result = step.follow()
    assert result.status == 1
    assert "was deleted, but not by this process" in result.reason


def test_a_missing_image_fails_the_step_after_the_timeout(api: ApiServer, make_runner: MakeStepRunner) -> None:
    waiting = {"reason": "ImagePullBackOff", "message": "Back-off pulling image"}

    def program(pod: MockPod) -> int:
        pod.status(phase="Pending", containerStatuses=[{"name": "step", "state": {"waiting": waiting}}])
        pod.gone.wait(30)
        return -1

    api.nodes.program = program
    step = make_runner(timeout_seconds=0.1)
    result = run_step(step)
    assert "ImagePullBackOff: Back-off pulling image" in result.reason


def test_a_pod_may_wait_for_a_free_node(api: ApiServer, make_runner: MakeStepRunner, reports: Reports) -> None:
    free = threading.Event()
    unscheduled = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes: insufficient cpu"}

    def program(pod: MockPod) -> int:
        pod.status(phase="Pending", conditions=[unscheduled])
        free.wait(30)
        return 0

    api.nodes.program = program
    reports.on["Pending: 0/3 nodes: insufficient cpu"] = free.set
    assert run_step(make_runner(timeout_seconds=0.01)) == JobResult(0)


def test_the_log_of_a_lost_pod_is_kept(api: ApiServer, make_runner: MakeStepRunner) -> None:
    def program(pod: MockPod) -> int:
        if pod.path.endswith("-0"):
            pod.log("first line")
            while "first line" not in log_lines_so_far(step):
                assert not pod.gone.wait(0.01)  # an unread log is lost with its node
            api.nodes.start(pod.job, 0, name="-again")
            api.nodes.lose(pod.path)
            return -1
        pod.log("second line")
        return 0

    api.nodes.program = program
    step = make_runner()
    assert run_step(step) == JobResult(0)
    assert log_lines(step) == ["first line", "second line"]
    assert len(list(step.logs.iterdir())) == 2


@pytest.mark.parametrize(
    ("break_cluster", "error", "text"),
    [
        (lambda api: api.quota.update(Job="count/jobs.batch"), StageError, "quota of namespace default is used up"),
        (lambda api: setattr(api, "rules", []), ResourceError, 'resources: \\["persistentvolumeclaims"\\]'),
        (lambda api: api.store.objects.clear(), ResourceError, "no volume claim twice-runs"),
        (lambda api: api.namespaces.clear(), StageError, "kubectl create namespace default"),
    ],
)
def test_failed_start_names_the_fix_and_leaves_no_job(
    break_cluster: Callable[[ApiServer], None],
    error: type[PipelineError],
    text: str,
    api: ApiServer,
    make_runner: MakeStepRunner,
) -> None:
    break_cluster(api)
    with pytest.raises(error, match=text):
        make_runner().start()
    assert not [path for path in api.objects if "/jobs/" in path]


@pytest.fixture
def crds(api: ApiServer) -> None:
    api.crds |= {"jobset.x-k8s.io/v1alpha2", "trainer.kubeflow.org/v1alpha1", "kueue.x-k8s.io/v1beta2"}


def job_path(step: StepRunner, api: ApiServer) -> str:
    kind = step.step_job.job["kind"].lower()
    return next(path for path in api.objects if f"/{kind}s/" in path)


@pytest.mark.usefixtures("crds")
@pytest.mark.parametrize("workload", ["jobset", "trainjob"])
def test_a_jobset_or_trainjob_is_followed_and_removed(
    workload: str, api: ApiServer, make_runner: MakeStepRunner, claim: str
) -> None:
    api.nodes.program = printing("here is {}")
    train = make_runner("train", cluster={"workload": workload}, nodes=2, processes=1)
    assert run_step(train) == JobResult(0)
    assert sorted(log_lines(train)) == ["[0] here is 0", "[1] here is 1"]
    assert list(api.objects) == [claim]


@pytest.mark.usefixtures("crds")
@pytest.mark.parametrize("workload", ["jobset", "trainjob"])
def test_a_failed_jobset_or_trainjob_gives_the_reason(
    workload: str, api: ApiServer, make_runner: MakeStepRunner
) -> None:
    api.nodes.program = lambda pod: 2
    result = run_step(make_runner("train", cluster={"workload": workload}))
    assert result.status == 2
    assert result.reason.startswith("the container ended with Error, exit code 2")


@pytest.mark.usefixtures("crds")
@pytest.mark.parametrize("step", ["prepare", "train"])
def test_the_reason_of_kueue_is_reported_while_queued(
    step: str, api: ApiServer, make_runner: MakeStepRunner, reports: Reports
) -> None:
    def suspend(item: Object) -> None:
        if item["metadata"]["labels"].get("kueue.x-k8s.io/queue-name") == "team-a":
            item["spec"]["suspend"] = True

    def admit() -> None:
        api.store.change(path, lambda item: item["spec"].update(suspend=False))
        api.nodes.on_apply(path, api.objects[path])

    api.webhook = suspend
    runner = make_runner(step, cluster={"queue": "team-a"})
    runner.start()
    path = job_path(runner, api)
    condition = {"type": "QuotaReserved", "status": "False", "message": "insufficient unused quota for cpu"}
    labels = {"kueue.x-k8s.io/job-uid": api.objects[path]["metadata"]["uid"]}
    metadata = {"name": "job-twice", "labels": labels}
    status = {"conditions": [condition]}
    api.add({"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "Workload", "metadata": metadata, "status": status})
    reports.on["the Job waits in its queue; Kueue: insufficient unused quota for cpu"] = admit
    assert runner.follow() == JobResult(0)


def event(kind: str, name: str, message: str) -> dict[str, Any]:
    about = {"kind": kind, "name": name}
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{name}.1"},
        "involvedObject": about,
        "type": "Warning",
        "reason": "FailedCreate" if kind == "Job" else "FailedMount",
        "message": message,
        "lastTimestamp": "2026-01-02T00:00:00Z",
    }


def test_events_of_a_job_without_pods_are_reported(
    api: ApiServer, make_runner: MakeStepRunner, reports: Reports
) -> None:
    def allow() -> None:
        api.nodes.makes_pods = True
        api.nodes.on_apply(path, api.objects[path])

    api.nodes.makes_pods = False
    step = make_runner()
    step.start()
    path = job_path(step, api)
    api.add(event("Job", path.rsplit("/", 1)[1], "pods are forbidden: exceeded quota: small"))
    reports.on["its pod has not started; FailedCreate: pods are forbidden: exceeded quota: small"] = allow
    assert step.follow() == JobResult(0)


def test_events_of_a_pending_pod_are_reported(api: ApiServer, make_runner: MakeStepRunner, reports: Reports) -> None:
    mounted = threading.Event()

    def program(pod: MockPod) -> int:
        pod.status(phase="Pending", containerStatuses=[{"state": {"waiting": {"reason": "ContainerCreating"}}}])
        api.add(event("Pod", pod.name, 'secret "object-store" not result'))
        return 0 if mounted.wait(30) else 1

    api.nodes.program = program
    reports.on['FailedMount: secret "object-store" not result'] = mounted.set
    assert run_step(make_runner()) == JobResult(0)


def test_pods_of_an_earlier_attempt_end_before_the_next_starts(
    api: ApiServer, make_runner: MakeStepRunner, reports: Reports
) -> None:
    order: list[str] = []
    may_end = threading.Event()

    def program(pod: MockPod) -> int:
        order.append("begins")
        if len(order) == 1:
            assert pod.gone.wait(30)
            assert may_end.wait(30)
        order.append("ends")
        return 0

    api.nodes.program = program
    make_runner("train", key="a" * 64).start()
    reports.on["waiting for pods of an earlier attempt to end: twice-train"] = may_end.set
    assert run_step(make_runner("train", key="b" * 64)) == JobResult(0)
    assert order == ["begins", "ends"] * 2


def test_a_failed_apply_leaves_nothing(api: ApiServer, make_runner: MakeStepRunner, claim: str) -> None:
    api.faults.append(
        Fault(
            lambda request: request.plural == "jobs" and request.method == "PATCH" and "dryRun" not in request.query,
            500,
        )
    )
    with pytest.raises(StageError, match="500"):
        make_runner("train").start()
    assert list(api.objects) == [claim]


def test_a_forbidden_log_is_reported_once_with_the_missing_rule(
    api: ApiServer, make_runner: MakeStepRunner, reports: Reports
) -> None:
    rule = {"apiGroups": ["", "batch"], "verbs": ["get", "list", "watch", "create", "patch", "delete"]}
    resources = ["jobs", "services", "pods", "persistentvolumeclaims", "events"]
    api.rules = [{**rule, "resources": resources}]
    assert run_step(make_runner("train", nodes=2, processes=1)) == JobResult(0)
    (line,) = [line for line in reports.lines if line.startswith("warning: the log of pod/")]
    assert line.endswith('- apiGroups: [""]\n  resources: ["pods/log"]\n  verbs: [get]')


def test_warnings_of_the_server_are_reported(api: ApiServer, make_runner: MakeStepRunner, reports: Reports) -> None:
    api.warning = "would violate PodSecurity"
    run_step(make_runner())
    (line,) = [line for line in reports.lines if "would violate PodSecurity" in line]
    assert line.startswith("warning: job/twice-prepare-")


def test_paged_lists_and_incomplete_events_are_handled(
    api: ApiServer, make_runner: MakeStepRunner, reports: Reports
) -> None:
    followed = threading.Event()

    def program(pod: MockPod) -> int:
        assert followed.wait(30), "otherwise all events are in the first list"
        pod.log("done")
        return 0

    api.page, api.torn, api.nodes.program = 1, 2, program
    reports.on["2 of 2 pods run"] = followed.set
    train = make_runner("train", nodes=2, processes=1)
    assert run_step(train) == JobResult(0)
    assert sorted(log_lines(train)) == ["[0] done", "[1] done"]


def test_a_job_deleted_right_after_its_end_has_succeeded(
    api: ApiServer, make_runner: MakeStepRunner, reports: Reports
) -> None:
    runs = threading.Event()
    reports.on["its pod runs"] = runs.set
    api.nodes.program = lambda pod: 0 if runs.wait(30) else 1
    api.nodes.keeps_ended = False
    assert run_step(make_runner()) == JobResult(0)


def test_messages_of_the_kubelet_are_not_logged_as_the_pods(api: ApiServer, make_runner: MakeStepRunner) -> None:
    def program(pod: MockPod) -> int:
        pod.log("last words of the pod")
        pod.log("unable to retrieve container logs for containerd://0123", stamped=False)
        return 0

    api.nodes.program = program
    step = make_runner()
    assert run_step(step) == JobResult(0)
    assert log_lines(step) == ["last words of the pod"]
