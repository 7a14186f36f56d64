"""From a callable and one call of it to a Graph: `torch.export`, then a few named passes.

The passes, in order:

    export         torch.export (non-strict), the training IR
                   what runs inside torch.utils.checkpoint is marked as a region, and what is computed without
                   gradients is detached
    functionalize  run_decompositions: no in-place operators, `linear`, `layer_norm`, `cross_entropy_loss`,
                   `scaled_dot_product_attention` whole, autocast as casts, mutated buffers as outputs; what has no rule
                   of its own and is made of operators that have becomes these (written_out.py)
    adopt          the backward of a torch.autograd.Function becomes one that autograd makes (custom_backward.py)
    unify_tied     the inputs of one tied parameter become one
    control        loops are unrolled, and branches become one operator each (control.py)
    expand         operators whose rule would not be local become sums and pointwise operators (expand.py)
    absorb         convolutions take the padding of their operands upon themselves (absorb.py)
    prune          views become reshapes; asserts and dead nodes go
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import operator
import os
import random
import re
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from dis import opmap
from functools import partial
from types import FrameType, FunctionType
from typing import Any, Protocol

import torch
import torch.utils.checkpoint
from torch import fx
from torch.distributions import Distribution
from torch.export.graph_signature import InputKind, OutputKind
from torch.overrides import TorchFunctionMode

from ...strategy.afterwards import afterwards
from ...strategy.errors import CaptureError, PartwayError
from ...strategy.notation import counted
from ..graph.graph import Graph, verify
from ..graph.nodes import marked, module_path, operands, operator_name, region_of, source_line, source_of, value
from ..graph.port import Port, Role
from ..graph.question import Answer, Leaf, Values
from ..graph.structure import Call, Structure, flatten, flatten_call, name_of
from ..ops.ctc import ctc_loss
from ..ops.random_numbers import RandomNumbers
from ..rules.expand import expand
from ..rules.padded_convolution import absorb
from ..rules.recurrent import lstm, true_states
from ..torch_internals import (
    FakeTensor,
    OpOverload,
    UnsupportedOperatorException,
    data_dependent,
    set_grad_enabled,
    tree_flatten,
    tree_map,
)
from .autograd_functions import adopt, recorded
from .control import CONTROL, flatten_control
from .covariance import corrcoef, cov
from .decomposition import write_out
from .hooks import Hooks, Noted
from .numbers import numbers_as_tensors, tensors_read
from .overlap import shared
from .questions import ASKING, Answering, Asked
from .sizes import Sized
from .stand_ins import StandIns, attributes_of

_capturing: ContextVar[bool] = ContextVar("capturing", default=False)


class Effects(Protocol):
    """Notes what a function leaves behind in Python while it is captured."""

    def begin(self) -> None:
        """The function begins to run."""

    def end(self) -> list[Any]:
        """The function has run: the values that it leaves."""

    def abort(self) -> None:
        """The function was left by an error."""

    def noted(self) -> Noted:
        """What Python holds now."""


class _NoEffects:
    """Nothing is noted."""

    def begin(self) -> None:
        pass

    def end(self) -> list[Any]:
        return []

    abort = restore = begin

    def noted(self) -> Noted:
        return self

    def left(self) -> list[Any]:
        return []


def capturing() -> bool:
    """Whether a function is being captured right now: a nested `shard` is then a constraint."""
    return _capturing.get()


@dataclass(frozen=True)
class CaptureOptions:
    """What a graph follows from beside the call.

    batch_norm_parts   into how many parts BatchNorm splits a batch in training, each with statistics of its own
    random_numbers     how random numbers are drawn
    own                operators for which users wrote rules, so that they stay as they are
    gradients          whether the function finds gradients enabled; a graph that has them serves calls without, too,
                       unless the function asks
    late               the answers to the first questions that the function asks late (questions.py)
    """

    batch_norm_parts: int = 1
    random_numbers: RandomNumbers = RandomNumbers.COUNTER
    own: Collection[Any] = ()
    gradients: bool = True
    late: tuple[Answer, ...] = ()


_DEFAULTS = CaptureOptions()


def capture(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: CaptureOptions = _DEFAULTS,
    values: Values | None = None,
    effects: Effects | None = None,
) -> Graph:
    """Capture one call of `fn` (a function or nn.Module; meta tensors welcome) as a Graph. `values`: the tensors of the
    call, which answer what `fn` asks of them (questions.py); without them it may ask nothing. `effects`: what notes the
    values that `fn` leaves behind, of which the tensors become outputs of the graph, before what `fn` asks late.

    Raises CaptureError when torch.export cannot make one static graph of it, or when `fn` itself raises: it names
    the line of the caller's code, and its cause is the original exception. What `fn` raises because of an answer is
    raised as it is. Raises StrategyError for a BatchNorm in training whose batch `batch_norm_parts` does not divide.
    """
    call = flatten_call(fn, args, kwargs)
    random_numbers = options.random_numbers
    expanded = partial(
        expand, batch_norm_parts=options.batch_norm_parts, random_numbers=random_numbers, own=options.own
    )
    may_draw, here = random_numbers is not RandomNumbers.TORCH, lambda: _callers_line(traceback.extract_stack(), fn)
    undecided: _Undecided | None = None
    for level in Asked if values else (Asked.NOTHING,):
        assumed: Sequence[Answer] | None = options.late
        while assumed is not None:
            noting = effects or _NoEffects()
            hooks = Hooks(noting.noted)
            answering = None
            if values and level is not Asked.NOTHING:
                answering = Answering(level, values, may_draw, here, assumed)
            try:
                with _drawing_nothing(answering):
                    found = _exported(fn, call, answering, noting, hooks, values is not None, options.gradients)
            except _Undecided as error:
                undecided = error
                break
            except PartwayError:
                raise
            except Exception:
                assumed = _other_answers(answering.assumed if answering else [], len(options.late))
                if assumed is None:
                    raise
                continue
            exported, result, read = found
            graph = _graph(exported, call, result, fn, expanded, hooks)
            _warn_of_updates(graph)
            asked = tuple(answering.asked) if answering else ()
            return verify(_check_dtypes(replace(graph, asked=asked, read=tuple(read))))
    assert undecided is not None
    raise CaptureError(str(undecided)) from undecided.__cause__


def _other_answers(assumed: Sequence[Answer], known: int) -> Sequence[Answer] | None:
    """What else to assume where `fn` raised on these answers, of which the first are `known`: one after another all
    that there is, and None after the last."""
    last = max((i for i, answer in enumerate(assumed) if i >= known and not answer), default=None)
    return None if last is None else (*assumed[:last], True)


@contextlib.contextmanager
def _drawing_nothing(answering: Answering | None) -> Iterator[None]:
    """A call draws the same numbers whether it was planned or not. Where answers drew some, the generator is put back;
    otherwise it is left alone, since other threads draw from it too."""
    before = torch.get_rng_state()
    with afterwards(lambda: torch.set_rng_state(before) if answering is not None and answering.drew else None):
        yield


class _Undecided(Exception):
    """A capture depends on values of which no more than was answered is known; its text is that of a CaptureError."""


def _exported(
    fn: Callable[..., Any],
    call: Call,
    answering: Answering | None,
    effects: Effects,
    hooks: Hooks,
    checked: bool,
    gradients: bool,
) -> tuple[torch.export.ExportedProgram, tuple[Structure, Structure], list[torch.Tensor]]:
    """What torch.export makes of a call, functional and checked, the structures of its result and of what it leaves
    behind, and the tensors from outside whose values became numbers. `checked`: so are the parameters of
    torch.distributions; `gradients`: they are enabled."""
    seen: list[tuple[Structure, Structure]] = []
    outside = _Outside()
    flat = _Flat(_with_source_lines(fn), call, seen, outside, answering, effects, hooks)
    example = tuple(t.detach().requires_grad_(t.requires_grad) for t in call.tensors)
    before = _capturing.get()
    try:
        with (
            _without_pythons_random_numbers(fn), afterwards(lambda: _capturing.set(before)), warnings.catch_warnings(),
            torch.set_grad_enabled(gradients),
        ):  # fmt: skip
            _capturing.set(True)
            warnings.simplefilter("ignore")
            with hooks.of(fn), _prepared(fn, example, checked), _quiet():
                traced = torch.export.export(flat, example, strict=False)
                _check_writes(traced.graph_module, fn)
                if answering is not None and answering.is_drawn_from(traced.graph):
                    raise CaptureError(
                        f"{name_of(fn)} computes with random numbers that decide its course, too; draw others for that"
                    )
                read = outside.read + tensors_read(traced)
                exported = write_out(_without_questions(traced))
    except PartwayError:
        raise
    except Exception as error:  # torch.export raises many types; the caller's code may raise any
        if answering is not None and answering.asked and _is_raised_on_purpose(error):
            raise
        given = zip((f"input {name}" for name in call.names), call.tensors, strict=True)
        if "expected compiled_fn to be GraphModule" in str(error) and (
            pair := next(shared([*given, *state_of(fn).items()]), None)
        ):  # how torch.export fails there
            raise CaptureError(
                f"{name_of(fn)} writes in place to one of {pair[0]} and {pair[1]}, which share memory; give it a copy, "
                "with clone()"
            ) from error
        unanswered = answering.unanswered if answering else None
        failure = _Undecided if isinstance(error, data_dependent) else CaptureError
        raise failure(_reason(fn, error, unanswered)) from error
    if outside.found:
        raise CaptureError(
            f"{name_of(fn)} uses {counted(len(outside.found), 'tensor')} from outside that a gradient should reach "
            f"({', '.join(outside.found)}); shard the module they belong to, or pass them as arguments"
        )
    _name_frames(exported.graph_module, fn)
    numbers_as_tensors(exported.graph_module)
    _check_static(exported.graph_module, fn)
    _check_operators(exported.graph_module, fn)
    return exported, seen[-1], read


def _without_questions(exported: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Drop what was asked and answered: in the course of the answer nothing reads it, and it cannot be traced again."""
    for node in reversed(exported.graph.nodes):
        if node.target in ASKING and not node.users:
            exported.graph.erase_node(node)
    return exported


