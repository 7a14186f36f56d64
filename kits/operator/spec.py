"""The fields of a PartwayJob. Each is here once: the schema that the API server enforces is made from them (crd.py)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

GROUP, VERSION, KIND, PLURAL, SHORT = "partway.dev", "v1", "PartwayJob", "partwayjobs", "pwj"
API = f"{GROUP}/{VERSION}"
SCHEDULER, SERVER, WORKER = ROLES = ("Scheduler", "PS", "Worker")
PORT = 8118
LONGEST_NAME = 48  # with "-scheduler-0" and a little more it is the name of a host, which has 63 characters
_GIVEN = ("MS_ROLE", "MS_SCHED_HOST", "MS_SCHED_PORT", "MS_WORKER_NUM", "MS_SERVER_NUM", "MS_NODE_ID")


class _JobPart(BaseModel):
    """A part of a job."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class RunPolicy(_JobPart):
    """When a job is over, and what remains of it then."""

    cleanPodPolicy: Literal["Running", "None", "All"] = Field(
        default="Running",
        description="Which pods are deleted when the job is over: those that still run, none, or all.",
    )
    backoffLimit: Annotated[int, Field(ge=0, le=1000)] = Field(
        default=3, description="How often pods may be started again, all together, before the job fails."
    )
    activeDeadlineSeconds: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="The job fails when it has run for so long."
    )
    ttlSecondsAfterFinished: Annotated[int, Field(ge=0)] | None = Field(
        default=None, description="The job is deleted so long after it is over."
    )
    suspend: bool = Field(default=False, description="Whether the job waits, without pods.")


class Elastic(_JobPart):
    """Lets the other workers continue when one is lost."""

    minWorkers: Annotated[int, Field(ge=1, le=1000)] = Field(
        description="With how many workers the job is running, and may succeed."
    )


class Replicas(_JobPart):
    """The pods of a role."""

    replicas: Annotated[int, Field(ge=0, le=1000)] = Field(default=1, description="How many pods.")
    restartPolicy: Literal["Always", "OnFailure", "Never", "ExitCode"] = Field(
        default="OnFailure",
        description="Whether a pod that ended is started again. ExitCode: after 128 to 255 (it was killed), not after "
        "1 to 127. Always: servers and the scheduler after 0, too.",
    )
    template: dict[str, Any] = Field(description="The pod, as in a Deployment; its first container is the process.")


class Workers(Replicas):
    """The pods of workers, at least one."""

    replicas: Annotated[int, Field(ge=1, le=1000)] = Field(default=1, description="How many pods.")


class Roles(_JobPart):
    """The roles of a job."""

    Scheduler: Replicas | None = None
    PS: Replicas | None = None
    Worker: Workers


class Spec(_JobPart):
    """A job."""

    runPolicy: RunPolicy = RunPolicy()
    successPolicy: Literal["AllWorkers", "Worker0"] = Field(
        default="AllWorkers", description="Whose success is the job's: that of all workers, or of the first."
    )
    elastic: Elastic | None = None
    enableSSL: bool = Field(
        default=False, description="Whether the Secret of sslSecret is mounted at /etc/partway/tls."
    )
    sslSecret: str | None = Field(default=None, description="The Secret with the certificates of docs/security.md.")
    schedulerPort: Annotated[int, Field(ge=1024, le=65535)] = Field(
        default=PORT, description="The port of the scheduler."
    )
    replicaSpecs: Roles

    def role(self, name: str) -> Replicas | None:
        """The fields of a role; None if the job does not have it."""
        found: Replicas | None = getattr(self.replicaSpecs, name)
        return found

    def count(self, name: str) -> int:
        """The number of pods of a role."""
        found = self.role(name)
        return found.replicas if found is not None else 0

    @property
    def together(self) -> bool:
        """Whether the processes cannot continue without any one of them, so that all start again: ranks without
        servers."""
        return self.count(SCHEDULER) > 0 and self.count(SERVER) == 0 and self.elastic is None

    @property
    def recovers(self) -> bool:
        """Whether workers wait for the replacement of a lost one (MS_ENABLE_RECOVERY)."""
        return self.elastic is not None and self.count(SERVER) == 0


def parsed(job: Mapping[str, Any]) -> tuple[Spec | None, list[str]]:
    """The spec of a job, and all its problems: fields with their accepted values. The spec is None if there are any."""
    problems = _of_the_whole(job)
    spec = job.get("spec")
    if not isinstance(spec, Mapping):
        return None, [*problems, "spec is missing; it has replicaSpecs.Worker"]
    try:
        found = Spec.model_validate(spec)
    except ValidationError as error:
        return None, [*problems, *(_told(each) for each in error.errors())]
    problems += _together(found)
    return (None if problems else found), problems


