"""The effects of one rank of a launched program that differs from the others: the error of each rank, and the time
until it.

    python tests/conformance/ranks.py                 all cases; writes docs/coverage/ranks.md
    python tests/conformance/ranks.py seed annotation only the named ones

Each case is a training script that 2 processes run on gloo with a timeout of 10 s; rank 1 does one thing differently.
The recorded text of a rank is the error that ends it. A rank without an error trains on for MOST steps, and all are
killed in the end, so neither `shutdown` nor the end of a process reports anything. A rank without an error has to have
the losses of one device: a silent wrong number is the one failure that is not allowed.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import itertools
import json
import multiprocessing
import os
import random
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

import partway as pw

PAGE = Path(__file__).parents[2] / "docs" / "coverage" / "ranks.md"
TIMEOUT, SLACK = 10, 15  # seconds; the slack is for a busy machine, and for the end of a process
MOST, AT, LOOKED_AT = 400, 3, 40  # a rank differs from step AT on, or before the first; losses that are compared
PAUSE = 0.01  # seconds of a step, besides its computation


class Model(nn.Module):
    """Two layers; the second is split over ranks if `parameter_plan` requests it."""

    def __init__(self, width: int = 8, drop: float = 0.0) -> None:
        super().__init__()
        self.a, self.b, self.dropout = nn.Linear(8, width), nn.Linear(width, 8), nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.dropout(torch.relu(self.a(x)))).square().mean()


class Features(Model):
    """The same without a loss, which is computed outside; with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(x))) * self.scale


@dataclass
class Script:
    """One rank's run of the training script. A case changes it if `other` is true, as on rank 1."""

    rank: int
    mark: Callable[[int], None]  # the rank begins to differ, in a step
    options: dict[str, Any] = field(default_factory=dict)
    algo: dict[str, Any] = field(default_factory=dict)
    given: dict[str, Any] = field(default_factory=lambda: {"mesh": {"dp": 2}, "in_strategy": (("dp", None),)})
    model: Callable[[], nn.Module] = Model
    optimizer: Callable[[Any], Any] = lambda parameters: torch.optim.SGD(parameters, lr=0.01)
    prepared: Callable[[nn.Module], None] = lambda model: None
    sharded: Callable[[Any], None] = lambda model: None
    batch: Callable[[int, Tensor], Tensor] = lambda step, x: x
    around: Callable[[Any, int], Any] = lambda model, step: nullcontext()
    stepped: Callable[[Any, int, Tensor], bool] = lambda model, step, x: False  # True: this step is skipped
    criterion: Callable[[int, Tensor], Tensor] = lambda step, loss: loss
    learns: Callable[[int], bool] = lambda step: True
    changes: Callable[[Any, Any, int], None] = lambda model, optimizer, step: None  # between a backward and a step
    follows: Callable[[int], bool] = lambda step: True
    local: bool = False
    whole: Callable[[int, Tensor], Tensor] = lambda step, x: x  # the batch on one device

    @property
    def other(self) -> bool:
        return self.rank == 1

    def differs(self, step: int) -> bool:
        """Whether rank 1 is at the step in which it differs; the time is measured from then on."""
        if self.other and step == AT:
            self.mark(step)
            return True
        return False

    def differs_from(self, step: int) -> bool:
        """As `differs`, and at each later step."""
        return self.differs(step) or (self.other and step > AT)

    def act(self, act: Callable[[Any, Any], Any], model: type[nn.Module] = Model) -> None:
        """Let rank 1 `act` on the model and its optimizer between the backward and the step of step AT."""

        def changes(model: Any, optimizer: Any, step: int) -> None:
            if self.differs(step):
                with torch.no_grad():
                    act(model, optimizer)

        self.model, self.changes = model, changes
        if model is Features:
            self.criterion = lambda step, out: out.square().mean()

    def run(self, losses: list[float], tell: Callable[[int], None]) -> None:
        """Train, append to `losses`, and `tell` the number of each step."""
        pw.set_auto_parallel_context(**self.options)
        pw.set_algo_parameters(**self.algo)
        torch.manual_seed(0)
        model = self.model()
        self.prepared(model)
        sharded: Any = pw.shard(model, **self.given)
        self.sharded(sharded)
        optimizer = self.optimizer(sharded.parameters())
        torch.manual_seed(1)
        for step, whole in zip(range(MOST), batches(), strict=False):
            tell(step)
            x = self.batch(step, whole.chunk(2)[self.rank] if self.local else whole)
            if self.stepped(sharded, step, x):
                continue
            with self.around(sharded, step):
                loss = self.criterion(step, sharded(x))
                if self.learns(step) and loss.requires_grad:
                    loss.backward()
                    self.changes(sharded, optimizer, step)
                    if self.follows(step):
                        optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            time.sleep(PAUSE)


