"""The shell around decisions, with an API server in memory that refuses, conflicts and goes away."""

from __future__ import annotations

import asyncio
import copy
import json
import time
from types import SimpleNamespace
from typing import Any

import pytest
from operator_world import a_job

from partway.operator import shell
from partway.operator.cluster import Cluster
from partway.operator.observed import JOB
from partway.operator.shell import Operator


class Refusal(Exception):
    """As kubernetes.client.ApiException."""

    def __init__(self, status: int, message: str = "no") -> None:
        super().__init__(message)
        self.status, self.reason, self.body = status, message, json.dumps({"message": message})


class Api:
    """What the operator calls of Kubernetes' client, on a dict. `fails`: by method, what it raises, once each."""

    ApiException = Refusal

    def __init__(self, job: dict[str, Any]) -> None:
        self.objects: dict[tuple[str, str], dict[str, Any]] = {("job", "job"): job}
        job["metadata"]["resourceVersion"] = "1"
        self.fails: dict[str, list[Exception]] = {}
        self.calls: list[str] = []
        self.events: list[dict[str, Any]] = []
        self.CoreV1Api = self.CustomObjectsApi = lambda: self
        self.V1DeleteOptions = self.V1Preconditions = SimpleNamespace

    def __getattr__(self, name: str) -> Any:
        verb, _, kind = name.partition("_namespaced_")
        if not kind:
            raise AttributeError(name)

        def call(*arguments: Any, **options: Any) -> Any:
            self.calls.append(name)
            if self.fails.get(name):
                raise self.fails[name].pop(0)
            return getattr(self, f"_{verb}")(kind, arguments, options)

        return call

    @property
    def job(self) -> dict[str, Any]:
        return self.objects["job", "job"]

    def names(self, kind: str) -> list[str]:
        return sorted(name for each, name in self.objects if each == kind)

    def _get(self, kind: str, arguments: Any, options: Any) -> Any:
        if ("job", arguments[-1]) not in self.objects:
            raise Refusal(404)
        return copy.deepcopy(self.objects["job", arguments[-1]])

    def _list(self, kind: str, arguments: Any, options: Any) -> Any:
        name = options.get("field_selector", "").removeprefix("metadata.name=")
        label = options.get("label_selector", "").removeprefix(f"{JOB}=")
        items = [
            each
            for (its, own), each in self.objects.items()
            if its == kind and name in ("", own) and label in ("", each["metadata"].get("labels", {}).get(JOB))
        ]
        return SimpleNamespace(data=json.dumps({"items": items}))

    def _replace(self, kind: str, arguments: Any, options: Any) -> Any:
        body = arguments[-1]
        if body["metadata"]["resourceVersion"] != self.job["metadata"]["resourceVersion"]:
            raise Refusal(409)
        self.job["status"] = body["status"]
        self.job["metadata"]["resourceVersion"] = str(int(self.job["metadata"]["resourceVersion"]) + 1)
        return copy.deepcopy(self.job)

    def _create(self, kind: str, arguments: Any, options: Any) -> Any:
        body = copy.deepcopy(arguments[-1])
        if kind == "event":
            self.events.append(body)
            return None
        if "generateName" in body["metadata"]:
            body["metadata"]["name"] = f"{body['metadata'].pop('generateName')}{len(self.calls)}"
        key = kind, body["metadata"]["name"]
        if key in self.objects:
            raise Refusal(409)
        body["metadata"]["uid"] = str(len(self.calls))
        self.objects[key] = body
        return SimpleNamespace(data=json.dumps(body))

    def _delete(self, kind: str, arguments: Any, options: Any) -> None:
        key = ("job" if kind == "custom_object" else kind), arguments[4 if kind == "custom_object" else 0]
        if key not in self.objects:
            raise Refusal(404)
        wanted = getattr(getattr(options.get("body"), "preconditions", None), "uid", None)
        if wanted is not None and wanted != self.objects[key]["metadata"]["uid"]:
            raise Refusal(409)
        del self.objects[key]


@pytest.fixture
def api() -> Api:
    return Api(a_job(workers=2))


def operator(api: Api) -> Operator:
    return Operator(Cluster(api), lambda: 1000.0)


def rest(own: Operator) -> float | None:
    for _ in range(10):
        again = own.look("default", "job")
        if again != 0.0:
            return again
    raise AssertionError("it does not come to rest")


def test_a_job_gets_its_pods_its_service_and_its_secret(api: Api):
    rest(operator(api))
    assert api.names("pod") == ["job-scheduler-0", "job-worker-0", "job-worker-1"]
    assert api.names("service") == ["job-scheduler"]
    (secret,) = api.names("secret")
    assert secret.startswith("job-secret-")
    assert api.job["status"]["secret"] == secret
    assert [each["reason"] for each in api.events] == ["JobCreated"]
    assert api.job["status"]["phase"] == "Created"


def test_a_look_at_what_is_right_writes_nothing(api: Api):
    own = operator(api)
    rest(own)
    rest(own)
    api.calls.clear()
    rest(own)
    assert sorted(api.calls) == ["get_namespaced_custom_object", "list_namespaced_pod", "list_namespaced_service"]


