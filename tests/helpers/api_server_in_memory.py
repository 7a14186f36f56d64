"""A Kubernetes API server in this process, over HTTP, with the lists, watches and writes that the operator needs.

It has no schemas, RBAC or admission. Objects survive `stop` and `start`, as in etcd, and a job's objects are deleted
with it, as by the garbage collector. kubernetes_server.py starts a real server.
"""

from __future__ import annotations

import copy
import json
import re
import socket
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

JOBS = "partwayjobs"
_PATH = re.compile(
    r"/(?:api|apis/[^/]+)/v1(?:/namespaces/(?P<namespace>[^/]+))?/(?P<kind>[a-z]+)(?:/(?P<name>[^/]+))?(?P<status>/status)?"
)


class Refusal(Exception):
    """An error response."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class ApiServer:
    """The server. `defined`: whether it has the definition of jobs; `forbidden`: kinds that nobody may read."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str, str], dict[str, Any]] = {}  # by kind, namespace and name
        self.defined = True
        self.forbidden: set[str] = set()
        self.made: Callable[[dict[str, Any]], None] = lambda pod: None  # changes a pod that was made, as a node would
        self.requests: list[str] = []
        self._changes: list[tuple[int, str, str, dict[str, Any]]] = []  # version, kind, type of event, object
        self._version, self._oldest = 1, 1
        self._changed = threading.Condition()
        self._server: _Server | None = None
        with socket.socket() as own:
            own.bind(("127.0.0.1", 0))
            self.port: int = own.getsockname()[1]

    # -- As an administrator

    def start(self) -> None:
        """Start to answer, on the same port each time."""
        self._server = _Server(self, self.port)
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        """Stop answering; connections break."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()
            server.hang_up()
            with self._changed:
                self._changed.notify_all()

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Answers the Kubernetes client in this process."""
        from kubernetes import client

        self.start()
        client.Configuration.set_default(client.Configuration(host=f"http://127.0.0.1:{self.port}"))
        try:
            yield
        finally:
            client.Configuration.set_default(None)
            self.stop()

    def configured(self, folder: Path) -> Path:
        """A kubeconfig."""
        path = folder / "kubeconfig"
        path.write_text(
            json.dumps(
                {
                    "apiVersion": "v1", "kind": "Config", "current-context": "test",
                    "clusters": [{"name": "test", "cluster": {"server": f"http://127.0.0.1:{self.port}"}}],
                    "users": [{"name": "test", "user": {}}],
                    "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
                }
            )
        )  # fmt: skip
        return path

    def undefine(self) -> None:
        """Delete the definition and all jobs; their watches end."""
        with self._changed:
            for key in [key for key in self.objects if key[0] == JOBS]:
                self._remove(key)
            self.defined = False
            self._changed.notify_all()

    def forget(self) -> None:
        """Make watches from earlier versions fail with 410."""
        with self._changed:
            self._changes.clear()
            self._version += 1
            self._oldest = self._version

    def put(self, kind: str, body: dict[str, Any]) -> dict[str, Any]:
        """Create an object, as `kubectl create` does."""
        with self._changed:
            made = copy.deepcopy(body)
            metadata = made["metadata"]
            if "generateName" in metadata:
                metadata["name"] = metadata.pop("generateName") + uuid.uuid4().hex[:5]
            key = kind, metadata.setdefault("namespace", "default"), metadata["name"]
            if key in self.objects:
                raise Refusal(409, f'{kind} "{key[2]}" already exists')
            metadata |= {"uid": str(uuid.uuid4()), "generation": 1}
            self._store(key, made, "ADDED")
            if kind == "pods":
                self.made(made)
                self._store(key, made, "MODIFIED")
            return made

    def names(self, kind: str) -> list[str]:
        """The names of all objects of a kind."""
        with self._changed:
            return sorted(name for each, _, name in self.objects if each == kind)

    def get(self, kind: str, name: str, namespace: str = "default") -> dict[str, Any]:
        """An object, or an empty one if there is none."""
        with self._changed:
            return copy.deepcopy(self.objects.get((kind, namespace, name), {}))

    def phases(self) -> dict[str, str]:
        """The phase of each job."""
        with self._changed:
            jobs = [each for key, each in self.objects.items() if key[0] == JOBS]
            return {each["metadata"]["name"]: (each.get("status") or {}).get("phase", "") for each in jobs}

    def remove(self, kind: str, name: str, namespace: str = "default") -> None:
        """Delete an object."""
        with self._changed:
            self._remove((kind, namespace, name))

    def _store(self, key: tuple[str, str, str], body: dict[str, Any], event: str) -> None:
        self._version += 1
        body["metadata"]["resourceVersion"] = str(self._version)
        if event == "DELETED":
            del self.objects[key]
        else:
            self.objects[key] = body
        self._changes.append((self._version, key[0], event, copy.deepcopy(body)))
        del self._changes[:-20_000]
        self._oldest = max(self._oldest, self._changes[0][0] - 1)
        self._changed.notify_all()

    def _remove(self, key: tuple[str, str, str]) -> None:
        uid = self.objects[key]["metadata"]["uid"]
        self._store(key, self.objects[key], "DELETED")
        owned = [
            each
            for each, body in self.objects.items()
            if uid in [owner["uid"] for owner in body["metadata"].get("ownerReferences") or ()]
        ]
        for each in owned:
            self._remove(each)

    # -- As its clients see it

    def answer(self, verb: str, path: str, body: Any) -> dict[str, Any] | Watched:
        """The response to a request. Raises Refusal."""
        url = urlsplit(path)
        asked = {name: values[-1] for name, values in parse_qs(url.query).items()}
        parts = _PATH.fullmatch(url.path)
        if parts is None:
            raise Refusal(404, "the server could not find the requested resource")
        kind, namespace, name = parts["kind"], parts["namespace"], parts["name"]
        self.requests.append(f"{verb} {kind}")
        if kind == JOBS and not self.defined:
            raise Refusal(404, "the server could not find the requested resource")
        if verb == "GET" and kind in self.forbidden:
            raise Refusal(403, f"{kind} is forbidden")
        selection = _Selection(kind, namespace, asked)
        with self._changed:
            if asked.get("watch") in ("true", "True"):
                return Watched(self, selection, int(asked["resourceVersion"]), float(asked.get("timeoutSeconds", 60)))
            if verb == "POST":
                body["metadata"]["namespace"] = namespace
                return copy.deepcopy(self.put(kind, body))
            if name is None:
                return self._listed(selection)
            key = kind, namespace, name
            if key not in self.objects:
                raise Refusal(404, f'{kind} "{name}" not found')
            if verb == "PUT":
                return self._replaced(key, body, only_status=bool(parts["status"]))
            if verb == "DELETE":
                wanted = ((body or {}).get("preconditions") or {}).get("uid")
                if wanted not in (None, self.objects[key]["metadata"]["uid"]):
                    raise Refusal(409, "the UID in the precondition does not match")
                self._remove(key)
                return {"kind": "Status", "status": "Success"}
            return copy.deepcopy(self.objects[key])

    def _listed(self, selection: _Selection) -> dict[str, Any]:
        items = [copy.deepcopy(each) for key, each in self.objects.items() if selection.holds(key[0], each)]
        return {"kind": "List", "metadata": {"resourceVersion": str(self._version)}, "items": items}

    def _replaced(self, key: tuple[str, str, str], body: Any, only_status: bool) -> dict[str, Any]:
        old = self.objects[key]
        if body["metadata"].get("resourceVersion") not in (None, old["metadata"]["resourceVersion"]):
            raise Refusal(409, "the object has been modified")
        new = {**old, "status": body.get("status")} if only_status else {**body, "metadata": dict(old["metadata"])}
        new = copy.deepcopy(new)
        self._store(key, new, "MODIFIED")
        return copy.deepcopy(new)


