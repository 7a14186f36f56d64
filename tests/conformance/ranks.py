"""What happens where one rank of a launched program differs from the others: who says what, and after how long.

    python tests/conformance/ranks.py                 all cases; writes docs/coverage/ranks.md
    python tests/conformance/ranks.py seed annotation the ones that are named

Each case is a training script that 2 processes run on gloo with a timeout of 10 s; in it rank 1 does one thing in
another way. What each rank says is the error that ends it. A rank that ends well has to have the losses of one device,
unless some rank has said something: a wrong number without a word is the one thing that must not be.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
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

import torch
import torch.distributed as dist
from torch import Tensor, nn

import partway as pw

PAGE = Path(__file__).parents[2] / "docs" / "coverage" / "ranks.md"
TIMEOUT, SLACK = 10, 15  # seconds; the slack is for what a busy machine takes, and for the end of a process
STEPS, AT = 6, 3  # a rank differs from step AT on, or before the first


class Model(nn.Module):
    """Two layers; the second is split over ranks where `parameter_plan` says so."""

    def __init__(self, width: int = 8, drop: float = 0.0) -> None:
        super().__init__()
        self.a, self.b, self.dropout = nn.Linear(8, width), nn.Linear(width, 8), nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.dropout(torch.relu(self.a(x)))).square().mean()


@dataclass
class Script:
    """One rank's run of the training script. A case changes it where `other` (on rank 1) is true."""

    rank: int
    mark: Callable[[], None]  # the rank begins to differ
    options: dict[str, Any] = field(default_factory=dict)
    algo: dict[str, Any] = field(default_factory=dict)
    given: dict[str, Any] = field(default_factory=lambda: {"mesh": {"dp": 2}, "in_strategy": (("dp", None),)})
    model: Callable[[], nn.Module] = Model
    prepared: Callable[[nn.Module], None] = lambda model: None
    sharded: Callable[[Any], None] = lambda model: None
    batch: Callable[[int, Tensor], Tensor] = lambda step, x: x
    around: Callable[[Any, int], Any] = lambda model, step: nullcontext()
    stepped: Callable[[Any, int, Tensor], bool] = lambda model, step, x: False  # True: this step is left out
    learns: Callable[[int], bool] = lambda step: True
    follows: Callable[[int], bool] = lambda step: True
    local: bool = False

    @property
    def other(self) -> bool:
        return self.rank == 1

    def differs(self, step: int) -> bool:
        """Whether rank 1 is at the step in which it differs; from then on the clock runs."""
        if self.other and step == AT:
            self.mark()
            return True
        return False

    def run(self) -> list[float]:
        pw.set_auto_parallel_context(**self.options)
        pw.set_algo_parameters(**self.algo)
        torch.manual_seed(0)
        model = self.model()
        self.prepared(model)
        sharded: Any = pw.shard(model, **self.given)
        self.sharded(sharded)
        optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
        torch.manual_seed(1)
        losses = []
        for step, whole in enumerate(batches()):
            x = self.batch(step, whole.chunk(2)[self.rank] if self.local else whole)
            if self.stepped(sharded, step, x):
                continue
            with self.around(sharded, step):
                loss = sharded(x)
                if self.learns(step) and loss.requires_grad:
                    loss.backward()
                    if self.follows(step):
                        optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        return losses


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return list(torch.randn(STEPS, 4, 8, generator=generator))


def expected(drop: float) -> list[float]:
    """The losses of one device."""
    torch.manual_seed(0)
    model = Model(drop=drop)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for x in batches():
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# -- the cases, in the order of the page: each changes the script of a rank

Case = Callable[[Script], None]
CASES: dict[str, tuple[str, Case]] = {}


def case(words: str) -> Callable[[Case], Case]:
    def add(found: Case) -> Case:
        CASES[found.__name__.strip("_")] = words, found
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


@case("one rank is given a saved plan, the other searches")
def saved_plan(s: Script) -> None:
    if s.other:
        made = pw.compile(Model(), (batches()[0],), mesh={"dp": 2}, in_strategy=(("dp", None),))
        path = Path(tempfile.mkdtemp()) / "plan.json"
        made.plan.save(path)
        s.given["plan"] = str(path)