def _of_the_whole(job: Mapping[str, Any]) -> list[str]:
    problems = []
    if job.get("apiVersion", API) != API:
        problems.append(f"apiVersion is {job['apiVersion']!r}; it must be {API}")
    if job.get("kind", KIND) != KIND:
        problems.append(f"kind is {job['kind']!r}; it must be {KIND}")
    metadata = job.get("metadata")
    name = metadata.get("name") if isinstance(metadata, Mapping) else None
    if not isinstance(name, str) or not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name) or len(name) > LONGEST_NAME:
        problems.append(
            f"metadata.name is {name!r}; it must be a name of hosts: at most {LONGEST_NAME} lower-case letters, digits "
            "and dashes, with a letter first"
        )
    return problems


def _told(error: Any) -> str:
    """One of pydantic's errors, in words for a person who writes yaml."""
    where = ".".join(["spec", *(str(each) for each in error["loc"])])
    kind, given = error["type"], error.get("input")
    if kind == "missing":
        return f"{where} is missing"
    if kind == "extra_forbidden":
        here: Any = Spec
        for each in error["loc"][:-1]:
            here = _model_of(here, str(each))
        names = list(here.model_fields)
        meant = [name for name in names if name.lower() == str(error["loc"][-1]).lower()]
        known = f"did you mean {meant[0]}?" if meant else f"there are {', '.join(names)}"
        return f"{where} is not known; {known}"
    if kind == "literal_error":
        return f"{where} is {given!r}; it must be {error['ctx']['expected']}"
    bound = {"greater_than_equal": ("ge", "or more"), "less_than_equal": ("le", "or less")}.get(kind)
    if bound is not None:
        return f"{where} is {given!r}; it must be {error['ctx'][bound[0]]} {bound[1]}"
    wanted = {
        "int_type": "a whole number",
        "bool_type": "true or false",
        "string_type": "a text",
        "dict_type": "a mapping",
        "model_type": "a mapping",
    }.get(kind, error["msg"])
    return f"{where} is {given!r}; it must be {wanted}"


def _model_of(model: Any, name: str) -> Any:
    """The part of a job under a field."""
    for kind in (annotation := model.model_fields[name].annotation, *getattr(annotation, "__args__", ())):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    raise AssertionError(name)


def _together(spec: Spec) -> list[str]:
    """The conflicts between fields."""
    problems = []
    workers, servers, schedulers = (spec.count(role) for role in (WORKER, SERVER, SCHEDULER))
    if spec.role(SCHEDULER) is not None and schedulers != 1:
        problems.append(f"spec.replicaSpecs.Scheduler.replicas is {schedulers}; it must be 1")
    if schedulers == 0 and (workers > 1 or servers):
        problems.append("spec.replicaSpecs.Scheduler is missing; a job of several processes needs one")
    if spec.elastic is not None and spec.elastic.minWorkers > workers:
        problems.append(
            f"spec.elastic.minWorkers is {spec.elastic.minWorkers}; it must be {workers} or less, as many as there are "
            "workers"
        )
    if spec.elastic is not None and schedulers == 0:
        problems.append(
            "spec.elastic needs spec.replicaSpecs.Scheduler, which lets a worker in that takes another's place"
        )
    if spec.enableSSL and not spec.sslSecret:
        problems.append("spec.enableSSL is true; spec.sslSecret must name the Secret with the certificates")
    if spec.sslSecret and not spec.enableSSL:
        problems.append("spec.sslSecret means nothing without spec.enableSSL: true")
    for role in ROLES:
        own = spec.role(role)
        if own is not None:
            problems += [f"spec.replicaSpecs.{role}.template{each}" for each in _of_a_template(own.template)]
    return problems


def _of_a_template(template: Mapping[str, Any]) -> Iterator[str]:
    pod = template.get("spec")
    if unknown := [name for name in template if name not in ("metadata", "spec")]:
        yield f".{unknown[0]} is not known; there are metadata, spec"
    if not isinstance(pod, Mapping):
        yield ".spec is missing; it has containers"
        return
    containers = pod.get("containers")
    if not isinstance(containers, list) or not containers:
        yield ".spec.containers is missing; it must have one or more"
        return
    for i, container in enumerate(containers):
        for name in ("name", "image"):
            if not isinstance(container, Mapping) or not isinstance(container.get(name), str):
                yield f".spec.containers[{i}].{name} is missing; it must be a text"
    if isinstance(containers[0], Mapping):
        given = [each.get("name") for each in containers[0].get("env") or () if isinstance(each, Mapping)]
        if own := [name for name in given if name in _GIVEN]:
            yield f".spec.containers[0].env has {own[0]}, which the operator sets; leave it out"
    if "restartPolicy" in pod:
        yield ".spec.restartPolicy is set; say it beside the template: restartPolicy of the role"
