"""Jobs with one error each: the report of `partway operator check`, and whether a cluster's API server or the operator
refuses it."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

GONE = object()


@dataclass(frozen=True)
class Wrong:
    """A wrong field.

    at       the path of the field, with dots
    value    its value; GONE: the field is missing
    said     the message of `check`, and of the operator if the API server accepts the job
    server   a part of the API server's message if it refuses the job; "": it accepts it, and the operator refuses
    """

    at: str
    value: Any
    said: str
    server: str = ""


def changed(job: dict[str, Any], at: str, value: Any) -> dict[str, Any]:
    """A job with another value of one field."""
    made = copy.deepcopy(job)
    here: Any = made
    *way, last = [int(each) if each.isdecimal() else each for each in at.split(".")]
    for each in way:
        here = here.setdefault(each, {}) if isinstance(here, dict) else here[each]
    if value is GONE:
        del here[last]
    else:
        here[last] = value
    return made


_WORKER = "spec.replicaSpecs.Worker"
_POD = f"{_WORKER}.template.spec"

WRONG: dict[str, Wrong] = {
    "no workers": Wrong(
        _WORKER, GONE, "spec.replicaSpecs.Worker is missing", "spec.replicaSpecs.Worker: Required value"
    ),
    "no roles": Wrong("spec.replicaSpecs", GONE, "spec.replicaSpecs is missing", "spec.replicaSpecs: Required value"),
    "no spec": Wrong("spec", GONE, "spec is missing; it has replicaSpecs.Worker", "spec: Required value"),
    "no scheduler": Wrong(
        "spec.replicaSpecs.Scheduler", GONE,
        "spec.replicaSpecs.Scheduler is missing; a job of several processes needs one",
    ),
    "two schedulers": Wrong(
        "spec.replicaSpecs.Scheduler.replicas", 2, "spec.replicaSpecs.Scheduler.replicas is 2; it must be 1"
    ),
    "0 workers": Wrong(
        f"{_WORKER}.replicas", 0, f"{_WORKER}.replicas is 0; it must be 1 or more",
        "should be greater than or equal to 1",
    ),
    "-1 servers": Wrong(
        "spec.replicaSpecs.PS.replicas", -1, "spec.replicaSpecs.PS.replicas is -1; it must be 0 or more",
        "should be greater than or equal to 0",
    ),
    "too many workers": Wrong(
        f"{_WORKER}.replicas", 5000, f"{_WORKER}.replicas is 5000; it must be 1000 or less",
        "should be less than or equal to 1000",
    ),
    "workers as text": Wrong(
        f"{_WORKER}.replicas", "8", f"{_WORKER}.replicas is '8'; it must be a whole number",
        'must be of type integer: "string"',
    ),
    "half a worker": Wrong(
        f"{_WORKER}.replicas", 1.5, f"{_WORKER}.replicas is 1.5; it must be a whole number", "must be of type integer"
    ),
    "a policy of its own": Wrong(
        f"{_WORKER}.restartPolicy", "Sometimes",
        f"{_WORKER}.restartPolicy is 'Sometimes'; it must be 'Always', 'OnFailure', 'Never' or 'ExitCode'",
        'supported values: "Always", "OnFailure", "Never", "ExitCode"',
    ),
    "success of anybody": Wrong(
        "spec.successPolicy", "AnyWorker", "spec.successPolicy is 'AnyWorker'; it must be 'AllWorkers' or 'Worker0'",
        'supported values: "AllWorkers", "Worker0"',
    ),
    "clean pods never": Wrong(
        "spec.runPolicy.cleanPodPolicy", "Never",
        "spec.runPolicy.cleanPodPolicy is 'Never'; it must be 'Running', 'None' or 'All'",
        'supported values: "Running", "None", "All"',
    ),
    "a negative limit": Wrong(
        "spec.runPolicy.backoffLimit", -1, "spec.runPolicy.backoffLimit is -1; it must be 0 or more",
        "should be greater than or equal to 0",
    ),
    "no time at all": Wrong(
        "spec.runPolicy.activeDeadlineSeconds", 0, "spec.runPolicy.activeDeadlineSeconds is 0; it must be 1 or more",
        "should be greater than or equal to 1",
    ),
    "a negative time to live": Wrong(
        "spec.runPolicy.ttlSecondsAfterFinished", -5,
        "spec.runPolicy.ttlSecondsAfterFinished is -5; it must be 0 or more", "should be greater than or equal to 0",
    ),
    "a time as text": Wrong(
        "spec.runPolicy.activeDeadlineSeconds", "1h",
        "spec.runPolicy.activeDeadlineSeconds is '1h'; it must be a whole number", 'must be of type integer: "string"',
    ),
    "suspend as text": Wrong(
        "spec.runPolicy.suspend", "yes", "spec.runPolicy.suspend is 'yes'; it must be true or false",
        'must be of type boolean: "string"',
    ),
    "elastic without a number": Wrong(
        "spec.elastic", {}, "spec.elastic.minWorkers is missing", "spec.elastic.minWorkers: Required value"
    ),
    "more than there are": Wrong(
        "spec.elastic", {"minWorkers": 9},
        "spec.elastic.minWorkers is 9; it must be 4 or less, as many as there are workers",
    ),
    "a low port": Wrong(
        "spec.schedulerPort", 80, "spec.schedulerPort is 80; it must be 1024 or more",
        "should be greater than or equal to 1024",
    ),
    "a port that is none": Wrong(
        "spec.schedulerPort", 70000, "spec.schedulerPort is 70000; it must be 65535 or less",
        "should be less than or equal to 65535",
    ),
    "certificates of nobody": Wrong(
        "spec.enableSSL", True, "spec.enableSSL is true; spec.sslSecret must name the Secret with the certificates"
    ),
    "certificates for nothing": Wrong(
        "spec.sslSecret", "tls", "spec.sslSecret means nothing without spec.enableSSL: true"
    ),
    "no containers": Wrong(
        f"{_POD}.containers", [], f"{_POD}.containers is missing; it must have one or more",
        "should have at least 1 items",
    ),
    "no image": Wrong(
        f"{_POD}.containers.0.image", GONE, f"{_POD}.containers[0].image is missing; it must be a text",
        "image: Required value",
    ),
    "no name of a container": Wrong(
        f"{_POD}.containers.0.name", GONE, f"{_POD}.containers[0].name is missing; it must be a text",
        "name: Required value",
    ),
    "no pod": Wrong(_POD, GONE, f"{_POD} is missing; it has containers", "template.spec: Required value"),
    "no template": Wrong(
        f"{_WORKER}.template", GONE, f"{_WORKER}.template is missing", "template: Required value"
    ),
    "a role of its own": Wrong(
        f"{_POD}.containers.0.env", [{"name": "MS_ROLE", "value": "MS_WORKER"}],
        f"{_POD}.containers[0].env has MS_ROLE, which the operator sets; leave it out",
    ),
    "a policy of the pod": Wrong(
        f"{_POD}.restartPolicy", "Always",
        f"{_POD}.restartPolicy is set; say it beside the template: restartPolicy of the role",
    ),
    "a long name": Wrong(
        "metadata.name", "a" * 49,
        f"metadata.name is {'a' * 49!r}; it must be a name of hosts: at most 48 lower-case letters, digits and dashes, "
        "with a letter first",
    ),
    "a name with dots": Wrong(
        "metadata.name", "my.job",
        "metadata.name is 'my.job'; it must be a name of hosts: at most 48 lower-case letters, digits and dashes, with "
        "a letter first",
    ),
    "a name with capitals": Wrong(
        "metadata.name", "MyJob",
        "metadata.name is 'MyJob'; it must be a name of hosts: at most 48 lower-case letters, digits and dashes, with "
        "a letter first", "a lowercase RFC 1123 subdomain must consist of",
    ),
}  # fmt: skip

MISSPELLED: dict[str, Wrong] = {  # which kubectl refuses before it is sent
    "a misspelled field": Wrong(
        "spec.runPolicies", {},
        "spec.runPolicies is not known; there are runPolicy, successPolicy, elastic, enableSSL, sslSecret, "
        "schedulerPort, replicaSpecs", 'unknown field "runPolicies"',
    ),
    "a misspelled policy": Wrong(
        "spec.runPolicy.backofflimit", 3, "spec.runPolicy.backofflimit is not known; did you mean backoffLimit?",
        'unknown field "backofflimit"',
    ),
    "a role that is none": Wrong(
        "spec.replicaSpecs.worker", {}, "spec.replicaSpecs.worker is not known; did you mean Worker?",
        'unknown field "worker"',
    ),
}  # fmt: skip
WRONG |= MISSPELLED
