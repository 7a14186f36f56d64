"""What becomes of a job that something happens to: it ends as a whole and says why, or it goes on with the losses of a
job that nothing happened to; and nothing of it is left.

`pytest -m "" tests/ecosystem/test_faults.py` adds a row for each to the file that PARTWAY_FAULTS names: the table of
docs/design/launching.md is made of it.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import namespaces
import pytest
from faults import STEPS, Job, Outcome, by_ray, by_the_scheduler, by_torchrun

pytestmark = [pytest.mark.slow, pytest.mark.gloo]

LAUNCHERS: dict[str, Callable[..., Job]] = {"the scheduler": by_the_scheduler, "torchrun": by_torchrun}
PAUSE = "0.5"  # so that the job is not done before it looks for what it was told
KILL = "os.kill(os.getpid(), 9)"
RAISE = "raise ValueError('a bad batch')"
LIMIT = "resource.setrlimit(resource.RLIMIT_AS, (2**34, 2**34))"
MEMORY = f"import resource, torch; {LIMIT}; torch.empty(2**34, dtype=torch.int8)"
IN_THE_SCRIPT = {
    "killed before init": f"before init: {KILL}",
    "killed after init": f"after init: {KILL}",
    "killed in planning": f"planning: {KILL}",
    "killed in a step": f"forward: {KILL}",
    "killed while saving": f"saving: {KILL}",
    "crashed": "backward: import ctypes; ctypes.string_at(0)",
    "an exception before init": f"before init: {RAISE}",
    "an exception in planning": f"planning: {RAISE}",
    "an exception in forward": f"forward: {RAISE}",
    "an exception in backward": f"backward: {RAISE}",
    "an exception between steps": f"between steps: {RAISE}",
    "an exception while saving": f"saving: {RAISE}",
    "sys.exit(1)": "between steps: sys.exit(1)",
    "os._exit(7)": "between steps: os._exit(7)",
    "out of memory": f"between steps: {MEMORY}",
    "SIGTERM": "forward: os.kill(os.getpid(), 15)",
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[int, set[str]]:
    """The losses of a run that nothing happens to."""
    outcome = by_the_scheduler(tmp_path_factory.mktemp("whole"), 0).run()
    assert outcome.goes_on, outcome
    assert len(outcome.losses) == STEPS
    return outcome.losses


def row(launcher: str, fault: str, outcome: Outcome, said: str = "") -> None:
    """Write a row of the table down, where one is wanted."""
    if place := os.environ.get("PARTWAY_FAULTS"):
        what = "goes on" if outcome.goes_on else "ends"
        codes = ", ".join(f"{name} {code}" for name, code in outcome.codes.items())
        with Path(place).open("a", encoding="utf-8") as table:
            table.write(f"| {launcher} | {fault} | {what} | {outcome.seconds:.0f} | {codes} | {said} |\n")


def goes_on(launcher: str, fault: str, outcome: Outcome, whole: dict[int, set[str]]) -> None:
    assert outcome.left == [], outcome
    assert outcome.goes_on, outcome
    assert outcome.losses == whole
    row(launcher, fault, outcome)


def ends(launcher: str, fault: str, outcome: Outcome, said: str, by: str) -> None:
    """All have ended, with a status that says so, and `by` has said why."""
    found = re.search(said, outcome.said[by])
    assert outcome.left == [], outcome
    assert found, outcome
    assert all(code != 0 for code in outcome.codes.values()), outcome
    row(launcher, fault, outcome, found.group().replace("|", "/"))


@pytest.mark.parametrize("fault", IN_THE_SCRIPT)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_worker_that_ends_is_replaced(launcher: str, fault: str, whole: dict[int, set[str]], tmp_path: Path) -> None:
    job = LAUNCHERS[launcher](tmp_path, 3)
    (tmp_path / "fault").write_text(IN_THE_SCRIPT[fault])
    goes_on(launcher, f"worker: {fault}", job.run(), whole)


WORDS = {
    "killed": "was killed or crashed",
    "exception": "(failed|could not keep what it has):.* ValueError: a bad batch",
    "memory": "failed: RuntimeError",
}


@pytest.mark.parametrize("fault", [name for name in IN_THE_SCRIPT if "before init" not in name])
def test_a_job_that_does_not_recover_ends_with_the_name_of_the_first(fault: str, tmp_path: Path) -> None:
    job = by_the_scheduler(tmp_path, 0)
    (tmp_path / "fault").write_text(IN_THE_SCRIPT[fault])
    outcome = job.run()
    how = {
        "crashed": "was killed or crashed", "os._exit(7)": "was killed or crashed",
        "sys.exit(1)": "rank 1 had ended before, without an error", "SIGTERM": "was asked to end by SIGTERM",
    }.get(fault) or next(text for word, text in WORDS.items() if word in fault)  # fmt: skip
    first = "" if fault == "sys.exit(1)" else r"rank 1 (\(process \d+ on .* \(MS_NODE_ID=1\)\) )?"
    ends("the scheduler, no recovery", f"worker: {fault}", outcome, f"{first}.*{how}", "scheduler")
    assert outcome.codes["scheduler"] == (143 if fault == "SIGTERM" else 1)


@pytest.mark.parametrize("fault", ["killed in a step", "an exception in forward", "sys.exit(1)"])
def test_a_job_of_torchrun_without_restarts_ends(fault: str, tmp_path: Path) -> None:
    job = by_torchrun(tmp_path, 0)
    (tmp_path / "fault").write_text(IN_THE_SCRIPT[fault])
    said = {"killed in a step": "Signal 9", "an exception in forward": "ValueError: a bad batch"}.get(
        fault, "exitcode: 1"
    )
    ends("torchrun, no restarts", f"worker: {fault}", job.run(), said, "agent")


FROM_OUTSIDE: dict[str, tuple[str, tuple[str, ...], int, float]] = {
    "both workers killed": ("the scheduler", ("0", "1"), signal.SIGKILL, 0),
    "both workers of torchrun killed": ("torchrun", ("0", "1"), signal.SIGKILL, 0),
    "a worker stopped for 3 s": ("the scheduler", ("1",), signal.SIGSTOP, 3),
    "a worker of torchrun stopped for 3 s": ("torchrun", ("1",), signal.SIGSTOP, 3),
    "a worker stopped for 15 s": ("the scheduler", ("1",), signal.SIGSTOP, 15),
    "the scheduler killed": ("the scheduler", ("scheduler",), signal.SIGKILL, 0),
    "the scheduler told to end": ("the scheduler", ("scheduler",), signal.SIGTERM, 0),
    "the scheduler stopped for 5 s": ("the scheduler", ("scheduler",), signal.SIGSTOP, 5),
    "the scheduler stopped for 15 s": ("the scheduler", ("scheduler",), signal.SIGSTOP, 15),
    "a worker of torchrun stopped": ("torchrun", ("1",), signal.SIGSTOP, 0),
    "torchrun stopped for 5 s": ("torchrun", ("agent",), signal.SIGSTOP, 5),
    "SIGTERM to both workers": ("the scheduler", ("0", "1"), signal.SIGTERM, 0),
}


@pytest.mark.parametrize("fault", FROM_OUTSIDE)
def test_what_comes_from_outside_is_survived(fault: str, whole: dict[int, set[str]], tmp_path: Path) -> None:
    launcher, names, number, later = FROM_OUTSIDE[fault]
    job = LAUNCHERS[launcher](tmp_path, 3, PAUSE=PAUSE)
    resumes = (later, lambda job: job.kill(signal.SIGCONT, *names)) if later else None
    goes_on(launcher, fault, job.run(lambda job: job.kill(number, *names), resumes), whole)


@pytest.mark.parametrize(
    "fault",
    ["a worker stopped", "the scheduler stopped", "the scheduler killed", "the scheduler told to end", "Ctrl-C"],
)
def test_what_does_not_recover_ends_from_outside_too(fault: str, tmp_path: Path) -> None:
    job = by_the_scheduler(tmp_path, 0, PAUSE=PAUSE)
    names, number, said, by = {
        "a worker stopped": (("1",), signal.SIGSTOP, r"rank 1 .* has not answered for \d+ s", "scheduler"),
        "the scheduler stopped": (("scheduler",), signal.SIGSTOP, r"the scheduler at 127\S+ has not answered for", "0"),
        "the scheduler killed": (("scheduler",), signal.SIGKILL, r"the scheduler at 127\S+ has ended", "0"),
        "the scheduler told to end": (("scheduler",), signal.SIGTERM, "the scheduler was asked to end by SIGTERM", "0"),
        "Ctrl-C": (("scheduler", "0", "1"), signal.SIGINT, "KeyboardInterrupt", "0"),
    }[fault]
    later = (15.0, lambda job: job.kill(signal.SIGCONT, *names)) if number == signal.SIGSTOP else None
    ends("the scheduler, no recovery", fault, job.run(lambda job: job.kill(number, *names), later), said, by)


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL], ids=["SIGTERM", "SIGINT", "SIGKILL"]
)
def test_torchrun_that_is_ended_ends_its_workers(number: int, tmp_path: Path) -> None:
    said = "rank 1|Sending process|ended" if number != signal.SIGKILL else ""
    ends("torchrun", f"{signal.Signals(number).name} to torchrun", by_torchrun(tmp_path, 0).run(
        lambda job: job.kill(number, "agent")), said, "agent")  # fmt: skip


# -- Ray Train

ON_RAY = [
    "killed in a step", "crashed", "an exception in planning", "an exception in forward", "sys.exit(1)", "os._exit(7)",
    "out of memory", "SIGTERM",
]  # fmt: skip
ray_train = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")


@ray_train
@pytest.mark.timeout(400)
@pytest.mark.parametrize("fault", ON_RAY)
def test_a_worker_of_ray_that_ends_is_replaced(fault: str, whole: dict[int, set[str]], tmp_path: Path) -> None:
    job = by_ray(tmp_path, 3, PAUSE="0.2")
    (tmp_path / "fault").write_text(IN_THE_SCRIPT[fault])
    goes_on("Ray Train", f"worker: {fault}", job.run(limit=300), whole)


@ray_train
@pytest.mark.timeout(400)
def test_both_workers_of_ray_are_replaced(whole: dict[int, set[str]], tmp_path: Path) -> None:
    outcome = by_ray(tmp_path, 3, PAUSE="0.2").run(lambda job: job.kill(signal.SIGKILL, "0", "1"), limit=300)
    goes_on("Ray Train", "both workers killed", outcome, whole)


@ray_train
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("fault", "said"), [
    ("killed in a step", "ActorDiedError|[Aa]ctor died"), ("an exception in forward", "ValueError: a bad batch"),
])  # fmt: skip
def test_a_job_of_ray_without_restarts_ends(fault: str, said: str, tmp_path: Path) -> None:
    job = by_ray(tmp_path, 0, PAUSE="0.2")
    (tmp_path / "fault").write_text(IN_THE_SCRIPT[fault])
    ends("Ray Train, no restarts", f"worker: {fault}", job.run(limit=300), said, "driver")


@ray_train
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("name", "said"), [("SIGTERM", "SIGTERM received"), ("SIGINT", "Received SIGINT"), ("SIGKILL", "")]
)
def test_a_driver_of_ray_that_is_ended_ends_its_workers(name: str, said: str, tmp_path: Path) -> None:
    number = signal.Signals[name]
    outcome = by_ray(tmp_path, 0, PAUSE="0.2").run(lambda job: job.kill(number, "driver"), limit=300)
    ends("Ray Train", f"{name} to the driver", outcome, said, "driver")


# -- At the start


def without(job: Job, *names: str) -> Job:
    job.start = {name: how for name, how in job.start.items() if name not in names}
    return job


def never(job: Job) -> bool:
    return True


def test_a_worker_that_is_never_started(tmp_path: Path) -> None:
    job = without(by_the_scheduler(tmp_path, 0, MS_TOPO_TIMEOUT="8"), "1")
    outcome = job.run(lambda job: None, until=never)
    ends("the scheduler", "a worker never started", outcome, r"1 of 2 workers came .* missing: MS_NODE_ID=1", "0")
    assert "missing: MS_NODE_ID=1" in outcome.said["scheduler"]


def test_a_scheduler_that_is_never_started(tmp_path: Path) -> None:
    job = without(by_the_scheduler(tmp_path, 0, MS_TOPO_TIMEOUT="6"), "scheduler")
    outcome = job.run(lambda job: None, until=never)
    ends("the scheduler", "no scheduler", outcome, "MS_WORKER cannot reach the scheduler at .*; start one process", "1")


@pytest.mark.parametrize("twice", ["1", "scheduler"])
def test_one_that_is_started_twice_ends_and_the_others_go_on(
    twice: str, whole: dict[int, set[str]], tmp_path: Path
) -> None:
    job = by_the_scheduler(tmp_path, 0)
    job.start = {**job.start, "twin": job.start[twice]}
    names, job.start = job.start, without(job, "twin").start

    def begin(job: Job) -> None:
        job.start = names
        job.begin("twin")

    outcome = job.run(begin)
    said = {"1": "has that number already|all 2 workers are there already", "scheduler": "MS_SCHED cannot listen at"}
    assert outcome.codes.pop("twin") == 1
    assert re.search(said[twice], outcome.said["twin"]), outcome
    outcome.goes_on = True
    assert set(outcome.codes.values()) == {0}, outcome
    goes_on("the scheduler", f"{'a worker' if twice == '1' else 'the scheduler'} started twice", outcome, whole)


@pytest.mark.parametrize("host", ["192.0.2.7", "no-such-host.invalid"])
def test_a_host_that_is_not_there(host: str, tmp_path: Path) -> None:
    job = by_the_scheduler(tmp_path, 0, MS_SCHED_HOST=host, MS_TOPO_TIMEOUT="6")
    outcome = job.run(lambda job: None, until=never)
    ends("the scheduler", f"MS_SCHED_HOST={host}", outcome, f"MS_SCHED cannot listen at {host}", "scheduler")
    assert "MS_WORKER cannot reach the scheduler at" in outcome.said["0"]


def test_an_agent_of_torchrun_that_never_comes(tmp_path: Path) -> None:
    job = by_torchrun(tmp_path, 0)
    command, own = job.start["agent"]
    job.start = {"agent": ([*command[:-1], "--nnodes", "2", "--rdzv-conf", "join_timeout=8", command[-1]], own)}
    outcome = job.run(lambda job: None, until=never)
    ends("torchrun", "an agent never started", outcome, r"Rendezvous\w*Timeout\w*", "agent")


@pytest.mark.parametrize("host", ["192.0.2.7", "no-such-host.invalid"])
def test_a_host_of_torchrun_that_is_not_there(host: str, tmp_path: Path) -> None:
    job = by_torchrun(tmp_path, 0)
    command, own = job.start["agent"]
    job.start = {"agent": ([text.replace("127.0.0.1", host) for text in command], own)}
    outcome = job.run(lambda job: None, until=never, limit=200)
    ends("torchrun", f"--rdzv-endpoint={host}", outcome, "The connection to the C10d store has failed", "agent")


def test_a_torchrun_that_is_started_twice_ends(whole: dict[int, set[str]], tmp_path: Path) -> None:
    job = by_torchrun(tmp_path, 0)
    job.start = {**job.start, "twin": job.start["agent"]}
    outcome = job.run(lambda job: None, until=never)
    [ended] = [name for name, code in outcome.codes.items() if code != 0]
    del outcome.codes[ended]
    outcome.goes_on = True
    goes_on("torchrun", "started twice", outcome, whole)


# -- Disks and networks


@contextmanager
def small(folder: Path) -> Iterator[None]:
    """A disk of 64 KiB in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("this user may not mount a small disk")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_full_disk_is_named(launcher: str, tmp_path: Path) -> None:
    with small(tmp_path / "kept"):
        job = LAUNCHERS[launcher](tmp_path, 0)
        (tmp_path / "kept" / "filler").write_bytes(bytes(56 * 1024))
        outcome = job.run(lambda job: None, until=never)
    ends(
        launcher,
        "a full disk",
        outcome,
        "No space left on device.*",
        "agent" if launcher == "torchrun" else "scheduler",
    )


