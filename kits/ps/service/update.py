"""The step of an optimizer on the pieces of a server: any of torch.optim, by its own step.

A piece is a parameter of an optimizer like any other; the optimizer is the worker's, with other parameters.

A table by rows is stepped only where it is touched, and has the numbers of one device all the same: there a row without
a gradient is stepped too (momentum goes on, weights decay), so each row has the number of its last step, and takes the
steps that it missed before it is read or touched. If the optimizer does not change such a row (SGD without momentum and
weight decay, Adagrad without weight decay, SparseAdam), the row misses nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Optimizer, SparseAdam

from partway.ps.service.pieces import Parameter, RowRange
from partway.runtime.tensors import by_element

Options = Mapping[str, Any]  # of a group of parameters: lr and so on


@dataclass(frozen=True)
class OptimizerMaker:
    """Makes an optimizer like the worker's for other parameters, without running its constructor.

    kind          its class
    attributes    its attributes beside its parameters and their states
    """

    kind: type[Optimizer]
    attributes: Mapping[str, Any]

    @classmethod
    def of(cls, optimizer: Optimizer) -> OptimizerMaker:
        """The maker for a worker's optimizer."""
        has = {name: value for name, value in vars(optimizer).items() if not name.startswith("_")}
        return cls(type(optimizer), {name: has[name] for name in has.keys() - {"param_groups", "state"}})

    def make(self, groups: list[dict[str, Any]], state: Mapping[Any, dict[str, Any]]) -> Optimizer:
        """An optimizer of these parameters, with these states."""
        made = self.kind.__new__(self.kind)
        held = defaultdict(dict, state)  # the type of torch.optim.Optimizer's own
        if self.kind is Adagrad:  # up to PyTorch 2.12 its constructor makes the state
            for group in groups:
                for own in (own for own in group["params"] if not held[own]):
                    first = group["initial_accumulator_value"]
                    started = torch.full_like(own, complex(first, first) if own.is_complex() else first)
                    held[own] = {"step": torch.tensor(0.0, dtype=torch.float32), "sum": started}
        made.__setstate__({**self.attributes, "param_groups": groups, "state": held})
        return made

    def leaves_untouched_rows(self, options: Options) -> bool:
        """Whether a step without a gradient changes nothing of a row."""
        if self.kind is SGD:
            return bool(options["momentum"] == 0 and options["weight_decay"] == 0)
        return (self.kind is Adagrad and options["weight_decay"] == 0) or self.kind is SparseAdam

    @property
    def takes_sparse(self) -> bool:
        """Whether it takes sparse gradients only."""
        return self.kind is SparseAdam


