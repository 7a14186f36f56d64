"""The API of Kubernetes, as far as the operator uses it.

An object whose owner is not the job, by its uid, belongs to somebody else, whatever its name. The operator never
deletes, changes or relies on such an object.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from partway.operator.observed import JOB, is_owned
from partway.operator.spec import GROUP, PLURAL, VERSION
from partway.strategy import RuntimeStateError
from partway.strategy.basics import install_extra

_SECONDS = 30.0  # the timeout of a request


class NameTakenError(Exception):
    """An object to create has the name of one that is not the job's."""


class ChangedError(Exception):
    """A job was written, or deleted, since it was read."""


class Timed:
    """An API of the Kubernetes client whose requests time out after some seconds, unless a call says otherwise."""

    def __init__(self, api: Any, seconds: float = _SECONDS) -> None:
        self._api, self._seconds = api, seconds

    def __getattr__(self, name: str) -> Any:
        return partial(getattr(self._api, name), _request_timeout=self._seconds)


class Cluster:
    """The API. Its methods raise ApiException of the Kubernetes client, or the errors of urllib3."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._core, self._custom = Timed(client.CoreV1Api()), Timed(client.CustomObjectsApi())
        self.calls = 0

    @classmethod
    def connected(cls) -> Cluster:
        """Connect from within a pod, or by the kubeconfig of this user. Raises RuntimeStateError."""
        try:
            from kubernetes import client, config
        except ImportError as error:
            raise RuntimeStateError(
                f"the operator needs Kubernetes' client; install it with: {install_extra('k8s')}"
            ) from error
        try:
            config.load_incluster_config()
        except config.ConfigException:
            try:
                config.load_kube_config()
            except config.ConfigException as error:
                raise RuntimeStateError(f"no Kubernetes cluster is configured: {error}") from error
        return cls(client)

    def job(self, namespace: str, name: str) -> dict[str, Any] | None:
        """A job; None if there is none."""
        method = self._custom.get_namespaced_custom_object
        found: dict[str, Any] | None = self._but(404, method, GROUP, VERSION, namespace, PLURAL, name)
        return found

    def reader(self, kind: str, namespace: str | None) -> Callable[..., Any]:
        """The function that lists and watches jobs, or objects of jobs, in a namespace; None: in all."""
        if kind == PLURAL:
            if namespace is None:
                return partial(self._custom.list_cluster_custom_object, GROUP, VERSION, PLURAL)
            return partial(self._custom.list_namespaced_custom_object, GROUP, VERSION, namespace, PLURAL)
        single = kind.removesuffix("s")
        if namespace is None:
            return partial(getattr(self._core, f"list_{single}_for_all_namespaces"), label_selector=JOB)
        return partial(getattr(self._core, f"list_namespaced_{single}"), namespace, label_selector=JOB)

    def pods(self, namespace: str, name: str) -> list[dict[str, Any]]:
        """The pods with the label of a job, as JSON values."""
        return self._items(self._core.list_namespaced_pod, namespace, name)

    def services(self, namespace: str, name: str) -> list[dict[str, Any]]:
        """The services with the label of a job."""
        return self._items(self._core.list_namespaced_service, namespace, name)

    def _items(self, method: Any, namespace: str, name: str) -> list[dict[str, Any]]:
        return self._listed(method, namespace, label_selector=f"{JOB}={name}")

    def _listed(self, method: Any, namespace: str, **selectors: str) -> list[dict[str, Any]]:
        self.calls += 1
        items: list[dict[str, Any]] = json.loads(method(namespace, **selectors, _preload_content=False).data)["items"]
        return items

    def write_status(self, job: dict[str, Any], status: dict[str, Any]) -> dict[str, Any]:
        """Write the status of a job over the one that was read, and return the new job. Raises ChangedError."""
        self.calls += 1
        metadata = job["metadata"]
        try:
            written: dict[str, Any] = self._custom.replace_namespaced_custom_object_status(
                GROUP, VERSION, metadata["namespace"], PLURAL, metadata["name"], {**job, "status": status}
            )
        except self._client.ApiException as error:
            if error.status in (404, 409):
                raise ChangedError from error
            raise
        return written

    def make(self, kind: str, body: Mapping[str, Any]) -> None:
        """Create a pod or a service of a job; does nothing if the job has it. Raises NameTakenError."""
        metadata = body["metadata"]
        namespace, name = metadata["namespace"], metadata["name"]
        method = getattr(self._core, f"create_namespaced_{kind}")
        if self._but(409, method, namespace, body, _preload_content=False) is not None:
            return
        there = self._listed(
            getattr(self._core, f"list_namespaced_{kind}"), namespace, field_selector=f"metadata.name={name}"
        )
        (owner,) = metadata["ownerReferences"]
        if there and not is_owned(there[0], owner["uid"]):
            raise NameTakenError(f'{kind} "{name}" is there and {_whose(there[0])}')

    def make_secret(self, body: Mapping[str, Any]) -> str:
        """Create a secret, and return the name that the API server chose."""
        self.calls += 1
        made = self._core.create_namespaced_secret(body["metadata"]["namespace"], body, _preload_content=False)
        name: str = json.loads(made.data)["metadata"]["name"]
        return name

    def make_event(self, body: Mapping[str, Any]) -> None:
        """Create an event."""
        self.calls += 1
        self._core.create_namespaced_event(body["metadata"]["namespace"], body, _preload_content=False)

    def delete_pod(self, namespace: str, name: str, uid: str) -> None:
        """Delete a pod, if it still has this uid."""
        self._delete(self._core.delete_namespaced_pod, namespace, name, uid)

    def delete_service(self, namespace: str, name: str, uid: str) -> None:
        """Delete a service, if it still has this uid."""
        self._delete(self._core.delete_namespaced_service, namespace, name, uid)

    def _delete(self, method: Any, namespace: str, name: str, uid: str) -> None:
        options = self._client.V1DeleteOptions(preconditions=self._client.V1Preconditions(uid=uid))
        self._but(404, method, name, namespace, body=options, _preload_content=False)

    def delete_job(self, job: dict[str, Any]) -> None:
        """Delete a job, with all its objects, if it still has the same uid."""
        metadata = job["metadata"]
        options = self._client.V1DeleteOptions(
            propagation_policy="Background", preconditions=self._client.V1Preconditions(uid=metadata["uid"])
        )
        method = self._custom.delete_namespaced_custom_object
        self._but(404, method, GROUP, VERSION, metadata["namespace"], PLURAL, metadata["name"], body=options)

    def _but(self, status: int, method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """The result of a call; None if the answer is `status`."""
        self.calls += 1
        try:
            return method(*arguments, **options)
        except self._client.ApiException as error:
            if error.status == status:
                return None
            raise

    def status_of(self, error: Any) -> int | None:
        """The status with which the API server has refused a request; None if `error` is another error."""
        return error.status if isinstance(error, self._client.ApiException) else None


def _whose(taken: Mapping[str, Any]) -> str:
    """The owner of an object, with advice."""
    owners = taken["metadata"].get("ownerReferences") or ()
    whose = f"belongs to {owners[0]['kind']} {owners[0]['name']} (uid {owners[0]['uid']})" if owners else "has no owner"
    return f"{whose}, so it is not of this job; delete it, or give the job another name"
