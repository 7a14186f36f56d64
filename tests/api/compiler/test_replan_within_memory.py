"""A plan near its limit is searched for again until its step keeps to it."""

import pytest
import torch
from torch import nn

import partway as pw
from partway.compiler.replan_within_memory import held_in_step
from partway.propagation.plan.data import Memory
from partway.strategy.errors import DoesNotFitError


def test_the_peak_of_a_plan_near_its_limit_is_that_of_its_step() -> None:
    model, x = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))), torch.ones(32, 64)
    free = pw.compile(model, (x,), mesh={"dp": 2}, in_strategy=(("dp", None),)).plan.memory.total
    pw.set_algo_parameters(memory_limit=1.05 * free)
    made = pw.compile(model, (x,), mesh={"dp": 2}, in_strategy=(("dp", None),))
    assert made.plan.memory == Memory.at_peak(held_in_step(made.plan, made.program))
    with torch.no_grad():  # the module is in training, and is planned for it
        also = pw.compile(model, (x,), mesh={"dp": 2}, in_strategy=(("dp", None),)).plan.memory
    assert also == made.plan.memory
    pw.set_algo_parameters(memory_limit=0.1 * free)
    with pytest.raises(DoesNotFitError, match="no plan was found on the mesh dp=2"):
        pw.compile(model, (x,), mesh={"dp": 2}, in_strategy=(("dp", None),))
