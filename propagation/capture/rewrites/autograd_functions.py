"""The backward of a torch.autograd.Function, in a graph whose backward autograd derives.

torch.export keeps the operators of the Function's forward and nothing of its backward, so that the gradient would be
wrong. A backward is linear in the gradient that it takes: g ↦ B g. With Bᵀ its transpose,

    y = detach(forward(x)) + Bᵀ (x - stationary(x))

has the value of the forward, and its gradient is B g. These are plain operators, planned like any others. (The gradient
of B g would be another one, and is refused.)

While a function is captured (`recorded`), the backward is called on a stand-in for the gradient, and two operators mark
where it begins and ends; `adopt` then transposes the operators between them.

    partway::cotangent(y)        a stand-in for the gradient of y
    partway::with_backward(outputs, cotangents, inputs, gradients)
                                 the outputs, whose backward computes `gradients` from `cotangents`
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd import Function
from torch.fx.node import map_arg

from ....strategy.basics.blocks import afterwards
from ....strategy.errors import CaptureError
from ...graph.nodes import at_source, module_path, source_of, stays, value
from ...ops.by_hand import COLLECTIVES
from ...ops.constants import stationary
from ...rules.builder import Builder
from ...torch_internals import FunctionBase, make_fx

aten = torch.ops.aten
_ZEROS = frozenset({aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default})

_LIBRARY = torch.library.Library("partway", "FRAGMENT")
_LIBRARY.define("cotangent(Tensor y) -> Tensor")
_LIBRARY.define("with_backward(Tensor[] outputs, Tensor[] cotangents, Tensor[] inputs, Tensor[] gradients) -> Tensor[]")
cotangent = torch.ops.partway.cotangent.default
with_backward = torch.ops.partway.with_backward.default


@torch.library.register_fake("partway::cotangent")  # type: ignore[untyped-decorator]
def _fake_cotangent(y: Tensor) -> Tensor:
    return torch.empty_like(y)


@torch.library.register_fake("partway::with_backward")  # type: ignore[untyped-decorator]
def _fake_with_backward(outputs: list[Tensor], *_: Any) -> list[Tensor]:
    return [torch.empty_like(y) for y in outputs]


class _Context:
    """The `ctx` that a Function's forward and backward share."""

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self.saved_tensors: tuple[Tensor | None, ...] = ()
        self.constant: tuple[Tensor, ...] = ()

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Keep tensors for the backward."""
        self.saved_tensors = tensors

    def save_for_forward(self, *tensors: Tensor | None) -> None:
        """Do nothing: there is no forward mode."""

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        """Note the results without a gradient."""
        self.constant = tensors

    def mark_dirty(self, *_: Tensor) -> None:
        """Raise CaptureError."""
        raise CaptureError("writes to its arguments in place (mark_dirty); let its forward return new tensors")

    def set_materialize_grads(self, _: bool) -> None:
        """Do nothing: the stand-ins are always tensors."""


@contextlib.contextmanager
def recorded() -> Iterator[None]:
    """While a function is captured, record this thread's calls of Functions with their backward. (PyTorch's own
    Functions, such as those of torch.utils.checkpoint, run unchanged.)

    `apply` is replaced meanwhile: neither modes nor dispatch keys see such a call, and the gradients would silently be
    wrong. So is the `apply` of its base class, since a user may have kept the method itself (`op = MyFunction.apply`).
    """
    plain, thread = Function.__dict__["apply"], threading.get_ident()

    def calling(otherwise: Callable[[Any], Callable[..., Any]]) -> Any:
        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            ours = threading.get_ident() == thread and cls.__module__.split(".")[0] != "torch"
            if not ours or not torch.is_grad_enabled():
                return otherwise(cls)(*args, **kwargs)
            try:
                return _record(cls, args, kwargs)
            except CaptureError as error:
                raise CaptureError(f"{cls.__qualname__}, a torch.autograd.Function, {error}") from None

        return classmethod(apply)

    def restore() -> None:
        Function.apply = plain  # type: ignore[method-assign]
        if not nested and "apply" in vars(FunctionBase):
            del FunctionBase.apply

    nested = "apply" in vars(FunctionBase)
    with afterwards(restore):
        Function.apply = calling(lambda cls: plain.__get__(None, cls))  # type: ignore[method-assign]
        if not nested:
            FunctionBase.apply = calling(lambda cls: super(FunctionBase, cls).apply)
        yield


def _record(cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run forward and backward of the Function `cls`, marked by `cotangent` and `with_backward`."""
    context = _Context(tuple(isinstance(a, Tensor) and a.is_floating_point() for a in args))
    if cls.setup_context is not Function.setup_context:
        bound = inspect.signature(cls.forward).bind(*args, **kwargs)
        bound.apply_defaults()
        args = bound.args
        context.needs_input_grad = tuple(isinstance(a, Tensor) and a.is_floating_point() for a in args)
        output = cls.forward(*args)
        cls.setup_context(context, args, output)
    else:
        output = cls.forward(context, *args, **kwargs)
    results = output if isinstance(output, tuple) else (output,)
    stand_ins = [cotangent(y) if isinstance(y, Tensor) else None for y in results]
    backward = inspect.unwrap(cls.backward)(context, *stand_ins)
    backward = backward if isinstance(backward, tuple) else (backward,)
    pairs = [(x, g) for x, g in zip(args, backward, strict=False) if isinstance(x, Tensor) and isinstance(g, Tensor)]
    able = [i for i, y in enumerate(results) if isinstance(y, Tensor) and y.is_floating_point()]
    able = [i for i in able if not any(results[i] is y for y in context.constant)]
    new = list(results)
    if able and pairs:
        inputs, gradients = (list(side) for side in zip(*pairs, strict=True))
        outputs = with_backward([results[i] for i in able], [stand_ins[i] for i in able], inputs, gradients)
        for i, y in zip(able, outputs, strict=True):
            new[i] = y
    new = [y.detach() if isinstance(y, Tensor) and i not in able else y for i, y in enumerate(new)]
    return tuple(new) if isinstance(output, tuple) else new[0]


