"""Programs that people write by hand: the right ones are not accused, and of the wrong ones each mistake is found."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from programs_by_hand import RIGHT, WRONG, Program
from torch import Tensor

import partway as pw
from partway.checking.report import ManualReport
from partway.runtime.slices import part_of
from partway.strategy import Layout, Mesh, check_strategies

named = {"ids": lambda program: program.name if isinstance(program, Program) else None}


def checked(program: Program, *, whole: bool) -> ManualReport:
    case = program.case
    return pw.check_manual(
        program.fn, case.in_strategy, case.out_strategy, case.args, mesh=case.mesh, whole=case.whole if whole else None
    )


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("program", RIGHT, **named)
def test_right_programs_are_not_accused(program: Program, whole: bool) -> None:
    report = checked(program, whole=whole)
    assert report
    assert (report.findings, report.unknown) == ((), ())


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("program", WRONG, **named)
def test_mistakes_are_found_where_they_are(program: Program, whole: bool) -> None:
    report = checked(program, whole=whole)
    assert not report
    assert {(finding.mistake.name, finding.line.number) for finding in report.findings} == program.marks
    assert bool(report.unknown) == (not program.told)
    assert bool(program.marks) == program.told


def test_there_are_enough_of_them() -> None:
    assert len(RIGHT) >= 30
    assert len(WRONG) >= 30
    kinds = {name for program in WRONG for name, _ in program.marks}
    assert kinds == {mistake.name for mistake in pw.Mistake}


# -- That the labels are right does not follow from the checker: processes compute the programs as well


def every_program() -> list[tuple[str, bool]]:
    """Of each program whether what the processes return is what one device does."""
    found = []
    for program in RIGHT + WRONG:
        mesh = Mesh(program.case.mesh)
        if mesh.device_num != pw.get_group_size():
            continue
        pw.set_mesh(mesh)
        found.append((program.name, _is_right(program, mesh)))
    pw.set_mesh(None)
    return found


def _is_right(program: Program, mesh: Mesh) -> bool:
    case, rank = program.case, pw.get_rank()
    torch.set_default_dtype(torch.float64)
    args = [arg.double() if arg.is_floating_point() else arg for arg in case.args]
    whole = _flat(case.whole(*(_leaf(arg) for arg in args)))
    layouts = _layouts(args, case.in_strategy, mesh)
    parts = [part_of(arg, layout, rank).clone() for arg, layout in zip(args, layouts, strict=True)]
    found = _flat(program.fn(*map(_leaf, parts)))
    own = []
    for value, right, layout in zip(found, whole, _layouts(whole, case.out_strategy, mesh), strict=True):
        part = part_of(right, layout, rank)
        own.append(value.shape == part.shape and torch.allclose(value, part, 1e-10, 1e-10))
    torch.set_default_dtype(torch.float32)
    return bool(pw.ops.all_reduce(torch.tensor(int(all(own))), "min"))


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.clone().requires_grad_(tensor.is_floating_point())


def _flat(value: Any) -> list[Tensor]:
    return [tensor.detach() for tensor in (value if isinstance(value, tuple) else (value,))]


def _layouts(tensors: list[Tensor], strategies: Any, mesh: Mesh) -> list[Layout]:
    entries = strategies or (None,) * len(tensors)
    named = [(str(i), tuple(t.shape), entry) for i, (t, entry) in enumerate(zip(tensors, entries, strict=True))]
    return [
        Layout.replicated(mesh) if read is None else read.layouts(shape)[0]
        for (_, shape, _), read in zip(named, check_strategies(named, mesh), strict=True)
    ]


@pytest.mark.gloo
@pytest.mark.parametrize("ranks", [2, 4])
def test_processes_compute_what_the_labels_say(on_ranks: Any, ranks: int) -> None:
    for found in on_ranks(ranks, every_program):
        right = {name for name, is_right in found if is_right}
        assert right == {program.name for program in RIGHT} & {name for name, _ in found}
        assert len(found) > 10
