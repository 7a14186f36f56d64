"""The answer to probes of Kubernetes: 200 while the operator works, 503 with the reason while it does not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

from partway.strategy import RuntimeStateError

_PATIENCE = 5.0  # seconds for a request to arrive


@asynccontextmanager
async def answering(url: str | None, trouble: Callable[[], str]) -> AsyncIterator[None]:
    """Answer at `url`, such as http://0.0.0.0:8080/healthz, with the result of `trouble`: "" is 200. None: do not
    answer.

    Raises RuntimeStateError if it cannot listen there.
    """
    if url is None:
        yield
        return
    parts = urlsplit(url)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            asked = await asyncio.wait_for(reader.readline(), _PATIENCE)
            path = asked.decode("latin-1").split(" ")[1:2]
            status, text = _answer(path == [parts.path or "/"], trouble())
            head = f"HTTP/1.0 {status}\r\nContent-Type: text/plain; charset=utf-8\r\n\r\n"
            writer.write(f"{head}{text}\n".encode())
            await writer.drain()
        except (OSError, TimeoutError, ValueError):
            pass
        finally:
            writer.close()

    try:
        server = await asyncio.start_server(answer, parts.hostname, parts.port)
    except (OSError, ValueError) as error:
        raise RuntimeStateError(f"cannot answer probes at {url}: {error}") from error
    async with server:
        yield


def _answer(known: bool, trouble: str) -> tuple[str, str]:
    if not known:
        return "404 Not Found", "not here"
    return ("503 Service Unavailable", trouble) if trouble else ("200 OK", "ok")
