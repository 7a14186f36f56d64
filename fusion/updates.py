"""Buffer updates, such as BatchNorm's running statistics: no other operator waits for their collectives.

With statistics of each part of the batch (`batch_norm_parts`), only the running ones are added up over the ranks. Their
AllReduces are issued in the forward when their operands are ready, and read after all other operators.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import fx

from ..propagation.graph.graph import Text
from ..propagation.graph.port import Role
from ..propagation.ops.collectives import convert, kind_of
from ..propagation.program.step import Step, returned_by
from ..strategy.placement import Kind
from .fuse import member, rebuild
from .members import Groups
from .modes import Fusion
from .schedule import Unit, with_values


def updates_last(step: Step, fusion: Fusion | None) -> Step:
    """`step` with the readers of buffer updates' AllReduces behind all other nodes of its forward.

    The `updates` of `fusion`'s policy groups these AllReduces. Indices and overlap are about gradients, so the modes
    index and overlap make the groups of auto here.
    """
    if not _update_collectives(step):
        return step
    if fusion:
        step = with_values(step)
    collectives = _update_collectives(step)
    forward = Text(step.forward, rebuild(_ordered(step.forward.graph, collectives, _groups(collectives, fusion))))
    forward.meta.update(step.forward.meta)
    return replace(step, forward=forward)


def _groups(collectives: list[fx.Node], fusion: Fusion | None) -> Groups:
    if fusion is None:
        return tuple((position,) for position in range(len(collectives)))
    return fusion.policy.updates([member(node) for node in collectives], fusion.config)


def _update_collectives(step: Step) -> list[fx.Node]:
    """The AllReduces of the forward that only buffer updates read; none needs the result of another."""
    graph = step.forward.graph
    returned = returned_by(graph)
    roles = [placed.port.role for placed in step.program.outputs]
    kept = {*returned[len(roles) :]}  # for the backward
    kept |= {node for node, role in zip(returned, roles, strict=False) if role is not Role.BUFFER_UPDATE}
    aside: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        only = all(user.op == "output" or user in aside for user in node.users)
        if node.op == "call_function" and node not in kept and only:
            aside.add(node)
    updates: dict[fx.Node, None] = {}
    late: set[fx.Node] = set()
    for node in graph.nodes:
        if any(operand in updates or operand in late for operand in node.all_input_nodes):
            late.add(node)
        elif node in aside and node.target is convert and kind_of(*map(str, node.args[1:3])) is Kind.ALL_REDUCE:
            updates[node] = None
    return list(updates)


def _ordered(graph: fx.Graph, collectives: list[fx.Node], groups: Groups) -> Iterator[Unit]:
    """The nodes of `graph`, with each group at the place of its last member, and the readers of groups at the end."""
    ends = {collectives[positions[-1]]: tuple(collectives[i] for i in positions) for positions in groups}
    members, late = set(collectives), list[fx.Node]()
    behind = set(collectives)
    for node in graph.nodes:
        if node in members:
            if node in ends:
                yield ends[node]
        elif any(operand in behind for operand in node.all_input_nodes):
            behind.add(node)
            late.append(node)
        else:
            yield (node,)
    for node in late:
        yield (node,)
