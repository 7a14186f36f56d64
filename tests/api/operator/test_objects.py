"""The objects that a job is made of, what installs the operator, and what is read of pods."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from operator_world import a_job
from typer.testing import CliRunner

import partway
from partway.cli import app
from partway.operator import manifests, pods
from partway.operator.crd import definition
from partway.operator.observed import Condition, Pod, Status, pods_of
from partway.operator.spec import parsed
from partway.strategy import RuntimeStateError


def made(job: dict[str, Any], role: str, index: int = 0) -> dict[str, Any]:
    spec, problems = parsed(job)
    assert spec is not None, problems
    return pods.pod(job, spec, role, index, "0.0")


def variables(pod: dict[str, Any]) -> dict[str, Any]:
    return {each["name"]: each.get("value", each.get("valueFrom")) for each in pod["spec"]["containers"][0]["env"]}


def test_a_worker_finds_its_scheduler():
    given = variables(made(a_job(workers=3, servers=2), "Worker", 1))
    assert given == {
        "HOME": "/tmp", "MS_ROLE": "MS_WORKER", "MS_SCHED_HOST": "job-scheduler", "MS_SCHED_PORT": "8118",
        "MS_WORKER_NUM": "3", "MS_SERVER_NUM": "2", "MS_NODE_ID": "1", "PARTWAY_READY_FILE": "/tmp/partway-ready",
        "PARTWAY_JOB_SECRET": {"secretKeyRef": {"name": "job-secret", "key": "secret"}},
    }  # fmt: skip


def test_the_scheduler_listens_at_its_own_address():
    given = variables(made(a_job(workers=3), "Scheduler"))
    assert given["MS_ROLE"] == "MS_SCHED"
    assert given["MS_SCHED_HOST"] == {"fieldRef": {"fieldPath": "status.podIP"}}
    assert "MS_SERVER_NUM" not in given
    assert "MS_NODE_ID" not in given


def test_a_worker_alone_has_no_variables_of_a_scheduler():
    assert variables(made(a_job(), "Worker")) == {"HOME": "/tmp"}


def test_ranks_that_recover_are_told_so():
    assert variables(made(a_job(workers=3, elastic={"minWorkers": 2}), "Worker"))["MS_ENABLE_RECOVERY"] == "1"
    assert "MS_ENABLE_RECOVERY" not in variables(made(a_job(workers=3, servers=1, elastic={"minWorkers": 2}), "Worker"))


def test_pods_belong_to_the_job_and_may_do_little():
    pod = made(a_job(workers=2), "Worker", 1)
    assert pod["metadata"]["name"] == "job-worker-1"
    assert pod["metadata"]["ownerReferences"][0]["uid"] == "of-the-job"
    assert pod["metadata"]["labels"] == {
        "partway.dev/job": "job", "partway.dev/role": "worker", "partway.dev/index": "1",
        "partway.dev/attempt": "0.0", "app.kubernetes.io/managed-by": "partway",
    }  # fmt: skip
    assert pod["spec"]["restartPolicy"] == "Never"
    assert pod["spec"]["automountServiceAccountToken"] is False
    assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
    container = pod["spec"]["containers"][0]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
    }  # fmt: skip
    assert container["resources"]["requests"] == {"cpu": "1", "memory": "1Gi"}
    assert container["readinessProbe"]["exec"]["command"] == ["cat", "/tmp/partway-ready"]
    assert container["volumeMounts"] == [{"name": "partway-tmp", "mountPath": "/tmp"}]


def test_what_the_template_says_stays():
    job = a_job()
    own = {
        "resources": {"limits": {"cpu": "8"}}, "securityContext": {"runAsUser": 5},
        "env": [{"name": "A", "value": "b"}], "volumeMounts": [{"name": "mine", "mountPath": "/tmp"}],
    }  # fmt: skip
    template = job["spec"]["replicaSpecs"]["Worker"]["template"]
    template["metadata"] = {"labels": {"team": "vision"}, "annotations": {"note": "x"}}
    template["spec"]["containers"][0] |= own
    pod = made(job, "Worker")
    container = pod["spec"]["containers"][0]
    assert {name: container[name] for name in ("resources", "securityContext", "volumeMounts")} == {
        name: own[name] for name in ("resources", "securityContext", "volumeMounts")
    }
    assert variables(pod) == {"A": "b", "HOME": "/tmp"}
    assert pod["metadata"]["labels"]["team"] == "vision"
    assert pod["metadata"]["annotations"] == {"note": "x"}
    assert "labels" not in template["metadata"]["labels"]  # the job itself is not changed
    assert len(template["spec"]["containers"][0]["env"]) == 1


def test_certificates_are_mounted():
    pod = made(a_job(workers=2, enableSSL=True, sslSecret="tls"), "Worker")
    assert {"name": "partway-tls", "secret": {"secretName": "tls", "defaultMode": 0o400}} in pod["spec"]["volumes"]
    mount = {"name": "partway-tls", "mountPath": "/etc/partway/tls", "readOnly": True}
    assert mount in pod["spec"]["containers"][0]["volumeMounts"]


def test_the_service_is_headless_and_finds_a_scheduler_that_is_not_ready():
    job = a_job(workers=2, schedulerPort=9000)
    spec, _ = parsed(job)
    assert spec is not None
    service = pods.service(job, spec)
    assert service["spec"] == {
        "clusterIP": "None", "publishNotReadyAddresses": True,
        "selector": {"partway.dev/job": "job", "partway.dev/role": "scheduler"},
        "ports": [{"name": "scheduler", "port": 9000}],
    }  # fmt: skip
    one, two = (pods.secret(job)["stringData"]["secret"] for _ in range(2))
    assert len(one) == 64
    assert one != two


# -- What is read


def a_pod(**status: Any) -> dict[str, Any]:
    pod = made(a_job(workers=2, servers=1), "Worker", 1)
    pod["metadata"]["uid"] = "1"
    return {**pod, "status": status}


def condition(kind: str, status: str, **more: str) -> dict[str, str]:
    return {"type": kind, "status": status, **more}


def container(**state: Any) -> list[dict[str, Any]]:
    return [
        {"name": "main", "ready": False, "state": state},
        {"name": "other", "state": {"terminated": {"exitCode": 9}}},
    ]


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ({}, {"phase": "Pending"}),
        ({"phase": "Running", "conditions": [condition("Ready", "True")]}, {"phase": "Running", "ready": True}),
        (
            {
                "phase": "Failed",
                "containerStatuses": container(terminated={"exitCode": 137, "finishedAt": "1970-01-01T00:01:00Z"}),
            },
            {"phase": "Failed", "code": 137, "finished": 60.0},
        ),
        (
            {"phase": "Failed", "reason": "Evicted", "message": "low on memory"},
            {"phase": "Failed", "trouble": "Evicted: low on memory"},
        ),
        (
            {"phase": "Pending", "containerStatuses": container(waiting={"reason": "ErrImagePull", "message": "no x"})},
            {"trouble": "ErrImagePull: no x"},
        ),
        ({"phase": "Pending", "containerStatuses": container(waiting={"reason": "ContainerCreating"})}, {}),
        (
            {
                "phase": "Pending",
                "conditions": [condition("PodScheduled", "False", reason="Unschedulable", message="0/3 nodes")],
            },
            {"trouble": "Unschedulable: 0/3 nodes"},
        ),
    ],
)  # fmt: skip
def test_what_matters_of_a_pod_is_read(status: dict[str, Any], expected: dict[str, Any]):
    plain = Pod("job-worker-1", "1", "Worker", 1, "0.0", "Pending")
    assert pods_of([a_pod(**status)], "of-the-job") == (replace(plain, **expected),)


def test_pods_of_others_are_left_alone():
    stranger = a_pod()
    assert pods_of([stranger], "of another job of that name") == ()
    stranger["metadata"]["labels"] = {"partway.dev/job": "job"}
    assert pods_of([stranger], "of-the-job") == ()


def test_a_status_is_read_as_it_was_written():
    status = Status(
        "Running", "1/2", 3, 60.0, None, 70.0, 2, 1, {"job-worker-0": 2}, True, 4, "a=b", {"Worker": {"active": 2}},
        (Condition("Running", True, "JobRunning", "it runs", 61.0),),
    )  # fmt: skip
    assert Status.of(json.loads(json.dumps(status.to_api()))) == status
    assert Status.of({}) == Status.of(None) == Status()


# -- What installs it


def test_the_definition_has_a_structural_schema():
    """As Kubernetes asks: each part has a type, and nothing is by reference."""

    def check(schema: dict[str, Any], where: str) -> None:
        assert "type" in schema, where
        assert not schema.keys() & {"$ref", "anyOf", "allOf", "oneOf", "title", "$defs"}, where
        for name, part in schema.get("properties", {}).items():
            check(part, f"{where}.{name}")
        for each in (schema.get("items"), schema.get("additionalProperties")):
            if isinstance(each, dict):
                check(each, where)

    (version,) = definition()["spec"]["versions"]
    check(version["schema"]["openAPIV3Schema"], "")
    assert version["subresources"]["scale"]["specReplicasPath"] == ".spec.replicaSpecs.Worker.replicas"
    assert [each["name"] for each in version["additionalPrinterColumns"]] == ["Phase", "Ready", "Restarts", "Age"]


def test_the_status_of_the_definition_names_all_that_is_written():
    """What a schema does not name is dropped without a word."""
    (version,) = definition()["spec"]["versions"]
    known = version["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"]
    written = Status(start=1.0, end=1.0, restarted=1.0).to_api()
    assert written.keys() == known.keys()


def test_the_operator_may_do_no_more_than_it_does():
    found = {each["kind"]: each for each in manifests.installation("ns", "image")}
    allowed = {rule["resources"][0]: rule["verbs"] for rule in found["ClusterRole"]["rules"]}
    assert allowed == {
        "pods": ["create", "delete", "list", "watch"], "services": ["create", "delete", "list", "watch"],
        "secrets": ["create"], "events": ["create"], "partwayjobs": ["get", "list", "watch", "delete"],
        "partwayjobs/status": ["update"], "leases": ["get", "create", "update"],
    }  # fmt: skip
    pod = found["Deployment"]["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["containers"][0]["args"][:4] == ["operator", "run", "--lease", "ns/partway-operator"]


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["operator", *arguments])


def test_manifests_are_yaml_without_aliases():
    said = run("manifests", "--namespace", "mine", "--image", "registry/operator:1").output
    kinds = [each["kind"] for each in yaml.safe_load_all(said)]
    assert kinds == [
        "Namespace", "CustomResourceDefinition", "ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Deployment",
    ]  # fmt: skip
    assert not re.search(r"[&*]id\d", said)
    assert "registry/operator:1" in said


def test_a_job_is_written_and_has_nothing_wrong(tmp_path: Path):
    said = run("job", "examples/Train_It.py", "--workers", "3", "--servers", "2", "--image", "x", "--", "--epochs", "3")
    assert said.exit_code == 0, said.output
    job = yaml.safe_load(said.output)
    assert job["metadata"]["name"] == "train-it"
    counts = {role: each["replicas"] for role, each in job["spec"]["replicaSpecs"].items()}
    assert counts == {"Scheduler": 1, "PS": 2, "Worker": 3}
    command = job["spec"]["replicaSpecs"]["PS"]["template"]["spec"]["containers"][0]["command"]
    assert command == ["python", "examples/Train_It.py", "--epochs", "3"]
    path = tmp_path / "job.yaml"
    path.write_text(said.output)
    checked = run("check", str(path))
    assert (checked.exit_code, checked.output) == (0, "nothing is wrong with it\n")


def test_a_job_of_one_worker_needs_nobody_else():
    job = yaml.safe_load(run("job", "train.py", "--image", "x").output)
    assert list(job["spec"]["replicaSpecs"]) == ["Worker"]


def test_what_is_wrong_is_said_with_the_file(tmp_path: Path):
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump({**manifests.job("a.py", [], 2, 0, "x"), "kind": "MSJob"}))
    said = run("check", str(path))
    assert said.exit_code == 1
    assert said.output == f"{path}: kind is 'MSJob'; it must be PartwayJob\n"


def test_a_name_that_cannot_be_one_is_an_error():
    said = run("job", "7.py", "--image", "x")
    assert said.exit_code == 2
    assert "partway operator job: metadata.name is '7'; it must be a name of hosts" in said.output


def test_the_operator_without_a_cluster_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    said = run("run")
    assert said.exit_code == 2
    assert "partway operator run: no Kubernetes cluster is configured" in said.output


@pytest.mark.parametrize(
    ("module", "said"), [("yaml", "yaml needs PyYAML"), ("kubernetes", "needs Kubernetes' client")]
)
def test_what_is_missing_names_the_extra(module: str, said: str, monkeypatch: pytest.MonkeyPatch):
    from partway.operator.shell import Cluster

    monkeypatch.setitem(__import__("sys").modules, module, None)
    with pytest.raises(RuntimeStateError, match=re.escape(said) + r".*pip install 'partway\[k8s\]'"):
        Cluster.connected() if module == "kubernetes" else manifests.yaml()


def test_nothing_else_imports_the_operator():
    """It is for clusters alone: neither `import partway` nor any other module needs it."""
    root = Path(str(partway.__file__)).parent
    others = [path for path in root.rglob("*.py") if path.parent.name != "operator" and path.name != "cli.py"]
    assert len(others) > 100
    assert [path for path in others if "partway.operator" in path.read_text(encoding="utf-8")] == []
