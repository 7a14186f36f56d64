"""Arguments and results come apart into tensors, and go together again."""

from dataclasses import dataclass

import torch
from torch import fx

from partway.propagation.capture.capture import capture
from partway.propagation.graph.port import Role
from partway.propagation.graph.structure import flatten, flatten_call


def names(graph, role):
    return [port.name for port in graph.inputs if port.role is role]


def run(graph, **tensors):
    """The outputs of a captured graph, its inputs given by name."""
    given = {**graph.constants, **tensors}
    return fx.Interpreter(graph.module).run(*(given[port.name] for port in graph.inputs))


@dataclass
class Batch:
    x: torch.Tensor
    scale: float
    mask: torch.Tensor | None = None


@dataclass
class Output:
    loss: torch.Tensor
    parts: dict
    note: str


def test_arguments_and_results_keep_their_structure():
    def fn(batch, others, *, power=2, unused=None):
        y = batch.x * batch.scale + others["a"][0] ** power
        return Output(y.sum(), {"y": y, "n": 3}, "done"), None

    x, a = torch.ones(2, 3), torch.full((3,), 2.0)
    graph = capture(fn, (Batch(x, 0.5),), {"others": {"a": (a, 7)}, "power": 3})
    assert names(graph, Role.INPUT) == ["batch[0]", "others[0]"]
    assert [port.argument for port in graph.inputs] == ["batch", "others"]
    assert [port.name for port in graph.outputs] == ["result[0]", "result[1]"]
    built, nothing = graph.result.build(list(run(graph, **{"batch[0]": x, "others[0]": a})))
    assert nothing is None
    assert isinstance(built, Output)
    assert built.note == "done"
    assert built.parts["n"] == 3
    torch.testing.assert_close(built.parts["y"], x * 0.5 + a**3)
    assert built.loss == built.parts["y"].sum()


class Memory:
    """Holds tensors, and what to do with them, as a cache of transformers does."""

    def __init__(self, *kept):
        self.layers = [*kept]
        self.make, self.length = torch.zeros_like, 0

    def add(self, x):
        self.layers.append(x)
        self.length += len(x)


def test_an_object_that_holds_tensors_is_a_result():
    def fn(x):
        memory = Memory()
        memory.add(x + 1)
        return x.sum(), memory

    x = torch.ones(2)
    graph = capture(fn, (x,), {})
    _, memory = graph.result.build(list(run(graph, x=x)))
    assert isinstance(memory, Memory)
    assert (memory.make, memory.length) == (torch.zeros_like, 2)
    torch.testing.assert_close(memory.layers, [x + 1])


def test_an_object_that_holds_tensors_is_an_argument_and_stays_as_it_was():
    def fn(memory, x):
        memory.add(memory.layers[0] * x)
        return memory

    given, x = Memory(torch.full((2,), 3.0)), torch.full((2,), 2.0)
    graph = capture(fn, (given, x), {})
    assert names(graph, Role.INPUT) == ["memory[0]", "x"]
    memory = graph.result.build(list(run(graph, **{"memory[0]": given.layers[0], "x": x})))
    torch.testing.assert_close(memory.layers, [given.layers[0], given.layers[0] * x])
    assert len(given.layers) == 1
    assert given.length == 0


def test_an_object_that_the_function_fills_is_not_the_callers():
    given = Memory()
    graph = capture(lambda memory, x: memory.add(x + 1) or memory, (given, torch.ones(2)), {})
    assert graph.result.count() == 1
    assert given.layers == []


def test_calls_with_equal_objects_have_one_structure():
    def key(*tensors):
        return flatten_call(lambda memory: memory, (Memory(*tensors),), {}).structure.key()

    assert key() == key()
    assert key(torch.ones(2)) == key(torch.zeros(2))
    assert key() != key(torch.ones(2))


def test_an_object_that_holds_itself_or_what_cannot_be_copied_stays_whole():
    ring, opened = Memory(), Memory()
    ring.layers.append(ring)
    opened.layers.append(iter(()))
    for given in (ring, opened):
        assert flatten(given)[1].build([]) is given


def test_arguments_are_named_by_the_signature():
    graph = capture(
        lambda first, *rest, last: first + rest[0] + last, (torch.ones(2), torch.ones(2)), {"last": torch.ones(2)}
    )
    assert names(graph, Role.INPUT) == ["first", "arg1", "last"]
