"""A scheduler and its workers find each other, and end together: nothing is left behind, and all say why."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import textwrap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from certificates import Authority
from scripts import free_port, run_script

import partway as pw
from partway.strategy import RuntimeStateError

Ended = list[subprocess.CompletedProcess[str]]
Job = Callable[..., Ended]

SCRIPT = """
    import os, sys, time, torch, torch.distributed as dist
    import partway as pw

    size = pw.init(backend="gloo", timeout=20)
    x = torch.ones(1) * (pw.get_rank() + 1)
    dist.all_reduce(x)
    print("rank", pw.get_rank(), "of", pw.get_group_size(), size, "sum", x.item())
"""
GOES_ON = (
    SCRIPT
    + """
    if "FAULT" in os.environ:
        exec(os.environ["FAULT"])
    for _ in range(600):
        dist.all_reduce(x)
        time.sleep(0.1)
"""
)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """`job(script, workers, number)`: run a scheduler for `number` workers and those of `workers`, each with variables
    of its own, at once. Returns how they ended, the scheduler first."""

    def run(script: str, workers: list[dict[str, str]], number: int, **common: str) -> Ended:
        (tmp_path / "script.py").write_text(textwrap.dedent(script), encoding="utf-8")
        hosts = {"MS_SCHED_HOST": "127.0.0.1", "MS_SCHED_PORT": str(free_port()), "MS_WORKER_NUM": str(number)}
        kept = {name: text for name, text in os.environ.items() if not name.startswith("MS_")}
        every = [{"MS_ROLE": "MS_SCHED"}, *({"MS_ROLE": "MS_WORKER", **own} for own in workers)]
        with ThreadPoolExecutor(len(every)) as pool:
            started = [
                pool.submit(run_script, ["script.py"], tmp_path, {**kept, **hosts, **common, **own}) for own in every
            ]
            return [process.result() for process in started]

    return run


def last(ended: subprocess.CompletedProcess[str]) -> str:
    """The last line of what a process said on stderr."""
    return (ended.stderr.strip().splitlines() or [""])[-1]


@pytest.mark.gloo
@pytest.mark.parametrize("numbered", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_scheduler_and_its_workers_run_one_script(job: Job, numbered: bool) -> None:
    scheduler, *workers = job(SCRIPT, [{"MS_NODE_ID": str(1 - i)} if numbered else {} for i in range(2)], 2)
    assert [process.returncode for process in (scheduler, *workers)] == [0, 0, 0], (scheduler, workers)
    assert scheduler.stdout == "", "the scheduler ran the script"
    expected = [f"rank {rank} of 2 2 sum 3.0\n" for rank in (0, 1)]
    lines = [worker.stdout for worker in workers]
    assert lines == expected[::-1] if numbered else sorted(lines) == expected


@pytest.mark.slow
@pytest.mark.gloo
def test_they_meet_at_an_address_of_ipv6(job: Job) -> None:
    ended = job(SCRIPT, [{}, {}], 2, MS_SCHED_HOST="[::1]", PARTWAY_JOB_SECRET="0123456789abcdef")
    assert [process.returncode for process in ended] == [0, 0, 0], ended
    assert sorted(worker.stdout for worker in ended[1:]) == [f"rank {rank} of 2 2 sum 3.0\n" for rank in (0, 1)]


@pytest.mark.slow
@pytest.mark.gloo
def test_too_few_workers_are_told_who_came(job: Job) -> None:
    ended = job(SCRIPT, [{"MS_NODE_ID": "1"}], 3, MS_TOPO_TIMEOUT="10")
    assert [process.returncode for process in ended] == [1, 1]
    for process in ended:
        assert "1 of 3 workers came to the scheduler at 127.0.0.1:" in last(process)
        assert "in 10 s (MS_TOPO_TIMEOUT): process" in last(process)
        assert last(process).endswith("(MS_NODE_ID=1); missing: MS_NODE_ID=0, MS_NODE_ID=2")


WRONG = {
    "MS_NODE_ID=1": ({"MS_NODE_ID": "1"}, r"has that number already; give each worker its own MS_NODE_ID, or none any"),
    "MS_NODE_ID=7": ({"MS_NODE_ID": "7"}, r"with MS_WORKER_NUM=2, MS_NODE_ID is 0 to 1"),
    "number": ({"MS_WORKER_NUM": "4"}, r"it has MS_WORKER_NUM=4, and the scheduler 2; set one number everywhere"),
    "version": ({"OTHER": "1"}, r"it runs something else, and the scheduler partway"),
    "recovery": ({"MS_ENABLE_RECOVERY": "1"}, r"MS_ENABLE_RECOVERY=1 is set for it alone; set it everywhere"),
    "too many": ({}, r"all 2 workers are there already \(MS_WORKER_NUM\); start no more"),
}
BEFORE = """
    import atexit, os, pathlib, time

    def wait_for(*names):
        while not all(map(os.path.exists, names)):
            time.sleep(0.05)

    wait_for(*os.environ["AFTER"].split())
    if "SLEEP" in os.environ:  # until the first has handed in its card
        time.sleep(3)
    if "WRONG" in os.environ:
        atexit.register(pathlib.Path("refused").touch)
    else:
        pathlib.Path("begins").touch()
    if "OTHER" in os.environ:
        import partway.runtime.launching.scheduler as scheduler
        scheduler.versions = lambda: "something else"
