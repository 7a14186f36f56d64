"""One rank of gloo does what the simulator does."""

import dataclasses
import itertools
import math
import operator

import pytest
import torch
import torch.distributed as dist
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from partway.propagation.ops.collectives import convert, convert_group
from partway.propagation.ops.indexing import position
from partway.propagation.rules.windows import Halo, Strided
from partway.runtime import Simulator, Worker, broadcast, device_mesh, join, record_collectives, split
from partway.runtime.code.assemble import assemble_code
from partway.runtime.code.instructions import ConvertLayout
from partway.runtime.executors import issue
from partway.runtime.executors.execute import process_group
from partway.strategy import (
    BROADCAST,
    PARTIAL,
    REPLICATE,
    Kind,
    Layout,
    Mesh,
    RuntimeStateError,
    Shard,
    StrategyError,
    kind,
)
from partway.strategy.cut import Cut
from partway.strategy.placement import PARTIAL_MAX, converts, transpose

MESHES = {2: [{"x": 2}, {"one": 1, "x": 2}], 4: [{"x": 4}, {"dp": 2, "tp": 2}]}
PLACEMENTS = (Shard(0), Shard(1), Shard(2), REPLICATE, BROADCAST, PARTIAL, PARTIAL_MAX)
DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int16,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
)
ADDS = {Kind.ALL_REDUCE, Kind.REDUCE_SCATTER}


def code_of(source, target, axes, size, count=None):
    """One conversion, of one tensor or of a group of `count`."""
    graph = fx.Graph()
    inputs = [graph.placeholder(f"x{i}") for i in range(count or 1)]
    rest = str(source), str(target), list(axes), size
    if count is None:
        outputs = [graph.call_function(convert, (inputs[0], *rest, 0))]
    else:
        group = graph.call_function(convert_group, (inputs, *rest, list(range(count))))
        outputs = [graph.call_function(operator.getitem, (group, i)) for i in range(count)]
    graph.output(tuple(outputs))
    return assemble_code(fx.GraphModule(torch.nn.Module(), graph), "backward")


def parts_of(shape, dtype, ranks, generator):
    """Small integers, so that sums are exact in every dtype."""
    numbers = [torch.randint(0, 4, shape, generator=generator) for _ in range(ranks)]
    return [n.bool() if dtype is torch.bool else n.to(dtype) for n in numbers]


def check_code(code, values, mesh):
    worker, simulator, rank = Worker(mesh), Simulator(mesh), dist.get_rank()
    before = [value[rank].float() if value[rank].dtype.is_floating_point else value[rank].clone() for value in values]
    run = worker.load(code)
    with record_collectives() as said:
        got = run([value[rank] for value in values])
    run([torch.zeros_like(value[rank]) for value in values])  # what is kept for the next call is not in the results
    with record_collectives() as expected:
        wanted = simulator.run(code, values)
    assert said == expected, (said, expected)
    for one, other in zip(got, wanted, strict=True):
        assert one.dtype == other[rank].dtype
        assert one.shape == other[rank].shape
        assert one.is_contiguous()
        assert bits(one) == bits(other[rank]), (code, one, other[rank])
    for value, kept in zip(values, before, strict=True):
        assert torch.equal(value[rank].to(kept.dtype), kept), "an operand was written to"
    return len(said)


def bits(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8).tolist()


def groups_of(axes):
    """The sets of axes that a conversion may be along, with the ranks of a group."""
    mesh = Mesh(axes)
    for n in range(len(axes)):
        for found in itertools.combinations(axes, n + 1):
            yield found, mesh.size(*found)


def check_conversions(axes, dtypes, shapes):
    mesh, generator, collectives = Mesh(axes), torch.Generator().manual_seed(0), 0
    for along, size in groups_of(axes):
        for source in PLACEMENTS:
            for target in PLACEMENTS:
                if not converts(source, target):
                    continue
                for dtype in dtypes:
                    if kind(source, target) in ADDS and dtype in (torch.bool, torch.float8_e4m3fn):
                        continue
                    if PARTIAL_MAX in (source, target) and (dtype.is_complex or dtype is torch.float8_e4m3fn):
                        continue
                    for shape in shapes:
                        if any(isinstance(p, Shard) and p.dim >= len(shape) for p in (source, target)):
                            continue
                        value = parts_of(shape, dtype, mesh.device_num, generator)
                        collectives += check_code(code_of(source, target, along, size), [value], mesh)
    return collectives


