"""What is read of pods, and the status as it is written and read back."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from operator_world import a_job

from partway.operator import pods
from partway.operator.observed import Condition, Pod, Status, pods_of
from partway.operator.spec import parsed


def a_pod(**status: Any) -> dict[str, Any]:
    job = a_job(workers=2, servers=1)
    spec, _ = parsed(job)
    assert spec is not None
    job["status"] = {"secret": "job-secret-1"}
    pod = pods.pod(job, spec, "Worker", 1, "0.0")
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
        "Running", "1/2", 3, 60.0, None, 70.0, 2, 1, {"job-worker-0": 2}, True, 4, "a=b", "job-secret-1",
        {"Worker": {"active": 2}},
        (Condition("Running", True, "JobRunning", "it runs", 61.0),),
    )  # fmt: skip
    assert Status.of(json.loads(json.dumps(status.to_api()))) == status
    assert Status.of({}) == Status.of(None) == Status()
