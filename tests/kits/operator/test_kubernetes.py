"""Jobs on a real API server: the definition, the operator as a process with the rights of its service account, and pods
whose commands are processes of this machine. What is not here: nodes, images, networks (kubelet.py says so)."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_server
import pytest
import torch
import yaml
from kubernetes_server import Kubernetes, kubernetes
from operator_wrong_jobs import MISSPELLED, WRONG, changed
from probes import health
from scripts import free_port
from served import difference
from served_script import one_device

from partway.operator import manifests

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.xdist_group("kubernetes"),
    pytest.mark.skipif(kubernetes_server.missing() != "", reason=kubernetes_server.missing()),
]

EXAMPLE = Path(__file__).parents[3] / "examples" / "cifar10"
SERVED = Path(__file__).parents[2] / "helpers" / "served_script.py"
SLEEP = "import sys, time; print('begins', flush=True); time.sleep(600)"
RANKS = """
import sys, time, torch, torch.distributed as dist
import partway as pw

size = pw.init(backend="gloo", timeout=60)
for step in range(int(sys.argv[1])):
    x = torch.ones(1) * (pw.get_rank() + 1)
    dist.all_reduce(x)
    print("step", step, "of", size, "sum", x.item(), flush=True)
    time.sleep(0.1)
pw.shutdown()
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kubernetes]:
    with kubernetes(tmp_path_factory.mktemp("kubernetes") / "cluster") as own:
        yield own


@pytest.fixture(autouse=True)
def _nothing_left(cluster: Kubernetes) -> Iterator[None]:
    """Whatever a test does, all goes with its jobs."""
    yield
    cluster.kubectl("delete", "pwj", "--all", "--wait=false")
    cluster.until(lambda: not cluster.get("pwj"), "end of jobs")
    for kind in ("pods", "services", "secrets"):
        cluster.until(lambda kind=kind: not cluster.owned(kind), f"end of {kind}")
    cluster.until(lambda: not cluster._left(), "end of processes", 30)


def job(name: str, roles: dict[str, tuple[int, str]], command: list[str], image: str = "local", **spec: Any) -> str:
    """The yaml of a job. `roles`: (replicas, restartPolicy) by role."""
    environment = [{"name": "OMP_NUM_THREADS", "value": "1"}]
    environment += [{"name": key, "value": str(value)} for key, value in spec.pop("environment", {}).items()]
    container = {"name": "main", "image": image, "command": command, "env": environment}
    replicas = {
        role: {"replicas": count, "restartPolicy": policy, "template": {"spec": {"containers": [container]}}}
        for role, (count, policy) in roles.items()
    }
    made = {
        "apiVersion": "partway.dev/v1", "kind": "PartwayJob", "metadata": {"name": name},
        "spec": {"schedulerPort": free_port(), "replicaSpecs": replicas, **spec},
    }  # fmt: skip
    text: str = yaml.safe_dump(json.loads(json.dumps(made)))
    assert manifests.check(text) == []
    return text


def alone(name: str, policy: str = "OnFailure", code: str = SLEEP, **more: Any) -> str:
    return job(name, {"Worker": (1, policy)}, [sys.executable, "-c", code], **more)


def ranks(name: str, workers: int, steps: int, policy: str = "ExitCode", **more: Any) -> str:
    roles = {"Scheduler": (1, "OnFailure"), "Worker": (workers, policy)}
    return job(name, roles, [sys.executable, "-c", RANKS, str(steps)], **more)


def conditions(cluster: Kubernetes, name: str) -> dict[str, Any]:
    return {each["type"]: each for each in cluster.status(name).get("conditions", ())}


def reasons(cluster: Kubernetes, name: str) -> list[str]:
    """The reasons of the events of a job, in the order in which they were written: their times are whole seconds."""
    events = [each for each in cluster.get("events") if each["involvedObject"]["name"] == name]
    return [each["reason"] for each in sorted(events, key=lambda each: int(each["metadata"]["resourceVersion"]))]


def told(text: str) -> None:
    """A figure, for whoever runs this with -s or -rP."""
    sys.stdout.write(f"{text}\n")


# -- End to end


