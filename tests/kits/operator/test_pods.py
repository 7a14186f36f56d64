"""The objects that a job is made of."""

from __future__ import annotations

from typing import Any

from operator_world import a_job

from partway.operator import pods
from partway.operator.spec import parsed


def made(job: dict[str, Any], role: str, index: int = 0) -> dict[str, Any]:
    spec, problems = parsed(job)
    assert spec is not None, problems
    job["status"] = {"secret": "job-secret-x1"}
    return pods.pod(job, spec, role, index, "0.0")


def variables(pod: dict[str, Any]) -> dict[str, Any]:
    return {each["name"]: each.get("value", each.get("valueFrom")) for each in pod["spec"]["containers"][0]["env"]}


def test_a_worker_finds_its_scheduler():
    given = variables(made(a_job(workers=3, servers=2), "Worker", 1))
    assert given == {
        "HOME": "/tmp", "MS_ROLE": "MS_WORKER", "MS_SCHED_HOST": "job-scheduler", "MS_SCHED_PORT": "8118",
        "MS_WORKER_NUM": "3", "MS_SERVER_NUM": "2", "MS_NODE_ID": "1", "PARTWAY_READY_FILE": "/tmp/partway-ready",
        "PARTWAY_JOB_SECRET": {"secretKeyRef": {"name": "job-secret-x1", "key": "secret"}},
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
        "partway.dev/job": "job", "partway.dev/job-uid": "of-the-job", "partway.dev/role": "worker",
        "partway.dev/index": "1", "partway.dev/attempt": "0.0", "app.kubernetes.io/managed-by": "partway",
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
    assert {"name": "partway-tls", "secret": {"secretName": "tls", "defaultMode": 0o440}} in pod["spec"]["volumes"]
    mount = {"name": "partway-tls", "mountPath": "/etc/partway/tls", "readOnly": True}
    assert mount in pod["spec"]["containers"][0]["volumeMounts"]


def test_the_service_is_headless_and_finds_a_scheduler_that_is_not_ready():
    job = a_job(workers=2, schedulerPort=9000)
    spec, _ = parsed(job)
    assert spec is not None
    service = pods.service(job, spec)
    assert service["spec"] == {
        "clusterIP": "None", "publishNotReadyAddresses": True,
        "selector": {"partway.dev/job": "job", "partway.dev/job-uid": "of-the-job", "partway.dev/role": "scheduler"},
        "ports": [{"name": "scheduler", "port": 9000}],
    }  # fmt: skip


def test_a_secret_has_a_name_and_a_value_that_nobody_can_know():
    one, two = (pods.secret(a_job()) for _ in range(2))
    assert one["metadata"]["generateName"] == "job-secret-"
    assert "name" not in one["metadata"]
    assert one["immutable"] is True
    assert len(one["stringData"]["secret"]) == 64
    assert one["stringData"] != two["stringData"]
