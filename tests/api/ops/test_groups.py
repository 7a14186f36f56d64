"""Groups of ranks by name, and PyTorch's: collectives in them, their ranks, and ranks that do not agree on them."""

from __future__ import annotations

import inspect
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import collectives
import pytest
import torch
import torch.distributed as dist
from collectives import CASES, derivatives, program, uneven, values
from scripts import run_ranks

import partway as pw
from partway import ops
from partway.runtime import groups
from partway.runtime.ranks import world
from partway.strategy import Mesh, RuntimeStateError, StrategyError

EXACT = {"rtol": 1e-12, "atol": 1e-12}
WORLD = pw.GlobalComm.WORLD_COMM_GROUP


@pytest.fixture(autouse=True)
def _no_groups() -> Any:
    yield
    world._KEPT.pop(groups._Groups, None)


# -- in one process


def test_one_process_is_a_group_of_one() -> None:
    pw.create_group("mine", [0])
    x = torch.arange(6.0).view(2, 3)
    for group in ("mine", WORLD, "nccl_world_group", "mccl_world_group"):
        assert (pw.get_rank(group), pw.get_group_size(group), pw.axis_index(group), pw.axis_size(group)) == (0, 1, 0, 1)
        assert torch.equal(ops.all_reduce(x, ops.ReduceOp.MAX, group), x)
        assert torch.equal(ops.AllGather(group)(x), x)
    assert pw.get_world_rank_from_group_rank("mine", 0) == pw.get_group_rank_from_world_rank(0, "mine") == 0
    assert pw.get_local_rank(WORLD) == 0
    with pytest.raises(StrategyError, match="get_local_rank is the position among all ranks of a host, and not among"):
        pw.get_local_rank("mine")
    with pytest.raises(StrategyError, match="the group 'mine' has no position 1; its positions are 0 to 0"):
        pw.get_world_rank_from_group_rank("mine", 1)
    with pytest.raises(StrategyError, match="the rank 3 is not in the group 'mine'; its ranks are 0"):
        pw.get_group_rank_from_world_rank(3, "mine")
    pw.destroy_group("mine")
    with pytest.raises(StrategyError, match=r"the mesh \(world=1\) has no axis 'mine'"):
        ops.all_reduce(x, group="mine")


@pytest.mark.parametrize(
    ("name", "ranks", "match"),
    [
        (3, [0], "create_group: the name of a group is 3; write some text"),
        ("", [0], "create_group: the name of a group is ''; write some text"),
        (WORLD, [0], "create_group: 'hccl_world_group' stands for all ranks; give the group another name"),
        ("world", [0], r"create_group: 'world' is an axis of the mesh \(world=1\); give the group another name"),
        ("there", [0], "create_group: 'there' is a group already; give the group another name"),
        ("ProcessGroup 0", [0], "create_group: 'ProcessGroup 0' is as PyTorch's groups are called; give"),
        ("a", 0, r"create_group: the ranks of 'a' are 0; write a list of ranks, such as \[0, 2\]"),
        ("a", [], r"create_group: the ranks of 'a' are \[\]; write a list of ranks"),
        ("a", [True], r"create_group: the ranks of 'a' are \[True\]; write a list of ranks"),
        ("a", [0, 0], r"the ranks of 'a' are \[0, 0\]; write each once, in ascending order, .* in the group: \[0\]"),
        ("a", [1, 0], r"the ranks of 'a' are \[1, 0\]; write each once, in ascending order, .* in the group: \[0, 1\]"),
        ("a", [0, 1], "create_group: the group 'a' has the rank 1, and the one rank is 0"),
        ("a", [-1], "create_group: the group 'a' has the rank -1, and the one rank is 0"),
    ],
)
def test_what_can_be_no_group_is_refused(name: Any, ranks: Any, match: str) -> None:
    pw.create_group("there", [0])
    with pytest.raises(StrategyError, match=match):
        pw.create_group(name, ranks)


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("b", "destroy_group: 'b' is no group that create_group made; the groups are 'a'"),
        (WORLD, r"destroy_group: 'hccl_world_group' is of all ranks, which shutdown\(\) ends; the groups are 'a'"),
        (3, "destroy_group: 3 is no group that create_group made; the groups are 'a'"),
    ],
)
def test_only_groups_that_were_made_are_destroyed(name: Any, match: str) -> None:
    pw.create_group("a", [0])
    with pytest.raises(StrategyError, match=match):
        pw.destroy_group(name)


