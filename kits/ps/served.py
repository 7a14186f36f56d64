"""The loop of a worker: an optimizer whose steps the servers take, the numbers of the steps, the part of a batch."""

from __future__ import annotations

import atexit
import io
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from partway.checkpoints import random_states, set_random_state, unpacked
from partway.ps.marks import close, forget, marked
from partway.ps.service import roles, settings
from partway.ps.service.client import Client, Pushed, Taken
from partway.ps.service.job import Job
from partway.ps.service.pieces import Parameter, RowRange
from partway.ps.service.server import Moved
from partway.ps.service.tables import RemoteTable
from partway.ps.service.update import OptimizerMaker, is_by_element, is_of_rows
from partway.ps.service.wire import DTYPES, array_of, name_of
from partway.ps.workers import Parameters, parameters_of
from partway.requests import whole as whole_of
from partway.runtime import launched
from partway.runtime.launching import before_shutdown
from partway.runtime.tensors import bring_up_to_date
from partway.strategy import RuntimeStateError, shown

T = TypeVar("T")
_served: list[ServedOptimizer] = []
_SAMPLE = 64  # elements of a parameter, approximately
_NEVER_ON_SERVERS = ("LBFGS",)  # its step involves all parameters together


def optimizer(inner: Optimizer) -> Optimizer:
    """An optimizer whose steps the servers take: `inner`'s, of torch.optim or of your own. Without
    `set_ps_context(enable_ps=True)` it is `inner` itself.

    It waits until all workers and servers are there. The first workers give the servers their parameters; the others,
    and later ones, get them. After each `step()` the parameters are those of the servers. A scheduler of the learning
    rate may be made from it, or from `inner`: both have the same groups.

    Raises RuntimeStateError for an optimizer whose step the servers cannot divide, named parameters that are not its
    own, and workers that train something else.
    """
    if not isinstance(inner, Optimizer):
        raise RuntimeStateError(f"pw.ps.optimizer: {shown(inner)} is not a torch.optim.Optimizer")
    if settings.wanted() is None:
        return inner
    session = roles.current() if not launched() or dist.get_rank() == 0 else None
    if _served:
        raise RuntimeStateError(
            "pw.ps.optimizer was called before; a job has one optimizer: give it groups of parameters"
        )
    made = ServedOptimizer(inner, session)
    _served.append(made)
    close()
    return made