"""
STAY = """
    pathlib.Path(f"in.{pw.get_rank()}").touch()
    wait_for("refused")
"""


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("wrong", WRONG)
def test_a_worker_that_does_not_fit_is_told_so_and_the_others_go_on(job: Job, wrong: str) -> None:
    own, text = WRONG[wrong]
    when = {"AFTER": "in.0 in.1"} if wrong == "too many" else {"AFTER": "begins", "SLEEP": "1"}
    first, second = {"MS_NODE_ID": "1"}, {} if wrong == "too many" else {"AFTER": "refused"}  # there is room till then
    every = [{"AFTER": "", **first}, {"AFTER": "", **second}, {"WRONG": "1", **when, **own}]
    scheduler, *workers, refused = job(BEFORE + SCRIPT + STAY, every, 2, AFTER="")
    assert refused.returncode == 1
    assert last(refused).startswith("partway.strategy.errors.RuntimeStateError: process")
    assert "is not let in by the scheduler at 127.0.0.1:" in last(refused)
    assert re.search(text, last(refused)), refused
    assert [process.returncode for process in (scheduler, *workers)] == [0, 0, 0], (scheduler, workers)


FAULTS = {
    "an exception": ("raise ValueError('a bad batch')", r"failed: ValueError: a bad batch"),
    "a kill": ("os.kill(os.getpid(), 9)", r"was killed or crashed"),
    "a stop": ("os.kill(os.getpid(), 19)", r"has not answered for \d+ s"),
}


@pytest.mark.gloo
@pytest.mark.parametrize(
    "fault", ["an exception", *(pytest.param(fault, marks=pytest.mark.slow) for fault in ("a kill", "a stop"))]
)
def test_a_worker_that_fails_ends_all_with_its_name(job: Job, fault: str) -> None:
    code, text = FAULTS[fault]
    if fault == "a stop":  # it cannot end itself: another process lets it go on after a while, to be ended
        code = "import subprocess; subprocess.Popen(['sh', '-c', f'sleep 25; kill -CONT {os.getpid()}']); " + code
    workers = [{"MS_NODE_ID": "0"}, {"MS_NODE_ID": "1", "FAULT": code}]
    scheduler, first, second = job(GOES_ON, workers, 2, MS_NODE_TIMEOUT="5")
    assert re.search(rf"rank 1 \(process \d+ on .* \(MS_NODE_ID=1\)\) {text}", last(scheduler)), scheduler
    assert scheduler.returncode == 1
    assert first.returncode == 1
    assert second.returncode != 0
    assert "rank 1" in first.stderr


@pytest.mark.slow
@pytest.mark.gloo
def test_a_worker_that_meets_nobody_is_ended_with_its_job(job: Job) -> None:
    alone = "time.sleep(40); sys.stdout.write('went on')"
    workers = [{"MS_NODE_ID": "0", "FAULT": alone}, {"MS_NODE_ID": "1", "FAULT": FAULTS["an exception"][0]}]
    scheduler, first, _ = job(GOES_ON, workers, 2)
    assert (scheduler.returncode, first.returncode) == (1, 1)
    assert "partway: rank 0 ends: rank 1" in first.stderr
    assert "went on" not in first.stdout


@pytest.mark.slow
@pytest.mark.gloo
def test_workers_end_where_their_scheduler_is_gone(job: Job) -> None:
    script = (
        """
    import os, threading, time
    if os.environ["MS_ROLE"] == "MS_SCHED":
        threading.Timer(6, lambda: os._exit(9)).start()
    """
        + GOES_ON
    )
    scheduler, *workers = job(script, [{}, {}], 2)
    assert scheduler.returncode == 9
    for worker in workers:
        assert worker.returncode == 1, worker
        assert "the scheduler at 127.0.0.1:" in worker.stderr
        assert "has ended" in worker.stderr


KEY = "0123456789abcdef"


@pytest.mark.gloo
def test_workers_with_the_secret_train_and_one_without_is_refused(job: Job) -> None:
    mine = {"PARTWAY_JOB_SECRET": KEY}
    others = [{"PARTWAY_JOB_SECRET": KEY[::-1]}, {"PARTWAY_JOB_SECRET": ""}]
    wait = "import os\nif not os.environ['PARTWAY_JOB_SECRET']: del os.environ['PARTWAY_JOB_SECRET']\n"
    script = wait + "\n".join(line[4:] for line in SCRIPT.splitlines())
    ended = job(script, [mine, mine, *others], 2, PARTWAY_JOB_SECRET=KEY)
    scheduler, *workers, wrong, without = ended
    assert [one.returncode for one in (scheduler, *workers)] == [0, 0, 0], ended
    assert sorted(one.stdout for one in workers) == [f"rank {rank} of 2 2 sum 3.0\n" for rank in (0, 1)]
    assert "has another secret; give all processes of a job the same PARTWAY_JOB_SECRET" in last(wrong)
    assert "asks for the job's secret (PARTWAY_JOB_SECRET), and this process has none" in last(without)
    assert not any(KEY in one.stderr + one.stdout for one in ended)


@pytest.mark.slow
@pytest.mark.gloo
def test_a_worker_with_a_secret_is_not_content_with_a_scheduler_without(job: Job) -> None:
    _, worker = job(SCRIPT, [{"PARTWAY_JOB_SECRET": KEY}], 2, MS_TOPO_TIMEOUT="20")
    assert worker.returncode == 1
    assert "does not ask for the job's secret (PARTWAY_JOB_SECRET) that this process has: set" in last(worker)


@pytest.mark.slow
@pytest.mark.gloo
def test_workers_with_certificates_train_and_one_of_another_authority_is_refused(job: Job, tmp_path: Path) -> None:
    for name in ("authority", "other"):
        authority = Authority(tmp_path, name)
        files = {f"{side}_cert_path": authority.sign(f"{side} {name}").name for side in ("server", "client")}
        config = tmp_path / f"{name}.json"
        config.write_text(json.dumps({**files, "ca_cert_path": authority.file.name}), encoding="utf-8")
        config.chmod(0o600)
    context = (
        "    import partway as pw, os; pw.set_ps_context(enable_ssl=True, config_file_path=os.environ['CONFIG'])\n"
    )
    ended = job(context + SCRIPT, [{}, {}, {"CONFIG": "other.json"}], 2, CONFIG="authority.json")
    *well, refused = ended
    assert [one.returncode for one in well] == [0, 0, 0], ended
    assert sorted(one.stdout for one in well) == ["", *(f"rank {rank} of 2 2 sum 3.0\n" for rank in (0, 1))]
    assert "shows a certificate that this process does not accept" in last(refused)


# -- In one process


@pytest.fixture
def set_all(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def run(**variables: Any) -> None:
        given = {"MS_ROLE": "MS_WORKER", "MS_WORKER_NUM": "2", "MS_SCHED_HOST": "127.0.0.1", "MS_SCHED_PORT": "6667"}
        for name, text in {**given, **variables}.items():
            monkeypatch.setenv(name, str(text))

    return run


@pytest.mark.parametrize(("name", "text", "said"), [
    ("MS_WORKER_NUM", "0", "MS_WORKER_NUM is '0'; it must be an int of 1 or more"),
    ("MS_SCHED_PORT", "http", "MS_SCHED_PORT is 'http'; it must be an int of 1 or more"),
    ("MS_ROLE", "MS_SERVER", "MS_ROLE is 'MS_SERVER'; it must be MS_WORKER or MS_SCHED"),
    ("MS_NODE_ID", "-1", "MS_NODE_ID is '-1'; it must be an int of 0 or more"),
    ("MS_TOPO_TIMEOUT", "soon", "MS_TOPO_TIMEOUT is 'soon'; it is a number of seconds, such as 30"),
    ("MS_ENABLE_RECOVERY", "yes", "MS_ENABLE_RECOVERY is 'yes'; it is 1, or 0 for no recovery"),
])  # fmt: skip
def test_wrong_variables_are_named(set_all: Callable[..., None], name: str, text: str, said: str) -> None:
    set_all(**{name: text})
    with pytest.raises(RuntimeStateError, match=said):
        pw.init()


def test_a_scheduler_that_cannot_listen_says_where(set_all: Callable[..., None]) -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        set_all(MS_ROLE="MS_SCHED", MS_SCHED_PORT=port)
        with pytest.raises(RuntimeStateError, match=f"MS_SCHED cannot listen at 127.0.0.1:{port}: Address already in"):
            pw.init()
    set_all(MS_ROLE="MS_SCHED", MS_SCHED_HOST="192.0.2.77")
    with pytest.raises(RuntimeStateError, match=r"cannot listen at 192\.0\.2\.77:6667: .*; MS_SCHED_HOST is an addre"):
        pw.init()


def test_a_worker_without_a_scheduler_says_what_to_start(set_all: Callable[..., None]) -> None:
    set_all(MS_SCHED_PORT=free_port(), MS_TOPO_TIMEOUT="1")
    with pytest.raises(RuntimeStateError, match=r"MS_WORKER cannot reach the scheduler at .*; start one process with"):
        pw.init()
