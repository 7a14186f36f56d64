"""The only file of this stage that uses private modules, names and attributes of PyTorch.

`tests/test_torch_internals.py` tests every behavior that we rely on, so that a new version of PyTorch shows within
seconds which of them it broke.

Each name, with its reason:

    torch._subclasses.FakeTensorMode   shapes without data; torch.export hands out fake tensors, and no public
                                       name makes more of them in the same mode
    FakeTensorMode.cache_info, cache_clear   the unbounded cache of fake results by operator and shape
    torch._ops.OpOverload              the type of torch.ops.aten.add.Tensor; torch.ops does not export it
    torch.utils._pytree                the flattening that torch.export itself uses (torch.utils.pytree is not
                                       in 2.11)
    torch._C._functorch                whether a tensor is inside torch.func's transforms, and the tensor that they wrap
    torch._C._are_functorch_transforms_active   whether a call is inside one; there are no public names
    torch._C._set_grad_enabled         what torch.no_grad calls, for a TorchFunctionMode to recognize it
    DataDependentOutputException, ...  raised by torch.export where a graph depends on the values of tensors
    UnsupportedOperatorException   raised by torch.export for an operator without a fake implementation
    torch.utils._python_dispatch   TorchDispatchMode, which sees every operator below autograd (documented, without a
                                       public name), and _disable_current_modes, which allows computation with real
                                       tensors during a capture
    torch._C.DisableTorchFunction      the same for function modes
    torch._C._ForceDispatchKeyGuard, _dispatch_tls_local_..._set   which keys dispatch skips
    torch._C._len_torch_..._stack, _get_..._stack_at   the active modes; there is no public name
    torch.fx.experimental.proxy_tensor make_fx; public use is documented, the module is not
    torch.fx._lazy_graph_module    whether graph modules compile their code at once; torch.compile's own switch,
                                       which saves a tenth of the time of a capture
    torch._C._dispatch_has_kernel_..., _ExcludeDispatchKeyGuard, torch.library._scoped_library   which operators the
                                       autocast of a device casts, and kernels in their place (autocast.py)
    torch.autocast._enabled            whether a context turns autocast on: PyTorch turns it off for an absent device
    torch.amp.autocast_mode._cast      the casts of torch.amp.custom_fwd
    torch.nn.Module._compiled_call_impl   what a module runs after `module.compile()`
    torch.export.exported_program._populate_param_...   asks a signature for the same dict once for each parameter
    torch._C._dispatch_get_all_op_names   the names of all operators: torch.ops finds one by its name only
    torch._library.custom_ops.CustomOpDef   what torch.library.custom_op makes, for its type and its operator;
                                       torch.library exports it to no type checker
    torch._C.DispatchKey               whether an operator is composite; there is no public name
    _split_decomp_table_to_cia_..., _decompose_exported_program   the two halves of ExportedProgram.run_decompositions,
                                       which overrides 500 operators anew each time (written_out.py)
    _override_composite_..., _ignore_backend_decomps, _compiling_state_context, enable_python_dispatcher,
    torch._subclasses.functional_tensor, has_data_mutation   what run_decompositions traces a program with, to trace
                                       single calls in the same way (one_by_one.py)
    torch.fx.proxy._COPY_META_FIELDS   the meta fields that a traced node copies from the node that runs
    torch._decomp.get_decompositions   the decompositions of operators; there is no public name
    torch.autograd.function._SingleLevelFunction   the class whose `apply` that of a Function calls
    torch.autograd.forward_ad._current_level   whether tensors may have tangents: asking each of them on every call
                                       would cost more than the call; without the name none is asked
    torch.export._trace._EXPORT_...    the flags that torch.export resets when it ends, also inside another export
    torch.overrides._pop_mode_temporarily   removes function modes one by one for such an export
    torch._functorch.aot_autograd.preserve_rng_state   what AOTAutograd wraps its tracing in: see `decompose`
    torch.nn.modules.module._global_...    the hooks of all modules; there is no public name that lists them
    Tensor._version                    how often a tensor was written in place; autograd itself compares it
    UntypedStorage._cdata              identifies the memory of a tensor; `data_ptr` is 0 for fake and empty tensors
    OpOverload._schema, _overloadname  the arguments and results of an operator; there is no public name
    Module._parameters, _buffers, _modules, _forward_pre_hooks, ...   a module's own stores, read on every call and
                                       written to; public methods make new dicts and lists
    Module._is_full_backward_hook      whether backward hooks were registered with the deprecated method
    Module._apply                      what `module.to(dtype)` calls, which swaps parameters
    _BatchNorm._check_input_dim        the error for an input of the wrong rank
    Distribution._validate_args        whether distributions check values; only setting it is public
    torch._C._current_autograd_node, Node._sequence_nr   the operation that a backward pass has reached
    SymInt.node, its expr and shape_env, ShapeEnv.guards, ...   the assumptions of torch.export about symbolic sizes;
                                       torch.export itself reads them so
    torch.ops.torch_nn                 the operators of linear_cross_entropy in chunks, which the first import of
                                       their module registers; not in 2.11
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import torch
from torch._C import (
    DisableTorchFunction,
    DispatchKey,
    DispatchKeySet,
    _dispatch_has_kernel_for_dispatch_key,
    _dispatch_tls_local_exclude_set,
    _dispatch_tls_local_include_set,
    _ExcludeDispatchKeyGuard,
    _ForceDispatchKeyGuard,
    _get_dispatch_stack_at,
    _get_function_stack_at,
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
)
from torch._C import _are_functorch_transforms_active as in_transform
from torch._C import _dispatch_get_all_op_names as all_operator_names
from torch._C import _set_grad_enabled as set_grad_enabled
from torch._C._functorch import get_unwrapped, is_legacy_batchedtensor
from torch._C._functorch import is_functorch_wrapped_tensor as is_transformed
from torch._decomp import get_decompositions
from torch._dispatch.python import enable_python_dispatcher
from torch._export.utils import _compiling_state_context
from torch._functorch import aot_autograd
from torch._functorch._aot_autograd.functional_utils import has_data_mutation
from torch._library.custom_ops import CustomOpDef
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch._subclasses.functional_tensor import FunctionalTensorMode, dispatch_functionalize
from torch.amp import autocast_mode
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction
from torch.export import ExportedProgram, _trace, exported_program
from torch.export._trace import _ignore_backend_decomps
from torch.export.exported_program import _decompose_exported_program, _override_composite_implicit_decomp
from torch.export.exported_program import _split_decomp_table_to_cia_and_python_decomp as split_decompositions
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.fx.proxy import _COPY_META_FIELDS
from torch.fx.traceback import preserve_node_meta, set_current_meta
from torch.library import _scoped_library
from torch.overrides import _pop_mode_temporarily
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

from ..strategy.basics.blocks import afterwards

_AUTOGRAD = (
    DispatchKey.AutogradCPU,
    DispatchKey.AutogradCUDA,
    DispatchKey.AutogradOther,
    DispatchKey.AutogradFunctionality,
    DispatchKey.ADInplaceOrView,
)
_HOOKS = ("forward_pre", "forward", "backward_pre", "backward")

try:
    import torch.nn.modules.linear_cross_entropy

    chunked_losses: tuple[OpOverload, ...] = (
        torch.ops.torch_nn._linear_cross_entropy_batch_chunked.default,
        torch.ops.torch_nn._linear_cross_entropy_batch_chunked_no_reduction.default,
    )
except ImportError:
    chunked_losses = ()

# attrgetter reads attributes in C, without a Python frame: some are read for each parameter on every call.
version_of: Callable[[torch.Tensor], int] = attrgetter("_version")
schema_of: Callable[[Any], Any] = attrgetter("_schema")
overload_name_of: Callable[[Any], str] = attrgetter("_overloadname")
parameters_in: Callable[[torch.nn.Module], dict[str, Any]] = attrgetter("_parameters")  # without those of submodules
buffers_in: Callable[[torch.nn.Module], dict[str, Any]] = attrgetter("_buffers")
modules_in: Callable[[torch.nn.Module], dict[str, Any]] = attrgetter("_modules")
forward_pre_hooks_in: Callable[[torch.nn.Module], dict[int, Any]] = attrgetter("_forward_pre_hooks")

compiled_call_of: Callable[[torch.nn.Module], Any] = attrgetter("_compiled_call_impl")  # None: it was not compiled

COMPILED_CALL = "_compiled_call_impl"
CONVERT = "_apply"  # the method of a module that its conversions call, such as `module.to(dtype)`
PRIVATE_STATE = ("_backward_hooks", "_base", "_version")  # attributes of a tensor that say where it comes from

FunctionBase: Any = _SingleLevelFunction

data_dependent = (GuardOnDataDependentSymNode, DataDependentOutputException, DynamicOutputShapeException)


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """Run the block outside all modes, such as those of a capture."""
    with DisableTorchFunction(), _disable_current_modes():
        yield


@contextlib.contextmanager
def beside_export() -> Iterator[None]:
    """Allow a nested torch.export: disable the outer one's modes, and restore the flags that the inner one resets."""
    kept = _trace._EXPORT_MODULE_HIERARCHY, _trace._EXPORT_FLAGS

    def restore() -> None:
        _trace._EXPORT_MODULE_HIERARCHY, _trace._EXPORT_FLAGS = kept

    with contextlib.ExitStack() as stack:
        for _ in range(_len_torch_function_stack()):
            stack.enter_context(_pop_mode_temporarily())
        with _disable_current_modes(), afterwards(restore):
            yield


