"""What the API is asked for, on a server in memory over HTTP by the Kubernetes client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from api_server_in_memory import JOBS, ApiServer
from kubernetes import client
from operator_world import a_job

from partway.operator import pods
from partway.operator.cluster import ChangedError, Cluster, NameTakenError, Timed
from partway.operator.spec import parsed


@pytest.fixture
def server() -> Iterator[ApiServer]:
    own = ApiServer()
    with own.answering():
        yield own


@pytest.fixture
def cluster(server: ApiServer) -> Cluster:
    return Cluster(client)


@pytest.fixture
def job(server: ApiServer) -> dict[str, Any]:
    return server.put(JOBS, a_job(workers=2)) | {"status": {"secret": "job-secret-x"}}


def body_of(kind: str, job: dict[str, Any]) -> dict[str, Any]:
    spec, _ = parsed(job)
    assert spec is not None
    return pods.service(job, spec) if kind == "service" else pods.pod(job, spec, "Worker", 0, "0.0")


@pytest.mark.parametrize(("kind", "name"), [("pod", "job-worker-0"), ("service", "job-scheduler")])
def test_what_has_the_name_and_is_not_the_jobs_is_another_s(
    server: ApiServer, cluster: Cluster, job: dict[str, Any], kind: str, name: str
):
    server.put(f"{kind}s", {"metadata": {"name": name, "labels": body_of(kind, job)["metadata"]["labels"]}})
    said = f'^{kind} "{name}" is there and has no owner, so it is not of this job; delete it, or give the job another'
    with pytest.raises(NameTakenError, match=said):
        cluster.make(kind, body_of(kind, job))


def test_an_object_of_an_earlier_job_of_this_name_is_another_s(
    server: ApiServer, cluster: Cluster, job: dict[str, Any]
):
    earlier = {**job, "metadata": {**job["metadata"], "uid": "earlier"}}
    cluster.make("pod", body_of("pod", earlier))
    with pytest.raises(NameTakenError, match=r"belongs to PartwayJob job \(uid earlier\)"):
        cluster.make("pod", body_of("pod", job))


def test_what_the_job_has_is_made_once(server: ApiServer, cluster: Cluster, job: dict[str, Any]):
    for _ in range(2):
        cluster.make("pod", body_of("pod", job))
    assert server.names("pods") == ["job-worker-0"]


def test_a_service_is_deleted_only_if_it_is_still_that_one(server: ApiServer, cluster: Cluster, job: dict[str, Any]):
    cluster.make("service", body_of("service", job))
    with pytest.raises(client.ApiException):
        cluster.delete_service("default", "job-scheduler", "another")
    assert server.names("services") == ["job-scheduler"]
    cluster.delete_service("default", "job-scheduler", server.get("services", "job-scheduler")["metadata"]["uid"])
    assert server.names("services") == []


def test_each_secret_is_a_new_one(server: ApiServer, cluster: Cluster, job: dict[str, Any]):
    names = {cluster.make_secret(pods.secret(job)) for _ in range(2)}
    assert len(names) == 2
    assert names == set(server.names("secrets"))


def test_a_status_is_written_over_the_one_that_was_read(server: ApiServer, cluster: Cluster, job: dict[str, Any]):
    read = cluster.job("default", "job")
    assert read is not None
    written = cluster.write_status(read, {"phase": "Created"})
    assert written["status"] == {"phase": "Created"}
    assert written["metadata"]["resourceVersion"] != read["metadata"]["resourceVersion"]
    with pytest.raises(ChangedError):
        cluster.write_status(read, {"phase": "Running"})
    server.remove(JOBS, "job")
    with pytest.raises(ChangedError):
        cluster.write_status(written, {"phase": "Running"})


def test_jobs_and_their_objects_are_read_in_all_namespaces_or_in_one(
    server: ApiServer, cluster: Cluster, job: dict[str, Any]
):
    other = a_job(name="other")
    other["metadata"]["namespace"] = "elsewhere"
    server.put(JOBS, other)
    server.put("pods", {"metadata": {"name": "stranger"}})
    cluster.make("pod", body_of("pod", job))

    def names(kind: str, namespace: str | None) -> list[str]:
        answer = cluster.reader(kind, namespace)(_preload_content=False)
        return [each["metadata"]["name"] for each in answer.json()["items"]]

    assert names(JOBS, None) == ["job", "other"]
    assert names(JOBS, "elsewhere") == ["other"]
    assert names("pods", None) == names("pods", "default") == ["job-worker-0"]
    assert names("services", "elsewhere") == []


def test_each_request_has_an_end():
    class Api:
        def read(self, **options: Any) -> dict[str, Any]:
            return options

    assert Timed(Api(), 3.0).read(name="a") == {"name": "a", "_request_timeout": 3.0}
    assert Timed(Api(), 3.0).read(_request_timeout=90.0) == {"_request_timeout": 90.0}
