"""The modes that watch, and in part replace, a function's calls of PyTorch while it is traced.

While a function is captured, fake tensors stand in for the caller's. They have the same shapes, dtypes and strides, and
the attributes that users set, but no gradients, no history and no memory: their answers would become constants of the
plan, and changes of them would be lost silently.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from types import CodeType, FrameType
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.fx.traceback import annotate, preserve_node_meta
from torch.overrides import TorchFunctionMode

from ....strategy.errors import CaptureError
from ...graph.nodes import marked
from ...graph.structure import name_of
from ...ops.ctc import ctc_loss
from ...rules.layers.recurrent import lstm
from ...torch_internals import PRIVATE_STATE, set_grad_enabled, tree_flatten, tree_map, version_of
from ..rewrites.covariance import corrcoef, cov

# functions that read the values of an outside tensor without an operator in the graph
_READS = frozenset({torch.Tensor.tolist, torch.Tensor.__repr__, torch.Tensor.__format__, torch.Tensor.item})


class OutsideTensors(TorchFunctionMode):
    """Records the tensors that are neither arguments nor the module's, which torch.export treats as constants.

    needing_gradients   descriptions of those that need a gradient, which would never reach them
    read                those whose values are read
    """

    def __init__(self) -> None:
        super().__init__()
        self.needing_gradients: dict[str, None] = {}
        self.read: list[torch.Tensor] = []
        self._seen: set[int] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.compiler.is_dynamo_compiling():  # dynamo, called by torch.cond and the like, traces this code too
            return func(*args, **(kwargs or {}))
        if func in _READS and type(args[0]) in (torch.Tensor, torch.nn.Parameter):
            self.read.append(args[0])
        for leaf in tree_flatten((args, kwargs or {}))[0]:
            # every tensor of the capture itself is a FakeTensor or another subclass
            if type(leaf) in (torch.Tensor, torch.nn.Parameter) and id(leaf) not in self._seen and leaf.requires_grad:
                self._seen.add(id(leaf))
                self.needing_gradients[f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"] = None
        return func(*args, **(kwargs or {}))


class Regions(TorchFunctionMode):
    """Marks the operators captured inside a call of torch.utils.checkpoint as one region (recompute.py computes it
    again in the backward). torch.export keeps nothing of such a call, so the mode searches the frames of each operator
    for it, up to the frame that runs `outermost`. Of nested calls the outermost one is the region.

    Raises CaptureError for use_reentrant=True, which runs the region without gradients, and for a context_fn.
    """

    def __init__(self, outermost: CodeType) -> None:
        super().__init__()
        self._outermost = outermost
        self._calls: dict[FrameType, int] = {}  # keeps frames alive, so that no later frame gets the same id

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return func(*args, **(kwargs or {}))
        if func is set_grad_enabled and args == (torch.is_grad_enabled(),):
            return None  # from C++ code that disabled gradients, as in nested calls: captured, it would not be undone
        call = _checkpoint_call(sys._getframe(1), self._outermost)
        if call is None:
            return func(*args, **(kwargs or {}))
        if call not in self._calls:
            _check_checkpoint(call)
            self._calls[call] = len(self._calls)
        with preserve_node_meta(), annotate(marked(self._calls[call])):
            return func(*args, **(kwargs or {}))


class WithoutGradients(TorchFunctionMode):
    """Detaches results computed from tensors that need a gradient while gradients are disabled. (torch.export keeps
    regions of torch.no_grad, but not inside torch.autocast, and none of torch.inference_mode; inlined, they would let
    gradients through.)

    Raises CaptureError for a write in place there, since autograd would not see the new values.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.is_grad_enabled():
            return result
        read = [leaf for leaf in tree_flatten((args, kwargs or {}))[0] if isinstance(leaf, torch.Tensor)]
        if any(result is leaf for leaf in read) or func is torch.Tensor.__setitem__:
            if read[0].requires_grad and not read[0].is_leaf:
                name = getattr(func, "__name__", func)
                raise CaptureError(
                    f"{name} writes in place to a tensor that needs a gradient, where gradients "
                    "are disabled: its gradient would be that of other values; write to a copy, x.detach().clone()"
                )
            return result
        if not any(leaf.requires_grad for leaf in read):
            return result
        return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, result)


