"""A stand-in for a Kubernetes node: it binds pending pods to the node "local", and runs the command of each pod's first
container as a process of this machine.

python kubelet.py KUBECONFIG LOG_FOLDER

To the API server it behaves like a kubelet (binding, phase, status with exit code, readiness, deletion), but it does
not isolate pods: it has no images, volumes or networks. There is no cluster DNS, so the name of a service is 127.0.0.1.
Names of images request failures: "missing" is never found, "unready" never becomes ready, "done" succeeds at once
without a process, "done:3" ends with status 3.
"""

from __future__ import annotations

import base64
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from kubernetes import client, config, watch

GRACE = 5.0  # seconds between SIGTERM and SIGKILL


class Kubelet:
    """The node. `logs`: a folder for the output of processes, in NAMESPACE.POD.log, to which all pods of a name
    append."""

    def __init__(self, logs: Path) -> None:
        self._api, self._logs = client.CoreV1Api(), logs
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._seen: set[str] = set()

    def run(self) -> None:
        """Watch pods forever, also if the API server is temporarily unreachable."""
        while True:
            try:
                for event in watch.Watch().stream(self._api.list_pod_for_all_namespaces, timeout_seconds=30):
                    self._see(event["type"], event["object"])
            except Exception as error:
                sys.stderr.write(f"{type(error).__name__}: {error}\n")
                time.sleep(0.5)

    def _see(self, kind: str, pod: Any) -> None:
        uid = pod.metadata.uid
        if kind == "DELETED" or pod.metadata.deletion_timestamp:
            threading.Thread(target=self._end, args=(kind, pod), daemon=True).start()
        elif uid not in self._seen and pod.status.phase == "Pending":
            self._seen.add(uid)
            if pod.spec.containers[0].image.startswith("done"):
                self._start(pod)
            else:
                threading.Thread(target=self._start, args=(pod,), daemon=True).start()

    def _end(self, kind: str, pod: Any) -> None:
        process = self._running.pop(pod.metadata.uid, None)
        if process is not None and process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(GRACE)
            except subprocess.TimeoutExpired:
                self._clear(pod.metadata.uid)
        if kind != "DELETED":
            with suppress(client.ApiException):
                options = client.V1DeleteOptions(
                    grace_period_seconds=0, preconditions=client.V1Preconditions(uid=pod.metadata.uid)
                )
                self._api.delete_namespaced_pod(pod.metadata.name, pod.metadata.namespace, body=options)

    def _start(self, pod: Any) -> None:
        try:
            self._bind(pod)
        except client.ApiException:  # it was deleted
            return
        sys.stdout.write(f"starts {pod.metadata.namespace}.{pod.metadata.name} {pod.metadata.uid}\n")
        sys.stdout.flush()
        image = pod.spec.containers[0].image
        if image == "missing":
            message = 'Back-off pulling image "missing"'
            self._report(pod, "Pending", {"waiting": {"reason": "ImagePullBackOff", "message": message}})
            return
        if image.startswith("done"):
            self._ended(pod, int(image.partition(":")[2] or 0))
            return
        try:
            process = self._process(pod)
        except (OSError, client.ApiException) as error:
            self._report(pod, "Pending", {"waiting": {"reason": "CreateContainerConfigError", "message": str(error)}})
            return
        self._running[pod.metadata.uid] = process
        self._report(pod, "Running", {"running": {}}, ready=image != "unready")
        code = process.wait()
        self._clear(pod.metadata.uid)
        self._ended(pod, 128 - code if code < 0 else code)

    def _bind(self, pod: Any) -> None:
        name, namespace = pod.metadata.name, pod.metadata.namespace
        node = client.V1ObjectReference(kind="Node", name="local")
        binding = client.V1Binding(metadata=client.V1ObjectMeta(name=name, uid=pod.metadata.uid), target=node)
        self._api.create_namespaced_pod_binding(name, namespace, binding, _preload_content=False)

    def _process(self, pod: Any) -> subprocess.Popen[bytes]:
        main, namespace = pod.spec.containers[0], pod.metadata.namespace
        services = {service.metadata.name for service in self._api.list_namespaced_service(namespace).items}
        given = {}
        for variable in main.env or []:
            value = variable.value or ""
            if variable.value_from is not None and variable.value_from.field_ref is not None:
                value = {"status.podIP": "127.0.0.1"}[variable.value_from.field_ref.field_path]
            elif variable.value_from is not None:
                named = variable.value_from.secret_key_ref
                kept = self._api.read_namespaced_secret(named.name, namespace)
                value = base64.b64decode(kept.data[named.key]).decode()
            given[variable.name] = "127.0.0.1" if value.split(".")[0] in services else value
        given.pop("HOME", None)
        given["PARTWAY_READY_FILE"] = str(self._logs / f"{pod.metadata.uid}.ready")
        with open(self._logs / f"{namespace}.{pod.metadata.name}.log", "ab") as log:
            return subprocess.Popen(
                [*(main.command or []), *(main.args or [])], env={**os.environ, **given}, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip

    def _clear(self, uid: str) -> None:
        """End the processes that a pod's process has started: none of them would outlive a container."""
        mark = f"PARTWAY_READY_FILE={self._logs / uid}.ready".encode()
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                with suppress(OSError):
                    if mark in (entry / "environ").read_bytes():
                        os.kill(int(entry.name), signal.SIGKILL)

    def _ended(self, pod: Any, code: int) -> None:
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        state = {"terminated": {"exitCode": code, "finishedAt": now, "startedAt": now}}
        self._report(pod, "Failed" if code else "Succeeded", state)

    def _report(self, pod: Any, phase: str, state: dict[str, Any], ready: bool = False) -> None:
        container = {
            "name": pod.spec.containers[0].name, "image": "local", "imageID": "", "ready": ready, "restartCount": 0,
            "state": state,
        }  # fmt: skip
        conditions = [{"type": "Ready", "status": str(ready)}]
        status = {"phase": phase, "podIP": "127.0.0.1", "containerStatuses": [container], "conditions": conditions}
        body = {"metadata": {"uid": pod.metadata.uid}, "status": status}
        while True:
            try:
                self._api.patch_namespaced_pod_status(
                    pod.metadata.name, pod.metadata.namespace, body, _preload_content=False
                )
                return
            except client.ApiException as error:
                if error.status in (404, 409):  # it was deleted, or another pod has its name
                    return
                time.sleep(0.5)
            except Exception:  # the API server is unreachable
                time.sleep(0.5)


if __name__ == "__main__":
    config.load_kube_config(sys.argv[1])
    Kubelet(Path(sys.argv[2])).run()
