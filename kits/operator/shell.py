"""The operator as a process: watches of jobs, pods and services tell which job to examine; decision.py decides, and
this module carries out the decision by the Kubernetes client.

A job is read, decided on and written each time, by one task at a time; a change meanwhile makes it examine the job
again. It remembers nothing that a new process would need.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from partway.operator import pods
from partway.operator.cluster import ChangedError, Cluster, NameTakenError
from partway.operator.decision import (
    UNHINDERED,
    Action,
    Decision,
    Delete,
    DeleteJob,
    DeleteService,
    Hindrance,
    Make,
    MakeSecret,
    MakeService,
    Tell,
    decide,
)
from partway.operator.health import answering
from partway.operator.observed import JOB, is_owned, pods_of, text_of
from partway.operator.spec import API, KIND, PLURAL, Spec, parsed
from partway.operator.watch import ObjectWatch, reason_of

logger = logging.getLogger("partway.operator")
GATHER = 0.2  # seconds in which the events of a job are collected
AGAIN = 5.0  # seconds until a job is examined again after an unexpected answer of the API server
_WORKERS = 8  # jobs that are examined at the same time

Key = tuple[str, str]  # namespace and name


class Operator:
    """Examines jobs, each when one of its objects changes."""

    def __init__(self, cluster: Cluster, now: Callable[[], float] = time.time) -> None:
        self._cluster, self._now = cluster, now
        self._hindered: dict[Key, Hindrance] = {}  # why an object could not be created
        self._due: dict[Key, asyncio.TimerHandle] = {}
        self._busy: set[Key] = set()
        self._once_more: set[Key] = set()
        self._threads = ThreadPoolExecutor(_WORKERS, "partway operator")
        self._tasks: set[asyncio.Task[None]] = set()
        self.looks = 0

    @property
    def calls(self) -> int:
        """The number of requests to the API server."""
        return self._cluster.calls

    # -- The schedule

    def touch(self, namespace: str, name: str, delay: float = GATHER) -> None:
        """Examine a job soon; if that is planned for later, do it sooner."""
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
            logger.warning("%s/%s: %s; looked at again in %g s", *key, reason_of(error), AGAIN)
        finally:
            self._busy.discard(key)
            if key in self._once_more:
                self._once_more.discard(key)
                again = 0.0
            if again is not None:
                self.touch(*key, delay=max(again, GATHER))

    # -- The work

    def look(self, namespace: str, name: str) -> float | None:
        """Examine a job, and carry out the decision. Returns the seconds after which to look again, if any."""
        key = namespace, name
        self.looks += 1
        job = self._cluster.job(namespace, name)
        if job is None:
            self._hindered.pop(key, None)
            return None
        uid = job["metadata"]["uid"]
        own = pods_of(self._cluster.pods(namespace, name), uid)
        services = {
            each["metadata"]["name"]: each["metadata"]["uid"]
            for each in self._cluster.services(namespace, name)
            if is_owned(each, uid)
        }
        decision = decide(job, own, services, self._now(), self._hindered.get(key, UNHINDERED))
        status = decision.status.to_api()
        try:
            if status != (job.get("status") or {}):
                job = self._cluster.write_status(job, status)
            return self._carried_out(job, decision)
        except ChangedError:  # or it is gone
            return 0.0

    def _carried_out(self, job: dict[str, Any], decision: Decision) -> float | None:
        key = job["metadata"]["namespace"], job["metadata"]["name"]
        spec = parsed(job)[0] if decision.actions else None
        refused, taken = "", []
        for action in decision.actions:
            try:
                job = self._act(job, spec, action)
            except NameTakenError as error:
                taken.append(str(error))
            except Exception as error:
                status = self._cluster.status_of(error)
                if status is None or status >= 500 or not isinstance(action, Make | MakeSecret | MakeService):
                    raise
                refused = refused or _refusal(action, error)
            else:
                continue
            if isinstance(action, MakeSecret | MakeService):
                break  # no process may start without them
        hindrance = Hindrance(refused, "; ".join(taken[:3]))
        if hindrance == self._hindered.get(key, UNHINDERED):
            return decision.again
        if hindrance == UNHINDERED:
            self._hindered.pop(key, None)
        else:
            self._hindered[key] = hindrance
            logger.warning("%s/%s: %s", *key, refused or hindrance.taken)
        return 0.0  # the status has to say so

    def _act(self, job: dict[str, Any], spec: Spec | None, action: Action) -> dict[str, Any]:
        """Carry out one action, and return the new job."""
        namespace, name = job["metadata"]["namespace"], job["metadata"]["name"]
        match action:
            case Make(role, index, attempt):
                assert spec is not None
                self._cluster.make("pod", pods.pod(job, spec, role, index, attempt))
            case MakeSecret():  # only this process knows the secret that was just created
                secret = self._cluster.make_secret(pods.secret(job))
                return self._cluster.write_status(job, {**job["status"], "secret": secret})
            case MakeService():
                assert spec is not None
                self._cluster.make("service", pods.service(job, spec))
            case Delete(pod, uid):
                self._cluster.delete_pod(namespace, pod, uid)
            case DeleteService(service, uid):
                self._cluster.delete_service(namespace, service, uid)
            case DeleteJob():
                self._cluster.delete_job(job)
            case Tell(reason, message, warning):
                logger.log(logging.WARNING if warning else logging.INFO, "%s/%s: %s", namespace, name, message)
                self._cluster.make_event(_event(job, reason, message, warning, self._now()))
        return job


def _event(job: dict[str, Any], reason: str, message: str, warning: bool, now: float) -> dict[str, Any]:
    metadata, at = job["metadata"], text_of(now)
    about = {
        "apiVersion": API,
        "kind": KIND,
        "name": metadata["name"],
        "namespace": metadata["namespace"],
        "uid": metadata["uid"],
    }
    return {
        "metadata": {"generateName": f"{metadata['name']}-", "namespace": metadata["namespace"]},
        "involvedObject": about,
        "reason": reason,
        "message": message[:1024],
        "type": "Warning" if warning else "Normal",
        "firstTimestamp": at,
        "lastTimestamp": at,
        "count": 1,
        "source": {"component": "partway-operator"},
    }


def _refusal(action: Action, error: Any) -> str:
    """Why the API server refused a request."""
    match action:
        case Make(role, index, _):
            what = f"{role} {index}"
        case MakeSecret():
            what = "the secret"
        case _:
            what = "the service"
    return f"{what} was refused: {reason_of(error)}"


def run(namespaces: tuple[str, ...] = (), lease: str | None = None, health: str | None = None) -> None:
    """Run the operator, until SIGTERM.

    namespaces   those that it serves; none: all
    lease        NAMESPACE/NAME of a Lease: of several operators the holder works; None: it is alone
    health       the URL where it answers 200, such as http://0.0.0.0:8080/healthz, or 503 with the reason while it
                 cannot watch jobs, pods or services

    Raises RuntimeStateError if the extra is missing, no cluster is configured, or it cannot listen at `health`.
    """
    asyncio.run(_run(Cluster.connected(), namespaces, lease, health))


async def _run(cluster: Cluster, namespaces: tuple[str, ...], lease: str | None, health: str | None) -> None:
    from partway.operator.lease import Lease

    loop, over, held = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, over.set)
    operator = Operator(cluster)
    watches = [
        _watch(cluster, kind, namespace, lambda *job: loop.call_soon_threadsafe(operator.touch, *job))
        for namespace in namespaces or (None,)
        for kind in (PLURAL, "pods", "services")
    ]
    candidate = Lease(lease, partial(loop.call_soon_threadsafe, held.set)) if lease is not None else None

    def trouble() -> str:
        if candidate is not None and not held.is_set():
            return candidate.trouble
        return "\n".join(each.trouble for each in watches if each.trouble)

    async with answering(health, trouble):
        if candidate is not None:
            candidate.start()
            await _first(held, over)
        if not over.is_set():
            for each in watches:
                each.start()
        await over.wait()
        for each in watches:
            each.stop()
    logger.info("ends after %d looks at jobs, with %d calls of the API server", operator.looks, operator.calls)


async def _first(*events: asyncio.Event) -> None:
    """Wait until one of these is set."""
    waits = [asyncio.ensure_future(each.wait()) for each in events]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for each in waits:
        each.cancel()


def _watch(cluster: Cluster, kind: str, namespace: str | None, touch: Callable[[str, str], object]) -> ObjectWatch:
    def changed(metadata: Mapping[str, Any]) -> None:
        job = metadata["name"] if kind == PLURAL else metadata["labels"][JOB]
        touch(metadata["namespace"], job)

    missing = "define it: partway operator manifests | kubectl apply -f -" if kind == PLURAL else ""
    where = f"{kind} of {namespace}" if namespace is not None else kind
    return ObjectWatch(where, cluster.reader(kind, namespace), changed, missing)
