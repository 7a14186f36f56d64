"""What is decided for a job, by its pods: as a function, without a cluster."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from operator_world import World, a_job

from partway.operator.decision import Delete, DeleteJob, Hindrance, Make

WORKERS = [f"job-worker-{i}" for i in range(4)]


def policy(**values: Any) -> dict[str, Any]:
    return {"runPolicy": values}


def test_a_job_of_one_worker_is_one_pod_that_succeeds():
    world = World(a_job())
    world.rest()
    assert list(world.pods) == ["job-worker-0"]
    assert world.phase == "Created"
    assert not world.services
    world.begin()
    world.rest()
    assert (world.phase, world.status["ready"]) == ("Running", "1/1")
    world.end("job-worker-0")
    world.settle()
    assert world.phase == "Succeeded"
    assert world.condition("Running")["status"] == "False"
    assert list(world.pods) == ["job-worker-0"]  # cleanPodPolicy Running leaves what has ended, for its log
    assert [each.reason for each in world.events] == ["JobCreated", "JobRunning", "AllWorkersSucceeded"]


def test_a_job_of_several_roles_runs_when_all_pods_do():
    world = World(a_job(workers=2, servers=2))
    world.rest()
    assert sorted(world.pods) == ["job-ps-0", "job-ps-1", "job-scheduler-0", "job-worker-0", "job-worker-1"]
    assert list(world.services) == ["job-scheduler"]
    world.begin("job-ps-0", "job-ps-1", "job-scheduler-0", "job-worker-0")
    world.rest()
    assert world.phase == "Created"
    world.begin()
    world.rest()
    assert world.phase == "Running"
    assert world.status["replicaStatuses"]["PS"] == {"active": 2, "ready": 2, "succeeded": 0, "failed": 0}


def test_when_workers_have_succeeded_what_still_runs_is_deleted():
    world = World(a_job(workers=2, servers=1)).running()
    world.end("job-worker-0")
    world.rest()
    assert world.phase == "Running"
    world.end("job-worker-1")
    world.settle()
    assert world.phase == "Succeeded"
    assert sorted(world.pods) == ["job-worker-0", "job-worker-1"]
    assert not world.services


@pytest.mark.parametrize(("kept", "left"), [("All", 0), ("Running", 2), ("None", 4)])
def test_pods_are_cleaned_as_the_policy_says(kept: str, left: int):
    world = World(a_job(workers=2, servers=1, **policy(cleanPodPolicy=kept))).running()
    world.end("job-worker-0")
    world.end("job-worker-1")
    world.settle()
    assert len(world.pods) == left


def test_the_success_of_worker_0_may_be_the_jobs():
    world = World(a_job(workers=3, servers=1, successPolicy="Worker0")).running()
    world.end("job-worker-1")
    world.rest()
    assert world.phase == "Running"
    world.end("job-worker-0")
    world.settle()
    assert world.condition("Succeeded")["message"] == "job-worker-0 has succeeded"


@pytest.mark.parametrize(
    ("name", "code", "again"),
    [
        ("Always", 1, True), ("Always", 137, True), ("OnFailure", 1, True), ("OnFailure", 137, True),
        ("Never", 1, False), ("Never", 137, False), ("ExitCode", 1, False), ("ExitCode", 127, False),
        ("ExitCode", 128, True), ("ExitCode", 137, True), ("ExitCode", 255, True), ("ExitCode", None, True),
        ("Never", None, False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("servers", [0, 1])
def test_a_worker_that_ended_is_started_again_as_its_policy_says(
    name: str, code: int | None, again: bool, servers: int
):
    world = World(a_job(servers=servers, policy=name)).running()
    before = world.pods["job-worker-0"].uid
    world.end("job-worker-0", code)
    world.rest()
    if again:
        assert world.pods["job-worker-0"].uid != before
        assert world.status["restarts"] == 1
        assert world.phase == "Restarting"
        world.begin()
        world.rest()
        assert world.phase == "Running"
        assert world.condition("Restarting")["status"] == "False"
    else:
        assert world.phase == "Failed"
        how = "has ended, and nothing is known of how" if code is None else f"has ended with status {code}"
        assert f"job-worker-0 {how}" in world.condition("Failed")["message"]
        assert f"its restartPolicy is {name}" in world.condition("Failed")["message"]


def test_a_server_that_ended_well_is_started_again_where_that_is_always():
    world = World(a_job(workers=2, servers=1, policy="Always")).running()
    world.end("job-ps-0", 0)
    world.rest()
    assert world.status["restarts"] == 0  # the job may be over in a moment
    world.now += 11
    world.rest()
    assert world.status["restarts"] == 1
    world.end("job-worker-0", 0)
    world.rest()
    assert world.pods["job-worker-0"].phase == "Succeeded"  # a worker has done its work


def test_with_servers_only_what_ended_is_started_again():
    world = World(a_job(workers=3, servers=2)).running()
    others = {name: pod.uid for name, pod in world.pods.items()}
    world.end("job-worker-1", 137)
    world.rest()
    changed = {name for name, pod in world.pods.items() if pod.uid != others[name]}
    assert changed == {"job-worker-1"}
    assert "job-worker-1 has ended with status 137 (killed by signal 9)" in world.condition("Restarting")["message"]


def test_ranks_are_started_again_together_and_counted_once():
    """The others end because one has: with status 1, which alone would be for good."""
    world = World(a_job(workers=4, policy="ExitCode")).running()
    before = {name: pod.uid for name, pod in world.pods.items()}
    world.end("job-worker-2", 137)
    world.rest()
    assert world.status["restarts"] == 0  # the others are waited for
    for name in ("job-worker-0", "job-worker-1", "job-worker-3"):
        world.end(name, 1)
    world.rest()
    assert world.phase == "Restarting"
    assert all(pod.uid != before[name] for name, pod in world.pods.items())
    assert world.status["restarts"] == 1


def test_a_rank_that_fails_for_good_is_named_rather_than_those_that_follow():
    world = World(a_job(workers=3, policy="ExitCode")).running()
    world.end("job-worker-1", 3)
    world.now += 1
    world.end("job-worker-0", 1)
    world.end("job-worker-2", 1)
    world.settle()
    assert (
        world.condition("Failed")["message"]
        == "job-worker-1 has ended with status 3, and its restartPolicy is ExitCode"
    )


def test_ranks_that_do_not_end_with_the_others_are_not_waited_for_for_ever():
    world = World(a_job(workers=2)).running()
    world.end("job-worker-0", 137)
    decision = world.step()
    assert decision.again == 10.0
    world.now += 10
    world.rest()
    assert world.status["restarts"] == 1


def test_elastic_ranks_are_replaced_one_by_one():
    world = World(a_job(workers=3, elastic={"minWorkers": 2})).running()
    before = {name: pod.uid for name, pod in world.pods.items()}
    world.end("job-worker-1", 137)
    world.rest()
    assert {name for name, pod in world.pods.items() if pod.uid != before[name]} == {"job-worker-1"}
    assert world.phase == "Running"  # two are


def test_an_elastic_job_with_servers_goes_on_without_a_worker_that_failed_for_good():
    world = World(a_job(workers=3, servers=1, policy="ExitCode", elastic={"minWorkers": 2})).running()
    world.end("job-worker-1", 1)
    world.settle()
    assert world.phase == "Running"
    world.end("job-worker-0")
    world.end("job-worker-2")
    world.settle()
    assert world.phase == "Succeeded"


def test_an_elastic_job_fails_where_too_few_are_left():
    world = World(a_job(workers=3, servers=1, policy="ExitCode", elastic={"minWorkers": 2})).running()
    world.end("job-worker-1", 1)
    world.end("job-worker-2", 1)
    world.settle()
    assert world.phase == "Failed"


def test_restarts_are_delayed_and_limited():
    world = World(a_job(servers=1, **policy(backoffLimit=3))).running()
    delays = []
    for _ in range(4):
        world.end("job-worker-0", 1)
        world.rest()
        if world.phase == "Failed":
            break
        began = world.now
        while (again := world.step().again) is not None and "job-worker-0" not in world.pods:
            world.now += again
        delays.append(world.now - began)
        world.begin()
        world.rest()
    assert delays == [0.0, 10.0, 20.0]
    assert world.condition("Failed")["reason"] == "BackoffLimitExceeded"
    assert "3 restarts were allowed; job-worker-0 has ended with status 1" in world.condition("Failed")["message"]


def test_a_deadline_ends_the_job():
    world = World(a_job(workers=2, **policy(activeDeadlineSeconds=60))).running()
    assert world.step().again == 60.0
    world.now += 60
    world.settle()
    assert world.condition("Failed")["reason"] == "DeadlineExceeded"
    assert world.condition("Failed")["message"] == "the job has run for 60 s (activeDeadlineSeconds)"
    assert not world.pods


def test_a_finished_job_is_deleted_after_its_time():
    world = World(a_job(**policy(ttlSecondsAfterFinished=30))).running()
    world.end("job-worker-0")
    world.rest()
    decision = world.step()
    assert decision.again == 30.0
    world.now += 30
    assert DeleteJob() in world.look().actions
    world.step()
    assert world.job is None


def test_a_pod_that_was_deleted_by_hand_is_made_again():
    world = World(a_job(workers=2, servers=1)).running()
    del world.pods["job-worker-1"]
    world.rest()
    assert "job-worker-1" in world.pods
    assert world.status["restarts"] == 0


def test_of_ranks_one_that_was_deleted_by_hand_starts_all_again():
    world = World(a_job(workers=3)).running()
    before = world.pods["job-worker-0"].uid
    del world.pods["job-worker-1"]
    world.rest()
    assert world.pods["job-worker-0"].uid != before
    assert world.condition("Restarting")["message"] == "a pod was deleted; all pods are started again"


def test_ranks_that_end_because_one_was_deleted_start_again():
    """They end with status 1, which alone would be for good; the operator may not have seen which was first."""
    for is_there in (True, False):
        world = World(a_job(workers=3, policy="ExitCode")).running()
        if is_there:  # and being deleted
            world.pods["job-worker-1"] = replace(world.pods["job-worker-1"], deleted=True)
        else:
            del world.pods["job-worker-1"]
        for name in ("job-worker-0", "job-worker-2", "job-scheduler-0"):
            world.end(name, 1)
        world.step()
        assert world.phase == "Restarting"
        world.pods.pop("job-worker-1", None)
        world.running()
        assert (world.phase, world.status["restarts"]) == ("Running", 1)


def test_a_job_with_servers_is_scaled_without_a_restart():
    world = World(a_job(workers=2, servers=1)).running()
    before = {name: pod.uid for name, pod in world.pods.items()}
    assert world.job is not None
    world.job["spec"]["replicaSpecs"]["Worker"]["replicas"] = 4
    world.rest()
    assert sorted(name for name in world.pods if "worker" in name) == WORKERS
    assert all(world.pods[name].uid == uid for name, uid in before.items())
    world.begin()
    world.job["spec"]["replicaSpecs"]["Worker"]["replicas"] = 1
    world.rest()
    assert [name for name in world.pods if "worker" in name] == ["job-worker-0"]
    assert world.phase == "Running"
    assert world.status["restarts"] == 0


def test_ranks_begin_again_when_they_are_scaled():
    world = World(a_job(workers=2)).running()
    before = {pod.uid for pod in world.pods.values()}
    assert world.job is not None
    world.job["spec"]["replicaSpecs"]["Worker"]["replicas"] = 3
    world.rest()
    assert len(world.pods) == 4
    assert not before & {pod.uid for pod in world.pods.values()}
    assert world.status["restarts"] == 0  # it was asked for


def test_no_rank_is_made_while_the_scheduler_before_is_there():
    """It would join that one."""
    world = World(a_job(workers=3)).running()
    assert world.job is not None
    world.job["spec"]["replicaSpecs"]["Worker"]["replicas"] = 2
    old = world.pods["job-scheduler-0"]
    decision = world.step()
    assert not [each for each in decision.actions if isinstance(each, Make)]
    world.pods = {"job-scheduler-0": replace(old, deleted=True)}
    assert not [each for each in world.step().actions if isinstance(each, Make)]
    del world.pods["job-scheduler-0"]
    assert len([each for each in world.step().actions if isinstance(each, Make)]) == 3


def test_a_suspended_job_has_no_pods_and_goes_on_later():
    world = World(a_job(workers=2, **policy(suspend=True, activeDeadlineSeconds=60)))
    world.rest()
    assert (world.phase, world.pods) == ("Suspended", {})
    assert world.job is not None
    world.job["spec"]["runPolicy"]["suspend"] = False
    world.running()
    assert world.phase == "Running"
    world.job["spec"]["runPolicy"]["suspend"] = True
    world.rest()
    assert (world.phase, world.pods) == ("Suspended", {})
    world.now += 1000  # which does not count
    world.job["spec"]["runPolicy"]["suspend"] = False
    world.running()
    assert world.phase == "Running"


def test_why_pods_do_not_start_is_said():
    world = World(a_job(workers=2))
    world.rest()
    pod = world.pods["job-worker-1"]
    world.pods["job-worker-1"] = replace(pod, trouble='ImagePullBackOff: Back-off pulling image "x"')
    world.rest()
    assert world.phase == "Created"
    assert world.condition("Running")["reason"] == "PodPending"
    assert world.condition("Running")["message"] == 'job-worker-1: ImagePullBackOff: Back-off pulling image "x"'
    assert world.events[-1].warning
    told = len(world.events)
    world.rest()
    assert len(world.events) == told  # once


def test_what_the_server_refused_is_said_and_tried_again():
    world = World(a_job(workers=2))
    decision = world.step(upto=0, hindrance=Hindrance(refused="Worker 0 was refused: exceeded quota"))
    assert world.condition("Running")["message"] == "Worker 0 was refused: exceeded quota"
    assert decision.again == 10.0
    assert Make("Worker", 0, "0.0") in decision.actions
    world.running()
    assert world.phase == "Running"


def test_a_wrong_job_fails_with_the_reasons_and_goes_on_when_it_is_corrected():
    job = a_job(workers=2)
    del job["spec"]["replicaSpecs"]["Scheduler"]
    world = World(job)
    world.rest()
    assert world.condition("Failed")["reason"] == "InvalidSpec"
    assert world.condition("Failed")["message"] == (
        "spec.replicaSpecs.Scheduler is missing; a job of several processes needs one"
    )
    assert not world.pods
    world.rest()
    job["spec"] = a_job(workers=2)["spec"]
    job["metadata"]["generation"] = 2
    world.running()
    assert world.phase == "Running"


def test_a_wrong_change_stops_nothing_that_runs():
    world = World(a_job(workers=3, servers=1, elastic={"minWorkers": 2})).running()
    before = dict(world.pods)
    assert world.job is not None
    world.job["spec"]["replicaSpecs"]["Worker"]["replicas"] = 1
    world.rest()
    assert (world.phase, world.pods) == ("Running", before)
    said = "spec.elastic.minWorkers is 2; it must be 1 or less, as many as there are workers"
    assert world.condition("Invalid")["message"] == said
    assert (world.events[-1].message, world.events[-1].warning) == (said, True)
    world.job["spec"]["replicaSpecs"]["Worker"]["replicas"] = 2
    world.rest()
    assert world.condition("Invalid")["status"] == "False"
    assert len(world.pods) == 4


def test_nothing_is_done_for_a_job_that_is_being_deleted():
    world = World(a_job(workers=2))
    assert world.job is not None
    world.job["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert world.look().actions == ()


def test_a_pod_that_is_being_deleted_is_waited_for():
    world = World(a_job(workers=2, servers=1)).running()
    world.pods["job-worker-1"] = replace(world.pods["job-worker-1"], deleted=True)
    assert not [each for each in world.look().actions if isinstance(each, Make | Delete)]


def test_an_operator_that_died_between_two_actions_is_followed_by_one_that_goes_on():
    for upto in range(7):
        world = World(a_job(workers=2, servers=2))
        world.step(upto=upto)
        world.running()
        assert world.phase == "Running"
        assert len(world.made) == 5


POLICIES = st.sampled_from(["Always", "OnFailure", "Never", "ExitCode"])
HAPPENS = st.lists(st.tuples(st.sampled_from(sorted(World.HAPPENINGS)), st.integers(0, 9)), max_size=25)


@example(3, 1, "Always", False, 0, [("begin", 0), ("delete", 0), ("end", 1), ("end", 1), ("scale", 0)])
@given(st.integers(1, 4), st.integers(0, 2), POLICIES, st.booleans(), st.integers(0, 4), HAPPENS)
def test_whatever_happens_it_comes_to_rest_and_has_no_pod_too_many(
    workers: int, servers: int, policy_name: str, elastic: bool, limit: int, happens: list[tuple[str, int]]
):
    """Pods begin, end, are killed, evicted and deleted; the operator dies between its actions, or sees pods as they
    were; the job is scaled. It comes to rest each time, there is no pod too many, and what is over stays over."""
    spec: dict[str, Any] = policy(backoffLimit=limit)
    if elastic:
        spec["elastic"] = {"minWorkers": 1}
    world = World(a_job(workers, servers, scheduler=workers > 1 or servers > 0 or elastic, policy=policy_name, **spec))
    over = ""
    for kind, number in happens:
        assert world.job is not None
        world.happen(kind, number)
        world.rest(40)
        for role, said in world.job["spec"]["replicaSpecs"].items():
            ended = "completionTime" in world.status  # what has ended then stays, for its log
            own = [pod for pod in world.pods.values() if pod.role == role and not (ended and pod.ended)]
            assert over or len(own) <= said["replicas"]
        assert world.status.get("restarts", 0) <= limit + workers + servers + 1
        assert world.phase == over or not over
        over = world.phase if world.status.get("completionTime") else ""
    world.settle(60)
    assert world.phase == over or not over


def test_the_time_of_a_condition_changes_only_where_its_status_does():
    world = World(a_job()).running()
    begun = {each["type"]: each for each in world.status["conditions"]}

    def end(code: int) -> dict[str, Any]:
        world.now += 100
        world.end("job-worker-0", code)
        world.rest()
        return world.condition("Restarting")

    first, second = end(137), end(3)
    assert first["message"] != second["message"]
    assert first["lastTransitionTime"] == second["lastTransitionTime"]
    assert world.condition("Created") == begun["Created"]
    stopped = world.condition("Running")
    assert stopped["lastTransitionTime"] == first["lastTransitionTime"] > begun["Running"]["lastTransitionTime"]
    world.now += 100
    world.running()
    assert world.condition("Running")["lastTransitionTime"] > stopped["lastTransitionTime"]
    assert world.condition("Restarting")["lastTransitionTime"] == world.condition("Running")["lastTransitionTime"]
    for each in world.status["conditions"]:
        assert each["reason"].isidentifier()
        assert each["message"]