@case("a model of another seed")
def model_seed(s: Script) -> None:
    s.prepared = lambda model: nn.init.constant_(model.a.weight, 0.5 + s.rank)  # type: ignore[union-attr,arg-type]


@case("a model of another width")
def model_width(s: Script) -> None:
    s.model = lambda: Model(8 + 8 * s.rank)


@case("a forward that computes something else")
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


@case("a later step is left out")
def skipped_step(s: Script) -> None:
    s.stepped = lambda model, step, x: s.differs(step)


@case("a later backward is left out")
def skipped_backward(s: Script) -> None:
    s.learns = lambda step: not s.differs(step)


@case("a later step of the optimizer is left out")
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
            s.second(batches()[0])  # type: ignore[attr-defined]
        return nullcontext()

    s.sharded, s.around = sharded, around


@case("a shorter last part, under `dataset_strategy`, in every call")
def short_part(s: Script) -> None:
    s.local, s.options["dataset_strategy"] = True, "data_parallel"
    s.given = {"mesh": {"dp": 2}}
    s.batch = lambda step, x: x[: 2 - s.rank]


@case("parts of sizes that torch.chunk does not give, under `dataset_strategy`")
def odd_parts(s: Script) -> None:
    short_part(s)
    s.batch = lambda step, x: torch.cat((x, x))[: 4 - 3 * s.rank]


@case("a shorter part in a later call of one rank, under `dataset_strategy`")
def later_short_part(s: Script) -> None:
    short_part(s)
    s.batch = lambda step, x: x[:1] if s.differs(step) else x


@case("the loader raises")
def raises(s: Script) -> None:
    def batch(step: int, x: Tensor) -> Tensor:
        if s.differs(step):
            raise OSError("no such shard")
        return x

    s.batch = batch


@case("the process ends well, too early")
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
            s.mark()
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
    """Stop this process, all of its threads, for so long."""
    own = os.getpid()
    if os.fork() == 0:
        time.sleep(seconds)
        os.kill(own, signal.SIGCONT)
        os._exit(0)
    os.kill(own, signal.SIGSTOP)
    time.sleep(0.1)


# -- running them

_AT_THE_END = "(in shutdown)"
_OURS = "RuntimeStateError", "StrategyError", _AT_THE_END
_THEIRS = "(", "OSError: no such shard", "RuntimeError: "  # a person's own, and that of a collective of their own


@dataclass
class Said:
    """How one rank ended: what it raised or wrote, its losses, and how many seconds after the difference."""

    rank: int
    text: str = ""
    losses: list[float] | None = None
    seconds: float = 0.0
    status: int = 0


@dataclass
class Found:
    name: str
    said: list[Said]
    problems: list[str]


def examine(names: Sequence[str]) -> Iterator[Found]:
    for name in names:
        yield examined(name)


