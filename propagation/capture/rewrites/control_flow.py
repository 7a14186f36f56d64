"""Control flow (torch.cond, while_loop, scan and map), and users' operators that write to their operands, as
torch.export leaves them.

A loop with a known and modest number of steps is unrolled, and its operators are planned like any others. A branch on a
value, a loop that ends on one, and an operator that writes (here to copies) become one call of `partway::run`
(ops/python/functions.py), replicated on every device. Its text is generated here, and calls only operators by their
names in torch.ops.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from ....strategy.errors import CaptureError
from ...graph.nodes import at_source, draws_random_numbers, module_path, shape
from ...ops.python.functions import made_of, run
from ...rules.builder import Builder
from ...torch_internals import OpOverload, tree_flatten

aten, higher = torch.ops.aten, torch.ops.higher_order
MOST_NODES = 2048  # loops with more operators in all steps are not unrolled


def flatten_control(module: fx.GraphModule) -> None:
    """Unroll the loops in `module`, and turn the rest of its control flow into calls of `partway::run` (in place).
    Raises CaptureError for random numbers inside."""
    for child in module.children():
        if isinstance(child, fx.GraphModule):
            flatten_control(child)
    for node in list(module.graph.nodes):
        row = CONTROL.get(node.target) if node.op == "call_function" else None
        if row is not None:
            _replace(node, row(Builder(module.graph, node, 1, {}), node))
    for node in list(module.graph.nodes):
        if node.op == "get_attr" and not node.users:  # a subgraph that is written out
            module.graph.erase_node(node)


def _replace(node: fx.Node, results: Sequence[fx.Node]) -> None:
    """Replace `node` by its `results`."""
    for item in list(node.users):
        item.replace_all_uses_with(results[item.args[1]])  # type: ignore[index]
        node.graph.erase_node(item)
    node.graph.erase_node(node)


def _child(node: fx.Node, argument: Any) -> fx.GraphModule:
    """The subgraph that an argument of `node` refers to."""
    owner = node.graph.owning_module
    assert owner is not None
    child = owner.get_submodule(argument.target)
    assert isinstance(child, fx.GraphModule)
    return child


def _lists(arguments: Any) -> list[list[fx.Node]]:
    """The arguments of a call, as lists of tensors."""
    return [list(argument) for argument in arguments]


def _inlined(b: Builder, body: fx.GraphModule, operands: Sequence[fx.Node]) -> list[fx.Node]:
    """Write out the operators of `body` on `operands`. Returns its results."""
    inlined: dict[fx.Node, fx.Node] = {}
    inputs = iter(operands)
    for node in body.graph.nodes:
        if node.op == "placeholder":
            inlined[node] = next(inputs)
        elif node.op == "call_function":
            args, kwargs = map_arg((node.args, node.kwargs), inlined.__getitem__)
            inlined[node] = b(node.target, *args, **kwargs)
        elif node.op == "output":
            return [inlined[result] for result in tree_flatten(node.args[0])[0]]
    raise AssertionError("a graph ends with its output")


def _modest(body: fx.GraphModule, steps: int) -> bool:
    """Whether a loop has few enough operators in all its steps to be unrolled."""
    calls = [node for node in body.graph.nodes if node.op == "call_function"]
    return steps * len(calls) <= MOST_NODES


def function_text(node: fx.Node, name: str, body: fx.GraphModule) -> str:
    """The graph `body` as a Python function called `name`, for the call `node`. Raises CaptureError for random numbers,
    which a second run would not repeat, and for anything but operators."""
    for inner in body.graph.nodes:
        known = inner.target in (operator.getitem, *_WRITES) or isinstance(inner.target, OpOverload)
        if inner.op == "get_attr" or (inner.op == "call_function" and not known):
            raise CaptureError(f"{_what(node)} runs {inner.target}, which is not an operator{at_source(node)}")
        if inner.op == "call_function" and isinstance(inner.target, OpOverload) and draws_random_numbers(inner):
            raise CaptureError(
                f"{_what(node)} draws random numbers ({inner.target}), and its backward runs it again, with others"
                f"{at_source(node)}; draw them before, and pass them as operands"
            )
    lines = body.graph.python_code("self").src.strip().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("def forward("))
    text = "\n".join(lines[start:]).replace("def forward(self, ", f"def {name}(", 1).replace("(self)", "()")
    return text.replace("device(type='meta')", "device(type='cpu')") + "\n\n"


def _what(node: fx.Node) -> str:
    """The name of the operator of `node` in messages."""
    return f"torch.{node.target} in {module_path(node) or 'the function'}"


def _called(b: Builder, operands: Sequence[fx.Node], text: str) -> list[fx.Node]:
    """The results of a call of the Python functions in `text`."""
    call = b(run, list(operands), made_of(text))
    return [b(operator.getitem, call, i) for i in range(len(call.meta["val"]))]


def _branch(b: Builder, node: fx.Node) -> list[fx.Node]:
    """torch.cond(condition, yes, no, operands)."""
    condition, yes, no, operands = node.args
    text = function_text(node, "yes", _child(node, yes)) + function_text(node, "no", _child(node, no))
    text += "def forward(condition, *operands):\n    return (yes if condition else no)(*operands)\n\n"
    text += "def like(condition, *operands):\n    return yes(*operands)\n"
    return _called(b, [condition, *operands], text)  # type: ignore[list-item, misc]


def _loop(b: Builder, node: fx.Node) -> list[fx.Node]:
    """while_loop(test, body, carried, further operands)."""
    test, body = (_child(node, graph) for graph in node.args[:2])
    carried, further = _lists(node.args[2:4])
    text = function_text(node, "test", test) + function_text(node, "body", body)
    text += f"""def forward(*operands):
    carried, further = operands[:{len(carried)}], operands[{len(carried)}:]
    while test(*carried, *further):
        carried = body(*carried, *further)
    return carried