@pytest.mark.gloo
@pytest.mark.parametrize("n", [2, 4])
def test_every_conversion_gives_what_the_simulator_gives(on_ranks, n):
    for axes in MESHES[n]:
        found = on_ranks(n, check_conversions, axes, (torch.float64,), ((4, 8, 4), (4, 0, 4), (8,), ()))
        assert set(found) == {found[0]}
        assert found[0] > 20


@pytest.mark.gloo
def test_every_dtype_can_be_converted(on_ranks):
    on_ranks(2, check_conversions, {"x": 2}, DTYPES, ((2, 4, 2),))
    on_ranks(4, check_conversions, {"x": 4}, (torch.bfloat16, torch.bool, torch.int16), ((4, 4, 4),))


def check_positions(axes):
    mesh, graph = Mesh(axes), fx.Graph()
    chosen = [(axis,) for axis in axes] + [tuple(axes)]
    nodes = [graph.call_function(position, (list(along), [mesh.size(axis) for axis in along])) for along in chosen]
    graph.output(tuple(nodes))
    code = assemble_code(fx.GraphModule(torch.nn.Module(), graph), "forward")
    check_code(code, [], mesh)
    return [int(value) for value in Worker(mesh).run(code, [])]


@pytest.mark.gloo
def test_a_rank_knows_its_position(on_ranks):
    found = on_ranks(4, check_positions, {"dp": 2, "tp": 2})
    assert found == [[0, 0, 0], [0, 1, 1], [1, 0, 2], [1, 1, 3]]


def check_groups(axes, dtype):
    mesh, generator = Mesh(axes), torch.Generator().manual_seed(0)
    for along, size in groups_of(axes):
        for source, target in (
            (PARTIAL, REPLICATE),
            (PARTIAL_MAX, REPLICATE),
            (PARTIAL, Shard(1)),
            (Shard(1), REPLICATE),
            (Shard(0), Shard(1)),
            (REPLICATE, Shard(0)),
            (Shard(0), PARTIAL),
        ):
            shapes = [(4, 4), (8, 4, 3), (4, 4)] + ([(), (5,)] if target == REPLICATE and source == PARTIAL else [])
            values = [parts_of(shape, dtype, mesh.device_num, generator) for shape in shapes]
            check_code(code_of(source, target, along, size, len(shapes)), values, mesh)


@pytest.mark.gloo
@pytest.mark.parametrize("n", [2, 4])
def test_a_group_of_conversions_is_one_collective_with_the_results_of_each(on_ranks, n):
    for axes in MESHES[n]:
        for dtype in (torch.float32, torch.bfloat16, torch.int16):
            on_ranks(n, check_groups, axes, dtype)


def check_coalesced(axes, dtype):
    """gloo copies into a buffer of its own where NCCL does not, and takes the same calls."""
    before, issue.has_nccl = issue.has_nccl, lambda group: True
    try:
        check_groups(axes, dtype)
    finally:
        issue.has_nccl = before


@pytest.mark.gloo
def test_a_group_of_a_backend_that_coalesces_is_not_copied_into_one_buffer(on_ranks):
    for axes in MESHES[2]:
        for dtype in (torch.float32, torch.int16):
            on_ranks(2, check_coalesced, axes, dtype)


