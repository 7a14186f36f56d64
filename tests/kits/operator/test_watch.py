"""Watches, by answers that a test gives."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from partway.operator import watch
from partway.operator.watch import ObjectWatch, reason_of


class Answer:
    """Of a list, or of a watch: its events, in pieces of a few bytes."""

    def __init__(self, *events: dict[str, Any], body: Any = None, breaks: bool = False) -> None:
        self.data = json.dumps(body).encode()
        self._events, self._breaks = events, breaks
        self.closed = False

    def stream(self, amt: int | None, decode_content: bool) -> Iterator[bytes]:
        text = "".join(json.dumps(each) + "\n" for each in self._events).encode()
        yield from (text[i : i + 7] for i in range(0, len(text), 7))
        if self._breaks:
            raise ConnectionResetError("connection reset by peer")

    def close(self) -> None:
        self.closed = True


class RefusedError(Exception):
    """As ApiException."""

    def __init__(self, status: int, message: str = "") -> None:
        super().__init__()
        self.status, self.reason, self.body = status, "Refused", json.dumps({"message": message}) if message else None


def named(*names: str) -> list[dict[str, Any]]:
    return [{"metadata": {"name": name, "resourceVersion": "7"}} for name in names]


def listed(*names: str, version: str = "5", go_on: str = "") -> Answer:
    return Answer(body={"metadata": {"resourceVersion": version, "continue": go_on}, "items": named(*names)})


def event(kind: str, name: str, version: str) -> dict[str, Any]:
    return {"type": kind, "object": {"metadata": {"name": name, "resourceVersion": version}}}


class Server:
    """Gives one answer after another, and ends the watch then. `troubles`: what it said before each request."""

    def __init__(self, *answers: Answer | Exception) -> None:
        self._answers = list(answers)
        self.asked: list[dict[str, Any]] = []
        self.changed: list[str] = []
        self.troubles: list[str] = []
        self.watch = ObjectWatch("things", self._read, self._see, missing="define them")

    def _read(self, **options: Any) -> Answer:
        self.asked.append(options)
        self.troubles.append(self.watch.trouble)
        answer = self._answers.pop(0)
        if not self._answers:
            self.watch.stop()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _see(self, metadata: Mapping[str, Any]) -> None:
        self.changed.append(metadata["name"])

    def run(self) -> list[str]:
        """What has changed."""
        self.watch.run()
        return self.changed


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "PAUSE", 0.0)


def test_what_is_there_and_what_changes_is_said():
    stream = Answer(event("ADDED", "c", "8"), event("MODIFIED", "a", "9"), event("DELETED", "b", "10"))
    server = Server(listed("a", "b"), stream)
    assert server.run() == ["a", "b", "c", "a", "b"]
    assert server.asked[1]["watch"] is True
    assert server.asked[1]["resource_version"] == "5"
    assert stream.closed
    assert server.watch.trouble == ""


def test_a_long_list_comes_in_pages():
    server = Server(listed("a", go_on="more"), listed("b"), Answer())
    assert server.run() == ["a", "b"]
    assert server.asked[1]["_continue"] == "more"


def test_a_watch_that_ends_goes_on_from_the_last_version_without_another_list():
    bookmark = {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "12"}}}
    server = Server(listed("a"), Answer(event("ADDED", "b", "9"), bookmark), Answer(event("ADDED", "c", "13")))
    assert server.run() == ["a", "b", "c"]
    assert [each.get("resource_version") for each in server.asked] == [None, "5", "12"]


@pytest.mark.parametrize(
    "end", [Answer({"type": "ERROR", "object": {"code": 410}}), Answer(breaks=True), RefusedError(500)]
)
def test_after_whatever_ends_it_there_is_another_list(end: Answer | Exception):
    server = Server(listed("a"), Answer(event("ADDED", "b", "9")), end, listed("b", "made meanwhile"), Answer())
    assert server.run() == ["a", "b", "b", "made meanwhile"]
    assert server.watch.trouble == ""


def test_why_nothing_is_watched_is_known_until_it_is_again(monkeypatch: pytest.MonkeyPatch):
    said: list[str] = []
    monkeypatch.setattr(watch.logger, "warning", lambda text, *values: said.append(text % values))
    monkeypatch.setattr(watch.logger, "info", lambda text, *values: said.append(text % values))
    answers: list[Answer | Exception] = [RefusedError(404, "not found")] * 3
    server = Server(*answers, listed("a"), Answer(breaks=True), RefusedError(403, "no"), listed(), Answer())
    server.run()
    missing, broken = "things: not found; define them", "things: ConnectionResetError: connection reset by peer"
    first = "things: not watched yet"
    assert server.troubles == [first, missing, missing, missing, missing, broken, "things: no", "things: no"]
    assert said == [
        f"not watched: {missing}", "watches things", f"not watched: {broken}", "not watched: things: no",
        "watches things",
    ]  # fmt: skip


def test_a_list_alone_is_not_a_watch():
    server = Server(listed("a"), RefusedError(403, "may list, may not watch"), listed("a"))
    server.run()
    assert server.watch.trouble == "things: may list, may not watch"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RefusedError(403, "pods is forbidden"), "pods is forbidden"), (RefusedError(503), "503 Refused"),
        (OSError("no route\nto host"), "OSError: no route"),
    ],
)  # fmt: skip
def test_a_reason_is_one_line(error: Exception, said: str):
    assert reason_of(error) == said


def test_what_goes_wrong_after_stop_is_nothing_to_say(monkeypatch: pytest.MonkeyPatch):
    said: list[str] = []
    monkeypatch.setattr(logging.getLogger("partway.operator"), "warning", lambda *values: said.append(values[0]))
    server = Server(listed("a"), RefusedError(500))
    server.run()
    assert said == []