def _embedding(*args: Any, **kwargs: Any) -> torch.Tensor:
    """torch.nn.functional.embedding. Raises CaptureError with a max_norm."""
    return _look_up(torch.nn.functional.embedding, args, kwargs)


def _embedding_bag(*args: Any, **kwargs: Any) -> torch.Tensor:
    """torch.nn.functional.embedding_bag. Raises CaptureError with a max_norm."""
    return _look_up(torch.nn.functional.embedding_bag, args, kwargs)


def _look_up(function: Callable[..., torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Call `function`, an embedding. Raises CaptureError with a max_norm."""
    max_norm = inspect.signature(function).bind(*args, **kwargs).arguments.get("max_norm")
    if max_norm is not None:
        raise CaptureError(
            f"{function.__name__} with max_norm={max_norm} writes to its weight in place, which a sharded function may "
            "not; leave max_norm out, and renormalise the weight between calls, under torch.no_grad()"
        )
    return function(*args, **kwargs)


_REPLACEMENTS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.Tensor.corrcoef: corrcoef,
    torch.Tensor.cov: cov,
    torch.corrcoef: corrcoef,
    torch.cov: cov,
    torch.ctc_loss: ctc_loss,
    torch.lstm: lstm,
    torch.nn.functional.ctc_loss: ctc_loss,
    torch.nn.functional.embedding: _embedding,
    torch.nn.functional.embedding_bag: _embedding_bag,
}


class Traceable(TorchFunctionMode):
    """Replaces functions of PyTorch that torch.export cannot trace, or traces wrongly, by equivalent ones."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return func(*args, **(kwargs or {}))
        return _REPLACEMENTS.get(func, func)(*args, **(kwargs or {}))


def _checkpoint_call(frame: FrameType | None, outermost: CodeType) -> FrameType | None:
    """The frame of the outermost call of torch.utils.checkpoint around `frame`, inside a run of `outermost`."""
    call = None
    while frame is not None and frame.f_code is not outermost:
        if frame.f_code.co_name == "checkpoint" and frame.f_code.co_filename == torch.utils.checkpoint.__file__:
            call = frame
        frame = frame.f_back
    return call


def _check_checkpoint(call: FrameType) -> None:
    """Raise CaptureError unless the region of a call of torch.utils.checkpoint can be captured."""
    arguments = call.f_locals
    where = name_of(
        getattr(arguments["function"], "func", arguments["function"])
    )  # transformers wraps a layer in a partial
    if arguments["use_reentrant"]:
        raise CaptureError(
            f"torch.utils.checkpoint of {where} with use_reentrant=True (PyTorch's default) runs it without gradients, "
            "so that none would be captured; pass use_reentrant=False, which computes the same"
        )
    if arguments["context_fn"] is not torch.utils.checkpoint.noop_context_fn:
        raise CaptureError(
            f"torch.utils.checkpoint of {where} with a context_fn: Partway itself chooses what the region keeps "
            "(random masks, and what collectives give); drop context_fn"
        )


# -- Refuses questions to, and changes of, a tensor that its fake tensor can neither answer nor keep

ASKED: Mapping[Any, str] = {
    **{
        getattr(Tensor, name).__get__: name
        for name in (*PRIVATE_STATE, "grad", "grad_fn", "is_leaf", "output_nr", "retains_grad")
    },
    **{
        getattr(Tensor, name): f"{name}()"
        for name in ("is_pinned", "is_shared", "storage", "storage_offset", "untyped_storage")
    },
}
_DONE: Mapping[Any, str] = {
    Tensor.backward: "calls backward of a tensor",
    getattr(Tensor, "grad").__set__: "sets the grad of a tensor",  # noqa: B009 - its type says that of the value
}
_FLAG = (Tensor.requires_grad_, Tensor.requires_grad.__set__)  # type: ignore[attr-defined]


def attributes_of(tensor: Tensor) -> dict[str, Any]:
    """The attributes that users set on a tensor, without those of its class."""
    own = [getattr(kind, "__annotations__", {}) for kind in type(tensor).__mro__]
    return {
        name: value
        for name, value in vars(tensor).items()
        if not name.startswith("_") and not any(name in names for names in own)
    }


class StandIns(TorchFunctionMode):
    """Gives the stand-ins of a call of the function `name` the attributes of the caller's tensors, and raises
    CaptureError where the caller's code (not PyTorch's) needs more than they have; `here` returns the line."""

    def __init__(self, name: str, here: Any) -> None:
        super().__init__()
        self._name, self._here = name, here

    def begin(self) -> None:
        """Start a run of the function; torch.export may run it more than once, each time with new stand-ins."""
        self._stand_ins: list[tuple[str, Tensor, dict[str, Any], Any]] = []
        self._generator = torch.get_rng_state()
        self._seed = torch.initial_seed()

    def stand(self, label: str, tensor: Tensor, attributes: Mapping[str, Any]) -> None:
        """Let `tensor` stand in for one with these attributes."""
        vars(tensor).update(attributes)
        self._stand_ins.append((label, tensor, attributes_of(tensor), _gradient(tensor)))

    def check(self, results: Iterable[Tensor]) -> None:
        """Raise CaptureError if the function set an attribute of a stand-in or a result, ran a backward, or seeded
        random numbers."""
        known = {id(tensor) for _, tensor, *_ in self._stand_ins}
        for tensor in results:
            if id(tensor) not in known and (added := attributes_of(tensor)):
                raise CaptureError(
                    f"{self._name} sets the attribute {next(iter(added))} of a tensor that it returns or keeps, which "
                    "would stay with what stands in for it; return what it keeps there"
                )
        if torch.initial_seed() != self._seed:
            torch.set_rng_state(self._generator)
            raise CaptureError(
                f"{self._name} seeds random numbers, which would do nothing to those that a plan draws; seed them "
                "before the call"
            )
        for label, tensor, before, gradient in self._stand_ins:
            now = attributes_of(tensor)
            changed = [name for name in {**before, **now} if now.get(name, self) is not before.get(name, self)]
            if changed:
                raise CaptureError(
                    f"{self._name} sets the attribute {changed[0]} of {label}, which would stay with what stands in "
                    "for it; return what it keeps there"
                )
            if _gradient(tensor) != gradient:
                raise CaptureError(
                    f"{self._name} runs a backward, whose gradients would stay with what stands in for {label}; call "
                    "backward of what it returns"
                )

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in ASKED and _is_of_caller(sys._getframe(1), func):
            self._refuse(
                f"asks for {ASKED[func]} of a tensor, which is not known while it is captured",
                "ask before the call, and pass what follows as an argument",
            )
        if func in _DONE and _is_of_caller(sys._getframe(1), func):
            self._refuse(_DONE[func], "do it outside, with what the function returns")
        if func in _FLAG and any(args[0] is tensor for _, tensor, *_ in self._stand_ins):
            wanted = next(iter((*args[1:], *(kwargs or {}).values())), True)
            if args[0].requires_grad != wanted:
                label = next(label for label, tensor, *_ in self._stand_ins if tensor is args[0])
                self._refuse(f"sets requires_grad of {label}", "set it before the call")
        return func(*args, **(kwargs or {}))

    def _refuse(self, what: str, instead: str) -> None:
        """Raise CaptureError."""
        raise CaptureError(f"{self._name} {what}; {instead}{self._here()}")


def _gradient(tensor: Tensor) -> tuple[int, int] | None:
    """The identity and version of a tensor's gradient, which change when a backward adds to it."""
    return None if not tensor.is_leaf or tensor.grad is None else (id(tensor.grad), version_of(tensor.grad))


def _is_of_caller(frame: FrameType | None, func: Any) -> bool:
    """Whether the call of `func` in `frame`, which our modes may have forwarded, is neither PyTorch's nor Partway's."""
    while frame is not None and frame.f_code.co_name == "__torch_function__" and frame.f_locals.get("func") == func:
        frame = frame.f_back
    name = "" if frame is None else str(frame.f_globals.get("__name__"))
    return name.partition(".")[0] not in ("torch", "partway")
