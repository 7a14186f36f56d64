"""The actions for a job: a pure function of the observed state. It reads the state and no events, so that a missed
event, a restarted operator, or two operators lead to the same result.

The status is written before any action, and only over the one that was read: so each restart is counted once. A pod has
a name and the number of its attempt; one of an earlier attempt is deleted, and a missing one is created. So raising the
number is the only way to start a pod again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from partway.operator.observed import JOB, KINDS, ROLE, Pod, Status, name_of
from partway.operator.spec import ROLES, SCHEDULER, SERVER, WORKER, Spec, parsed

SETTLE = 10.0  # seconds in which the others end, too, after one has ended: the first reason counts
_DELAY, _LONGEST = 10.0, 300.0  # seconds before pods are started again, doubled each time; the first time at once


@dataclass(frozen=True)
class Make:
    """Create a pod."""

    role: str
    index: int
    attempt: str


@dataclass(frozen=True)
class MakeSecret:
    """Create the secret that the processes share, and write its name into the status."""


@dataclass(frozen=True)
class MakeService:
    """Create the headless service by which the scheduler is found."""


@dataclass(frozen=True)
class Delete:
    """Delete a pod, if it still has this uid."""

    name: str
    uid: str


@dataclass(frozen=True)
class DeleteService:
    """Delete the scheduler's service, if it still has this uid."""

    name: str
    uid: str


@dataclass(frozen=True)
class DeleteJob:
    """Delete the job itself."""


@dataclass(frozen=True)
class Tell:
    """An event for `kubectl describe`."""

    reason: str
    message: str
    warning: bool


Action = Make | MakeSecret | MakeService | Delete | DeleteService | DeleteJob | Tell


@dataclass(frozen=True)
class Hindrance:
    """Why an object could not be created, at the last attempt.

    refused    the message of the API server
    taken      the owner of the name
    """

    refused: str = ""
    taken: str = ""


UNHINDERED = Hindrance()


@dataclass(frozen=True)
class Decision:
    """The status to write, then the actions; and the seconds after which to look again, if nothing happens before."""

    status: Status
    actions: tuple[Action, ...] = ()
    again: float | None = None


def decide(
    job: Mapping[str, Any],
    pods: Sequence[Pod],
    services: Mapping[str, str],
    now: float,
    hindrance: Hindrance = UNHINDERED,
) -> Decision:
    """The decision for `job`, an object of the API.

    pods         those that it owns
    services     those that it owns: uids by name
    now          seconds since 1970
    hindrance    why not all of its objects could be created
    """
    before = Status.of(job.get("status"))
    if job["metadata"].get("deletionTimestamp"):
        return Decision(before)  # all its objects go with it
    found = _decided(job, before, pods, services, now, hindrance)
    status = replace(found.status, generation=job["metadata"].get("generation", 0))
    return replace(found, status=status, actions=(*_told(before, status), *found.actions))


def _decided(
    job: Mapping[str, Any],
    before: Status,
    pods: Sequence[Pod],
    services: Mapping[str, str],
    now: float,
    hindrance: Hindrance,
) -> Decision:
    spec, problems = parsed(job)
    invalid = (failed := before.condition("Failed")) is not None and failed.holds and failed.reason == "InvalidSpec"
    if before.over and not (invalid and before.generation != job["metadata"].get("generation", 0)):
        return _over(job, spec, before, pods, services, now)
    if spec is None and before.start is not None:  # a wrong change stops no running job
        return Decision(before.having("Invalid", True, "InvalidSpec", "; ".join(problems), now))
    if spec is None:
        status = before.having("Failed", True, "InvalidSpec", "; ".join(problems), now)
        return Decision(replace(status, phase="Failed"), _deleted(pods))
    status = replace(before, selector=f"{JOB}={job['metadata']['name']},{ROLE}={KINDS[WORKER]}")
    if invalid:
        status = status.having("Failed", False, "Corrected", "the job was corrected", now)
    if status.holds("Invalid"):
        status = status.having("Invalid", False, "Corrected", "the job was corrected", now)
    if spec.runPolicy.suspend:
        return _suspended(status, pods, now)
    if status.holds("Suspended"):
        status = status.having("Suspended", False, "Resumed", "the job goes on", now)
    return _Course(job, spec, status, pods, services, now, hindrance).decided()