def test_a_group_has_no_place_beside_axes_of_its_name() -> None:
    pw.create_group("a", [0])
    for group in (("a", "world"), ("world", "a")):
        with pytest.raises(StrategyError, match=r"the mesh \(world=1\) has no axis 'a'"):
            ops.all_reduce(torch.ones(2), group=group)


def test_virtual_devices_have_no_groups() -> None:
    pw.set_auto_parallel_context(device_num=4)
    for call in (lambda: pw.create_group("a", [0, 1]), lambda: pw.get_rank("a"), lambda: pw.get_group_size("a")):
        with pytest.raises(RuntimeStateError, match="is for the program of one rank, and this process stands for 4"):
            call()
    assert (pw.get_rank(WORLD), pw.get_group_size(WORLD)) == (0, 1)  # as without a group


def test_a_manual_function_has_the_axes_of_its_mesh() -> None:
    pw.create_group("a", [0])
    mesh, split = {"dp": 2, "tp": 2}, ((("dp", "tp"),),)
    x = torch.arange(4.0)
    whole = pw.manual(lambda x: ops.all_reduce(x, group=WORLD), split, split, mesh=mesh)(x)
    assert torch.equal(whole, torch.full((4,), 6.0))
    ranks = pw.manual(lambda x: x + pw.get_rank("tp") + 10 * pw.get_group_size("tp"), split, split, mesh=mesh)(0 * x)
    assert torch.equal(ranks, torch.tensor([20.0, 21.0, 20.0, 21.0]))
    with pytest.raises(StrategyError, match=r"the mesh \(dp=2, tp=2\) has no axis 'a'; the axes of the mesh are"):
        pw.manual(lambda x: ops.all_reduce(x, group="a"), mesh=mesh)(x)
    with pytest.raises(RuntimeStateError, match="called in a manual function, which has the axes of its mesh"):
        pw.manual(lambda x: [x, pw.create_group("b", [0])][0], mesh=mesh)(x)


# -- on processes

KINDS: dict[str, list[list[int]]] = {
    "three": [[0, 1, 2], [3]], "ends": [[0, 3], [1], [2]], "pairs": [[0, 2], [1, 3]], "all": [[0, 1, 2, 3]],
    "torch": [[1, 3]], "torch's order": [[3, 0, 2]],
}  # fmt: skip
IN_ORDER = pytest.mark.skipif(
    "sort_ranks" not in inspect.signature(dist.new_group).parameters, reason="this PyTorch sorts the ranks of a group"
)


def made(kind: str) -> tuple[list[int], Any]:
    """The ranks of this one's group of a kind, and the group; none where it is in none."""
    own: tuple[list[int], Any] = [], None
    for ranks in KINDS[kind]:
        if kind.startswith("torch"):
            group = dist.new_group(ranks, **({} if ranks == sorted(ranks) else {"sort_ranks": False}))
        else:
            group = f"{kind} of {ranks[0]}"
            pw.create_group(group, ranks)
        if pw.get_rank() in ranks:
            own = ranks, group
    return own


def unmade(kind: str) -> None:
    for ranks in KINDS[kind]:
        if not kind.startswith("torch"):
            pw.destroy_group(f"{kind} of {ranks[0]}")


