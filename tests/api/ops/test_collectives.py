"""What the collectives of a rank refuse, and what is said where ranks do not call the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from collectives import uneven
from scripts import run_ranks

import partway as pw
from partway import ops
from partway.strategy import OperatorError, RuntimeStateError

SPARSE = torch.eye(4).to_sparse()


@pytest.mark.parametrize(
    ("program", "match"),
    [
        (lambda x: ops.all_reduce(3), "all_reduce takes a tensor, not 3"),
        (lambda x: ops.all_reduce(SPARSE), r"all_reduce takes a dense tensor, not a torch.sparse_coo one; give it"),
        (lambda x: ops.all_reduce(x, "average"), "all_reduce: op is 'average'; write one of 'sum', 'mean', 'max'"),
        (lambda x: ops.all_reduce(x.int(), "mean"), "all_reduce: the mean of int32 is no int32; convert it"),
        (lambda x: ops.all_reduce(x > 0), "all_reduce: a sum of truth values; count them, as by x.int"),
        (lambda x: ops.reduce_scatter(x > 0, "prod"), "reduce_scatter: a prod of truth values"),
        (lambda x: ops.all_reduce(x + 0j, "max"), "all_reduce: complex numbers have no order, and so no max"),
        (lambda x: ops.all_gather(x, 2), r"all_gather: a tensor of shape \[4, 6\] has no dim 2"),
        (lambda x: ops.all_gather(x, "rows"), r"all_gather: a tensor of shape \[4, 6\] has no dim 'rows'"),
        (lambda x: ops.all_gather(x.sum()), r"all_gather: a tensor of shape \[\] has no dim 0"),
        (lambda x: ops.all_gather(x, sizes=[4]), r"all_gather: \[4\] are no sizes of 4 ranks; write one int"),
        (lambda x: ops.all_gather(x, sizes=[4, 4, -1, 4]), "are no sizes of 4 ranks; write one int for each"),
        (lambda x: ops.all_gather(x, sizes=[3] * 4), "rank 0 of the group has 4 elements along dim 0, and sizes"),
        (lambda x: ops.reduce_scatter(x, dim=1), r"dim 1 of \[4, 6\] has 6 elements, which 4 ranks cannot share"),
        (lambda x: ops.reduce_scatter(x, sizes=[2] * 4), r"the sizes \[2, 2, 2, 2\] make 8, and dim 0 of"),
        (lambda x: ops.broadcast(x, 4), "broadcast: root is 4; the positions in the group are 0 to 3"),
        (lambda x: ops.broadcast(x, True), "broadcast: root is True; the positions in the group are 0 to 3"),
        (lambda x: ops.all_to_all(x, 1, 0), r"all_to_all: dim 1 of \[4, 6\] has 6 elements, which 4 ranks"),
        (lambda x: ops.all_to_all(x, 0, 1, sends=[1] * 4), "all_to_all: sends and receives belong together; give both"),
        (
            lambda x: ops.all_to_all(x, 0, 1, sends=[1] * 4, receives=[5] * 4),
            "rank 0 of the group has 6 elements along dim 1, and receives says 5",
        ),
        (lambda x: ops.permute(x, [(0, 4)]), "permute: a pair has 4; the positions in the group are 0 to 3"),
        (lambda x: ops.permute(x, [0]), r"permute: 0 is no pair of positions \(source, target\)"),
        (lambda x: ops.permute(x, [(0, 1), (2, 1)]), "permute: rank 1 of the group receives twice; let it"),
        (lambda x: ops.permute(x, [(0, 1), (0, 2)]), "permute: rank 0 of the group sends twice; let it be in one pair"),
    ],
)  # fmt: skip
def test_operands_that_do_not_fit_are_refused(program: Any, match: str) -> None:
    with pytest.raises(OperatorError, match=match):
        pw.manual(program, mesh={"tp": 4})(torch.ones(4, 6))


def test_a_manual_function_has_parts_of_one_size() -> None:
    match = r"reduce_scatter: parts of the sizes \[2, 1, 1, 2\] in a manual function, where all ranks have tensors of"
    with pytest.raises(OperatorError, match=match):
        pw.manual(lambda x: ops.reduce_scatter(x, dim=1, sizes=[2, 1, 1, 2]), mesh={"tp": 4})(torch.ones(4, 6))


@pytest.mark.parametrize(
    ("spelling", "reduction"),
    [
        (ops.ReduceOp.SUM, "sum"), (ops.ReduceOp.MEAN, "mean"), (ops.ReduceOp.MAX, "max"), (ops.ReduceOp.MIN, "min"),
        (ops.ReduceOp.PROD, "prod"), (dist.ReduceOp.SUM, "sum"), (dist.ReduceOp.AVG, "mean"),
        (dist.ReduceOp.MAX, "max"), (dist.ReduceOp.MIN, "min"), (dist.ReduceOp.PRODUCT, "prod"),
        (dist.ReduceOp(dist.ReduceOp.MAX), "max"), ("SUM", "sum"), ("avg", "mean"), ("product", "prod"),
    ],
)  # fmt: skip
def test_a_reduction_has_several_spellings(spelling: Any, reduction: str) -> None:
    x, split = torch.rand(4, 4, dtype=torch.float64), (("tp", None),)
    for call in (ops.all_reduce, lambda x, op: ops.reduce_scatter(x, op, 1)):
        programs = [lambda x, op=op, call=call: call(x, op) for op in (spelling, reduction)]
        found, wanted = (pw.manual(program, split, split, mesh={"tp": 4})(x) for program in programs)
        assert torch.equal(found, wanted)
    for made in (ops.AllReduce, ops.ReduceScatter):
        assert made(spelling) == made(reduction)
        assert type(made(spelling).op) is str


@pytest.mark.parametrize(
    ("op", "told"),
    [
        (dist.ReduceOp.BAND, "ReduceOp.BAND"), (dist.ReduceOp.BXOR, "ReduceOp.BXOR"), (None, "None"), (0, "0"),
        (torch.sum, "<built-in method sum"), ("", "''"),
    ],
)  # fmt: skip
def test_what_is_no_reduction_is_refused(op: Any, told: str) -> None:
    for call, name in [
        (lambda: ops.all_reduce(torch.ones(2), op), "all_reduce"), (lambda: ops.AllReduce(op), "AllReduce"),
        (lambda: ops.reduce_scatter(torch.ones(2), op), "reduce_scatter"),
    ]:  # fmt: skip
        with pytest.raises(OperatorError, match="write one of 'sum', 'mean', 'max', 'min', 'prod'") as said:
            call()
        assert str(said.value).startswith(f"{name}: op is {told}")


# -- on processes


def alone(op: str, group_size: int) -> None:
    """Parts of other sizes on every rank."""
    rank, n = pw.get_rank(), group_size
    whole = torch.randn(3, 5 * n, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    sizes = uneven(5 * n, n)
    start = sum(sizes[:rank])
    mine = whole[:, start : start + sizes[rank]].clone().requires_grad_()
    gathered = ops.all_gather(mine, 1, sizes=sizes)
    torch.testing.assert_close(gathered, whole, rtol=0, atol=0)
    (gathered * (rank + 1)).sum().backward()
    torch.testing.assert_close(mine.grad, torch.full_like(mine, n * (n + 1) / 2))
    x = (whole * (rank + 1)).requires_grad_()
    slices = ops.reduce_scatter(x, op, 1, sizes=sizes)
    stack = torch.stack([whole * (r + 1) for r in range(n)]).requires_grad_()
    total = {"sum": stack.sum(0), "max": stack.amax(0), "prod": stack.prod(0)}[op]
    torch.testing.assert_close(slices, total[:, start : start + sizes[rank]])
    slices.sum().backward()
    torch.testing.assert_close(x.grad, torch.autograd.grad(total.sum(), stack)[0][rank])


def exchange_unevenly(n: int) -> None:
    """Rank r sends r + s + 1 rows to rank s, each of which says whose it is."""
    rank = pw.get_rank()
    sends = [rank + other + 1 for other in range(n)]
    x = torch.cat([torch.full((rows, 2), 10.0 * rank + to) for to, rows in enumerate(sends)]).requires_grad_()
    came = ops.all_to_all(x, sends=sends, receives=sends)  # as many come from each as go there
    assert torch.equal(
        came, torch.cat([torch.full((rows, 2), 10.0 * other + rank) for other, rows in enumerate(sends)])
    )
    (came * (rank + 1)).sum().backward()
    assert torch.equal(x.grad, torch.cat([torch.full((rows, 2), to + 1.0) for to, rows in enumerate(sends)]))


@pytest.mark.gloo
@pytest.mark.parametrize("op", ["sum", "max", "prod"])
def test_processes_may_have_parts_of_other_sizes(on_ranks: Any, op: str) -> None:
    on_ranks(2, alone, op, 2)
    on_ranks(2, exchange_unevenly, 2)


@pytest.mark.gloo
def test_four_processes_may_have_parts_of_other_sizes(on_ranks: Any) -> None:
    on_ranks(4, alone, "max", 4)
    on_ranks(4, exchange_unevenly, 4)


def compared(wrong: str) -> str:
    pw.set_mesh(None)
    rank = pw.get_rank()
    calls: dict[str, Any] = {
        "order": lambda: ops.all_reduce(torch.ones(2)) if rank else ops.all_gather(torch.ones(2)),
        "shape": lambda: ops.all_reduce(torch.ones(2 + rank)),
        "dtype": lambda: ops.all_reduce(torch.ones(2, dtype=torch.float64 if rank else torch.int64)),
        "root": lambda: ops.broadcast(torch.ones(2), rank),
        "op": lambda: ops.all_reduce(torch.ones(2), "max" if rank else "min"),
        "rows": lambda: ops.all_gather(torch.ones(2, 3 + rank)),
    }
    with pytest.raises(RuntimeStateError) as told:
        calls[wrong]()
    return str(told.value)


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ("order", "rank 0 calls all_gather(0) over world of float32[None] where rank 1 calls all_reduce(sum"),
        (
            "shape",
            "calls all_reduce(sum) over world of float32[2] where rank 1 calls all_reduce(sum) over",
        ),
        ("dtype", "of int64[2] where rank 1 calls all_reduce(sum) over world of float64[2]; let all ranks call"),
        ("root", "rank 0 calls broadcast(0) over world of float32[2] where rank 1 calls broadcast(1)"),
        ("op", "rank 0 calls all_reduce(min) over world of float32[2] where rank 1 calls all_reduce(max)"),
        ("rows", "of float32[None, 3] where rank 1 calls all_gather(0) over world of float32[None, 4]"),
    ],
)
def test_processes_compare_their_calls(on_ranks: Any, wrong: str, told: str) -> None:
    for said in on_ranks(2, compared, wrong):
        assert told in said


SCRIPT = """
import datetime, sys, time
import torch, torch.distributed as dist
import partway as pw
from partway import ops

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=4))
pw.init()
rank = pw.get_rank()
if sys.argv[1] == "first" and rank == 1:
    time.sleep(8)