@contextlib.contextmanager
def without_dispatch_modes() -> Iterator[None]:
    """Run the block with dispatch modes disabled."""
    with _disable_current_modes():
        yield


@contextlib.contextmanager
def with_autograd() -> Iterator[None]:
    """Let autograd record the block, even inside an operator that a dispatch mode calls below autograd."""
    kept = _dispatch_tls_local_exclude_set()
    for key in _AUTOGRAD:
        kept = kept.remove(key)
    with torch.enable_grad(), _ForceDispatchKeyGuard(_dispatch_tls_local_include_set(), kept):
        yield


def function_modes() -> list[Any]:
    """The active TorchFunctionModes of this thread, including that of torch.set_default_device."""
    return [_get_function_stack_at(i) for i in range(_len_torch_function_stack())]


def dispatch_modes() -> list[Any]:
    """The active TorchDispatchModes of this thread."""
    return [_get_dispatch_stack_at(i) for i in range(_len_torch_dispatch_stack())]


def storage_key(tensor: torch.Tensor) -> int:
    """A number that identifies the memory of a tensor, equal for tensors that share it, while one of them lives."""
    key: int = tensor.untyped_storage()._cdata
    return key


def hooks_in(module: torch.nn.Module, kind: str) -> dict[int, Any]:
    """A module's own hooks of a kind such as "forward_pre", by the ids of their handles."""
    hooks: dict[int, Any] = getattr(module, f"_{kind}_hooks")
    return hooks