def _suspended(status: Status, pods: Sequence[Pod], now: float) -> Decision:
    message = "the job waits, without pods (runPolicy.suspend)"
    for other in ("Running", "Conflict"):
        if status.condition(other) is not None:
            status = status.having(other, False, "Suspended", message, now)
    status = status.having("Suspended", True, "Suspended", message, now)
    next_attempt = status.attempt + 1 if status.start is not None else status.attempt
    status = replace(
        status,
        phase="Suspended",
        ready=_ready(pods, 0),
        start=None,
        attempt=next_attempt,
        attempts={},
        complete=False,
        replicas=_counts(pods),
    )
    return Decision(status, _deleted(pods))


def _over(
    job: Mapping[str, Any],
    spec: Spec | None,
    status: Status,
    pods: Sequence[Pod],
    services: Mapping[str, str],
    now: float,
) -> Decision:
    """The decision for a job that is over: clean up its objects."""
    status = replace(status, replicas=_counts(pods), ready=_ready(pods, len(pods)))
    if spec is None:
        return Decision(status, _deleted(pods))
    policy = spec.runPolicy
    actions: tuple[Action, ...] = ()
    if policy.cleanPodPolicy != "None":
        gone = _deleted([pod for pod in pods if policy.cleanPodPolicy == "All" or not pod.ended])
        actions = (*gone, *(DeleteService(name, uid) for name, uid in services.items()))
    if policy.ttlSecondsAfterFinished is None or status.end is None:
        return Decision(status, actions)
    left = status.end + policy.ttlSecondsAfterFinished - now
    if left <= 0:
        return Decision(status, (*actions, DeleteJob()))
    return Decision(status, actions, left)


def _deleted(pods: Sequence[Pod]) -> tuple[Delete, ...]:
    """Deletions of pods that are not being deleted already."""
    return tuple(Delete(pod.name, pod.uid) for pod in pods if not pod.deleted)