def every_case(kind: str) -> None:
    """As test_operators.py has it for axes of meshes, of tensors that are not contiguous."""
    ranks, group = made(kind)
    rank = pw.get_rank()
    if len(ranks) > 1:
        at = ranks.index(rank)
        assert (pw.get_rank(group), pw.get_group_size(group)) == (at, len(ranks))
        assert pw.get_world_rank_from_group_rank(group, at) == rank
        assert [pw.get_group_rank_from_world_rank(each, group) for each in ranks] == [*range(len(ranks))]
        for name, case in CASES.items():
            whole = values(Mesh({"a": len(ranks)})).requires_grad_()
            wanted = torch.stack(case.formula([x.sin() for x in whole]))
            weights = torch.rand_like(wanted)
            x = whole.detach()[at].mT.contiguous().mT.requires_grad_()
            y = program(case, group)(x)
            torch.testing.assert_close(y, wanted[at], **EXACT, msg=lambda text, name=name: f"{name}: {text}")
            orders = zip(derivatives(y, x, weights[at]), derivatives(wanted, whole, weights), strict=True)
            for found, right in orders:
                torch.testing.assert_close(found, right[at], **EXACT, msg=lambda text, name=name: f"{name}: {text}")
    elif ranks:
        x = torch.rand(3, 4).mT
        for y in (ops.all_reduce(x, "max", group), ops.all_gather(x, 1, group), ops.all_to_all(x, 0, 1, group)):
            assert torch.equal(y, x)
    unmade(kind)


@pytest.mark.gloo
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=IN_ORDER if "order" in kind else ()) for kind in KINDS])
def test_collectives_in_groups_compute_the_formulas(on_ranks: Any, kind: str) -> None:
    on_ranks(4, every_case, kind)


def every_dtype() -> None:
    ranks, group = made("three")
    if len(ranks) > 1:
        at = ranks.index(pw.get_rank())
        for dtype in (torch.bfloat16, torch.float32, torch.int16, torch.int64, torch.uint8, torch.bool):
            stack = torch.randint(
                0, 2 if dtype is torch.bool else 3, (3, 6, 2), generator=torch.Generator().manual_seed(1)
            )
            stack = stack.to(dtype).mT.contiguous().mT
            kinds = ["max", "min"] if dtype is torch.bool else ["sum", "max", "min", "prod"]
            for op in kinds:
                right = collectives.REDUCTIONS[op](stack).to(dtype)
                assert torch.equal(ops.all_reduce(stack[at], op, group), right), (dtype, op)
                assert torch.equal(ops.reduce_scatter(stack[at], op, 0, group), right.chunk(3)[at]), (dtype, op)
            assert torch.equal(ops.all_gather(stack[at], 0, group), torch.cat([*stack]))
            assert torch.equal(ops.broadcast(stack[at], 2, group), stack[2])
            moved = torch.cat([x.chunk(3, 0)[at] for x in stack], 1)
            assert torch.equal(ops.all_to_all(stack[at], 0, 1, group), moved)
        sizes = uneven(15, 3)
        whole = torch.arange(30.0).view(15, 2)
        assert torch.equal(ops.all_gather(whole.split(sizes)[at], 0, group, sizes=sizes), whole)
        assert torch.equal(ops.reduce_scatter(whole, "sum", 0, group, sizes=sizes), 3 * whole.split(sizes)[at])
    unmade("three")


@pytest.mark.gloo
def test_collectives_in_a_group_take_every_dtype_and_parts_of_other_sizes(on_ranks: Any) -> None:
    on_ranks(4, every_dtype)


def first_call_of_some() -> float:
    """No group is made yet; ranks that are not in one do not come."""
    world._KEPT.pop(groups._Groups, None)
    group = dist.new_group([1, 3])
    if pw.get_rank() not in (1, 3):
        return 0.0
    return float(ops.all_reduce(torch.ones(1), group=group))


@pytest.mark.gloo
def test_a_process_group_needs_its_own_ranks_alone(on_ranks: Any) -> None:
    assert on_ranks(4, first_call_of_some) == [0.0, 2.0, 0.0, 2.0]