def stores_of(module: torch.nn.Module, kind: str) -> list[dict[int, Any]]:
    """The dicts in which a module keeps its hooks of a kind, and their flags."""
    hooks = hooks_in(module, kind)
    return [hooks, hook_flags(module, kind)] if kind in ("forward_pre", "forward") else [hooks]


def remove_hooks(module: torch.nn.Module, is_unwanted: Callable[[Any], bool]) -> None:
    """Remove a module's own forward hooks and forward pre-hooks for which `is_unwanted` is true."""
    for name in ("_forward_pre_hooks", "_forward_hooks"):
        for key in [key for key, hook in getattr(module, name).items() if is_unwanted(hook)]:
            for store in (name, f"{name}_with_kwargs", f"{name}_always_called"):
                getattr(module, store, {}).pop(key, None)


def has_old_backward_hooks(module: torch.nn.Module) -> bool:
    """Whether the backward hooks of a module were registered with register_backward_hook."""
    return module._is_full_backward_hook is False


def check_input_dim(norm: torch.nn.modules.batchnorm._BatchNorm, x: torch.Tensor) -> None:
    """Raise ValueError for an input whose number of dims a BatchNorm does not accept."""
    norm._check_input_dim(x)


def was_told_to_validate(distribution: torch.distributions.Distribution) -> bool:
    """Whether `validate_args` was passed to the constructor of a distribution."""
    return "_validate_args" in vars(distribution)


def distributions_validate() -> bool:
    """Whether torch.distributions check values by default."""
    validates: bool = torch.distributions.Distribution._validate_args
    return validates


def global_hooks(kind: str) -> dict[int, Any]:
    """The global module hooks of a kind such as "forward_pre", by the ids of their handles."""
    found: dict[int, Any] = getattr(torch.nn.modules.module, f"_global_{kind}_hooks")
    return found