def test_a_job_of_one_worker(cluster: Kubernetes, tmp_path: Path):
    began = time.monotonic()
    code = f"""
import os, time
print(sorted(name for name in os.environ if name.startswith('MS_')))
while not os.path.exists({str(tmp_path / "end")!r}):
    time.sleep(0.1)
"""
    cluster.apply(alone("one", code=code))
    cluster.until_phase("one", "Running")
    (tmp_path / "end").touch()
    told(f"one worker: {time.monotonic() - began:.1f} s from apply to Running")
    cluster.until_phase("one", "Succeeded")
    assert cluster.log("one-worker-0") == "[]\n"
    assert reasons(cluster, "one") == ["JobCreated", "JobRunning", "AllWorkersSucceeded"]
    assert "Succeeded" in cluster.kubectl("get", "pwj", "one")
    assert "AllWorkersSucceeded" in cluster.kubectl("describe", "pwj", "one")


def test_a_scheduler_and_4_workers_train_cifar_as_by_hand(cluster: Kubernetes, tmp_path: Path):
    shutil.copytree(EXAMPLE, tmp_path / "cifar10", ignore=shutil.ignore_patterns("__pycache__"))
    folder = tmp_path / "cifar10"
    arguments = ["--double", "--epochs", "1", "--batch", "4", "--size", "32", "--width", "4"]
    subprocess.run([sys.executable, "make_files.py", "data", "--records", "32"], cwd=folder, check=True)
    command = ["bash", "-c", f"cd {folder} && exec {sys.executable} train.py --data data {' '.join(arguments)}"]
    by_hand = subprocess.run(
        ["bash", "run.sh", "data", *arguments], cwd=folder, check=False, capture_output=True, text=True,
        env={
            **os.environ, "MS_WORKER_NUM": "4", "MS_SCHED_PORT": str(free_port()), "OMP_NUM_THREADS": "1",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        },
    )  # fmt: skip
    assert by_hand.returncode == 0, by_hand.stderr
    began = time.monotonic()
    cluster.apply(job("cifar", {"Scheduler": (1, "OnFailure"), "Worker": (4, "ExitCode")}, command))
    cluster.until_phase("cifar", "Running")
    told(f"scheduler and 4 workers: {time.monotonic() - began:.1f} s from apply to Running")
    cluster.until_phase("cifar", "Succeeded", 300)
    expected = [line for line in (folder / "worker_0.txt").read_text().splitlines() if "loss is" in line]
    assert expected
    for i in range(4):
        assert [line for line in cluster.log(f"cifar-worker-{i}").splitlines() if "loss is" in line] == expected


def served(name: str, folder: Path, workers: int = 3, servers: int = 2, steps: int = 20, **more: Any) -> str:
    folder.mkdir()
    environment = {
        "SERVED_FOLDER": folder, "SERVED_STEPS": steps, "SERVED_MORE": 1, "PARTWAY_CACHE_DIR": folder / "cache",
        "SERVED_SHARDS": folder / "shards",
        **more.pop("environment", {}),
    }  # fmt: skip
    roles = {"Scheduler": (1, "OnFailure"), "PS": (servers, "Always"), "Worker": (workers, "ExitCode")}
    return job(name, roles, [sys.executable, str(SERVED)], environment=environment, **more)


def assert_as_one_device(folder: Path, steps: int, workers: int) -> None:
    """Parameters and losses."""
    plain, losses = one_device(steps, more=True)
    assert difference(plain, torch.load(folder / "final.pt", weights_only=True)) < 1e-12
    parts = [[json.loads(line)[2] for line in (folder / f"steps.{i}").read_text().splitlines()] for i in range(workers)]
    means = torch.tensor(parts, dtype=torch.float64).mean(0)
    assert float((means - torch.tensor(losses, dtype=torch.float64)).abs().max()) < 1e-12


def test_a_scheduler_2_servers_and_3_workers_train_as_one_device(cluster: Kubernetes, tmp_path: Path):
    began = time.monotonic()
    cluster.apply(served("served", tmp_path / "served"))
    cluster.until_phase("served", "Running")
    told(f"scheduler, 2 servers and 3 workers: {time.monotonic() - began:.1f} s from apply to Running")
    cluster.until_phase("served", "Succeeded", 300)
    assert_as_one_device(tmp_path / "served", 20, 3)
    assert cluster.status("served")["restarts"] == 0


# -- Faults


@pytest.mark.parametrize("policy", ["Always", "OnFailure", "ExitCode"])
def test_a_worker_that_is_killed_is_started_again(cluster: Kubernetes, policy: str):
    name = f"killed-{policy.lower()}"
    cluster.apply(alone(name, policy))
    cluster.until_phase(name, "Running")
    os.kill(cluster.process(f"{name}-worker-0"), signal.SIGKILL)
    cluster.until(lambda: cluster.status(name).get("restarts") == 1, "restart")
    cluster.until_phase(name, "Running")
    assert len(cluster.starts(f"{name}-worker-0")) == 2
    assert "PodsRestarting" in reasons(cluster, name)
    assert f"{name}-worker-0 has ended with status 137 (killed by signal 9)" in cluster.kubectl("describe", "pwj", name)


