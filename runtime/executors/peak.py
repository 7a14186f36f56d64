"""Computes the bytes of tensors that one rank holds while a step runs, from the two graphs alone.

A tensor's memory lives from the operator that allocates it to the last one, forward or backward, that reads it or a
view of it. An operator that overwrites its operand (memory.py) allocates none. A collective holds its send and receive
buffers from its issue until it is waited for (straight_line.py, issue.py). Results and gradients live until the end; so
do inputs, which are not counted. Neither the workspaces of operators nor the memory of a backend is counted.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, fx

from ...propagation.graph.nodes import bytes_of, computed_again, is_view, operator_of, returned_by
from ...propagation.memory.held import Held, Life, Moment, Purpose, added_up
from ...propagation.ops.collectives import WORTH_A_CALL, convert, convert_group, kind_of
from ...propagation.program.program import Program
from ...strategy.placement import Kind, Shard, placement_from_code
from ..code.assemble import members_late, operands_of, relayout_of
from ..code.instructions import Relayout
from ..code.memory import is_awaited, overwriting
from ..code.straight_line import overdue
from ..code.written import written_in_place
from .issue import may_become_its_sum


def held_by(program: Program, throughout: Mapping[Purpose, float] | None = None) -> Held:
    """The bytes that a rank holds while each call of `program` runs, in order, and at its end. Of the two moments of a
    call, before it and while it runs, the one with more bytes counts. `throughout`: the bytes of inputs and others that
    are there all the time; they are not counted without it."""
    return _LivesOfGraphs(program).held(throughout or {})


@dataclass(frozen=True)
class _Flight:
    """A collective under way.

    beside    the bytes of its buffers, held until it is waited for
    reads     it reads its operands until then
    received  its results are allocated when it is issued
    own       the operands, by position, that become its results
    """

    beside: int
    reads: bool = False
    received: bool = False
    own: frozenset[int] = frozenset()


class _LivesOfGraphs:
    """Lifetimes of memory. Operator i runs at 2 i + 1; the collectives that it waits for end at 2 i."""

    def __init__(self, program: Program) -> None:
        self.written: set[fx.Node] = set()
        if program.backward is None:
            placeholders = program.forward.graph.find_nodes(op="placeholder")
            self.written = {placeholders[place] for place in written_in_place(program, program.forward.graph).values()}
        self.calls: list[tuple[str, fx.Node]] = []
        self.memory: dict[fx.Node, Hashable] = {}  # the key of the memory of each value
        self.sizes: dict[Hashable, int] = {}
        self.first: dict[Hashable, int] = {}
        self.last: dict[Hashable, int] = {}
        self.flights: list[Life] = []
        self.again: set[Hashable] = set()
        returned = returned_by(program.forward.graph)
        outputs = len(program.outputs) if program.backward is not None else len(returned)
        self._run("forward", program.forward.graph)
        self.results = {self.memory[node] for node in returned[:outputs] if isinstance(node, fx.Node)}
        self.gradients: set[Hashable] = set()
        self.backward = 2 * len(self.calls)
        if program.backward is not None:
            saved = zip(returned[outputs:], program.backward.graph.find_nodes(op="placeholder"), strict=False)
            self.memory |= {placeholder: self.memory[kept] for kept, placeholder in saved}
            self._run("backward", program.backward.graph)
            gradients = returned_by(program.backward.graph)
            self.gradients = {self.memory[node] for node in gradients if isinstance(node, fx.Node)}
        self.last |= dict.fromkeys(self.results | self.gradients, 2 * len(self.calls))

    def held(self, throughout: Mapping[Purpose, float]) -> Held:
        """The bytes held during each call, and at the end."""
        count = 2 * len(self.calls) + 2
        lives = [Life(self._purpose(key), start, self.last[key], self.sizes[key]) for key, start in self.first.items()]
        lives += [Life(purpose, 0, None, size) for purpose, size in throughout.items()]
        by_purpose = added_up([*lives, *self.flights], count)
        total = np.sum([*by_purpose.values()], axis=0).reshape(-1, 2)
        more = 2 * np.arange(count // 2) + total.argmax(axis=1)
        moments = [_moment(phase, node) for phase, node in self.calls]
        return Held([*moments, *moments[-1:]], {purpose: sizes[more] for purpose, sizes in by_purpose.items()})

    def _purpose(self, key: Hashable) -> Purpose:
        if key in self.gradients:
            return Purpose.GRADIENTS
        if self.first[key] < self.backward <= self.last[key] and key not in self.results:
            return Purpose.KEPT
        return Purpose.AGAIN if key in self.again else Purpose.WORKING

    def _run(self, phase: str, graph: fx.Graph) -> None:
        """Follow the nodes of a graph in the order in which they run."""
        nodes = members_late(list(graph.nodes))
        start = len(self.calls)
        at = {node: start + i for i, node in enumerate(n for n in nodes if n.op in ("call_function", "get_attr"))}
        waits = _waits(nodes, at, start + len(at))
        for node in nodes:
            if node not in at:
                if node.op == "placeholder":
                    self._lies(node, self.memory.get(node, node), 0, 0)
                continue
            self.calls.append((phase, node))
            now = 2 * at[node] + 1
            relayout = relayout_of(node, phase) if node in waits else None
            for operand in node.all_input_nodes:
                self._read(operand, 2 * waits[node] if node in waits and relayout is None else now)
            if relayout is not None:
                self._issued(node, now, 2 * waits[node], relayout)
            elif node.target is not operator.getitem or node not in self.memory:
                self._made(node, now)
            if node in self.memory:
                self._read(node, now)
            if phase == "backward" and computed_again(node) and node in self.memory:
                self.again.add(self.memory[node])

    def _lies(self, node: fx.Node, key: Hashable, size: int, start: int) -> None:
        """Put `node` into the memory of `key`, allocated at `start` with `size` if it is new."""
        self.memory[node] = key
        if key not in self.sizes:
            self.sizes[key] = size
            self.first[key] = self.last[key] = start

    def _read(self, node: fx.Node, when: int) -> None:
        key = self.memory[node]
        self.last[key] = max(self.last[key], when)

    def _made(self, node: fx.Node, now: int) -> None:
        """Allocate the result of a call that does not communicate, unless it overwrites or views an operand."""
        operand = next(iter(node.all_input_nodes), None)
        overwritten = overwriting(node, self.written)
        if overwritten is not None:
            self._lies(node, self.memory[overwritten.owner], 0, now)
        elif operand is not None and (is_view(node) or _looks_at_its_operand(node)):
            self._lies(node, self.memory[operand], 0, now)
        elif operand is not None and node.target is operator.getitem:
            self._lies(node, self.memory[operand], 0, now)  # one of the views that a call gives
        else:
            results = [user for user in node.users if user.target is operator.getitem]
            for user in results if not is_view(node) else ():
                self._lies(user, (node, user.args[1]), bytes_of(user.meta.get("val")), now)
            self._lies(node, node, 0 if results else bytes_of(node.meta.get("val")), now)

    def _issued(self, node: fx.Node, now: int, end: int, c: Relayout) -> None:
        """Allocate the results and buffers of a collective that is waited for at `end`."""
        operands = operands_of(node)
        parts = [operand.meta["val"] for operand in operands]
        results = [node.meta["val"]] if node.target is convert else list(node.meta["val"])
        flight = _flight(c, parts, results)
        self.flights.append(Life(Purpose.WORKING, now, end, flight.beside))
        users = {0: node} if node.target is convert else {user.args[1]: user for user in node.users}
        if node.target is convert_group:
            self._lies(node, node, 0, now)
        for i, operand in enumerate(operands):
            if flight.reads or i in flight.own:
                self._read(operand, end)
            if i not in users:
                continue
            if i in flight.own:
                self._lies(users[i], self.memory[operand], 0, now)
            else:
                self._lies(users[i], (node, i), bytes_of(results[i]), now if flight.received else end)


def _moment(phase: str, node: fx.Node) -> Moment:
    again = phase == "backward" and computed_again(node)
    name = operator_of(node)
    return Moment(phase, name or node.name, "" if again else name)


def _waits(nodes: Sequence[fx.Node], at: Mapping[fx.Node, int], end: int) -> dict[fx.Node, int]:
    """The number of the call before which each awaited call is waited for: its first reader or, as in straight_line.py,
    a collective with too many others under way. `at`: the number of each call; `end`: the number after the last."""
    found: dict[fx.Node, int] = {}
    pending: dict[fx.Node, Relayout | None] = {}
    for node in nodes:
        if node not in at:
            continue
        issued = relayout_of(node, "")
        relayouts = {other: c for other, c in pending.items() if c is not None} if issued else {}
        for other in (*node.all_input_nodes, *overdue(issued, relayouts)):
            if other in pending:
                del pending[other]
                found[other] = at[node]
        if is_awaited(node):
            pending[node] = issued
    return found | dict.fromkeys(pending, end)


def _flight(c: Relayout, parts: Sequence[Tensor], results: Sequence[Tensor]) -> _Flight:
    """The memory that the collective `c` of `parts` holds in issue.py."""
    sent, received, alone = sum(map(bytes_of, parts)), sum(map(bytes_of, results)), len(parts) == 1
    if c.kind is Kind.ALL_REDUCE:
        own = frozenset(i for i, part in enumerate(parts) if may_become_its_sum(part, c.owned[i]))
        packed = [part for i, part in enumerate(parts) if i not in own or bytes_of(part) < WORTH_A_CALL]
        if len(packed) == 1 and (alone or own):
            packed = []
        return _Flight(sum(map(bytes_of, packed)), not alone, alone, own)
    if c.kind is Kind.EXCHANGE:
        return _Flight(2 * abs(received - sent), True)
    if c.kind is Kind.REDUCE_SCATTER:
        as_it_is = alone and _in_pieces(c, parts[0])
        return _Flight((0 if as_it_is else max(sent, received * c.size)) + (0 if alone else received), as_it_is, alone)
    as_it_is = alone and (parts[0].is_contiguous() if c.kind is Kind.ALL_GATHER else _in_pieces(c, parts[0]))
    short = isinstance(c.source, Shard) and c.source.cut is not None
    whole = alone and c.dims[0] == 0 and not short
    room = sent * c.size if c.kind is Kind.ALL_GATHER else sent
    return _Flight((0 if as_it_is else sent) + (0 if whole else room), as_it_is, whole)


def _in_pieces(c: Relayout, part: Tensor) -> bool:
    """Whether the pieces of `part` for the ranks are consecutive in memory."""
    full = isinstance(c.target, Shard) and c.target.cut is None
    return full and part.is_contiguous() and math.prod(part.shape[: c.dims[1]]) == 1


def _looks_at_its_operand(node: fx.Node) -> bool:
    """Whether a call returns its operand, or a contiguous slice of it."""
    if node.target is torch.ops.aten._unsafe_view.default:
        return True
    if node.target is not convert:
        return False
    kind, target = kind_of(str(node.args[1]), str(node.args[2])), placement_from_code(str(node.args[2]))
    if kind is not Kind.SLICE or not isinstance(target, Shard):
        return kind is Kind.NOTHING
    whole, width = node.all_input_nodes[0].meta["val"], node.meta["val"].shape[target.dim]
    return bool(whole.shape[target.dim] >= width and whole.narrow(target.dim, 0, width).is_contiguous())