def check_in_place(elements):
    """What only the collective reads becomes its own sum; what others read, and inputs, stay."""
    graph = fx.Graph()
    inputs = [graph.placeholder(name) for name in "abcd"]
    made = [graph.call_function(torch.ops.aten.mul.Scalar, (x, 2)) for x in inputs[:3]]
    operands = [*made, inputs[3]]  # two made and read once, one read again, one an input
    group = graph.call_function(convert_group, (operands, "P", "R", ["x"], 2, [0, 1, 2, 3]))
    outputs = [graph.call_function(operator.getitem, (group, i)) for i in range(4)]
    outputs.append(graph.call_function(torch.ops.aten.add.Tensor, (made[2], 1)))
    graph.output(tuple(outputs))
    code = assemble_code(fx.GraphModule(torch.nn.Module(), graph), "backward")
    (conversion,) = (step.relayout for step in code.instructions if isinstance(step, ConvertLayout))
    assert conversion.owned == (True, True, False, False)
    shapes = [(elements,), (3, 2), (elements,), (elements,)]
    values = [parts_of(shape, torch.float32, 2, torch.Generator().manual_seed(0)) for shape in shapes]
    check_code(code, values, Mesh({"x": 2}))


@pytest.mark.gloo
@pytest.mark.parametrize("elements", [5, 2**18], ids=["small", "large"])
def test_members_that_nobody_else_reads_are_added_up_where_they_are(on_ranks, elements):
    on_ranks(2, check_in_place, elements)


JOINT = [
    (PARTIAL, REPLICATE, Kind.ALL_REDUCE, Kind.NOTHING),
    (REPLICATE, BROADCAST, Kind.NOTHING, Kind.ALL_REDUCE),
    (Shard(1), BROADCAST, Kind.ALL_GATHER, Kind.REDUCE_SCATTER),
    (PARTIAL, Shard(0), Kind.REDUCE_SCATTER, Kind.ALL_GATHER),
    (Shard(0), Shard(1), Kind.ALL_TO_ALL, Kind.ALL_TO_ALL),
    (Shard(1), REPLICATE, Kind.ALL_GATHER, Kind.SLICE),
    (BROADCAST, Shard(0), Kind.SLICE, Kind.PAD),
    (Shard(0), PARTIAL, Kind.PAD, Kind.SLICE),
    (BROADCAST, REPLICATE, Kind.NOTHING, Kind.KEEP),
    (BROADCAST, PARTIAL, Kind.KEEP, Kind.KEEP),
]


def forward_and_backward(source, target, axes, size):
    def both(x, gradient):
        y = convert(x, str(source), str(target), list(axes), size, 0)
        return y, *torch.autograd.grad(y, x, gradient)

    return both


def check_derivatives(axes):
    """Conversions along all axes at once, with their gradients: of one whole value, and as the simulator has them."""
    mesh, generator = Mesh(axes), torch.Generator().manual_seed(0)
    n = mesh.device_num
    for source, target, forward, backward in JOINT:
        assert (kind(source, target), kind(*transpose(source, target))) == (forward, backward)

        before, after = (Layout(mesh, (p,) * len(axes)) for p in (source, target))
        shapes = [before.local_shape((4 * n, 2 * n)), after.local_shape((4 * n, 2 * n))]
        with FakeTensorMode():
            x, gradient = (torch.empty(shape, requires_grad=True) for shape in shapes)
            code = assemble_code(make_fx(forward_and_backward(source, target, axes, n))(x, gradient), "forward")
        wholes = [torch.randint(-9, 9, (4 * n, 2 * n), generator=generator).float() for _ in range(2)]
        values = [
            # addends of a whole: it, and zeros
            [p * (rank == 0) if PARTIAL in found.placements else p for rank, p in enumerate(split(whole, found))]
            for whole, found in zip(wholes, (before, after.dual()), strict=True)
        ]
        assert check_code(code, values, mesh) == sum(way.communicates for way in (forward, backward))
        for whole, parts, found in zip(wholes, Simulator(mesh).run(code, values), (after, before.dual()), strict=True):
            assert torch.equal(join(parts, found), whole)


@pytest.mark.gloo
def test_a_conversion_along_two_axes_and_its_gradient_are_one_collective_each(on_ranks):
    on_ranks(4, check_derivatives, {"dp": 2, "tp": 2})


