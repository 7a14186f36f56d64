"""A graph as text: what `str()` of a Graph and of a Program prints of its nodes.

    parameter up.weight: float32[8, 8]    # 256 B; [8, 8] of [16, 8] [dp:R tp:S0]
    # up: net.py:14, in forward: return self.down(torch.relu(self.up(x)))
    addmm: float32[2, 8] = aten.addmm.default(up.bias, x, t)    # 64 B
    convert: float32[2, 8] = all_reduce(addmm) over tp, P -> R    # 64 B
        # of linear_1: aten.linear.default linear_1 (dp:_1 tp:k) meets aten.relu.default relu (dp:f0 tp:R)
    return result = convert

A line that begins with `#` names the module of the operators below it, and the line of code that they come from.
The text is the same in every process: it contains no addresses, and no order of a set.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ...strategy.basics.units import human
from ...strategy.placement import Kind
from ..ops.collectives import convert, convert_group, kind_of
from .nodes import described, module_path, operator_name, source_line
from .port import Port

_OWN = re.compile(r" at 0x[0-9a-f]+")  # an address, which differs from process to process
_KEY = re.compile(r"[0-9a-f]{40,}")  # a digest, whose first characters suffice
_CALL = re.compile(r"^\S+(?:: .*?)? = ([^\s(]+)\(", re.MULTILINE)
_LONGEST = 100  # characters of an argument that is neither a tensor nor a number

Notes = Callable[[fx.Node], Iterable[str]]


def text_of(
    graph: fx.Graph, inputs: Sequence[tuple[str, str]] = (), returns: Sequence[str] = (), notes: Notes = lambda _: ()
) -> str:
    """A graph as text.

    inputs    the role and the name of the first placeholders, such as ("parameter", "up.weight"); "": the node's own
    returns   the names of the first results; those after them are kept for the backward
    notes     additional notes of a node: beside an input, below an operator
    """
    return "\n".join(_lines(graph, inputs, returns, notes))


def _lines(graph: fx.Graph, inputs: Sequence[tuple[str, str]], returns: Sequence[str], notes: Notes) -> Iterator[str]:
    places = graph.find_nodes(op="placeholder")
    given = dict(zip(places, inputs, strict=False))
    taken = Counter(name for _, name in given.values()) + Counter(n.name for n in graph.nodes if n not in given)
    names = {node: name for node, (_, name) in given.items() if name and taken[name] == 1}
    for node in places:
        word, name = given.get(node, ("input", ""))
        also = f" ({name})" if name and node not in names else ""
        yield f"{word} {names.get(node, node.name)}{also}{_made(node, *notes(node))}"
    before = ""
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        where = ": ".join(filter(None, (module_path(node), source_line(node))))
        if where != before:
            yield f"# {where}".rstrip()
        before = where
        made, _, size = _made(node).partition("    ")
        yield f"{node.name}{made} = {_called(node, names)}{'    ' * bool(size)}{size}"
        yield from (f"    # {note}" for note in notes(node))
    results: Any = next(iter(graph.find_nodes(op="output"))).args[0]
    values = [_written(value, names) for value in (results if isinstance(results, list | tuple) else [results])]
    yield from (f"return {name} = {value}" for name, value in zip(returns, values, strict=False))
    if rest := values[len(returns) :]:
        yield f"{'keep' if returns else 'return'} {', '.join(rest)}"


def named(ports: Iterable[Port]) -> list[tuple[str, str]]:
    """The inputs of a graph, as `text_of` takes them."""
    return [(port.role.value, port.name) for port in ports]


def calls_in(text: str) -> Counter[str]:
    """How often the graph with this text calls which operator."""
    return Counter(_CALL.findall(text))


def operators_in(text: str) -> list[str]:
    """The lines of a text except source lines, each with the lines indented below it."""
    return [each for each in re.split(r"\n(?!    )", text) if not each.startswith("#")]


def _word_of(node: fx.Node) -> str:
    """The kind of a conversion: of its collective, or of its local step."""
    kind = kind_of(str(node.args[1]), str(node.args[2]))
    return "unchanged" if kind is Kind.NOTHING else str(kind)


def _made(node: fx.Node, *notes: str) -> str:
    """The types of a node's results, with their bytes and `notes`; unknown parts are left out."""
    value = node.meta.get("val")
    made, size = _type_of(value), _bytes_of(value)
    beside = "; ".join([*([human(size)] if size else []), *notes])
    return f"{made and ': '}{made}" + (f"    # {beside}" if beside else "")


def _called(node: fx.Node, names: Mapping[fx.Node, str]) -> str:
    if node.target in (convert, convert_group):
        source, target, axes = node.args[1:4]
        return f"{_word_of(node)}({_written(node.args[0], names)}) over {','.join(axes)}, {source} -> {target}"  # type: ignore[arg-type]
    if node.op == "get_attr":
        return f"constant({node.target})"
    arguments = [_written(argument, names) for argument in node.args]
    arguments += [f"{key}={_written(value, names)}" for key, value in node.kwargs.items()]
    return f"{operator_name(node)}({', '.join(arguments)})"


def _written(value: Any, names: Mapping[fx.Node, str]) -> str:
    """An argument of a call."""
    if isinstance(value, fx.Node):
        return names.get(value, value.name)
    if isinstance(value, list | tuple):
        inside = ", ".join(_written(one, names) for one in value)
        return f"[{inside}]" if isinstance(value, list) else f"({inside}{',' * (len(value) == 1)})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_written(one, names)}" for key, one in value.items()) + "}"
    text = repr(value) if isinstance(value, str) else _OWN.sub("", str(value)).removeprefix("torch.")
    text = _KEY.sub(lambda found: f"{found[0][:8]}...", text)
    half = _LONGEST // 2
    return text if len(text) <= _LONGEST else f"{text[:half]}...{text[-half:]}"


def _type_of(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_type_of, value))})"
    return described(value) or ("" if value is None else type(value).__name__)


def _bytes_of(value: Any) -> int:
    if isinstance(value, list | tuple):
        return sum(map(_bytes_of, value))
    return int(value.numel()) * value.element_size() if isinstance(value, torch.Tensor) else 0