def is_by_element(maker: OptimizerMaker, options: Options) -> bool:
    """Whether an optimizer steps each element by itself, so that rows may be divided; decided by a trial."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(6, 4, dtype=torch.float64, generator=generator)
    gradients = [torch.randn(6, 4, dtype=torch.float64, generator=generator) for _ in range(3)]

    def trained(rows: slice) -> Tensor:
        own = nn.Parameter(start[rows].clone())
        optimizer = maker.make([{**options, "params": [own]}], {})
        for gradient in gradients:
            own.grad = _gradient(maker, gradient[rows].clone())
            optimizer.step()
        return own.detach()

    try:
        return torch.equal(trained(slice(0, 6)), torch.cat([trained(slice(0, 2)), trained(slice(2, 6))]))
    except Exception:  # a user's own may not take such a parameter, only images, for example
        return False


def _gradient(maker: OptimizerMaker, dense: Tensor) -> Tensor:
    if not maker.takes_sparse:
        return dense
    return torch.sparse_coo_tensor(torch.arange(len(dense))[None], dense, dense.shape, check_invariants=False)


@dataclass
class Table:
    """Rows of a table, each as of its own last step.

    last      the number of the last step that each row took
    time      the number of the last step of the whole table
    base      the states common to all rows (the number of steps, ...) before the first step
    began     the names of the states of each row before the first step
    runs      the options from a step on
    """

    value: Tensor
    state: dict[str, Tensor] = field(default_factory=dict)
    base: dict[str, Any] = field(default_factory=dict)
    began: tuple[str, ...] = ()
    last: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    time: int = 0
    runs: dict[int, Options] = field(default_factory=dict)
    _known: list[tuple[dict[str, Any], tuple[str, ...]]] = field(default_factory=list)  # see `_before`
    _alone: dict[str, Any] = field(default_factory=dict)  # the state of a one-number optimizer after the last of them
    _starts: list[int] = field(default_factory=list)  # of `runs`

    def options_at(self, time: int) -> Options:
        """The options of a step."""
        if len(self._starts) != len(self.runs):
            self._starts = sorted(self.runs)
        return self.runs[self._starts[bisect_right(self._starts, time) - 1]]

    def step(self, maker: OptimizerMaker, options: Options, ids: Tensor, gradient: Tensor) -> None:
        """Take the next step: `gradient` for the rows `ids`, none for the others."""
        self.catch_up(maker, ids)
        self.begin_step(options)
        if len(ids):
            self._advance(maker, ids, [self.time], gradient)
        self.last[ids] = self.time

    def begin_step(self, options: Options) -> None:
        """Count a step, which only some of the rows take now."""
        self.time += 1
        if not self.runs or self.options_at(self.time) != options:
            self.runs[self.time] = options
            self._starts.append(self.time)

    def catch_up(self, maker: OptimizerMaker, ids: Tensor) -> None:
        """Make the rows `ids` take the steps that they missed."""
        if not len(ids) or not self.runs:
            return
        last = self.last[ids]
        if int(last.min()) == self.time:
            return
        if all(maker.leaves_untouched_rows(options) for options in self.runs.values()):
            self.last[ids] = self.time
            return
        starts = [*sorted({int(time) for time in last.unique() if time < self.time}), self.time]
        for start, stop in pairwise(starts):
            owing = [
                time for time in range(start + 1, stop + 1) if not maker.leaves_untouched_rows(self.options_at(time))
            ]
            if owing:
                self._advance(maker, ids[last <= start], owing, None)
        self.last[ids] = self.time

    def _advance(self, maker: OptimizerMaker, ids: Tensor, times: Sequence[int], gradient: Tensor | None) -> None:
        """Make some rows take some steps, with a gradient or without one."""
        own = nn.Parameter(self.value[ids])
        _, keys = self._before(maker, times[0])
        state: dict[str, Any] = {
            key: self.state[key][ids] if key in self.state else torch.zeros_like(own) for key in keys
        }
        for time in times:
            numbers, _ = self._before(maker, time)
            optimizer = maker.make(
                [{**self.options_at(time), "params": [own]}], {own: {**state, **numbers}} if state or numbers else {}
            )
            own.grad = _gradient(maker, torch.zeros_like(own) if gradient is None else gradient)
            optimizer.step()
            after = optimizer.state.get(own, {})
            state = {key: kept for key, kept in after.items() if is_of_rows(key, kept, own)}
        self.value[ids] = own.detach()
        for key, kept in state.items():
            if key not in self.state:
                self.state[key] = torch.zeros_like(self.value)
            self.state[key][ids] = kept

    def _before(self, maker: OptimizerMaker, time: int) -> tuple[dict[str, Any], tuple[str, ...]]:
        """The states common to all rows, before a step, and the names of the states of each row. Neither depends on
        gradients, so a table of one row and one column is enough to find them."""
        if not self._known:
            self._alone = {key: self.value.new_zeros(1, 1) for key in self.began} | _copied(self.base)
            self._known.append((dict(self.base), self.began))
        while len(self._known) < time:
            last = len(self._known)
            numbers, _ = self._known[-1]
            if last > 1 and numbers.keys() == {"step"}:
                break  # the only change from step to step
            options = self.options_at(last)
            if last > 1 and not numbers and _are_alike(options, self.options_at(last - 1)):
                self._known.append(self._known[-1])
                continue
            own = nn.Parameter(self.value.new_zeros(1, 1))
            optimizer = maker.make([{**options, "params": [own]}], {own: self._alone} if self._alone else {})
            own.grad = _gradient(maker, torch.zeros_like(own))
            optimizer.step()
            self._alone = optimizer.state.get(own, {})
            keys = tuple(key for key, kept in self._alone.items() if is_of_rows(key, kept, own))
            numbers = {key: kept for key, kept in self._alone.items() if key not in keys}
            self._known.append((_copied(numbers), keys))
        numbers, keys = self._known[min(time, len(self._known)) - 1]
        if (more := time - len(self._known)) > 0:
            return {"step": numbers["step"] + more}, keys
        return _copied(numbers), keys

    def whole_state(self, maker: OptimizerMaker) -> dict[str, Any]:
        """The states that an optimizer of the whole table would have now: all rows have taken all steps."""
        numbers, keys = self._before(maker, self.time + 1)
        return {key: self.state.get(key, torch.zeros_like(self.value)) for key in keys} | numbers


def _are_alike(one: Options, two: Options) -> bool:
    """Whether options differ at most in the learning rate."""
    return {**one, "lr": None} == {**two, "lr": None}


def _copied(numbers: Mapping[str, Any]) -> dict[str, Any]:
    return {key: kept.clone() if isinstance(kept, Tensor) else kept for key, kept in numbers.items()}


def is_of_rows(key: str, kept: Any, parameter: Tensor) -> bool:
    """Whether the state under `key` has an entry for each element of `parameter`."""
    return isinstance(kept, Tensor) and by_element(key, kept.shape, parameter)


class ServerShard:
    """The pieces of one server, and their optimizer.

    values    dense pieces, by key
    tables    pieces by rows
    """

    def __init__(self, maker: OptimizerMaker, parameters: Mapping[int, Parameter]) -> None:
        self._maker, self._parameters = maker, parameters
        self.pieces: dict[str, RowRange] = {}
        self.values: dict[str, nn.Parameter] = {}
        self.tables: dict[str, Table] = {}
        self._states: dict[str, dict[str, Any]] = {}
        self._optimizer: Optimizer | None = None

    @property
    def maker(self) -> OptimizerMaker:
        """The maker of its optimizers."""
        return self._maker

    def parameter(self, key: str) -> Parameter:
        """The parameter of a piece."""
        return self._parameters[self.pieces[key].parameter]

    def put(self, piece: RowRange, value: Tensor, state: Mapping[str, Any]) -> None:
        """Take a dense piece."""
        self._rest()
        self.pieces[piece.key] = piece
        self.values[piece.key] = nn.Parameter(value)
        self._states[piece.key] = dict(state)

    def put_table(self, piece: RowRange, table: Table) -> None:
        """Take a piece of a table."""
        self.pieces[piece.key] = piece
        self.tables[piece.key] = table

    def remove(self, key: str) -> None:
        """Remove a piece."""
        self._rest()
        self.pieces.pop(key, None)
        self.values.pop(key, None)
        self._states.pop(key, None)
        self.tables.pop(key, None)

    def state(self, key: str) -> dict[str, Any]:
        """The optimizer state of a dense piece."""
        if self._optimizer is None:
            return self._states[key]
        found: dict[str, Any] = self._optimizer.state.get(self.values[key], {})
        return found

    def step(self, gradients: Mapping[str, Tensor], options: Sequence[Options]) -> None:
        """Step the dense pieces that have gradients, with the options of their groups."""
        if not gradients:
            return
        optimizer = self._ready(options)
        for key, gradient in gradients.items():
            self.values[key].grad = gradient
        optimizer.step()
        for key in gradients:
            self.values[key].grad = None

    def _ready(self, options: Sequence[Options]) -> Optimizer:
        if self._optimizer is None:
            keys: list[list[str]] = [[] for _ in options]
            for key in self.values:
                keys[self.parameter(key).group].append(key)
            groups = [{"params": [self.values[key] for key in each]} for each in keys]
            state = {self.values[key]: kept for key, kept in self._states.items() if kept}
            self._optimizer = self._maker.make(groups, state)
        for group, each in zip(self._optimizer.param_groups, options, strict=True):
            group.update(each)
        return self._optimizer

    def _rest(self) -> None:
        """Save the optimizer state of each piece, and discard the optimizer, which is made again later."""
        if self._optimizer is not None:
            self._states = {key: dict(self.state(key)) for key in self.values}
            self._optimizer = None