@pytest.fixture
def hosts() -> Iterator[tuple[namespaces.Host, namespaces.Host]]:
    if why := namespaces.unavailable():
        pytest.skip(why)
    with namespaces.several_hosts(2) as pair:
        yield pair


def on_hosts(hosts: tuple[namespaces.Host, namespaces.Host], folder: Path, silence: int) -> Job:
    """The scheduler and rank 0 on one host, rank 1 on the other."""
    one, two = hosts
    job = by_the_scheduler(folder, 0, MS_SCHED_HOST=one.address, MS_NODE_TIMEOUT=str(silence))
    place = {"scheduler": one, "0": one, "1": two}
    job.start = {name: (place[name].command(command), own) for name, (command, own) in job.start.items()}
    job.ports = ()
    return job


def test_a_network_that_is_cut_for_10_s(
    hosts: tuple[namespaces.Host, namespaces.Host], whole: dict[int, set[str]], tmp_path: Path
) -> None:
    job = on_hosts(hosts, tmp_path, 30)
    for name, (command, own) in job.start.items():
        job.start = {**job.start, name: (command, {**own, "LIMIT": "60"})}
    outcome = job.run(lambda job: hosts[1].cut(), (10, lambda job: hosts[1].mend()))
    goes_on("the scheduler", "the network cut for 10 s", outcome, whole)


