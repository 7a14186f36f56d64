"""A store that answers in time, or raises an error.

The store of torch.distributed waits forever for the answer of a process that was stopped, or that the network no longer
reaches; only a `wait` for a key has a limit of its own.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_Told = queue.SimpleQueue[tuple[Any, BaseException | None]]
_Asked = tuple[Callable[[], Any], _Told]


class NoAnswer(dist.DistNetworkError):
    """The store has not answered in time."""


class AnsweringStore:
    """`store`, with calls that raise NoAnswer if they take longer than `seconds`. They run on a thread of their own,
    which then waits on: every later call raises at once."""

    def __init__(self, store: Any, seconds: float) -> None:
        self._store, self._seconds = store, seconds
        self._asked = queue.SimpleQueue[_Asked | None]()
        self._silent = False
        self._thread = threading.Thread(target=self._answer, name="partway store", daemon=True)
        self._thread.start()

    def set(self, key: str, value: str) -> None:
        """Set a key to a value."""
        self._ask(lambda: self._store.set(key, value))

    def get(self, key: str) -> bytes:
        """The value of a key; waits for the key."""
        value: bytes = self._ask(lambda: self._store.get(key))
        return value

    def check(self, keys: Sequence[str]) -> bool:
        """Whether the store has all keys."""
        return bool(self._ask(lambda: self._store.check(list(keys))))

    def add(self, key: str, amount: int) -> int:
        """Add `amount` to a number, and return the sum."""
        return int(self._ask(lambda: self._store.add(key, amount)))

    def compare_set(self, key: str, expected: str, value: str) -> None:
        """Set a key whose value is `expected`; if that is "", a key without a value."""
        self._ask(lambda: self._store.compare_set(key, expected, value))

    def delete_key(self, key: str) -> None:
        """Remove a key."""
        self._ask(lambda: self._store.delete_key(key))

    def wait(self, keys: Sequence[str], limit: timedelta) -> None:
        """Wait until the store has all keys."""
        self._ask(lambda: self._store.wait(list(keys), limit), limit.total_seconds())

    def close(self) -> None:
        """End the thread: no more calls."""
        self._asked.put(None)

    def _ask(self, call: Callable[[], Any], more: float = 0) -> Any:
        if not self._thread.is_alive():
            raise NoAnswer("a process that was forked has no connection to the store; ask in the one that made it")
        told: _Told = queue.SimpleQueue()
        self._asked.put((call, told))
        try:
            value, error = told.get(timeout=0 if self._silent else self._seconds + more)
        except queue.Empty:
            self._silent = True
            raise NoAnswer(
                f"the store has not answered for {self._seconds:g} s: the process that keeps it was stopped, or the "
                "network does not reach it"
            ) from None
        if error is not None:
            raise error
        return value

    def _answer(self) -> None:
        while (asked := self._asked.get()) is not None:
            call, told = asked
            try:
                told.put((call(), None))
            except BaseException as error:
                told.put((None, error))
            del asked, call, told