def hook_flags(module: torch.nn.Module, kind: str) -> dict[int, bool]:
    """The hooks of a module that also take keyword arguments, by the ids of their handles."""
    found: dict[int, bool] = getattr(module, f"_{kind}_hooks_with_kwargs")
    return found


def module_hooks(fn: Any) -> list[tuple[str, str, dict[int, Any]]]:
    """The stores of the global hooks and of the hooks of the modules inside `fn`: for each the path of its module
    ("" for global hooks), the kind, and the hooks by the ids of their handles."""
    found = [("", kind, global_hooks(kind)) for kind in _HOOKS]
    for path, module in fn.named_modules() if isinstance(fn, torch.nn.Module) else ():
        if module is not fn:
            found += [(path, kind, getattr(module, f"_{kind}_hooks")) for kind in _HOOKS]
    return found


def is_batched(tensor: torch.Tensor) -> bool:
    """Whether a gradient is a batch of gradients, made by torch.func's transforms or is_grads_batched=True."""
    return is_transformed(tensor) or is_legacy_batchedtensor(tensor)


def forward_level() -> int:
    """The level of forward-mode derivatives: 0 or more where tensors may have tangents."""
    level: int = getattr(forward_ad, "_current_level", -1)
    return level


def untransformed(tensor: torch.Tensor) -> torch.Tensor:
    """The innermost tensor that torch.func's transforms wrap."""
    while is_transformed(tensor):
        tensor = get_unwrapped(tensor)
    return tensor


def is_composite(operator: OpOverload) -> bool:
    """Whether PyTorch implements an operator by calling others, in C++ or in Python."""
    key = DispatchKey.CompositeImplicitAutograd
    return operator.has_kernel_for_dispatch_key(key) or key in operator.py_kernels


def makes_memory(operator: OpOverload) -> bool:
    """Whether every result of an ATen operator has memory of its own. (A composite operator may return an operand
    itself, as dropout does in evaluation, without its schema saying so.)"""
    if operator.namespace != "aten" or is_composite(operator):
        return False
    return all(result.alias_info is None for result in operator._schema.returns)


def decompose(exported: ExportedProgram, composite: Mapping[Any, Any], others: Mapping[Any, Any]) -> ExportedProgram:
    """Run `exported.run_decompositions` with its table in two parts: see `split_decompositions`."""
    # the graph names its devices; AOTAutograd's own tensors have to be on the CPU, also under a user's
    # `torch.device("meta")`
    with _generators_left_alone(), _signatures_read_once(), torch.device("cpu"):
        decomposed: ExportedProgram = _decompose_exported_program(
            exported,
            cia_to_decomp=dict(composite),
            python_decomp_table=dict(others),
            joint_loss_index=None,
            decompose_custom_triton_ops=False,
        )
    return decomposed


@contextlib.contextmanager
def tracing_calls(
    mode: FakeTensorMode, composite: Mapping[Any, Any], others: Mapping[Any, Any]
) -> Iterator[Callable[[Callable[..., Any], Sequence[torch.Tensor], torch.fx.Node], torch.fx.Graph]]:
    """Give a function that traces one call of a program as `decompose` would trace it there. Its arguments: the
    callable, fake tensors of `mode` as operands, and the node. It raises ValueError for a call that writes to an
    operand, which not every schema declares."""

    def trace(call: Callable[..., Any], operands: Sequence[torch.Tensor], node: torch.fx.Node) -> torch.fx.Graph:
        def called(*tensors: torch.Tensor) -> Any:
            with preserve_node_meta(), set_current_meta(node):
                given = call(*tensors)
            if any(map(has_data_mutation, tensors)):
                raise ValueError(f"{node.target} writes to an operand")
            return given

        functional = dispatch_functionalize(called, FunctionalTensorMode())
        traced = make_fx(functional, decomposition_table=dict(others), record_stack_traces=True)
        graph: torch.fx.Graph = traced(*operands).graph
        return graph

    with (
        _generators_left_alone(), torch.device("cpu"), torch.no_grad(), mode, _ignore_backend_decomps(),
        _compiling_state_context(), enable_python_dispatcher(), _override_composite_implicit_decomp(dict(composite)),
        compiled_when_run(),
    ):  # fmt: skip
        yield trace