class _Course:
    """A decision for a job that should run."""

    def __init__(
        self,
        job: Mapping[str, Any],
        spec: Spec,
        status: Status,
        pods: Sequence[Pod],
        services: Mapping[str, str],
        now: float,
        hindrance: Hindrance,
    ) -> None:
        self._name, self._spec, self._pods = job["metadata"]["name"], spec, pods
        self._services, self._now, self._hindrance = services, now, hindrance
        self._status = status
        self._by_name = {pod.name: pod for pod in pods}
        self._again: list[float] = []

    def decided(self) -> Decision:
        """The decision: first whether the job is over, then which pods it should have."""
        self._begin()
        outcome = self._outcome()
        if outcome is not None:
            return self._ended(*outcome)
        self._count_restarts()
        if self._status.restarts > self._spec.runPolicy.backoffLimit:
            limit = self._spec.runPolicy.backoffLimit
            return self._ended(
                False, "BackoffLimitExceeded", f"pods ended too often: {limit} restarts were allowed{self._last()}"
            )
        actions = tuple(self._wanted_actions())
        return Decision(self._described(), actions, min(self._again, default=None))

    # -- The wanted pods

    def _wanted(self) -> Iterator[tuple[str, str, int]]:
        """(name, role, index) of each pod that the job should have."""
        for role in ROLES:
            for index in range(self._spec.count(role)):
                yield name_of(self._name, role, index), role, index

    def _attempt(self, name: str) -> str:
        return f"{self._status.attempt}.{self._status.attempts.get(name, 0)}"

    def _current(self, role: str | None = None) -> list[Pod]:
        """The existing wanted pods of the present attempt."""
        return [
            self._by_name[name]
            for name, its, _ in self._wanted()
            if name in self._by_name and self._by_name[name].attempt == self._attempt(name) and role in (None, its)
        ]

    # -- The steps of a decision

    def _begin(self) -> None:
        workers = self._spec.count(WORKER)
        if self._status.start is None:
            self._status = replace(self._status, start=self._now, size=workers)
            self._status = self._status.having("Created", True, "JobCreated", f"{self._name} is created", self._now)
        elif self._status.size != workers:
            if self._spec.count(SERVER) == 0:  # ranks depend on their number: all start again
                self._status = replace(self._status, attempt=self._status.attempt + 1, attempts={}, complete=False)
            self._status = replace(self._status, size=workers)

    def _outcome(self) -> tuple[bool, str, str] | None:
        """Whether the job has succeeded, the reason, and the message; None if it is not over."""
        workers = self._current(WORKER)
        good = [pod for pod in workers if pod.phase == "Succeeded"]
        lost = [pod for pod in self._failed() if not self._is_tried_again(pod)]
        if self._spec.successPolicy == "Worker0":
            if any(pod.index == 0 for pod in good):
                return True, "Worker0Succeeded", f"{name_of(self._name, WORKER, 0)} has succeeded"
        elif good and len(good) + self._given_up() >= self._spec.count(WORKER):
            return True, "AllWorkersSucceeded", f"{len(good)} workers have succeeded"
        fatal = [pod for pod in lost if not self._may_lack(pod)]
        if self._spec.together and (self._is_one_missing() or len(lost) < len(self._failed())):
            fatal = []  # those that ended for good did so because one was killed or deleted
        if fatal and self._settled():
            first = min(fatal, key=lambda pod: (pod.finished, pod.name))
            message = f"{_end_of(first)}, and its restartPolicy is {self._policy(first)}"
            return False, f"{first.role}Failed", message
        limit = self._spec.runPolicy.activeDeadlineSeconds
        if limit is not None:
            assert self._status.start is not None
            if self._is_past(self._status.start + limit):
                return False, "DeadlineExceeded", f"the job has run for {limit} s (activeDeadlineSeconds)"
        return None

    def _failed(self) -> list[Pod]:
        """The pods whose end is a failure, or that should not end."""
        return [
            pod
            for pod in self._current()
            if pod.phase == "Failed"
            or (pod.phase == "Succeeded" and pod.role != WORKER and self._policy(pod) == "Always")
        ]

    def _policy(self, pod: Pod) -> str:
        """The restartPolicy of a wanted pod."""
        said = self._spec.role(pod.role)
        assert said is not None
        return said.restartPolicy

    def _is_tried_again(self, pod: Pod) -> bool:
        policy = self._policy(pod)
        if policy == "Never":
            return False
        if policy == "ExitCode" and pod.code is not None:
            return not 1 <= pod.code <= 127
        return True

    def _may_lack(self, pod: Pod) -> bool:
        """Whether the job continues without this worker, for good."""
        elastic = self._spec.elastic
        if pod.role != WORKER or elastic is None or self._spec.count(SERVER) == 0:
            return False
        return self._spec.count(WORKER) - self._given_up() >= elastic.minWorkers

    def _given_up(self) -> int:
        """The number of workers that have failed for good, in a job that may continue without them."""
        if self._spec.elastic is None or self._spec.count(SERVER) == 0:
            return 0
        return sum(pod.role == WORKER and not self._is_tried_again(pod) for pod in self._failed())

    def _is_one_missing(self) -> bool:
        """Whether somebody has deleted a pod of a job that needs all its pods."""
        there = [pod for pod in self._current() if not pod.deleted]
        return self._spec.together and self._status.complete and len(there) < len(list(self._wanted()))

    def _settled(self) -> bool:
        """Whether the pods that end because another has, have ended as well; else look again later."""
        if not self._spec.together:
            return True
        if all(pod.ended for pod in self._current(WORKER)):
            return True
        first = min((pod.finished for pod in self._failed()), default=self._now)
        return self._is_past(first + SETTLE)

    def _count_restarts(self) -> None:
        """Raise the attempt numbers of pods to start again."""
        again = [pod for pod in self._failed() if self._is_tried_again(pod)]
        again = [pod for pod in again if pod.phase == "Failed" or self._stays_ended(pod)]
        if self._spec.together and (self._is_one_missing() or (again and self._settled())):
            first = min(again, key=lambda pod: (not _is_killed(pod), pod.finished, pod.name), default=None)
            why = _end_of(first) if first is not None else "a pod was deleted"
            self._restart(
                1, f"{why}; all pods are started again", attempt=self._status.attempt + 1, attempts={}, complete=False
            )
        elif again and not self._spec.together:
            attempts = {
                **self._status.attempts,
                **{pod.name: self._status.attempts.get(pod.name, 0) + 1 for pod in again},
            }
            why = "; ".join(_end_of(pod) for pod in again[:3])
            self._restart(len(again), f"{why}; started again", attempts=attempts)

    def _stays_ended(self, pod: Pod) -> bool:
        """Whether a server ended although the job is not over, which would show a moment later."""
        return self._is_past(pod.finished + SETTLE)

    def _is_past(self, moment: float) -> bool:
        """Whether a moment is over; if not, look again then."""
        left = moment - self._now
        if left > 0:
            self._again.append(left)
        return left <= 0

    def _restart(self, count: int, message: str, **changes: Any) -> None:
        self._status = replace(self._status, restarts=self._status.restarts + count, restarted=self._now, **changes)
        self._status = self._status.having("Restarting", True, "PodsRestarting", message, self._now)

    def _wanted_actions(self) -> Iterator[Action]:
        wanted = list(self._wanted())
        names = {name for name, _, _ in wanted}
        yield from _deleted(
            [pod for pod in self._pods if pod.name not in names or pod.attempt != self._attempt(pod.name)]
        )
        lacking = [each for each in wanted if each[0] not in self._by_name]
        if any(pod.attempt.partition(".")[0] != str(self._status.attempt) for pod in self._pods):
            lacking = []  # new ones would find the scheduler of the previous attempt, which ends
        if lacking and not self._is_past(self._not_before()):
            lacking = [each for each in lacking if not self._is_delayed(each[0])]
        if self._spec.count(SCHEDULER) and not self._status.secret:
            yield MakeSecret()
        if self._spec.count(SCHEDULER) and not self._services:
            yield MakeService()
        if self._hindrance != UNHINDERED:
            self._again.append(_DELAY)
        yield from (Make(role, index, self._attempt(name)) for name, role, index in lacking)

    def _is_delayed(self, name: str) -> bool:
        """Whether this pod waits because it, or all, ended before."""
        return self._status.attempts.get(name, 0) > 0 or self._spec.together

    def _not_before(self) -> float:
        """The time from which ended pods may be started again."""
        times = self._status.restarts
        if times < 2 or self._status.restarted is None:
            return 0.0
        return self._status.restarted + min(_DELAY * 2.0 ** min(times - 2, 10), _LONGEST)

    # -- The status

    def _described(self) -> Status:
        """The status, with phase, counts and conditions."""
        status, total = self._status, len(list(self._wanted()))
        current = [pod for pod in self._current() if not pod.deleted]
        if len(current) == total:
            status = replace(status, complete=True)
        up = [pod for pod in current if pod.phase in ("Running", "Succeeded")]
        least = self._spec.count(WORKER)
        if self._spec.elastic is not None:
            least = min(self._spec.elastic.minWorkers, least)
        others = total - self._spec.count(WORKER)
        runs = sum(p.role == WORKER for p in up) >= least and sum(p.role != WORKER for p in up) >= others
        troubles = [f"{pod.name}: {pod.trouble}" for pod in current if pod.trouble and pod.phase == "Pending"]
        if runs:
            status = status.having("Running", True, "JobRunning", f"{len(up)} of {total} pods run", self._now)
            if status.condition("Restarting") is not None:
                status = status.having("Restarting", False, "JobRunning", "the pods run again", self._now)
        elif self._hindrance.refused or troubles:
            reason = "PodRefused" if self._hindrance.refused else "PodPending"
            message = self._hindrance.refused or "; ".join(troubles[:3])
            status = status.having("Running", False, reason, message, self._now)
        elif status.condition("Running") is not None:
            status = status.having("Running", False, "PodsMissing", f"{len(up)} of {total} pods run", self._now)
        if self._hindrance.taken:
            status = status.having("Conflict", True, "NameTaken", self._hindrance.taken, self._now)
        elif status.holds("Conflict") and self._is_whole():
            status = status.having("Conflict", False, "NameFree", "the job has all that it needs", self._now)
        again = status.holds("Restarting") or status.attempt > 0
        phase = "Running" if runs else "Restarting" if again else "Created"
        return replace(status, phase=phase, ready=_ready(current, total), replicas=_counts(self._pods))

    def _is_whole(self) -> bool:
        """Whether all objects of the job exist."""
        served = self._spec.count(SCHEDULER) == 0 or len(self._services) > 0
        return served and all(name in self._by_name for name, _, _ in self._wanted())

    def _ended(self, well: bool, reason: str, message: str) -> Decision:
        """The decision that the job is over."""
        kind, status = "Succeeded" if well else "Failed", self._status
        for other in ("Running", "Restarting", "Conflict"):
            if status.condition(other) is not None:
                status = status.having(other, False, reason, message, self._now)
        status = status.having(kind, True, reason, message, self._now)
        status = replace(
            status, phase=kind, end=self._now, replicas=_counts(self._pods), ready=_ready(self._pods, len(self._pods))
        )
        return Decision(status, again=0.0)  # the rest is cleaned up when this is written

    def _last(self) -> str:
        failed = [pod for pod in self._pods if pod.phase == "Failed"]
        return f"; {_end_of(max(failed, key=lambda pod: pod.finished))}" if failed else ""


