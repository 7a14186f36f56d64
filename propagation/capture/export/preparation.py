"""Before and after torch.export: temporary changes while it traces a function, and checks of the exported program,
each with an error that names the line and says what to write instead."""

from __future__ import annotations

import contextlib
import logging
import operator
import random
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.distributions import Distribution

from ....strategy.basics.blocks import afterwards
from ....strategy.errors import CaptureError
from ...graph.graph import Graph
from ...graph.nodes import at_source, module_path, operands, operator_name, region_of, source_of, value
from ...graph.port import Role
from ...graph.structure import name_of
from ...torch_internals import (
    CONVERT,
    OpOverload,
    buffers_in,
    check_input_dim,
    distributions_validate,
    parameters_in,
    schema_of,
)
from ..rewrites.autograd_functions import recorded
from ..rewrites.control_flow import CONTROL
from .failures import Undecided
from .questions import Answering


class _Stderr:
    """A stream that drops the graph which torch.export prints when it fails."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._end = stream, ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write `text`, unless it is such a graph, or the end of its line."""
        graph = text.lstrip().startswith("def forward(self, arg0_1")
        dropped, self._end = graph or text == self._end, "\n" if graph else ""
        return len(text) if dropped else int(self._stream.write(text))

    def flush(self) -> None:
        """Flush the stream."""
        self._stream.flush()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide what torch.export logs and prints about a failure: the CaptureError reports it."""
    loggers = [
        logging.getLogger(f"torch.{name}") for name in ("_subclasses.fake_tensor", "fx.experimental.symbolic_shapes")
    ]
    before = [logger.disabled for logger in loggers]

    def restore() -> None:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled

    with afterwards(restore), contextlib.redirect_stderr(_Stderr(sys.stderr)):
        for logger in loggers:
            logger.disabled = True
        yield


@contextlib.contextmanager
def prepared(fn: Callable[..., Any], device: torch.device | None, checked: bool) -> Iterator[None]:
    """While `fn` is captured, replace parts of it that torch.export cannot trace. `device`: where its tensors of the
    meta device are; None: there. `checked`: torch.distributions check their parameters."""
    with (
        _plain_parameters(fn, device),
        _tensor_momenta(fn),
        _grouped_experts(fn),
        _conversions(fn),
        contextlib.nullcontext() if checked else _unchecked_distributions(),
        recorded(),
    ):
        yield


@contextlib.contextmanager
def _plain_parameters(fn: Callable[..., Any], device: torch.device | None) -> Iterator[None]:
    """While a module is captured, plain tensors of the global shape, without memory, replace DTensors, parameters that
    are not nn.Parameters (as torch.func.functional_call sets them), and, with a `device`, tensors of the meta device.
    (Capture reads only metadata.)"""
    swapped: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    plain: dict[int, torch.Tensor] = {}
    parameters: set[int] = set()
    if isinstance(fn, torch.nn.Module):
        parameters = {id(parameters_in(module)) for module in fn.modules()}
        for module in fn.modules():
            stores: tuple[dict[str, Any], ...] = parameters_in(module), buffers_in(module)
            for store in stores:
                for name, held in store.items():
                    if held is None:
                        continue
                    foreign = id(store) in parameters and not isinstance(held, torch.nn.Parameter)
                    odd = foreign or hasattr(held, "placements")
                    if odd or (device is not None and held.is_meta):
                        swapped.append((store, name, held))

    def restore() -> None:
        for store, name, held in swapped:
            store[name] = held

    with afterwards(restore):
        for store, name, held in swapped:
            if id(held) not in plain:
                place = device if held.is_meta else held.device
                empty = torch.empty(held.shape, dtype=held.dtype, device=place)
                if not empty.is_meta:
                    empty.untyped_storage().resize_(0)
                parameter = id(store) in parameters
                plain[id(held)] = torch.nn.Parameter(empty, requires_grad=held.requires_grad) if parameter else empty
            store[name] = plain[id(held)]
        yield


@contextlib.contextmanager
def _tensor_momenta(fn: Callable[..., Any]) -> Iterator[None]:
    """While a module is captured, its BatchNorms with momentum=None, whose running statistics are means over all
    batches so far, compute the weight of a batch as a tensor: a number would depend on the value of a tensor."""
    modules: list[Any] = list(fn.modules()) if isinstance(fn, torch.nn.Module) else []
    changed = [
        m for m in modules if type(m).forward is torch.nn.BatchNorm2d.forward and m.momentum is None and m.training
    ]
    with _with_methods([m for m in changed if m.track_running_stats], "forward", _cumulative_batch_norm):
        yield


@contextlib.contextmanager
def _grouped_experts(fn: Callable[..., Any]) -> Iterator[None]:
    """While a module is captured, mixtures of transformers that loop over the experts that are hit ("eager") compute
    the same by products of groups: how often that loop runs depends on the values of tensors."""
    transformers: Any = sys.modules.get("transformers.integrations.moe")
    modules: list[Any] = list(fn.modules()) if transformers and isinstance(fn, torch.nn.Module) else []
    loops = [m for m in modules if hasattr(m, "is_transposed") and _experts_of(m) == "eager"]
    with _with_methods(loops, "forward", transformers.grouped_mm_experts_forward if loops else None):
        yield


def _experts_of(module: Any) -> str | None:
    """The name of transformers for the way in which `module` computes its experts."""
    return getattr(getattr(module, "config", None), "_experts_implementation", None)


@contextlib.contextmanager
def _with_methods(modules: Sequence[Any], name: str, method: Any) -> Iterator[None]:
    """Inside the block, replace the method `name` of `modules` by `method`, except where an instance has its own."""
    changed = [module for module in modules if name not in vars(module)]

    def restore() -> None:
        for module in changed:
            vars(module).pop(name, None)

    with afterwards(restore):
        for module in changed:
            vars(module)[name] = partial(method, module)  # bypasses nn.Module.__setattr__, which is slow
        yield


def _cumulative_batch_norm(norm: torch.nn.BatchNorm2d, x: torch.Tensor) -> torch.Tensor:
    """The forward of a BatchNorm with momentum=None in training."""
    check_input_dim(norm, x)
    mean, var, count = norm.running_mean, norm.running_var, norm.num_batches_tracked
    assert mean is not None and var is not None and count is not None
    count.add_(1)
    own = torch.zeros_like(mean), torch.zeros_like(var)  # with momentum 1 they become the statistics of the batch
    y = torch.nn.functional.batch_norm(x, *own, norm.weight, norm.bias, True, 1.0, norm.eps)
    for running, new in zip((mean, var), own, strict=True):
        running.copy_(running + (new - running) / count)
    return y


@contextlib.contextmanager
def _unchecked_distributions() -> Iterator[None]:
    """Inside the block, disable the checks of torch.distributions, which depend on the values of tensors."""
    before = distributions_validate()
    with afterwards(lambda: Distribution.set_default_validate_args(before)):
        Distribution.set_default_validate_args(False)
        yield


@contextlib.contextmanager
def _conversions(fn: Callable[..., Any]) -> Iterator[None]:
    """While a module is captured, conversions in its forward, such as `self.router.to(dtype)`, keep its parameters:
    PyTorch would replace them, which fails during a trace."""
    modules: list[Any] = list(fn.modules()) if isinstance(fn, torch.nn.Module) else []
    with _with_methods(modules, CONVERT, _unchanged):
        yield


def _unchanged(module: torch.nn.Module, convert: Callable[[torch.Tensor], torch.Tensor], _: bool = True) -> Any:
    """`module` itself. Raises CaptureError if `convert` would change one of its tensors."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        new = convert(tensor)
        if (new.dtype, new.device) != (tensor.dtype, tensor.device):
            raise CaptureError(
                f"the forward converts {name!r} of a {type(module).__name__} from {_kind(tensor)} to {_kind(new)}, "
                "which changes the module; convert it before shard, or convert the tensor where it is used"
            )
    return module


