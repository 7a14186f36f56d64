"""A cluster in memory, for the operator's decisions: a clock, and pods that begin and end when a test says so."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

from partway.operator.decision import (
    UNHINDERED,
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
from partway.operator.observed import Pod, name_of
from partway.operator.spec import API, KIND

TEMPLATE = {"spec": {"containers": [{"name": "main", "image": "image"}]}}


def a_job(
    workers: int = 1,
    servers: int = 0,
    scheduler: bool | None = None,
    policy: str = "OnFailure",
    name: str = "job",
    **spec: Any,
) -> dict[str, Any]:
    """A job as the API server returns it, with the same restart policy for each role."""
    counts = {"Worker": workers, "PS": servers}
    counts["Scheduler"] = int(workers > 1 or servers > 0 if scheduler is None else scheduler)
    roles = {
        role: {"replicas": count, "restartPolicy": policy, "template": copy.deepcopy(TEMPLATE)}
        for role, count in counts.items()
        if count
    }
    return {
        "apiVersion": API, "kind": KIND,
        "metadata": {"name": name, "namespace": "default", "uid": "of-the-job", "generation": 1},
        "spec": {"replicaSpecs": roles, **spec},
    }  # fmt: skip


class World:
    """A job and its pods. `step` runs the operator once."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.job: dict[str, Any] | None = job
        self.pods: dict[str, Pod] = {}
        self.services: dict[str, str] = {}
        self.events: list[Tell] = []
        self.made: list[str] = []
        self.now = 1_000_000.0
        self._uids = itertools.count()

    @property
    def status(self) -> dict[str, Any]:
        """The status that was written last."""
        assert self.job is not None
        return self.job.get("status") or {}

    @property
    def phase(self) -> str:
        """The phase that was written last."""
        return str(self.status.get("phase", ""))

    def condition(self, kind: str) -> dict[str, Any]:
        """A written condition."""
        found: dict[str, Any] = next(each for each in self.status["conditions"] if each["type"] == kind)
        return found

    def look(self, hindrance: Hindrance = UNHINDERED) -> Decision:
        """The operator's decision now."""
        assert self.job is not None
        return decide(self.job, tuple(self.pods.values()), self.services, self.now, hindrance)

    def step(self, upto: int | None = None, hindrance: Hindrance = UNHINDERED) -> Decision:
        """Make a decision and carry it out, or only its first `upto` actions, as if the operator died then."""
        assert self.job is not None
        decision = self.look(hindrance)
        self.job["status"] = decision.status.to_api()
        for action in decision.actions[:upto]:
            self._act(action)
        return decision

    def settle(self, steps: int = 30) -> Decision:
        """Step until nothing is to be done, and advance the clock if the operator waits for it. Return the last
        decision."""
        for _ in range(steps):
            before = copy.deepcopy(self.status)
            decision = self.step()
            if self.job is None:
                return decision
            if not decision.actions and self.status == before:
                if decision.again is None or decision.again > 1000:
                    return decision
                self.now += max(decision.again, 0.001)
        raise AssertionError(f"after {steps} steps there is more to do: {decision}")

    def rest(self, looks: int = 5) -> None:
        """Step until nothing is to be done now."""
        for _ in range(looks):
            before = copy.deepcopy(self.status)
            decision = self.step()
            if self.job is None or (not decision.actions and self.status == before):
                return
        raise AssertionError(f"after {looks} steps there is more to do: {decision}")

    def _act(self, action: Any) -> None:
        match action:
            case Make(role, index, attempt):
                name = name_of("job", role, index)
                if name not in self.pods:  # the API server responds with 409
                    self.made.append(name)
                    self.pods[name] = Pod(name, str(next(self._uids)), role, index, attempt, "Pending")
            case Delete(name, uid):
                if name in self.pods and self.pods[name].uid == uid:
                    del self.pods[name]
            case MakeSecret():
                assert self.job is not None
                self.job["status"]["secret"] = f"job-secret-{next(self._uids)}"
            case MakeService():
                self.services["job-scheduler"] = str(next(self._uids))
            case DeleteService(name, uid):
                assert self.services.pop(name) == uid
            case DeleteJob():
                self.job = None
                self.pods.clear()
            case Tell():
                self.events.append(action)

    # -- Events of pods

    def begin(self, *names: str) -> None:
        """Start these pods, or all pending ones."""
        for name, pod in list(self.pods.items()):
            if pod.phase == "Pending" and (name in names or not names):
                self.pods[name] = replace(pod, phase="Running", ready=True)

    def end(self, name: str, code: int | None = 0, trouble: str = "") -> None:
        """End the process of a pod."""
        phase = "Failed" if code != 0 else "Succeeded"
        self.pods[name] = replace(
            self.pods[name], phase=phase, code=code, ready=False, finished=self.now, trouble=trouble
        )

    def running(self) -> World:
        """Start all pods."""
        self.rest()
        self.begin()
        self.rest()
        return self

    # -- At random

    def happen(self, kind: str, number: int) -> None:
        """One of HAPPENINGS; `number` selects the pod, or the amount."""
        World.HAPPENINGS[kind](self, number)

    def _ends(self, number: int, code: int | None) -> None:
        running = [pod for pod in self.pods.values() if not pod.ended]
        if running:
            self.end(running[number % len(running)].name, code)

    def _deleted(self, number: int) -> None:
        if self.pods:
            del self.pods[sorted(self.pods)[number % len(self.pods)]]

    def _scaled(self, number: int) -> None:
        assert self.job is not None
        roles = self.job["spec"]["replicaSpecs"]
        roles["Worker"]["replicas"] = 1 + number % 4 if "Scheduler" in roles else 1
        self.job["metadata"]["generation"] += 1

    def _waited(self, number: int) -> None:
        self.now += 7.0 * number

    def _seen_late(self, number: int) -> None:
        """Run the operator with the pods as they were before one ended and another one was deleted."""
        before = dict(self.pods)
        self._ends(number, 137)
        self._deleted(number)
        now, self.pods = self.pods, before
        decision = self.look()
        self.pods = now
        assert self.job is not None
        self.job["status"] = decision.status.to_api()
        for action in decision.actions:
            self._act(action)

    HAPPENINGS: ClassVar[dict[str, Callable[[World, int], Any]]] = {
        "begin": lambda self, number: self.begin(),
        "end": lambda self, number: self._ends(number, 0),
        "fail": lambda self, number: self._ends(number, 1),
        "kill": lambda self, number: self._ends(number, 137),
        "evict": lambda self, number: self._ends(number, None),
        "delete": _deleted,
        "scale": _scaled,
        "wait": _waited,
        "die": lambda self, number: self.step(upto=number % 3),
        "late": _seen_late,
    }
