"""`batch_norm_parts`: BatchNorm by the statistics of each part of the batch, the same numbers however it is split."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checks import assert_same_gradients, assert_same_loss, gradients, whole
from torch import Tensor, fx, nn
from zoo import CASES

import partway as pw
from partway.measure.workloads import Workload, tiny
from partway.propagation.ops.collectives import convert, convert_group, kind_of
from partway.sharding import compile

aten = torch.ops.aten
Ranks = Callable[..., list[Any]]
EXACT = 1e-10
CASE = CASES["convnet"]


class ByParts(nn.Module):
    """A BatchNorm as one device computes it for each part of a batch; the running statistics are means over the parts
    of what each of them would be."""

    def __init__(self, norm: Any, parts: int) -> None:
        super().__init__()
        self.norm, self.parts = norm, parts

    def forward(self, x: Tensor) -> Tensor:
        norm = self.norm
        if not self.training:
            result: Tensor = norm(x)
            return result
        results, moved = [], []
        for part in x.chunk(self.parts):
            own = norm.running_mean.clone(), norm.running_var.clone()
            results.append(F.batch_norm(part, *own, norm.weight, norm.bias, True, norm.momentum, norm.eps))
            moved.append(own)
        for buffer, values in zip((norm.running_mean, norm.running_var), zip(*moved, strict=True), strict=True):
            buffer.copy_(torch.stack(values).mean(0))
        norm.num_batches_tracked += 1
        return torch.cat(results)


def by_parts(model: nn.Module, parts: int) -> nn.Module:
    """`model` with each of its batch norms by parts."""
    for name, child in model.named_children():
        if isinstance(child, nn.modules.batchnorm._BatchNorm):
            setattr(model, name, ByParts(child, parts))
        else:
            by_parts(child, parts)
    return model


def plain_name(name: str) -> str:
    """The name in the model itself of a tensor of `by_parts`."""
    head, dot, last = name.rpartition(".")
    return f"{head.removesuffix('.norm')}{dot}{last}"


def assert_same_buffers(plain: nn.Module, model: nn.Module) -> None:
    buffers = {plain_name(name): buffer for name, buffer in plain.named_buffers()}
    assert {name for name, _ in model.named_buffers()} == set(buffers)
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(buffer, buffers[name], rtol=EXACT, atol=1e-12, msg=name)


def assert_trains_alike(plain: nn.Module, model: Any) -> None:
    """Three steps, and evaluation in between, give the losses, gradients and buffers of `plain`."""
    for step in range(3):
        batch = CASE.batch(step=step)
        (expected, slopes), (found, mine) = gradients(plain, batch), gradients(model, batch)
        assert_same_loss(found, expected, EXACT)
        assert_same_gradients(mine, {plain_name(name): slope for name, slope in slopes.items()}, EXACT)
    assert_same_buffers(plain, model)
    for each in (plain, model):
        each.eval()
    assert_same_loss(gradients(model, batch)[0], gradients(plain, batch)[0], EXACT)


@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("mesh", [{"dp": 2}, {"dp": 4}, {"dp": 2, "tp": 2}], ids=str)
def test_a_model_trains_as_one_device_does_by_parts(parts: int, mesh: dict[str, int]) -> None:
    plain = by_parts(CASE.build(), parts)
    pw.set_auto_parallel_context(batch_norm_parts=parts)
    split = CASE.block_split("tp") if "tp" in mesh else None
    model = pw.shard(CASE.build(), mesh=mesh, in_strategy=CASE.batch_split("dp"), parameter_plan=split)
    assert_trains_alike(plain, model)


@pytest.mark.parametrize(("ranks", "parts"), [(1, 4), (2, 2), (2, 4), (4, 2)])
def test_data_parallelism_trains_as_one_device_does_by_parts(ranks: int, parts: int) -> None:
    """Where ranks split a part, which no rank then holds, it is gathered."""
    plain = by_parts(CASE.build(), parts)
    pw.set_auto_parallel_context(parallel_mode="data_parallel", device_num=ranks, batch_norm_parts=parts)
    assert_trains_alike(plain, pw.shard(CASE.build()))


def test_the_option_is_part_of_a_plan() -> None:
    model: Any = pw.shard(CASE.build(), mesh={"dp": 2}, in_strategy=CASE.batch_split("dp"))
    alone = by_parts(CASE.build(), 2)
    batch = CASE.batch()
    joint, _ = gradients(model, batch)
    with pw.auto_parallel_context(batch_norm_parts=2):
        found, _ = gradients(model, batch)
    assert_same_loss(found, gradients(alone, batch)[0], EXACT)
    assert abs((found - joint) / joint) > 1e-6
    assert_same_loss(gradients(model, batch)[0], joint, EXACT)


def test_running_statistics_move_without_gradients_too() -> None:
    plain = by_parts(CASE.build(), 2)
    group = {"allreduce": {"mode": "auto"}}
    pw.set_auto_parallel_context(parallel_mode="data_parallel", device_num=2, batch_norm_parts=2, comm_fusion=group)
    model = pw.shard(CASE.build())
    with torch.no_grad():
        plain(**CASE.batch())
        model(**CASE.batch())
    assert_same_buffers(plain, model)


def test_a_batch_without_so_many_parts_is_an_error() -> None:
    pw.set_auto_parallel_context(batch_norm_parts=3)
    model = pw.shard(CASE.build(), mesh={"dp": 2}, in_strategy=CASE.batch_split("dp"))
    with pytest.raises(pw.StrategyError) as error:
        model(**CASE.batch())
    assert str(error.value).startswith(
        "the BatchNorm in norm1 gets a batch of 8 (its input is [8, 16, 8, 8]), and batch_norm_parts=3 does not divide "
        "that batch; give a multiple of it (the last batch of an epoch: DataLoader's drop_last), or set "
        "batch_norm_parts to 1, 2, 4 or 8\n  at zoo.py:"
    )


# -- what computing waits for


def after_reading(graph: fx.Graph) -> set[object]:
    """The operators that stand behind the first one that reads the result of a collective, and that one."""
    sent: set[fx.Node] = set()
    found: set[object] = set()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if node.target in (convert, convert_group) and kind_of(*map(str, node.args[1:3])).communicates:
            sent.add(node)
        elif node.target is operator.getitem and node.args[0] in sent and node.args[0].target is convert_group:
            sent.add(node)  # it waits where it is read
        elif found or sent & set(node.all_input_nodes):
            found.add(node.target)
    return found


def planned(work: Workload, ranks: int, **options: Any) -> Any:
    with pw.auto_parallel_context(parallel_mode="data_parallel", device_num=ranks, **options):
        return compile(work.model(torch.float32), work.tensors(work.each * ranks, torch.float32)).program


INDEX = {"mode": "index", "config": [9]}


SLOW = [pytest.param(policy, marks=pytest.mark.slow) for policy in (None, INDEX)]


@pytest.mark.parametrize("policy", [*SLOW, {"mode": "auto"}], ids=str)
def test_computing_waits_for_nothing_where_each_rank_has_its_part(policy: Any) -> None:
    fusion = {"openstate": policy is not None, "allreduce": policy}
    program = planned(tiny("resnet50"), 2, batch_norm_parts=2, comm_fusion=fusion)
    last = {
        aten.detach.default,
        aten.unbind.int,
        operator.getitem,
        aten.lerp.Scalar,
        aten.div.Tensor,
    }  # that of the loss
    assert after_reading(program.forward.graph) <= last
    assert after_reading(program.backward.graph) == set()
    forward = [c for c in program.collectives if c.phase == "forward"]
    assert [len(c.members) for c in forward if c.payload_bytes > 4] == ([53] if policy else [1] * 53)
    assert sum(c.payload_bytes == 4 for c in forward) == 2  # the loss, and how many targets are valid
    assert {str(c.kind) for c in program.collectives} == {"all_reduce"}


@pytest.mark.slow
def test_computing_waits_for_joint_statistics() -> None:
    program = planned(tiny("resnet50"), 2, comm_fusion={"openstate": False})
    assert aten.convolution.default in after_reading(program.forward.graph)
    assert aten.convolution_backward.default in after_reading(program.backward.graph)


# -- on processes


def trains() -> None:
    fusion = {"allreduce": {"mode": "auto"}}
    pw.set_auto_parallel_context(parallel_mode="data_parallel", full_batch=True, batch_norm_parts=2, comm_fusion=fusion)
    plain, model = by_parts(CASE.build(), 2), pw.shard(CASE.build())
    for step in range(3):
        (expected, slopes), (found, mine) = (gradients(each, CASE.batch(step=step)) for each in (plain, model))
        assert_same_loss(whole(found), expected, EXACT)
        named = {plain_name(name): slope for name, slope in slopes.items()}
        assert_same_gradients({name: whole(slope) for name, slope in mine.items()}, named, EXACT)
    assert_same_buffers(plain, model)
    with pw.record_collectives() as events:
        gradients(model, CASE.batch())
    assert [(e.phase, e.kind, e.payload_bytes) for e in events] == [
        (c.phase, c.kind, c.payload_bytes) for c in model.program.collectives
    ]


@pytest.mark.gloo
def test_processes_have_statistics_of_their_own(on_ranks: Ranks) -> None:
    on_ranks(2, trains)
