"""What a rank is said to hold is what the program takes as its part."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import partway as pw
from partway.data import Part, part_of, planned_part, to_global
from partway.propagation.graph.port import Role

SHAPE = (16, 3, 8, 64)


class Scale(nn.Module):
    """A model of images and labels that can be split along every dim but the channels."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 3, dtype=torch.float64)[:, None, None])

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        value: Tensor = (torch.tanh(image * self.scale).mean((1, 2, 3)) - label).square().mean()
        return value


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(SHAPE, dtype=torch.float64, generator=generator), torch.linspace(-1, 1, 16, dtype=torch.float64)


def compiled(strategy, mode="auto_parallel", mesh=None):
    with pw.auto_parallel_context(device_num=8, dataset_strategy=strategy, parallel_mode=mode):
        return pw.compile(Scale(), batch(), mesh=mesh)


def taken(found, rank):
    """Where the parts that the program takes lie in its inputs."""
    return [p.layout.slices(p.shape, rank) for p in found.local.inputs if p.port.role is Role.INPUT]


# The examples of the reference's page, and one of each kind beside them.
SPLIT_OVER_ALL = [
    ((1, 1, 1, 8), (8,)),
    ((1, 1, 1, 8), (1,)),
    ((1, 1, 1, 1), (1,)),
    ((1, 1, 8, 1), (1,)),
    ((8, 1, 1, 1), (8,)),
]


@pytest.mark.parametrize("mode", ["semi_auto_parallel", "auto_parallel"])
@pytest.mark.parametrize("strategy", SPLIT_OVER_ALL)
def test_a_split_over_all_devices_is_known_before_there_is_a_plan(strategy, mode):
    found = compiled(strategy, mode)
    for rank in range(8):
        parts = [part_of(entry, rank, devices=8) for entry in strategy]
        expected = taken(found, rank)
        assert [p.slices(t.shape) for p, t in zip(parts, batch(), strict=True)] == expected
        assert [planned_part(found, i, rank) for i in range(2)] == parts
        assert [planned_part(found.plan, name, rank) for name in ("image", "label")] == parts


@pytest.mark.parametrize("mesh", [{"a": 2, "b": 4}, {"a": 4, "b": 2}, {"a": 2, "b": 2, "c": 2}])
@pytest.mark.parametrize("strategy", SPLIT_OVER_ALL[:2])
def test_so_it_is_on_every_mesh(strategy, mesh):
    found = compiled(strategy, mesh=mesh)
    for rank in range(8):
        parts = [part_of(entry, rank, mesh=mesh) for entry in strategy]
        assert [p.slices(t.shape) for p, t in zip(parts, batch(), strict=True)] == taken(found, rank)
        assert parts == [part_of(entry, rank, devices=8) for entry in strategy]


@pytest.mark.parametrize(
    ("mesh", "index"),
    [
        ({"copy": 2, "w": 4}, [0, 1, 2, 3, 0, 1, 2, 3]),
        ({"w": 4, "copy": 2}, [0, 0, 1, 1, 2, 2, 3, 3]),
    ],
)
def test_which_ranks_share_a_part_follows_from_the_mesh(mesh, index):
    strategy = ((1, 1, 1, 4), (1,))
    found = compiled(strategy, mesh=mesh)
    for rank in range(8):
        part = part_of(strategy[0], rank, mesh=mesh)
        assert (part.index, part.splits) == ((0, 0, 0, index[rank]), (1, 1, 1, 4))
        assert [part.slices(SHAPE), (slice(0, 16),)] == taken(found, rank)
        assert part == planned_part(found, 0, rank) == part_of((None, None, None, "w"), rank, mesh=mesh)


@pytest.mark.parametrize("mode", ["semi_auto_parallel", "auto_parallel"])
def test_without_a_mesh_the_plan_says_which_ranks_share_a_part(mode):
    found = compiled(((1, 1, 1, 4), (1,)), mode)
    parts = [planned_part(found, "image", rank) for rank in range(8)]
    assert [[p.slices(SHAPE), (slice(0, 16),)] for p in parts] == [taken(found, rank) for rank in range(8)]
    assert sorted(part.index[3] for part in parts) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_plan_that_was_saved_says_the_same(tmp_path):
    found = compiled(((1, 1, 1, 4), (1,)))
    found.plan.save(tmp_path / "plan.json")
    loaded = pw.Plan.load(tmp_path / "plan.json")
    assert [planned_part(loaded, 0, r) for r in range(8)] == [planned_part(found, 0, r) for r in range(8)]