def test_a_job_that_is_gone_is_nothing_to_do(api: Api):
    del api.objects["job", "job"]
    assert operator(api).look("default", "job") is None


@pytest.mark.parametrize("status", [404, 409])
def test_a_status_that_was_changed_meanwhile_has_it_looked_at_again_and_nothing_done(api: Api, status: int):
    api.fails["replace_namespaced_custom_object_status"] = [Refusal(status)]
    assert operator(api).look("default", "job") == 0.0
    assert api.names("pod") == []


def test_two_operators_make_each_pod_once(api: Api):
    one, other = operator(api), operator(api)
    for _ in range(3):
        one.look("default", "job")
        other.look("default", "job")
    assert len(api.names("pod")) == 3
    assert sum(each["reason"] == "JobCreated" for each in api.events) == 1


def test_what_a_quota_forbids_is_said_and_tried_again(api: Api):
    full = 'pods "job-worker-1" is forbidden: exceeded quota: few, used: pods=2, limited: pods=2'
    api.fails["create_namespaced_pod"] = [Refusal(403, full)] * 9
    own = operator(api)
    assert rest(own) == 10.0
    (condition,) = [each for each in api.job["status"]["conditions"] if each["type"] == "Running"]
    assert condition["reason"] == "PodRefused"
    assert condition["message"] == f"Scheduler 0 was refused: {full}"
    assert api.events[-1]["type"] == "Warning"
    api.fails.clear()
    rest(own)
    assert len(api.names("pod")) == 3


def test_what_the_server_cannot_do_now_is_an_error_of_this_look(api: Api):
    api.fails["create_namespaced_pod"] = [Refusal(500)]
    with pytest.raises(Refusal):
        operator(api).look("default", "job")
    rest(operator(api))
    assert len(api.names("pod")) == 3


def test_a_pod_of_another_job_of_this_name_is_not_taken_for_its_own(api: Api):
    rest(operator(api))
    api.job["metadata"]["uid"] = "a new job"
    api.job["status"] = {}
    rest(operator(api))
    assert api.job["status"]["replicaStatuses"] == {}
    assert len(api.names("pod")) == 3  # garbage collection takes those of the old one; then the names are free


def test_a_pod_is_deleted_only_if_it_is_still_that_one(api: Api):
    own = operator(api)
    rest(own)
    cluster = Cluster(api)
    with pytest.raises(Refusal):
        cluster.delete_pod("default", "job-worker-0", "another uid")
    cluster.delete_pod("default", "job-worker-0", api.objects["pod", "job-worker-0"]["metadata"]["uid"])
    cluster.delete_pod("default", "job-worker-0", "gone")
    assert "job-worker-0" not in api.names("pod")


def test_events_that_come_together_are_one_look(api: Api):
    own, looks = operator(api), []
    own.look = lambda *key: looks.append(key)  # type: ignore[method-assign, assignment, func-returns-value]

    async def run() -> None:
        for _ in range(50):
            own.touch("default", "job", 0.02)
            own.touch("default", "other", 0.02)
        await asyncio.sleep(0.2)

    asyncio.run(run())
    assert sorted(looks) == [("default", "job"), ("default", "other")]


def test_a_job_that_cannot_be_looked_at_does_not_stop_the_others(api: Api, monkeypatch: pytest.MonkeyPatch):
    own, looks, said = operator(api), [], []
    monkeypatch.setattr(shell.logger, "warning", lambda text, *values: said.append(text % values))

    def look(namespace: str, name: str) -> None:
        looks.append(name)
        if name == "bad":
            raise Refusal(500, "the server is ill")

    own.look = look  # type: ignore[method-assign, assignment]

    async def run() -> None:
        own.touch("default", "bad", 0.0)
        await asyncio.sleep(0.05)
        own.touch("default", "job", 0.0)
        await asyncio.sleep(0.1)

    asyncio.run(run())
    assert looks == ["bad", "job"]
    assert said == [f"default/bad: the server is ill; looked at again in {shell.AGAIN:g} s"]


def test_what_happens_while_a_job_is_looked_at_has_it_looked_at_once_more(api: Api):
    own, looks = operator(api), []

    async def run() -> None:
        loop = asyncio.get_running_loop()

        def look(*key: str) -> None:
            looks.append(key)
            if len(looks) == 1:
                asyncio.run_coroutine_threadsafe(touched(), loop).result()

        async def touched() -> None:
            own.touch("default", "job", 0.0)
            await asyncio.sleep(0.05)

        own.look = look  # type: ignore[method-assign, assignment]
        own.touch("default", "job", 0.0)
        end = time.monotonic() + 20
        while len(looks) < 2 and time.monotonic() < end:
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.5)

    asyncio.run(run())
    assert len(looks) == 2


# -- What has a name of the job's, and is another's


def a_stranger(name: str, owner: str | None = None) -> dict[str, Any]:
    """With the labels of a job's, which anybody may give."""
    labels = {JOB: "job", "partway.dev/role": "worker", "partway.dev/index": "0", "partway.dev/attempt": "0.0"}
    owners = [{"kind": "PartwayJob", "name": "job", "uid": owner}] if owner else []
    return {"metadata": {"name": name, "uid": "of-the-stranger", "labels": labels, "ownerReferences": owners}}


