"""The objects of a job: its pods, the service of its scheduler, the secret that its processes share."""

from __future__ import annotations

import copy
import secrets
from collections.abc import Mapping
from typing import Any

from partway.operator.observed import ATTEMPT, INDEX, JOB, KINDS, ROLE, UID, name_of
from partway.operator.spec import API, KIND, SCHEDULER, SERVER, WORKER, Spec

TLS = "/etc/partway/tls"
READY = "/tmp/partway-ready"  # a file that a process writes when it has joined its job
_ROLES = {SCHEDULER: "MS_SCHED", SERVER: "MS_PSERVER", WORKER: "MS_WORKER"}
_REQUESTS = {
    SCHEDULER: {"cpu": "250m", "memory": "512Mi"},
    SERVER: {"cpu": "1", "memory": "1Gi"},
    WORKER: {"cpu": "1", "memory": "1Gi"},
}
SECURITY = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
_POD_SECURITY = {"runAsNonRoot": True, "fsGroup": 1000, "seccompProfile": {"type": "RuntimeDefault"}}


def service_name(job: str) -> str:
    """The name of the service by which the scheduler is found."""
    return f"{job}-scheduler"


def service(job: Mapping[str, Any], spec: Spec) -> dict[str, Any]:
    """The headless service of the scheduler. Its pod is published before it is ready: it is ready when others have
    come."""
    name = job["metadata"]["name"]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(job, service_name(name), {}),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {JOB: name, UID: job["metadata"]["uid"], ROLE: KINDS[SCHEDULER]},
            "ports": [{"name": "scheduler", "port": spec.schedulerPort}],
        },
    }


def secret(job: Mapping[str, Any]) -> dict[str, Any]:
    """A new secret for the processes of a job: only those that have it may join. The API server adds to its name, so
    that it is never that of another person's secret."""
    metadata = _metadata(job, "", {})
    del metadata["name"]
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {**metadata, "generateName": f"{job['metadata']['name']}-secret-"},
        "immutable": True,
        "stringData": {"secret": secrets.token_hex(32)},
    }


def pod(job: Mapping[str, Any], spec: Spec, role: str, index: int, attempt: str) -> dict[str, Any]:
    """A pod: the template of its role, with the job's additions. The template's security, resources and probes stay as
    they are."""
    name = job["metadata"]["name"]
    said = spec.role(role)
    assert said is not None
    made = copy.deepcopy(said.template)
    labels = {ROLE: KINDS[role], INDEX: str(index), ATTEMPT: attempt}
    own = made.get("metadata") or {}
    metadata = _metadata(job, name_of(name, role, index), {**(own.get("labels") or {}), **labels})
    if own.get("annotations"):
        metadata["annotations"] = own["annotations"]
    body = made["spec"]
    body["restartPolicy"] = "Never"  # the operator starts it again, and counts that
    body.setdefault("securityContext", copy.deepcopy(_POD_SECURITY))
    body.setdefault("automountServiceAccountToken", False)
    for container in body["containers"]:
        container.setdefault("securityContext", copy.deepcopy(SECURITY))
    main = body["containers"][0]
    main.setdefault("resources", {"requests": dict(_REQUESTS[role])})
    volumes, mounts = body.setdefault("volumes", []), main.setdefault("volumeMounts", [])
    if not any(each.get("mountPath") == "/tmp" for each in mounts):
        volumes.append({"name": "partway-tmp", "emptyDir": {}})
        mounts.append({"name": "partway-tmp", "mountPath": "/tmp"})
    if spec.enableSSL:
        volumes.append({"name": "partway-tls", "secret": {"secretName": spec.sslSecret, "defaultMode": 0o440}})
        mounts.append({"name": "partway-tls", "mountPath": TLS, "readOnly": True})
    has = {each.get("name") for each in main.get("env") or ()}
    main["env"] = [
        *(main.get("env") or []),
        *(each for each in _variables(job, spec, role, index) if each["name"] not in has),
    ]
    if spec.count(SCHEDULER):
        main.setdefault("readinessProbe", _probe(spec, role))
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": body}


def _variables(job: Mapping[str, Any], spec: Spec, role: str, index: int) -> list[dict[str, Any]]:
    """The environment variables of a process. A job of one worker and nothing else has none of the scheduler's."""
    found = {"HOME": "/tmp"}
    if spec.count(SCHEDULER) == 0:
        return [{"name": key, "value": value} for key, value in found.items()]
    found |= {
        "MS_ROLE": _ROLES[role],
        "MS_SCHED_HOST": service_name(job["metadata"]["name"]),
        "MS_SCHED_PORT": str(spec.schedulerPort),
        "MS_WORKER_NUM": str(spec.count(WORKER)),
        "PARTWAY_READY_FILE": READY,
    }
    if spec.count(SERVER):
        found["MS_SERVER_NUM"] = str(spec.count(SERVER))
    if role == WORKER:
        found["MS_NODE_ID"] = str(index)
    if spec.recovers:
        found["MS_ENABLE_RECOVERY"] = "1"
    key = {"secretKeyRef": {"name": job["status"]["secret"], "key": "secret"}}
    own = {"name": "MS_SCHED_HOST", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}  # its name is known later
    return [
        *(
            own if role == SCHEDULER and name == own["name"] else {"name": name, "value": value}
            for name, value in found.items()
        ),
        {"name": "PARTWAY_JOB_SECRET", "valueFrom": key},
    ]


def _probe(spec: Spec, role: str) -> dict[str, Any]:
    """The readiness probe: the scheduler is ready when it listens, the others when they have joined the job."""
    check = {"tcpSocket": {"port": spec.schedulerPort}} if role == SCHEDULER else {"exec": {"command": ["cat", READY]}}
    return {**check, "periodSeconds": 5}


def _metadata(job: Mapping[str, Any], name: str, labels: Mapping[str, str]) -> dict[str, Any]:
    owner = {
        "apiVersion": API,
        "kind": KIND,
        "name": job["metadata"]["name"],
        "uid": job["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }
    own = {JOB: job["metadata"]["name"], UID: job["metadata"]["uid"], "app.kubernetes.io/managed-by": "partway"}
    return {
        "name": name,
        "namespace": job["metadata"]["namespace"],
        "labels": {**labels, **own},
        "ownerReferences": [owner],
    }
