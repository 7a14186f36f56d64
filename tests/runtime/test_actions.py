"""Stages on meshes of their own, whose actions a schedule lists, compute what one device does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import partway as pw
from partway.runtime.actions import STEP, Action, Does, Stage, StageLink, play
from partway.runtime.executors.couriers import BetweenProcesses, InProcess
from partway.runtime.executors.simulate import Simulator, join
from partway.runtime.loaded import Loaded

Ranks = Callable[..., list[Any]]
MICROBATCHES, SIZE = 3, 4
FORWARD, BACKWARD, SEND, RECEIVE = Does.FORWARD, Does.BACKWARD, Does.SEND, Does.RECEIVE


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Second(First):
    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return (super().forward(x) - target).square().sum()


def models() -> tuple[First, Second]:
    torch.manual_seed(0)
    return First().double(), Second().double()


def batch(n: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n)
    x, target = (torch.randn(SIZE, 6, dtype=torch.float64, generator=generator) for _ in range(2))
    return x, target


def on_one_device(microbatches: int) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    first, second = models()
    losses = [second(first(batch(n)[0]), batch(n)[1]) for n in range(microbatches)]
    torch.stack(losses).sum().backward()
    grads = [{name: p.grad for name, p in model.named_parameters() if p.grad is not None} for model in (first, second)]
    return [loss.detach() for loss in losses], grads


def step_of(compiled: pw.Compiled, executor: Any) -> Loaded:
    def rebuild(wanted: tuple[bool, ...]) -> Loaded:
        raise AssertionError(wanted)

    return Loaded(compiled.program, executor, rebuild)


def gpipe(microbatches: int) -> Mapping[int, Sequence[Action]]:
    """All forwards, and then all backwards, of two stages."""
    every = range(microbatches)
    return {
        0: [*(a for n in every for a in (Action(FORWARD, n), Action(SEND, n, 1))),
            *(a for n in every for a in (Action(RECEIVE, n, 1), Action(BACKWARD, n)))],
        1: [*(a for n in every for a in (Action(RECEIVE, n, 0), Action(FORWARD, n))),
            *(a for n in every for a in (Action(BACKWARD, n), Action(SEND, n, 0)))],
    }  # fmt: skip


PLANS = ({"up.weight": ("tp", None), "down.weight": (None, "tp")}, {})


class Pipeline:
    """Both models on two meshes; `executor` makes what runs a mesh, `cut` what it takes of a whole tensor."""

    def __init__(self, meshes: Sequence[pw.Mesh], executor: Callable[[pw.Mesh], Any], numbers: Sequence[int]) -> None:
        x, target = batch(0)
        hidden = torch.empty_like(x, requires_grad=True)
        self.models = models()
        calls: list[tuple[Any, ...]] = [(x,), (hidden, target)]
        splits: list[Any] = [None, (("dp", None), ("dp", None))]
        self.compiled = [
            pw.compile(model, args, mesh=mesh, parameter_plan=plan, in_strategy=split)
            for model, args, mesh, plan, split in zip(self.models, calls, meshes, PLANS, splits, strict=True)
        ]
        self.steps = {n: step_of(self.compiled[n], executor(meshes[n]) if n in numbers else Simulator(meshes[n]))
                      for n in range(2)}  # fmt: skip
        self.links = [StageLink.of(self.steps, 0, 0, 1, self.place(1, "x"))]

    def place(self, stage: int, name: str) -> int:
        return [placed.port.name for placed in self.compiled[stage].local.inputs].index(name)

    def given(self, stage: int, n: int, cut: Callable[..., Tensor]) -> list[Tensor | None]:
        x, target = batch(n)
        named = {**dict(self.models[stage].named_parameters()), "target": target, **({"x": x} if stage == 0 else {})}
        inputs = self.compiled[stage].local.inputs
        return [
            cut(named[placed.port.name].detach(), placed.layout) if placed.port.name in named else None
            for placed in inputs
        ]

    def stage(self, n: int, courier: Any, cut: Callable[..., Tensor] = lambda tensor, layout: tensor) -> Stage:
        ones = (torch.ones((), dtype=torch.float64),)
        return Stage(
            n, self.steps[n], lambda k: self.given(n, k, cut), self.links, courier, lambda k: ones if n else ()
        )


def test_the_actions_of_today_s_step_give_what_autograd_does() -> None:
    x, target = batch(0)
    second = models()[1]
    mesh = pw.Mesh({"dp": 2})
    compiled = pw.compile(second, (x, target), mesh=mesh, in_strategy=(("dp", None), ("dp", None)))
    named = {**dict(second.named_parameters()), "x": x, "target": target}
    tensors = [named[placed.port.name] for placed in compiled.local.inputs]
    step = step_of(compiled, Simulator(mesh))
    stage = Stage(0, step, lambda n: tensors, [], InProcess(), lambda n: [torch.ones((), dtype=torch.float64)])
    play({0: STEP}, {0: stage})
    (loss,) = step(tensors)
    loss.backward()
    assert stage.results(0)[0] == loss
    for place, gradient in stage.gradients().items():
        assert torch.equal(gradient, tensors[place].grad)


@pytest.mark.parametrize("second", [{"dp": 2}, {"dp": 1}, {"dp": 4}], ids=str)
def test_two_stages_on_two_meshes_compute_what_one_device_does(second: dict[str, int]) -> None:
    losses, expected = on_one_device(MICROBATCHES)
    last = pw.Mesh(second, ranks=range(2, 2 + second["dp"]))
    pipeline = Pipeline((pw.Mesh({"tp": 2}, ranks=(0, 1)), last), Simulator, (0, 1))
    courier = InProcess()
    stages = {n: pipeline.stage(n, courier) for n in range(2)}
    play(gpipe(MICROBATCHES), stages)
    for n, loss in enumerate(losses):
        torch.testing.assert_close(stages[1].results(n)[0], loss, rtol=1e-12, atol=0)
    for n, stage in stages.items():
        inputs, found = pipeline.compiled[n].local.inputs, stage.gradients()
        assert {inputs[i].port.name for i in found} == set(expected[n])
        for i, gradient in found.items():
            torch.testing.assert_close(gradient, expected[n][inputs[i].port.name], rtol=1e-10, atol=1e-12)


def one_stage_a_pair() -> None:
    from partway.runtime.executors.execute import Worker

    pw.init()
    losses, expected = on_one_device(MICROBATCHES)
    own = dist.get_rank() // 2
    meshes = (pw.Mesh({"tp": 2}, ranks=(0, 1)), pw.Mesh({"dp": 2}, ranks=(2, 3)))
    pipeline = Pipeline(meshes, Worker, (own,))
    stage = pipeline.stage(own, BetweenProcesses(), pipeline.steps[own].executor.cut)  # type: ignore[attr-defined]
    play({own: gpipe(MICROBATCHES)[own]}, {own: stage})
    if own:
        torch.testing.assert_close(stage.results(0)[0], losses[0], rtol=1e-12, atol=0)
    place = meshes[own].own_rank(dist.get_rank())
    for i, gradient in stage.gradients().items():
        placed = pipeline.compiled[own].local.inputs[i]
        whole = expected[own][placed.port.name]
        part = whole[placed.layout.dual().slices(tuple(whole.shape), place)]
        torch.testing.assert_close(gradient, part, rtol=1e-10, atol=1e-12)


@pytest.mark.gloo
def test_two_pairs_of_processes_are_two_stages(on_ranks: Ranks) -> None:
    on_ranks(4, one_stage_a_pair)


def test_stages_that_wait_for_each_other_are_told() -> None:
    pipeline = Pipeline((pw.Mesh({"tp": 2}), pw.Mesh({"dp": 2})), Simulator, (0, 1))
    courier = InProcess()
    stages = {n: pipeline.stage(n, courier) for n in range(2)}
    wrong = {0: [Action(RECEIVE, 0, 1), Action(FORWARD, 0)], 1: [Action(RECEIVE, 0, 0)]}
    with pytest.raises(
        pw.RuntimeStateError,
        match="no end: stage 0 would receive 0 from 1; stage 1 would receive 0 from 0; let each",
    ):
        play(wrong, stages)


def test_a_value_is_the_same_on_the_other_mesh() -> None:
    pipeline = Pipeline((pw.Mesh({"tp": 2}), pw.Mesh({"dp": 2})), Simulator, (0, 1))
    courier, route = InProcess(), pipeline.links[0].forward
    x = batch(0)[0]
    parts = [x[route.source.slices(route.shape, rank)] for rank in range(2)]
    assert not courier.ready(route, 1)
    courier.send(route, 1, parts)
    assert courier.ready(route, 1)
    assert not courier.ready(route, 0)
    assert torch.equal(join(courier.receive(route, 1, x.device), route.target, route.shape), x)
    assert not courier.ready(route, 1)


def test_a_result_that_two_links_take_is_refused() -> None:
    pipeline = Pipeline((pw.Mesh({"tp": 2}), pw.Mesh({"dp": 2})), Simulator, (0, 1))
    pipeline.links = [pipeline.links[0], replace(pipeline.links[0], target=2)]
    with pytest.raises(pw.StrategyError, match="stage 0 has two links of one result or input"):
        pipeline.stage(0, InProcess())
