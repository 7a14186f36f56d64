"""The processes of a job with a parameter server, by MS_ROLE: the scheduler, the servers, the workers.

    MS_SCHED      keeps Ray's head and the coordinator, and starts them again when they die, until all workers have
                  ended
    MS_PSERVER    adds a server to the job, on its host; on SIGTERM it gives up its parameters, and ends
    MS_WORKER     runs the script
    none          this process is the only worker, of a cluster that it starts and ends

The first two run the same script, and end in `init`.
"""

from __future__ import annotations

import atexit
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partway.ps.service import cluster, settings
from partway.ps.service.cluster import COORDINATOR, Gone, Link, Node, Site
from partway.ps.service.coordinator import ClusterSize
from partway.runtime.launching import (
    AGAIN,
    Identity,
    interfaces,
    number,
    pem_of,
    seconds_of,
    secret,
    security,
    tell_ready,
)
from partway.strategy import RuntimeStateError

VARIABLES = ("MS_ROLE", "MS_SERVER_NUM", "MS_WORKER_NUM", "MS_SCHED_HOST", "MS_SCHED_PORT")
ROLES = ("MS_SCHED", "MS_PSERVER", "MS_WORKER")
LOCAL_SERVERS = "PARTWAY_PS_LOCAL_SERVERS"  # the scheduler starts all servers on its own host: `partway ps` sets it
FOLDER = "PARTWAY_PS_FOLDER"  # the folder of a job of `partway ps`
_LOOK = 0.3  # seconds
_STARTS = 180.0  # seconds that Ray may take to start on a busy machine


@dataclass(frozen=True)
class Session:
    """This process as a member of a cluster. `number`: the number that the worker asks for, if any."""

    site: Site
    plan: ClusterSize
    link: Link
    number: int | None
    patience: float


_session: list[Session] = []


def current() -> Session:
    """The cluster that `init` has joined. Raises RuntimeStateError before."""
    settings.required()
    if not _session:
        raise RuntimeStateError("the processes of the parameter server have not met yet; call init() first")
    return _session[0]


def join() -> None:
    """Take the role of MS_ROLE; returns for a worker. Raises RuntimeStateError for variables that are missing or wrong,
    and SystemExit when the scheduler or a server has done its work."""
    if _session:
        return
    wanted = settings.required()
    cluster.ray_is_there()
    found = _variables()
    if found is None:
        _alone(wanted)
        return
    role, site, plan = found
    protect(site)
    if role == "MS_SCHED":
        _SchedulerRole(site, plan).run()
        raise SystemExit(0)
    if role == "MS_PSERVER":
        serve(site, plan)
        raise SystemExit(0)
    _work(site, plan)


def _variables() -> tuple[str, Site, ClusterSize] | None:
    env = os.environ
    there = [name for name in VARIABLES if name in env]
    if "MS_ROLE" not in env:
        if stray := [name for name in there if name != "MS_SERVER_NUM"]:
            raise RuntimeStateError(
                f"{stray[0]}={env[stray[0]]} is set, and MS_ROLE is not: set it to MS_SCHED, MS_PSERVER or MS_WORKER, "
                f"or unset {', '.join(stray)} for a cluster of this process alone"
            )
        return None
    role = env["MS_ROLE"]
    if role not in ROLES:
        raise RuntimeStateError(f"MS_ROLE is {role!r}; with a parameter server it is {', '.join(ROLES)}")
    if missing := [name for name in VARIABLES if name not in env]:
        raise RuntimeStateError(
            f"MS_ROLE={role} is a process of a parameter server, and the environment has no {', '.join(missing)}; set "
            "them alike for all processes of the job"
        )
    host, port = env["MS_SCHED_HOST"], number("MS_SCHED_PORT", 1)
    if ":" in host:
        raise RuntimeStateError(f"MS_SCHED_HOST is {host}; a parameter server needs an IPv4 address, or a name of one")
    folder = os.environ.get(FOLDER)
    chosen = settings.required().shard_folder
    if folder and chosen is not None and chosen.absolute() != Path(folder).absolute():
        raise RuntimeStateError(
            f"`partway ps` keeps the parameters in {folder}, and shard_folder is {chosen}; give --shards "
            f"{chosen} instead"
        )
    site = Site(host, port, chosen.absolute() if chosen is not None else Path(folder) if folder else None)
    return role, site, _plan(number("MS_WORKER_NUM", 1))


def _plan(workers: int) -> ClusterSize:
    if os.environ.get("MS_SERVER_NUM") == "0":
        raise RuntimeStateError(
            "MS_SERVER_NUM is 0, and set_ps_context(enable_ps=True) asks for servers: start 1 or more, or leave out "
            "enable_ps to train without"
        )
    servers = number("MS_SERVER_NUM", 1) if "MS_SERVER_NUM" in os.environ else 1
    return ClusterSize(workers, servers, seconds_of("MS_TOPO_TIMEOUT", 1800), seconds_of("MS_NODE_TIMEOUT", 30))


