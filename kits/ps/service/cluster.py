"""The actors of Ray, and their places: the cluster, its coordinator and its servers. The only file that knows Ray.

Ray restarts an actor when its process dies, and repeats the calls that it had not answered. Nothing restarts Ray's own
head: when it dies, another is started in its place, and coordinator and servers find their state on their shelves.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import importlib.util
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partway.ps.service import keeper
from partway.ps.service.coordinator import ClusterSize, Coordinator
from partway.ps.service.job import Job
from partway.ps.service.server import Server
from partway.ps.service.shelf import Full
from partway.ps.service.update import OptimizerMaker
from partway.runtime.launching import is_local
from partway.strategy import RuntimeStateError
from partway.strategy.basics import install_extra

SPACE, COORDINATOR = "partway-ps", "coordinator"
_FOR_EVER = {"max_restarts": -1, "max_task_retries": -1, "lifetime": "detached", "num_cpus": 0}
_RECONNECT = 1.0  # seconds without Ray's head after which its cluster counts as gone
_ASK = (
    10.0  # seconds of waiting after which the coordinator is asked whether it is there, and in which it has to answer
)
_STARTS = 120.0  # seconds in which a new coordinator has to answer


class Gone(RuntimeStateError):
    """Ray's head has gone, and with it the cluster: another may take its place."""


@dataclass(frozen=True)
class Site:
    """The place of a cluster.

    host, port   of its head; port 0: in this process
    folder       of the servers' records; None: in memory only
    """

    host: str
    port: int
    folder: Path | None

    @property
    def address(self) -> str:
        """host:port."""
        return f"{self.host}:{self.port}"

    @property
    def is_local(self) -> bool:
        """Whether the whole cluster is on the loopback."""
        return is_local(self.host)


def ray() -> Any:
    """Ray, imported at its first use: it reads its settings then."""
    return importlib.import_module("ray")


def ray_is_there() -> None:
    """Raise RuntimeStateError if Ray or LMDB is not installed. (Importing Ray waits for `prepare`.)"""
    for name in ("ray", "lmdb"):
        if importlib.util.find_spec(name) is None:
            raise RuntimeStateError(
                f"the parameter server needs {name}, which is not installed; run: {install_extra('ps')}"
            )