def check_short_slices(axes):
    """Conversions along all axes at once between slices that are not all full, with what is behind their ends."""
    mesh, generator = Mesh(axes), torch.Generator().manual_seed(0)
    n = mesh.device_num
    cuts = [Cut(size, mesh.sizes) for size in (4 * n, 4 * n - 1, 2 * n + 1)]
    for first, second in itertools.permutations(cuts, 2):
        rows, columns = Shard(0, first), Shard(1, second)
        whole, shape = (first.size, second.size), {0: (first.width, second.size), 1: (first.size, second.width)}
        for source, target, held in [
            (rows, REPLICATE, shape[0]), (columns, REPLICATE, shape[1]), (REPLICATE, rows, whole),
            (PARTIAL, rows, whole), (PARTIAL, columns, whole), (columns, PARTIAL, shape[1]),
            (rows, columns, shape[0]), (columns, rows, shape[1]),
        ]:  # fmt: skip
            value = parts_of(held, torch.float64, n, generator)
            check_code(code_of(source, target, axes, n), [value], mesh)


def check_windows(axes):
    """Windows of all fills, wide and narrow ones, and their gradients."""
    mesh, generator = Mesh(axes), torch.Generator().manual_seed(0)
    n, exchanges = mesh.device_num, 0
    for size, reach, fill, made in [
        (4 * n, Strided(3, 1, 1), 0.0, 4 * n),
        (4 * n, Strided(3, 2, 1), -math.inf, 2 * n),
        (2 * n, Strided(9, 1, 4), 0.0, 2 * n),
        (3 * n + 1, Strided(5, 1, 2), "reflect", 3 * n + 1),
        (2 * n + 1, Strided(1, 1, 3), "circular", 2 * n + 7),
        (n, Strided(1, 1, 2), "replicate", n + 4),
    ]:
        held = Cut(size, mesh.sizes)
        window = Halo(0, "w", reach, fill).window(1, held, Cut(made, mesh.sizes))
        back = dataclasses.replace(window, adds=True)
        for source, target, width in ((Shard(1), window, held.width), (back, Shard(1), window.width)):
            for dtype in (torch.float64, torch.bfloat16):
                value = parts_of((2, width, 3), dtype, n, generator)
                exchanges += check_code(code_of(source, target, axes, n), [value], mesh)
    return exchanges


@pytest.mark.gloo
@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("check", [check_short_slices, check_windows])
def test_slices_and_windows_are_what_the_simulator_makes(on_ranks, check, n):
    for axes in MESHES[n]:
        on_ranks(n, check, axes)


def make_groups():
    mesh, rank = Mesh({"dp": 2, "one": 1, "tp": 2}), dist.get_rank()
    for axes in (("dp", "one"), ("dp", "tp"), ("one", "tp"), ("tp",), ("dp", "one", "tp")):
        group = process_group(mesh, axes)
        assert tuple(dist.get_process_group_ranks(group)) == mesh.group(rank, *axes)
        assert dist.get_rank(group) == mesh.position(rank, *axes)
        assert process_group(Mesh({"dp": 2, "one": 1, "tp": 2}), axes) is group
    everyone = process_group(mesh, ("dp", "tp"))  # of its own: a person may use that of the world
    assert everyone is not dist.group.WORLD
    assert everyone is process_group(mesh, ("dp", "tp"))
    with pytest.raises(StrategyError, match="the axes tp, dp of a group are not in the order of the mesh dp=2, one=1"):
        process_group(mesh, ("tp", "dp"))
    value = parts_of((4, 4), torch.float32, 4, torch.Generator().manual_seed(0))
    assert check_code(code_of(PARTIAL, REPLICATE, ("dp", "one"), 2), [value], mesh) == 1


@pytest.mark.gloo
def test_a_group_along_several_axes_has_its_ranks_in_their_order_and_is_made_once(on_ranks):
    on_ranks(4, make_groups)


