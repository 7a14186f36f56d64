"""`partway bench experts`: a layer of experts trained on tokens of all ranks, in the forms that it can be split in.

All contenders live in the same processes and take turns, a step each, as in `partway bench fusion`. With 2 experts for
each of T tokens of width d on n ranks, and experts of W numbers, a rank sends so many numbers in a step, forward and
backward:

    experts split, tokens exchanged     4 (n-1)/n 2T/n d: there and back, and so do their gradients
    experts whole                       2 (n-1)/n W: gradients are summed
    features split                      the tokens, gathered, and their results, summed

"by hand" exchanges tokens as torchtitan's dispatcher does: counts, then rows by `all_to_all_single`, sorted by expert.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import ProcessException, spawn

from partway.measure.calibrate import threads_of
from partway.measure.collectives import MB
from partway.measure.contenders import (
    Contender,
    ddp,
    disagreements,
    one_rank,
    ours,
    part,
    quartiles,
    spread,
    timed_step,
    turns,
)
from partway.measure.workloads import Mixture, Workload, mixture
from partway.runtime import record_collectives
from partway.strategy import RuntimeStateError, counted

CHOSEN, BY_HAND = "partway", "by hand"
FORMS: Mapping[str, Mapping[str, tuple[str | None, ...]]] = {
    CHOSEN: {},
    "partway, experts split": dict.fromkeys(("gate", "up", "down"), ("ep", None, None)),
    "partway, experts whole": dict.fromkeys(("gate", "up", "down"), (None, None, None)),
    "partway, features split": {"gate": (None, None, "ep"), "up": (None, None, "ep"), "down": (None, "ep", None)},
}


# -- The contenders ----------------------------------------------------------------------------------------------------


def contenders_of(work: Workload, world: int, dtype: torch.dtype) -> list[Contender]:
    """Each form of Partway's, the exchange by hand, DDP, and fully_shard."""
    forms = [_form(name, work, world, dtype, plan) for name, plan in FORMS.items()]
    model = work.model(dtype)
    fully_shard(model)
    mine = part(work, world, dist.get_rank(), dtype)
    return [
        *forms,
        by_hand(work, world, dtype),
        ddp(work, world, dtype),
        Contender("FSDP2", model, lambda: model(*mine)),
    ]


def _form(name: str, work: Workload, world: int, dtype: torch.dtype, plan: Mapping[str, Any]) -> Contender:
    arguments = {"mesh": {"ep": world}, "in_strategy": work.by("ep"), "parameter_plan": dict(plan) or None}
    return ours(name, work, world, dtype, {}, arguments)


def by_hand(work: Workload, world: int, dtype: torch.dtype) -> Contender:
    """Experts split over the ranks, which send each other the rows of their tokens."""
    model = cast("Mixture", work.model(dtype))
    x, target = part(work, world, dist.get_rank(), dtype)
    own = model.experts // world
    for name in ("gate", "up", "down"):
        whole = getattr(model, name).detach()
        setattr(model, name, nn.Parameter(whole[own * dist.get_rank() :][:own].clone()))

    def forward() -> Tensor:
        return nn.functional.mse_loss(_exchanged(model, x, world), target)

    def backward(loss: Tensor) -> None:
        (loss / world).backward()
        dist.all_reduce(model.router.weight.grad)

    return Contender(BY_HAND, model, forward, backward, dict.fromkeys(("gate", "up", "down"), 0))