def _kind(tensor: torch.Tensor) -> str:
    """The dtype and the device of a tensor, for messages."""
    return f"{str(tensor.dtype).removeprefix('torch.')} on {tensor.device.type}"


# -- Checks of the exported program


def check_writes(module: fx.GraphModule, fn: Callable[..., Any]) -> None:
    """Raise CaptureError for a write in place to a tensor whose elements share memory, as PyTorch does."""
    for node in (node for part in module.modules() if isinstance(part, fx.GraphModule) for node in part.graph.nodes):
        for operand in _written_operands(node):
            val = operand.meta.get("val")
            strides = zip(val.shape, val.stride(), strict=True) if isinstance(val, torch.Tensor) else ()
            if any(stride == 0 and size > 1 for size, stride in strides):
                raise CaptureError(
                    f"{name_of(fn)} writes in place ({operator_name(node)}) to a tensor that was expanded, whose "
                    f"elements share memory{at_source(node)}; write to a copy of it, x.clone()"
                )


def _written_operands(node: fx.Node) -> Iterator[fx.Node]:
    """The operands that a call of an operator writes to, except where it only changes their shape or strides."""
    if (
        isinstance(node.target, OpOverload)
        and schema_of(node.target).is_mutable
        and torch.Tag.inplace_view not in node.target.tags
    ):
        for formal, operand in zip(schema_of(node.target).arguments, node.args, strict=False):
            if formal.alias_info is not None and formal.alias_info.is_write and isinstance(operand, fx.Node):
                yield operand


def warn_of_updates(graph: Graph) -> None:
    """Warn of buffers that are updated inside torch.utils.checkpoint, if there is a gradient: PyTorch runs the forward
    once more in the backward, and its updates with it."""
    updates = [port for port in graph.outputs if port.role is Role.BUFFER_UPDATE]
    names = [port.name for port in updates if region_of(source_of(port.node).node) is not None]
    if names and any(port.requires_grad for port in graph.outputs):
        listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if names[3:] else "")
        warnings.warn(
            f"{listed} are updated inside torch.utils.checkpoint: once a call, as without checkpoint, where PyTorch on "
            "one device updates them again when its backward runs the forward once more. (A BatchNorm has its running "
            "mean and variance with the momentum 1 - (1 - momentum)**2.)",
            stacklevel=2,
        )


