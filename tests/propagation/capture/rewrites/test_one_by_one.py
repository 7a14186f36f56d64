"""A program that is written out call by call is the one that torch.export makes of it whole."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from partway.propagation.capture.capture import capture
from partway.propagation.capture.rewrites import decomposition, one_by_one
from partway.propagation.torch_internals import tree_leaves
from partway.strategy import CaptureError

X = torch.rand(2, 4, 8)
GENERATED = re.compile(r'^ *File "<.*\n.*\n?', re.MULTILINE)  # lines of code that torch generates, and numbers


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each program was written out call by call; then it is compared with what is made of it whole."""
    found: list[bool] = []
    plain = one_by_one.written_one_by_one

    def compared(*args: Any) -> Any:
        written = plain(*args)
        found.append(written is not None)
        if written is not None:
            whole = decomposition.decompose(*args)
            assert texts(*written) == texts(whole.graph_module, whole.graph_signature)
        return written

    monkeypatch.setattr(decomposition, "written_one_by_one", compared)
    return found


def texts(module: fx.GraphModule, signature: Any) -> list[Any]:
    """All that a program says, of a node in each line."""
    found: list[Any] = [str(signature)]
    for node in module.graph.nodes:
        found.append((node.op, node.name, str(node.target), str(node.args), str(node.kwargs)))
        found += [
            (each.dtype, each.device, each.shape, each.stride(), each.storage_offset(), each.requires_grad)
            for each in tree_leaves(node.meta.get("val"))
            if isinstance(each, Tensor)
        ]
        if node.op == "call_function":
            lines = GENERATED.sub("", node.meta.get("stack_trace") or "")
            found += [node.meta.get("nn_module_stack"), lines, node.meta.get("custom")]
    later = [
        module.graph.call_function(node.target, node.args, node.kwargs).name for node in [*module.graph.nodes][-3:-1]
    ]
    return [*found, later]


class Layer(nn.Module):
    """A layer whose calls are written out as several, as none, as views, and as operators with several results."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (2, 4)).transpose(1, 2) for each in self.inner(self.norm(x)).split(8, -1))
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            scale = (q @ k.mT).to(torch.float32).amax((-1, -2), keepdim=True).contiguous()
        y = F.scaled_dot_product_attention(q * scale, k.contiguous(), v.repeat(1, 1, 1, 1))
        y = y.transpose(1, 2).reshape(x.shape).to(x.dtype)
        return x + F.dropout(self.outer(y), 0.1, self.training) * (y == y.to(x.dtype)).diff(dim=1, prepend=y[:, :1] > 0)


def layers(count: int) -> nn.Sequential:
    return nn.Sequential(*(Layer() for _ in range(count)))


def test_layers_are_written_out_as_in_the_whole_program(short: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[Any] = []
    plain = one_by_one._run
    monkeypatch.setattr(one_by_one, "_run", lambda target, *given: traced.append(target) or plain(target, *given))
    graph = capture(layers(6), (X,), {})
    assert short == [True]
    assert len(traced) < len(graph.nodes) / 2


@pytest.mark.parametrize("train", [True, False])
def test_no_operand_is_taken_for_another(train: bool, short: list[bool]) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        capture(layers(4).train(train), (X[:, 1:].requires_grad_(),), {})
    assert short == [True]


def numbers(x: Tensor) -> list[Tensor]:
    n = x.long()
    return [n + 1, n + 1.0, n + True, n * 2, n * 2.0, n.float() * float("inf"), -n.float() * 0.0, n.float() * -0.0]


def places(x: Tensor) -> list[Tensor]:
    y = x * 2
    return [
        x - y,
        y - x,
        x - x,
        y - y,
        x.to(x.dtype) - x,
        torch.stack([x, y]),
        torch.stack([y, x]),
        torch.stack([x, x]),
    ]


def layouts(x: Tensor) -> list[Tensor]:
    part = x[:, 1:]
    return [
        each.reshape(-1)
        for each in (x, x.mT, part, part.contiguous(), x.expand(3, 2, 4, 8), x.as_strided((2, 2), (1, 2)))
    ]


def results(x: Tensor) -> list[Tensor]:
    return [x, x.view(-1), *x.max(-1), *x.unbind(1)[1:3], F.dropout(x, 0.5, False), x.detach(), *torch.var_mean(x, 1)]


@pytest.mark.parametrize("fn", [numbers, places, layouts, results])
def test_calls_of_one_operator_are_of_one_kind_only_where_they_are_written_alike(
    fn: Callable[[Tensor], list[Tensor]], short: list[bool]
) -> None:
    capture(lambda x: [each for _ in range(6) for each in fn(x)], (X,), {})
    assert short == [True]


def write(x: Tensor) -> Tensor:
    return x.clone().add_(1)


def write_unsaid(x: Tensor) -> Tensor:
    """A BatchNorm writes to its statistics, which its schema does not say."""
    mean, variance = x.new_zeros(4), x.new_ones(4)
    return F.batch_norm(x, mean, variance, training=True) + mean[:, None] + variance[:, None]


def branch(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))  # type: ignore[no-any-return]


@pytest.mark.parametrize("fn", [write, write_unsaid, branch])
def test_what_is_not_certain_is_written_out_whole(fn: Callable[[Tensor], Tensor], short: list[bool]) -> None:
    def repeated(x: Tensor) -> Tensor:
        for _ in range(6):
            x = fn(x)
        return x

    capture(repeated, (X,), {})
    assert short == [False]


def test_few_calls_of_a_kind_are_written_out_whole(short: list[bool]) -> None:
    capture(layers(1), (X,), {})
    assert short == [False]


def test_what_cannot_be_written_out_is_refused_as_torch_says(
    monkeypatch: pytest.MonkeyPatch, short: list[bool]
) -> None:
    def failing(*_: Any) -> Any:
        raise RuntimeError("it cannot")

    monkeypatch.setattr(one_by_one, "_written", failing)
    capture(layers(6), (X,), {})
    monkeypatch.setattr(decomposition, "decompose", failing)
    with pytest.raises(CaptureError, match="it cannot"):
        capture(layers(6), (X,), {})
    assert short == [False, False]
