"""Watches of the API server, which report the objects that change.

A watch lists, and follows the changes from there. When that fails, for whatever reason, `trouble` has the reason, and
it lists again: the list includes objects created meanwhile. So definitions and API servers may come and go.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

logger = logging.getLogger("partway.operator")
PAUSE = 1.0  # seconds between two requests of a watch
_PAGE = 500  # objects of a list at a time
_SECONDS = 60  # after which the API server ends the answer to a watch; the next request continues there
_SILENCE = (10.0, 90.0)  # seconds to connect, and without a byte: then the connection is dead


class Response(Protocol):
    """The answer of the Kubernetes client with _preload_content=False."""

    data: bytes

    def stream(self, amt: int | None, decode_content: bool) -> Iterator[bytes]:
        """The body as it arrives."""
        ...

    def close(self) -> None:
        """Close the connection."""


class ObjectWatch:
    """A watch of one kind of objects.

    what       the kind and the namespace, for messages
    read       lists or watches the objects, by the options of the Kubernetes client
    changed    is called with the metadata of each object, from a thread
    missing    the advice if the API server does not know the kind
    trouble    why the objects are not watched; "" while they are
    """

    def __init__(
        self, what: str, read: Callable[..., Response], changed: Callable[[Mapping[str, Any]], None], missing: str = ""
    ) -> None:
        self._what, self._read, self._changed, self._missing = what, read, changed, missing
        self._ends = threading.Event()
        self.trouble = f"{what}: not watched yet"

    def start(self) -> None:
        """Watch from now on, in a thread of its own."""
        threading.Thread(target=self.run, name=f"partway watch of {self._what}", daemon=True).start()

    def stop(self) -> None:
        """Start no further request."""
        self._ends.set()

    def run(self) -> None:
        """Watch until `stop`."""
        version, pause = "", 0.0
        while not self._ends.wait(pause):
            pause = PAUSE
            try:
                version = self._followed(version or self._listed())
            except Exception as error:  # whatever it is, the next list may succeed
                if self._ends.is_set():
                    return
                version = ""
                self._fail(f"{self._what}: {self._why(error)}")

    def _fail(self, trouble: str) -> None:
        if trouble != self.trouble:
            logger.warning("not watched: %s", trouble)
        self.trouble = trouble

    def _why(self, error: Exception) -> str:
        hint = f"; {self._missing}" if self._missing and getattr(error, "status", None) == 404 else ""
        return f"{reason_of(error)}{hint}"

    def _listed(self) -> str:
        """List all objects, and return the version from which to follow changes."""
        page: dict[str, Any] = {}
        while True:
            answer = self._read(limit=_PAGE, **page, _preload_content=False)
            found = json.loads(answer.data)
            for each in found["items"]:
                self._changed(each["metadata"])
            if not found["metadata"].get("continue"):
                version: str = found["metadata"]["resourceVersion"]
                logger.debug("%s: listed at version %s", self._what, version)
                return version
            page = {"_continue": found["metadata"]["continue"]}

    def _followed(self, version: str) -> str:
        """Follow changes until the answer ends, and return the version from which to continue; "" if that is too
        old."""
        answer = self._read(
            watch=True,
            resource_version=version,
            timeout_seconds=_SECONDS,
            allow_watch_bookmarks=True,
            _preload_content=False,
            _request_timeout=_SILENCE,
        )
        try:
            if self.trouble:
                logger.info("watches %s", self._what)
            self.trouble = ""
            for line in _lines(answer):
                event = json.loads(line)
                found = event["object"]
                if event["type"] == "ERROR" and found.get("code") == 410:
                    return ""
                if event["type"] == "ERROR":
                    raise OSError(f"{found.get('code')}: {found.get('message')}")
                version = found["metadata"]["resourceVersion"]
                if event["type"] != "BOOKMARK":
                    self._changed(found["metadata"])
        finally:
            answer.close()
        return version


def _lines(answer: Response) -> Iterator[bytes]:
    rest = b""
    for chunk in answer.stream(amt=None, decode_content=False):
        *lines, rest = (rest + chunk).split(b"\n")
        yield from (line for line in lines if line)


def reason_of(error: Any) -> str:
    """Why a request failed, in a line: the message of the API server, or else the error."""
    try:
        said: str = json.loads(error.body)["message"]
        return said
    except (AttributeError, TypeError, ValueError, KeyError):
        pass
    if getattr(error, "status", None):
        return f"{error.status} {error.reason}"
    return f"{type(error).__name__}: {error}".splitlines()[0]
