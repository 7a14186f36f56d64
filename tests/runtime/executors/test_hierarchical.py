"""A collective in steps computes what one step computes."""

import threading
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from round_profile import FLAT, NODE, profile_with
from torch import fx, nn

import partway as pw
from partway.propagation.cost.cost import Hierarchy
from partway.propagation.ops.collectives import convert
from partway.propagation.program.collective import Conversion
from partway.runtime import Simulator, Worker
from partway.runtime.code.assemble import assemble_code
from partway.runtime.executors import hierarchical
from partway.runtime.executors.execute import hierarchical_group
from partway.runtime.executors.hierarchical import HierarchicalGroup
from partway.strategy import PARTIAL, REPLICATE, Mesh, Shard
from partway.strategy.cut import Cut
from partway.strategy.placement import PARTIAL_MAX, Kind
from partway.strategy.torch_mesh import nested_groups

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.complex64)
SUM, MAX = dist.ReduceOp.SUM, dist.ReduceOp.MAX
IN_STEPS = (Kind.ALL_REDUCE, Kind.ALL_GATHER, Kind.REDUCE_SCATTER)


def small_chunks():
    hierarchical.CHUNK = 64  # bytes: 16 floats


def addend(count, dtype, rank):
    """Small integers, so that sums are exact in every dtype."""
    return torch.randint(0, 4, (count,), generator=torch.Generator().manual_seed(rank)).to(dtype)


def reduce_all(axes, within):
    small_chunks()
    mesh, rank = Mesh(axes), dist.get_rank()
    reducer = hierarchical_group(mesh, mesh.axes, within)
    cases = [(count, dtype, SUM) for dtype in DTYPES for count in (0, 1, 2, 15, 16, 17, 33, 200)]
    cases += [(200, torch.float32, MAX), (35, torch.bfloat16, MAX)]
    tensors = [addend(count, dtype, rank) for count, dtype, _ in cases]
    issued = [reducer.all_reduce(tensor, case[-1]) for tensor, case in zip(tensors, cases, strict=True)]
    for (count, dtype, reduction), tensor, one in zip(cases, tensors, issued, strict=True):
        one.wait()
        every = torch.stack([addend(count, dtype, other) for other in range(mesh.device_num)])
        assert torch.equal(tensor, every.amax(0) if reduction == MAX else every.sum(0, dtype=dtype)), (count, dtype)


def gather_and_scatter(axes, within):
    small_chunks()
    mesh, rank = Mesh(axes), dist.get_rank()
    group, ranks = hierarchical_group(mesh, mesh.axes, within), mesh.device_num
    cases = [(count, dtype) for dtype in DTYPES for count in (0, 1, 3, 4, 5, 50)]
    parts = [addend(count, dtype, rank) for count, dtype in cases]
    wholes = [part.new_empty(ranks * len(part)) for part in parts]
    rows = [addend(ranks * count, dtype, rank) for count, dtype in cases]
    kept, sums = [row.clone() for row in rows], [torch.empty_like(part) for part in parts]
    issued = [group.all_gather(whole, part) for whole, part in zip(wholes, parts, strict=True)]
    issued += [group.reduce_scatter(out, row) for out, row in zip(sums, rows, strict=True)]
    for one in issued:
        one.wait()
    for (count, dtype), whole, out in zip(cases, wholes, sums, strict=True):
        assert torch.equal(whole, torch.cat([addend(count, dtype, other) for other in range(ranks)])), (count, dtype)
        every = torch.stack([addend(ranks * count, dtype, other).view(ranks, -1)[rank] for other in range(ranks)])
        assert torch.equal(out, every.sum(0, dtype=dtype)), (count, dtype)
    assert all(map(torch.equal, rows, kept))  # others may read the addends, too


@pytest.mark.gloo
@pytest.mark.parametrize("axes", [{"x": 4}, {"host": 2, "local": 2}])
def test_parts_and_sums_of_parts_of_every_size(on_ranks, axes):
    on_ranks(4, gather_and_scatter, axes, 2)


@pytest.mark.gloo
@pytest.mark.parametrize("axes", [{"x": 4}, {"host": 2, "local": 2}])
def test_sums_and_maxima_of_every_size(on_ranks, axes):
    on_ranks(4, reduce_all, axes, 2)


def reduce_random():
    """Sums whose bits depend on the order of the addends are the same on all ranks."""
    small_chunks()
    tensor = torch.randn(1000, generator=torch.Generator().manual_seed(dist.get_rank()))
    hierarchical_group(Mesh({"x": 4}), ("x",), 2).all_reduce(tensor, SUM).wait()
    every = [torch.empty_like(tensor) for _ in range(4)]
    dist.all_gather(every, tensor)
    assert all(torch.equal(one, tensor) for one in every)


@pytest.mark.gloo
def test_every_rank_has_the_same_bits(on_ranks):
    on_ranks(4, reduce_random)


def code_of(source, target, hierarchies):
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(convert, (x, str(source), str(target), ["x"], 4, 0)),))
    reason = Conversion(
        tag=0, tensor="x", axes=("x",), size=4, source=source, target=target, whole_bytes=0, dtype=torch.float32,
        gradient=False, parameter=False, producer="", consumer="", where="", path="", line="", hierarchies=hierarchies,
    )  # fmt: skip
    return assemble_code(fx.GraphModule(torch.nn.Module(), graph), "forward", [reason])


