"""The operator as a process on an API server in memory: definitions and the server come and go; Lease and memory."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from api_server_in_memory import JOBS, ApiServer
from operator_world import a_job
from probes import health
from scripts import free_port


class Process:
    """The operator on a server, with its health."""

    def __init__(
        self,
        server: ApiServer,
        folder: Path,
        *arguments: str,
        program: tuple[str, ...] = ("-m", "partway.commands.cli"),
    ) -> None:
        self._url = f"http://127.0.0.1:{free_port()}/healthz"
        self._log = folder / f"operator-{time.monotonic_ns()}.log"
        command = [sys.executable, *program, "operator", "run", "--health", self._url, *arguments]
        environment = {**os.environ, "KUBECONFIG": str(server.configured(folder)), "OMP_NUM_THREADS": "1"}
        with open(self._log, "wb") as log:
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def health(self) -> tuple[int, str]:
        return health(self._url)

    def until(self, there: Callable[[], Any], what: str, seconds: float = 120) -> None:
        """Wait until something is so."""
        end = time.monotonic() + seconds
        while not there():
            assert time.monotonic() < end, f"no {what}\n{self.said()}"
            assert self.process.poll() is None, self.said()
            time.sleep(0.05)

    def until_well(self) -> None:
        self.until(lambda: self.health()[0] == 200, "health")

    def until_it_works(self) -> None:
        """Until it is well and holds the lease: while it waits for that it is well, too."""
        self.until(lambda: "holds the lease" in self.said(), "lease")
        self.until_well()

    def until_ill(self, said: str) -> None:
        self.until(lambda: self.health()[0] == 503 and said in self.health()[1], f"503 with {said!r}")

    def said(self) -> str:
        return self._log.read_text()


@pytest.fixture
def server() -> Iterator[ApiServer]:
    own = ApiServer()
    own.start()
    yield own
    own.stop()


@pytest.fixture
def start(server: ApiServer, tmp_path: Path) -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def begin(*arguments: str, **more: Any) -> Process:
        started.append(Process(server, tmp_path, *arguments, **more))
        return started[-1]

    yield begin
    for each in started:
        each.process.kill()
        each.process.wait(30)


def serves(server: ApiServer, operator: Process, name: str, namespace: str = "default") -> None:
    """Have a new job served."""
    job = a_job(name=name)
    job["metadata"]["namespace"] = namespace
    server.put(JOBS, job)
    operator.until(lambda: server.get("pods", f"{name}-worker-0", namespace), f"pod of {name}")


def test_before_its_definition_it_is_ill_and_serves_as_soon_as_that_is_there(
    server: ApiServer, start: Callable[..., Process]
):
    server.defined = False
    operator = start()
    operator.until_ill("define it: partway operator manifests | kubectl apply -f -")
    server.defined = True
    serves(server, operator, "job")
    operator.until_well()


def test_a_definition_that_goes_and_comes_again_is_served_again(server: ApiServer, start: Callable[..., Process]):
    operator = start()
    serves(server, operator, "first")
    operator.until_well()
    for name in ("second", "third"):
        server.undefine()
        operator.until_ill("partwayjobs: ")
        server.defined = True
        serves(server, operator, name)
        operator.until_well()
    assert server.names("pods") == ["third-worker-0"]


def test_across_a_restart_of_the_api_server_it_serves_what_was_made_meanwhile(
    server: ApiServer, start: Callable[..., Process]
):
    operator = start()
    operator.until_well()
    server.stop()
    operator.until_ill("partwayjobs: ")
    server.put(JOBS, a_job(name="meanwhile"))
    server.forget()  # what has changed meanwhile cannot be watched any more
    server.start()
    operator.until(lambda: server.get("pods", "meanwhile-worker-0"), "pod")
    operator.until_well()


def test_started_while_the_api_server_is_away_it_serves_when_that_is_back(
    server: ApiServer, start: Callable[..., Process]
):
    server.stop()
    operator = start()
    operator.until_ill("partwayjobs: ")
    server.defined = False  # an API server that starts knows definitions a moment later
    server.start()
    operator.until_ill("define it")
    server.defined = True
    serves(server, operator, "job")
    operator.until_well()


def test_what_it_may_not_read_is_said_by_its_health(server: ApiServer, start: Callable[..., Process]):
    server.forbidden = {"pods"}
    operator = start("--namespace", "here")
    operator.until_ill("pods of here: pods is forbidden")
    server.forbidden = set()
    operator.until_well()


def test_an_operator_of_a_namespace_serves_no_other(server: ApiServer, start: Callable[..., Process]):
    operator = start("--namespace", "here", "--namespace", "there")
    server.put(JOBS, a_job(name="stranger"))
    serves(server, operator, "job", "here")
    serves(server, operator, "job", "there")
    assert ("pods", "default", "stranger-worker-0") not in server.objects


def test_it_ends_when_it_is_told_to(server: ApiServer, start: Callable[..., Process]):
    operator = start()
    serves(server, operator, "job")
    operator.process.send_signal(signal.SIGTERM)
    assert operator.process.wait(60) == 0
    assert "ends after " in operator.said()
    assert "Traceback" not in operator.said()


# -- The Lease

LEASE = ("--lease", "system/operator")


def renewed(server: ApiServer) -> str:
    return str(server.get("leases", "operator", "system").get("spec", {}).get("renewTime"))


def test_a_lease_is_asked_for_until_the_api_server_answers(server: ApiServer, start: Callable[..., Process]):
    server.stop()
    operator = start(*LEASE)
    operator.until_ill("lease system/operator: MaxRetryError: ")
    server.start()
    serves(server, operator, "job")
    operator.until_well()


def test_a_lease_is_renewed_after_a_short_restart_of_the_api_server(server: ApiServer, start: Callable[..., Process]):
    operator = start(*LEASE)
    operator.until_it_works()
    server.stop()
    operator.until_ill("partwayjobs: ")
    before = renewed(server)
    server.start()
    operator.until(lambda: renewed(server) != before, "renewal")
    operator.until_well()


def test_a_lease_that_may_not_be_read_is_said_by_its_health(server: ApiServer, start: Callable[..., Process]):
    server.forbidden = {"leases"}
    start(*LEASE).until_ill("lease system/operator: leases is forbidden")


def test_one_that_waits_for_the_lease_is_well_and_does_nothing(server: ApiServer, start: Callable[..., Process]):
    works = start(*LEASE)
    works.until_it_works()
    waits = start(*LEASE)
    waits.until_well()
    serves(server, works, "job")
    assert "holds the lease" in works.said()
    assert "watches" not in waits.said()


@pytest.mark.slow
def test_one_that_cannot_renew_its_lease_ends(server: ApiServer, start: Callable[..., Process]):
    operator = start(*LEASE)
    operator.until_it_works()
    server.stop()
    assert operator.process.wait(120) == 1
    assert "no longer holds the lease system/operator, and ends" in operator.said()


# -- Memory

TRACED = """
import gc, signal, tracemalloc