@contextlib.contextmanager
def _without_pythons_random_numbers(fn: Callable[..., Any]) -> Iterator[None]:
    """Raise CaptureError if numbers of Python's or NumPy's generator are drawn: what was drawn once would stand for
    every call. Where another thread may have drawn them, warn."""
    before = _pythons_generators()
    yield
    drawn = [name for name, state in _pythons_generators().items() if name in before and before[name] != state]
    if not drawn:
        return
    said = (
        f"random numbers of Python's module {' and '.join(drawn)} are drawn in {name_of(fn)}, and would be the same in "
        "every call; draw them with torch (torch.rand([]) may decide a branch), or outside the sharded function"
    )
    if not any(map(_may_draw, threading.enumerate())):
        raise CaptureError(said)
    warnings.warn(f"if not by another thread, {said}", stacklevel=2)


def _may_draw(thread: threading.Thread) -> bool:
    """Whether a thread is another one whose code we do not know: those of ours and of progress bars draw nothing."""
    ours = thread is threading.current_thread() or thread.name.startswith("partway ")
    return not ours and type(thread).__module__.partition(".")[0] != "tqdm"


def _pythons_generators() -> dict[str, Any]:
    """The states of the generators that Python and NumPy share among all that draw."""
    states: dict[str, Any] = {"random": random.getstate()}
    if "numpy.random" in sys.modules:
        _, words, *rest = sys.modules["numpy.random"].get_state()
        states["numpy.random"] = words.tobytes(), *rest
    return states