def test_axis_names_split_several_dims():
    mesh = {"dp": 2, "h": 2, "w": 2}
    strategy = ("dp", None, "h", "w")
    found = pw.compile(Scale(), batch(), mesh=mesh, in_strategy=(strategy, ("dp",)))
    for rank in range(8):
        part = part_of(strategy, rank, mesh=mesh)
        assert part.index == (rank // 4, 0, rank // 2 % 2, rank % 2)
        assert part.slices(SHAPE) == taken(found, rank)[0]
        assert part.window(8, 64) == (
            4 * part.index[2],
            4 * part.index[2] + 4,
            32 * part.index[3],
            32 * part.index[3] + 32,
        )
        assert part.along(0) == (rank // 4, 2)
        assert part.patch() == rank % 4


@pytest.mark.parametrize("strategy", SPLIT_OVER_ALL)
def test_what_the_reference_allows_computes_what_one_device_does(strategy):
    model, alone = Scale(), Scale()
    expected = alone(*batch())
    expected.backward()
    with pw.auto_parallel_context(device_num=8, dataset_strategy=strategy, parallel_mode="auto_parallel"):
        loss = pw.shard(model)(*batch())
        loss.backward()
    assert math.isclose(loss.item(), expected.item(), rel_tol=1e-12)
    torch.testing.assert_close(model.scale.grad, alone.scale.grad, rtol=1e-12, atol=1e-15)


def test_without_a_launcher_a_rank_stands_for_all_and_holds_the_whole():
    found = compiled(((1, 1, 1, 8), (1,)))
    assert part_of((1, 1, 1, 8), devices=8) == planned_part(found) == Part.whole(4)
    tensor = torch.ones(SHAPE)
    assert to_global(tensor, ("dp", None, None, "w"), {"dp": 2, "w": 4}) is tensor


def test_the_number_of_devices_is_that_of_the_context():
    with pw.auto_parallel_context(device_num=4):
        assert part_of((1, 4), 3) == Part((0, 3), (1, 4))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"strategy": (1, 1, 1, 4), "devices": 8},
            "which part of (1, 1, 1, 4) each rank of 8 holds is chosen with the plan; pass the mesh that shard was "
            "given, as mesh=, or ask the plan: planned_part(model)",
        ),
        ({"strategy": (2, 1, 1, 4), "devices": 8}, "which part of (2, 1, 1, 4) each rank of 8 holds is chosen with"),
        (
            {"strategy": (1, 2), "mesh": {"a": 2, "b": 2}},
            "chosen with the plan; write axis names instead of the counts, or ask the plan: planned_part(model)",
        ),
        ({"strategy": (1, 3), "devices": 8}, "(1, 3) takes 3 devices, which does not divide the 8 available"),
        ({"strategy": (16, 1), "devices": 8}, "(16, 1) takes 16 devices, but there are 8"),
        ({"strategy": (0, 8), "devices": 8}, "the split count 0; write an int of 1 or more"),
        ({"strategy": ("dp", None), "devices": 8}, "dim 0 names the axis 'dp', which the mesh"),
        (
            {"strategy": ((1, 1, 1, 8), (1,)), "devices": 8},
            "part_of cannot read ((1, 1, 1, 8), (1,)); give the entry of one input, such as (1, 1, 1, 8)",
        ),
        ({"strategy": "data_parallel"}, "part_of cannot read 'data_parallel'; write the split counts of one input"),
        ({"strategy": [1, 8]}, "part_of cannot read [1, 8]; write the split counts of one input"),
        ({"strategy": (1, 8), "devices": 0}, "devices is 0; write how many there are, an int of 1 or more"),
        (
            {"strategy": (1, 8), "devices": 4, "mesh": {"a": 8}},
            "devices is 4, but the mesh (a=8) has 8; omit devices",
        ),
        ({"strategy": (1, 8), "devices": 8, "rank": 8}, "rank 8 is not on the mesh d0=2, d1=2, d2=2"),
    ],
)
def test_what_has_no_known_part_is_refused(arguments, message):
    with pytest.raises(pw.StrategyError) as error:
        part_of(**arguments)
    assert message in str(error.value)


def test_uneven_parts_are_refused_naming_the_dim():
    part = Part((0, 1), (1, 8))
    with pytest.raises(
        pw.DataError, match="dim 1 has size 12, which 8 parts do not divide; crop or pad it to a multiple"
    ):
        part.slices((4, 12))
    with pytest.raises(pw.DataError, match="the width has size 12, which 8 parts do not divide"):
        part.window(4, 12)
    with pytest.raises(pw.DataError, match=r"part \(0, 1\) of \(1, 8\) is for tensors of 2 dims, not of shape"):
        part.slices((4, 3, 8))
    with pytest.raises(pw.DataError, match=r"part \(0, 1\) of \(1, 8\) has no dim 2, only 2 dims"):
        part.along(2)


@pytest.mark.parametrize(("index", "splits"), [((0,), (1, 1)), ((2,), (2,)), ((-1,), (2,)), ((0,), (0,))])
def test_a_part_that_cannot_be_is_refused(index, splits):
    with pytest.raises(pw.DataError, match="a part has, for each dim, a count of parts and an index below it"):
        Part(index, splits)


def test_what_has_no_plan_is_refused():
    with pytest.raises(pw.DataError, match="planned_part takes a Plan, or a sharded model, which has one, not 3"):
        planned_part(3)
    found = compiled(((1, 1, 1, 8), (1,)))
    for wrong in (2, "images", True):
        with pytest.raises(pw.DataError, match=f"the plan has no input {wrong!r}; its inputs are 0 'image', 1 'label'"):
            planned_part(found, wrong)
    with pytest.raises(pw.RuntimeStateError, match="there is no plan yet"):
        planned_part(pw.shard(Scale(), mesh={"w": 8}))


def test_a_global_tensor_needs_a_mesh_and_an_entry_for_each_dim():
    with pytest.raises(pw.StrategyError, match="to_global takes the mesh that shard was given"):
        to_global(torch.ones(2, 2), ("w", None), None)
    with pytest.raises(pw.StrategyError, match=r"the part has shape \[2, 2\], but \('w',\) is for 1 dim"):
        to_global(torch.ones(2, 2), ("w",), {"w": 8})