def protect(site: Site) -> None:
    """Set Ray's options of security: the token, and TLS."""
    kept = Path(os.environ.get("PARTWAY_CACHE_DIR", "~/.cache/partway")).expanduser()
    cluster.prepare(site.host, cluster.token_of(secret() or None, site.host, kept), _tls(site))


def _tls(site: Site) -> dict[str, str]:
    """Ray's TLS options, if set_ps_context(enable_ssl=True) named certificates. On one host, or on an interface that
    encrypts, it needs none."""
    asked = security.wanted()
    if asked is None:
        return {}
    if asked.certificates is None:
        if site.is_local:
            return {}
        raise RuntimeStateError(
            f"enable_ssl=True, and the parameter server at {site.address} is reached over a network: name certificates "
            "in the file of config_file_path, or put all processes on one host (MS_SCHED_HOST=127.0.0.1)"
        )
    if asked.certificates.revoked is not None or asked.certificates.ciphers:
        raise RuntimeStateError(
            "Ray's TLS cannot be told crl_path or cipher_list, which would be ignored; leave them out of the file"
        )
    folder = Path(
        tempfile.mkdtemp(prefix="partway-tls-")
    )  # of this user alone; Ray's processes read them when they start
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    key, chain = pem_of(asked.certificates.server)
    files = {"SERVER_KEY": folder / "key.pem", "SERVER_CERT": folder / "chain.pem", "CA_CERT": folder / "authority.pem"}
    for path, data in zip(files.values(), (key, chain, asked.certificates.authority.read_bytes()), strict=True):
        path.touch(0o600)
        path.write_bytes(data)
    return {"RAY_USE_TLS": "1", **{f"RAY_TLS_{name}": str(path) for name, path in files.items()}}


def check_address(identity: Identity, site: Site) -> None:
    """Raise RuntimeStateError if a certificate does not name the address of this host, which Ray's TLS compares: Ray
    itself would only say that nobody answers."""
    from cryptography import x509

    chain = pem_of(identity)[1]
    own = "127.0.0.1" if site.is_local else interfaces.from_here(socket.gethostbyname(site.host))
    try:
        names = x509.load_pem_x509_certificate(chain).extensions.get_extension_for_class(x509.SubjectAlternativeName)
        addresses = [str(each) for each in names.value.get_values_for_type(x509.IPAddress)]
    except x509.ExtensionNotFound:
        addresses = []
    if own not in addresses:
        raise RuntimeStateError(
            f"{identity} is for {', '.join(addresses) or 'no address'}, and Ray's TLS compares addresses: make one "
            f"with subjectAltName=IP:{own}"
        )


def _receive_patience() -> float:
    return seconds_of("MS_RECEIVE_MSG_TIMEOUT", 300)


# -- The scheduler


class _SchedulerRole:
    """Keeps Ray's head and the coordinator for as long as the job runs."""

    def __init__(self, site: Site, plan: ClusterSize) -> None:
        self._own = site.folder is None
        folder = site.folder or Path(tempfile.mkdtemp(prefix="partway-ps-"))
        self._site, self._plan = Site(site.host, site.port, folder), plan
        self._node = Node(self._site, head=True, logs=folder / "ray")
        self._link = Link(self._site, 30)
        self._asked = threading.Event()
        self._servers = number(LOCAL_SERVERS, 1) if LOCAL_SERVERS in os.environ else 0

    def run(self) -> None:
        """Run until all workers have ended. Raises SystemExit if this process is asked to end before: another may
        replace it."""
        signal.signal(signal.SIGTERM, lambda *_: self._asked.set())
        began, ended = False, False
        attached = cluster.answers(self._site)  # in place of one that died
        try:
            while not self._asked.is_set() and not ended:
                try:
                    self._start()
                    while not self._asked.wait(_LOOK) and not ended:
                        if not self._node.is_alive():
                            raise Gone(f"Ray's head at {self._site.address} has ended")
                        state = self._link.ask(COORDINATOR, "wanted", patience=60)
                        began = began or bool(state["there"])
                        ended = (began and not state["there"]) or (attached and state["over"])
                except Gone as error:
                    _say(f"Ray's head is started again: {error}")
                    self._node.stop()
                except TimeoutError:
                    _say("the coordinator does not answer")
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
            cluster.leave()
            self._node.stop()
            if self._own:
                shutil.rmtree(self._site.folder or "", ignore_errors=True)
        if not ended:
            raise SystemExit(AGAIN)

    def _start(self) -> None:
        if not cluster.answers(self._site):
            self._node.start(_STARTS)
        self._link.again()
        if (folder := cluster.folder_here()) is not None:
            self._node.adopt(folder)
        cluster.start_coordinator(self._plan, self._site)
        self._link.await_coordinator()
        self._link.ask(COORDINATOR, "place_servers", self._servers)