def check_static(module: fx.GraphModule, fn: Callable[..., Any]) -> None:
    """Raise Undecided if a size or a number in the graph depends on the values of tensors."""
    symbolic = (torch.SymInt, torch.SymFloat, torch.SymBool)
    for node in module.graph.nodes:
        val = node.meta.get("val")
        if isinstance(val, list | tuple) and any(isinstance(part, list | tuple) for part in val):
            raise CaptureError(
                f"could not capture {name_of(fn)}: {operator_name(node)} gives lists of tensors among its results"
                f"{at_source(node)}; do this part outside the sharded function"
            )
        sizes = val.shape if isinstance(val, torch.Tensor) else ()
        if isinstance(val, symbolic) or any(isinstance(size, symbolic) for size in sizes):
            what = "gives a result whose size depends" if sizes else "gives a number that depends"
            maker = node.all_input_nodes[0] if node.target is operator.getitem else node
            raise Undecided(
                f"could not capture {name_of(fn)} as one static graph: {operator_name(maker)} {what} on the values "
                f"of tensors{at_source(node)}; do this part outside the sharded function, or keep it a tensor of fixed "
                "size"
            )


def check_operators(module: fx.GraphModule, fn: Callable[..., Any]) -> None:
    """Raise CaptureError for anything but a functional operator: a branch or loop that control_flow.py does not know,
    or a list of tensors among other results."""
    for node in module.graph.nodes:
        if node.op != "call_function" or node.target is operator.getitem or node.target in CONTROL:
            continue
        name, val = operator_name(node), node.meta.get("val")
        if isinstance(val, tuple | list) and any(isinstance(part, tuple | list) for part in val):
            what = f"operator {name} returns lists of tensors beside others; return one list, or single tensors"
        elif isinstance(node.target, OpOverload):
            continue
        else:
            what = f"{name} is a branch or a loop that Partway cannot split; write it without"
        raise CaptureError(
            f"could not capture {name_of(fn)}: {what}, or do this part outside the sharded function{at_source(node)}"
        )


# Operators whose tensors must have one dtype, which torch.export does not check.
_ONE_DTYPE = frozenset(
    {"linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "conv1d", "conv2d", "conv3d", "scaled_dot_product_attention"}
)


def check_dtypes(graph: Graph) -> Graph:
    """The graph itself. Raises CaptureError for a product of tensors of different dtypes."""
    for node in graph.nodes:
        if operator_name(node).split(".")[1:2] and operator_name(node).split(".")[1] in _ONE_DTYPE:
            every = [value(operand).dtype for operand in operands(node)]
            dtypes = list(dict.fromkeys(dtype for dtype in every if dtype is not torch.bool))  # a mask may be bool
            if len(dtypes) > 1:
                names = " and ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
                raise CaptureError(
                    f"operator {operator_name(node)} in {module_path(node) or 'the function'} gets tensors of dtypes "
                    f"{names}{at_source(node)}; convert them to one, as with .to(torch.{str(dtypes[-1]).split('.')[1]})"
                )
    return graph


# -- Random generators while a function is captured: torch's is restored, Python's and NumPy's may not be used


@contextlib.contextmanager
def drawing_nothing(answering: Answering | None) -> Iterator[None]:
    """Restore torch's generator if answers drew from it, so that a call draws the same numbers whether or not it is
    planned. Otherwise leave it alone, since other threads draw from it too."""
    before = torch.get_rng_state()
    with afterwards(lambda: torch.set_rng_state(before) if answering is not None and answering.drew else None):
        yield


@contextlib.contextmanager
def without_pythons_random_numbers(fn: Callable[..., Any]) -> Iterator[None]:
    """Raise CaptureError if the function draws from Python's or NumPy's generator: every call would reuse the number of
    the first. Where another thread may have drawn, warn."""
    before = _pythons_generators()
    yield
    drawn = [name for name, state in _pythons_generators().items() if name in before and before[name] != state]
    if not drawn:
        return
    message = (
        f"random numbers of Python's module {' and '.join(drawn)} are drawn in {name_of(fn)}, and would be the same in "
        "every call; draw them with torch (torch.rand([]) may decide a branch), or outside the sharded function"
    )
    if not any(map(_may_draw, threading.enumerate())):
        raise CaptureError(message)
    warnings.warn(f"if not by another thread, {message}", stacklevel=2)


def _may_draw(thread: threading.Thread) -> bool:
    """Whether another thread may draw random numbers: Partway's own and those of progress bars do not."""
    ours = thread is threading.current_thread() or thread.name.startswith("partway ")
    return not ours and type(thread).__module__.partition(".")[0] != "tqdm"


def _pythons_generators() -> dict[str, Any]:
    """The states of the global generators of Python and NumPy."""
    states: dict[str, Any] = {"random": random.getstate()}
    if "numpy.random" in sys.modules:
        _, words, *rest = sys.modules["numpy.random"].get_state()
        states["numpy.random"] = words.tobytes(), *rest
    return states