def condition(api: Api, kind: str) -> dict[str, Any]:
    found: dict[str, Any] = next((each for each in api.job["status"]["conditions"] if each["type"] == kind), {})
    return found


@pytest.mark.parametrize(
    ("kind", "name"), [("pod", "job-worker-0"), ("pod", "job-scheduler-0"), ("service", "job-scheduler")]
)
@pytest.mark.parametrize("owner", [None, "another-job"])
def test_a_foreign_object_of_a_name_that_it_needs_is_a_condition_and_an_event(
    api: Api, kind: str, name: str, owner: str | None
):
    stranger = a_stranger(name, owner)
    api.objects[kind, name] = copy.deepcopy(stranger)
    own = operator(api)
    assert rest(own) == 10.0
    whose = "belongs to PartwayJob job (uid another-job)" if owner else "has no owner"
    said = f'{kind} "{name}" is there and {whose}, so it is not of this job; delete it, or give the job another name'
    conflict = condition(api, "Conflict")
    assert (conflict["status"], conflict["reason"], conflict["message"]) == ("True", "NameTaken", said)
    (event,) = [each for each in api.events if each["reason"] == "NameTaken"]
    assert (event["type"], event["message"], event["involvedObject"]["name"]) == ("Warning", said, "job")
    assert condition(api, "Running").get("status") != "True"
    assert api.objects[kind, name] == stranger  # neither changed nor deleted
    rest(own)
    rest(operator(api))  # a new one, which remembers nothing
    assert [each["reason"] for each in api.events].count("NameTaken") == 1
    assert condition(api, "Conflict") == conflict
    del api.objects[kind, name]
    rest(own)
    assert condition(api, "Conflict")["status"] == "False"
    assert len(api.names("pod")) == 3


def test_no_process_begins_while_the_service_is_another_s(api: Api):
    """They would ask a stranger who they are to work with."""
    api.objects["service", "job-scheduler"] = a_stranger("job-scheduler")
    rest(operator(api))
    assert api.names("pod") == []


def test_a_secret_that_somebody_else_has_made_is_not_the_jobs(api: Api):
    for name in ("job-secret", "job-secret-"):
        api.objects["secret", name] = a_stranger(name, api.job["metadata"]["uid"])
    rest(operator(api))
    own = api.job["status"]["secret"]
    assert own not in ("job-secret", "job-secret-")
    for name in api.names("pod"):
        variables = api.objects["pod", name]["spec"]["containers"][0]["env"]
        (secret,) = [each["valueFrom"]["secretKeyRef"] for each in variables if each["name"] == "PARTWAY_JOB_SECRET"]
        assert secret["name"] == own


def test_pods_begin_with_no_secret_but_that_of_the_status(api: Api):
    """The one that was made belongs to nobody if its name could not be written; another look makes another one."""
    own = operator(api)
    original = api._replace

    def conflict(kind: str, arguments: Any, options: Any) -> Any:
        if "secret" in arguments[-1]["status"]:
            api._replace = original  # type: ignore[method-assign]
            raise Refusal(409)
        return original(kind, arguments, options)

    api._replace = conflict  # type: ignore[method-assign]
    assert own.look("default", "job") == 0.0
    assert api.names("pod") == []
    rest(own)
    assert len(api.names("secret")) == 2
    assert api.job["status"]["secret"] in api.names("secret")
    assert len(api.names("pod")) == 3


def test_a_secret_that_is_refused_is_said_and_no_pod_begins(api: Api):
    api.fails["create_namespaced_secret"] = [Refusal(403, "exceeded quota: few")] * 9
    rest(operator(api))
    assert condition(api, "Running")["message"] == "the secret was refused: exceeded quota: few"
    assert api.names("pod") == []


def test_when_a_job_is_over_the_service_of_another_stays(api: Api):
    """It has been made in the place of the job's own, after that was read."""
    own = operator(api)
    rest(own)
    uid = api.objects["service", "job-scheduler"]["metadata"]["uid"]
    api.objects["service", "job-scheduler"] = a_stranger("job-scheduler")
    with pytest.raises(Refusal):
        Cluster(api).delete_service("default", "job-scheduler", uid)
    for name in api.names("pod"):
        api.objects["pod", name]["status"] = {"phase": "Succeeded"}
    rest(own)
    assert api.job["status"]["phase"] == "Succeeded"
    assert "job-scheduler" in api.names("service")


def test_while_some_run_it_is_still_said_that_a_name_is_taken():
    api = Api(a_job(workers=2, elastic={"minWorkers": 1}))
    api.objects["pod", "job-worker-1"] = a_stranger("job-worker-1")
    own = operator(api)
    rest(own)
    for name in ("job-scheduler-0", "job-worker-0"):
        api.objects["pod", name]["status"] = {"phase": "Running"}
    rest(own)
    assert condition(api, "Running")["status"] == "True"
    assert 'pod "job-worker-1"' in condition(api, "Conflict")["message"]
