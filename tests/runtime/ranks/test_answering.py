"""A store that answers in time, or is an error."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from scripts import free_port

from partway.runtime.ranks.answering import AnsweringStore, NoAnswer

KEEPER = """
import sys, time
import torch.distributed as dist

store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=True, wait_for_workers=False)
sys.stdout.write("there\\n")
sys.stdout.flush()
time.sleep(100)
"""


@pytest.fixture
def keeper() -> Iterator[tuple[subprocess.Popen[str], Any]]:
    """The process that keeps a store, and a connection to it."""
    port = free_port()
    command = [sys.executable, "-c", KEEPER, str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process, dist.TCPStore("127.0.0.1", port)  # type: ignore[attr-defined]
        process.kill()


def test_it_answers_as_the_store_does(keeper: tuple[Any, Any]) -> None:
    store = AnsweringStore(keeper[1], 20)
    store.set("a", "text")
    assert store.get("a") == b"text"
    assert store.add("n", 2) == 2
    store.compare_set("b", "", "new")
    store.wait(["a", "b"], timedelta(seconds=20))
    assert store.check(["a", "b"])
    store.delete_key("b")
    assert not store.check(["b"])
    with pytest.raises(RuntimeError, match="timeout after 10ms"):
        store.wait(["b"], timedelta(milliseconds=10))


def test_an_answer_that_does_not_come_is_an_error(keeper: tuple[Any, Any]) -> None:
    process, connection = keeper
    store = AnsweringStore(connection, 0.3)
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)  # a busy machine stops it a while later
    for _ in range(2):
        with pytest.raises(
            NoAnswer, match=r"^the store has not answered for 0.3 s: the process that keeps it was stop"
        ):
            store.check(["a"])


def test_a_process_that_was_forked_is_told(keeper: tuple[Any, Any]) -> None:
    store = AnsweringStore(keeper[1], 20)
    child = os.fork()
    if child == 0:
        try:
            store.check(["a"])
        except NoAnswer as error:
            os._exit(7 if str(error).startswith("a process that was forked has no connection to the store") else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_a_store_that_is_closed_keeps_no_thread() -> None:
    store = AnsweringStore(dist.HashStore(), 20)
    store.set("key", "value")
    store.close()
    store._thread.join()
    with pytest.raises(NoAnswer):
        store.get("key")


def test_threads_may_ask_at_once(keeper: tuple[Any, Any]) -> None:
    store = AnsweringStore(keeper[1], 20)
    threads = [threading.Thread(target=lambda: [store.add("n", 1) for _ in range(100)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.add("n", 0) == 400