def check_uncontiguous(axes):
    """Operands in other strides are converted by value."""
    mesh = Mesh(axes)
    for source, target in ((PARTIAL, REPLICATE), (PARTIAL, Shard(0)), (Shard(0), Shard(1)), (Shard(1), REPLICATE)):
        graph = fx.Graph()
        x = graph.placeholder("x")
        turned = graph.call_function(torch.ops.aten.t.default, (x,))
        graph.output((graph.call_function(convert, (turned, str(source), str(target), ["x"], mesh.size("x"), 0)),))
        code = assemble_code(fx.GraphModule(torch.nn.Module(), graph), "forward")
        values = parts_of((4, 8), torch.float32, mesh.device_num, torch.Generator().manual_seed(0))
        got, wanted = Worker(mesh).run(code, [values[dist.get_rank()]]), Simulator(mesh).run(code, [values])
        assert torch.equal(got[0], wanted[0][dist.get_rank()])


@pytest.mark.gloo
def test_operands_need_not_be_contiguous(on_ranks):
    on_ranks(2, check_uncontiguous, {"x": 2})


def make_workers():
    mesh = Mesh({"dp": 2, "tp": 2})
    first, second = Worker(mesh), Worker(Mesh({"dp": 2, "tp": 2}))
    assert first.device_mesh is second.device_mesh
    flat = device_mesh(Mesh({"x": 4}))
    assert flat.get_group("x") is dist.group.WORLD
    whole = torch.arange(32.0).view(4, 8)
    for layout in (Layout(mesh, (Shard(0), Shard(1))), Layout(mesh, (Shard(1), Shard(1))), Layout.replicated(mesh)):
        part = first.cut(whole, layout)
        assert part.is_contiguous()
        assert torch.equal(part, whole[layout.slices((4, 8), dist.get_rank())])
    short = first.cut(torch.tensor([1.0, 2.0, 3.0]), Layout(mesh, (Shard(0), REPLICATE)))
    assert short.tolist() == ([1.0, 2.0] if dist.get_rank() < 2 else [3.0, 0.0])
    with pytest.raises(RuntimeStateError, match=r"has 8 devices, but there are 4 ranks; start 8 processes or use a"):
        Worker(Mesh({"x": 8}))


@pytest.mark.gloo
def test_a_second_worker_makes_no_groups_and_a_mesh_of_another_size_is_rejected(on_ranks):
    on_ranks(4, make_workers)


def share():
    rank = dist.get_rank()
    mixed = [torch.full((3,), rank, dtype=dtype) for dtype in DTYPES]
    mixed += [
        torch.full((2, 3), float(rank)).t(),
        torch.nn.Parameter(torch.full((2,), float(rank))),
        torch.tensor(rank),
    ]
    broadcast(mixed)
    assert not any(t.to(torch.complex64).any() for t in mixed)


@pytest.mark.gloo
def test_ranks_that_differ_can_take_rank_0s_values(on_ranks):
    on_ranks(2, share)


def test_a_worker_without_processes_is_told_to_start_them():
    with pytest.raises(RuntimeStateError, match=r"there is no process group; call init\(\)"):
        Worker(Mesh({"x": 2}))
    with pytest.raises(RuntimeStateError, match=r"there is no process group; call init\(\)"):
        process_group(Mesh({"dp": 2, "tp": 2}), ("dp", "tp"))


def test_a_code_is_the_same_on_ranks_that_have_planned_it_and_on_those_that_have_read_it_from_disk():
    """Where each infinity and each device may be an object of its own, or one for all."""
    infinities = [float("-inf"), float("-inf")], [float("-inf")] * 2
    devices = [torch.device("cpu"), torch.device("cpu")], [torch.device("cpu")] * 2
    codes = []
    for values, places in zip(infinities, devices, strict=True):
        graph = fx.Graph()
        nodes = [
            graph.call_function(torch.ops.aten.scalar_tensor.default, (value,), {"device": device})
            for value, device in zip(values, places, strict=True)
        ]
        graph.output(tuple(nodes))
        codes.append(assemble_code(fx.GraphModule(torch.nn.Module(), graph), "forward"))
    first, second = codes
    assert first.identity == second.identity
    assert set(first.constants.values()) == {torch.ops.aten.scalar_tensor.default, -math.inf, torch.device("cpu")}