def by_torchrun_on(hosts: tuple[namespaces.Host, namespaces.Host], folder: Path, again: int, limit: int) -> Job:
    """An agent and a worker on each host."""
    job = by_torchrun(folder, again, LIMIT=str(limit))
    command, own = job.start["agent"]
    command = [hosts[0].address + text[9:] if text.startswith("127.0.0.1") else text for text in command]
    command[command.index("--nproc-per-node") + 1] = "1"
    names = zip(("agent", "other agent"), hosts, strict=True)
    nodes = [*command[:-1], "--nnodes", "2", "--local-addr"]
    job.start = {name: (host.command([*nodes, host.address, command[-1]]), own) for name, host in names}
    job.ports = ()
    return job


def test_a_network_of_torchrun_that_is_cut_for_10_s(
    hosts: tuple[namespaces.Host, namespaces.Host], whole: dict[int, set[str]], tmp_path: Path
) -> None:
    job = by_torchrun_on(hosts, tmp_path, 3, 60)
    outcome = job.run(lambda job: hosts[1].cut(), (10, lambda job: hosts[1].mend()), limit=200)
    goes_on("torchrun", "the network cut for 10 s", outcome, whole)


def test_a_network_of_torchrun_that_is_cut_for_good(
    hosts: tuple[namespaces.Host, namespaces.Host], tmp_path: Path
) -> None:
    """The workers end. PyTorch's agent on the host that was cut off waits for its store, as long as the system tries to
    reach it: a quarter of an hour on Linux."""
    outcome = by_torchrun_on(hosts, tmp_path, 0, 20).run(lambda job: hosts[1].cut(), limit=100)
    assert outcome.left == ["other agent"], outcome
    assert outcome.codes["agent"] == 1
    assert "does not answer" in outcome.said["agent"], outcome
    assert "the store has not answered for 20 s" in outcome.said["other agent"], outcome
    row("torchrun", "the network cut for good", outcome, "workers end; the agent that was cut off waits 15 min")


def test_a_network_that_is_cut_for_good(hosts: tuple[namespaces.Host, namespaces.Host], tmp_path: Path) -> None:
    outcome = on_hosts(hosts, tmp_path, 6).run(lambda job: hosts[1].cut())
    ends("the scheduler", "the network cut for good", outcome, r"rank 1 .* has not answered for \d+ s", "scheduler")
    assert re.search(r"rank 1 ends: the scheduler at \S+ has not answered for 6 s", outcome.said["1"]), outcome