ops.all_reduce(torch.ones(4), "max" if rank and sys.argv[1] == "drift" else "min")
while sys.argv[1] == "drift":  # nothing hangs, and the numbers are wrong
    time.sleep(0.1)
    ops.all_reduce(torch.ones(4))
if sys.argv[1] == "later" and rank == 1:
    time.sleep(8)
if sys.argv[1] == "counts":
    ops.neighbor_exchange([torch.ones(3)], [1 - rank], [1 - rank], [[3 + rank]])
ops.broadcast(torch.ones(4))
"""


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize(
    ("when", "told"),
    [
        ("first", "rank 0 would make the groups of a mesh, and rank 1 did not come within 4 s; run the same program"),
        ("later", "rank 0 has failed in broadcast(0) over world of float32[4]: "),
        ("counts", "neighbor_exchange over world: rank 0 sends 3 elements to rank 1, which expects 4; let both say"),
        ("drift", "rank 1 called another collective than rank 0, at all_reduce(max) over world of float32[4]; let all"),
    ],
)
def test_a_rank_that_does_otherwise_is_named(tmp_path: Path, when: str, told: str) -> None:
    (tmp_path / "run.py").write_text(SCRIPT)
    ended = run_ranks(["run.py", when], tmp_path)
    said = "".join(each.stderr for each in ended)
    assert told in said
    assert when != "later" or "rank 1: is outside of what is sharded, at run.py:17: time.sleep(8)" in said
