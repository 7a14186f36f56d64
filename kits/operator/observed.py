"""The input of a decision: the relevant facts about the pods of a job, and the status that the operator keeps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from partway.operator.spec import GROUP, SCHEDULER, SERVER, WORKER

_LABELS = ("job", "job-uid", "role", "index", "attempt")
JOB, UID, ROLE, INDEX, ATTEMPT = (f"{GROUP}/{name}" for name in _LABELS)
KINDS = {SCHEDULER: "scheduler", SERVER: "ps", WORKER: "worker"}
_BEGINNING = frozenset({"ContainerCreating", "PodInitializing"})  # reasons to wait that are no trouble


def name_of(job: str, role: str, index: int) -> str:
    """The name of a pod: the same each time it is started, so that there is never a second one."""
    return f"{job}-{KINDS[role]}-{index}"


@dataclass(frozen=True)
class Pod:
    """A pod of a job.

    attempt      the attempt that it was created for
    phase        as Kubernetes says: Pending, Running, Succeeded, Failed
    code         the exit status of its process; None while it runs, or if it is unknown
    finished     the time of its end; seconds since 1970
    trouble      why it does not start, in Kubernetes' words
    deleted      whether it is being deleted
    """

    name: str
    uid: str
    role: str
    index: int
    attempt: str
    phase: str
    ready: bool = False
    code: int | None = None
    finished: float = 0.0
    trouble: str = ""
    deleted: bool = False

    @property
    def ended(self) -> bool:
        """Whether its process has ended."""
        return self.phase in ("Succeeded", "Failed")

    @classmethod
    def of(cls, pod: Mapping[str, Any]) -> Pod | None:
        """The pod in an object of the API; None for one that is not a job's."""
        metadata, status = pod["metadata"], pod.get("status") or {}
        labels = metadata.get("labels") or {}
        role = next((role for role, kind in KINDS.items() if kind == labels.get(ROLE)), None)
        if role is None or not str(labels.get(INDEX, "")).isdecimal():
            return None
        containers = status.get("containerStatuses") or []
        main = (pod.get("spec") or {}).get("containers") or [{}]
        own: dict[str, Any] = next((each for each in containers if each.get("name") == main[0].get("name")), {})
        ended = (own.get("state") or {}).get("terminated") or {}
        conditions = {each["type"]: each for each in status.get("conditions") or []}
        is_ready = conditions["Ready"]["status"] == "True" if "Ready" in conditions else bool(own.get("ready"))
        phase = status.get("phase") or "Pending"
        return cls(
            name=metadata["name"],
            uid=metadata["uid"],
            role=role,
            index=int(labels[INDEX]),
            attempt=labels.get(ATTEMPT, ""),
            phase=phase,
            ready=is_ready,
            code=ended.get("exitCode") if phase in ("Succeeded", "Failed") else None,
            finished=seconds_of(ended.get("finishedAt")) or 0.0,
            trouble=_trouble(containers, conditions, status, phase),
            deleted=metadata.get("deletionTimestamp") is not None,
        )