def moved_meta(node: torch.fx.Node, old: torch.fx.Node, new: torch.fx.Node) -> dict[str, Any]:
    """The meta data of a node traced from the call `old`, as tracing the call `new` would give it."""
    fields = ("stack_trace", *_COPY_META_FIELDS)
    kept = {key: value for key, value in node.meta.items() if key not in fields or key not in old.meta}
    kept.pop("from_node", None)
    return kept | {key: new.meta[key] for key in fields if key in new.meta}


def autocasts(device: str) -> frozenset[str]:
    """The names of the ATen operators whose operands the autocast of a device casts."""
    key, names = f"Autocast{device.upper()}", (name for name in all_operator_names() if name.startswith("aten::"))
    return frozenset(name[len("aten::") :] for name in names if _dispatch_has_kernel_for_dispatch_key(name, key))


def autocast_library(device: str) -> contextlib.AbstractContextManager[torch.library.Library]:
    """A library whose kernels replace those of a device's autocast until the block ends."""
    return _scoped_library("aten", "IMPL", f"Autocast{device.upper()}")


def excluding_autocast(device: str) -> Any:
    """A block in which operators skip the kernels of a device's autocast."""
    return _ExcludeDispatchKeyGuard(DispatchKeySet(getattr(DispatchKey, f"Autocast{device.upper()}")))


def turned_on(context: torch.autocast) -> None:
    """Let `context` turn autocast on, also if its device is absent."""
    context._enabled = True


@contextlib.contextmanager
def with_casts_of(device: str, other: str) -> Iterator[None]:
    """In the block, torch.amp.custom_fwd for tensors of the device `other` casts those of `device`."""
    before = autocast_mode._cast
    with afterwards(lambda: setattr(autocast_mode, "_cast", before)):
        setattr(  # noqa: B010 - its type names the arguments
            autocast_mode, "_cast", lambda value, kind, dtype: before(value, device if kind == other else kind, dtype)
        )
        yield


def compiled_when_run() -> contextlib.AbstractContextManager[None]:
    """Make make_fx in the block defer compiling a graph's code to its first run: most graphs are only read."""
    return _use_lazy_graph_module(True)


@functools.lru_cache(maxsize=1)
def steps_of_layers() -> Mapping[Any, Callable[..., Any]]:
    """PyTorch's decompositions of recurrent layers into operators of their steps."""
    aten = torch.ops.aten
    return get_decompositions([aten.gru.input, aten.lstm.input, aten.rnn_relu.input, aten.rnn_tanh.input])


def graph_module(root: Any, graph: torch.fx.Graph) -> torch.fx.GraphModule:
    """A module of a graph that compiles its code on its first run."""
    with _use_lazy_graph_module(True):
        made: torch.fx.GraphModule = _make_graph_module(root, graph)
    return made


@contextlib.contextmanager
def _signatures_read_once() -> Iterator[None]:
    """Look up the names of parameters in a dict made once per export: torch makes it anew from the signature for each
    input, which takes seconds for a thousand. Does nothing where torch lacks the function."""
    name = "_populate_param_buffer_metadata_to_new_gm"
    plain = getattr(exported_program, name, None)
    if plain is None or plain.__module__ == __name__:  # or another thread has replaced it
        yield
        return

    def populate(meta: Any, module: Any, signature: Any) -> Any:
        kinds = ("inputs_to_parameters", "inputs_to_buffers")
        return plain(meta, module, SimpleNamespace(**{kind: getattr(signature, kind) for kind in kinds}))

    with afterwards(lambda: setattr(exported_program, name, plain)):
        setattr(exported_program, name, populate)
        yield


@contextlib.contextmanager
def _generators_left_alone() -> Iterator[None]:
    """Keep AOTAutograd in this thread from resetting the global random generators: fake tensors draw nothing, and
    another thread that draws numbers would get them twice. PyTorch has no switch for it; does nothing where torch
    lacks the function."""
    plain, thread = getattr(aot_autograd, "preserve_rng_state", None), threading.get_ident()
    if plain is None:
        yield
        return

    def preserve() -> contextlib.AbstractContextManager[Any]:
        found: contextlib.AbstractContextManager[Any] = plain()
        return contextlib.nullcontext() if threading.get_ident() == thread else found

    with afterwards(lambda: setattr(aot_autograd, "preserve_rng_state", plain)):
        setattr(aot_autograd, "preserve_rng_state", preserve)  # noqa: B010 - a name that its module does not export
        yield