class _Selection:
    """The objects that a list or a watch selects."""

    def __init__(self, kind: str, namespace: str | None, asked: dict[str, str]) -> None:
        self._kind, self._namespace = kind, namespace
        self._labels = [each.partition("=") for each in asked.get("labelSelector", "").split(",") if each]
        self._name = asked.get("fieldSelector", "").removeprefix("metadata.name=")

    def holds(self, kind: str, body: dict[str, Any]) -> bool:
        """Whether an object is selected."""
        metadata = body["metadata"]
        labels = metadata.get("labels") or {}
        return (
            kind == self._kind
            and self._namespace in (None, metadata["namespace"])
            and self._name in ("", metadata["name"])
            and all(label in labels and (not sign or labels[label] == value) for label, sign, value in self._labels)
        )


class Watched:
    """The events of a watch, in the order of their occurrence."""

    def __init__(self, server: ApiServer, selection: _Selection, version: int, seconds: float) -> None:
        self._server, self._selection, self._version, self._seconds = server, selection, version, seconds

    def send(self, write: Callable[[dict[str, Any]], None]) -> None:
        """Write each event, until the watch ends."""
        own = self._server
        at = self._version
        while True:
            with own._changed:
                if own._server is None or (not own.defined and self._selection._kind == JOBS):
                    return
                gone = at < own._oldest
                found = [each for each in own._changes if each[0] > at]
                if not gone and not found and not own._changed.wait(self._seconds):
                    return
            if gone:
                write({"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "too old"}})
                return
            for at, kind, event, body in found:  # noqa: B007 (where it goes on from)
                if self._selection.holds(kind, body):
                    write({"type": event, "object": body})


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, api: ApiServer, port: int) -> None:
        self.api = api
        self._open: set[socket.socket] = set()
        super().__init__(("127.0.0.1", port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore broken connections, which tests cause."""

    def hang_up(self) -> None:
        """Break all connections."""
        for each in list(self._open):
            try:
                each.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def _answered(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length)) if length else None
        try:
            answer = self.server.api.answer(self.command, self.path, body)
            code = 200
        except Refusal as refusal:
            code = refusal.code
            answer = {"kind": "Status", "status": "Failure", "code": code, "message": str(refusal)}
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        if isinstance(answer, Watched):
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            answer.send(self._chunk)
            self.wfile.write(b"0\r\n\r\n")
            return
        data = json.dumps(answer).encode()
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_PUT = do_DELETE = _answered

    def _chunk(self, event: dict[str, Any]) -> None:
        data = json.dumps(event).encode() + b"\n"
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def log_message(self, *_: Any) -> None:
        """Log nothing: tests read `requests`."""