def test_a_worker_that_is_killed_is_not_started_again_where_that_is_never(cluster: Kubernetes):
    cluster.apply(alone("never", "Never"))
    cluster.until_phase("never", "Running")
    os.kill(cluster.process("never-worker-0"), signal.SIGKILL)
    cluster.until_phase("never", "Failed")
    assert len(cluster.starts("never-worker-0")) == 1


def test_exit_codes_below_128_are_for_good(cluster: Kubernetes):
    cluster.apply(alone("code", "ExitCode", "raise SystemExit(3)"))
    cluster.until_phase("code", "Failed")
    said = "code-worker-0 has ended with status 3, and its restartPolicy is ExitCode"
    assert conditions(cluster, "code")["Failed"]["message"] == said


@pytest.mark.parametrize("pod", ["worker-1", "scheduler-0"])
def test_ranks_of_which_one_is_killed_begin_again_together(cluster: Kubernetes, pod: str):
    name = f"ranks-{pod.partition('-')[0]}"
    cluster.apply(ranks(name, 3, 40))
    cluster.until(lambda: "step 3 " in cluster.log(f"{name}-worker-0"), "step 3")
    os.kill(cluster.process(f"{name}-{pod}"), signal.SIGKILL)
    cluster.until(lambda: cluster.status(name).get("restarts") == 1, "restart")
    cluster.until_phase(name, "Succeeded", 120)
    assert [len(cluster.starts(f"{name}-worker-{i}")) for i in range(3)] == [2, 2, 2]
    assert "step 39 of 3 sum 6.0" in cluster.log(f"{name}-worker-2")


def test_an_elastic_worker_is_replaced_and_the_others_go_on(cluster: Kubernetes):
    cluster.apply(ranks("elastic", 3, 60, elastic={"minWorkers": 2}))
    cluster.until(lambda: "step 3 " in cluster.log("elastic-worker-0"), "step 3")
    os.kill(cluster.process("elastic-worker-1"), signal.SIGKILL)
    cluster.until_phase("elastic", "Succeeded", 180)
    assert [len(cluster.starts(f"elastic-worker-{i}")) for i in range(3)] == [1, 2, 1]
    assert cluster.log("elastic-worker-0").count("step 0 ") == 2  # its process has begun again, and its pod has not


@pytest.mark.parametrize("pod", ["worker-1", "ps-0", "scheduler-0"])
def test_with_servers_whatever_is_killed_the_numbers_are_those_of_one_device(
    cluster: Kubernetes, tmp_path: Path, pod: str
):
    name = f"ps-{pod.partition('-')[0]}"
    folder = tmp_path / name
    cluster.apply(served(name, folder, workers=2, steps=40, environment={"SERVED_NAP": 0.1}))
    steps = folder / "steps.0"
    cluster.until(lambda: steps.exists() and steps.read_text().count("\n") > 5, "steps", 200)
    os.kill(cluster.process(f"{name}-{pod}"), signal.SIGKILL)
    cluster.until_phase(name, "Succeeded", 300)
    assert cluster.status(name)["restarts"] == 1
    plain, _ = one_device(40, more=True)
    assert difference(plain, torch.load(folder / "final.pt", weights_only=True)) < 1e-12


def test_an_operator_that_is_killed_goes_on_where_it_was(cluster: Kubernetes):
    cluster.apply(ranks("while-away", 2, 60))
    cluster.until(lambda: "step 3 " in cluster.log("while-away-worker-0"), "step 3")
    cluster.kill("operator")
    cluster.apply(alone("new", code="pass"))
    cluster.kubectl("delete", "pod", "while-away-worker-1", "--wait=false")
    time.sleep(3)
    cluster.start_operator()
    cluster.until_phase("new", "Succeeded")
    cluster.until_phase("while-away", "Succeeded", 120)
    assert cluster.status("while-away")["restarts"] == 1
    assert len(cluster.starts("new-worker-0")) == 1