def examined(name: str) -> Found:
    """Run a case."""
    _import_all()
    port = _free_port()
    context = multiprocessing.get_context("fork")
    folder = Path(tempfile.mkdtemp())
    before = time.monotonic()
    processes = [context.Process(target=_rank, args=(name, rank, port, folder)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(max(0.0, before + 150 - time.monotonic()))
    ended = time.monotonic()
    said = [_said(rank, process, folder, ended) for rank, process in enumerate(processes)]
    marks = [float(path.read_text()) for path in folder.glob("mark*")]
    for each in said:
        each.seconds -= max(marks)
    return Found(name, said, list(_problems(name, said)))


def _said(rank: int, process: Any, folder: Path, ended: float) -> Said:
    path = folder / f"said{rank}"
    found = Said(**json.loads(path.read_text())) if path.exists() else Said(rank, seconds=ended)
    if process.is_alive():
        found.text = found.text or "has not ended"
        process.kill()
    process.join()
    found.status = process.exitcode
    written = (folder / f"stderr{rank}").read_text()
    if not found.text and found.losses is None:
        found.text = f"(killed by {signal.Signals(-found.status).name})" if found.status < 0 else ""
        found.text = found.text or f"(ended with status {found.status}) {written[-300:]}"
    return found


def _rank(name: str, rank: int, port: int, folder: Path) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with open(folder / f"stderr{rank}", "w", buffering=1) as log:
        os.dup2(log.fileno(), 2)
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115 - as long as the process
    found = Said(rank)

    def mark() -> None:
        (folder / f"mark{rank}").write_text(str(time.monotonic()))

    mark()
    status = 0
    try:
        pw.init(backend="gloo", timeout=TIMEOUT)
        dist.barrier()
        mark()
        script = Script(rank, mark)
        CASES[name][1](script)
        found.losses = script.run()
    except SystemExit:
        found.text = "(ends, as the script says)"
    except Exception as error:
        sys.last_value = error  # as if nobody had caught it
        found.text = f"{type(error).__name__}: {error}"
        traceback.print_exc()
        status = 1
    found.seconds = time.monotonic()
    try:
        pw.shutdown()
    except pw.RuntimeStateError as error:
        found.text, found.seconds, status = f"{_AT_THE_END} {type(error).__name__}: {error}", time.monotonic(), 1
    (folder / f"said{rank}").write_text(json.dumps(vars(found)))
    os._exit(status)


def _problems(name: str, said: Sequence[Said]) -> Iterator[str]:
    """What must not be: a wrong number without a word, a wait that is too long, another's error (but for that of a
    collective that the script itself calls, on one rank)."""
    spoken = any(each.text and not each.text.startswith("(ends") for each in said)
    drop = 0.5 if name in ("first_seed", "later_seed", "later_eval") else 0.0
    right = torch.tensor(_expected(name, drop))
    for each in said:
        if each.losses is not None and not spoken:
            losses = torch.tensor(each.losses)
            if losses.shape != right.shape or not torch.allclose(losses, right, rtol=1e-4):
                yield f"rank {each.rank}: wrong without a word: {each.losses}, not {right.tolist()}"
        if each.text and (each.text == "has not ended" or each.seconds > TIMEOUT + SLACK):
            yield f"rank {each.rank}: {each.text or 'ended'} after {each.seconds:.1f} s"
        own = name in ("raises", "full_tensor", "ends", "killed", "killed_planning") and each.rank == 1
        if each.text and not each.text.startswith(_OURS + _THEIRS * own):
            yield f"rank {each.rank}: another's error: {each.text}"


def _expected(name: str, drop: float) -> list[float]:
    """The losses of one device, computed in a process of its own: PyTorch's backward does not survive a fork."""
    parent, child = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=lambda: child.send(_of_one_device(name, drop)))
    process.start()
    found = parent.recv()
    process.join()
    return found


def _of_one_device(name: str, drop: float) -> list[float]:
    global batches  # noqa: PLW0603 - of this process
    if name == "short_part":
        whole = batches()
        batches = lambda: [x[:3] for x in whole]  # noqa: E731
    return expected(drop)


def _import_all() -> None:
    """What a first call imports, once for all cases."""
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


def _free_port() -> int:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return store.port


# -- the page

HEAD = f"""# Where one rank differs

Two processes run one script on gloo with `pw.init(timeout={TIMEOUT})`; rank 1 does one thing in another way. What each
rank says, and how many seconds after the difference (planning is among them where it comes between). Written by
`python tests/conformance/ranks.py`, and checked by `make conformance`: no wrong number without a word, no wait beyond
the timeout, no error of another library's. What is found after
the last call is raised by `pw.shutdown()`, or written to stderr at exit.

| what differs | rank 0 | rank 1 |
| --- | --- | --- |
"""


def page(found: Sequence[Found]) -> str:
    rows = [f"| {CASES[each.name][0]} | {' | '.join(_cells(each.said))} |" for each in found]
    return HEAD + "\n".join(rows) + "\n"


def _cells(said: Sequence[Said]) -> Iterator[str]:
    """What each rank said; of one that says what rank 0 did only when."""
    for each in said:
        text = "the same" if each.rank and each.text == said[0].text else each.text or "the losses of one device"
        yield _cell(each, text)


def _cell(said: Said, text: str) -> str:
    text = text.replace(str(Path(__file__).name), "train.py").replace("|", "\\|").replace("\n", "<br>")
    return f"{max(said.seconds, 0):.1f} s: {text}"


@contextmanager
def quick() -> Iterator[None]:
    """One thread for each process."""
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
                print(f"    rank {said.rank} {said.seconds:.1f} s (status {said.status}): {said.text or said.losses}")
            sys.stdout.flush()
    if names == list(CASES):
        PAGE.write_text(page(results), encoding="utf-8")
    sys.exit(any(found.problems for found in results))


if __name__ == "__main__":
    main()