def batches() -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return itertools.cycle(torch.randn(6, 4, 8, generator=generator))


def expected(name: str) -> list[float]:
    """The first losses of one device."""
    script = Script(0, lambda step: None)
    CASES[name].change(script)
    torch.manual_seed(0)
    model = script.model()
    optimizer = script.optimizer(model.parameters())
    torch.manual_seed(1)
    losses = []
    for step, x in zip(range(LOOKED_AT), batches(), strict=False):
        loss = script.criterion(step, model(script.whole(step, x)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# -- the cases, in the order of the page: each changes the script of a rank

Change = Callable[[Script], None]


@dataclass(frozen=True)
class Case:
    """The difference in words, and the function that causes it; `unseen`: why it cannot be detected if tensors are
    split."""

    words: str
    change: Change
    unseen: str = ""


CASES: dict[str, Case] = {}


def case(words: str, unseen: str = "") -> Callable[[Change], Change]:
    def add(found: Change) -> Change:
        CASES[found.__name__] = Case(words, found, unseen)
        return found

    return add


@case("nothing differs")
def nothing(s: Script) -> None: ...


@case("`parameter_plan` names another parameter")
def annotation(s: Script) -> None:
    s.given["parameter_plan"] = {"b.weight" if s.other else "a.weight": ("dp", None)}


@case("another `in_strategy`")
def in_strategy(s: Script) -> None:
    s.given["in_strategy"] = ((None, "dp") if s.other else ("dp", None),)


@case("the axes of the mesh in another order")
def mesh_order(s: Script) -> None:
    s.given |= {"mesh": {"tp": 1, "dp": 2} if s.other else {"dp": 2, "tp": 1}}


@case("another `level`")
def level(s: Script) -> None:
    s.given["level"] = int(s.other)


@case("`gradients_mean=False`")
def gradients_mean(s: Script) -> None:
    s.options["gradients_mean"] = not s.other


@case("another `search_mode`")
def search_mode(s: Script) -> None:
    s.options["search_mode"] = "recursive_programming" if s.other else "dynamic_programming"


@case("another option of the algorithm")
def algorithm(s: Script) -> None:
    s.algo["fully_use_devices"] = not s.other


@case("another `comm_fusion`")
def comm_fusion(s: Script) -> None:
    s.options["comm_fusion"] = {"allreduce": {"mode": "index", "config": [1 + s.other]}}


@case("`enable_parallel_optimizer` on one rank")
def parallel_optimizer(s: Script) -> None:
    s.options |= {
        "enable_parallel_optimizer": s.other, "parallel_optimizer_config": {"parallel_optimizer_threshold": 0}
    }  # fmt: skip


@case("`parameter_broadcast` on one rank")
def parameter_broadcast(s: Script) -> None:
    s.options["parameter_broadcast"] = s.other


@case("another `device_profile`")
def profile(s: Script) -> None:
    from partway.propagation.cost.profile import profile_of

    found = profile_of("cpu")
    found = found.model_copy(update={"memory_bandwidth": found.memory_bandwidth * (1 + s.other)})
    path = Path(tempfile.mkdtemp()) / "profile.json"
    path.write_text(found.model_dump_json(), encoding="utf-8")
    s.options["device_profile"] = str(path)


@case("one rank follows a saved plan, the other one searches")
def saved_plan(s: Script) -> None:
    if s.other:
        made = pw.compile(Model(), (next(batches()),), mesh={"dp": 2}, in_strategy=(("dp", None),))
        path = Path(tempfile.mkdtemp()) / "plan.json"
        made.plan.save(path)
        s.given["plan"] = str(path)


@case("a model with another seed")
def model_seed(s: Script) -> None:
    s.prepared = lambda model: nn.init.constant_(model.a.weight, 0.5 + s.rank)  # type: ignore[union-attr,arg-type]


@case("a model with another width")
def model_width(s: Script) -> None:
    s.model = lambda: Model(8 + 8 * s.rank)


@case("another forward")
def model_code(s: Script) -> None:
    class Other(Model):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2

    Other.__name__ = "Model"
    s.model = Other if s.other else Model


@case("the first batch has other values")
def first_values(s: Script) -> None:
    s.batch = lambda step, x: x + s.rank


@case("the first batch has another size")
def first_size(s: Script) -> None:
    s.batch = lambda step, x: x[: 4 - 2 * s.rank]


@case("`eval()` before the first call")
def first_eval(s: Script) -> None:
    s.sharded = lambda model: model.train(not s.other)


@case("a parameter that needs no gradient")
def frozen(s: Script) -> None:
    s.sharded = lambda model: model.a.weight.requires_grad_(not s.other)


@case("another seed before the first call of a model with dropout")
def first_seed(s: Script) -> None:
    s.model = lambda: Model(drop=0.5)
    s.batch = lambda step, x: (torch.manual_seed(5) if s.other and step == 0 else None, x)[1]


@case("another seed in a later step, with dropout")
def later_seed(s: Script) -> None:
    s.model = lambda: Model(drop=0.5)
    s.batch = lambda step, x: (torch.manual_seed(5) if s.differs(step) else None, x)[1]


@case("a later batch has other values")
def later_values(s: Script) -> None:
    s.batch = lambda step, x: x + 1 if s.differs(step) else x


@case("a later batch has another size")
def later_size(s: Script) -> None:
    s.batch = lambda step, x: x[:2] if s.differs(step) else x


@case("a later batch has another dtype")
def later_dtype(s: Script) -> None:
    def around(model: Any, step: int) -> Any:
        return torch.autocast("cpu", torch.bfloat16) if s.differs(step) else nullcontext()

    s.around = around


@case("`eval()` in a later step")
def later_eval(s: Script) -> None:
    s.model = lambda: Model(drop=0.5)
    s.batch = lambda step, x: x
    s.around = lambda model, step: (model.eval() if s.differs(step) else None, nullcontext())[1]


@case("`no_grad` in a later step")
def later_no_grad(s: Script) -> None:
    s.around = lambda model, step: torch.no_grad() if s.differs(step) else nullcontext()


@case("a later step is skipped")
def skipped_step(s: Script) -> None:
    s.stepped = lambda model, step, x: s.differs(step)


@case("a later backward is skipped")
def skipped_backward(s: Script) -> None:
    s.learns = lambda step: not s.differs(step)


@case("a later step of the optimizer is skipped")
def skipped_optimizer(s: Script) -> None:
    s.follows = lambda step: not s.differs(step)


@case("`requires_grad_(False)` in a later step")
def later_frozen(s: Script) -> None:
    s.around = lambda model, step: (
        model.a.weight.requires_grad_(False) if s.differs(step) else None, nullcontext()
    )[1]  # fmt: skip


@case("`no_sync` on one rank")
def no_sync(s: Script) -> None:
    s.around = lambda model, step: model.no_sync() if s.differs(step) else nullcontext()


@case("`full_tensor` on one rank")
def full_tensor(s: Script) -> None:
    s.given["parameter_plan"] = {"a.weight": ("dp", None)}
    s.around = lambda model, step: (model.a.weight.full_tensor() if s.differs(step) else None, nullcontext())[1]


@case("another order of calls of two models")
def order(s: Script) -> None:
    def sharded(model: Any) -> None:
        s.second = pw.shard(Model(), **s.given)  # type: ignore[attr-defined]

    def around(model: Any, step: int) -> Any:
        if s.differs(step) or (not s.other and step == AT + 1):
            s.second(next(batches()))  # type: ignore[attr-defined]
        return nullcontext()

    s.sharded, s.around = sharded, around


@case("a shorter last part, under `dataset_strategy`, in every call")
def short_part(s: Script) -> None:
    s.local, s.options["dataset_strategy"] = True, "data_parallel"
    s.given = {"mesh": {"dp": 2}}
    s.batch = lambda step, x: x[: 2 - s.rank]
    s.whole = lambda step, x: x[:3]


@case("parts of other sizes than torch.chunk gives, under `dataset_strategy`")
def odd_parts(s: Script) -> None:
    short_part(s)
    s.batch = lambda step, x: torch.cat((x, x))[: 4 - 3 * s.rank]
    s.whole = lambda step, x: x[[0, 1, 0, 1, 2]]


@case("a shorter part in a later call of one rank, under `dataset_strategy`")
def later_short_part(s: Script) -> None:
    short_part(s)
    s.batch = lambda step, x: x[:1] if s.differs(step) else x
    s.whole = lambda step, x: x[:3] if step == AT else x


# replicas, outside the forward


@case("another learning rate from a later step on")
def learning_rate(s: Script) -> None:
    s.act(lambda model, optimizer: optimizer.param_groups[0].update(lr=0.02))


@case("another learning rate in the first step")
def first_learning_rate(s: Script) -> None:
    s.optimizer = functools.partial(torch.optim.SGD, lr=0.02 if s.other else 0.01)


@case("one rank steps a scheduler")
def scheduler(s: Script) -> None:
    made: list[Any] = []

    def act(model: Any, optimizer: Any) -> None:
        made.append(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9))
        made[0].step()

    s.act(act)


@case("another `weight_decay`")
def weight_decay(s: Script) -> None:
    s.optimizer = torch.optim.AdamW
    s.act(lambda model, optimizer: optimizer.param_groups[0].update(weight_decay=0.5))


@case("other `betas`")
def betas(s: Script) -> None:
    s.optimizer = torch.optim.AdamW
    s.act(lambda model, optimizer: optimizer.param_groups[0].update(betas=(0.5, 0.9)))


@case("an optimizer of another class")
def optimizer_class(s: Script) -> None:
    s.optimizer = functools.partial(torch.optim.RMSprop if s.other else torch.optim.SGD, lr=0.01)


@case("one parameter is not in the optimizer")
def optimizer_parameters(s: Script) -> None:
    s.optimizer = lambda parameters: torch.optim.SGD(list(parameters)[s.rank :], lr=0.01)


@case("a write to a state of the optimizer")
def optimizer_state(s: Script) -> None:
    s.optimizer = torch.optim.AdamW
    s.act(lambda model, optimizer: optimizer.state[model.a.weight]["exp_avg"].mul_(2))


@case("another count of the optimizer's steps")
def optimizer_count(s: Script) -> None:
    s.optimizer = torch.optim.AdamW
    s.act(lambda model, optimizer: optimizer.state[model.a.weight]["step"].add_(5))


@case("the optimizer's state is loaded on one rank")
def optimizer_loaded(s: Script) -> None:
    s.optimizer = torch.optim.AdamW

    def act(model: Any, optimizer: Any) -> None:
        kept = optimizer.state_dict()
        for state in kept["state"].values():
            state["exp_avg_sq"] = state["exp_avg_sq"] * 4
        optimizer.load_state_dict(kept)

    s.act(act)


@case("an additional step of the optimizer")
def optimizer_twice(s: Script) -> None:
    s.act(lambda model, optimizer: optimizer.step())


@case("scaled gradients")
def gradients_scaled(s: Script) -> None:
    s.act(lambda model, optimizer: [p.grad.mul_(2) for p in model.parameters()])


@case("one replaced gradient")
def gradient_replaced(s: Script) -> None:
    s.act(lambda model, optimizer: setattr(model.b.weight, "grad", model.b.weight.grad * 2))


@case("zeroed gradients")
def gradients_zeroed(s: Script) -> None:
    s.act(lambda model, optimizer: optimizer.zero_grad(set_to_none=False))


@case("gradients that are set to None")
def gradients_left_out(s: Script) -> None:
    s.act(lambda model, optimizer: optimizer.zero_grad())


@case("gradients that are not zeroed")
def gradients_kept(s: Script) -> None:
    s.optimizer = _Keeps if s.other else functools.partial(torch.optim.SGD, lr=0.01)


class _Keeps(torch.optim.SGD):
    """An optimizer that does not zero the gradients once."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.01)
        self.calls = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.calls += 1
        if self.calls != AT:
            super().zero_grad(set_to_none)


_Keeps.__name__ = _Keeps.__qualname__ = "SGD"


@case("`clip_grad_value_`")
def clip_value(s: Script) -> None:
    s.act(lambda model, optimizer: nn.utils.clip_grad_value_(model.parameters(), 1e-6))


@case("`clip_grad_norm_` to another norm")
def clip_norm(s: Script) -> None:
    def changes(model: Any, optimizer: Any, step: int) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3 if s.differs_from(step) else 1e3)

    s.changes = changes


@case("noise on a gradient", "no other rank has the gradient of a rank's own part, which may have any values")
def gradient_noise(s: Script) -> None:
    generator = torch.Generator().manual_seed(7)
    s.act(lambda model, optimizer: _local(model.a.weight.grad).add_(torch.randn(8, generator=generator)))


def _local(tensor: Any) -> Any:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@case("a hook on a parameter", "no other rank has the gradient of a rank's own part, which may have any values")
def hook(s: Script) -> None:
    s.act(lambda model, optimizer: model.a.weight.register_hook(lambda gradient: gradient * 2))


@case("a hook on a parameter's accumulated gradient")
def accumulated_hook(s: Script) -> None:
    def halve(parameter: Any) -> None:
        parameter.grad = parameter.grad * 0.5

    s.act(lambda model, optimizer: model.a.weight.register_post_accumulate_grad_hook(halve))


@case("a write to a weight in place")
def weight_written(s: Script) -> None:
    s.act(lambda model, optimizer: model.a.weight.mul_(1.5))


@case("a write to a weight through `.data`")
def weight_data(s: Script) -> None:
    s.act(lambda model, optimizer: model.a.weight.data.mul_(1.5))


@case("a write to the local part of a weight")
def weight_local(s: Script) -> None:
    s.act(lambda model, optimizer: _local(model.a.weight)[0].add_(1))


@case("a weight copied from another model")
def weight_copied(s: Script) -> None:
    s.act(lambda model, optimizer: model.b.weight.copy_(torch.ones(8, 8)))


@case("a state dict loaded on one rank")
def state_loaded(s: Script) -> None:
    def act(model: Any, optimizer: Any) -> None:
        model.load_state_dict({name: 0.9 * value for name, value in model.state_dict().items()})

    s.act(act)


@case("a write to a buffer")
def buffer(s: Script) -> None:
    s.act(lambda model, optimizer: model.scale.mul_(2), Features)


@case("a replaced buffer")
def buffer_replaced(s: Script) -> None:
    s.act(lambda model, optimizer: setattr(model, "scale", torch.full((8,), 2.0)), Features)


@case("other labels for a loss outside the model")
def labels(s: Script) -> None:
    s.model = Features
    s.criterion = lambda step, out: (out - (1.0 if s.differs_from(step) else 0.0)).square().mean()


@case("another factor of a loss outside the model")
def loss_factor(s: Script) -> None:
    s.model = Features
    s.criterion = lambda step, out: out.square().mean() * (2 if s.differs_from(step) else 1)


@case("another loss outside the model")
def loss_function(s: Script) -> None:
    s.model = Features
    s.criterion = lambda step, out: out.abs().mean() if s.differs_from(step) else out.square().mean()


@case("another batch with `channels_last` strides")
def channels_last(s: Script) -> None:
    s.batch = lambda step, x: (x + s.differs_from(step)).t().contiguous().t()


@case("another batch on ranks that hold the same part, under `dataset_strategy`")
def tensor_parallel_peers(s: Script) -> None:
    s.options["dataset_strategy"] = ((1, 1),)
    s.given = {"mesh": {"tp": 2}, "parameter_plan": {"a.weight": ("tp", None), "b.weight": (None, "tp")}}
    s.batch = lambda step, x: x + s.differs_from(step)


@case("`torch.set_num_threads` with another number")
def threads(s: Script) -> None:
    s.batch = lambda step, x: (torch.set_num_threads(2) if s.differs(step) else None, x)[1]


@case("the state of Python's and NumPy's generators, which the model does not use")
def other_generators(s: Script) -> None:
    def batch(step: int, x: Tensor) -> Tensor:
        if s.differs(step):
            random.seed(5)
            np.random.seed(5)
        return x

    s.batch = batch


# the end of a process, and stopped processes


@case("the loader raises")
def raises(s: Script) -> None:
    def batch(step: int, x: Tensor) -> Tensor:
        if s.differs(step):
            raise OSError("no such shard")
        return x

    s.batch = batch


@case("the process ends early with success")
def ends(s: Script) -> None:
    s.batch = lambda step, x: sys.exit(0) if s.differs(step) else x


@case("the process is killed in a step")
def killed(s: Script) -> None:
    def batch(step: int, x: Tensor) -> Tensor:
        if s.differs(step):
            os.kill(os.getpid(), signal.SIGKILL)
        return x

    s.batch = batch


@case("the process is killed while it plans")
def killed_planning(s: Script) -> None:
    def sharded(model: Any) -> None:
        if s.other:
            s.mark(0)
            os.kill(os.getpid(), signal.SIGKILL)

    s.sharded = sharded


@case("the process is stopped for 3 s")
def stopped(s: Script) -> None:
    s.batch = lambda step, x: (_stop(3) if s.differs(step) else None, x)[1]


@case("the process is stopped for longer than the timeout")
def stopped_long(s: Script) -> None:
    s.batch = lambda step, x: (_stop(TIMEOUT + 6) if s.differs(step) else None, x)[1]


@case("a rank is slow for longer than the timeout")
def slow(s: Script) -> None:
    s.batch = lambda step, x: (time.sleep(TIMEOUT + 6) if s.differs(step) else None, x)[1]


def _stop(seconds: float) -> None:
    """Stop all threads of this process for this long."""
    own = os.getpid()
    if os.fork() == 0:
        time.sleep(seconds)
        os.kill(own, signal.SIGCONT)
        os._exit(0)
    os.kill(own, signal.SIGSTOP)
    time.sleep(0.1)


# -- running them

_OURS = "RuntimeStateError", "StrategyError"
_THEIRS = "(", "OSError: no such shard", "RuntimeError: "  # the script's own, and of its own collectives


@dataclass
class Said:
    """The end of a rank: its error, its first losses, and the steps and seconds since the difference."""

    rank: int
    text: str = ""
    losses: list[float] = field(default_factory=list)
    step: int = 0
    seconds: float = 0.0


@dataclass
class Found:
    name: str
    said: list[Said]
    problems: list[str]


def examine(names: Sequence[str]) -> Iterator[Found]:
    for name in names:
        yield examined(name)


def examined(name: str) -> Found:
    """Run a case, as a launcher does: this process hosts the store."""
    _import_all()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("fork")
    folder = Path(tempfile.mkdtemp())
    before = time.monotonic()
    processes = [context.Process(target=_rank, args=(name, rank, store.port, folder)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(max(0.0, before + 150 - time.monotonic()))
    ended = time.monotonic()
    said = [_said(rank, process, folder, ended) for rank, process in enumerate(processes)]
    marks = [json.loads(path.read_text()) for path in folder.glob("mark*")]
    for each in said:
        each.seconds -= max(seconds for _, seconds in marks)
        each.step -= max(step for step, _ in marks)
    return Found(name, said, list(_problems(name, said)))


def _said(rank: int, process: Any, folder: Path, ended: float) -> Said:
    path = folder / f"said{rank}"
    found = Said(**json.loads(path.read_text())) if path.exists() else Said(rank, seconds=ended)
    if process.is_alive():
        found.text = found.text or "has not ended"
        process.kill()
    process.join()
    if not path.exists() and not found.text:
        status, written = process.exitcode, (folder / f"stderr{rank}").read_text()
        error = re.split(r'(?m)^  File ".*\n.*\n', written)[-1].strip().removeprefix("partway.strategy.errors.")
        found.text = (
            f"(killed by {signal.Signals(-status).name})" if status < 0 else f"(ended with status {status}) {error}"
        )
    return found


def _rank(name: str, rank: int, port: int, folder: Path) -> None:
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    with open(folder / f"stderr{rank}", "w", buffering=1) as log:
        os.dup2(log.fileno(), 2)
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115 - as long as the process
    found = Said(rank)

    def mark(step: int) -> None:
        (folder / f"mark{rank}").write_text(json.dumps([step, time.monotonic()]))

    def tell(step: int) -> None:
        found.step = step

    mark(0)
    try:
        pw.init(backend="gloo", timeout=TIMEOUT)
        dist.barrier()
        mark(0)
        script = Script(rank, mark)
        CASES[name].change(script)
        script.run(found.losses, tell)
    except SystemExit:
        found.text = "(ends, as the script says)"
        pw.shutdown()
    except Exception as error:
        found.text = f"{type(error).__name__}: {error}"
        traceback.print_exc()
    found.seconds, found.losses = time.monotonic(), found.losses[:LOOKED_AT]
    (folder / f"said{rank}").write_text(json.dumps(vars(found)))
    os.kill(os.getpid(), signal.SIGKILL)


def _problems(name: str, said: Sequence[Said]) -> Iterator[str]:
    """The failures: a silent wrong number, a wait that is too long, an error of another library (except that of a
    collective that the script itself calls, on one rank)."""
    spoken = any(each.text and not each.text.startswith("(ends") for each in said)
    right = torch.tensor(_expected(name))
    for each in said:
        losses = torch.tensor(each.losses)
        wrong = losses.shape != right.shape or not torch.allclose(losses, right, rtol=1e-4)
        if wrong and not spoken and not CASES[name].unseen:
            yield f"rank {each.rank}: wrong without a word: {each.losses}, not {right.tolist()}"
        if each.text and (each.text == "has not ended" or each.seconds > TIMEOUT + SLACK):
            yield f"rank {each.rank}: {each.text or 'ended'} after {each.seconds:.1f} s"
        own = name in ("raises", "full_tensor", "ends", "killed", "killed_planning") and each.rank == 1
        if each.text and not each.text.startswith(_OURS + _THEIRS * own):
            yield f"rank {each.rank}: another's error: {each.text}"


def _expected(name: str) -> list[float]:
    """The losses of one device, computed in another process: PyTorch's backward does not survive a fork."""
    parent, child = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=lambda: child.send(expected(name)))
    process.start()
    found = parent.recv()
    process.join()
    return found