def test_the_api_server_is_started_again_mid_job(cluster: Kubernetes):
    cluster.apply(ranks("api", 2, 100))
    cluster.until(lambda: "step 3 " in cluster.log("api-worker-0"), "step 3")
    cluster.kill("server")
    time.sleep(3)
    cluster.start_server()
    cluster.until_phase("api", "Succeeded", 120)
    assert cluster.status("api")["restarts"] == 0
    assert len(cluster.starts("api-worker-0")) == 1


def test_two_operators_at_once_change_nothing(cluster: Kubernetes):
    cluster.start_operator("operator-2")
    try:
        time.sleep(3)
        roles = {"Scheduler": (1, "OnFailure"), "Worker": (4, "OnFailure")}
        for i in range(8):
            cluster.apply(job(f"two-{i}", roles, ["true"], "done"))
        for i in range(8):
            cluster.until_phase(f"two-{i}", "Succeeded")
        for i in range(8):
            assert [len(cluster.starts(f"two-{i}-worker-{k}")) for k in range(4)] == [1] * 4
            assert reasons(cluster, f"two-{i}").count("JobCreated") == 1
    finally:
        cluster.kill("operator-2", signal.SIGTERM)


def test_of_two_operators_with_a_lease_one_works_and_the_other_takes_its_place(cluster: Kubernetes):
    cluster.kill("operator", signal.SIGTERM)
    lease = ["--lease", "partway-system/partway-operator"]
    for name in ("operator-a", "operator-b"):
        cluster.start_operator(name, *lease)

    def holder() -> str:
        logs = {name: cluster.folder / f"{name}.log" for name in cluster.processes if name.startswith("operator-")}
        return next((name for name, path in logs.items() if "holds the lease" in path.read_text()), "")

    try:
        cluster.until(holder, "holder")
        cluster.apply(alone("leased", code="pass"))
        cluster.until_phase("leased", "Succeeded")
        cluster.kill(holder())
        cluster.apply(alone("taken", code="pass"))
        took = cluster.until_phase("taken", "Succeeded", 60)
        told(f"another operator takes the place of one that was killed in {took:.0f} s")
    finally:
        for name in [each for each in cluster.processes if each.startswith("operator-")]:
            cluster.kill(name, signal.SIGTERM)
        cluster.start_operator()


def test_a_pod_that_is_deleted_by_hand_is_made_again(cluster: Kubernetes):
    cluster.apply(alone("by-hand"))
    cluster.until_phase("by-hand", "Running")
    cluster.kubectl("delete", "pod", "by-hand-worker-0", "--wait=false")
    cluster.until(lambda: len(cluster.starts("by-hand-worker-0")) == 2, "another pod")
    cluster.until_phase("by-hand", "Running")
    assert cluster.status("by-hand")["restarts"] == 0


def test_an_image_that_does_not_exist_is_said(cluster: Kubernetes):
    cluster.apply(alone("no-image", image="missing"))
    cluster.until(lambda: conditions(cluster, "no-image").get("Running", {}).get("reason") == "PodPending", "reason")
    said = 'no-image-worker-0: ImagePullBackOff: Back-off pulling image "missing"'
    assert conditions(cluster, "no-image")["Running"]["message"] == said
    assert cluster.phase("no-image") == "Created"


def test_a_pod_that_never_gets_ready_is_seen(cluster: Kubernetes):
    cluster.apply(alone("unready", image="unready", runPolicy={"activeDeadlineSeconds": 4}))
    cluster.until_phase("unready", "Running")
    assert cluster.status("unready")["ready"] == "0/1"
    cluster.until_phase("unready", "Failed")
    assert conditions(cluster, "unready")["Failed"]["reason"] == "DeadlineExceeded"


def test_a_quota_is_waited_for(cluster: Kubernetes):
    quota = {
        "apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "few"}, "spec": {"hard": {"pods": "1"}}
    }  # fmt: skip
    cluster.apply(json.dumps(quota))
    cluster.until(lambda: "used" in (cluster.get("quota", "few").get("status") or {}), "quota")
    cluster.apply(job("quota", {"Scheduler": (1, "OnFailure"), "Worker": (2, "OnFailure")}, ["sleep", "600"]))
    cluster.until(lambda: conditions(cluster, "quota").get("Running", {}).get("reason") == "PodRefused", "reason")
    assert "exceeded quota: few" in conditions(cluster, "quota")["Running"]["message"]
    cluster.kubectl("delete", "quota", "few")
    cluster.until_phase("quota", "Running")