def run_code(source, target, name, large, issued):
    small_chunks()
    mesh, rank, payloads = Mesh({"x": 4}), dist.get_rank(), []
    group = hierarchical_group(mesh, ("x",), 2)
    taken, hierarchies = getattr(group, name), tuple(Hierarchy(kind, 2, large, 0.0, 0.0) for kind in IN_STEPS)

    def counted(tensor, *others):
        payloads.append(max(tensor.nbytes, *(other.nbytes for other in others if isinstance(other, torch.Tensor)), 0))
        return taken(tensor, *others)

    setattr(group, name, counted)
    try:
        for inference in (False, True):
            with torch.inference_mode(inference):
                values = [addend(100, torch.float32, other).view(4, 25).t() for other in range(4)]
                code = code_of(source, target, hierarchies)
                (got,) = Worker(mesh).run(code, [values[rank]])
                assert torch.equal(got, Simulator(mesh).run(code, [values])[0][rank])
    finally:
        delattr(group, name)
    assert payloads == [large] * issued


@pytest.mark.gloo
@pytest.mark.parametrize(("more", "issued"), [(0, 2), (1, 0)])
@pytest.mark.parametrize(
    ("source", "target", "name", "payload"),
    [
        (PARTIAL, REPLICATE, "all_reduce", 400),
        (PARTIAL_MAX, REPLICATE, "all_reduce", 400),
        (Shard(0), REPLICATE, "all_gather", 1600),
        (Shard(1), REPLICATE, "all_gather", 1600),
        (Shard(1, Cut(14, (4,))), REPLICATE, "all_gather", 1600),
        (PARTIAL, Shard(1), "reduce_scatter", 400),
    ],
)
def test_a_program_sends_large_tensors_in_steps_and_small_ones_at_once(
    on_ranks, source, target, name, payload, more, issued
):
    on_ranks(4, run_code, source, target, name, payload + more, issued)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256, bias=False)).double()


def train(profile, axes, at_rest, expected):
    """Losses and gradients of 2 steps are those of one device, accumulated over two backwards and grouped, too."""
    hierarchical.CHUNK = 2**17
    pw.set_auto_parallel_context(device_profile=str(profile), comm_fusion={"allreduce": {"mode": "size", "config": 1}})
    parameters = {"*.weight": (tuple(axes) if at_rest == "in parts" else None, None), "*.bias": (None,)}
    plain, batch = net(), torch.randn(512, 256, dtype=torch.float64)
    model = pw.shard(net(), mesh=axes, in_strategy=((tuple(axes), None),), parameter_plan=parameters)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (plain, model)]
    for _ in range(2):
        for _ in range(2):
            losses = [each(batch).square().mean() for each in (plain, model)]
            for loss in losses:
                loss.backward()
            assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-12)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    found = Counter((str(c.kind), c.steps) for c in model.plan.collectives if c.steps)
    assert found == expected, found
    assert all(steps in str(model.program) for _, steps in expected)


INSIDE_FIRST = "inside 2 units of 2 ranks and then between these"
BETWEEN_FIRST = "between 2 units of 2 ranks and then inside these"


@pytest.mark.gloo
@pytest.mark.parametrize("axes", [{"x": 4}, {"host": 2, "local": 2}])
@pytest.mark.parametrize(
    ("at_rest", "expected"),
    [
        ("whole", {("all_reduce", INSIDE_FIRST): 2, ("all_gather", BETWEEN_FIRST): 1}),  # not of the bias
        ("in parts", {("all_gather", BETWEEN_FIRST): 3, ("reduce_scatter", INSIDE_FIRST): 2}),
    ],
)
def test_a_model_trains_as_on_one_device(on_ranks, tmp_path, axes, at_rest, expected):
    profile = tmp_path / "profile.json"
    profile_with(levels=[{**NODE, "devices": 2, "launch": 0}, {**FLAT, "bandwidth": 1e8}]).save(profile)
    on_ranks(4, train, profile, axes, at_rest, expected)


def fail_once():
    """The error of a step reaches the rank that waits, and the thread goes on."""
    small_chunks()
    reducer, rank = hierarchical_group(Mesh({"x": 4}), ("x",), 2), dist.get_rank()
    broken = reducer.all_reduce(torch.ones(8), "no reduction")
    with pytest.raises(TypeError):
        broken.wait()
    dist.barrier()
    tensor = torch.full((8,), float(rank))
    reducer.all_reduce(tensor, SUM).wait()
    assert tensor.tolist() == [6.0] * 8


def leave():
    """The thread ends with its reducer: a process may join one group after another."""
    before, mesh = set(threading.enumerate()), Mesh({"x": 4})
    reducer = HierarchicalGroup(*nested_groups(mesh, ("x",), 2, None, "a test"))
    reducer.all_reduce(torch.ones(8), SUM).wait()
    (thread,) = (each for each in threading.enumerate() if each not in before and "collectives" in each.name)
    del reducer
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.gloo
def test_the_thread_ends_with_its_reducer(on_ranks):
    on_ranks(4, leave)


@pytest.mark.gloo
def test_what_a_step_raises_is_raised_where_the_result_is_read(on_ranks):
    on_ranks(4, fail_once)
