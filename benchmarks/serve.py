"""The example server under load: 4 gloo processes, and one process without Partway, asked the same.

    python benchmarks/serve.py                            # 8 clients, 6 requests each
    python benchmarks/serve.py --hidden 512 --layers 6 --requests 4

Clients ask for prompts of unequal lengths, greedy and sampled, each as soon as its last answer is there, and stream the
tokens. Printed are, for each server: seconds until it listens, milliseconds until the first token and for each further
one (median, nine of ten), tokens a second, and how many answers differ from those of one process (a sample may: its
scores differ in the last bits). A server of several processes on one machine shares its cores: it is not there to be
faster.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from script import free_port, start

SERVER = Path(__file__).parents[1] / "examples" / "serve.py"
ROOM = 96
STARTS = 300  # seconds that a server may take to listen


@dataclass(frozen=True)
class Answer:
    """The tokens of an answer, and the milliseconds until each, from the one before."""

    tokens: tuple[int, ...]
    first: float
    further: tuple[float, ...]


def requests_of(clients: int, count: int) -> list[list[dict[str, Any]]]:
    """What each client asks for."""
    numbers = random.Random(0)
    return [
        [
            {
                "tokens": [numbers.randrange(1024) for _ in range(numbers.randint(1, 60))],
                "max_new_tokens": numbers.randint(8, 24),
                "temperature": numbers.choice([0.0, 1.0]),
                "seed": numbers.randrange(1000),
            }
            for _ in range(count)
        ]
        for _ in range(clients)
    ]


def ask(port: int, asked: Mapping[str, Any]) -> Answer:
    """Stream one answer. A server that has no room is asked again."""
    begin = last = time.perf_counter()
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=STARTS)
        connection.request("POST", "/generate", json.dumps(asked), {"content-type": "application/json"})
        response = connection.getresponse()
        if response.status == 503:
            connection.close()
            time.sleep(0.2)
            continue
        tokens, times = [], []
        for line in response:
            if line.startswith(b"data:"):
                event = json.loads(line.removeprefix(b"data:"))
                now = time.perf_counter()
                if "token" in event:
                    tokens.append(event["token"])
                    times.append(1000 * (now - (last if tokens[1:] else begin)))
                    last = now
                elif event["end"] != "length":
                    raise RuntimeError(event["end"])
        connection.close()
        return Answer(tuple(tokens), times[0], tuple(times[1:]))


def answers(
    launch: Sequence[str], more: Sequence[str], asked: Sequence[Sequence[Mapping[str, Any]]]
) -> tuple[float, float, list[Answer]]:
    """Seconds until a server listens and that it takes to answer all clients, and the answers."""
    port, folder = free_port(), Path(tempfile.mkdtemp())
    command = [sys.executable, *launch, str(SERVER), "--room", str(ROOM), "--port", str(port), *more]
    begin = time.perf_counter()
    with (folder / "output").open("w") as output:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PARTWAY_CACHE": "0"}
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT)
    try:
        while "listening" not in (folder / "output").read_text():
            if process.poll() is not None or time.perf_counter() - begin > STARTS:
                raise RuntimeError((folder / "output").read_text())
            time.sleep(0.1)
        listens = time.perf_counter() - begin
        begin = time.perf_counter()
        with ThreadPoolExecutor(len(asked)) as clients:
            each = list(clients.map(lambda own: [ask(port, one) for one in own], asked))
        return listens, time.perf_counter() - begin, [answer for own in each for answer in own]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def line(name: str, listens: float, took: float, found: Sequence[Answer], known: Sequence[Answer]) -> str:
    """What is printed of a server."""
    first, further = [a.first for a in found], [ms for a in found for ms in a.further]
    tokens = sum(len(a.tokens) for a in found)
    differ = sum(a.tokens != b.tokens for a, b in zip(found, known, strict=True))
    nine = [statistics.quantiles(values, n=10)[-1] for values in (first, further)]
    return (
        f"{name:22} listens after {listens:5.1f} s  first token {statistics.median(first):6.0f} ms ({nine[0]:.0f})  "
        f"further {statistics.median(further):5.1f} ms ({nine[1]:.1f})  {tokens / took:6.1f} tokens/s  "
        f"{differ} of {len(found)} answers differ"
    )


def main(
    clients: Annotated[int, typer.Option(min=1, help="that ask at once")] = 8,
    requests: Annotated[int, typer.Option(min=1, help="of each client")] = 6,
    ranks: Annotated[int, typer.Option(min=2, help="gloo processes")] = 4,
    hidden: Annotated[int, typer.Option(min=64, help="width of the model")] = 256,
    layers: Annotated[int, typer.Option(min=1, help="layers of the model")] = 4,
) -> None:
    """Print a line for each server."""
    asked = requests_of(clients, requests)
    sizes = ["--hidden", str(hidden), "--layers", str(layers), "--batch", "4"]
    plain = answers((), ["--plain", *sizes], asked)
    print(line("one process, plain", *plain, plain[-1]), flush=True)
    split = answers(("-m", "partway.commands.cli", "run", "--workers", str(ranks)), sizes, asked)
    print(line(f"{ranks} gloo processes", *split, plain[-1]), flush=True)
    print(f"tokens/s, {ranks} processes over one: {plain[1] / split[1]:.2f}")


if __name__ == "__main__":
    start(main)
