"""The answer to probes."""

from __future__ import annotations

import asyncio
import socket

import pytest
from probes import health
from scripts import free_port

from partway.operator.health import answering
from partway.strategy import RuntimeStateError


def asked(url: str, trouble: str) -> tuple[int, str]:
    """What a probe is answered where there is trouble."""

    async def run() -> tuple[int, str]:
        async with answering(url.replace("/other", "/healthz"), lambda: trouble):
            return await asyncio.to_thread(health, url)

    return asyncio.run(run())


def test_it_is_well_while_there_is_no_trouble():
    url = f"http://127.0.0.1:{free_port()}/healthz"
    assert asked(url, "") == (200, "ok\n")
    assert asked(url, "partwayjobs: not found") == (503, "partwayjobs: not found\n")
    assert asked(url.replace("/healthz", "/other"), "") == (404, "not here\n")


def test_nothing_listens_where_nobody_asks():
    async def run() -> str:
        async with answering(None, lambda: "trouble"):
            return "done"

    assert asyncio.run(run()) == "done"


def test_a_port_that_is_taken_is_an_error():
    async def run(url: str) -> None:
        async with answering(url, str):
            pass

    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        own.listen()
        url = f"http://127.0.0.1:{own.getsockname()[1]}/healthz"
        with pytest.raises(RuntimeStateError, match=f"cannot answer probes at {url}: "):
            asyncio.run(run(url))
