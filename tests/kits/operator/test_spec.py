"""What is wrong with a job is said with the field, and what it accepts."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import yaml
from operator_wrong_jobs import WRONG, changed

from partway.operator import manifests
from partway.operator.spec import parsed


def job() -> dict[str, Any]:
    return manifests.job("train.py", [], 4, 2, "image")


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_job_is_told_the_field_and_what_it_accepts(name: str):
    wrong = WRONG[name]
    problems = manifests.check(yaml.safe_dump(changed(job(), wrong.at, wrong.value)))
    assert any(problem == wrong.said for problem in problems), problems


def test_all_that_is_wrong_is_told_at_once():
    wrong = changed(job(), "spec.successPolicy", "All")
    wrong = changed(wrong, "spec.runPolicy", {"backoffLimit": -1})
    wrong = changed(wrong, "metadata.name", "My_Job")
    assert len(manifests.check(yaml.safe_dump(wrong))) == 3


def test_a_right_job_has_nothing_wrong_with_it():
    assert manifests.check(yaml.safe_dump(job())) == []
    spec, problems = parsed(job())
    assert spec is not None
    assert (spec.count("Worker"), spec.count("PS"), spec.count("Scheduler"), problems) == (4, 2, 1, [])


def test_what_the_api_server_adds_is_right_too():
    given = copy.deepcopy(job())
    given["metadata"] |= {"uid": "x", "resourceVersion": "1", "generation": 1, "namespace": "default"}
    given["spec"]["runPolicy"] = {"cleanPodPolicy": "Running", "backoffLimit": 3, "suspend": False}
    given["status"] = {"phase": "Running"}
    assert parsed(given)[1] == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "there is nothing in it"),
        ("a: [", "this is no yaml: "),
        ("- 1", "it is [1]; it must be a mapping with apiVersion, kind, metadata, spec"),
        (b"a: \xff", "this is no yaml: unacceptable character #x00ff: invalid start byte"),
        ("a: 2024-99-99", "this is no yaml: month must be in 1..12"),
        ("a: !!timestamp x", "this is no yaml: a value has the tag of another kind"),
        pytest.param("[" * 20_000, "this is no yaml: it is nested too deeply", id="brackets"),
        ("a: &a [*a]", "this is no yaml: it has a value that holds itself"),
        pytest.param(
            "a: &a0 [1, 1]\n" + "".join(f"b{i}: &a{i + 1} [{f'*a{i}, ' * 20}]\n" for i in range(5)),
            "it is 10282556 values, written out; at most 100000 are read",
            id="aliases",
        ),
        ("kind: PartwayJob", "apiVersion is missing; it must be partway.dev/v1"),
        ("specs: {}", "specs is not known; did you mean spec?"),
    ],
)
def test_what_is_no_job_is_told(text: str | bytes, said: str):
    assert any(problem.startswith(said) for problem in manifests.check(text))


def test_of_several_jobs_the_wrong_one_is_told():
    both = [job(), changed(job(), "spec.successPolicy", 3)]
    (problem,) = manifests.check(yaml.safe_dump_all(both))
    assert problem == "object 2: spec.successPolicy is 3; it must be 'AllWorkers' or 'Worker0'"
