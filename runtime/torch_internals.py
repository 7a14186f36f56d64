"""The only file of this stage that uses private modules, names and attributes of PyTorch.

`propagation/torch_internals.py` has more, which this stage may use too; `tests/test_torch_internals.py` tests what we
rely on.

Each name, and why:

    torch.distributed.distributed_c10d._coalescing_manager   several collectives as one; no public name does so without
                                                             a copy
    torch.distributed.distributed_c10d._get_default_store    the store by which the processes have met; its public name
                                                             would be `dist.get_default_store()`
    torch._C._distributed_c10d._resolve_process_group        a process group by its name, since an operator's
                                                             arguments cannot hold the group itself
    torch._C._distributed_c10d._dump_nccl_trace_json         NCCL's unfinished collectives; PyTorch's public
                                                             way is a file, written when it gives up
    torch._C._current_graph_task_id                          whether a backward runs in this thread; no public name says
    Backend.options._timeout                                 how long collectives of a group wait; there is
                                                             `set_timeout`, and would be `timeout`
    Tensor._backward_hooks, _post_accumulate_grad_hooks      the hooks of a tensor, which handles refer to; no public
                                                             name moves them to another tensor
    DTensor._spec, _local_tensor, its spec's tensor_meta     how a DTensor is placed, and its part: to make another
                                                             like it without asking the mesh or recording for autograd
    DTensorSpec, TensorMeta                                  to make the spec of a DTensor without asking the mesh; an
                                                             optimizer's step may make thousands
    _foreach_supported_types                                 the subclasses that optimizers step as lists; DTensor's
                                                             module adds its own there, too
    Shard, Replicate, Partial as exact types, shard_order    other placements of DTensor are left to it
    torch._C._disabled_torch_function_impl                   the __torch_function__ of DTensor: reads attributes of a
                                                             tensor as an object in a third of the time of ours, also
                                                             for everything that a function does. (A `with` that an
                                                             interrupt leaves early would leave it on; the only public
                                                             way also disables the modes of functions)
    Tensor._make_wrapper_subclass                            to make a tensor of a subclass, without memory; documented
                                                             for subclasses, without a public name
    Tensor._is_view, _base                                   what a tensor is a view of; there is no public name
    torch._inductor.compile                                  compiles a graph of ATen operators without tracing it again
                                                             or checking guards, as `torch.compile` does on every call
    torch._dynamo.source.ConstantSource                      the source of a symbol for a number of rows, which a
                                                             ShapeEnv asks for
    torch._add_batch_dim, _remove_batch_dim, torch._C._vmapmode_*   the tensors that is_grads_batched=True and
                                                             vectorize=True make of a batch, which no public name
                                                             takes apart, and the mode during the batch
    nn.RNNBase._init_flat_weights                            makes a recurrent layer refer to the parameters it has:
                                                             else it does so when it next runs, which changes it
    GLOO_TLS                                                 the name of a variable that only a gloo with TLS reads; to
                                                             ask for such a device keeps a process from any other
    STORE_PING                                               the first message of a client of a TCPStore, with a number
                                                             that comes back: a store does not answer any other message,
                                                             and a client waits long for a port without a store
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import lru_cache, partial
from operator import attrgetter, methodcaller
from typing import Any

import torch
from torch import Tensor, fx
from torch._C import _disabled_torch_function_impl as as_object
from torch._C import _distributed_c10d
from torch.distributed.distributed_c10d import _coalescing_manager as coalescing_manager
from torch.distributed.distributed_c10d import _get_default_store as default_store
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.nn import Module, RNNBase
from torch.optim.optimizer import _foreach_supported_types as optim_foreach_types
from torch.utils._foreach_utils import _foreach_supported_types as util_foreach_types

from ..propagation.torch_internals import FakeTensorMode
from ..strategy.torch_mesh import has_nccl

__all__ = [
    "ASKS_SUBCLASSES",
    "GLOO_TLS",
    "STORE_PING",
    "add_batch_dim",
    "as_object",
    "base_of",
    "coalescing_manager",
    "default_store",
    "dtensor_spec",
    "flight_record",
    "give_hooks",
    "in_backward",
    "inductor",
    "is_documented",
    "is_view",
    "local_part_of",
    "outside_batching",
    "process_group_named",
    "refer_anew",
    "remove_batch_dim",
    "set_part",
    "spec_like",
    "spec_of",
    "spec_or_none",
    "take_hooks",
    "takes_foreach",
    "timeout_of",
    "wrapper_like",
]

Hooks = tuple[Any, Any]
# Whether operators call the __torch_dispatch__ of a subclass of DTensor; until 2.11 they treated it as a DTensor
# (pytorch/pytorch#177716).
ASKS_SUBCLASSES = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12)
add_batch_dim: Callable[[Tensor, int, int], Tensor] = torch._add_batch_dim  # pyright: ignore[reportPrivateImportUsage] # of torch._C, on purpose
process_group_named: Callable[[str], Any] = _distributed_c10d._resolve_process_group  # type: ignore[assignment]
remove_batch_dim: Callable[[Tensor, int, int, int], Tensor] = torch._remove_batch_dim  # pyright: ignore[reportPrivateImportUsage] # of torch._C, on purpose
GLOO_TLS = b"GLOO_DEVICE_TRANSPORT_TCP_TLS_PKEY"  # in the library if gloo was built with TLS
STORE_PING = bytes([0, 0xCE, 0xF7, 0x85, 0x3C, 13, 1, 2, 3, 4])  # "validate" and its number; "ping" and ours
spec_of: Callable[[Tensor], Any] = attrgetter("_spec")  # of a DTensor
local_part_of: Callable[[Tensor], Tensor] = attrgetter("_local_tensor")
_MOST_BATCHES = 8  # the deepest nesting
base_of: Callable[[Tensor], Tensor | None] = attrgetter("_base")
is_view: Callable[[Tensor], bool] = methodcaller("_is_view")


def in_backward() -> bool:
    """Whether this thread computes a backward."""
    return torch._C._current_graph_task_id() != -1


def take_hooks(tensor: Tensor, carried: Callable[[Any], Any] = lambda hook: hook) -> Hooks:
    """Take the hooks from `tensor`. Its post-accumulate hooks are replaced by the result of `carried`."""
    held: Any = tensor
    found = held._backward_hooks, held._post_accumulate_grad_hooks
    for key, hook in (found[1] or {}).items():
        found[1][key] = carried(hook)  # in the dict itself, to which handles refer
    held._backward_hooks = held._post_accumulate_grad_hooks = None
    return found


def give_hooks(tensor: Tensor, hooks: Hooks) -> None:
    """Give `tensor`, which has none, the `hooks` of another; their handles keep working."""
    held: Any = tensor
    held._backward_hooks, held._post_accumulate_grad_hooks = hooks


def refer_anew(module: Module) -> None:
    """Make `module`, whose parameters were replaced, refer to its current ones if it is a recurrent layer."""
    if isinstance(module, RNNBase):
        module._init_flat_weights()


def spec_or_none(tensor: Tensor) -> Any:
    """The spec of a DTensor; None for another tensor."""
    return getattr(tensor, "_spec", None)


@lru_cache(maxsize=4096)
def dtensor_spec(mesh: Any, placements: tuple[Any, ...], shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    """The spec of a DTensor of `shape` and `dtype` on a DeviceMesh; it is whole along axes whose dim it lacks."""
    stride = torch.empty(shape, device="meta").stride()
    placements = tuple(Replicate() if isinstance(p, Shard) and p.dim >= len(shape) else p for p in placements)
    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(torch.Size(shape), stride, dtype))


def spec_like(spec: Any, shape: Sequence[int], dtype: torch.dtype) -> Any:
    """The spec of a DTensor of `shape` and `dtype` that is placed like `spec`."""
    own = spec.tensor_meta
    same = dtype == own.dtype and tuple(shape) == tuple(own.shape)
    return spec if same else dtensor_spec(spec.mesh, spec.placements, tuple(shape), dtype)


def takes_foreach(kind: type) -> None:
    """Let torch.optim and clip_grad_norm_ work on lists of tensors of a subclass, as DTensor's module does for it."""
    for kinds in (optim_foreach_types, util_foreach_types):
        if kind not in kinds:
            kinds.append(kind)  # type: ignore[arg-type]


