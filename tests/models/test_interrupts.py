"""Ctrl-C at any moment of planning, of a step, of an optimizer's step or inside no_sync: what it leaves is usable. The
next calls give the numbers of one device that has the same parameters, buffers and optimizer states, and nothing that
planning changes for a while stays changed.

A moment is a line of ours (or of the optimizer's) that is about to run; moments are drawn with a seed.
"""

from __future__ import annotations

import copy
import gc
import logging
import os
import random
import sys
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import partway as pw
from partway.engine.sharded import ShardedModule
from partway.requests.request import engine_of

OURS = os.path.dirname(str(pw.__file__)) + os.sep
OPTIMIZERS = os.path.dirname(torch.optim.__file__) + os.sep


class Interrupt(KeyboardInterrupt):
    pass


def interrupted(run: Callable[[], object], moment: int) -> int:
    """Run `run`, and raise an Interrupt before the line of that number: how many lines there were. (-1: let it end.)"""
    count = 0

    def line(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        if event == "line":
            count += 1
            if count == moment:
                raise Interrupt
        return line

    def call(frame: FrameType, event: str, arg: Any) -> Any:
        if (
            frame.f_code.co_name == "_use_grad"
        ):  # of torch.optim: in its `finally` an interrupt leaves gradients disabled
            return None
        return line if frame.f_code.co_filename.startswith((OURS, OPTIMIZERS, "<partway")) else None

    before = sys.gettrace()
    sys.settrace(call)
    try:
        run()
    except Interrupt:
        pass
    finally:
        sys.settrace(before)
    return count


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.mean = nn.Linear(16, 16), nn.BatchNorm1d(16), nn.BatchNorm1d(16, momentum=None)
        self.drop, self.down = nn.Dropout(0.25), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(self.drop(self.mean(torch.relu(self.norm(self.up(x))))))
        return result


X = torch.linspace(-1, 1, 8 * 16, dtype=torch.float64).view(8, 16).sin()


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.01, eps=1e-4)  # gradients before a norm are nearly zero


class Trained:
    """A sharded module with its optimizer."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model: Any = pw.shard(
            Net().double(),
            mesh={"dp": 2, "tp": 2},
            in_strategy=(("dp", None),),
            parameter_plan={"up.weight": ("tp", None)},
            module_plan={"down": {"in_strategy": (("dp", "tp"),)}},
        )
        self.optimizer = optimizer_of(self.model)

    def loss(self) -> Tensor:
        result: Tensor = self.model(X).pow(2).mean()
        return result

    def step(self) -> None:
        with self.model.no_sync():
            self.loss().backward()
        self.loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def looks(self) -> tuple[Any, ...]:
        """What must be as it was, whatever happens: the module but for its numbers, and the process."""
        modules = [
            (type(m), id(m), m.training, sorted(vars(m)), len(m._forward_hooks), len(m._forward_pre_hooks))
            for m in self.model.modules()
        ]
        tensors = [id(t) for t in (*self.model.parameters(), *self.model.buffers())]
        loggers = [logging.getLogger(f"torch.{name}").disabled for name in _QUIET]
        return (
            modules, tensors, loggers, gc.isenabled(), list(warnings.filters), sys.stderr, torch.is_grad_enabled(),
            torch.distributions.Distribution._validate_args, torch.autograd.Function.__dict__["apply"],
            nn.Module.__call__, nn.Module.__getattr__, bool(engine_of(self.model).waiting.blocks),
        )  # fmt: skip

    def check(self) -> None:
        """Go on, beside one device that has the same numbers."""
        self.optimizer.zero_grad()
        plain = Net().double()
        plain.load_state_dict(self.model.state_dict())
        optimizer = optimizer_of(plain)
        optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
        for step in range(2):
            for module, by in ((self.model, self.optimizer), (plain, optimizer)):
                torch.manual_seed(step)
                module(X).pow(2).mean().backward()
                by.step()
                by.zero_grad()
        own, other = self.model.state_dict(), plain.state_dict()
        assert own.keys() == other.keys()
        for name, tensor in own.items():
            torch.testing.assert_close(tensor, other[name], rtol=1e-9, atol=1e-11, msg=name)


_QUIET = ("_subclasses.fake_tensor", "fx.experimental.symbolic_shapes")


def interrupts(seed: int, count: int, *, planned: bool) -> None:
    """A step is interrupted at `count` moments: that of a new module, which plans, or of one that has planned."""
    pw.set_auto_parallel_context(random_numbers="torch")  # the numbers of the plain model
    drawn = random.Random(seed)
    trained = Trained()
    if planned:
        trained.step()
    lines = interrupted(trained.step, -1)
    for _ in range(count):
        trained = trained if planned else Trained()
        norms = trained.model.norm, trained.model.mean
        before, running = trained.looks(), [norm.running_mean.clone() for norm in norms]
        moment = drawn.randint(1, lines)
        interrupted(trained.step, moment)
        assert trained.looks() == before, moment
        assert len({int(n.num_batches_tracked) for n in norms}) == 1, moment
        moved = [not torch.equal(was, now.running_mean) for was, now in zip(running, norms, strict=True)]
        assert len(set(moved)) == 1, f"{moment}: some buffers were updated and others not"
        trained.check()


def test_a_planned_step_may_be_interrupted_at_any_moment() -> None:
    interrupts(0, 46, planned=True)


def test_planning_may_be_interrupted_at_any_moment() -> None:
    interrupts(1, 4, planned=False)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("seed", range(2, 6))
def test_planning_and_steps_may_be_interrupted_at_any_of_many_moments(seed: int) -> None:
    interrupts(seed, 100, planned=True)
    interrupts(seed, 25, planned=False)


def test_an_interrupted_shard_can_be_repeated() -> None:
    def run() -> None:
        pw.shard(module, mesh={"dp": 2}, in_strategy=(("dp", None),))

    module: Any = nn.Linear(16, 4).double()
    lines = interrupted(run, -1)
    for moment in range(1, lines + 1):
        module = nn.Linear(16, 4).double()
        interrupted(run, moment)
        if type(module) is nn.Linear:
            run()
        assert isinstance(module, ShardedModule), moment
    torch.testing.assert_close(module(X), X @ module.weight.T + module.bias)
