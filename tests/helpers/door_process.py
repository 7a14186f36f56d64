"""A process that keeps a store behind a door, and one that floods it with connections."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

KEEPER = """
import sys, time
from partway.runtime.launching import door

listener = door.listening("127.0.0.1", 0)
print(listener.getsockname()[1], flush=True)
store = door.store_behind(listener, door.DoorGuard(sys.argv[1].encode()))
sys.stdin.read()
"""
KINDS = ("silent", "garbage", "half", "gone", "loris")  # what the clients of a flood send
FLOOD = """
import os, socket, sys

kind, port = sys.argv[1], int(sys.argv[2])
sends = {"silent": b"", "garbage": os.urandom(200), "half": os.urandom(33), "gone": b"", "loris": b"x"}[kind]
held = []
for number in range(10**9):
    one = socket.socket()
    one.setblocking(False)
    one.connect_ex(("127.0.0.1", port))
    held.append(one)
    if len(held) > 2000:
        held.pop(0).close()
    # Write to connections that were accepted long ago; TCP handshakes may still be in progress.
    for old in held[-20:-19] if kind != "loris" else held[-400::40]:
        try:
            old.send(sends) if sends else None
        except OSError:
            pass
    if kind == "gone":
        held.pop().close()
    if number % 500 == 0:
        print(number, flush=True)
"""


@contextmanager
def keeper(secret: bytes) -> Iterator[tuple[subprocess.Popen[str], tuple[str, int]]]:
    """The process, and the address of its door."""
    with _running(KEEPER, secret.decode()) as process:
        assert process.stdout is not None
        yield process, ("127.0.0.1", int(process.stdout.readline()))


@contextmanager
def flood(kind: str, port: int) -> Iterator[subprocess.Popen[str]]:
    """A running flood that has already made more connections than a door holds; it prints a line for each 500."""
    with _running(FLOOD, kind, str(port)) as process:
        assert process.stdout is not None
        while int(process.stdout.readline()) < 1000:
            pass
        yield process


@contextmanager
def _running(code: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()