def say(*_):
    gc.collect()
    print("holds", tracemalloc.get_traced_memory()[0], flush=True)

signal.signal(signal.SIGUSR1, say)
tracemalloc.start(1)
from partway.commands.cli import app
app()
"""


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_rounds_of_200_jobs_leave_nothing_in_memory(server: ApiServer, start: Callable[..., Process]):
    """The first two rounds have the client make what it makes once, and the third and fourth are as the second."""

    def ended(pod: dict[str, Any]) -> None:
        state = {"terminated": {"exitCode": 0, "finishedAt": "2026-01-01T00:00:00Z"}}
        pod["status"] = {"phase": "Succeeded", "containerStatuses": [{"name": "main", "state": state}]}

    server.made = ended
    operator = start(program=("-c", TRACED))
    operator.until_well()
    holds: list[int] = []
    for number in range(4):
        names = [f"many-{number}-{i}" for i in range(200)]
        for name in names:
            server.put(JOBS, a_job(workers=8, name=name))
        operator.until(lambda: set(server.phases().values()) == {"Succeeded"}, "success of all jobs", 300)
        for name in names:
            server.remove(JOBS, name)
        asked = -1
        while asked != len(server.requests):  # until it has seen that they are gone
            asked = len(server.requests)
            time.sleep(2)
        operator.process.send_signal(signal.SIGUSR1)
        operator.until(lambda: len(re.findall(r"holds (\d+)", operator.said())) > len(holds), "figure")  # noqa: B023
        holds = [int(each) for each in re.findall(r"holds (\d+)", operator.said())]
    sys.stdout.write(f"MB of Python objects after each round: {[round(each / 1e6, 2) for each in holds]}\n")
    assert max(holds[1:]) - min(holds[1:]) < 500_000
