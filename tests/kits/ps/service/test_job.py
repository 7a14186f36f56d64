"""What the processes of a job have to agree on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from partway.ps.service.job import Job
from partway.ps.service.pieces import Parameter

PARAMETERS = Parameter(0, "weight", (4, 3), "float32", 4), Parameter(1, "bias", (4,), "float32", 4, 1)
JOB = Job(PARAMETERS, "AdamW", ({"lr": 0.1}, {"lr": 0.2}), True)


def with_bias(**changes: Any) -> Job:
    return replace(JOB, parameters=(PARAMETERS[0], replace(PARAMETERS[1], **changes)))


def test_pieces_are_those_of_its_parameters_with_their_bytes() -> None:
    assert [piece.key for piece in JOB.pieces] == ["0:0", "1:0"]
    assert [JOB.size(piece) for piece in JOB.pieces] == [48, 16]


def test_a_job_does_not_differ_from_its_like() -> None:
    assert JOB.differs(replace(JOB)) is None
    assert JOB.differs(replace(JOB, options=({"lr": 0.3}, {"lr": 0.2}))) is None  # each step has its own


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (replace(JOB, parameters=PARAMETERS[:1]), "the optimizer has 1 parameters, not 2"),
        (
            with_bias(shape=(5,)),
            "parameter bias is bias float32[5] on the servers (group 1), not bias float32[4] on the servers (group 1)",
        ),
        (
            with_bias(dtype="float64", by_rows=True, group=0),
            "parameter bias is bias float64[4] by rows (group 0), not bias float32[4] on the servers (group 1)",
        ),
        (
            with_bias(name="b", on_workers=True),
            "parameter b is b float32[4] on the workers (group 1), not bias float32[4] on the servers (group 1)",
        ),
        (replace(JOB, optimizer="SGD"), "the optimizer is SGD, not AdamW"),
        (replace(JOB, mode="async"), "mode is async, not sync"),
        (replace(JOB, max_staleness=3), "max_staleness is 3, not None"),
        (replace(JOB, durability="disk"), "durability is disk, not process"),
    ],
)
def test_what_differs_is_said(other: Job, text: str) -> None:
    assert JOB.differs(other) == text


@pytest.mark.parametrize("other", [with_bias(shape=(5,)), replace(JOB, optimizer="SGD"), replace(JOB, mode="async")])
def test_records_of_another_job_are_known(other: Job) -> None:
    assert other.fingerprint != JOB.fingerprint


def test_options_of_the_optimizer_and_the_bound_may_change_between_two_runs() -> None:
    assert replace(JOB, options=(), max_staleness=3, durability="disk").fingerprint == JOB.fingerprint
    assert len(JOB.fingerprint) == 64