def set_part(tensor: Any, part: Tensor, spec: Any) -> None:
    """Give a DTensor another part, with other placements; its shape and dtype stay."""
    tensor._spec, tensor._local_tensor = spec, part


def is_documented(spec: Any) -> bool:
    """Whether a DTensor uses only the three documented placements, none derived from them, and axes that split one dim
    cut it in their order."""
    kinds = [type(placement) for placement in spec.placements]
    if kinds.count(Shard) > 1 and any(
        list(entry.mesh_dims) != sorted(entry.mesh_dims) for entry in getattr(spec, "shard_order", None) or ()
    ):
        return False
    return all(kind in (Partial, Replicate, Shard) for kind in kinds)


def wrapper_like(kind: Any, tensor: Tensor, device: torch.device) -> Any:
    """A tensor of the subclass `kind`, without memory, with the shape, strides and dtype of `tensor`."""
    make: Any = Tensor._make_wrapper_subclass
    return make(kind, tensor.shape, strides=tensor.stride(), dtype=tensor.dtype, device=device)


@contextlib.contextmanager
def outside_batching(tensors: Sequence[Tensor]) -> Iterator[int]:
    """Leave the innermost batch of `is_grads_batched=True` in the block, and yield its level. Autograd's threads for
    GPUs do not know the level: there it is the highest of the `tensors`."""
    level = torch._C._vmapmode_decrement_nesting() + 1
    try:
        yield level if level > 0 else max((n for n in range(1, _MOST_BATCHES) if _batched_at(n, tensors)), default=1)
    finally:
        torch._C._vmapmode_increment_nesting()


