"""Instructions by type; and one that is awaited without another rank, as a copy to the host would be."""

import operator

import pytest
import torch
from torch import fx

from partway.propagation.ops.collectives import convert
from partway.propagation.ops.indexing import position
from partway.runtime import Simulator
from partway.runtime.code import memory
from partway.runtime.code.assemble import assemble_code
from partway.runtime.code.instructions import CallOperator, ConvertLayout, TellPosition
from partway.runtime.code.sections import stretches_of
from partway.runtime.code.straight_line import compile_code
from partway.runtime.executors.one_device import OneDevice
from partway.runtime.executors.peak import _waits
from partway.strategy import Mesh

EVENTS = []


class Later:
    def __init__(self, value):
        self.value = value

    def wait(self):
        EVENTS.append("wait")
        return self.value


def away(x):
    EVENTS.append("start")
    return Later(x)


def turned(x):
    EVENTS.append("neg")
    return -x


@pytest.fixture
def graph(monkeypatch):
    """What is sent away, while something else is computed, and then read."""
    monkeypatch.setattr(memory, "AWAITED", frozenset({away}))
    EVENTS.clear()
    text = fx.Graph()
    x = text.placeholder("x")
    sent, other = text.call_function(away, (x,)), text.call_function(turned, (x,))
    text.output((text.call_function(operator.add, (sent, other)), other))
    return text


def code_of(graph):
    return assemble_code(fx.GraphModule({}, graph), "forward")


class Late:
    late = True

    def express(self, step, bind):
        return step.expression(in_place=True, late=True)

    def ranks(self, c):
        return ()


def test_what_is_awaited_is_waited_for_where_it_is_read(graph):
    total, _ = compile_code(code_of(graph), Late())([torch.ones(3)])
    assert EVENTS == ["start", "neg", "wait"]
    assert total.tolist() == [0.0] * 3
    nodes = list(graph.nodes)
    assert _waits(nodes, {node: i for i, node in enumerate(nodes)}, len(nodes)) == {nodes[1]: 3}


def test_an_executor_that_waits_for_nothing_has_the_value_at_once(graph):
    code, mesh = code_of(graph), Mesh({"d": 2})
    assert OneDevice(Mesh({"d": 1})).run(code, [torch.ones(3)])[0].tolist() == [0.0] * 3
    assert EVENTS == ["start", "wait", "neg"]
    assert [part.tolist() for part in Simulator(mesh).run(code, [[torch.ones(3)] * 2])[0]] == [[0.0] * 3] * 2


def test_what_is_awaited_need_not_be_met_for(graph):
    code = code_of(graph)
    (sent, *_) = code.instructions
    assert (sent.awaited, sent.communicates) == (True, False)
    assert len(stretches_of(code)) == 1
    assert stretches_of(code)[0].meetings == ()


def test_an_instruction_is_a_call_a_conversion_or_a_position():
    text = fx.Graph()
    x = text.placeholder("x")
    place = text.call_function(position, (["d"], [2]))
    whole = text.call_function(convert, (x, "S0", "R", ["d"], 2, 0))
    part = text.call_function(convert, (whole, "R", "S0", ["d"], 2, 1))
    text.output((place, whole, part, text.call_function(torch.ops.aten.neg.default, (part,))))
    steps = code_of(text).instructions
    assert [type(step) for step in steps] == [TellPosition, ConvertLayout, ConvertLayout, CallOperator]
    assert [(step.awaited, step.communicates) for step in steps] == [
        (False, False),
        (True, True),
        *[(False, False)] * 2,
    ]