class ServedOptimizer(Optimizer):
    """An optimizer whose steps the servers take."""

    def __init__(self, inner: Optimizer, session: roles.Session | None) -> None:
        bring_up_to_date(inner)
        super().__init__([dict(group) for group in inner.param_groups], dict(inner.defaults))
        self.param_groups = inner.param_groups  # shared by both
        self._inner, self._asked = inner, settings.required()
        self._parameters = [each for group in inner.param_groups for each in group["params"]]
        job, maker, tables = _job_of(inner, self._parameters, self._asked)
        self._own: Parameters = parameters_of(self._parameters, list(tables))
        self._tables: dict[int, RemoteTable] = {}
        self._client: Client | None = None
        self._on_workers = [each.index for each in job.parameters if each.on_workers]
        self._job = job
        self.version = 0
        self.members: list[int] = []
        self.worker = 0
        self.leaves = False
        if self._own.speaks:
            assert session is not None
            self._client = Client(
                session.link,
                job,
                maker,
                roles.card(),
                session.number,
                self._own.whole(),
                self._asked.gradient_dtype,
                session.patience,
            )
        firsts = self._first_values()
        anew = self._own.tell(lambda: self._speaker.start(firsts))
        self._renew(anew)
        self._take_over(self._own.tell(self._facts))
        self._own.spread([each.index for each in job.parameters if not each.by_rows])
        for index, module in tables.items():
            pull = self._puller(index)
            self._tables[index] = RemoteTable(module, job.parameters[index].name, pull)
        self._samples = self._sampled()
        _leave_at_the_end()

    @property
    def _speaker(self) -> Client:
        assert self._client is not None
        return self._client

    def _puller(self, index: int) -> Callable[[Tensor], Tensor]:
        return lambda rows: self._speaker.rows(index, rows)

    def _first_values(self) -> Callable[[RowRange], Moved]:
        """The initial values of the servers, by piece: the parameters, and the states of `inner`."""
        wholes = whole_of(self._parameters)
        states = {i: self._inner.state.get(each, {}) for i, each in enumerate(self._parameters)}

        def first(piece: RowRange) -> Moved:
            whole = wholes[piece.parameter].detach()
            if whole.is_meta:
                name = self._job.parameters[piece.parameter].name
                raise RuntimeStateError(f"{name} is on the meta device, without values; materialize it before")
            part = slice(piece.start, piece.stop)
            state = {
                key: whole_of(kept)[part].detach().cpu().clone()
                if whole.dim() and is_of_rows(key, kept, whole)
                else kept
                for key, kept in states[piece.parameter].items()
            }
            return Moved(piece, array_of(whole[part] if whole.dim() else whole), state)

        return first

    def _facts(self) -> tuple[int, list[int], int, bool, bytes | None]:
        own = self._speaker
        return own.version, own.members, own.worker, own.leaves, own.aux

    def _take_over(self, facts: tuple[int, list[int], int, bool, bytes | None]) -> None:
        self.version, self.members, self.worker, self.leaves, self._aux = facts

    # -- A step

    def step(self, closure: Any = None) -> Any:
        """Push the gradients; the parameters are then those of the servers. Waits for the other workers, in sync mode,
        and for servers that are started again."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        bring_up_to_date(self._inner)
        if self.leaves:
            raise RuntimeStateError(
                f"worker {self.worker} was asked to end after step {self.version}, and stepped again"
            )
        self._check_that_nothing_was_changed()
        gradients = [self._pushed(i) for i in range(len(self._parameters))]
        options = [_options(group) for group in self.param_groups]
        aux = _bytes_of(random_states()) if self._job.mode == "sync" and self._own.speaks else None
        taken = self._own.tell(lambda: self._speaker.step(gradients, options, aux))
        self._take_over(self._own.tell(self._facts))
        self._own.spread([each.index for each in self._job.parameters if not (each.by_rows or each.on_workers)])
        self._step_here(taken)
        self._samples = self._sampled()
        return loss

    def _sampled(self) -> dict[int, bytes]:
        """A sample of each parameter of this process. The servers do not see a script's changes of a parameter, and
        would overwrite them: so a change is an error if it touches the sample."""
        return {
            i: array_of(each).reshape(-1)[:: max(1, each.numel() // _SAMPLE)].tobytes()
            for i, each in enumerate(self._parameters)
            if i not in self._tables and type(each) is nn.Parameter and each.is_cpu and each.is_contiguous()
        }

    def _check_that_nothing_was_changed(self) -> None:
        now = self._sampled()
        changed = [self._job.parameters[i].name for i, kept in self._samples.items() if now.get(i, kept) != kept]
        if changed:
            raise RuntimeStateError(
                f"{', '.join(changed[:5])} changed since the last step, and the servers hold other values; a parameter "
                "that they hold changes by optimizer.step() alone: load or change it before pw.ps.optimizer(...)"
            )

    def _pushed(self, index: int) -> Pushed:
        if index in self._tables:
            return self._tables[index].gradient()
        gradient = self._own.gradient(index)
        if gradient is not None and gradient.is_sparse:
            gradient = gradient.to_dense()
        return gradient

    def _step_here(self, taken: Taken) -> None:
        """Step the parameters that stay on workers, with the mean gradients."""
        if taken.means:
            held = [each.grad for each in self._parameters]
            for i, parameter in enumerate(self._parameters):
                if i in taken.means and i not in taken.anew:
                    self._own.set_gradient(i, taken.means[i])
                else:
                    parameter.grad = None
            self._inner.step()
            for parameter, gradient in zip(self._parameters, held, strict=True):
                parameter.grad = gradient
        self._renew(taken.anew)

    def _renew(self, indices: set[int]) -> None:
        """Refresh the optimizer states of parameters that stay on workers from the servers' copies."""
        anew = sorted(indices & set(self._on_workers))
        if not anew:
            return
        states = self._own.tell(lambda: self._speaker.states(set(anew)))
        self._own.spread(anew)
        for i in anew:
            self._inner.state[self._parameters[i]] = states[i]

    # -- Others

    def share(self) -> tuple[int, int]:
        """See `partway.ps.share`."""
        return (self.members.index(self.worker), len(self.members)) if self.worker in self.members else (0, 1)

    def steps(self, total: int) -> Iterator[int]:
        """See `partway.ps.steps`."""
        if self._aux is not None:
            for name, state in unpacked(self._aux).items():
                set_random_state(name, state)
        while self.version < total and not self.leaves:
            before = self.version
            yield before
            if self.version == before:
                raise RuntimeStateError(f"step {before} of pw.ps.steps ended without optimizer.step()")

    def state_dict(self) -> dict[str, Any]:
        """Like torch.optim's: the servers' state of each parameter, whole. Tables by rows have none; see `save`."""
        if self._tables:
            raise RuntimeStateError("the states of tables by rows are large; write a checkpoint with pw.ps.save")
        states = self._own.tell(lambda: self._speaker.states(set(range(len(self._parameters)))))
        like = self._inner.state
        kept = dict(like)
        for i, parameter in enumerate(self._parameters):
            like[parameter] = states[i]
        try:
            return self._inner.state_dict()
        finally:
            like.clear()
            like.update(kept)

    def load_state_dict(self, state_dict: Any) -> None:
        """Raise RuntimeStateError: the servers have the states."""
        raise RuntimeStateError(
            "the servers keep what the optimizer has; load into the optimizer before pw.ps.optimizer(...) takes it, as "
            "pw.load(path, model, optimizer) does"
        )

    @property
    def parameters(self) -> list[Any]:
        """Its parameters, in the order of the job's."""
        return self._parameters

    @property
    def speaks(self) -> bool:
        """Whether this process speaks for the worker."""
        return self._own.speaks

    def tell(self, run: Callable[[], T]) -> T:
        """Return the result of `run` in the process that speaks for the worker."""
        return self._own.tell(run)

    @property
    def client(self) -> Client:
        """This worker's client of the servers."""
        return self._speaker

    @property
    def job(self) -> Job:
        """The job that is trained."""
        return self._job

    @property
    def inner(self) -> Optimizer:
        """The optimizer from which it was made."""
        return self._inner