def _import_all() -> None:
    """Import everything that a first call imports, once for all cases."""
    for module in (
        "torch._dynamo",
        "torch._inductor",
        "torch.export",
        "torch._functorch.aot_autograd",
        "sympy",
        "torch.distributed.tensor",
        "torch.distributed._functional_collectives",
    ):
        importlib.import_module(module)


# -- the page

HEAD = f"""# Where one rank differs

Two processes run one script on gloo with `pw.init(timeout={TIMEOUT})`, with a store of the launcher; rank 1 does one
thing differently, from the fourth step on or before the first one. The table has the error of each rank, and the
number of steps (of {PAUSE * 1000:g} ms and their computation) and of seconds until then, including planning between.
A rank without an error is killed after {MOST} steps, and a rank that raises is killed at once, so neither
`pw.shutdown()` nor the end of a process finds anything. `python tests/conformance/ranks.py` writes this page. `make
conformance` checks that there is no silent wrong number, no wait beyond the timeout, and no error of another library.

| what differs | rank 0 | rank 1 |
| --- | --- | --- |
"""


def page(found: Sequence[Found]) -> str:
    rows = [f"| {CASES[each.name].words} | {' | '.join(_cells(each))} |" for each in found]
    return HEAD + "\n".join(rows) + "\n"


