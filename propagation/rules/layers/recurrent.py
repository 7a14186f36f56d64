"""Recurrent layers: the batch splits, and steps and features stay whole."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from ...graph.nodes import argument, operands, results_of, shape, value
from ..builder import Builder, Expansion
from ..row import Row, RowFunction, parse_row
from ..rule import Rule

aten = torch.ops.aten


def lstm(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    """torch.lstm with states of the shape of its initial states: torch 2.11 traces them with an extra dim. (PyTorch's
    kernels return the right shape, so `true_states` only corrects the trace.)"""
    y, *states = torch.lstm(*args, **kwargs)
    initial = kwargs["hx"] if "hx" in kwargs else args[1]
    if isinstance(initial, torch.Tensor):  # a packed sequence, whose states are right
        return (y, *states)
    return (y, *(s if s.shape == old.shape else s.reshape(old.shape) for s, old in zip(states, initial, strict=True)))


def true_states(module: fx.GraphModule) -> None:
    """Correct the traced shapes of the states of LSTMs (in place)."""
    for node in module.graph.find_nodes(op="call_function", target=aten.lstm.input):
        y, *states = value(node)
        states = [s.reshape(shape(initial)) for s, initial in zip(states, _states(node), strict=True)]
        node.meta["val"] = (y, *states)
        for user in node.users:  # each an operator.getitem
            user.meta["val"] = node.meta["val"][user.args[1]]


def recurrent(node: fx.Node) -> Rule:
    """lstm, gru, rnn: (steps, batch, features) or (batch, steps, features); states are (layers, batch, features)."""
    steps = "b 1 1" if argument(node, "batch_first") else "1 b 1"
    states = len(_states(node))
    weights = [" ".join("1" * len(shape(weight))) for weight in operands(node)[1 + states :]]
    return _over_batch(node, steps, "1 b 1", weights)


def _states(node: fx.Node) -> list[fx.Node]:
    """The initial states of a layer."""
    states = argument(node, "hx")
    return list(states) if isinstance(states, list | tuple) else [states]


def _layer_by_layer(b: Builder, node: fx.Node) -> tuple[fx.Node | None, ...] | None:
    """With dropout, each layer becomes its own operator, so that the dropout between them is the same in all layouts.
    There is none after the last layer."""
    chance, layers = argument(node, "dropout"), argument(node, "num_layers")
    if not chance or not argument(node, "train"):
        return None
    x, states = operands(node)[0], _states(node)
    biases, both, first = (argument(node, name) for name in ("has_biases", "bidirectional", "batch_first"))
    weights = argument(node, "params")
    count, directions = len(weights) // layers, 2 if both else 1
    last: list[list[fx.Node]] = [[] for _ in states]
    for layer in range(layers):
        if layer:
            x = b(operator.getitem, b(aten.native_dropout.default, x, chance, True), 0)
        here = [b(aten.slice.Tensor, s, 0, layer * directions, (layer + 1) * directions) for s in states]
        initial = here if isinstance(argument(node, "hx"), list | tuple) else here[0]
        own = list(weights[layer * count : (layer + 1) * count])
        one_layer = biases, 1, 0.0, True, both, first
        results = b(node.target, x, initial, own, *one_layer)
        x = b(operator.getitem, results, 0)
        for i, of_layer in enumerate(last):
            of_layer.append(b(operator.getitem, results, i + 1))
    return (x, *(b(aten.cat.default, of_layer, 0) for of_layer in last))


def cell(node: fx.Node) -> Rule:
    """lstm_cell, gru_cell, rnn_cell: one step; biases may be missing."""
    return _over_batch(node, "b 1", "b 1", ["1 1", "1 1", "1", "1"])


def _over_batch(node: fx.Node, x: str, state: str, weights: list[str]) -> Rule:
    """The rule of a layer, from the specs of its input, of a state and of its weights."""
    states = [state] * len(_states(node))
    results = [x, *states] if len(results_of(node)) > len(states) else states
    return parse_row(Row(f"{', '.join([x, *states, *weights])} -> {', '.join(results)}"), node)


_LAYERS = (aten.gru.input, aten.lstm.input, aten.rnn_relu.input, aten.rnn_tanh.input)
_CELLS = (aten.gru_cell.default, aten.lstm_cell.default, aten.rnn_relu_cell.default, aten.rnn_tanh_cell.default)

ROWS: dict[Any, Row | RowFunction] = {
    **dict.fromkeys(_CELLS, cell),
    **dict.fromkeys(_LAYERS, recurrent),
}

EXPANSIONS: dict[Any, Expansion] = dict.fromkeys(_LAYERS, _layer_by_layer)