def _bytes_of(states: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    torch.save(states, file)
    return file.getvalue()


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """The options of a group, as numbers and texts."""
    found: dict[str, Any] = {}
    for name, value in group.items():
        if name == "params":
            continue
        if isinstance(value, Tensor):
            value = value.item()
        if value is None or isinstance(value, bool | int | float | str):
            found[name] = value
        elif isinstance(value, tuple | list) and all(
            each is None or isinstance(each, bool | int | float) for each in value
        ):
            found[name] = list(value)
        else:
            raise RuntimeStateError(f"{name} of the optimizer is {shown(value)}; the servers take numbers and texts")
    return found


def _job_of(
    inner: Optimizer, parameters: list[Any], asked: settings.ServerSettings
) -> tuple[Job, OptimizerMaker, dict[int, Any]]:
    """The job, the maker of its optimizer, and the tables by rows."""
    if type(inner).__name__ in _NEVER_ON_SERVERS:
        raise RuntimeStateError(
            f"{type(inner).__name__} takes one step of all parameters together, which servers cannot divide; use "
            "another"
        )
    lacking = [
        mark.name for each, mark in marked() if each.requires_grad and not any(each is own for own in parameters)
    ]
    if lacking:
        raise RuntimeStateError(f"set_param_ps named {', '.join(lacking[:5])}, which the optimizer does not have")
    maker, options = OptimizerMaker.of(inner), [_options(group) for group in inner.param_groups]
    by_element = all(is_by_element(maker, each) for each in options)
    groups = [number for number, group in enumerate(inner.param_groups) for _ in group["params"]]
    marks = {id(each): mark for each, mark in marked()}
    described, tables = [], {}
    for i, each in enumerate(parameters):
        mark = marks.get(id(each))
        if mark is not None and mark.table is not None:
            tables[i] = mark.table
        if name_of(each.dtype) not in DTYPES:
            raise RuntimeStateError(f"{mark.name if mark else f'parameter {i}'} is {each.dtype}, which is not sent")
        described.append(
            Parameter(
                i,
                mark.name if mark else f"parameter {i} of the optimizer",
                tuple(each.shape),
                name_of(each.dtype),
                each.element_size(),
                groups[i],
                i in tables,
                mark is None,
            )
        )
    if tables and not by_element:
        raise RuntimeStateError(
            f"{described[next(iter(tables))].name} is divided by rows, and {type(inner).__name__}'s step of a row "
            "depends on other rows; give set_param_ps(..., rows=False), or use another optimizer"
        )
    stay = [each.name for each in described if each.on_workers and parameters[each.index].requires_grad]
    if stay and asked.mode == "async":
        raise RuntimeStateError(
            f"{', '.join(stay[:5])} would stay on the workers, which average their gradients, and in async mode nobody "
            "waits for others; name all parameters: set_param_ps(model)"
        )
    job = Job(
        tuple(described),
        type(inner).__qualname__,
        tuple(options),
        by_element,
        asked.mode,
        asked.max_staleness,
        asked.durability,
    )
    return job, maker, tables


# -- The loop


def _current() -> ServedOptimizer | None:
    if settings.wanted() is None:
        return None
    if not _served:
        raise RuntimeStateError("the servers have no parameters yet; call pw.ps.optimizer(...) first")
    return _served[0]


def served() -> ServedOptimizer:
    """The optimizer of this job. Raises RuntimeStateError before there is one."""
    own = _current()
    assert own is not None
    return own


def steps(total: int) -> Iterator[int]:
    """The numbers of the remaining steps of `total`, from 0 on. A worker that is started again continues at its step,
    with the same random numbers as without the restart; one that is asked to end gets no more. In async mode each
    worker counts its own."""
    own = _current()
    return iter(range(total)) if own is None else own.steps(total)


def share() -> tuple[int, int]:
    """This worker's part of the batch of the present step, of equal parts: (index, count). It changes when workers come
    and go, in sync mode at a step that is the same for all."""
    own = _current()
    return (0, 1) if own is None else own.share()


def status() -> dict[str, Any]:
    """The workers, the servers, and the events. Raises RuntimeStateError without a parameter server."""
    settings.required()
    return served().client.status()


def staleness() -> list[tuple[int, int, int]]:
    """(worker, step, staleness) of each push, in async mode: the number of pushes of others that were applied between
    the read of its parameters and the push itself. (Only pushes since the servers were last started.) Raises
    RuntimeStateError without a parameter server."""
    settings.required()
    return served().client.staleness()


def end() -> None:
    """Leave the job and the cluster, so that `init` may join another."""
    while _served:
        own = _served.pop()
        if own.speaks and not hasattr(sys, "last_value"):  # left by an error that ends the script
            own.client.leave()
        elif own.speaks:
            own.client.stop()
    forget()
    roles.end()


def _leave_at_the_end() -> None:
    before_shutdown(end)
    atexit.unregister(end)
    atexit.register(end)
