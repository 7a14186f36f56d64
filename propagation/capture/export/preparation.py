"""Temporary changes while a function is captured, so that torch.export can trace it."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.distributions import Distribution

from ....strategy.basics.afterwards import afterwards
from ....strategy.errors import CaptureError
from ...torch_internals import CONVERT, buffers_in, check_input_dim, distributions_validate, parameters_in
from ..rewrites.autograd_functions import recorded


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
def prepared(fn: Callable[..., Any], tensors: Sequence[torch.Tensor], checked: bool) -> Iterator[None]:
    """While `fn` is captured, replace parts of it that torch.export cannot trace. `checked`: torch.distributions check
    their parameters."""
    with (
        _plain_parameters(fn, tensors),
        _tensor_momenta(fn),
        _conversions(fn),
        contextlib.nullcontext() if checked else _unchecked_distributions(),
        recorded(),
    ):
        yield


@contextlib.contextmanager
def _plain_parameters(fn: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """While a module is captured, plain tensors of the global shape, without memory, replace DTensors, parameters that
    are not nn.Parameters (as torch.func.functional_call sets them), and tensors on the meta device if the `tensors` of
    the call are not. (Capture reads only metadata.)"""
    swapped: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    plain: dict[int, torch.Tensor] = {}
    device = next((t.device for t in tensors if not t.is_meta), None)
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
def _with_methods(modules: Sequence[Any], name: str, method: Callable[..., Any]) -> Iterator[None]:
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