def _check_writes(module: fx.GraphModule, fn: Callable[..., Any]) -> None:
    """Raise CaptureError for a write in place to a tensor of which several elements are one, as PyTorch does."""
    for node in (node for part in module.modules() if isinstance(part, fx.GraphModule) for node in part.graph.nodes):
        for operand in _written(node):
            found = operand.meta.get("val")
            strides = zip(found.shape, found.stride(), strict=True) if isinstance(found, torch.Tensor) else ()
            if any(stride == 0 and size > 1 for size, stride in strides):
                raise CaptureError(
                    f"{name_of(fn)} writes in place ({operator_name(node)}) to a tensor that was expanded, of which "
                    f"several elements are one{_line(node)}; write to a copy of it, x.clone()"
                )


def _written(node: fx.Node) -> Iterator[fx.Node]:
    """The operands that a call of an operator writes to; not those of which it only changes shape or strides."""
    if (
        isinstance(node.target, OpOverload)
        and node.target._schema.is_mutable
        and torch.Tag.inplace_view not in node.target.tags
    ):
        for formal, operand in zip(node.target._schema.arguments, node.args, strict=False):
            if formal.alias_info is not None and formal.alias_info.is_write and isinstance(operand, fx.Node):
                yield operand


def _is_raised_on_purpose(error: Exception) -> bool:
    """Whether a `raise` or `assert` of the caller, or of a module or loss of PyTorch, raised `error`, and not what
    traces them."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return False
    code = trace.tb_frame.f_code
    folder = os.path.dirname(torch.__file__) + os.sep
    place = code.co_filename.removeprefix(folder) if code.co_filename.startswith(folder) else ""
    return code.co_code[trace.tb_lasti] == opmap["RAISE_VARARGS"] and not place.startswith(("_", "fx", "export"))


def _reason(fn: Callable[..., Any], error: Exception, unanswered: str | None = None) -> str:
    """Why a capture failed: by a limit of torch.export, or because the caller's own code raised."""
    at = _callers_line(traceback.extract_tb(error.__traceback__), fn)
    if isinstance(error, data_dependent):
        why = f"\n  These values {unanswered}" if unanswered else ""
        return (
            f"could not capture {name_of(fn)} as one static graph: its course depends on the values of tensors{at}; "
            "write it without branches on them, with torch.where for example (x.item() may be computed with and "
            f"returned, float(x) may not), or do this part outside the sharded function{why}\n"
            f"  torch.export: {_first_line(error)}"
        )
    if isinstance(error, UnsupportedOperatorException) or "no fake impl registered" in str(error):
        found = re.search(r"CustomOpDef\(([\w:.]+)\)", str(error)) or re.search(r"([\w:.]+)", str(error))
        return (
            f"could not capture {name_of(fn)}: operator {found and found[1]} has no implementation that "
            f"says the shapes of its results{at}\n"
            "Give it one with register_fake: a function of its arguments that returns empty tensors (torch.library)"
        )
    return (
        f"could not capture {name_of(fn)} as one static graph: {type(error).__name__}: {error}{at}\n"
        "If the same call works without shard, torch.export cannot trace what stands there: do it outside the sharded "
        "function"
    )