class _RowExchange(torch.autograd.Function):
    """An exchange of rows, and of their gradients back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, leaving: list[int], coming: list[int]) -> Tensor:
        ctx.leaving, ctx.coming = leaving, coming
        out = rows.new_empty(sum(coming), rows.shape[1])
        dist.all_to_all_single(out, rows.contiguous(), coming, leaving)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _rows_sent(gradients[0], ctx.coming, ctx.leaving), None, None


def _rows_sent(rows: Tensor, leaving: list[int], coming: list[int]) -> Tensor:
    sent: Tensor = _RowExchange.apply(rows, leaving, coming)  # type: ignore[no-untyped-call]
    return sent


def _exchanged(model: Mixture, x: Tensor, world: int) -> Tensor:
    weights, ids = model.chosen(x)
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    counts = flat.bincount(minlength=model.experts)
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts)
    leaving = counts.view(world, -1).sum(1).tolist()
    coming = received.view(world, -1).sum(1).tolist()
    token = order // model.each
    arrived = _rows_sent(x[token], leaving, coming)
    of_expert = torch.arange(len(counts) // world).repeat(world).repeat_interleave(received)
    by_expert = of_expert.argsort(stable=True)
    ends = received.view(world, -1).sum(0).cumsum(0).int()
    made = model.computed(arrived[by_expert], ends)
    placed = torch.empty_like(made).index_put((by_expert,), made)
    back = _rows_sent(placed, coming, leaving)
    return torch.zeros_like(x).index_add(0, token, back * weights.flatten()[order].unsqueeze(1))


# -- Figures -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ExpertsCase:
    """The arguments of every process: `tokens` are those of one rank."""

    world: int
    rounds: int
    tokens: int
    width: int
    hidden: int
    experts: int
    k: int

    @property
    def work(self) -> Workload:
        """The layer, with its batch."""
        return mixture(self.width, self.hidden, self.experts, self.k, self.tokens)

    @property
    def small(self) -> Workload:
        """The same layer with narrow experts and few tokens, to be checked in float64."""
        return mixture(16, 24, self.experts, self.k, 16)


@dataclass(frozen=True)
class ExpertsResult:
    """The seconds of each contender's steps, one for each round, and the bytes that Partway's collectives take."""

    case: ExpertsCase
    seconds: Mapping[str, tuple[float, ...]]
    collectives: Mapping[str, int]
    bytes: Mapping[str, int]
    facts: Mapping[str, Any] = field(default_factory=dict)

    def ratios(self, name: str) -> tuple[float, ...]:
        """The step of a contender over that by hand, round by round."""
        return tuple(a / b for a, b in zip(self.seconds[name], self.seconds[BY_HAND], strict=True))

    def report(self, width: int = 120) -> str:
        """The table of all contenders."""
        c, text = self.case, StringIO()
        heading = (
            f"{counted(c.experts, 'expert')} of {c.width} and {c.hidden} features, {c.k} of them for each of "
            f"{c.tokens:,} tokens on each of {counted(c.world, 'process', 'processes')}: milliseconds of a step, "
            "median (min-max)"
        )
        table = Table(title=heading, title_justify="left", box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
        table.add_column("contender", no_wrap=True)
        for name in ("collectives", "MB", "step", f"÷ {BY_HAND} (quartiles)"):
            table.add_column(name, justify="right", no_wrap=True)
        for name, seconds in self.seconds.items():
            known = name in self.bytes
            figures = (str(self.collectives[name]), f"{self.bytes[name] / MB:.2f}") if known else ("", "")
            table.add_row(name, *figures, spread(seconds), quartiles(self.ratios(name)))
        Console(file=text, width=width).print(table)
        return text.getvalue()

    def data(self) -> dict[str, Any]:
        """Everything, as JSON values."""
        medians = {name: statistics.median(self.ratios(name)) for name in self.seconds}
        return {**asdict(self), "over_by_hand": medians}


# -- Measuring ---------------------------------------------------------------------------------------------------------


def bench_experts(
    world: int = 2,
    rounds: int = 15,
    *,
    tokens: int = 1024,
    width: int = 256,
    hidden: int = 896,
    experts: int = 8,
    k: int = 2,
    quick: bool = False,
) -> ExpertsResult:
    """Compare the forms on `world` processes of this machine, on gloo.

    tokens, width, hidden, experts, k    of the layer: tokens of each process, features of a token and inside of an
                                         expert, and the experts of each token
    quick                                a small layer and few rounds: everything runs, and the times mean nothing

    Raises RuntimeStateError for numbers that make no layer, and with the message of a process that fails.
    """
    if quick:
        rounds, tokens, width, hidden = 2, 64, 16, 24
    numbers = {"world": world, "rounds": rounds, "tokens": tokens, "width": width, "hidden": hidden, "k": k}
    for name, number in numbers.items():
        if number < 1:
            raise RuntimeStateError(f"{name} is {number}; it must be 1 or more")
    if experts < k or experts % world:
        raise RuntimeStateError(
            f"{counted(experts, 'expert')}: there must be at least k = {k}, and as many on each of {world} processes"
        )
    case = ExpertsCase(world, rounds, tokens, width, hidden, experts, k)
    with tempfile.TemporaryDirectory() as folder:
        try:
            spawn(_rank, (case, folder), nprocs=world)
        except ProcessException as error:
            raise RuntimeStateError(f"a process failed: {error}") from error
        ranks = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(world)]
    names = ranks[0]["seconds"]
    slowest = {name: tuple(map(max, zip(*(rank["seconds"][name] for rank in ranks), strict=True))) for name in names}
    facts = {"torch": torch.__version__, "cores": os.cpu_count(), "threads": threads_of(world)}
    return ExpertsResult(case, slowest, ranks[0]["collectives"], ranks[0]["bytes"], facts)


def _rank(rank: int, case: ExpertsCase, folder: str) -> None:
    """One process: check every contender, count the collectives of Partway's, and time them all."""
    with one_rank(rank, case.world, folder, threads_of(case.world)):
        check(case.small, case.world)
        contenders = contenders_of(case.work, case.world, torch.float32)
        sent: dict[str, dict[str, int]] = {"collectives": {}, "bytes": {}}
        for contender in contenders:
            if contender.name in FORMS:
                with contender.context(), record_collectives() as events:
                    contender.backward(contender.forward())
                contender.module.zero_grad()
                sent["collectives"][contender.name] = len(events)
                sent["bytes"][contender.name] = sum(event.payload_bytes for event in events)
        seconds, _ = turns({each.name: timed_step(each) for each in contenders}, case.rounds)
        Path(folder, f"{rank}.json").write_text(json.dumps({"seconds": seconds, **sent}))


def check(small: Workload, world: int) -> None:
    """Raise RuntimeStateError if a contender does not compute what one device does, in float64. Every rank calls it."""
    for contender in contenders_of(small, world, torch.float64):
        if wrong := list(disagreements(contender, small, world, torch.float64)):
            raise RuntimeStateError("\n".join([f"{contender.name} does not compute what one device does", *wrong]))
