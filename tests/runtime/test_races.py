"""A collective may run at any moment until it is waited for: numbers are the same at the worst of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from checks import gradients_of, loss_of, whole
from late import late
from torch import Tensor
from zoo import CASES

import partway as pw
from partway.runtime.executors.issue import Pending
from partway.runtime.ranks.stragglers import waits

pytestmark = [pytest.mark.gloo, pytest.mark.deep]

Ranks = Callable[..., list[Any]]
RUNS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # name: a model, arguments of shard, options
    "gradients": ("gpt2", {"mesh": {"dp": 2}, "in_strategy": "batch"}, {}),
    "gradients, grouped for overlap": (
        "gpt2", {"mesh": {"dp": 2}, "in_strategy": "batch"}, {"comm_fusion": {"allreduce": {"mode": "overlap"}}},
    ),
    "weights, gathered and scattered": (
        "gpt2", {"mesh": {"dp": 2}, "in_strategy": "batch", "parameter_plan": {"*": "zero"}}, {},
    ),
    "a block": ("gpt2", {"mesh": {"tp": 2}, "parameter_plan": "block"}, {}),
    "batch norms": ("convnet", {"mesh": {"dp": 2}, "in_strategy": "batch"}, {}),
    "halos": ("convnet", {"mesh": {"x": 2}, "in_strategy": {"pixel_values": (None, None, None, "x")}}, {}),
    "all to all": ("llama", {"mesh": {"tp": 2}, "parameter_plan": "block"}, {}),
}  # fmt: skip


def trained(name: str) -> tuple[list[float], list[Any], Any]:
    """Two steps of a run with accumulated gradients between, and what is left in the parameters."""
    model_name, given, options = RUNS[name]
    case = CASES[model_name]
    arguments = dict(given)
    if arguments.get("in_strategy") == "batch":
        arguments["in_strategy"] = case.batch_split("dp")
    if arguments.get("parameter_plan") == "block":
        arguments["parameter_plan"] = case.block_split("tp")
    plain = case.build()
    if arguments.get("parameter_plan") == {"*": "zero"}:
        arguments["parameter_plan"] = {
            parameter: ("dp", *[None] * (p.dim() - 1))
            for parameter, p in plain.named_parameters()
            if p.shape[0] % 2 == 0
        }
    losses, batch = [], case.batch()
    with pw.auto_parallel_context(**options):
        model: Any = pw.shard(plain, **arguments)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(2):
            for part in range(2):
                loss = loss_of(model(**batch)) / (1 + part)
                loss.backward()
            losses.append(whole(loss.detach()).item())
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            found = whole(gradients_of(model))
            optimizer.step()
            optimizer.zero_grad()
    return (
        losses,
        [gradient for gradient in found.values() if gradient is not None],
        whole(dict(model.named_parameters())),
    )


def same_when_late(name: str) -> int:
    counts = [0]
    torch.manual_seed(1)
    expected = trained(name)
    torch.manual_seed(1)
    with late(counts):
        found = trained(name)
    if torch.get_default_device().type == "cuda":  # which adds in another order each time
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    else:
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    return counts[0]


@pytest.mark.parametrize("name", RUNS)
def test_a_step_whose_collectives_are_late_has_the_same_numbers(on_ranks: Ranks, name: str) -> None:
    assert min(on_ranks(2, same_when_late, name)) > 4


def fails_without_waiting(name: str) -> None:
    """A result that is read before it was waited for, and memory that is written while it is sent, change numbers."""
    plain, works = Pending.wait, []

    def hasty(self: Any) -> Any:
        results = self._finish()
        with waits():
            for work in self.works:
                work.wait()
        works.append(self)
        return results[0] if self._single else results

    Pending.wait = hasty  # type: ignore[method-assign]
    try:
        with pytest.raises((AssertionError, RuntimeError)):
            same_when_late(name)
    finally:
        Pending.wait = plain  # type: ignore[method-assign]
    assert works


def test_the_test_tells_a_result_that_is_read_too_early(on_ranks: Ranks) -> None:
    on_ranks(2, fails_without_waiting, "weights, gathered and scattered")


def written_while_it_is_sent() -> Tensor:
    """The sum over ranks of what is doubled before it is waited for."""
    x = torch.ones(3)
    with late([0]):
        work = torch.distributed.all_reduce(x, async_op=True)
        x.mul_(2)
        work.wait()
    return x


def test_the_test_tells_memory_that_is_written_too_early(on_ranks: Ranks) -> None:
    for found in on_ranks(2, written_while_it_is_sent):
        if not found.is_cuda:
            assert found.tolist() == [4.0] * 3


def gathers() -> tuple[Any, Any]:
    """What somebody reads of split tensors by themselves."""
    case = CASES["gpt2"]
    model: Any = pw.shard(case.build(), mesh={"tp": 2}, parameter_plan=case.block_split("tp"))
    model(**case.batch())
    read = [lambda p: p.sum(0), lambda p: p.flatten()[::3].clone(), torch.linalg.vector_norm]
    parameters = [p for p in model.parameters() if p.dim() == 2]

    def values() -> list[Tensor]:
        return [whole(of(p.detach())) for p in parameters for of in read]

    expected = values()
    with late([0]):
        return values(), expected


def test_what_is_read_of_a_split_tensor_is_the_same_when_it_comes_late(on_ranks: Ranks) -> None:
    for found, expected in on_ranks(2, gathers):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
