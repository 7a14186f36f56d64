"""From a call to its graph: captured now, made from a capture for all sizes, or loaded from disk."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from partway.annotations.constrain import constrained_modules
from partway.compiler.captures import fetch_capture
from partway.compiler.graphs_record import Record
from partway.compiler.passes import own_saved_tensors
from partway.options.algo import AlgoParameters
from partway.options.parallel import ParallelContext
from partway.propagation.capture.capture import CaptureOptions, capture, capture_any_size, capture_counting
from partway.propagation.capture.export.tracing import Dims
from partway.propagation.graph.graph import CalledHooks
from partway.propagation.graph.question import Answer, Values
from partway.propagation.graph.structure import Path, flatten_call, name_of
from partway.requests.request import Request
from partway.requests.user_rules import rules, text_of
from partway.reuse.cache import cache_folder
from partway.reuse.changing import CallSizes, Captured, Family
from partway.reuse.effects import Effects
from partway.reuse.state import State, warn_of_unwatched
from partway.strategy import Layout, Mesh
from partway.strategy.basics.blocks import afterwards
from partway.strategy.place import on_mesh


@dataclass(frozen=True)
class CallInputs:
    """A call to be planned, and all inputs of its plan.

    fn, args, kwargs   the call; its tensors have their global shapes
    request            the arguments of `shard` or `compile`
    context, algo      the options in force
    processes          the number that a launcher started; None in simulation
    parameters         the layouts of parameters that have been laid out
    inputs             the layouts of the inputs that are DTensors
    values             looks up the values that the function asks for
    late               the answers to its first late questions
    memory             the bytes of each device; None: those of the profile
    inference          whether no gradient is taken
    advised            whether the error that nothing fits suggests alternatives
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    request: Request
    context: ParallelContext
    algo: AlgoParameters
    processes: int | None = None
    parameters: Mapping[str, Layout] = field(default_factory=dict)
    inputs: Mapping[str, Layout] = field(default_factory=dict)
    values: Values | None = None
    late: tuple[Answer, ...] = ()
    memory: float | None = None
    inference: bool = False
    advised: bool = True
    numbers: tuple[Path, ...] = ()

    @property
    def name(self) -> str:
        """The name of the called function, for messages."""
        return f"{name_of(self.fn)}.forward" if isinstance(self.fn, torch.nn.Module) else name_of(self.fn)

    @property
    def given_mesh(self) -> Mesh | None:
        """The mesh of the call, if one is given; manual functions inside are traced on it."""
        layouts = (*self.inputs.values(), *self.parameters.values())
        meshes = [
            self.request.own_mesh,
            *(plan.mesh for plan in self.request.plans),
            *(layout.mesh for layout in layouts),
        ]
        return next((mesh for mesh in meshes if mesh is not None), None)


def captured_call(call: CallInputs, kept: Record, sizes: CallSizes | None) -> Captured:
    """The capture of a call: made from one for all sizes, loaded from disk, or made now."""

    def capture() -> Captured:
        found = sizes and sizes.captured(call.args, call.kwargs, kept.capturing, functools.partial(capture_sizes, call))
        return found or capture_call(call, kept)

    folder = cache_folder(call.context.compile_cache_path) if call.context.enable_compile_cache else None
    if folder is None or call.late or call.numbers or kept.hears or (sizes is not None and sizes.known):
        return capture()
    options = (
        replace(call.request, plan=None),
        call.given_mesh,
        text_of(rules()),
        call.context.batch_norm_parts,
        call.context.random_numbers,
    )
    return fetch_capture(folder, call.fn, flatten_call(call.fn, call.args, call.kwargs), options, capture)


def capture_call(call: CallInputs, record: Record) -> Captured:
    """Capture a call now. Raises CaptureError, and StrategyError for constraints inside that do not fit."""
    fn, around = call.fn, record.capturing
    with _capturing(call) as (state, effects, options):
        if call.numbers:
            graph = capture_counting(fn, call.args, call.kwargs, call.numbers, options, effects, around)
        else:
            graph = capture(fn, call.args, call.kwargs, options, call.values, effects, around)
    effects.check(graph.constants)
    return Captured(graph, _after_capture(fn, state, effects, graph.hooks, graph.read), effects)


def capture_sizes(call: CallInputs, dims: Dims) -> Family:
    """The function of a call for all sizes of `dims`. Raises CaptureError, and StrategyError for constraints inside
    that do not fit."""
    fn = call.fn
    with _capturing(call) as (state, effects, options):
        captured = capture_any_size(fn, call.args, call.kwargs, dims, not state.reached.asks.memory, options, effects)
    traced, hooks = captured.traced, captured.attempt.hooks.called()
    effects.check(traced.constants)
    return Family(captured, options, _after_capture(fn, state, effects, hooks, tuple(traced.read)), effects)


@contextlib.contextmanager
def _capturing(call: CallInputs) -> Iterator[tuple[State, Effects, CaptureOptions]]:
    """A block that captures a call, with the state that the function reads, its effects, and the options."""
    state = State(call.fn)
    warn_of_unwatched(call.fn, state)
    effects, context = Effects(call.fn, state), call.context
    gradients = torch.is_grad_enabled() or not state.reached.asks.gradients
    with (
        own_saved_tensors(),
        constrained_modules(call.fn, call.request),
        on_mesh(call.given_mesh),
        afterwards(effects.finish),
    ):
        yield (
            state,
            effects,
            CaptureOptions(
                context.batch_norm_parts, context.random_numbers, rules(), gradients, call.late, returns_given=True
            ),
        )


def _after_capture(
    fn: Callable[..., Any], state: State, effects: Effects, hooks: CalledHooks, read: tuple[torch.Tensor, ...]
) -> State:
    """The state on which a captured function depends: `state`, or a new one if the capture has changed or extended
    it."""
    observers = frozenset(map(id, hooks.observers))
    if effects.kept or observers or read or not state.holds():
        return State(fn, observers, effects.kept, read)
    return state


def in_inference(fn: Callable[..., Any], request: Request) -> bool:
    """Whether a call of `fn` takes no gradient here and now: by the request, in torch.inference_mode, or in
    torch.no_grad with a module in evaluation. (In no_grad, any other function or module uses the plan for training.)"""
    if request.inference or torch.is_inference_mode_enabled():
        return True
    if torch.is_grad_enabled() or not isinstance(fn, torch.nn.Module):
        return False
    return not any(module.training for module in fn.modules())
