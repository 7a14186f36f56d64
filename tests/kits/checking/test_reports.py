"""What `check_manual` says: of a mistake, of what it cannot tell, and of what it is given."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import partway as pw
from partway import ops

X, W, B = torch.randn(8, 6), torch.randn(6, 8), torch.zeros(8)
ROWS = (("dp", None), None)


def mlp(x: Tensor, up: Tensor, down: Tensor, bias: Tensor) -> Tensor:
    y = torch.relu(x @ up) @ down + bias
    return ops.all_reduce(y, group="tp")


def product(x: Tensor, w: Tensor) -> Tensor:
    return x @ w


def quarter(x: Tensor) -> Tensor:
    return ops.all_reduce(x.mean() / 4, group="dp")


def half(x: Tensor) -> Tensor:
    return ops.all_reduce(x.mean() / 2, group="dp")


def in_rows(x: Tensor) -> Tensor:
    return ops.all_reduce(x.reshape(2, 24).sum(0), group="dp").sum()


def line_of(fn: Callable[..., Any], part: str) -> str:
    """Where `part` stands in a function, as reports say it."""
    lines, first = inspect.getsourcelines(fn)
    number = next(i for i, line in enumerate(lines) if part in line)
    return f"{inspect.getsourcefile(fn)}:{first + number}, in {fn.__name__}: {lines[number].strip()}"


def test_a_mistake_is_told_with_what_to_write() -> None:
    strategy = (None, (None, "tp"), ("tp", None), None)
    report = pw.check_manual(mlp, strategy, None, (X, W, W.t(), torch.zeros(6)), mesh={"dp": 2, "tp": 4})
    difference = report.differences[0]
    assert str(report) == (
        "mlp does not compute what one rank with everything whole does\n"
        f"    output 0 is wrong: it differs by {difference.difference:.3g}, of up to {difference.largest:.3g}\n"
        "\n"
        "what is replicated is added to a partial sum, so output 0 is wrong\n"
        f"    at     {line_of(mlp, '+ bias')}\n"
        "    value  the argument bias\n"
        "    is     replicated over dp and replicated over tp\n"
        "    needs  to be added once, and every rank of tp adds it to its partial sum\n"
        "    write  pw.ops.all_reduce(x, \"sum\", group='tp') of the partial sums first, and then add it"
    )
    finding = report.findings[0]
    assert (finding.mistake, finding.outputs) == (pw.Mistake.ON_EVERY_RANK, ("output 0",))
    assert (finding.line.file, finding.line.function, finding.line.text) == (
        __file__, "mlp", "y = torch.relu(x @ up) @ down + bias"
    )  # fmt: skip


def test_a_right_program_is_told_to_be_right() -> None:
    report = pw.check_manual(product, ROWS, (("dp", None),), (X, W), mesh={"dp": 4}, whole=torch.mm)
    assert str(report) == (
        "product computes what whole does\n"
        f"    output 0 is right: it differs by 0, of up to {report.differences[0].largest:.3g}"
    )
    assert report.right


def test_a_manual_function_is_checked_with_its_own_strategies() -> None:
    @pw.manual(in_strategy=ROWS, out_strategy=(("dp", None),), mesh={"dp": 4})
    def rows(x: Tensor, w: Tensor) -> Tensor:
        return x @ w

    assert pw.check_manual(rows, args=(X, W))
    assert pw.check_manual(rows, args=(X, W), mesh={"dp": 2})
    assert not pw.check_manual(rows, ROWS, (None,), args=(X, W))


def test_keyword_defaults_and_nested_results() -> None:
    def step(batch: dict[str, Tensor], w: Tensor, scale: float = 2.0) -> dict[str, Any]:
        loss = (batch["x"] @ w).square().mean() * scale
        return {"loss": ops.all_reduce(loss, "mean"), "grads": [torch.autograd.grad(loss, w)[0]]}

    report = pw.check_manual(step, {"batch": ("dp", None)}, None, ({"x": X}, W), mesh={"dp": 4})
    assert [finding.mistake for finding in report.findings] == [pw.Mistake.GRADIENT]
    assert report.findings[0].outputs == ("output 1",)


# -- What a program may do


def test_losses_in_lower_precision_are_compared_in_float64() -> None:
    def entropy(x: Tensor, w: Tensor, targets: Tensor) -> Tensor:
        logits = (x.to(torch.bfloat16) @ w.to(torch.bfloat16)).float()
        eye = torch.eye(8, dtype=torch.float32)
        return ops.all_reduce(F.cross_entropy(logits @ eye + torch.zeros(8), targets), "mean", group="dp")

    args = (X, W, torch.randint(8, (8,)))
    report = pw.check_manual(entropy, (("dp", None), None, ("dp",)), None, args, mesh={"dp": 4})
    assert report
    assert report.differences[0].difference < 1e-12
    assert torch.get_default_dtype() is torch.float32


def test_a_loop_with_backward_and_an_optimizer() -> None:
    def trained(x: Tensor, w: Tensor, *, reduced: bool) -> Tensor:
        optimizer = torch.optim.SGD([w], lr=0.1, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad()
            (x @ w).square().mean().backward()
            if reduced:
                w.grad = ops.all_reduce(w.grad, "mean", group="dp")
            optimizer.step()
        return w

    before = W.clone()
    assert pw.check_manual(lambda x, w: trained(x, w, reduced=True), ROWS, None, (X, W), mesh={"dp": 4})
    report = pw.check_manual(lambda x, w: trained(x, w, reduced=False), ROWS, None, (X, W), mesh={"dp": 4})
    assert not report
    assert report.findings or report.unknown
    assert torch.equal(W, before)
    assert W.grad is None


def test_a_value_that_is_not_finite_in_noise_is_tried_without() -> None:
    report = pw.check_manual(lambda x: x.log(), (("dp",),), (("dp",),), (torch.tensor([1.0, 1e-9]),), mesh={"dp": 2})
    assert report


# -- What cannot be told


def test_counts_that_are_written_as_numbers_need_whole() -> None:
    report = pw.check_manual(quarter, (("dp", None),), None, (X,), mesh={"dp": 4}, whole=torch.mean)
    assert report
    assert report.unknown == ()
    report = pw.check_manual(half, (("dp", None),), None, (X,), mesh={"dp": 4}, whole=torch.mean)
    assert report.findings == ()
    assert report.unknown == (
        "why output 0 is wrong: on one rank half does not compute what whole does, so that no value on the way is "
        "known; let it ask pw.axis_size and pw.axis_index in place of numbers",
    )


def test_a_program_that_fails_on_one_rank_needs_whole() -> None:
    assert pw.check_manual(in_rows, (("dp", None),), None, (torch.randn(16, 6),), mesh={"dp": 2}, whole=torch.sum)
    with pytest.raises(RuntimeError, match=r"shape '\[2, 24\]' is invalid") as caught:
        pw.check_manual(in_rows, (("dp", None),), None, (torch.randn(16, 6),), mesh={"dp": 2})
    assert caught.value.__notes__ == [
        "check_manual runs in_rows on one rank with everything whole, to know what it should compute; let it ask "
        "pw.axis_size and pw.axis_index in place of numbers, or pass whole"
    ]


def test_random_numbers_cannot_be_compared() -> None:
    def noisy(x: Tensor) -> Tensor:
        return F.dropout(x, 0.5)

    report = pw.check_manual(noisy, (("dp", None),), (("dp", None),), (X,), mesh={"dp": 2})
    assert not report
    assert report.unknown[-1] == (
        f"random numbers are drawn at {line_of(noisy, 'dropout')}: what they are differs from one device"
    )
    own = torch.Generator()
    report = pw.check_manual(lambda x: x + torch.rand(1, generator=own), args=(X,), mesh={"dp": 2})
    assert "random numbers are drawn at" in report.unknown[-1]
    assert not pw.check_manual(lambda x: F.dropout(x, 0.0), args=(X,), mesh={"dp": 2}).unknown


def test_values_that_are_of_no_layout_for_a_while_are_not_accused() -> None:
    def swapped(x: Tensor) -> Tensor:
        first, second = x.chunk(2)
        return torch.cat([second, first])

    report = pw.check_manual(swapped, (("dp", None),), (("dp", None),), (X,), mesh={"dp": 2})
    assert report.findings == ()
    assert report.unknown == (
        f"why output 0 is wrong: from {line_of(swapped, 'chunk')} on, values are not those of one device in any "
        "layout, which need not be a mistake there",
    )


def test_what_is_not_computed_of_the_arguments() -> None:
    kept: list[Tensor] = []

    def other(x: Tensor) -> Tensor:
        kept.append(torch.full((2,), len(kept), dtype=torch.float64))
        with torch.utils._python_dispatch._disable_current_modes():
            return kept[-1].clone()

    report = pw.check_manual(other, args=(X,), mesh={"dp": 2})
    assert report.unknown == ("why output 0 is wrong: it is not computed of the arguments",)


# -- What it is given


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        (lambda: pw.check_manual(quarter, args=(X,)), pw.StrategyError,
         "check_manual has no mesh to run quarter on; pass mesh={'dp': 2, 'tp': 4}"),
        (lambda: pw.check_manual(quarter, args=X, mesh={"dp": 2}), pw.StrategyError,
         "check_manual takes the arguments of quarter in a tuple, such as (x,), not a Tensor"),
        (lambda: pw.check_manual(lambda x: None, args=(X,), mesh={"dp": 2}), pw.StrategyError,
         " returns no tensors, so that there is nothing to check; return its results"),
        (lambda: pw.check_manual(lambda x: x, args=(X,), mesh={"dp": 2}, whole=lambda x: (x, x)), pw.StrategyError,
         " returns 1 tensors on a rank, and 2 on one device; let it return the same everywhere"),
        (lambda: pw.check_manual(lambda x: [x] * (1 + pw.axis_index()), args=(X,), mesh={"dp": 2}), pw.StrategyError,
         " returns 1 or 2 tensors on a rank, and 1 on one device; let it return the same everywhere"),
        (lambda: pw.check_manual(lambda x: x, (("tp", None),), None, (X,), mesh={"dp": 2}), pw.StrategyError,
         "'tp'"),
        (lambda: pw.check_manual(lambda x: x, (("dp", None),), None, (X,), mesh={"dp": 3}), pw.StrategyError,
         "dim 0 of [8, 6] has 8 elements, which 3 ranks cannot share evenly"),
        (lambda: pw.check_manual(3, args=(X,), mesh={"dp": 2}), pw.StrategyError,
         "check_manual takes a function or an nn.Module object with a forward, not 3"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_told(given: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        given()


def test_ranks_that_do_not_meet_are_named() -> None:
    def some(x: Tensor) -> Tensor:
        return ops.all_reduce(x, group="dp") if pw.axis_index("dp") == 0 else x

    with pytest.raises(pw.CaptureError) as caught:
        pw.check_manual(some, args=(X,), mesh={"dp": 2})
    assert str(caught.value) == (
        "ranks do not meet: rank 0 calls all_reduce over dp; rank 1 has ended; let all ranks of a group call the same "
        "collectives"
    )

    def others(x: Tensor) -> Tensor:
        return ops.all_reduce(x, group="dp") if pw.axis_index("dp") == 0 else ops.all_gather(x, 0, group="dp")

    with pytest.raises(pw.CaptureError, match="rank 0 calls all_reduce over dp; rank 1 calls all_gather over dp"):
        pw.check_manual(others, args=(X,), mesh={"dp": 2})


def test_what_a_rank_raises_is_raised() -> None:
    def some(x: Tensor) -> Tensor:
        if pw.axis_index("dp") == 1:
            raise ValueError("rank 1 does not want to")
        return ops.all_reduce(x, group="dp")

    with pytest.raises(ValueError, match="rank 1 does not want to"):
        pw.check_manual(some, args=(X,), mesh={"dp": 2})


# -- Every collective


def both_ways(x: Tensor) -> Tensor:
    return ops.all_to_all(ops.all_to_all(x, 0, 1, group="dp"), 1, 0, group="dp")


def to_itself(x: Tensor) -> Tensor:
    rank = pw.axis_index("dp")
    return torch.cat(ops.neighbor_exchange([x[:1], x[1:]], [rank] * 2, [rank] * 2))


def from_the_first(x: Tensor) -> Tensor:
    return x * ops.broadcast(x.sum(), 0, group="dp") / ops.broadcast(x.sum(), 0, group="dp")


def largest(x: Tensor) -> Tensor:
    return x / ops.all_reduce(x.amax(), "max", group="dp")


@pytest.mark.parametrize("fn", [both_ways, to_itself, from_the_first, largest])
def test_collectives_do_on_threads_what_they_do_on_ranks(fn: Callable[[Tensor], Tensor]) -> None:
    assert pw.check_manual(fn, (("dp", None),), (("dp", None),), (X,), mesh={"dp": 2})


def test_what_is_sent_must_be_expected() -> None:
    def lost(x: Tensor) -> Tensor:
        rank, size = pw.axis_index("dp"), pw.axis_size("dp")
        ops.neighbor_exchange([x], [(rank + 1) % size], [(rank + 1) % size], [(9, 6)])
        return x

    with pytest.raises(pw.CaptureError, match="expects a tensor"):
        pw.check_manual(lost, (("dp", None),), (("dp", None),), (X,), mesh={"dp": 4}, whole=lambda x: x)
