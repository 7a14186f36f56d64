"""The yaml that a person applies: what installs the operator, and jobs."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from partway.operator.crd import definition
from partway.operator.pods import SECURITY
from partway.operator.spec import API, GROUP, KIND, PLURAL, parsed
from partway.strategy import RuntimeStateError

_NAME = "partway-operator"
_PORT = 8080
_GROUPS = {
    "": {
        "pods": "create delete list watch", "services": "create delete list watch", "secrets": "create",
        "events": "create",
    },
    GROUP: {PLURAL: "get list watch delete", f"{PLURAL}/status": "update"},
    "coordination.k8s.io": {"leases": "get create update"},
}  # fmt: skip


def yaml() -> Any:
    """PyYAML. Raises RuntimeStateError."""
    try:
        import yaml as module
    except ImportError as error:
        raise RuntimeStateError("yaml needs PyYAML; pip install 'partway[k8s]'") from error
    return module


def text(objects: Sequence[Mapping[str, Any]]) -> str:
    """Objects as yaml."""
    plain = json.loads(json.dumps(objects))  # one object in two places would be an alias
    written: str = yaml().safe_dump_all(plain, sort_keys=False, width=120)
    return written


def installation(namespace: str, image: str) -> list[dict[str, Any]]:
    """All that installs the operator: the definitions, its account, the least that it may do, and its Deployment."""
    account = {"kind": "ServiceAccount", "name": _NAME, "namespace": namespace}
    container = {
        "name": "operator",
        "image": image,
        "args": ["operator", "run", "--lease", f"{namespace}/{_NAME}", "--health", f"http://0.0.0.0:{_PORT}/healthz"],
        "resources": {"requests": {"cpu": "100m", "memory": "128Mi"}, "limits": {"memory": "512Mi"}},
        "securityContext": SECURITY,
        "livenessProbe": {"httpGet": {"path": "/healthz", "port": _PORT}, "initialDelaySeconds": 10},
        "env": [{"name": "HOME", "value": "/tmp"}],
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
    }  # fmt: skip
    labels = {"app.kubernetes.io/name": _NAME}
    pod = {
        "serviceAccountName": _NAME,
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [container],
        "volumes": [{"name": "tmp", "emptyDir": {}}],
    }
    return [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}},
        definition(),
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": _NAME, "namespace": namespace}},
        {
            "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": {"name": _NAME},
            "rules": [
                {"apiGroups": [group], "resources": [resource], "verbs": verbs.split()}
                for group, resources in _GROUPS.items()
                for resource, verbs in resources.items()
            ],
        },
        {
            "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding", "metadata": {"name": _NAME},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": _NAME},
            "subjects": [account],
        },
        {
            "apiVersion": "apps/v1", "kind": "Deployment",
            "metadata": {"name": _NAME, "namespace": namespace, "labels": labels},
            "spec": {
                "replicas": 1, "selector": {"matchLabels": labels},
                "template": {"metadata": {"labels": labels}, "spec": pod},
            },
        },
    ]  # fmt: skip


def job(
    script: str, arguments: Sequence[str], workers: int, servers: int, image: str, name: str = "", namespace: str = ""
) -> dict[str, Any]:
    """A job that runs a script of an image. Raises RuntimeStateError for one that is wrong."""
    stem = PurePosixPath(script).stem.lower()
    name = name or "".join(each if each.isascii() and each.isalnum() else "-" for each in stem).strip("-")
    container = {"name": "partway", "image": image, "command": ["python", script, *arguments]}
    template = {"spec": {"containers": [container]}}
    policies = {"Scheduler": ("OnFailure", 1), "PS": ("Always", servers), "Worker": ("ExitCode", workers)}
    alone = workers == 1 and servers == 0
    roles = {
        role: {"replicas": count, "restartPolicy": policy, "template": template}
        for role, (policy, count) in policies.items()
        if count and not (alone and role == "Scheduler")
    }
    metadata = {"name": name, **({"namespace": namespace} if namespace else {})}
    made = {"apiVersion": API, "kind": KIND, "metadata": metadata, "spec": {"replicaSpecs": roles}}
    _, problems = parsed(made)
    if problems:
        raise RuntimeStateError("\n".join(problems))
    return made


def check(written: str) -> list[str]:
    """All that is wrong with the jobs of a yaml, each with what it accepts; nothing where they are right."""
    module = yaml()
    try:
        objects = [each for each in module.safe_load_all(written) if each is not None]
    except module.YAMLError as error:
        return [f"this is no yaml: {error}"]
    if not objects:
        return ["there is nothing in it"]
    problems = []
    for number, each in enumerate(objects, 1):
        where = f"object {number}: " if len(objects) > 1 else ""
        if not isinstance(each, Mapping):
            problems.append(f"{where}it is {each!r}; it must be a mapping with apiVersion, kind, metadata, spec")
            continue
        missing = [name for name in ("apiVersion", "kind") if name not in each]
        known = ("apiVersion", "kind", "metadata", "spec", "status")
        for name in each.keys() - set(known):
            meant = difflib.get_close_matches(str(name), known, 1)
            problems.append(f"{where}{name} is not known" + (f"; did you mean {meant[0]}?" if meant else ""))
        own = {"apiVersion": API, "kind": KIND}
        problems += [f"{where}{name} is missing; it must be {own[name]}" for name in missing]
        problems += [f"{where}{text}" for text in parsed(each)[1]]
    return problems