def test_conflicts_lose_nothing(cluster: Kubernetes):
    """Somebody writes to the job all the time."""
    cluster.apply(job("busy", {"Scheduler": (1, "OnFailure"), "Worker": (3, "OnFailure")}, ["sleep", "4"]))
    end = time.monotonic() + 4
    number = 0
    while time.monotonic() < end:
        number += 1
        cluster.kubectl("annotate", "pwj", "busy", f"n={number}", "--overwrite")
    cluster.until_phase("busy", "Succeeded")
    assert [len(cluster.starts(f"busy-worker-{i}")) for i in range(3)] == [1, 1, 1]


def test_a_deadline_is_kept(cluster: Kubernetes):
    cluster.apply(alone("deadline", runPolicy={"activeDeadlineSeconds": 3}))
    took = cluster.until_phase("deadline", "Failed")
    assert took < 20
    assert conditions(cluster, "deadline")["Failed"]["reason"] == "DeadlineExceeded"
    cluster.until(lambda: cluster.get("pod", "deadline-worker-0") is None, "end of the pod")


def test_the_limit_of_restarts_is_kept(cluster: Kubernetes):
    cluster.apply(alone("limit", code="raise SystemExit(1)", runPolicy={"backoffLimit": 1}))
    cluster.until_phase("limit", "Failed")
    assert conditions(cluster, "limit")["Failed"]["reason"] == "BackoffLimitExceeded"
    assert len(cluster.starts("limit-worker-0")) == 2


def test_a_job_that_is_deleted_while_it_starts_leaves_nothing(cluster: Kubernetes):
    for i in range(5):
        cluster.apply(job(f"gone-{i}", {"Scheduler": (1, "OnFailure"), "Worker": (4, "OnFailure")}, ["sleep", "600"]))
        time.sleep(0.1 * i)
        cluster.kubectl("delete", "pwj", f"gone-{i}", "--wait=false")  # what is left is looked for after each test


def test_a_job_of_the_name_of_one_that_was_deleted_runs(cluster: Kubernetes):
    for code in (SLEEP, "print('second')"):
        cluster.apply(alone("again", code=code))
        cluster.until(lambda: cluster.phase("again") in ("Running", "Succeeded"), "run")
        if code == SLEEP:
            cluster.kubectl("delete", "pwj", "again")
    cluster.until_phase("again", "Succeeded")
    assert "second" in cluster.log("again-worker-0")


def test_a_job_is_scaled_up_and_down(cluster: Kubernetes):
    cluster.apply(ranks("scaled", 2, 10_000))
    cluster.until(lambda: " of 2 " in cluster.log("scaled-worker-0"), "2 ranks")
    cluster.kubectl("scale", "pwj", "scaled", "--replicas=3")
    cluster.until(lambda: " of 3 sum 6.0" in cluster.log("scaled-worker-2"), "3 ranks", 120)
    assert "should be greater than or equal to 1" in cluster.kubectl(
        "scale", "pwj", "scaled", "--replicas=0", check=False
    )
    cluster.kubectl("scale", "pwj", "scaled", "--replicas=1")
    cluster.until(lambda: " of 1 sum 1.0" in cluster.log("scaled-worker-0"), "1 rank", 120)
    pods = [each["metadata"]["name"] for each in cluster.get("pods")]
    assert sorted(pods) == ["scaled-scheduler-0", "scaled-worker-0"]
    assert cluster.status("scaled")["restarts"] == 0
    scale = cluster.kubectl("get", "--raw", "/apis/partway.dev/v1/namespaces/default/partwayjobs/scaled/scale")
    assert json.loads(scale)["status"]["replicas"] == 1


def test_a_finished_job_is_deleted_after_its_time(cluster: Kubernetes):
    cluster.apply(alone("ttl", code="pass", runPolicy={"ttlSecondsAfterFinished": 2}))
    cluster.until(lambda: cluster.starts("ttl-worker-0"), "start")
    cluster.until(lambda: cluster.get("pwj", "ttl") is None, "end of the job")


def test_a_job_is_suspended_and_goes_on(cluster: Kubernetes):
    cluster.apply(alone("waits", runPolicy={"suspend": True}))
    cluster.until_phase("waits", "Suspended")
    assert cluster.get("pods") == []
    cluster.kubectl("patch", "pwj", "waits", "--type=merge", "-p", '{"spec": {"runPolicy": {"suspend": false}}}')
    cluster.until_phase("waits", "Running")
    cluster.kubectl("patch", "pwj", "waits", "--type=merge", "-p", '{"spec": {"runPolicy": {"suspend": true}}}')
    cluster.until(lambda: cluster.get("pods") == [], "end of pods")