def in_two() -> None:
    rank = pw.get_rank()
    pw.create_group("both", [0, 1])
    x = torch.rand(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
    every = ops.all_gather(x[None])
    for group in ("both", dist.group.WORLD, WORLD, ("both",)):
        assert torch.equal(
            torch.func.vmap(lambda row, group=group: ops.all_reduce(row.sin(), "sum", group))(x), every.sin().sum(0)
        )
        leaf = x.clone().requires_grad_()
        compiled = torch.compile(
            lambda x, group=group: (ops.AllReduce(dist.ReduceOp.SUM, group)(x.sin()) ** 2).sum(), backend="aot_eager"
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Dynamo's, where a graph ends before a call: it asks results for .grad
            (found,) = torch.autograd.grad(compiled(leaf), leaf)
        torch.testing.assert_close(found, 4 * every.sin().sum(0) * x.cos(), **EXACT)
        torch.compiler.reset()
    assert ops.Broadcast(1, group="both")((x,))[0].equal(every[1])
    pw.destroy_group("both")


@pytest.mark.gloo
def test_groups_work_under_vmap_and_compile(on_ranks: Any) -> None:
    on_ranks(2, in_two)


def threads_of_groups() -> int:
    """How many threads are left by groups that were used and destroyed, each of its own ranks."""
    rank = pw.get_rank()
    before = threading.active_count()
    for turn in range(4):
        ranks = [0, 1, 2, 3][: 2 + turn % 3]
        pw.create_group("again", ranks)
        for _ in range(3):
            if rank in ranks:
                assert float(ops.all_reduce(torch.ones(1), group="again")) == len(ranks)
        pw.destroy_group("again")
    end = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < end:
        time.sleep(0.01)
    return threading.active_count() - before


@pytest.mark.gloo
def test_a_group_that_was_destroyed_leaves_nothing_and_its_name_is_free(on_ranks: Any) -> None:
    assert on_ranks(4, threads_of_groups) == [0] * 4


def mistaken(how: str) -> list[str]:
    rank, said = pw.get_rank(), []
    pw.create_group("one", [0])
    pw.create_group("two", [0, 1])
    group = dist.new_group([0, 1])
    last = rank == pw.get_group_size() - 1
    one, other = ("b", "a") if last else ("a", "b")
    calls: dict[str, list[Any]] = {
        "other": [lambda: pw.create_group(one, [0])],
        "ranks": [lambda: pw.create_group("a", [0, 2] if last else [0, 1])],
        "order": [lambda: pw.create_group(one, [0]), lambda: pw.create_group(other, [0])],
        "refused": [lambda: pw.create_group("a", [0, 9] if last else [0, 1])],
        "destroyed": [lambda: pw.destroy_group("two") if last else pw.create_group("a", [0])],
        "mesh": [lambda: pw.set_mesh({"dp": 2, "tp": 2} if last else {"tp": 4})],
        "axis": [lambda: pw.set_mesh({"two": 4})],
        "outside": [lambda: ops.all_reduce(torch.ones(2), group="two")] if last else [],
        "outside of one": [lambda: ops.all_reduce(torch.ones(2), group="one")] if last else [],
        "position": [lambda: pw.get_rank("two")] if last else [],
        "torch": [lambda: ops.all_reduce(torch.ones(2), group=group)] if last else [],
    }
    for call in calls[how]:
        with pytest.raises((RuntimeStateError, StrategyError)) as told:
            call()
        said.append(str(told.value))
    pw.set_mesh(None)
    pw.destroy_group("two")
    pw.destroy_group("one")
    return said


EVERY = (0, 1, 2, 3)
FIX = "let every rank create the same groups in one order, also those that it is not in"


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("how", "told", "by"),
    [
        ("other", [f"the group is 'a' (rank 0) on rank 0 and 'b' (rank 0) on rank 3; {FIX}"], EVERY),
        ("ranks", [f"the group is 'a' (ranks 0, 1) on rank 0 and 'a' (ranks 0, 2) on rank 3; {FIX}"], EVERY),
        (
            "order",
            [
                f"the group is 'a' (rank 0) on rank 0 and 'b' (rank 0) on rank 3; {FIX}",
                f"the group is 'b' (rank 0) on rank 0 and 'a' (rank 0) on rank 3; {FIX}",
            ],
            EVERY,
        ),
        ("refused", ["rank 3 could not create a group, and other ranks could; run the same program on"], (0, 1, 2)),
        ("refused", ["create_group: the group 'a' has the rank 9, and the ranks are 0 to 3"], (3,)),
        ("destroyed", ["the ranks are at different points of the program; run the same program on every"], EVERY),
        ("mesh", ["the mesh is tp=4 on rank 0 and dp=2, tp=2 on rank 3; call set_mesh with one mesh on"], EVERY),
        ("axis", ["the mesh (two=4) has an axis 'two', and a group is called so; destroy_group('two'), or"], EVERY),
        (
            "outside",
            ["rank 3 is not in the group 'two' (ranks 0, 1); only its own ranks have a place in it, and"], (3,),
        ),
        ("outside of one", ["rank 3 is not in the group 'one' (rank 0); only its own ranks have a place in it"], (3,)),
        ("position", ["rank 3 is not in the group 'two' (ranks 0, 1); only its own ranks have a place in it"], (3,)),
        ("torch", ["this rank is not in the group: new_group gives NON_GROUP_MEMBER to ranks that are outside"], (3,)),
    ],
)  # fmt: skip
def test_ranks_that_differ_on_groups_are_all_told(
    on_ranks: Any, how: str, told: list[str], by: tuple[int, ...]
) -> None:
    said = on_ranks(4, mistaken, how)
    for rank in by:
        assert len(said[rank]) == len(told), said
        for text, wanted in zip(said[rank], told, strict=True):
            assert wanted in text


SCRIPT = """
import sys
import torch, torch.distributed as dist
import partway as pw
from partway import ops

pw.init(backend="gloo", timeout=250)
rank, how = pw.get_rank(), sys.argv[1]
pw.create_group("a", [0, 1])
pw.create_group("b", [0, 1])
ops.all_reduce(torch.ones(2))
if how == "crossed":
    for group in ("ab" if rank else "ba"):
        ops.all_reduce(torch.ones(2), group=group)
elif how == "elsewhere" and rank:
    ops.all_reduce(torch.ones(2), group="a")
elif how == "elsewhere":
    pw.create_group("c", [0])
elif how == "drift":
    while True:  # nothing hangs, and the numbers are wrong
        ops.all_reduce(torch.ones(4), "max" if rank else "min", group="a")
elif how == "destroyed":
    group = dist.new_group([0, 1])
    x = torch.ones(2, requires_grad=True)
    y = ops.all_reduce(x, group=group)
    dist.destroy_process_group(group)
    y.sum().backward()
"""


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "told"),
    [
        (
            "crossed",
            [
                "rank 0 would all_reduce(sum) over b of float32[2], and rank 1 waits in a collective that needs all of",
                "rank 1: waits for rank 0 to all_reduce(sum) over a of float32[2], at run.py:14: ops.all_reduce(",
                "rank 1 would all_reduce(sum) over a of float32[2], and rank 0 ",
            ],
        ),
        (
            "elsewhere",
            [
                "rank 0 would create a group, and rank 1 waits in a collective that needs all of its ranks; run the",
                "rank 1: waits for rank 0 to all_reduce(sum) over a of float32[2], at run.py:16: ops.all_reduce(",
                (  # it sees that rank 0 has ended, or that its collective fails by that
                    "rank 1 would all_reduce(sum) over a of float32[2], and rank 0 cannot come",
                    "rank 1 has failed in all_reduce(sum) over a of float32[2]: ",
                ),
            ],
        ),
        ("drift", ["rank 1 called another collective than rank 0, at all_reduce(max) over a of float32[4]; let all"]),
        ("destroyed", ["there is no ProcessGroup ", "; it has been destroyed"]),
    ],
)  # fmt: skip
def test_ranks_that_call_in_other_groups_do_not_wait_in_vain(
    tmp_path: Path, how: str, told: list[str | tuple[str, ...]]
) -> None:
    (tmp_path / "run.py").write_text(SCRIPT)
    ended = run_ranks(["run.py", how], tmp_path)
    said = "".join(each.stderr for each in ended)
    assert all(each.returncode for each in ended), said
    for texts in told:
        assert any(text in said for text in ([texts] if isinstance(texts, str) else texts))