def _batched_at(level: int, tensors: Sequence[Tensor]) -> bool:
    """Whether one of the tensors has a batch of `level`: others would come back with a dim of no elements."""
    return any(len(remove_batch_dim(tensor, level, 0, 0)) > 0 for tensor in tensors)


def flight_record(entries: bool = True, under_way: bool = False) -> dict[str, Any]:
    """PyTorch's record of NCCL's collectives: how many each group has been given and has finished and, with `entries`,
    an entry for each recent one, or only for those `under_way`."""
    record = getattr(_distributed_c10d, "_dump_nccl_trace_json", None)
    if record is None:
        return {"pg_config": {}, "pg_status": {}}
    return json.loads(record(entries, under_way))  # type: ignore[no-any-return]


def timeout_of(group: Any) -> timedelta:
    """How long a collective of `group` waits for its ranks."""
    options: Any = group._get_backend(torch.device("cuda" if has_nccl(group) else "cpu")).options
    found: timedelta = options._timeout
    return found


def inductor(
    module: fx.GraphModule, examples: list[Tensor], unsized: Sequence[tuple[int, ...]] = ()
) -> Callable[..., Any]:
    """TorchInductor's function for a graph of ATen operators, for tensors like `examples`. `unsized`: dims of each that
    may have other sizes; for sizes that its code does not allow (a single row, or very many) the graph itself runs."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the modules that TorchInductor imports warn
        from torch._inductor import compile as compiled_by_inductor
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        compiled: Any = partial(compiled_by_inductor, options={"reorder_for_locality": False})
        if not any(unsized):
            return compiled(module, list(examples))  # type: ignore[no-any-return]
        env = ShapeEnv(duck_shape=False)
        symbols = list[Any]()
        with FakeTensorMode(shape_env=env):
            free = [_of_any_size(each, dims, env, symbols) for each, dims in zip(examples, unsized, strict=True)]
        run = compiled(fx.GraphModule(module, copy.deepcopy(module.graph)), free)
        guards = env.produce_guards_expression(symbols)

    def call(*inputs: Tensor) -> Any:
        sizes = [each.shape[dim] for each, dims in zip(inputs, unsized, strict=True) for dim in dims]
        allowed = guards is None or env.evaluate_guards_expression(guards, sizes)
        return run(*inputs) if allowed else module(*inputs)

    return call


def _of_any_size(example: Tensor, dims: tuple[int, ...], env: Any, symbols: list[Any]) -> Tensor:
    """A fake tensor like `example`, with a new symbol of `env` for the size of each of `dims`."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    sizes = list[Any](example.shape)
    for dim in dims:
        source = ConstantSource(f"rows{len(symbols)}")
        symbol = env.create_symbol(sizes[dim], source, dynamic_dim=DimDynamic.DYNAMIC)
        symbols.append(env.create_symintnode(symbol, hint=sizes[dim], source=source))
        sizes[dim] = symbols[-1]
    strides = list[Any](example.stride())
    order = sorted(range(example.dim()), key=lambda dim: (strides[dim], -dim))
    for inner, outer in itertools.pairwise(order):
        if strides[outer] == strides[inner] * example.shape[inner]:
            strides[outer] = strides[inner] * sizes[inner]
    return torch.empty_strided(sizes, strides, dtype=example.dtype, device=example.device)