def _cells(found: Found) -> Iterator[str]:
    """Steps, seconds and the message of each rank; "the same" if it is the message of rank 0."""
    said = found.said
    silent = f"nothing: {unseen}" if (unseen := CASES[found.name].unseen) else "the losses of one device"
    for each in said:
        text = "the same" if each.rank and each.text == said[0].text else each.text or silent
        text = text.replace(str(Path(__file__).name), "train.py").replace("|", "\\|").replace("\n", "<br>")
        yield f"{max(each.step, 0)} steps, {max(each.seconds, 0):.1f} s: {text}"


@contextmanager
def quick() -> Iterator[None]:
    """Use one thread in each process."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(CASES))
    names = parser.parse_args().names
    os.environ["PARTWAY_CACHE"] = "0"
    results = []
    with quick():
        for found in examine(names):
            results.append(found)
            print(f"{found.name}: {'; '.join(found.problems) or 'as it should be'}")
            for said in found.said:
                when = f"{said.seconds:.1f} s after {said.step} steps"
                print(f"    rank {said.rank} {when}: {said.text or said.losses[-1:]}")
            sys.stdout.flush()
    if names == list(CASES):
        PAGE.write_text(page(results), encoding="utf-8")
    sys.exit(any(found.problems for found in results))


if __name__ == "__main__":
    main()
