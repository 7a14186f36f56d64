"""From a callable and one call of it to a Graph: `torch.export`, then a few named passes.

The passes, in order:

    export         torch.export (non-strict), the training IR
    stop_gradients results of `torch.no_grad` regions are detached, before the regions are inlined
    functionalize  run_decompositions({}): no in-place operators, `linear`, `layer_norm`, `cross_entropy_loss`,
                   `scaled_dot_product_attention` whole, autocast as casts, mutated buffers as outputs
    unify_tied     the inputs of one tied parameter become one
    expand         operators whose rule would not be local become sums and pointwise operators (expand.py)
    prune          views become reshapes; asserts and dead nodes go
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.export.graph_signature import InputKind, OutputKind

from ..strategy.errors import CaptureError, PartwayError
from .expand import expand
from .graph import Graph, Port, Role, requires_grad, source_of, value, verify
from .structure import Call, Structure, flatten, flatten_call
from .torch_internals import FakeTensor, tree_map

_capturing: ContextVar[bool] = ContextVar("capturing", default=False)


def capturing() -> bool:
    """Whether a function is being captured right now: a nested `shard` is then a constraint."""
    return _capturing.get()


def capture(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Graph:
    """Capture one call of `fn` (a function or nn.Module; meta tensors welcome) as a Graph.

    Raises CaptureError, naming the cause, when torch.export cannot make one static graph of it.
    """
    call = flatten_call(fn, args, kwargs)
    seen: list[Structure] = []
    flat = _Flat(fn, call, seen)
    example = tuple(t.detach().requires_grad_(t.requires_grad) for t in call.tensors)
    token = _capturing.set(True)
    try:
        with warnings.catch_warnings(), torch.enable_grad(), _plain_parameters(fn):
            warnings.simplefilter("ignore")
            exported = torch.export.export(flat, example, strict=False)
            _stop_gradients(exported.graph_module)
            exported = exported.run_decompositions({})
    except PartwayError:
        raise
    except Exception as error:  # torch.export raises many types; the caller's code may raise any
        raise CaptureError(
            f"could not capture {_name(fn)} as one static graph: {type(error).__name__}: {error}\n"
            "Partway captures with torch.export: branches on tensor values, and calls into libraries that "
            "torch.export cannot trace, have to stay outside the sharded function"
        ) from error
    finally:
        _capturing.reset(token)
    return verify(_graph(exported, call, seen[-1], fn))


def _name(fn: Callable[..., Any]) -> str:
    return str(getattr(fn, "__qualname__", type(fn).__name__))


class _Flat(torch.nn.Module):
    """`fn` as a module from tensors to a tuple of tensors; what is around them is told to `seen`."""

    def __init__(self, fn: Callable[..., Any], call: Call, seen: list[Structure]) -> None:
        super().__init__()
        self.fn = fn
        self.call = call
        self.seen = seen.append  # a bound method: torch.export puts back what forward does to attributes

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        args, kwargs = self.call.structure.build(list(tensors))
        results, structure = flatten(self.fn(*args, **kwargs))
        self.seen(structure)
        return tuple(results)


@contextlib.contextmanager
def _plain_parameters(fn: Callable[..., Any]) -> Iterator[None]:
    """While a module whose parameters are DTensors is captured, ordinary empty tensors of their global shape
    stand in for them (meta data is all that capture reads)."""
    swapped: list[tuple[torch.nn.Module, str, torch.nn.Parameter]] = []
    plain: dict[int, torch.nn.Parameter] = {}
    if isinstance(fn, torch.nn.Module):
        for module in fn.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and hasattr(parameter, "placements"):
                    swapped.append((module, name, parameter))
    try:
        for module, name, parameter in swapped:
            if id(parameter) not in plain:
                empty = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
                plain[id(parameter)] = torch.nn.Parameter(empty, requires_grad=parameter.requires_grad)
            module._parameters[name] = plain[id(parameter)]
        yield
    finally:
        for module, name, parameter in swapped:
            module._parameters[name] = parameter


def _stop_gradients(module: fx.GraphModule) -> None:
    """Detach what `torch.no_grad` regions return: inlining them would let gradients through."""
    for node in list(module.graph.nodes):
        if node.target is torch.ops.higher_order.wrap_with_set_grad_enabled and node.args[0] is False:
            for result in list(node.users):
                with module.graph.inserting_after(result):
                    stopped = module.graph.call_function(torch.ops.aten.detach.default, (result,))
                stopped.meta = dict(result.meta)
                result.replace_all_uses_with(stopped, delete_user_cb=lambda user, stopped=stopped: user is not stopped)
    for child in module.children():
        if isinstance(child, fx.GraphModule):
            _stop_gradients(child)
    module.recompile()


def _graph(exported: torch.export.ExportedProgram, call: Call, result: Structure, fn: Callable[..., Any]) -> Graph:
    module = fx.GraphModule(exported.graph_module, exported.graph)
    placeholders = {node.name: node for node in module.graph.nodes if node.op == "placeholder"}
    ports: list[Port] = []
    aliases: dict[str, str] = {}
    constants: dict[str, torch.Tensor] = {}
    first_of: dict[int, Port] = {}
    state = _state(fn)
    position = 0
    for spec in exported.graph_signature.input_specs:
        node = placeholders[spec.arg.name]
        target = (spec.target or "").removeprefix("fn.")
        match spec.kind:
            case InputKind.PARAMETER | InputKind.BUFFER:
                role = Role.PARAMETER if spec.kind is InputKind.PARAMETER else Role.BUFFER
                tensor = state[target]
                port = Port(node, role, target, requires_grad=tensor.requires_grad)
                if id(tensor) in first_of:  # tied: two names, one tensor
                    node.replace_all_uses_with(first_of[id(tensor)].node)
                    aliases[target] = first_of[id(tensor)].name
                    module.graph.erase_node(node)
                    continue
                first_of[id(tensor)] = port
            case InputKind.CONSTANT_TENSOR:
                tensor = exported.constants[spec.target or ""]
                port = Port(node, Role.CONSTANT, target, requires_grad=tensor.requires_grad)
                constants[target] = tensor
            case InputKind.USER_INPUT:
                tensor = call.tensors[position]
                port = Port(node, Role.INPUT, call.names[position], call.arguments[position], tensor.requires_grad)
                position += 1
            case _:
                raise CaptureError(f"inputs of kind {spec.kind} ({spec.arg.name}) are not supported")
        ports.append(port)
    outputs = _outputs(exported, module, result)
    device = next((value(port.node).device.type for port in ports), "cpu")
    if device == "meta":
        _leave_meta(module)
    expand(module)
    _prune(module)
    final = next(node for node in module.graph.nodes if node.op == "output").args[0]
    graph = Graph(module, tuple(ports), (), result, aliases, constants, device)
    needs = requires_grad(graph)
    renewed = tuple(
        Port(node, port.role, port.name, requires_grad=port.role is Role.RESULT and source_of(node) in needs)
        for node, port in zip(final, outputs, strict=True)
    )
    return replace(graph, outputs=renewed)


def _state(fn: Callable[..., Any]) -> dict[str, torch.Tensor]:
    if not isinstance(fn, torch.nn.Module):
        return {}
    named: dict[str, torch.Tensor] = dict(fn.named_buffers(remove_duplicate=False))
    named.update(fn.named_parameters(remove_duplicate=False))
    return named


def _outputs(exported: torch.export.ExportedProgram, module: fx.GraphModule, result: Structure) -> list[Port]:
    """The ports of the outputs; an input that the function writes to, other than a buffer, is refused."""
    returned = next(node for node in module.graph.nodes if node.op == "output").args[0]
    outputs: list[Port] = []
    names = result_names(result)
    for node, spec in zip(returned, exported.graph_signature.output_specs, strict=True):
        match spec.kind:
            case OutputKind.USER_OUTPUT:
                count = sum(port.role is Role.RESULT for port in outputs)
                outputs.append(Port(node, Role.RESULT, names[count]))
            case OutputKind.BUFFER_MUTATION:
                outputs.append(Port(node, Role.BUFFER_UPDATE, (spec.target or "").removeprefix("fn.")))
            case _:
                raise CaptureError(
                    f"the function writes to {spec.target!r}; write to a buffer of a module, or return the new value"
                )
    return outputs


def result_names(result: Structure) -> tuple[str, ...]:
    """A name for each tensor of a result: `result`, or `result[0]`, `result[1]`, ..."""
    tensors = result.count()
    return ("result",) if tensors == 1 else tuple(f"result[{i}]" for i in range(tensors))


def _leave_meta(module: fx.GraphModule) -> None:
    """Plan tensors of the meta device as if they were on the CPU: kernels and constants have to agree on one."""

    def moved(val: Any) -> Any:
        if isinstance(val, FakeTensor) and val.device.type == "meta":
            with val.fake_mode:
                return torch.empty_strided(val.shape, val.stride(), dtype=val.dtype, device="cpu")
        return val

    for node in module.graph.nodes:
        if "val" in node.meta:
            node.meta["val"] = tree_map(moved, node.meta["val"])
        if str(node.kwargs.get("device")) == "meta":
            node.kwargs = {**node.kwargs, "device": torch.device("cpu")}


def _prune(module: fx.GraphModule) -> None:
    """Drop asserts on meta data (they hold for the captured signature) and what nothing uses. Views become
    reshapes: whether one needs a copy depends on strides, and those of a local part are its own."""
    for node in reversed(list(module.graph.nodes)):
        if node.target in (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default):
            node.target = torch.ops.aten.reshape.default
        if node.op == "call_function" and "_assert" in str(node.target):
            module.graph.erase_node(node)
    module.graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
    module.recompile()