def adopt(module: fx.GraphModule) -> None:
    """Replace every recorded backward by its transpose (in place; capture owns the module)."""
    for node in list(module.graph.nodes):
        if node.target is with_backward:
            _check_local(node)
            _transpose(Builder(module.graph, node, 1, {}), node)
    module.graph.eliminate_dead_code(is_impure_node=stays)


def _check_local(node: fx.Node) -> None:
    """Raise CaptureError where the forward or backward of a Function calls a collective: only its author knows what the
    gradients of the ranks mean there."""
    outputs, cotangents, inputs, gradients = (list(part) for part in node.args)  # type: ignore[arg-type]
    inside = [n for end in outputs for n in _between(inputs, end)]
    inside += [n for end in gradients for n in _between(cotangents, end)]
    for called in inside:
        if called.target in COLLECTIVES:
            raise CaptureError(
                f"a torch.autograd.Function in {module_path(node) or 'the function'} calls {called.target}; call the "
                f"collective without the Function: in a manual function each has the gradient of the "
                f"whole{at_source(called)}"
            )


def _transpose(b: Builder, node: fx.Node) -> None:
    """Replace a call of `with_backward` by its outputs, with the transposed backward added."""
    outputs, cotangents, inputs, gradients = (list(part) for part in node.args)  # type: ignore[arg-type]
    moved = [b(aten.sub.Tensor, x, b(stationary, x, "a torch.autograd.Function")) for x in inputs]
    added: list[fx.Node | None] = [None] * len(outputs)
    for x, gradient in zip(moved, gradients, strict=True):
        for j, addend in enumerate(_transposed(b, cotangents, gradient, x)):
            before = added[j]
            added[j] = addend if before is None or addend is None else b(aten.add.Tensor, before, addend)
            added[j] = added[j] if added[j] is not None else before
    for item in list(node.users):
        j = source_of(item).index
        y, addend = b(aten.detach.default, outputs[j]), added[j]
        item.replace_all_uses_with(y if addend is None else b(aten.add.Tensor, y, addend))
        node.graph.erase_node(item)
    node.graph.erase_node(node)


def _transposed(b: Builder, cotangents: list[fx.Node], gradient: fx.Node, x: fx.Node) -> list[fx.Node | None]:
    """For each cotangent, the transpose of its map to `gradient`, applied to x; None for a cotangent without effect.
    Raises CaptureError for a map that is not linear."""
    if gradient in cotangents:  # passed on unchanged, as in a straight-through estimator
        gradient = b(aten.clone.default, gradient)
    inner = _between(cotangents, gradient)
    if not inner:
        if gradient.target in _ZEROS:
            return [None] * len(cotangents)
        raise _not_linear(gradient)
    part, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    outer = list({n: None for node in inner for n in node.all_input_nodes if n not in {*inner, *cotangents}})
    for n in (*cotangents, *outer):
        copies[n] = part.placeholder(n.name)
    for n in inner:
        copies[n] = part.node_copy(n, copies.__getitem__)
    part.output(copies[gradient])
    backward = fx.GraphModule({}, part)

    def transpose(gradients: list[Tensor], others: list[Tensor], v: Tensor) -> list[Tensor | None]:
        variables = [g.detach().requires_grad_() for g in gradients]
        with torch.enable_grad():
            y = fx.Interpreter(backward).run(*variables, *others)
        v = v.to(y.dtype) if v.shape == y.shape else v.to(y.dtype).expand_as(y)
        return list(torch.autograd.grad(y, variables, v, allow_unused=True)) if y.requires_grad else []

    values = [value(n) for n in cotangents], [value(n).detach() for n in outer], value(x).detach()
    traced = make_fx(transpose)(*values)
    traced.graph.eliminate_dead_code()
    placeholders = [n for n in traced.graph.nodes if n.op == "placeholder"]
    if any(n.users for n in placeholders[: len(cotangents)]):
        raise _not_linear(gradient)
    env: dict[fx.Node, Any] = dict(zip(placeholders, [*cotangents, *outer, x], strict=True))
    for n in traced.graph.nodes:
        if n.op == "call_function":
            args, kwargs = map_arg((n.args, n.kwargs), env.__getitem__)
            env[n] = b(n.target, *args, **kwargs)
    final = next(n for n in traced.graph.nodes if n.op == "output").args[0]
    return [None if n is None else env[n] for n in final] or [None] * len(cotangents)


def _not_linear(gradient: fx.Node) -> CaptureError:
    return CaptureError(
        f"a torch.autograd.Function in {module_path(gradient) or 'the function'} has a backward that is not linear "
        "in the gradient it is given, as one that clips it, or leaves it out; change the gradient after backward(), or "
        f"do this part outside the sharded function{at_source(gradient)}"
    )


def _between(cotangents: list[fx.Node], gradient: fx.Node) -> list[fx.Node]:
    """The nodes that compute `gradient` from `cotangents`, in order."""
    reached: dict[fx.Node, bool] = dict.fromkeys(cotangents, True)
    order: list[fx.Node] = []
    stack = [(gradient, False)]
    while stack:
        node, ready = stack.pop()
        if ready:
            reached[node] = any(reached[n] for n in node.all_input_nodes)
            if reached[node]:
                order.append(node)
        elif node not in reached:
            reached[node] = False
            stack.append((node, True))
            stack += [(n, False) for n in node.all_input_nodes]
    return order
