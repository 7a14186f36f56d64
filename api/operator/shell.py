"""The operator as a process: kopf watches jobs, pods and services, and says which job is to be looked at; decision.py
says what is to be done, and this does it by the Kubernetes client.

A job is read, decided on and written anew each time, and by one task at a time; what happens meanwhile has it looked at
once more. Nothing is remembered that a new process would need.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from partway.operator import pods
from partway.operator.decision import (
    Action,
    Decision,
    Delete,
    DeleteJob,
    DeleteService,
    Make,
    MakeService,
    Tell,
    decide,
)
from partway.operator.observed import JOB, pods_of, text_of
from partway.operator.spec import API, GROUP, KIND, PLURAL, VERSION, Spec, parsed
from partway.strategy import RuntimeStateError

logger = logging.getLogger("partway.operator")
GATHER = 0.2  # seconds in which the events of a job are taken together
AGAIN = 5.0  # seconds until a job is looked at again where the API server did not answer as it should
_WORKERS = 8  # jobs that are looked at at the same time

Key = tuple[str, str]  # namespace and name


class Cluster:
    """The API of Kubernetes, as far as the operator uses it."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._core, self._custom = client.CoreV1Api(), client.CustomObjectsApi()
        self.calls = 0

    @classmethod
    def connected(cls) -> Cluster:
        """From within a pod, or by the kubeconfig of this user. Raises RuntimeStateError."""
        try:
            from kubernetes import client, config
        except ImportError as error:
            raise RuntimeStateError("the operator needs Kubernetes' client; pip install 'partway[k8s]'") from error
        try:
            config.load_incluster_config()
        except config.ConfigException:
            try:
                config.load_kube_config()
            except config.ConfigException as error:
                raise RuntimeStateError(f"no Kubernetes cluster is configured: {error}") from error
        return cls(client)

    def job(self, namespace: str, name: str) -> dict[str, Any] | None:
        """A job; None if there is none."""
        method = self._custom.get_namespaced_custom_object
        found: dict[str, Any] | None = self._but(404, method, GROUP, VERSION, namespace, PLURAL, name)
        return found

    def pods(self, namespace: str, name: str) -> list[dict[str, Any]]:
        """The pods with the label of a job, as JSON has them."""
        return self._items(self._core.list_namespaced_pod, namespace, name)

    def services(self, namespace: str, name: str) -> list[dict[str, Any]]:
        """The services with the label of a job."""
        return self._items(self._core.list_namespaced_service, namespace, name)

    def _items(self, method: Any, namespace: str, name: str) -> list[dict[str, Any]]:
        self.calls += 1
        found = method(namespace, label_selector=f"{JOB}={name}", _preload_content=False)
        items: list[dict[str, Any]] = json.loads(found.data)["items"]
        return items

    def write_status(self, job: dict[str, Any], status: dict[str, Any]) -> None:
        """Write the status of a job over the one that was read. Raises ApiException: 409 where another was written."""
        self.calls += 1
        metadata = job["metadata"]
        body = {**job, "status": status}
        self._custom.replace_namespaced_custom_object_status(
            GROUP, VERSION, metadata["namespace"], PLURAL, metadata["name"], body
        )

    def make(self, kind: str, body: dict[str, Any]) -> None:
        """Make a pod, a service, a secret or an event; nothing to do where it is there."""
        method = getattr(self._core, f"create_namespaced_{kind}")
        self._but(409, method, body["metadata"]["namespace"], body, _preload_content=False)

    def delete_pod(self, namespace: str, name: str, uid: str) -> None:
        """Delete a pod, if it is still that one."""
        options = self._client.V1DeleteOptions(preconditions=self._client.V1Preconditions(uid=uid))
        self._but(404, self._core.delete_namespaced_pod, name, namespace, body=options, _preload_content=False)

    def delete_service(self, namespace: str, name: str) -> None:
        """Delete a service."""
        self._but(404, self._core.delete_namespaced_service, name, namespace, _preload_content=False)

    def delete_job(self, job: dict[str, Any]) -> None:
        """Delete a job, with all that belongs to it, if it is still that one."""
        metadata = job["metadata"]
        options = self._client.V1DeleteOptions(
            propagation_policy="Background", preconditions=self._client.V1Preconditions(uid=metadata["uid"])
        )
        method = self._custom.delete_namespaced_custom_object
        self._but(404, method, GROUP, VERSION, metadata["namespace"], PLURAL, metadata["name"], body=options)

    def _but(self, status: int, method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """What a call gives; None where it is answered by `status`."""
        self.calls += 1
        try:
            return method(*arguments, **options)
        except self._client.ApiException as error:
            if error.status == status:
                return None
            raise

    def status_of(self, error: Exception) -> int | None:
        """With what status the API server has refused something; None if `error` is something else."""
        return error.status if isinstance(error, self._client.ApiException) else None


class Operator:
    """Looks at jobs, each as often as something of it changes."""

    def __init__(self, cluster: Cluster, now: Callable[[], float] = time.time) -> None:
        self._cluster, self._now = cluster, now
        self._refused: dict[Key, str] = {}  # why something that was to be made was not
        self._due: dict[Key, asyncio.TimerHandle] = {}
        self._busy: set[Key] = set()
        self._once_more: set[Key] = set()
        self._threads = ThreadPoolExecutor(_WORKERS, "partway operator")
        self._tasks: set[asyncio.Task[None]] = set()
        self.looks = 0

    @property
    def calls(self) -> int:
        """How often the API server was asked."""
        return self._cluster.calls

    # -- When

    def touch(self, namespace: str, name: str, delay: float = GATHER) -> None:
        """Look at a job soon; where it is to be looked at later, sooner."""
        key = namespace, name
        loop = asyncio.get_running_loop()
        when = loop.time() + delay
        if (due := self._due.get(key)) is not None:
            if due.when() <= when:
                return
            due.cancel()
        self._due[key] = loop.call_at(when, self._begin, key)

    def _begin(self, key: Key) -> None:
        self._due.pop(key, None)
        if key in self._busy:
            self._once_more.add(key)
            return
        self._busy.add(key)
        task = asyncio.get_running_loop().create_task(self._looked(key))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _looked(self, key: Key) -> None:
        again: float | None = AGAIN
        try:
            again = await asyncio.get_running_loop().run_in_executor(self._threads, self.look, *key)
        except Exception as error:  # one job must not stop the others
            logger.warning("%s/%s: %s; looked at again in %g s", *key, _first_line(error), AGAIN)
        finally:
            self._busy.discard(key)
            if key in self._once_more:
                self._once_more.discard(key)
                again = 0.0
            if again is not None:
                self.touch(*key, delay=max(again, GATHER))

    # -- What

    def look(self, namespace: str, name: str) -> float | None:
        """Look at a job, and do what is to be done. In how many seconds to look again."""
        key = namespace, name
        self.looks += 1
        job = self._cluster.job(namespace, name)
        if job is None:
            self._refused.pop(key, None)
            return None
        uid = job["metadata"]["uid"]
        own = pods_of(self._cluster.pods(namespace, name), uid)
        services = [
            each["metadata"]["name"]
            for each in self._cluster.services(namespace, name)
            if any(owner["uid"] == uid for owner in each["metadata"].get("ownerReferences") or ())
        ]
        decision = decide(job, own, services, self._now(), self._refused.get(key, ""))
        status = decision.status.to_api()
        if status != (job.get("status") or {}):
            try:
                self._cluster.write_status(job, status)
            except Exception as error:
                if self._cluster.status_of(error) in (404, 409):  # it has changed, or is gone
                    return 0.0
                raise
        return self._carried_out(job, decision)

    def _carried_out(self, job: dict[str, Any], decision: Decision) -> float | None:
        key = job["metadata"]["namespace"], job["metadata"]["name"]
        spec = parsed(job)[0] if decision.actions else None
        refused = ""
        for action in decision.actions:
            try:
                self._act(job, spec, action)
            except Exception as error:
                status = self._cluster.status_of(error)
                if status is None or status >= 500 or not isinstance(action, Make | MakeService):
                    raise
                refused = refused or _refusal(action, error)
        if refused == self._refused.get(key, ""):
            return decision.again
        if refused:
            self._refused[key] = refused
            logger.warning("%s/%s: %s", *key, refused)
        else:
            self._refused.pop(key, None)
        return 0.0  # the status is to say so

    def _act(self, job: dict[str, Any], spec: Spec | None, action: Action) -> None:
        namespace, name = job["metadata"]["namespace"], job["metadata"]["name"]
        match action:
            case Make(role, index, attempt):
                assert spec is not None
                self._cluster.make("pod", pods.pod(job, spec, role, index, attempt))
            case MakeService():
                assert spec is not None
                self._cluster.make("secret", pods.secret(job))
                self._cluster.make("service", pods.service(job, spec))
            case Delete(pod, uid):
                self._cluster.delete_pod(namespace, pod, uid)
            case DeleteService(service):
                self._cluster.delete_service(namespace, service)
            case DeleteJob():
                self._cluster.delete_job(job)
            case Tell(reason, message, warning):
                logger.log(logging.WARNING if warning else logging.INFO, "%s/%s: %s", namespace, name, message)
                self._cluster.make("event", _event(job, reason, message, warning, self._now()))


def _event(job: dict[str, Any], reason: str, message: str, warning: bool, now: float) -> dict[str, Any]:
    metadata, at = job["metadata"], text_of(now)
    about = {
        "apiVersion": API, "kind": KIND, "name": metadata["name"], "namespace": metadata["namespace"],
        "uid": metadata["uid"],
    }  # fmt: skip
    return {
        "metadata": {"generateName": f"{metadata['name']}-", "namespace": metadata["namespace"]},
        "involvedObject": about, "reason": reason, "message": message[:1024],
        "type": "Warning" if warning else "Normal", "firstTimestamp": at, "lastTimestamp": at, "count": 1,
        "source": {"component": "partway-operator"},
    }  # fmt: skip


def _refusal(action: Action, error: Any) -> str:
    """Why the API server did not take something."""
    what = f"{action.role} {action.index}" if isinstance(action, Make) else "the service or the secret"
    try:
        said = json.loads(error.body)["message"]
    except (TypeError, ValueError, KeyError):
        said = f"{error.status} {error.reason}"
    return f"{what} was refused: {said}"


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def run(namespaces: tuple[str, ...] = (), lease: str | None = None, health: str | None = None) -> None:
    """Be the operator, until SIGTERM.

    namespaces   those that it serves; none: all
    lease        NAMESPACE/NAME of a Lease: of several operators the one that holds it works; None: it is alone
    health       where it answers that it lives, such as http://0.0.0.0:8080/healthz

    Raises RuntimeStateError where the extra is missing, or no cluster is configured.
    """
    try:
        import kopf
    except ImportError as error:
        raise RuntimeStateError("the operator needs kopf; pip install 'partway[k8s]'") from error
    operator = Operator(Cluster.connected())
    if lease is not None:
        _lead(lease)
    registry = kopf.OperatorRegistry()
    kopf.on.login(registry=registry)(kopf.login_via_client)

    @kopf.on.startup(registry=registry)
    def settle(settings: kopf.OperatorSettings, **_: Any) -> None:
        settings.posting.enabled = False  # events are ours
        settings.scanning.disabled = True  # neither namespaces nor definitions are watched: less to be allowed
        settings.watching.server_timeout = 300

    @kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)
    async def job_changed(namespace: str | None, name: str, **_: Any) -> None:
        operator.touch(namespace or "", name)

    @kopf.on.cleanup(registry=registry)
    def told(**_: Any) -> None:
        logger.info("ends after %d looks at jobs, with %d calls of the API server", operator.looks, operator.calls)

    async def part_changed(namespace: str | None, labels: Mapping[str, str], **_: Any) -> None:
        operator.touch(namespace or "", labels[JOB])

    for kind in ("pods", "services"):
        kopf.on.event("v1", kind, labels={JOB: kopf.PRESENT}, registry=registry)(part_changed)
    kopf.run(
        registry=registry, clusterwide=not namespaces, namespaces=namespaces, liveness_endpoint=health, standalone=True
    )


def _lead(lease: str) -> None:
    """Wait until this process holds a Lease. It ends where it cannot hold it any more: another one works then."""
    from kubernetes.leaderelection import electionconfig, leaderelection
    from kubernetes.leaderelection.resourcelock.leaselock import LeaseLock

    namespace, _, name = lease.rpartition("/")
    identity = f"{socket.gethostname()}-{secrets.token_hex(4)}"
    leads = threading.Event()

    def lost() -> None:
        logger.error("%s no longer holds the lease %s, and ends", identity, lease)
        os._exit(1)

    config = electionconfig.Config(
        LeaseLock(name, namespace or "default", identity), lease_duration=15, renew_deadline=10, retry_period=2,
        onstarted_leading=leads.set, onstopped_leading=lost,
    )  # fmt: skip
    threading.Thread(target=leaderelection.LeaderElection(config).run, name="partway lease", daemon=True).start()
    while not leads.wait(1):  # a signal is heard meanwhile
        pass
    logger.info("%s holds the lease %s", identity, lease)