# -- Wrong jobs


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_job_is_refused_with_its_field(cluster: Kubernetes, name: str):
    wrong = WRONG[name]
    text = yaml.safe_dump(changed(manifests.job("train.py", [], 4, 2, "image", name="wrong"), wrong.at, wrong.value))
    if wrong.server:  # kubectl looks at fields first, by the same schema
        whole = [] if name in MISSPELLED else ["--validate=false"]
        assert wrong.server in cluster.kubectl("apply", *whole, "-f", "-", given=text, check=False)
        said = cluster.kubectl("apply", "-f", "-", given=text, check=False)
        assert "error" in said or "is invalid" in said
        assert cluster.get("pwj") == []
        return
    cluster.apply(text)
    own = yaml.safe_load(text)["metadata"]["name"]
    cluster.until_phase(own, "Failed")
    assert conditions(cluster, own)["Failed"]["reason"] == "InvalidSpec"
    assert wrong.said in conditions(cluster, own)["Failed"]["message"]
    assert cluster.get("pods") == []
    assert wrong.said in cluster.kubectl("describe", "pwj", own)


def test_a_pod_that_the_server_refuses_is_said(cluster: Kubernetes):
    """What the schema cannot know: a volume that is not there."""
    wrong = yaml.safe_load(alone("volume"))
    container = wrong["spec"]["replicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    container["volumeMounts"] = [{"name": "data", "mountPath": "/data"}]
    cluster.apply(yaml.safe_dump(wrong))
    cluster.until(lambda: conditions(cluster, "volume").get("Running", {}).get("reason") == "PodRefused", "reason")
    assert 'volumeMounts[0].name: Not found: "data"' in conditions(cluster, "volume")["Running"]["message"]


# -- Names that others have


def runs_when_free(cluster: Kubernetes, name: str, kind: str, taken: str) -> None:
    """Nothing was done to the other's, which is said; without it the job runs."""
    before = cluster.get(kind, taken)
    cluster.apply(job(name, {"Scheduler": (1, "OnFailure"), "Worker": (1, "OnFailure")}, ["sleep", "600"]))
    cluster.until(lambda: conditions(cluster, name).get("Conflict", {}).get("status") == "True", "condition")
    said = (
        f'{kind} "{taken}" is there and has no owner, so it is not of this job; delete it, or give the job another name'
    )
    assert conditions(cluster, name)["Conflict"]["message"] == said
    assert said in cluster.kubectl("describe", "pwj", name)
    assert "NameTaken" in reasons(cluster, name)
    assert cluster.get(kind, taken)["metadata"]["uid"] == before["metadata"]["uid"]
    assert cluster.get(kind, taken)["spec"] == before["spec"]
    assert cluster.phase(name) == "Created"
    cluster.kubectl("delete", kind, taken)
    cluster.until_phase(name, "Running")
    assert conditions(cluster, name)["Conflict"]["status"] == "False"


def test_a_pod_of_another_is_not_taken_for_its_own(cluster: Kubernetes):
    labels = {"partway.dev/job": "foreign-pod", "partway.dev/role": "worker", "partway.dev/index": "0"}
    other = {
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": "foreign-pod-worker-0", "labels": {**labels, "partway.dev/attempt": "0.0"}},
        "spec": {"containers": [{"name": "main", "image": "local", "command": ["sleep", "600"]}]},
    }  # fmt: skip
    cluster.apply(json.dumps(other))
    cluster.until(lambda: cluster.get("pod", "foreign-pod-worker-0")["status"]["phase"] == "Running", "the other's pod")
    runs_when_free(cluster, "foreign-pod", "pod", "foreign-pod-worker-0")


def test_a_service_of_another_is_not_taken_for_its_own_and_no_pod_begins(cluster: Kubernetes):
    other = {
        "apiVersion": "v1", "kind": "Service", "metadata": {"name": "foreign-service-scheduler"},
        "spec": {"clusterIP": "None", "ports": [{"port": 8118}]},
    }  # fmt: skip
    cluster.apply(json.dumps(other))
    runs_when_free(cluster, "foreign-service", "service", "foreign-service-scheduler")


def test_a_secret_whose_value_another_knows_is_not_the_jobs(cluster: Kubernetes):
    name = "foreign-secret"
    other = {
        "apiVersion": "v1", "kind": "Secret", "metadata": {"name": f"{name}-secret"}, "stringData": {"secret": "known"}
    }  # fmt: skip
    cluster.apply(json.dumps(other))
    code = "import os, time; print('known' in os.environ['PARTWAY_JOB_SECRET'], flush=True); time.sleep(600)"
    roles = {"Scheduler": (1, "OnFailure"), "Worker": (1, "OnFailure")}
    cluster.apply(job(name, roles, [sys.executable, "-c", code]))
    cluster.until(lambda: cluster.log(f"{name}-worker-0"), "what the worker says")
    assert cluster.log(f"{name}-worker-0") == "False\n"
    own = cluster.status(name)["secret"]
    assert own.startswith(f"{name}-secret-")
    (owner,) = cluster.get("secret", own)["metadata"]["ownerReferences"]
    assert owner["uid"] == cluster.get("pwj", name)["metadata"]["uid"]
    assert "immutable" in cluster.kubectl(
        "patch", "secret", own, "--type=merge", "-p", '{"stringData": {"secret": "known"}}', check=False
    )
    cluster.kubectl("delete", "secret", f"{name}-secret")


# -- What is installed


def test_the_definition_goes_and_comes_again_under_a_running_operator_and_a_new_one(cluster: Kubernetes):
    urls = [f"http://127.0.0.1:{free_port()}/healthz" for _ in range(2)]
    cluster.kill("operator", signal.SIGTERM)
    cluster.start_operator("operator-1", "--health", urls[0])
    try:
        cluster.until(lambda: health(urls[0])[0] == 200, "health")
        cluster.kubectl("delete", "crd", "partwayjobs.partway.dev")
        cluster.start_operator("operator-2", "--health", urls[1])
        for url in urls:
            cluster.until(lambda url=url: health(url)[0] == 503 and "define it" in health(url)[1], "503")
        cluster.install()
        cluster.apply(alone("defined", code="pass"))
        cluster.until_phase("defined", "Succeeded")
        for url in urls:
            cluster.until(lambda url=url: health(url)[0] == 200, "health")
        cluster.kill("operator-1", signal.SIGTERM)  # each of them serves
        cluster.apply(alone("again", code="pass"))
        cluster.until_phase("again", "Succeeded")
    finally:
        for name in [each for each in cluster.processes if each.startswith("operator-")]:
            cluster.kill(name, signal.SIGTERM)
        cluster.start_operator()


def test_an_operator_that_starts_while_the_api_server_is_away_serves_when_that_is_back(cluster: Kubernetes):
    url = f"http://127.0.0.1:{free_port()}/healthz"
    cluster.kill("operator", signal.SIGTERM)
    cluster.kill("server")
    cluster.start_operator("operator-early", "--health", url)
    try:
        cluster.until(lambda: health(url)[0] == 503, "503")
        cluster.start_server()
        cluster.apply(alone("early", code="pass"))
        cluster.until_phase("early", "Succeeded")
        cluster.until(lambda: health(url)[0] == 200, "health")
    finally:
        if "server" not in cluster.processes:
            cluster.start_server()
        cluster.kill("operator-early", signal.SIGTERM)
        cluster.start_operator()


def test_an_operator_of_one_namespace_serves_it_and_may_do_nothing_in_others(cluster: Kubernetes):
    cluster.kubectl("create", "namespace", "here")
    cluster.install("--namespace", "here-system", "--watch", "here")
    lease = ["--lease", "here-system/partway-operator", "--namespace", "here"]
    cluster.kill("operator", signal.SIGTERM)  # so that the other one serves
    cluster.start_operator("operator-here", *lease, namespace="here-system")
    try:
        cluster.kubectl("-n", "here", "apply", "-f", "-", given=alone("own", code="pass"))
        phase = ["-n", "here", "get", "pwj", "own", "-o", "jsonpath={.status.phase}"]
        cluster.until(lambda: cluster.kubectl(*phase) == "Succeeded", "success")

        def may(verb: str, kind: str, namespace: str) -> bool:
            account = "system:serviceaccount:here-system:partway-operator"
            said = cluster.kubectl("auth", "can-i", verb, kind, "-n", namespace, "--as", account, check=False)
            return said.strip() == "yes"

        for verb, kind in (("create", "pods"), ("list", "partwayjobs"), ("create", "secrets")):
            assert may(verb, kind, "here")
            assert not may(verb, kind, "default")
        assert may("update", "leases/partway-operator", "here-system")
        assert not may("update", "leases/another", "here-system")
        assert not may("create", "leases", "here")
        assert not may("get", "secrets", "here")
        account = "system:serviceaccount:partway-system:partway-operator"
        for verb in ("get", "create", "update"):
            said = cluster.kubectl("auth", "can-i", verb, "leases", "-n", "default", "--as", account, check=False)
            assert said.strip() == "no"
    finally:
        cluster.kill("operator-here", signal.SIGTERM)
        cluster.start_operator()
        cluster.kubectl("delete", "namespace", "here", "here-system", "--wait=false")


def test_kubectl_get_all_shows_jobs_and_their_conditions_have_times(cluster: Kubernetes):
    cluster.apply(alone("all"))
    cluster.until_phase("all", "Running")
    assert re.search(r"^partwayjob.partway.dev/all +Running", cluster.kubectl("get", "all"), re.M)
    for each in conditions(cluster, "all").values():
        assert each.keys() == {"type", "status", "reason", "message", "lastTransitionTime"}
        assert each["lastTransitionTime"] >= cluster.get("pwj", "all")["metadata"]["creationTimestamp"]


# -- Many


def memory(pid: int) -> float:
    """Megabytes of a process."""
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


@pytest.mark.timeout(3600)
def test_200_jobs_of_8_workers_at_once(cluster: Kubernetes):
    cluster.kill("operator", signal.SIGTERM)
    cluster.start_operator("operator-many")
    process = cluster.processes["operator-many"]
    time.sleep(5)
    sizes = [memory(process.pid)]
    for again in range(2):
        began = time.monotonic()
        names = [f"many-{again}-{i}" for i in range(200)]
        roles = {"Scheduler": (1, "OnFailure"), "Worker": (8, "OnFailure")}
        cluster.apply("\n---\n".join(job(name, roles, ["true"], "done") for name in names))

        def done() -> bool:
            phases = [(each.get("status") or {}).get("phase") for each in cluster.get("pwj")]
            return len(phases) == 200 and set(phases) == {"Succeeded"}

        cluster.until(done, "200 jobs", 1500, every=5)
        told(f"200 jobs of 8 workers: {time.monotonic() - began:.0f} s")
        cluster.kubectl("delete", "pwj", "--all", "--wait=false")
        cluster.until(lambda: not cluster.get("pods") and not cluster.get("pwj"), "end of all", 900, every=5)
        sizes.append(memory(process.pid))
    for again in range(2):
        some = [f"many-{again}-{i}-worker-{k}" for i in range(0, 200, 20) for k in range(8)]
        assert all(len(cluster.starts(pod)) == 1 for pod in some)
    cluster.kill("operator-many", signal.SIGTERM)
    said = (cluster.folder / "operator-many.log").read_text()
    (counts,) = re.findall(r"ends after (\d+) looks at jobs, with (\d+) calls", said)
    looks, calls = (int(each) / 400 for each in counts)
    told(f"{looks:.1f} looks and {calls:.1f} calls a job; MB of the operator: {[round(size) for size in sizes]}")
    assert calls < 100
    assert sizes[2] < sizes[1] + 4  # what it holds is the same; see test_kubernetes_outages.py
    cluster.start_operator()


# -- The page


def test_each_command_of_the_page_runs(cluster: Kubernetes, tmp_path: Path):
    """From an empty folder; what it says of the job is so."""
    page = (Path(__file__).parents[3] / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```sh\n(.*?)```", page, re.S)
    assert len(blocks) == 4
    hanging = blocks.pop()
    blocks.insert(2, hanging)  # while there is a job
    (cluster.folder / "train.py").write_text(RANKS.replace("int(sys.argv[1])", "10_000"))
    path = os.pathsep.join([str(kubernetes_server.BUILT), str(Path(sys.executable).parent), os.environ["PATH"]])
    said = []
    for block in blocks:
        done = subprocess.run(
            ["bash", "-ec", block], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=200,
            env={**os.environ, "PATH": path, "KUBECONFIG": str(cluster.config)},
        )  # fmt: skip
        assert done.returncode == 0, f"{block}\n{done.stdout}{done.stderr}\n{cluster.said()}"
        said.append(done.stdout)
    assert "nothing is wrong with it" in said[1]
    assert re.search(r"^NAME +PHASE +READY +RESTARTS +AGE\ntrain +Running +5/5 +0 ", said[1], re.M)
    assert "JobRunning" in said[2]
    (example,) = re.findall(r"```yaml\n(.*?)```", page, re.S)
    assert manifests.check(example) == []
    cluster.kubectl("apply", "--dry-run=server", "-f", "-", given=example)
