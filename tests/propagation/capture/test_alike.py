"""Modules that are alike are traced once, and the graph is that of a trace of all; what is not alike is traced."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from partway.propagation.capture import capture as capturing
from partway.propagation.capture.alike import Alike
from partway.propagation.capture.capture import CaptureOptions, capture
from partway.propagation.graph.graph import Graph
from partway.propagation.torch_internals import tree_leaves
from partway.strategy import CaptureError
from tests.helpers.alike_layers import ALIKE, HOSTILE, LAYERS, WIDTH, Counted, Counts, Deep, Global, Layer, X


@pytest.fixture(autouse=True, scope="module")
def checkpointed_before() -> None:
    """The first checkpoint that a process captures goes through other wrappers of PyTorch's than all later ones, so
    that of its layers one more is traced."""
    make, args, _ = ALIKE["checkpointed"]
    capture(make(), args, {})


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many modules were copied, in each attempt that gave a graph."""
    counts: list[int] = []
    plain = capturing._with_copies

    def counted(attempt: Any) -> Any:
        found = plain(attempt)
        counts.append(found[0].alike.copies if found else 0)
        return found

    monkeypatch.setattr(capturing, "_with_copies", counted)
    return counts


def told(val: Any) -> list[Any]:
    """What a graph says of values."""
    leaves = [each for each in tree_leaves(val) if isinstance(each, Tensor)]
    return [(each.dtype, each.device, each.shape, each.stride(), each.requires_grad) for each in leaves]


def texts(graph: Graph) -> list[Any]:
    """All that a graph says, of a node in each line."""
    found: list[Any] = []
    for node in graph.module.graph.nodes:
        trace = re.sub(r'(?m)^ *File "<.*\n.*\n?', "", node.meta.get("stack_trace") or "")
        where = [*(node.meta.get("nn_module_stack") or {}).items()]
        call = str(node.target), str(node.args), str(node.kwargs)
        found.append((node.op, node.name, *call, told(node.meta.get("val")), where, trace, node.meta.get("custom")))
    ports = (*graph.inputs, *graph.outputs)
    found += [(port.node.name, port.role, port.name, port.requires_grad) for port in ports]
    return [*found, str(graph.result), str(graph.aliases), sorted(map(str, graph.constants)), graph.device]


def check(
    make: Callable[[], nn.Module], args: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch, **kwargs: Any
) -> Graph:
    """The graph of a call, which is that of a trace of all, and computes what the function does."""
    graph = capture(make(), args, kwargs)
    with monkeypatch.context() as patch:
        patch.setattr(capturing, "_with_copies", lambda attempt: None)
        whole = capture(make(), args, {})
    for one, other in zip(texts(graph), texts(whole), strict=True):
        assert one == other
    return graph


def values_of(graph: Graph, fn: nn.Module, tensors: dict[str, Tensor]) -> list[Tensor]:
    """What a graph without random numbers computes."""
    state = {**dict(fn.named_parameters(remove_duplicate=False)), **dict(fn.named_buffers(remove_duplicate=False))}
    given = [
        graph.constants[port.name] if port.name in graph.constants else {**state, **tensors}[port.name]
        for port in graph.inputs
    ]
    return list(fx.Interpreter(graph.module).run(*given))


def test_layers_that_are_alike_are_traced_twice(copies: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    fn, x = Deep(Layer).double(), torch.randn(2, 3, WIDTH, dtype=torch.float64, requires_grad=True)
    graph = check(lambda: fn, (x,), monkeypatch)
    assert copies == [LAYERS - 2]
    (y,) = values_of(graph, fn, {"x": x})
    torch.testing.assert_close(y, fn(x))
    state = dict(fn.named_parameters())
    torch.testing.assert_close(
        torch.autograd.grad(y.square().sum(), list(state.values())),
        torch.autograd.grad(fn(x).square().sum(), list(state.values())),
    )


@pytest.mark.parametrize("case", ALIKE)
def test_what_is_alike_gives_the_graph_of_a_trace_of_all(
    case: str, copies: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    make, args, count = ALIKE[case]
    torch.manual_seed(0)
    check(make, args, monkeypatch)
    assert copies == [count]


class OnlyFirst(Layer):
    """A layer of which only the first adds something, as where a cache is filled; or also the second."""

    more = 1

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)
        return y + self.place if self.place < OnlyFirst.more else y


@pytest.mark.parametrize(("more", "count"), [(0, LAYERS - 2), (1, LAYERS - 3), (2, 0)])
def test_the_first_may_be_unlike_the_others(
    more: int, count: int, copies: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OnlyFirst, "more", more)
    graph = check(lambda: Deep(OnlyFirst), (X,), monkeypatch)
    assert copies == [count]
    assert len(graph.module.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default)) == LAYERS


def test_python_runs_once_for_each_layer(copies: list[int]) -> None:
    Counts.calls = 0
    capture(Deep(Counts), (X,), {})
    assert (copies, Counts.calls) == ([3], LAYERS)


@pytest.mark.parametrize("case", HOSTILE)
def test_what_is_not_alike_gives_the_graph_of_a_trace_of_all(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, args = HOSTILE[case]
    torch.manual_seed(0)
    monkeypatch.setattr(Global, "calls", 0)
    check(make, args, monkeypatch)


class Raises(Layer):
    def forward(self, x: Tensor) -> Tensor:
        if self.place == 3:
            raise RuntimeError("the third layer does not like it")
        y: Tensor = super().forward(x)
        return y


def test_what_python_counts_is_what_a_trace_of_all_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counted, "count", 0)
    graphs = capture(Deep(Counted), (X,), {})
    first = Counted.count
    monkeypatch.setattr(capturing, "_with_copies", lambda attempt: None)
    monkeypatch.setattr(Counted, "count", 0)
    assert texts(graphs) == texts(capture(Deep(Counted), (X,), {}))
    assert Counted.count == LAYERS < first  # the first attempt ended where a stand-in had been marked


def test_an_error_of_a_layer_names_its_line() -> None:
    with pytest.raises(CaptureError, match=r"the third layer does not like it[\s\S]*in forward: raise RuntimeError"):
        capture(Deep(Raises), (X,), {})


def test_a_function_whose_course_depends_on_values_is_traced_whole(copies: list[int]) -> None:
    class Asks(Layer):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = super().forward(x)
            return y if (x > 0).any() else y * 2

    with pytest.raises(CaptureError, match="depends on the values"):
        capture(Deep(Asks), (X,), {}, CaptureOptions())
    assert copies == [0]


def test_modules_have_their_own_forward_again() -> None:
    fn = Deep(Layer)
    with Alike(fn, Deep.forward.__code__).watching():
        assert "forward" in vars(fn.layers[0])
    assert not any("forward" in vars(module) for module in fn.modules())