def symbols_in(value: Any) -> frozenset[Any]:
    """The symbols that a size, or a number derived from sizes, depends on; none for a Python number."""
    return frozenset(value.node.expr.free_symbols) if hasattr(value, "node") else frozenset()


def symbol_of(size: Any) -> Any:
    """The symbol of a size; None for a number or an expression."""
    expr = size.node.expr if hasattr(size, "node") else None
    return expr if getattr(expr, "is_Symbol", False) else None


def at_symbols(size: Any, values: Mapping[Any, int]) -> int:
    """A size with its symbols replaced by `values`."""
    return int(size.node.expr.xreplace(values)) if hasattr(size, "node") else int(size)


def range_of(size: torch.SymInt, symbol: Any) -> tuple[Any, Any]:
    """The smallest and the largest value of a symbol in the trace that `size` belongs to."""
    bounds = size.node.shape_env.var_to_range[symbol]
    return bounds.lower, bounds.upper


def guards_of(size: torch.SymInt) -> list[Any]:
    """The relations between symbols that the trace of `size` relies on: each becomes true or false when its symbols are
    replaced."""
    env = size.node.shape_env
    later = [each.expr for asserts in env.deferred_runtime_asserts.values() for each in asserts]
    return [guard.expr for guard in env.guards] + later


def fake_like(tensor: FakeTensor, shape: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
    """A fake tensor like `tensor`, in the same mode, of another shape."""
    with tensor.fake_mode:
        made = torch.empty_strided(shape, strides, dtype=tensor.dtype, device=tensor.device)
    return made.requires_grad_(tensor.requires_grad)


def bound_fake_results(most: int) -> None:
    """Clear the cache of fake results if it has more than `most`: torch keeps one for each operator and shape that the
    process ever traces."""
    if FakeTensorMode.cache_info().size > most:
        FakeTensorMode.cache_clear()


def defined_by(definition: CustomOpDef) -> OpOverload:
    """The operator of a torch.library.custom_op."""
    operator: OpOverload = definition._opoverload
    return operator


def sequence_number(node: Any) -> int:
    """The number that autograd gave the operation of a `grad_fn`: later operations have larger numbers."""
    return int(node._sequence_nr())


def sequence_number_now() -> int | None:
    """The sequence number of the operation whose backward runs in this thread, or None."""
    node = torch._C._current_autograd_node()
    return None if node is None else sequence_number(node)


__all__ = [
    "COMPILED_CALL",
    "CONVERT",
    "PRIVATE_STATE",
    "CustomOpDef",
    "DisableTorchFunction",
    "FakeTensor",
    "FakeTensorMode",
    "FunctionBase",
    "OpOverload",
    "OpOverloadPacket",
    "TorchDispatchMode",
    "TreeSpec",
    "UnsupportedOperatorException",
    "all_operator_names",
    "at_symbols",
    "autocast_library",
    "autocasts",
    "beside_export",
    "bound_fake_results",
    "buffers_in",
    "check_input_dim",
    "chunked_losses",
    "compiled_call_of",
    "compiled_when_run",
    "data_dependent",
    "decompose",
    "defined_by",
    "dispatch_modes",
    "distributions_validate",
    "excluding_autocast",
    "fake_like",
    "forward_pre_hooks_in",
    "function_modes",
    "global_hooks",
    "graph_module",
    "guards_of",
    "has_old_backward_hooks",
    "hook_flags",
    "hooks_in",
    "in_transform",
    "is_composite",
    "is_transformed",
    "make_fx",
    "makes_memory",
    "module_hooks",
    "modules_in",
    "moved_meta",
    "overload_name_of",
    "parameters_in",
    "range_of",
    "remove_hooks",
    "schema_of",
    "sequence_number",
    "sequence_number_now",
    "set_grad_enabled",
    "split_decompositions",
    "steps_of_layers",
    "storage_key",
    "symbol_of",
    "symbols_in",
    "tracing_calls",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
    "turned_on",
    "version_of",
    "was_told_to_validate",
    "with_autograd",
    "with_casts_of",
    "without_dispatch_modes",
    "without_modes",
]