def prepare(host: str, token: str | None, variables: Mapping[str, str] | None = None) -> None:
    """Set the environment of Ray, for this process and its children: only holders of the token may send requests, and
    on one host everything listens on the loopback. Raises RuntimeStateError if this process has already imported Ray
    with other settings."""
    wanted = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_free_objects_period_milliseconds": "0",  # used memory is reused at once
        "RAY_task_events_report_interval_ms": "0",  # Ray's head would keep up to 100,000 of them, 20 KB for each push
        "RAY_max_direct_call_object_size": str(2**19),  # bytes that go with a call, and not by shared memory
        "RAY_BACKEND_LOG_LEVEL": os.environ.get("RAY_BACKEND_LOG_LEVEL", "fatal"),
        keeper.PATIENCE: str(10**6),  # seconds: we limit how long a process waits for Ray's head
        **(variables or {}),
    }
    if token is not None:
        wanted["RAY_AUTH_TOKEN"] = token
    if is_local(host):
        wanted["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # the loopback is not replaced by an address
    if "ray" in sys.modules and is_local(host):
        from ray._private import ray_constants

        if ray_constants.ENABLE_RAY_CLUSTER:
            raise RuntimeStateError(
                "ray was imported before pw.init(), and would listen on all interfaces; import it after, or set "
                "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0"
            )
    os.environ.update(wanted)


# -- Ray's own processes


class Node:
    """Ray's processes on this host, in a session of their own, with a process that ends them when nobody needs them any
    more (keeper.py).

    head   True: the head of a new cluster, which outlives the process that starts it, if that is killed, and
           waits for another; False: it joins the cluster at `site`
    logs   a folder for its output and the path of its folder
    """

    def __init__(self, site: Site, head: bool, logs: Path) -> None:
        self._logs, self._head, self._site = logs, head, site
        self._process: subprocess.Popen[bytes] | None = None
        self._record = logs / ("head" if head else "node")

    def start(self, patience: float) -> None:
        """Start it, and wait until it answers. Raises RuntimeStateError."""
        try:
            folder = keeper.made()
        except OSError as error:
            raise RuntimeStateError(f"Ray has no folder for its sockets: {error}") from error
        self.adopt(folder)
        if self._head:
            where = [
                "--head",
                f"--port={self._site.port}",
                f"--node-ip-address={_address_of(self._site.host)}",
                "--include-dashboard=false",
            ]
        else:
            where = [f"--address={self._site.address}"]
        memory = min(_memory() // 4, 8 * 2**30)
        command = [
            sys.executable, "-m", "ray.scripts.scripts", "start", *where, "--block", "--num-cpus=1",
            "--disable-usage-stats", f"--temp-dir={keeper.inner(folder)}", f"--object-store-memory={memory}",
        ]  # fmt: skip
        command = keeper.command(folder, 0 if self._head else os.getpid(), command)
        with open(self._logs / "ray.log", "ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        end = time.monotonic() + patience
        while not (answers(self._site) if self._head else self._says_started()):
            if self._process.poll() is not None or time.monotonic() > end:
                self.stop()
                raise RuntimeStateError(f"Ray could not be started at {self._site.address}: {self._last_words()}")
            keeper.renew(folder)
            time.sleep(0.05)

    def adopt(self, folder: Path) -> None:
        """Adopt the processes in `folder`: of a new node, or of one that another process has started."""
        self._logs.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._record.write_text(str(folder))

    def is_alive(self) -> bool:
        """Renew its lease, and return whether it runs."""
        if (folder := self._folder()) is not None:
            keeper.renew(folder)
        return answers(self._site) if self._process is None else self._process.poll() is None

    def stop(self) -> None:
        """End all of its processes."""
        if (folder := self._folder()) is not None:
            keeper.end(folder)
        if self._process is not None:
            self._process.wait()
        self._record.unlink(missing_ok=True)

    def _folder(self) -> Path | None:
        return Path(self._record.read_text()) if self._record.exists() else None

    def _says_started(self) -> bool:
        return "Ray runtime started" in (self._logs / "ray.log").read_text(errors="replace")

    def _last_words(self) -> str:
        lines = (self._logs / "ray.log").read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"


def _memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _address_of(host: str) -> str:
    return "127.0.0.1" if is_local(host) else socket.gethostbyname(host)


def answers(site: Site) -> bool:
    """Whether Ray's head listens."""
    try:
        socket.create_connection((_address_of(site.host), site.port), 1).close()
    except OSError:
        return False
    return True


# -- Joining


def join(site: Site, patience: float) -> None:
    """Make this process a part of the cluster. Raises Gone if its head does not answer in `patience` seconds."""
    module = ray()
    end = time.monotonic() + patience
    if module.is_initialized():
        if site.port == 0:
            return
        leave()
    with _signals_kept():
        _init(module, site, end, patience)


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """Keep this process's signal handlers: Ray takes SIGTERM for itself, and would make this process crash on it."""
    here = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if here and handler is not None:
            signal.signal(signal.SIGTERM, handler)


def _init(module: Any, site: Site, end: float, patience: float) -> None:
    if site.port == 0:
        _init_alone(module)
        return
    while True:
        try:
            if answers(site):
                host = "127.0.0.1" if site.is_local else _address_of(site.host)
                module.init(address=f"{host}:{site.port}", namespace=SPACE, log_to_driver=False, logging_level="ERROR")
                return
        except (ConnectionError, RuntimeError, ValueError) as error:
            if "uthenticat" in str(error) or "oken" in str(error):
                raise RuntimeStateError(
                    f"the cluster at {site.address} does not let this process in: it has another PARTWAY_JOB_SECRET, "
                    "or none"
                ) from error
        if time.monotonic() > end:
            raise Gone(
                f"no parameter server's scheduler answers at {site.address} in {patience:g} s; start one process with "
                "MS_ROLE=MS_SCHED there, and check MS_SCHED_HOST and MS_SCHED_PORT"
            )
        time.sleep(0.1)


def _init_alone(module: Any) -> None:
    """Start a cluster in this process, which ends with it."""
    folder = keeper.made()
    process = subprocess.Popen(keeper.command(folder, os.getpid(), []), start_new_session=True)
    atexit.register(process.wait)
    atexit.register(process.terminate)
    os.environ[keeper.FOLDER] = str(folder)
    try:
        module.init(
            address="local",
            num_cpus=1,
            include_dashboard=False,
            namespace=SPACE,
            log_to_driver=False,
            logging_level="ERROR",
            object_store_memory=min(_memory() // 4, 8 * 2**30),
            _node_ip_address="127.0.0.1",
            _temp_dir=str(keeper.inner(folder)),
        )
    finally:
        del os.environ[keeper.FOLDER]  # only for Ray's processes


def folder_here() -> Path | None:
    """The folder of Ray's processes on this host, for a joined cluster; None if somebody else created it."""
    folder = Path(ray().get_runtime_context().get_temp_dir()).parent
    return folder if keeper.is_ours(folder) else None


def leave() -> None:
    """Disconnect from the cluster."""
    if "ray" in sys.modules:
        with contextlib.suppress(Exception):  # its processes may be gone
            sys.modules["ray"].shutdown()


def start_coordinator(plan: ClusterSize, site: Site) -> None:
    """Start the coordinator, if it is not running."""
    module = ray()
    folder = site.folder / COORDINATOR if site.folder is not None else None
    actor = module.remote(_CoordinatorActor).options(
        name=COORDINATOR, namespace=SPACE, get_if_exists=True, max_concurrency=1000, **_FOR_EVER
    )
    actor.remote(plan, site.folder, folder)


class _CoordinatorActor(Coordinator):
    """The coordinator as an actor."""

    def __init__(self, plan: ClusterSize, servers: Path | None, folder: Path | None) -> None:
        super().__init__(plan, RayServers(servers), folder)

    async def pid(self) -> int:
        """The number of its process."""
        return os.getpid()


class _ServerActor(Server):
    """A server as an actor."""

    def pid(self) -> int:
        """The number of its process."""
        return os.getpid()


class RayServers:
    """Servers as actors, by their names. `folder`: the folder of all their shelves."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._handles: dict[str, Any] = {}

    def start(self, name: str, node: str | None, job: Job, maker: OptimizerMaker) -> None:
        """See coordinator.Servers."""
        module = ray()
        strategy: Any = "DEFAULT"
        if node is not None:
            from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

            strategy = NodeAffinitySchedulingStrategy(node, soft=True)
        actor = module.remote(_ServerActor).options(
            name=name, namespace=SPACE, get_if_exists=True, scheduling_strategy=strategy, **_FOR_EVER
        )
        folder = self._folder / name if self._folder is not None and job.durability != "memory" else None
        self._handles[name] = actor.remote(name, job, maker, folder)

    def stop(self, name: str) -> None:
        """See coordinator.Servers."""
        module = ray()
        with contextlib.suppress(RuntimeStateError):
            module.kill(self._handle(name))
        self._handles.pop(name, None)
        if self._folder is not None:
            shutil.rmtree(self._folder / name, ignore_errors=True)

    async def ask(self, name: str, method: str, *arguments: Any) -> Any:
        """See coordinator.Servers."""
        import asyncio

        while True:
            try:
                return await getattr(self._handle(name), method).remote(*arguments)
            except Full:
                await asyncio.sleep(1)

    def renew(self) -> None:
        """See coordinator.Servers."""
        if keeper.FOLDER in os.environ:
            keeper.renew(Path(os.environ[keeper.FOLDER]))

    async def move(self, source: str, target: str, keys: list[str]) -> None:
        """See coordinator.Servers."""
        taken = self._handle(source).take.remote(keys)
        await self._handle(target).give.remote(taken)

    def _handle(self, name: str) -> Any:
        if name not in self._handles:
            try:
                self._handles[name] = ray().get_actor(name, SPACE)
            except ValueError as error:
                raise RuntimeStateError(f"{name} has ended: {error}") from error
        return self._handles[name]


# -- Asking


class _Watch:
    """Watches Ray's head while an answer is waited for."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._silent: float | None = None

    def look(self) -> None:
        """Raise Gone if the head has been silent for too long."""
        if self._site.port == 0 or answers(self._site):
            self._silent = None
            return
        now = time.monotonic()
        self._silent = self._silent or now
        if now - self._silent > _RECONNECT:
            raise Gone(f"Ray's head at {self._site.address} no longer answers")


class Link:
    """The connection of a process to the coordinator and the servers of a cluster."""

    def __init__(self, site: Site, patience: float) -> None:
        self._site, self._patience = site, patience
        self._handles: dict[str, Any] = {}

    def call(self, name: str, method: str, *arguments: Any) -> Any:
        """Call a method of the named actor. Returns a handle for `wait`. Raises Gone."""
        if not ray().is_initialized():  # Ray would start a cluster of its own by itself
            raise Gone(f"this process has left the cluster at {self._site.address}")
        try:
            if name not in self._handles:
                self._handles[name] = ray().get_actor(name, SPACE)
            return getattr(self._handles[name], method).remote(*arguments)
        except ValueError as error:
            raise Gone(f"there is no {name} at {self._site.address}: {error}") from error

    def wait(self, calls: Sequence[Any], patience: float | None = None) -> list[Any]:
        """The answers. Raises the error of the first call that failed; Gone if Ray's head has gone, and TimeoutError
        after `patience` seconds."""
        module = ray()
        begin = asked = time.monotonic()
        watch = _Watch(self._site)
        while True:
            try:
                return list(module.get(list(calls), timeout=1))
            except module.exceptions.GetTimeoutError:
                now = time.monotonic()
                watch.look()
                if patience is not None and now - begin > patience:
                    raise TimeoutError from None
                if patience is None and now - asked > _ASK:  # another head may have replaced the one it knew
                    self._ask_whether_it_is_there()
                    asked = time.monotonic()
            except module.exceptions.RayTaskError as error:
                cause = getattr(error, "cause", None)
                if isinstance(cause, RuntimeStateError):
                    raise cause from None
                raise RuntimeStateError(f"a server or the coordinator failed: {cause or error}") from error
            except module.exceptions.RayActorError as error:
                raise Gone(f"a server or the coordinator at {self._site.address} has gone: {error}") from None

    def _ask_whether_it_is_there(self) -> None:
        try:
            self.ask(COORDINATOR, "pid", patience=_ASK)
        except TimeoutError:
            raise Gone(f"the coordinator at {self._site.address} does not answer") from None

    def await_coordinator(self) -> None:
        """Wait until the coordinator, which has just been started, answers: with all cores busy that takes long, and
        until then it does not count as gone. Raises RuntimeStateError if it does not answer."""
        try:
            self.ask(COORDINATOR, "pid", patience=_STARTS)
        except TimeoutError:
            raise RuntimeStateError(
                f"the coordinator at {self._site.address} did not start within {_STARTS:.0f} s; look at Ray's logs"
            ) from None

    def ask(self, name: str, method: str, *arguments: Any, patience: float | None = None) -> Any:
        """The answer of an actor."""
        return self.wait([self.call(name, method, *arguments)], patience)[0]

    def again(self) -> None:
        """Join the cluster again after the last one has gone. Raises Gone after the patience of this link."""
        self._handles.clear()
        if self._site.port:
            leave()
        join(self._site, self._patience)

    @property
    def node(self) -> str:
        """The id of this process's node."""
        return str(ray().get_runtime_context().get_node_id())


def token_of(secret: bytes | None, host: str, folder: Path) -> str | None:
    """The token by which the processes of a cluster know each other: from the job's secret, or, on one host, from a
    file that only this user may read. Raises RuntimeStateError for processes on several hosts without a secret."""
    import hashlib

    if secret is not None:
        return hashlib.sha256(b"partway ps" + secret).hexdigest()
    if not is_local(host):
        raise RuntimeStateError(
            f"the parameter server listens at {host}, and whoever reaches it could run what they like: set "
            "PARTWAY_JOB_SECRET for all processes, or put all on one host (MS_SCHED_HOST=127.0.0.1)"
        )
    path = folder / "ps-token"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with contextlib.suppress(FileExistsError):
        number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(number, "w") as file:
            file.write(secrets.token_hex(32))
    end = time.monotonic() + 5
    while not (text := path.read_text()) and time.monotonic() < end:
        time.sleep(0.05)
    return text