def like(*operands):
    return operands[:{len(carried)}]
"""
    return _called(b, [*carried, *further], text)


def _scan(b: Builder, node: fx.Node) -> list[fx.Node]:
    """scan(body, carried values, operands scanned along dim 0, further operands): the final carried values, and the
    stacked results of the steps."""
    body, (carried, scanned, further) = _child(node, node.args[0]), _lists(node.args[1:4])
    steps, count = shape(scanned[0])[0], len(carried)
    stop = count + len(scanned)
    if not _modest(body, steps):
        text = function_text(node, "body", body)
        text += f"""def step(i, carried, operands):
    found = body(*carried, *(x[i] for x in operands[{count}:{stop}]), *operands[{stop}:])
    return found[:{count}], found[{count}:]

def forward(*operands):
    carried, given = operands[:{count}], []
    for i in range({steps}):
        carried, found = step(i, carried, operands)
        given.append(found)
    return [*carried, *(torch.stack(column) for column in zip(*given))]

def like(*operands):
    carried, found = step(0, operands[:{count}], operands)
    return [*carried, *(x.expand({steps}, *x.shape) for x in found)]
"""
        return _called(b, [*carried, *scanned, *further], text)
    columns: list[list[fx.Node]] = []
    for i in range(steps):
        results = _inlined(b, body, [*carried, *(b(aten.select.int, x, 0, i) for x in scanned), *further])
        carried = results[:count]
        columns.append(results[count:])
    return [*carried, *(b(aten.stack.default, list(column), 0) for column in zip(*columns, strict=True))]


def _map(b: Builder, node: fx.Node) -> list[fx.Node]:
    """map(body, operands mapped along dim 0, further operands): the body on each slice."""
    body, (mapped, further) = _child(node, node.args[0]), _lists(node.args[1:3])
    rows = [[b(aten.select.int, x, 0, i) for x in mapped] for i in range(shape(mapped[0])[0])]
    results = [_inlined(b, body, [*row, *further]) for row in rows]
    return [b(aten.stack.default, list(column), 0) for column in zip(*results, strict=True)]


def _writing(b: Builder, node: fx.Node) -> list[fx.Node]:
    """auto_functionalized(operator, arguments): the operator's results, and its operands after the writes."""
    body = fx.Graph()
    operands = node.all_input_nodes
    copies = {x: body.placeholder(x.name) for x in operands}
    body.output(body.node_copy(node, copies.__getitem__))
    owner = node.graph.owning_module
    assert owner is not None
    text = function_text(node, "written", fx.GraphModule(owner, body))
    text += """def forward(*operands):
    return [x for x in written(*operands) if x is not None]

def like(*operands):
    return forward(*operands)
"""
    results = iter(_called(b, operands, text))
    return [operands[0] if value is None else next(results) for value in node.meta["val"]]  # nobody reads a None


_WRITES = (higher.auto_functionalized, higher.auto_functionalized_v2)

CONTROL: dict[Any, Callable[[Builder, fx.Node], list[fx.Node]]] = {
    **dict.fromkeys(_WRITES, _writing),
    higher.cond: _branch,
    higher.map_impl: _map,
    higher.scan: _scan,
    higher.while_loop: _loop,
}
