"""Plans as files: JSON, checked when it is read."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from ...strategy.basics.blocks import uncollected
from ...strategy.basics.files import first_problem, json_of, read, save
from ...strategy.errors import StrategyError, shown
from ...strategy.notation import counted
from ...strategy.placement import Shard
from .data import PlanData

_LARGEST = 2**63 - 1  # the largest size of a dim
P = TypeVar("P", bound=PlanData)


def save_plan(plan: PlanData, path: str | Path) -> None:
    """Write `plan` as JSON. Raises StrategyError if it cannot be written, or if the file is not a plan."""
    save("the plan", path, plan.model_dump_json(indent=1) + "\n")


def load_plan(kind: type[P], path: str | PathLike[str]) -> P:
    """The plan, of class `kind`, in the file at `path`. Raises StrategyError if there is none."""
    data = read("a plan from", path)
    where = shown(str(path))
    try:
        with uncollected():
            json_of(data)
            plan = kind.model_validate_json(data, strict=True)
            check(plan)
    except StrategyError as error:
        raise StrategyError(f"{where} holds no plan: {error}") from error
    except ValidationError as error:
        raise StrategyError(f"{where} holds no plan of this version: {first_problem(error)}") from error
    except ValueError as error:
        raise StrategyError(f"{where} holds no plan of this version: it {error}") from error
    return plan


def check(plan: PlanData) -> None:
    """Raise StrategyError unless the mesh, the shapes and the layouts of all tensors make sense."""
    if len(plan.axes) != len(plan.sizes):
        raise StrategyError(
            f"its mesh has {counted(len(plan.axes), 'axis', 'axes')} and {counted(len(plan.sizes), 'size')}"
        )
    for tensor in (*plan.inputs, *plan.outputs):
        if not all(0 <= size <= _LARGEST for size in tensor.shape):
            raise StrategyError(f"{shown(tensor.name)} has the shape {shown(tensor.shape)}")
        placements = plan.layout_of(tensor.codes).placements
        if any(isinstance(p, Shard) and p.dim >= len(tensor.shape) for p in placements):
            raise StrategyError(f"{tensor.name!r} of shape {list(tensor.shape)} cannot be laid out as {tensor.codes}")
    for codes in {codes for o in plan.operators for codes in (*o.operands, *o.results)}:
        plan.layout_of(codes)
    for o in plan.operators:
        if len(o.factors) != len(plan.axes):
            raise StrategyError(
                f"operator {shown(o.name)} splits {counted(len(o.factors), 'factor')}, one for each axis, and the "
                f"mesh has {counted(len(plan.axes), 'axis', 'axes')}"
            )
