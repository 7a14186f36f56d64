"""Where a program of one rank runs, and where it cannot."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import partway as pw
from partway import ops
from partway.strategy import CaptureError, RuntimeStateError, StrategyError


def test_a_process_without_a_launcher_is_one_rank() -> None:
    assert (pw.axis_index(), pw.axis_size()) == (0, 1)
    x = torch.arange(6.0).view(2, 3)
    for y in (
        ops.all_reduce(x), ops.all_gather(x, 1), ops.reduce_scatter(x, "max"), ops.broadcast(x), ops.all_to_all(x),
        ops.permute(x, [(0, 0)]), ops.neighbor_exchange([x], [0], [0])[0],
    ):  # fmt: skip
        assert torch.equal(y, x)
        assert y is not x
    assert not ops.permute(x, []).any()
    padded = ops.neighbor_exchange_v2(x[None, None], [0] * 8, [1] * 4, [0] * 8, [1] * 4)  # its own neighbour, all round
    assert torch.equal(padded, torch.nn.functional.pad(x[None, None], (1, 1, 1, 1), mode="circular"))


def test_a_mesh_names_the_axes() -> None:
    try:
        pw.set_mesh({"dp": 1, "tp": 1})
        assert pw.axis_size(("dp", "tp")) == 1
        with pytest.raises(
            StrategyError, match=r"the mesh \(dp=1, tp=1\) has no axis 'tq'; the axes of the mesh are 'dp', 'tp'"
        ):
            pw.axis_index("tq")
        pw.set_mesh({"tp": 2})
        with pytest.raises(
            RuntimeStateError, match="axis_size is for the program of one rank, and this process stands"
        ):
            pw.axis_size()
    finally:
        pw.set_mesh(None)
    with pytest.raises(StrategyError, match="has no axis 'tp'; the axes of the mesh are 'world'"):
        pw.axis_index("tp")
    with pytest.raises(StrategyError, match=r"set_mesh cannot use this mesh: it is 'tp' \(str\); write a Mesh, a dict"):
        pw.set_mesh("tp")


def test_virtual_devices_are_no_ranks() -> None:
    pw.set_auto_parallel_context(device_num=4)
    with pytest.raises(
        RuntimeStateError, match=r"all_reduce is .* this process stands for 4 virtual devices; put what"
    ):
        ops.all_reduce(torch.ones(2))


def test_a_planned_function_is_no_program_of_one_rank() -> None:
    planned = pw.shard(lambda x: ops.all_reduce(x * 2), mesh={"tp": 2})
    with pytest.raises(
        CaptureError, match="all_reduce is for the program of one rank, and is called in a function that"
    ):
        planned(torch.ones(4))
    with pytest.raises(CaptureError, match="axis_index is for the program of one rank"):
        pw.shard(lambda x: x * pw.axis_index("tp"), mesh={"tp": 2})(torch.ones(4))


def test_a_group_is_one_of_axes() -> None:
    for group, match in [
        ("tq", "has no axis 'tq'; the axes of the mesh are 'dp', 'tp'"),
        (("tp", "tp"), r"the group \('tp', 'tp'\) names an axis twice; name each once"),
        (3, "a group is the name of a mesh axis, a tuple of several, or None for all; .* a ProcessGroup; not 3"),
        ((), r"a group is the name of a mesh axis, a tuple of several, or None for all; .* not \(\)"),
    ]:
        with pytest.raises(StrategyError, match=match):
            pw.manual(lambda x, group=group: ops.all_reduce(x, "sum", group), mesh={"dp": 2, "tp": 2})(torch.ones(4))


# -- on processes


def places() -> tuple[Any, ...]:
    pw.set_mesh(None)
    rank = pw.get_rank()
    before = (pw.axis_index(), pw.axis_size())
    with pytest.raises(StrategyError, match="has no axis 'tp'"):
        ops.all_reduce(torch.ones(2), group="tp")
    with pytest.raises(RuntimeStateError, match=r"the mesh \(tp=3\) has 3 devices, but there are 4 ranks"):
        pw.set_mesh({"tp": 3})
    pw.set_mesh({"dp": 2, "tp": 2})
    total = ops.all_reduce(torch.tensor(float(rank)), group="tp")
    if pw.axis_index("dp") == 0:  # a group by itself
        total = ops.all_reduce(total, group="tp")
    after = (pw.axis_index("dp"), pw.axis_index("tp"), pw.axis_index(("dp", "tp")), float(total))
    pw.set_mesh(None)
    return (*before, *after, pw.axis_size())


@pytest.mark.gloo
def test_processes_know_their_places(on_ranks: Any) -> None:
    found = on_ranks(4, places)
    assert found == [
        (0, 4, 0, 0, 0, 2.0, 4), (1, 4, 0, 1, 1, 2.0, 4), (2, 4, 1, 0, 2, 5.0, 4), (3, 4, 1, 1, 3, 5.0, 4),
    ]  # fmt: skip