def _warn_of_updates(graph: Graph) -> None:
    """A warning that names the buffers which are updated inside torch.utils.checkpoint, where there is a gradient:
    PyTorch runs the forward once more in the backward, and its updates with it."""
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


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def _callers_line(frames: traceback.StackSummary, fn: Callable[..., Any]) -> str:
    """Where in the caller's code something happened: the innermost of `frames` that is neither PyTorch's nor ours."""
    torchs, ours = os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    own = [os.path.join(ours, name) + os.sep for name in ("api", "strategy", "propagation", "fusion", "runtime", "")]
    installed = not os.path.exists(os.path.join(ours, "pyproject.toml"))
    for frame in reversed(frames):
        mine = any(frame.filename.startswith(folder) for folder in (own if installed else own[:-1]))
        if not mine and not frame.filename.startswith((torchs + os.sep, "<")):
            name = _frame_name(fn, frame.filename, frame.lineno or 0, frame.name)
            return f"\n  at {frame.filename}:{frame.lineno}, in {name}: {frame.line}"
    return ""


def _with_source_lines(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, or a twin of a plain function whose frames are called "forward": torch.export keeps the source lines of
    such frames only. `_name_frames` gives them their name back."""
    if not isinstance(fn, FunctionType):
        return fn
    code = fn.__code__.replace(co_name="forward")
    twin = FunctionType(code, fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)
    twin.__kwdefaults__ = fn.__kwdefaults__
    return twin


def _frame_name(fn: Callable[..., Any], filename: str, line: int, name: str) -> str:
    """The name of the function that a frame called `name` runs: that of `fn`, if the line stands in its body."""
    if not isinstance(fn, FunctionType) or filename != fn.__code__.co_filename:
        return name
    return fn.__name__ if line in {number for *_, number in fn.__code__.co_lines()} else name


def _name_frames(module: fx.GraphModule, fn: Callable[..., Any]) -> None:
    """Call the frames of `fn` by its name in what the nodes of a graph say of their source."""

    def named(frame: re.Match[str]) -> str:
        return frame[1] + _frame_name(fn, frame[2], int(frame[3]), "forward")

    for node in module.graph.nodes:
        if "stack_trace" in node.meta:
            trace = node.meta["stack_trace"] or ""
            node.meta["stack_trace"] = re.sub(r'(File "(.+?)", line (\d+), in )forward\b', named, trace)


def _check_static(module: fx.GraphModule, fn: Callable[..., Any]) -> None:
    """Raise _Undecided if a size or a number in the graph depends on the values of tensors."""
    symbolic = (torch.SymInt, torch.SymFloat, torch.SymBool)
    for node in module.graph.nodes:
        found = node.meta.get("val")
        if isinstance(found, list | tuple) and any(isinstance(one, list | tuple) for one in found):
            raise CaptureError(
                f"could not capture {name_of(fn)}: {operator_name(node)} gives lists of tensors among its results"
                f"{_line(node)}; do this part outside the sharded function"
            )
        sizes = found.shape if isinstance(found, torch.Tensor) else ()
        if isinstance(found, symbolic) or any(isinstance(size, symbolic) for size in sizes):
            what = "gives a result whose size depends" if sizes else "gives a number that depends"
            maker = node.all_input_nodes[0] if node.target is operator.getitem else node
            raise _Undecided(
                f"could not capture {name_of(fn)} as one static graph: {operator_name(maker)} {what} on the values of "
                f"tensors{_line(node)}; do this part outside the sharded function, or keep it a tensor of fixed size"
            )


def _check_operators(module: fx.GraphModule, fn: Callable[..., Any]) -> None:
    """Raise CaptureError for what is no functional operator: a branch or loop of a kind that control.py does not know,
    a list of results beside others."""
    for node in module.graph.nodes:
        if node.op != "call_function" or node.target is operator.getitem or node.target in CONTROL:
            continue
        name, found = operator_name(node), node.meta.get("val")
        if isinstance(found, tuple | list) and any(isinstance(one, tuple | list) for one in found):
            what = f"operator {name} returns lists of tensors beside others; return one list, or single tensors"
        elif isinstance(node.target, OpOverload):
            continue
        else:
            what = f"{name} is a branch or a loop, of which each rank would need its own; write it without"
        raise CaptureError(
            f"could not capture {name_of(fn)}: {what}, or do this part outside the sharded function{_line(node)}"
        )


# Operators that want one dtype of their tensors, which torch.export does not check.
_ONE_DTYPE = frozenset(
    {"linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "conv1d", "conv2d", "conv3d", "scaled_dot_product_attention"}
)


def _check_dtypes(graph: Graph) -> Graph:
    """The graph itself. Raises CaptureError for a product of tensors of different dtypes."""
    for node in graph.nodes:
        if operator_name(node).split(".")[1:2] and operator_name(node).split(".")[1] in _ONE_DTYPE:
            dtypes_of = [value(operand).dtype for operand in operands(node)]
            found = list(dict.fromkeys(dtype for dtype in dtypes_of if dtype is not torch.bool))  # a mask may be
            if len(found) > 1:
                dtypes = " and ".join(str(dtype).removeprefix("torch.") for dtype in found)
                raise CaptureError(
                    f"operator {operator_name(node)} in {module_path(node) or 'the function'} gets tensors of dtypes "
                    f"{dtypes}{_line(node)}; convert them to one, as with .to(torch.{str(found[-1]).split('.')[1]})"
                )
    return graph


def _line(node: fx.Node) -> str:
    line = source_line(node)
    return f"\n  at {line}" if line else ""


# what tells values of a tensor that is no stand-in without an operator that a graph would have
_TELLS = frozenset({torch.Tensor.tolist, torch.Tensor.__repr__, torch.Tensor.__format__, torch.Tensor.item})


class _Outside(TorchFunctionMode):
    """Notes the tensors that need a gradient and are neither arguments nor the module's: torch.export takes them for
    constants, so that no gradient would reach them. `read`: those of which values are told."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, None] = {}
        self.read: list[torch.Tensor] = []
        self._seen: set[int] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.compiler.is_dynamo_compiling():  # what torch.cond and the like run is traced, and this with it
            return func(*args, **(kwargs or {}))
        if func in _TELLS and type(args[0]) in (torch.Tensor, torch.nn.Parameter):
            self.read.append(args[0])
        for leaf in tree_flatten((args, kwargs or {}))[0]:
            # everything that takes part in the capture is a FakeTensor or another subclass by now
            if type(leaf) in (torch.Tensor, torch.nn.Parameter) and id(leaf) not in self._seen and leaf.requires_grad:
                self._seen.add(id(leaf))
                self.found[f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"] = None
        return func(*args, **(kwargs or {}))


class _Regions(TorchFunctionMode):
    """Marks what is captured inside a call of torch.utils.checkpoint as one region (recompute.py computes it again in
    the backward). torch.export leaves nothing of such a call but its frame, so the frames of each operator are looked
    through; of nested calls the outermost makes the region.

    Raises CaptureError for use_reentrant=True, which runs the region without gradients, and for a context_fn.
    """

    def __init__(self) -> None:
        super().__init__()
        self._calls: dict[FrameType, int] = {}  # a frame that is held is like no later one

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return func(*args, **(kwargs or {}))
        if func is set_grad_enabled and args == (torch.is_grad_enabled(),):
            return None  # inside C++ that disabled gradients, as for nested calls: captured, it would never be undone
        call = _checkpoint_call(sys._getframe(1))
        if call is None:
            return func(*args, **(kwargs or {}))
        if call not in self._calls:
            _check_checkpoint(call)
            self._calls[call] = len(self._calls)
        with fx.traceback.preserve_node_meta(), fx.traceback.annotate(marked(self._calls[call])):
            return func(*args, **(kwargs or {}))


class _WithoutGradients(TorchFunctionMode):
    """Detaches what is computed of tensors that need a gradient while gradients are disabled. (torch.export keeps
    regions of torch.no_grad, but not inside torch.autocast, and none of torch.inference_mode; inlined they would let
    gradients through.)

    Raises CaptureError for a write in place there, of whose values autograd would know nothing.
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


def _embedding_that_renormalises(*args: Any, **kwargs: Any) -> torch.Tensor:
    """torch.nn.functional.embedding. Raises CaptureError with a max_norm."""
    return _looked_up(torch.nn.functional.embedding, args, kwargs)


def _bags_that_renormalise(*args: Any, **kwargs: Any) -> torch.Tensor:
    """torch.nn.functional.embedding_bag. Raises CaptureError with a max_norm."""
    return _looked_up(torch.nn.functional.embedding_bag, args, kwargs)


def _looked_up(function: Callable[..., torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    found = inspect.signature(function).bind(*args, **kwargs).arguments.get("max_norm")
    if found is not None:
        raise CaptureError(
            f"{function.__name__} with max_norm={found} writes to its weight in place, which a sharded function may "
            "not; leave max_norm out, and renormalise the weight between calls, under torch.no_grad()"
        )
    return function(*args, **kwargs)


_OTHERWISE: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.Tensor.corrcoef: corrcoef,
    torch.Tensor.cov: cov,
    torch.corrcoef: corrcoef,
    torch.cov: cov,
    torch.ctc_loss: ctc_loss,
    torch.lstm: lstm,
    torch.nn.functional.ctc_loss: ctc_loss,
    torch.nn.functional.embedding: _embedding_that_renormalises,
    torch.nn.functional.embedding_bag: _bags_that_renormalise,
}


class _Traceable(TorchFunctionMode):
    """Functions of PyTorch that torch.export cannot trace, or traces wrongly, as others that compute the same."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return func(*args, **(kwargs or {}))
        return _OTHERWISE.get(func, func)(*args, **(kwargs or {}))


def _checkpoint_call(frame: FrameType | None) -> FrameType | None:
    """The frame of the outermost call of torch.utils.checkpoint in the captured function that `frame` runs in."""
    found = None
    while frame is not None and frame.f_code is not _Flat.forward.__code__:
        if frame.f_code.co_name == "checkpoint" and frame.f_code.co_filename == torch.utils.checkpoint.__file__:
            found = frame
        frame = frame.f_back
    return found


def _check_checkpoint(call: FrameType) -> None:
    """Raise CaptureError unless the region of a call of torch.utils.checkpoint can be captured."""
    given = call.f_locals
    where = name_of(getattr(given["function"], "func", given["function"]))  # transformers wraps a layer in a partial
    if given["use_reentrant"]:
        raise CaptureError(
            f"torch.utils.checkpoint of {where} with use_reentrant=True (PyTorch's default) runs it without gradients, "
            "so that none would be captured; pass use_reentrant=False, which computes the same"
        )
    if given["context_fn"] is not torch.utils.checkpoint.noop_context_fn:
        raise CaptureError(
            f"torch.utils.checkpoint of {where} with a context_fn: Partway itself chooses what the region keeps "
            "(random masks, and what collectives give); drop context_fn"
        )


class _Stderr:
    """A stream without the graph that torch.export prints when it fails."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._end = stream, ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write `text`, unless it is such a graph, or the end of its line."""
        graph = text.lstrip().startswith("def forward(self, arg0_1")
        dropped, self._end = graph or text == self._end, "\n" if graph else ""
        return len(text) if dropped else int(self._stream.write(text))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what torch.export logs and prints of a failure: the CaptureError says it."""
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


class _Flat(torch.nn.Module):
    """`fn` as a module from tensors to a tuple of tensors; what is around them is told to `seen`."""

    def __init__(
        self, fn: Callable[..., Any], call: Call, seen: list[tuple[Structure, Structure]], outside: _Outside,
        answering: Answering | None, effects: Effects, hooks: Hooks,
    ) -> None:  # fmt: skip
        super().__init__()
        self.hooks = hooks
        self.outside = outside
        self.answering = answering
        self.fn = fn
        self.call = call
        # bound methods: torch.export puts back what forward does to attributes
        self.seen, self.begin, self.end, self.abort = seen.append, effects.begin, effects.end, effects.abort
        self.stand_ins = StandIns(name_of(fn), lambda: _callers_line(traceback.extract_stack(), fn))
        self.attributes = {name: attributes_of(tensor) for name, tensor in state_of(fn).items()}

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        args, kwargs = self.call.structure.build(list(tensors))
        answering = contextlib.nullcontext() if self.answering is None else self.answering.of(self._leaves(tensors))
        numbers = self.answering is not None and self.answering.level is Asked.NUMBERS
        sized = Sized() if numbers else contextlib.nullcontext()
        self.stand_ins.begin()
        for name, tensor, given in zip(self.call.names, tensors, self.call.tensors, strict=True):
            self.stand_ins.stand(f"input {name}", tensor, attributes_of(given))
        for name, tensor in state_of(self.fn).items():
            self.stand_ins.stand(name, tensor, self.attributes[name])
        self.begin()
        try:
            with (
                self.outside,
                _Regions(),
                _WithoutGradients(),
                _Traceable(),
                self.stand_ins,
                self.hooks,
                sized,
                answering,
            ):
                results, structure = flatten(self.fn(*args, **kwargs))
            read = [] if self.answering is None else self.answering.read
            if read and self.hooks.made:
                raise CaptureError(
                    f"{name_of(self.fn)} asks for values behind a matrix product or a convolution and has hooks, which "
                    "would run twice where it assumed another answer; remove one of them"
                )
            left, places = flatten((self.end(), read))
            self.stand_ins.check((*results, *left))
        except BaseException:
            self.abort()
            raise
        self.seen((structure, places))
        return (*results, *left)

    def _leaves(self, tensors: Sequence[torch.Tensor]) -> Iterator[tuple[Leaf, torch.Tensor]]:
        """The tensors of the call, as they are while it is captured."""
        for place, (name, tensor) in enumerate(zip(self.call.names, tensors, strict=True)):
            yield Leaf(Role.INPUT, name, place), tensor
        for name, tensor in state_of(self.fn).items():
            yield Leaf(Role.PARAMETER if isinstance(tensor, torch.nn.Parameter) else Role.BUFFER, name), tensor


@contextlib.contextmanager
def _prepared(fn: Callable[..., Any], tensors: Sequence[torch.Tensor], checked: bool) -> Iterator[None]:
    """While `fn` is captured, what torch.export cannot trace is done otherwise."""
    with (
        _plain_parameters(fn, tensors), _tensor_momenta(fn), _conversions(fn),
        contextlib.nullcontext() if checked else _unchecked_distributions(), recorded(),
    ):  # fmt: skip
        yield


@contextlib.contextmanager
def _plain_parameters(fn: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """While a module is captured, ordinary tensors of their global shape, without memory, stand in for its parameters
    that are DTensors or no nn.Parameters (as those that torch.func.functional_call gives it), and for what is on the
    meta device though the `tensors` of the call are not (meta data is all that capture reads)."""
    swapped: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    plain: dict[int, torch.Tensor] = {}
    device = next((t.device for t in tensors if not t.is_meta), None)
    parameters: set[int] = set()
    if isinstance(fn, torch.nn.Module):
        parameters = {id(module._parameters) for module in fn.modules()}
        for module in fn.modules():
            stores: tuple[dict[str, Any], ...] = module._parameters, module._buffers
            for store in stores:
                for name, held in store.items():
                    if held is None:
                        continue
                    given = id(store) in parameters and not isinstance(held, torch.nn.Parameter)
                    odd = given or hasattr(held, "placements")
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
    batches so far, compute the weight of a batch as a tensor: as a number it would depend on a tensor's value."""
    modules: list[Any] = list(fn.modules()) if isinstance(fn, torch.nn.Module) else []
    changed = [
        m for m in modules if type(m).forward is torch.nn.BatchNorm2d.forward and m.momentum is None and m.training
    ]
    with _with_methods([m for m in changed if m.track_running_stats], "forward", _cumulative_batch_norm):
        yield


@contextlib.contextmanager
def _with_methods(modules: Sequence[Any], name: str, method: Callable[..., Any]) -> Iterator[None]:
    """Meanwhile `modules` have `method` for the one called `name`, but for those that have one of their own."""
    changed = [module for module in modules if name not in vars(module)]

    def restore() -> None:
        for module in changed:
            vars(module).pop(name, None)

    with afterwards(restore):
        for module in changed:
            setattr(module, name, partial(method, module))
        yield


def _cumulative_batch_norm(norm: torch.nn.BatchNorm2d, x: torch.Tensor) -> torch.Tensor:
    """What a BatchNorm with momentum=None computes in training."""
    norm._check_input_dim(x)
    mean, var, count = norm.running_mean, norm.running_var, norm.num_batches_tracked
    assert mean is not None and var is not None and count is not None
    count.add_(1)
    own = torch.zeros_like(mean), torch.zeros_like(var)  # moved all the way, so that they are the batch's
    y = torch.nn.functional.batch_norm(x, *own, norm.weight, norm.bias, True, 1.0, norm.eps)
    for running, new in zip((mean, var), own, strict=True):
        running.copy_(running + (new - running) / count)
    return y


@contextlib.contextmanager
def _unchecked_distributions() -> Iterator[None]:
    """torch.distributions do not look whether their parameters are valid, which depends on the values of tensors."""
    before = Distribution._validate_args
    with afterwards(lambda: Distribution.set_default_validate_args(before)):
        Distribution.set_default_validate_args(False)
        yield


@contextlib.contextmanager
def _conversions(fn: Callable[..., Any]) -> Iterator[None]:
    """While a module is captured, conversions in its forward, as `self.router.to(dtype)`, leave its parameters as they
    are: PyTorch would swap them for others, which it cannot do here."""
    modules: list[Any] = list(fn.modules()) if isinstance(fn, torch.nn.Module) else []
    with _with_methods(modules, "_apply", _unchanged):
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
    return f"{str(tensor.dtype).removeprefix('torch.')} on {tensor.device.type}"


def _graph(
    exported: torch.export.ExportedProgram, call: Call, seen: tuple[Structure, Structure], fn: Callable[..., Any],
    expanded: Callable[[fx.GraphModule], dict[fx.Node, fx.Node]], hooks: Hooks,
) -> Graph:  # fmt: skip
    module = fx.GraphModule(exported.graph_module, exported.graph)
    hooks.place(module)
    placeholders = {node.name: node for node in module.graph.nodes if node.op == "placeholder"}
    ports: list[Port] = []
    aliases: dict[str, str] = {}
    constants: dict[str, torch.Tensor] = {}
    first_of: dict[int, Port] = {}
    state = state_of(fn)
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
            case InputKind.CUSTOM_OBJ:
                held = type(exported.constants.get(spec.target or "", None)).__name__
                raise CaptureError(
                    f"{name_of(fn)} uses an object that a graph cannot hold, a {held}; a torch.Generator is not "
                    "needed: random numbers follow torch.manual_seed, alike on every rank"
                )
            case _:
                raise CaptureError(f"inputs of kind {spec.kind} ({spec.arg.name}) are not supported")
        ports.append(port)
    result, left = seen
    outputs = _outputs(exported, module, seen, {port.node.name: port.name for port in ports})
    device = next((value(port.node).device.type for port in ports), "cpu")
    if device == "meta":
        _leave_meta(module)
    true_states(module)
    adopt(module)
    flatten_control(module)
    outputs += _unseen_updates(module, expanded(module), ports, outputs)
    absorb(module)
    prune(module)
    hooks.check(module)
    final = next(node for node in module.graph.nodes if node.op == "output").args[0]
    graph = Graph(module, tuple(ports), (), result, aliases, constants, device, left=left, hooks=hooks)
    needs = graph.differentiable
    renewed = tuple(
        Port(node, port.role, port.name, requires_grad=port.role is not Role.BUFFER_UPDATE and source_of(node) in needs)
        for node, port in zip(final, outputs, strict=True)
    )
    return replace(graph, outputs=renewed)


def state_of(fn: Callable[..., Any]) -> dict[str, torch.Tensor]:
    """The parameters and buffers of a module by all of their names; none of a function."""
    if not isinstance(fn, torch.nn.Module):
        return {}
    named: dict[str, torch.Tensor] = dict(fn.named_buffers(remove_duplicate=False))
    named.update(fn.named_parameters(remove_duplicate=False))
    return named


_WRITTEN = "the function writes to {!r} in place; return the new value, or keep it in a buffer"
_UPDATES = {Role.BUFFER: Role.BUFFER_UPDATE, Role.INPUT: Role.INPUT_UPDATE}


def _outputs(
    exported: torch.export.ExportedProgram, module: fx.GraphModule, seen: tuple[Structure, Structure],
    inputs: Mapping[str, str],
) -> list[Port]:  # fmt: skip
    """The ports of the outputs; a parameter or constant that the function writes to is refused."""
    returned = next(node for node in module.graph.nodes if node.op == "output").args[0]
    outputs: list[Port] = []
    result, left = seen
    roles = [Role.RESULT] * result.count() + [Role.LEFT] * left.count()
    named = iter(zip(roles, (*result_names(result), *(f"left[{i}]" for i in range(left.count()))), strict=True))
    for node, spec in zip(returned, exported.graph_signature.output_specs, strict=True):
        match spec.kind:
            case OutputKind.USER_OUTPUT:
                outputs.append(Port(node, *next(named)))
            case OutputKind.BUFFER_MUTATION:
                outputs.append(Port(node, Role.BUFFER_UPDATE, (spec.target or "").removeprefix("fn.")))
            case OutputKind.USER_INPUT_MUTATION:
                outputs.append(Port(node, Role.INPUT_UPDATE, inputs[spec.target or ""]))
            case _:
                written = inputs.get(spec.target or "", (spec.target or "").removeprefix("fn."))
                raise CaptureError(_WRITTEN.format(written))
    return outputs


def _unseen_updates(
    module: fx.GraphModule, written: Mapping[fx.Node, fx.Node], inputs: list[Port], outputs: list[Port]
) -> list[Port]:
    """The ports of the buffers and inputs that expansion found written to, which become outputs (after all others)."""
    returned = next(node for node in module.graph.nodes if node.op == "output")
    known = {port.name for port in outputs if port.role in _UPDATES.values()}
    updates: list[Port] = []
    for port in inputs:
        if port.node in written and port.role not in _UPDATES:
            raise CaptureError(_WRITTEN.format(port.name))
        if port.node in written and port.name not in known:
            updates.append(Port(written[port.node], _UPDATES[port.role], port.name))
    returned.args = ((*returned.args[0], *(port.node for port in updates)),)
    return updates


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


def prune(module: fx.GraphModule) -> None:
    """Drop asserts on meta data (they hold for the captured signature) and what nothing uses. Views become
    reshapes: whether one needs a copy depends on strides, and those of a local part are its own."""
    for node in reversed(list(module.graph.nodes)):
        if node.target in (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default):
            node.target = torch.ops.aten.reshape.default
        if node.op == "call_function" and "_assert" in str(node.target):
            module.graph.erase_node(node)
    module.graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
    module.recompile()
