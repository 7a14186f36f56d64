"""`manual` on virtual devices: what a person may write in a manual function, and what is refused, each against one
device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

import partway as pw
from partway.strategy import CaptureError, Partial, Replicate, Shard, StrategyError, VerifyError

MESH = {"dp": 2, "tp": 4}
TP = (("tp", None),)


def leaf(*size: int) -> Tensor:
    return torch.randn(*size, dtype=torch.float64, requires_grad=True)


def assert_equal(fn: Callable[..., Any], whole: Callable[..., Any], *args: Tensor, mesh: Any = MESH) -> Any:
    """`fn`, sharded, has the value and the gradients of `whole`."""
    sharded = pw.shard(fn, mesh=mesh)
    found, expected = sharded(*args), whole(*args)
    weight = torch.randn_like(expected)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    leaves = [arg for arg in args if arg.requires_grad]
    if leaves:
        gradients = torch.autograd.grad((found * weight).sum(), leaves)
        torch.testing.assert_close(
            gradients, torch.autograd.grad((expected * weight).sum(), leaves), rtol=1e-12, atol=1e-12
        )
    return sharded


def parts(x: Tensor, n: int = 4) -> Tensor:
    """The parts of dim 0 that n ranks have, stacked."""
    return x.unflatten(0, (n, len(x) // n))


# -- what it is


def test_alone_it_is_an_operator_of_whole_tensors() -> None:
    @pw.manual(
        in_strategy=(("dp", None), (None, "tp"), ("tp", None)), out_strategy=(("dp", None),), mesh={"dp": 2, "tp": 4}
    )
    def mlp(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return pw.ops.all_reduce(torch.relu(x @ up) @ down, group="tp")

    args = leaf(8, 16), leaf(16, 32), leaf(32, 16)
    found, expected = mlp(*args), torch.relu(args[0] @ args[1]) @ args[2]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        torch.autograd.grad(found.square().sum(), args), torch.autograd.grad(expected.square().sum(), args),
        rtol=1e-12, atol=1e-10,
    )  # fmt: skip
    assert mlp.__name__ == "mlp"
    ran = [(str(c.kind), c.axes, c.phase) for c in mlp.program.collectives]
    assert ran == [
        ("all_reduce", ("tp",), "forward"), ("all_gather", ("dp",), "forward"),
        ("all_reduce", ("dp",), "backward"), ("all_reduce", ("dp",), "backward"), ("all_reduce", ("tp",), "backward"),
    ]  # fmt: skip  # as few as Megatron-LM has: nothing is reduced twice
    assert "mlp" in str(mlp.plan)


def test_addends_may_come_out() -> None:
    @pw.manual(in_strategy=((None, "tp"), ("tp", None)), out_strategy=((Replicate(), Partial()),))
    def product(x: Tensor, w: Tensor) -> Tensor:
        return x @ w

    def planned(x: Tensor, w: Tensor) -> Tensor:
        return torch.tanh(product(x.sin(), w))

    sharded = assert_equal(planned, lambda x, w: torch.tanh(x.sin() @ w), leaf(8, 16), leaf(16, 4))
    assert [str(c.kind) for c in sharded.plan.collectives if c.phase == "forward"] == ["all_reduce"]


def test_what_is_whole_has_one_gradient_however_ranks_use_it() -> None:
    """A weight that each rank uses with its own part, and one that all use alike."""

    @pw.manual(in_strategy=(("tp", None), None, None), out_strategy=None)
    def scaled(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return pw.ops.all_reduce((x * w).sum(0), group="tp") * b + b

    assert_equal(scaled, lambda x, w, b: (x * w).sum(0) * b + b, leaf(8, 16), leaf(16), leaf(16))


def test_a_rank_may_ask_for_its_place() -> None:
    def biased(x: Tensor, b: Tensor) -> Tensor:
        if pw.axis_index("tp") == 0:
            x = x + b
        return pw.ops.all_reduce(x, group="tp")

    def sliced(x: Tensor) -> Tensor:
        own = x.shape[1] // pw.axis_size("tp")
        return x[:, pw.axis_index("tp") * own :][:, :own] * (pw.axis_index("tp") + 1)

    assert_equal(pw.manual(biased, (*TP, None), None), lambda x, b: parts(x).sum(0) + b, leaf(8, 16), leaf(16))
    assert_equal(
        pw.manual(sliced, (("dp", None),), (("dp", "tp"),)),
        lambda x: x * torch.arange(1, 5).repeat_interleave(4), leaf(8, 16),
    )  # fmt: skip


def test_ranks_may_do_different_things_between_collectives() -> None:
    """A scan over ranks: those that are behind another have more to add, and hold more on the way."""

    def scan(x: Tensor) -> Tensor:
        here, n, total = pw.axis_index("tp"), pw.axis_size("tp"), torch.zeros_like(x)
        y, kept = x.sin(), []
        for step in range(n):
            if step <= here:
                kept.append(y * y)
            y = pw.ops.permute(y, [(i, (i + 1) % n) for i in range(n)], group="tp")
        for value in kept:
            total = total + value
        return total

    assert_equal(pw.manual(scan, TP, TP), lambda x: parts(x).sin().square().cumsum(0).flatten(0, 1), leaf(8, 3))


def test_neighbours_exchange_rows_of_different_numbers() -> None:
    def smooth(x: Tensor) -> Tensor:
        here, n = pw.axis_index("tp"), pw.axis_size("tp")
        others = [other for other in (here - 1, here + 1) if 0 <= other < n]
        edges = [x[:1] if other < here else x[-1:] for other in others]
        shapes = [[1, x.shape[1]]] * len(others)
        came = dict(zip(others, pw.ops.neighbor_exchange(edges, others, others, shapes, group="tp"), strict=True))
        zero = torch.zeros_like(x[:1])
        y = torch.cat([came.get(here - 1, zero), x, came.get(here + 1, zero)])
        return y[:-2] + 2 * y[1:-1] + 3 * y[2:]

    def whole(x: Tensor) -> Tensor:
        y = F.pad(x, (0, 0, 1, 1))
        return y[:-2] + 2 * y[1:-1] + 3 * y[2:]

    assert_equal(pw.manual(smooth, TP, TP), whole, leaf(8, 3))


class Squared(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad * ctx.saved_tensors[0]


def in_place(x: Tensor) -> Tensor:
    y = x.clone()
    y += 1
    y[0] = 3.0
    return pw.ops.all_reduce(y.mul_(x), group="tp")


def in_place_whole(x: Tensor) -> Tensor:
    y = (parts(x) + 1).clone()
    y[:, 0] = 3.0
    return (y * parts(x)).sum(0)


def without_gradients(x: Tensor) -> Tensor:
    with torch.no_grad():
        largest = pw.ops.all_reduce(x.amax(), "max", group="tp")
    return x - largest * pw.ops.all_reduce(x.detach().sum(), group="tp")


def numbers_by_rank(x: Tensor) -> Tensor:
    y = x.clone()
    y[0] = float(pw.axis_index("tp"))
    return y


def numbers_by_rank_whole(x: Tensor) -> Tensor:
    return torch.cat([F.pad(part[1:], (0, 0, 1, 0), value=i) for i, part in enumerate(parts(x))])


CONSTANT = torch.arange(16, dtype=torch.float64)


@pytest.mark.parametrize(
    ("program", "out", "whole"),
    [
        (lambda x: pw.ops.all_reduce(Squared.apply(x), group="tp"), None, lambda x: parts(x).square().sum(0)),
        (in_place, None, in_place_whole),
        (without_gradients, TP, lambda x: x - x.detach().amax() * x.detach().sum()),
        (numbers_by_rank, TP, numbers_by_rank_whole),
        (lambda x: x * CONSTANT, TP, lambda x: x * CONSTANT),
        (lambda x: checkpoint(lambda y: pw.ops.all_reduce(y.sin().exp(), group="tp"), x, use_reentrant=False), None,
         lambda x: parts(x).sin().exp().sum(0)),
        (lambda x: x, TP, lambda x: x * 1),
        (lambda x: pw.ops.all_reduce(x, "max", group="tp"), None, lambda x: parts(x).amax(0)),
        (lambda x: pw.ops.all_reduce(x, "min", group=("dp", "tp")), None, lambda x: parts(x).amin(0)),
        (lambda x: pw.ops.all_reduce(x, "prod", group="tp"), None, lambda x: parts(x).prod(0)),
        (lambda x: pw.ops.broadcast(x, 2, group="tp"), None, lambda x: parts(x)[2]),
        (lambda x: pw.ops.reduce_scatter(x, "max", 1, group="tp"), ((None, "tp"),), lambda x: parts(x).amax(0)),
        (lambda x: pw.ops.all_to_all(x, 1, 1, group="tp"), TP,
         lambda x: x.view(4, 2, 4, 4).transpose(0, 2).reshape(8, 16)),
    ],
    ids=["function", "in-place", "no-grad", "numbers", "constant", "checkpoint", "itself", "max", "min", "prod",
         "broadcast", "scatter", "exchange"],
)  # fmt: skip
def test_what_may_stand_in_an_manual(program: Any, out: Any, whole: Any) -> None:
    manual = pw.manual(program, TP, out)
    assert_equal(lambda x: manual(x) * 2, lambda x: whole(x) * 2, leaf(8, 16))


def test_a_method_of_a_module_is_given_its_parameters() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(16, dtype=torch.float64))

        def of_rank(self, x: Tensor, weight: Tensor) -> Tensor:
            return x * weight

        def forward(self, x: Tensor) -> Tensor:
            return pw.manual(self.of_rank, (*TP, None), TP)(x, self.weight)

    model, x = Scaled(), leaf(8, 16)
    sharded = pw.shard(model, mesh=MESH)
    sharded(x).sum().backward()
    assert model.weight.grad is not None
    torch.testing.assert_close(model.weight.grad, x.sum(0).detach(), rtol=1e-12, atol=1e-12)


def test_a_function_made_in_a_loop_is_traced_where_it_is_called() -> None:
    def looped(x: Tensor) -> Tensor:
        for i in range(3):
            x = pw.manual(lambda y: y * (i + 1), TP, TP)(x)  # noqa: B023
        return x

    assert_equal(looped, lambda x: x * 6, leaf(8, 4))


def test_arguments_are_named_nested_and_plain() -> None:
    def program(given: dict[str, Any], factor: int = 2) -> dict[str, Tensor]:
        return {"sum": pw.ops.all_reduce(given["a"] * given["b"][0] * factor, group="tp")}

    manual = pw.manual(program, {"given": TP[0]}, None)
    assert_equal(
        lambda x: manual({"a": x, "b": [x]}, factor=3)["sum"], lambda x: 3 * parts(x).square().sum(0), leaf(8, 4)
    )


def test_random_masks_differ_where_what_they_mask_does() -> None:
    manual = pw.manual(lambda x: F.dropout(x, 0.5, True), TP, TP, mesh=MESH)
    rows = manual(torch.ones(8, 500, dtype=torch.float64)).bool()
    assert not torch.equal(rows[0], rows[2])
    alike = pw.manual(lambda x: F.dropout(pw.ops.all_reduce(x, group="tp"), 0.5, True), TP, None, mesh=MESH)
    alike(torch.ones(8, 500))  # PARTWAY_VERIFY=1: ranks are compared


def test_what_it_reads_is_watched() -> None:
    factor = {"by": 2.0}
    manual = pw.manual(lambda x: x * factor["by"], TP, TP, mesh=MESH)
    around, x = pw.shard(lambda x: manual(x) + 1, mesh=MESH), torch.ones(8, 4)
    assert (around(x)[0, 0], manual(x)[0, 0]) == (3, 2)
    factor["by"] = 5.0
    assert (around(x)[0, 0], manual(x)[0, 0]) == (6, 5)


def test_one_that_was_called_without_gradients_has_them_later() -> None:
    manual = pw.manual(lambda x: pw.ops.all_reduce(x * x, group="tp"), TP, None)
    loss, x = pw.shard(lambda x: manual(x).sum(), mesh=MESH), leaf(8, 4)
    with torch.no_grad():
        loss(x)
    with torch.inference_mode():
        loss(x)
    (gradient,) = torch.autograd.grad(loss(x), x)
    torch.testing.assert_close(gradient, 2 * x.detach())


def test_a_plan_made_inside_torch_checkpoint_has_manuals_too() -> None:
    manual = pw.manual(lambda x, w: pw.ops.all_reduce((x * w).exp(), group="tp"), (*TP, None), None)
    assert_equal(
        lambda x, w: checkpoint(lambda a, b: manual(a.sin(), b) * 1, x, w, use_reentrant=False),
        lambda x, w: parts((x.sin() * w).exp()).sum(0), leaf(8, 4), leaf(4),
    )  # fmt: skip


def test_alone_on_one_device_every_axis_has_one_rank() -> None:
    pw.set_auto_parallel_context(parallel_mode="stand_alone")
    manual = pw.manual(lambda x: x * pw.axis_size("tp") + pw.axis_index("dp"), TP, TP, mesh=MESH)
    assert torch.equal(manual(torch.ones(8, 4)), torch.ones(8, 4))


# -- what is said and does not hold


@pytest.mark.parametrize("around", [lambda f: f, lambda f: pw.shard(lambda x: f(x) + 1, mesh=MESH)])
def test_what_is_said_to_be_whole_is_compared(around: Any) -> None:
    manual = pw.manual(lambda x: x * 2, TP, None, mesh=MESH)
    with pytest.raises(
        VerifyError, match="over tp, is said to be whole, the same on every rank, and ranks differ in 8 "
    ):
        around(manual)(torch.arange(32.0).view(8, 4))


def test_what_is_said_to_be_whole_is_believed_without_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PARTWAY_VERIFY")
    manual = pw.manual(lambda x: x * 2, TP, None, mesh=MESH)
    assert manual(torch.arange(32.0).view(8, 4)).shape == (2, 4)


def nested(x: Tensor) -> Tensor:
    return pw.manual(lambda y: y, TP, TP)(x)


sharded_inside = pw.shard(lambda x: x * 2)


class Reduced(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return pw.ops.all_reduce(x, group="tp")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def unlike(x: Tensor) -> Tensor:
    return pw.ops.all_reduce(x, group="tp") if pw.axis_index("tp") == 0 else x


def shorter(x: Tensor) -> Tensor:
    return pw.ops.all_reduce(x[:1] if pw.axis_index("tp") == 0 else x, group="tp")


def hooked(x: Tensor) -> Tensor:
    x.register_hook(lambda grad: 2 * grad)
    return x * 2


def masked(x: Tensor) -> Tensor:
    return F.dropout(x, 0.5, True) if pw.axis_index("tp") else x


def same_neighbour(x: Tensor) -> Tensor:
    return pw.ops.neighbor_exchange([x], [1], [1], group="tp")[0]


TABLES = [torch.full((4,), float(i)) for i in range(4)]
OUTSIDE = torch.ones(4, requires_grad=True)


@pytest.mark.parametrize(
    ("program", "error", "match"),
    [
        (nested, StrategyError, "inside of a manual function, which is the program of one rank; call the function"),
        (sharded_inside, StrategyError, "is sharded and is called inside of a manual function"),
        (lambda x: x * OUTSIDE, CaptureError, "uses 1 tensor from outside that a gradient should reach"),
        (Reduced.apply, CaptureError, r"a torch.autograd.Function .* calls partway.all_reduce.default; call the"),
        (lambda x: x if x.sum() > 0 else -x, CaptureError, "its course depends on the values of tensors"),
        (hooked, CaptureError, "registers hooks, which a manual function cannot have"),
        (lambda x: torch.multinomial(x.softmax(-1), 2), CaptureError, r"calls aten.multinomial.default, which draws"),
        (unlike, CaptureError, r"of a manual function do not meet: the one at tp=0 calls partway.all_reduce.default"),
        (shorter, CaptureError, r"hand different tensors to partway.all_reduce.default: .* float64\[1, 4\], and .*pad"),
        (
            lambda x: x * TABLES[pw.axis_index("tp")],
            CaptureError,
            "ranks of a manual function use constant tensors that",
        ),
        (masked, CaptureError, "the ranks of a manual function draw different numbers of random tensors"),
        (
            same_neighbour,
            CaptureError,
            r"every rank of a manual function sends to \[1\] and receives from \[1\]; compute the neighbours",
        ),
        (lambda x: x if pw.axis_index("tp") else (x, x), CaptureError, "ranks of a manual function return different"),
    ],
)
def test_what_may_not_stand_in_an_manual(program: Any, error: Any, match: str) -> None:
    with pytest.raises(error, match=match):
        pw.manual(program, TP, TP, mesh=MESH)(leaf(8, 4))


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"in_strategy": (("tq", None),)}, "dim 0 names the axis 'tq', which the mesh .* lacks; did you mean 'tp'"),
        ({"in_strategy": (("tp",),)}, r"\('tp',\) has 1 entry for a tensor of 2 dims \[8, 4\]"),
        ({"in_strategy": (("tp", None), None)}, "in_strategy: has 2 entries for 1 argument"),
        ({"in_strategy": ((Shard(0), Partial()),)}, "Partial is a state inside a program"),
        ({"in_strategy": ((2, 1),), "mesh": {"a": 2, "b": 2}}, r"\(2, 1\) may mean .*; write the names of axes"),
        (
            {"in_strategy": TP, "out_strategy": (("tp",),)},
            r"output 0 .*\('tp',\) has 1 entry for a tensor of 2 dims \[2, 4\]",
        ),
        ({"in_strategy": TP, "out_strategy": TP * 2}, "out_strategy: has 2 entries for 1 output tensor"),
        (
            {"in_strategy": ((("dp", "tp"), None),), "size": 12},
            "dim 0 of .12, 4. has 12 elements, which 8 ranks cannot",
        ),
        ({"in_strategy": TP, "mesh": None}, "is on no mesh; pass mesh="),
    ],
)
def test_strategies_that_do_not_fit_are_refused(given: dict[str, Any], match: str) -> None:
    size = given.pop("size", 8)
    with pytest.raises(StrategyError, match=match):
        pw.manual(lambda x: x, **{"mesh": MESH, **given})(torch.ones(size, 4))


def test_two_meshes_are_refused() -> None:
    manual = pw.manual(lambda x: x, TP, TP, mesh={"tp": 8})
    with pytest.raises(
        StrategyError, match=r"is on the mesh \(tp=8\), and what calls it on \(dp=2, tp=4\); leave one out"
    ):
        pw.shard(lambda x: manual(x) * 1, mesh=MESH)(torch.ones(8, 4))


def test_what_is_no_function_of_tensors_is_refused() -> None:
    with pytest.raises(StrategyError, match="manual takes a function of tensors, not the module Linear"):
        pw.manual(nn.Linear(2, 2))
    with pytest.raises(StrategyError, match=r"manual takes a function or an nn\.Module object with a forward, not 3"):
        pw.manual(3)  # type: ignore[call-overload]

    class Holder:
        @pw.manual(in_strategy=TP)
        def method(self, x: Tensor) -> Tensor:
            return x

    with pytest.raises(StrategyError, match="method is a method, and `self` has no strategy"):
        Holder().method
    with pytest.raises(TypeError, match="its call does not fit: missing a required argument"):
        pw.manual(lambda x, y: x, TP, mesh=MESH)(torch.ones(8, 4))


def test_there_is_no_plan_before_a_call() -> None:
    with pytest.raises(pw.RuntimeStateError, match="there is no plan yet"):
        pw.manual(lambda x: x).plan
    with pytest.raises(pw.RuntimeStateError, match="there is no plan yet"):
        pw.manual(lambda x: x).program
