"""The example server, as clients see it: answers of one device, what is refused, clients that leave, ranks that die."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from scripts import free_port

pytest.importorskip("fastapi", reason="FastAPI is not installed")
pytest.importorskip("uvicorn", reason="uvicorn is not installed")

pytestmark = [pytest.mark.gloo, pytest.mark.xdist_group("serve"), pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "serve.py"
SMALL = ("--hidden", "64", "--layers", "1", "--batch", "2", "--room", "32", "--waiting", "2")


class Served:
    """A server in processes of its own, and its port."""

    def __init__(self, folder: Path, launch: Sequence[str], *more: str) -> None:
        self.port, self.output = free_port(), folder / "output"
        command = [sys.executable, *launch, str(SCRIPT), *SMALL, *more, "--port", str(self.port)]
        kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "FORCE_COLOR")}
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                command, cwd=folder, env={**kept, "OMP_NUM_THREADS": "1"}, stdout=output, stderr=subprocess.STDOUT
            )

    def text(self) -> str:
        return self.output.read_text()

    def wait(self, seconds: float, until: Callable[[], bool]) -> None:
        start = time.monotonic()
        while not until():
            assert time.monotonic() - start < seconds, self.text()
            time.sleep(0.1)

    def listens(self) -> bool:
        assert self.process.poll() is None, self.text()
        return "listening on" in self.text()

    @contextmanager
    def asked(self, **asked: Any) -> Iterator[http.client.HTTPResponse]:
        """The response to a request, which is closed at the end."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            connection.request("POST", "/generate", json.dumps(asked), {"content-type": "application/json"})
            yield connection.getresponse()
        finally:
            connection.close()

    def answer(self, tokens: Sequence[int], count: int, **more: Any) -> Any:
        """Status and content of the answer to a prompt."""
        with self.asked(tokens=list(tokens), max_new_tokens=count, stream=False, **more) as response:
            return response.status, json.loads(response.read())

    def rank(self, rank: int) -> int:
        """The process of a rank."""
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                variables = (folder / "environ").read_bytes().split(b"\0")
                if (
                    f"RANK={rank}".encode() in variables
                    and str(self.port).encode() in (folder / "cmdline").read_bytes()
                ):
                    return int(folder.name)
        raise AssertionError(f"there is no rank {rank}:\n{self.text()}")

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                raise


RANKS, ALONE = ("-m", "partway.commands.cli", "run", "--workers", "2"), ()
STARTS = 600  # seconds that a server may take to listen, on a machine that does much else


@contextmanager
def served(folder: Path, launch: Sequence[str], *more: str) -> Iterator[Served]:
    server = Served(folder, launch, *more)
    try:
        server.wait(STARTS, server.listens)
        yield server
    finally:
        server.close()


@pytest.fixture(scope="module", params=["plain", pytest.param("ranks", marks=pytest.mark.slow)])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One process without Partway, and two ranks: clients see no difference."""
    launch, more = (ALONE, ["--plain"]) if request.param == "plain" else (RANKS, [])
    with served(tmp_path_factory.mktemp("served"), launch, *more) as found:
        yield found


def expected(tokens: Sequence[int], count: int, temperature: float = 0.0, seed: int = 0) -> list[int]:
    """What one process answers, without a batch, a cache or padding."""
    sys.path.insert(0, str(SCRIPT.parent))
    try:
        import serve
    finally:
        sys.path.remove(str(SCRIPT.parent))
    model = serve.model_of(None, 64, 1)
    asked = serve.Asked(tokens=list(tokens), max_new_tokens=count, temperature=temperature, seed=seed)
    job: Any = serve.Job(asked, None)
    ids = list(tokens)
    with torch.inference_mode():
        for _ in range(count):
            ids.append(job.choose(model(torch.tensor([ids])).logits[0, -1]))
    return ids[len(tokens) :]


PROMPTS = [[5, 3, 8], [900, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [17], list(range(40, 60)), [1023] * 8]


def test_requests_that_come_together_are_answered_as_one_process_answers_each(server: Served) -> None:
    with ThreadPoolExecutor(2) as clients:
        found = list(clients.map(lambda prompt: server.answer(prompt, 6), PROMPTS))
    assert found == [(200, {"tokens": expected(prompt, 6), "end": "length"}) for prompt in PROMPTS]


def test_tokens_stream_as_they_are_chosen(server: Served) -> None:
    with server.asked(tokens=PROMPTS[0], max_new_tokens=5) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        events = [json.loads(line.removeprefix("data: ")) for line in response.read().decode().split("\n\n") if line]
    assert events == [*({"token": token} for token in expected(PROMPTS[0], 5)), {"end": "length"}]


def test_a_sample_is_that_of_its_seed(server: Served) -> None:
    for seed in (1, 2):
        status, answer = server.answer(PROMPTS[1], 6, temperature=1.0, seed=seed)
        assert (status, answer["tokens"]) == (200, expected(PROMPTS[1], 6, 1.0, seed))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"tokens": [1] * 30, "max_new_tokens": 4}, "30 tokens and 4 new ones are 34; this server has room for 32"),
        ({"tokens": [1, 1024]}, "there is no token 1024; tokens are numbers below 1024"),
        ({"tokens": []}, "List should have at least 1 item after validation, not 0"),
        ({"tokens": [1], "max_new_tokens": 0}, "Input should be greater than or equal to 1"),
        ({"tokens": "abc"}, "Input should be a valid list"),
    ],
)
def test_what_is_refused(server: Served, asked: dict[str, Any], message: str) -> None:
    with server.asked(**asked) as response:
        assert response.status == 422
        detail = json.loads(response.read())["detail"]
    assert (detail if isinstance(detail, str) else detail[0]["msg"]) == message


def test_more_requests_than_may_wait_are_told_to_come_back(server: Served) -> None:
    with ThreadPoolExecutor(12) as clients:
        found = list(clients.map(lambda _: server.answer([7, 7], 20), range(12)))
    assert {status for status, _ in found} == {200, 503}
    right = {"tokens": expected([7, 7], 20), "end": "length"}
    full = {"detail": "2 requests wait already; come back later"}
    assert all(answer == (right if status == 200 else full) for status, answer in found)


def test_a_client_that_leaves_leaves_room(server: Served) -> None:
    with server.asked(tokens=[9, 9], max_new_tokens=30) as response:
        response.readline()
    assert server.answer([5], 3) == (200, {"tokens": expected([5], 3), "end": "length"})


def test_it_ends_after_the_answers_under_way(server: Served) -> None:
    """The last test that asks this server."""
    with server.asked(tokens=[4, 5], max_new_tokens=24) as response:
        response.readline()
        server.process.send_signal(signal.SIGTERM)
        rest = response.read().decode()
    assert rest.endswith('data: {"end": "length"}\n\n')
    assert rest.count("token") == 23
    assert server.process.wait(60) in (0, 128 + signal.SIGTERM)  # the latter is what a launcher says
    assert "ended" in server.text()
    assert "Traceback" not in server.text()


@pytest.mark.slow
def test_where_a_rank_dies_clients_are_told_and_the_server_ends(tmp_path: Path) -> None:
    with served(tmp_path, RANKS) as server:
        os.kill(server.rank(1), signal.SIGSTOP)  # so that an answer is under way
        with server.asked(tokens=[4, 5], max_new_tokens=24) as response:
            os.kill(server.rank(1), signal.SIGKILL)
            rest = response.read().decode()
        assert re.search(r'data: \{"end": "the model has stopped: [^"]+"\}\n\n$', rest), rest
        assert server.process.wait(60) != 0
