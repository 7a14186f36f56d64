"""A real API server of Kubernetes on this machine, for tests: etcd, kube-apiserver, kube-controller-manager, a stand-in
for a node (kubelet.py), and the operator as a process. `tests/helpers/build_kubernetes.sh` builds the binaries once."""

from __future__ import annotations

import base64
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts import free_port

BUILT = Path(os.environ.get("PARTWAY_KUBERNETES", "~/.cache/partway-kubernetes")).expanduser() / "bin"
HERE = Path(__file__).parent
PARTWAY = [sys.executable, "-m", "partway.commands.cli"]
_BINARIES = ("kube-apiserver", "kube-controller-manager", "kubectl")


def missing() -> str:
    """The binaries that this machine lacks; "" if it has all."""
    lacking = [str(BUILT / name) for name in _BINARIES if not (BUILT / name).exists()]
    if shutil.which("etcd") is None:
        lacking.append("etcd")
    return f"{', '.join(lacking)} not there; run tests/helpers/build_kubernetes.sh" if lacking else ""


@dataclass
class Kubernetes:
    """A cluster. `folder`: for its keys, its data, and all logs."""

    folder: Path
    port: int = field(default_factory=free_port)
    _etcd: int = field(default_factory=free_port)
    _peers: int = field(default_factory=free_port)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def config(self) -> Path:
        """The kubeconfig of its administrator."""
        return self.folder / "kubeconfig"

    @property
    def logs(self) -> Path:
        """The folder of the output of pods: NAMESPACE.POD.log."""
        return self.folder / "pods"

    def start(self) -> None:
        """Start everything except the operator, with the definitions."""
        self.logs.mkdir(parents=True)
        token = secrets.token_hex(16)
        (self.folder / "tokens.csv").write_text(f"{token},admin,admin,system:masters")
        key = self.folder / "accounts.key"
        subprocess.run(["openssl", "genrsa", "-out", str(key), "2048"], check=True, capture_output=True)
        cluster = {
            "server": f"https://127.0.0.1:{self.port}",
            "certificate-authority": str(self.folder / "certs" / "apiserver.crt"),
        }
        self.config.write_text(
            json.dumps(
                {
                    "apiVersion": "v1", "kind": "Config", "current-context": "test",
                    "clusters": [{"name": "test", "cluster": cluster}],
                    "users": [{"name": "admin", "user": {"token": token}}],
                    "contexts": [{"name": "test", "context": {"cluster": "test", "user": "admin"}}],
                }
            )
        )  # fmt: skip
        etcd = f"http://127.0.0.1:{self._etcd}"
        peers = f"http://127.0.0.1:{self._peers}"
        self.run(
            "etcd", "etcd", "--data-dir", str(self.folder / "etcd"), "--listen-client-urls", etcd,
            "--advertise-client-urls", etcd, "--listen-peer-urls", peers, "--unsafe-no-fsync",
        )  # fmt: skip
        self.start_server()
        self.run(
            "manager", str(BUILT / "kube-controller-manager"), "--kubeconfig", str(self.config),
            "--service-account-private-key-file", str(key), "--leader-elect=false", "--controllers",
            "garbagecollector,namespace,serviceaccount,serviceaccount-token,resourcequota",
            "--resource-quota-sync-period", "1s", "--kube-api-qps", "500", "--kube-api-burst", "1000",
        )  # fmt: skip
        self.run("kubelet", sys.executable, str(HERE / "kubelet.py"), str(self.config), str(self.logs))
        self.install()

    def start_server(self) -> None:
        """Start the API server, and wait until it is ready."""
        key = str(self.folder / "accounts.key")
        self.run(
            "server", str(BUILT / "kube-apiserver"), "--etcd-servers", f"http://127.0.0.1:{self._etcd}",
            "--bind-address", "127.0.0.1", "--secure-port", str(self.port), "--cert-dir", str(self.folder / "certs"),
            "--token-auth-file", str(self.folder / "tokens.csv"), "--authorization-mode", "RBAC",
            "--service-account-key-file", key, "--service-account-signing-key-file", key,
            "--service-account-issuer", "https://127.0.0.1", "--service-cluster-ip-range", "10.0.0.0/24",
            "--disable-admission-plugins", "ServiceAccount",
        )  # fmt: skip
        self.until(lambda: self.kubectl("get", "--raw", "/readyz", check=False) == "ok", "the API server", 120)

    def install(self, *arguments: str) -> None:
        """Apply the output of `partway operator manifests`."""
        command = [*PARTWAY, "operator", "manifests", *arguments]
        self.apply(subprocess.run(command, capture_output=True, check=True).stdout.decode())
        self.kubectl("wait", "--for=condition=Established", "crd/partwayjobs.partway.dev", "--timeout=60s")

    def start_operator(self, name: str = "operator", *arguments: str, namespace: str = "partway-system") -> None:
        """Start the operator as a process, as its service account in a namespace."""
        config = self.folder / f"{namespace}.kubeconfig"
        if not config.exists():
            given = json.loads(self.config.read_text())
            given["users"][0]["user"] = {"token": self._token(namespace)}
            config.write_text(json.dumps(given))
        self.run(name, *PARTWAY, "operator", "run", *arguments, KUBECONFIG=str(config))

    def _token(self, namespace: str) -> str:
        """The token of the operator's service account, which has only the rights in the manifests."""

        def secrets_of() -> list[Any]:
            said = self.kubectl("-n", namespace, "get", "secrets", "-o", "json")
            kind = "kubernetes.io/service-account-token"
            accounts = [each for each in json.loads(said)["items"] if each["type"] == kind]
            name = "kubernetes.io/service-account.name"
            return [each for each in accounts if each["metadata"]["annotations"][name] == "partway-operator"]

        self.until(lambda: [each for each in secrets_of() if "token" in each.get("data", {})], "token of the operator")
        return base64.b64decode(secrets_of()[0]["data"]["token"]).decode()

    def run(self, name: str, *command: str, **environment: str) -> None:
        """Start a process of the cluster."""
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        with open(self.folder / f"{name}.log", "ab") as log:
            self.processes[name] = subprocess.Popen(
                command, stdout=log, stderr=log, cwd=self.folder, start_new_session=True,
                env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "KUBECONFIG": str(self.config), **environment},
            )  # fmt: skip

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        """End a process of the cluster, and wait until it has ended."""
        process = self.processes.pop(name)
        process.send_signal(number)
        process.wait(30)

    def stop(self) -> None:
        """End all processes of the cluster and of its pods."""
        self.kubectl("delete", "pwj", "--all", "--all-namespaces", "--wait=false", check=False)
        for name in ("operator", "kubelet", "manager", "server", "etcd"):
            for own in [each for each in self.processes if each.startswith(name)]:
                process = self.processes.pop(own)
                if name == "kubelet":
                    time.sleep(1)
                process.terminate()
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()
        for pid in self._left():
            os.kill(pid, signal.SIGKILL)

    def _left(self) -> list[int]:
        """Processes of pods that are still running."""
        mark = str(self.logs).encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                try:
                    if mark in (entry / "environ").read_bytes():
                        found.append(int(entry.name))
                except OSError:
                    continue
        return found

    # -- As a user

    def kubectl(self, *arguments: str, given: str | None = None, check: bool = True) -> str:
        """The output of kubectl."""
        command = [str(BUILT / "kubectl"), "--kubeconfig", str(self.config), *arguments]
        done = subprocess.run(command, input=given, capture_output=True, text=True, check=False, timeout=120)
        assert not check or done.returncode == 0, done.stderr
        return done.stdout if check else done.stdout + done.stderr

    def apply(self, text: str) -> None:
        """Apply yaml or JSON."""
        self.kubectl("apply", "-f", "-", given=text)

    def get(self, kind: str, name: str = "") -> Any:
        """An object, or the list of all objects of a kind; None if there is none."""
        said = self.kubectl("get", kind, *([name] if name else []), "-o", "json", "--ignore-not-found")
        if not said:
            return None if name else []
        found = json.loads(said)
        return found if name else found["items"]

    def owned(self, kind: str) -> list[Any]:
        """The objects of a kind that belong to a job."""
        labelled = self.kubectl("get", kind, "-o", "json", "-l", "partway.dev/job")
        items: list[Any] = json.loads(labelled)["items"]
        return items

    def status(self, name: str) -> dict[str, Any]:
        """The status of a job."""
        found: dict[str, Any] = (self.get("pwj", name) or {}).get("status") or {}
        return found

    def phase(self, name: str) -> str:
        """The phase of a job."""
        return str(self.status(name).get("phase", ""))

    def until(self, there: Callable[[], Any], what: str, seconds: float = 60, every: float = 0.1) -> float:
        """Wait until a condition holds. Return the seconds that it took."""
        began = time.monotonic()
        while not there():
            assert time.monotonic() - began < seconds, f"no {what} in {seconds:g} s\n{self.said()}"
            time.sleep(every)
        return time.monotonic() - began

    def until_phase(self, name: str, phase: str, seconds: float = 60) -> float:
        """Wait until a job is in a phase."""
        return self.until(lambda: self.phase(name) == phase, f"{phase} of {name}", seconds)

    def log(self, pod: str) -> str:
        """The output of a pod, and of earlier pods of its name."""
        path = self.logs / f"default.{pod}.log"
        return path.read_text() if path.exists() else ""

    def starts(self, pod: str) -> list[str]:
        """The uids of the pods that the node has started under a name, in order."""
        lines = (self.folder / "kubelet.log").read_text().splitlines()
        return [line.split()[2] for line in lines if line.startswith(f"starts default.{pod} ")]

    def process(self, pod: str) -> int:
        """The id of the running process of a pod."""
        uid = self.get("pod", pod)["metadata"]["uid"]
        mark = f"PARTWAY_READY_FILE={self.logs / uid}.ready".encode()
        mine = [pid for pid in self._left() if mark in Path(f"/proc/{pid}/environ").read_bytes()]
        return min(mine)  # the others were started by it

    def said(self) -> str:
        """The jobs, the pods, and the ends of all logs."""
        state = self.kubectl("get", "pwj,pods", "-o", "wide", check=False)
        state += self.kubectl("get", "events", "--sort-by=.lastTimestamp", check=False)
        logs = [*self.folder.glob("operator*.log"), *self.folder.glob("kubelet.log"), *self.logs.glob("*.log")]
        return state + "\n".join(f"== {path.name}\n{path.read_text(errors='replace')[-1500:]}" for path in logs)


@contextmanager
def kubernetes(folder: Path) -> Iterator[Kubernetes]:
    """A cluster with the operator."""
    own = Kubernetes(folder)
    try:
        own.start()
        own.start_operator()
        yield own
    finally:
        own.stop()