def _trouble(containers: Any, conditions: Any, status: Any, phase: str) -> str:
    if phase == "Failed":
        return f"{status['reason']}: {status.get('message') or ''}".rstrip(": ") if status.get("reason") else ""
    if phase != "Pending":
        return ""
    for each in containers:
        waiting = (each.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") and waiting["reason"] not in _BEGINNING:
            return f"{waiting['reason']}: {waiting.get('message') or ''}".rstrip(": ")
    scheduled = conditions.get("PodScheduled") or {}
    if scheduled.get("status") == "False":
        return f"{scheduled.get('reason') or 'not scheduled'}: {scheduled.get('message') or ''}".rstrip(": ")
    return ""


@dataclass(frozen=True)
class Condition:
    """A condition of a job, like those of other objects of Kubernetes."""

    kind: str
    holds: bool
    reason: str
    message: str
    since: float


@dataclass(frozen=True)
class Status:
    """The status of a job, the operator's only memory of its past.

    start, end, restarted    seconds since 1970
    restarts     how often pods were started again
    attempt      how often all of them were
    attempts     how often each pod was started again alone
    complete     whether all pods of this attempt have been there
    size         the number of workers that this attempt was made for
    secret       the name of the secret that was created for its processes
    replicas     by role: how many pods are active, ready, succeeded, failed
    """

    phase: str = ""
    ready: str = ""
    generation: int = 0
    start: float | None = None
    end: float | None = None
    restarted: float | None = None
    restarts: int = 0
    attempt: int = 0
    attempts: Mapping[str, int] = field(default_factory=dict)
    complete: bool = False
    size: int = 0
    selector: str = ""
    secret: str = ""
    replicas: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    conditions: tuple[Condition, ...] = ()

    def condition(self, kind: str) -> Condition | None:
        """A condition; None if it was never set."""
        return next((each for each in self.conditions if each.kind == kind), None)

    def holds(self, kind: str) -> bool:
        """Whether a condition holds."""
        found = self.condition(kind)
        return found is not None and found.holds

    def having(self, kind: str, holds: bool, reason: str, message: str, now: float) -> Status:
        """The status with a condition; its time changes only if it turns."""
        old = self.condition(kind)
        since = old.since if old is not None and old.holds == holds else now
        new = Condition(kind, holds, reason, message, since)
        others = tuple(each for each in self.conditions if each.kind != kind)
        at = next((i for i, each in enumerate(self.conditions) if each.kind == kind), len(others))
        return replace(self, conditions=(*others[:at], new, *others[at:]))

    @property
    def over(self) -> bool:
        """Whether the job has succeeded or failed, for good."""
        return self.holds("Succeeded") or self.holds("Failed")

    @classmethod
    def of(cls, status: Mapping[str, Any] | None) -> Status:
        """The status in an object of the API."""
        kept = status or {}
        return cls(
            phase=kept.get("phase", ""),
            ready=kept.get("ready", ""),
            generation=kept.get("observedGeneration", 0),
            start=seconds_of(kept.get("startTime")),
            end=seconds_of(kept.get("completionTime")),
            restarted=seconds_of(kept.get("lastRestartTime")),
            restarts=kept.get("restarts", 0),
            attempt=kept.get("attempt", 0),
            attempts=dict(kept.get("attempts") or {}),
            complete=kept.get("complete", False),
            size=kept.get("size", 0),
            selector=kept.get("selector", ""),
            secret=kept.get("secret", ""),
            replicas=kept.get("replicaStatuses") or {},
            conditions=tuple(
                Condition(
                    each["type"],
                    each["status"] == "True",
                    each.get("reason", ""),
                    each.get("message", ""),
                    seconds_of(each.get("lastTransitionTime")) or 0.0,
                )
                for each in kept.get("conditions") or ()
            ),
        )

    def to_api(self) -> dict[str, Any]:
        """The status as an object of the API."""
        found = {
            "phase": self.phase, "ready": self.ready, "observedGeneration": self.generation,
            "startTime": text_of(self.start), "completionTime": text_of(self.end),
            "lastRestartTime": text_of(self.restarted), "restarts": self.restarts, "attempt": self.attempt,
            "attempts": dict(self.attempts), "complete": self.complete, "size": self.size,
            "workers": (self.replicas.get(WORKER) or {}).get("active", 0), "selector": self.selector,
            "secret": self.secret,
            "replicaStatuses": {role: dict(counts) for role, counts in self.replicas.items()},
            "conditions": [
                {
                    "type": each.kind, "status": str(each.holds), "reason": each.reason, "message": each.message,
                    "lastTransitionTime": text_of(each.since),
                }
                for each in self.conditions
            ],
        }  # fmt: skip
        return {name: value for name, value in found.items() if value not in (None, "")}


def is_owned(found: Mapping[str, Any], uid: str) -> bool:
    """Whether an object belongs to the job of this uid. A name or a label proves nothing: anybody may set them."""
    return any(owner.get("uid") == uid for owner in found["metadata"].get("ownerReferences") or ())


def pods_of(objects: Iterable[Mapping[str, Any]], uid: str) -> tuple[Pod, ...]:
    """The pods that a job owns, sorted by name."""
    owned = [each for each in objects if is_owned(each, uid)]
    return tuple(sorted((pod for each in owned if (pod := Pod.of(each)) is not None), key=lambda pod: pod.name))


def seconds_of(text: str | None) -> float | None:
    """A time of the API in seconds since 1970."""
    return datetime.fromisoformat(text).timestamp() if text else None


def text_of(seconds: float | None) -> str | None:
    """A time as text of the API, in whole seconds."""
    return None if seconds is None else datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