# -- A server


def serve(site: Site, plan: ClusterSize) -> None:
    """Add a server to the job, until it ends or this process is asked to."""
    asked = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: asked.set())
    name: str | None = None
    node = None if _is_of_head(site) else Node(site, head=False, logs=Path(tempfile.mkdtemp(prefix="partway-ps-")))
    link = Link(site, plan.patience)
    if node is not None:
        _wait_for(site, plan.patience)
    try:
        while not asked.is_set():
            try:
                if node is not None and not node.is_alive():
                    node.start(_STARTS)
                link.again()
                name = link.ask(COORDINATOR, "add_server", link.node, name)
                tell_ready()
                began, ended = False, False
                while not asked.wait(_LOOK) and not ended:
                    state = link.ask(COORDINATOR, "wanted", patience=60)
                    began = began or bool(state["there"])
                    ended = (began and not state["there"]) or name not in state["servers"]
                if ended:
                    return
            except (Gone, TimeoutError):
                if not _waits(site, 10):
                    return
        _retire(link, name)
    finally:
        cluster.leave()
        if node is not None:
            node.stop()


def _retire(link: Link, name: str | None) -> None:
    with suppress(Gone):
        try:
            link.ask(COORDINATOR, "retire_server", name)
        except RuntimeStateError as error:  # it is the only one
            _say(str(error))
            return
        while name in link.ask(COORDINATOR, "wanted")["servers"]:
            time.sleep(_LOOK)


def _waits(site: Site, seconds: float) -> bool:
    """Wait for a head to come again, and return whether one has."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if cluster.answers(site):
            return True
        time.sleep(_LOOK)
    return False


def _is_of_head(site: Site) -> bool:
    """Whether the head runs on this host. A name that is not known yet is another host's."""
    if site.is_local:
        return True
    try:
        return socket.gethostbyname(site.host) in set(interfaces.addresses().values())
    except OSError:
        return False


# -- A worker


def _work(site: Site, plan: ClusterSize) -> None:
    if not _is_of_head(site):
        _wait_for(site, plan.patience)
        node = Node(site, head=False, logs=Path(tempfile.mkdtemp(prefix="partway-ps-")))
        node.start(_STARTS)
        atexit.register(node.stop)
    cluster.join(site, plan.patience)
    mine = number("MS_NODE_ID", 0) if "MS_NODE_ID" in os.environ else None
    _session.append(Session(site, plan, Link(site, _receive_patience()), mine, _receive_patience()))
    tell_ready()


def _wait_for(site: Site, patience: float) -> None:
    if not _waits(site, patience):
        raise RuntimeStateError(
            f"no scheduler answers at {site.address} in {patience:g} s (MS_TOPO_TIMEOUT); start one process with "
            "MS_ROLE=MS_SCHED there"
        )


def _alone(wanted: settings.ServerSettings) -> None:
    """Start a cluster that ends with this process."""
    plan = _plan(1)
    folder = wanted.shard_folder
    if folder is None and wanted.durability != "memory":
        folder = Path(tempfile.mkdtemp(prefix="partway-ps-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    site = Site("127.0.0.1", 0, folder.absolute() if folder is not None else None)
    cluster.prepare(site.host, secrets.token_hex(32), _tls(site))
    cluster.join(site, 60)
    atexit.register(cluster.leave)
    link = Link(site, _receive_patience())
    cluster.start_coordinator(plan, site)
    link.await_coordinator()
    link.ask(COORDINATOR, "place_servers", plan.servers)
    _session.append(Session(site, plan, link, 0, _receive_patience()))


def end() -> None:
    """Leave the cluster; one that this process started is removed completely."""
    if _session:
        site = _session.pop().site
        if site.port == 0:
            with suppress(Exception):
                _stop_actors()
        cluster.leave()


def _stop_actors() -> None:
    import ray

    actors: list[Any] = ray.util.list_named_actors(all_namespaces=True)  # with all namespaces they are dicts
    for name in [each["name"] for each in actors if each["namespace"] == cluster.SPACE]:
        ray.kill(ray.get_actor(name, cluster.SPACE))


def card() -> str:
    """The name of this process in messages."""
    return f"process {os.getpid()} on {socket.gethostname()}"


def _say(text: str) -> None:
    sys.stderr.write(f"partway: {text}\n")
    sys.stderr.flush()


def scheduler() -> None:
    """Run the scheduler of `partway ps`: a process without a script."""
    settings.want(settings.ServerSettings())
    join()
