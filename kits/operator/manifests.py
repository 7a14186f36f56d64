"""The yaml that a person applies: the installation of the operator, and jobs."""

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
from partway.strategy.basics import install_extra

_MOST = 100_000  # values of a yaml, which an API server would not take either

_NAME = "partway-operator"
_PORT = 8080
_JOBS = {  # its rights in the namespaces of jobs: by API group and resource, the verbs
    "": {
        "pods": "create delete list watch",
        "services": "create delete list watch",
        "secrets": "create",
        "events": "create",
    },
    GROUP: {PLURAL: "get list watch delete", f"{PLURAL}/status": "update"},
}


def yaml() -> Any:
    """Import PyYAML. Raises RuntimeStateError if it is missing."""
    try:
        import yaml as module
    except ImportError as error:
        raise RuntimeStateError(f"yaml needs PyYAML; install it with: {install_extra('k8s')}") from error
    return module


def text(objects: Sequence[Mapping[str, Any]]) -> str:
    """Objects as yaml."""
    plain = json.loads(json.dumps(objects))  # one object in two places would be an alias
    written: str = yaml().safe_dump_all(plain, sort_keys=False, width=120)
    return written


def installation(namespace: str, image: str, watched: Sequence[str] = ()) -> list[dict[str, Any]]:
    """All objects that install the operator: the definition, its account, its minimal rights, and its Deployment.

    namespace    where it runs
    watched      the existing namespaces whose jobs it serves: it has rights in these alone; none: all namespaces
    """
    args = ["operator", "run", "--lease", f"{namespace}/{_NAME}", "--health", f"http://0.0.0.0:{_PORT}/healthz"]
    probe = {"httpGet": {"path": "/healthz", "port": _PORT}, "periodSeconds": 10}
    container = {
        "name": "operator",
        "image": image,
        "args": [*args, *(f"--namespace={each}" for each in watched)],
        "resources": {"requests": {"cpu": "100m", "memory": "128Mi"}, "limits": {"memory": "512Mi"}},
        "securityContext": SECURITY,
        "readinessProbe": probe,
        "livenessProbe": {**probe, "failureThreshold": 30},  # it recovers by itself first: an API server may be away
        "env": [{"name": "HOME", "value": "/tmp"}],
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
    }
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
        *_allowed(namespace, f"{_NAME}-lease", _lease_rules(), namespace),
        *(each for where in watched or (None,) for each in _allowed(where, _NAME, _job_rules(), namespace)),
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": _NAME, "namespace": namespace, "labels": labels},
            "spec": {
                "replicas": 1,
                "selector": {"matchLabels": labels},
                "template": {"metadata": {"labels": labels}, "spec": pod},
            },
        },
    ]


def _job_rules() -> list[dict[str, Any]]:
    return [
        {"apiGroups": [group], "resources": [resource], "verbs": verbs.split()}
        for group, resources in _JOBS.items()
        for resource, verbs in resources.items()
    ]


def _lease_rules() -> list[dict[str, Any]]:
    """The rights to create leases, and to use the operator's own."""
    lease = {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"]}
    return [{**lease, "verbs": ["create"]}, {**lease, "resourceNames": [_NAME], "verbs": ["get", "update"]}]


def _allowed(where: str | None, name: str, rules: list[dict[str, Any]], namespace: str) -> list[dict[str, Any]]:
    """A role and its binding to the operator's account: in one namespace, or in the cluster if that is None."""
    kind = "ClusterRole" if where is None else "Role"
    metadata = {"name": name, **({} if where is None else {"namespace": where})}
    account = {"kind": "ServiceAccount", "name": _NAME, "namespace": namespace}
    group = "rbac.authorization.k8s.io"
    return [
        {"apiVersion": f"{group}/v1", "kind": kind, "metadata": metadata, "rules": rules},
        {
            "apiVersion": f"{group}/v1",
            "kind": f"{kind}Binding",
            "metadata": metadata,
            "roleRef": {"apiGroup": group, "kind": kind, "name": name},
            "subjects": [account],
        },
    ]


def job(
    script: str, arguments: Sequence[str], workers: int, servers: int, image: str, name: str = "", namespace: str = ""
) -> dict[str, Any]:
    """A job that runs a script of an image. Raises RuntimeStateError for a wrong one."""
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


def _count(value: Any, known: dict[int, int]) -> int:
    """The number of values in `value`, each counted as often as an alias repeats it. Raises ValueError if it contains
    itself."""
    if not isinstance(value, Mapping | list | tuple | set):
        return 1
    if id(value) not in known:
        known[id(value)] = 0
        inside = [*value, *value.values()] if isinstance(value, Mapping) else value
        known[id(value)] = 1 + sum(_count(each, known) for each in inside)
    elif not known[id(value)]:
        raise ValueError("it has a value that holds itself")
    return known[id(value)]


def check(written: str | bytes) -> list[str]:
    """All problems of the jobs in a yaml, each with the accepted values; empty if there are none."""
    module = yaml()
    try:
        objects = [each for each in module.safe_load_all(written) if each is not None]
        if (count := _count(objects, {})) > _MOST:
            return [f"it is {count} values, written out; at most {_MOST} are read"]
    except RecursionError:
        return ["this is no yaml: it is nested too deeply"]
    except (TypeError, AttributeError):
        return ["this is no yaml: a value has the tag of another kind"]
    except (module.YAMLError, ValueError) as error:
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
