"""Graphs as Graphviz's dot: `dot -Tsvg 08_forward.dot -o forward.svg`.

Operators are boxes in the boxes of their modules, inputs ellipses; collectives are orange, with what a rank sends. In
the picture of the plan an orange edge is a tensor that is converted between ranks on its way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from partway.graphs.operators import Shown, codes_text, type_of, word_of
from partway.propagation.graph.nodes import module_path, operator_name
from partway.propagation.ops.collectives import convert, convert_group
from partway.propagation.plan.plan import Plan
from partway.propagation.program.step import calls_of
from partway.strategy.units import human, lasting

_INPUT = 'shape=ellipse, style=filled, fillcolor="#eeeeee"'
_OPERATOR = 'shape=box, style=filled, fillcolor="#ffffff"'
_LOCAL = 'shape=box, style=filled, fillcolor="#e3eefb"'
_SENDS = 'shape=box, style=filled, fillcolor="#ffb84d"'


@dataclass(frozen=True)
class _Node:
    """A node: what it is called in the file, the lines that are drawn, the modules around it, how it looks."""

    key: str
    label: tuple[str, ...]
    inside: tuple[str, ...]
    style: str


@dataclass
class _Box:
    """A module: what is in it."""

    nodes: list[_Node] = field(default_factory=list)
    boxes: dict[str, _Box] = field(default_factory=dict)


def of_graphs(graphs: Mapping[str, Shown]) -> str:
    """The picture of one graph or of several, each in a box with its name ("": without one)."""
    nodes: list[_Node] = []
    edges: list[str] = []
    for name, shown in graphs.items():
        around = (name,) if name else ()
        for node in shown.graph.find_nodes(op="placeholder"):
            label = shown.name(node), type_of(node.meta.get("val"))
            nodes.append(_Node(_key(name, node), label, around, _INPUT))
        for node in calls_of(shown.graph):
            nodes.append(_node(shown, node, _key(name, node), around))
            sources = dict.fromkeys(_key(name, operand) for operand in node.all_input_nodes)
            edges += [f"{source} -> {_key(name, node)};" for source in sources]
        for result, value in shown.returns.items():
            if isinstance(value, fx.Node):
                key = _quoted(f"{name} return {result}".strip())
                nodes.append(_Node(key, (result,), around, _INPUT))
                edges.append(f"{_key(name, value)} -> {key};")
    return _written(nodes, edges)


def _key(name: str, node: fx.Node) -> str:
    return _quoted(f"{name} {node.name}".strip())


def _node(shown: Shown, node: fx.Node, key: str, around: tuple[str, ...]) -> _Node:
    made = type_of(node.meta.get("val"))
    path = (*around, *filter(None, module_path(node).split(".")))
    if node.target not in (convert, convert_group):
        return _Node(key, (node.name, operator_name(node), made), path, _OPERATOR)
    c, axes = shown.collectives.get(node), ",".join(map(str, node.args[3]))  # type: ignore[arg-type]
    label = (f"{word_of(node)} over {axes}", f"{node.args[1]} -> {node.args[2]}", made)
    if c is None:
        return _Node(key, label, path, _LOCAL)
    return _Node(key, (*label, f"sends {human(c.wire_bytes)}, {lasting(c.predicted_time)}"), path, _SENDS)


def of_plan(plan: Plan) -> str:
    """The picture of a plan: operators with their strategies, tensors with their layouts."""
    graph = plan.to_networkx()
    nodes = [_planned(plan, str(key), data) for key, data in graph.nodes(data=True)]
    return _written(nodes, (_tensor(plan, *edge) for edge in graph.edges(data=True)))


def _planned(plan: Plan, key: str, data: Mapping[str, Any]) -> _Node:
    if data["kind"] != "operator":
        layout = (codes_text(plan.mesh, data["layout"]),) if "layout" in data else ()
        return _Node(_quoted(key), (key, *layout), (), _INPUT)
    layouts = ", ".join(codes_text(plan.mesh, codes) for codes in data["layouts"])
    split = " ".join(f"{axis}:{factor}" for axis, factor in data["factors"].items() if factor)
    label = (data["name"], data["operator"], data["result"], f"splits {split or 'nothing'}", layouts)
    return _Node(_quoted(key), label, tuple(filter(None, data["module"].split("."))), _OPERATOR)


def _tensor(plan: Plan, source: str, reader: str, data: Mapping[str, Any]) -> str:
    line = f"{_quoted(source)} -> {_quoted(reader)}"
    if not data["collectives"]:
        return f"{line};"
    made = codes_text(plan.mesh, data["produced_as"]) if data["produced_as"] else "whole"
    words = [f"{made} -> {codes_text(plan.mesh, data['read_as'])}"]
    words += [f"{c.phase} {c.kind} over {','.join(c.axes)}, {human(c.wire_bytes)}" for c in data["collectives"]]
    return f'{line} [label={_lines(words)}, color="#d97700", fontcolor="#a85b00", penwidth=2];'


def _written(nodes: Iterable[_Node], edges: Iterable[str]) -> str:
    root = _Box()
    for node in nodes:
        box = root
        for part in node.inside:
            box = box.boxes.setdefault(part, _Box())
        box.nodes.append(node)
    head = ["digraph {", '  fontname="Helvetica";']
    head += ['  node [fontname="Helvetica", fontsize=10];', '  edge [fontname="Helvetica", fontsize=9];']
    return "\n".join([*head, *_inside(root, "", "  "), *(f"  {edge}" for edge in edges), "}"]) + "\n"


def _inside(box: _Box, path: str, indent: str) -> Iterator[str]:
    for node in box.nodes:
        yield f"{indent}{node.key} [label={_lines(filter(None, node.label))}, {node.style}];"
    for name, inner in box.boxes.items():
        whole = f"{path}.{name}".strip(".")
        yield f"{indent}subgraph {_quoted(f'cluster {whole}')} {{"
        yield f'{indent}  label={_quoted(whole)}; color="#999999";'
        yield from _inside(inner, whole, indent + "  ")
        yield f"{indent}}}"


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ") + '"'


def _lines(texts: Iterable[str]) -> str:
    return '"' + "\\n".join(_quoted(text)[1:-1] for text in texts) + '"'