def _is_killed(pod: Pod) -> bool:
    return pod.code is None or pod.code >= 128


def _end_of(pod: Pod) -> str:
    """The end of a pod, in words."""
    if pod.trouble:
        return f"{pod.name} was ended: {pod.trouble}"
    if pod.code is None:
        return f"{pod.name} has ended, and nothing is known of how"
    killed = f" (killed by signal {pod.code - 128})" if pod.code > 128 else ""
    return f"{pod.name} has ended with status {pod.code}{killed}"


def _counts(pods: Sequence[Pod]) -> dict[str, dict[str, int]]:
    found = {}
    for role in ROLES:
        own = [pod for pod in pods if pod.role == role]
        counts = {
            "active": sum(not pod.ended for pod in own),
            "ready": sum(pod.ready and not pod.ended for pod in own),
            "succeeded": sum(pod.phase == "Succeeded" for pod in own),
            "failed": sum(pod.phase == "Failed" for pod in own),
        }
        if own:
            found[role] = counts
    return found


def _ready(pods: Sequence[Pod], total: int) -> str:
    return f"{sum(pod.ready and not pod.ended for pod in pods)}/{total}"


def _told(before: Status, after: Status) -> Iterator[Tell]:
    """Events for conditions that have turned, or for restarts that were counted."""
    for each in after.conditions:
        old = before.condition(each.kind)
        again = each.kind == "Restarting" and after.restarts > before.restarts
        refused = each.kind == "Running" and not each.holds and each.reason in ("PodRefused", "PodPending")
        refused = refused or (each.kind == "Conflict" and each.holds)
        turned = old is None or old.holds != each.holds
        if (each.holds and (turned or again)) or (refused and (old is None or old.message != each.message)):
            wrong = each.kind in ("Failed", "Invalid", "Restarting", "Conflict")
            yield Tell(each.reason, each.message, warning=wrong or refused)
