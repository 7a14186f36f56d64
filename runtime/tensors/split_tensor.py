"""Tensors that lie split over the ranks of a process group, and behave as on one device.

Parameters, their gradients, the states of their optimizers and results are `SplitTensor`s under a launcher: DTensors
with operators of our own (`split_operators.py`), since DTensor has no rule for many operators and wrong ones for some,
and does not mix with plain tensors. Each operator gives the result of one device.

Autograd sees plain tensors only: where gradients are recorded, an operator gets the whole by `_Whole`, whose backward
splits the gradient again. So derivatives of any order are those of plain tensors.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor, Placement, Shard

from ...propagation.torch_internals import TorchDispatchMode, tree_map, untransformed, version_of
from ...strategy.errors import RuntimeStateError
from ..torch_internals import (
    ASKS_SUBCLASSES,
    as_object,
    dtensor_spec,
    local_part_of,
    set_part,
    spec_like,
    spec_of,
    takes_foreach,
    wrapper_like,
)
from .gather import gather
from .split_operators import (
    WRITES_STATISTICS,
    adds_nothing,
    aligned,
    has_slices,
    is_by_element,
    looked_at,
    run,
    tell_of_write,
    write_whole,
)

aten = torch.ops.aten
_ALIAS, _DETACH = aten.alias.default, aten.detach.default
_IS_LEAF: Any = Tensor.is_leaf.__get__  # type: ignore[attr-defined]
_REQUIRES_GRAD: Any = Tensor.requires_grad.__get__  # type: ignore[attr-defined]
_READS_MEMORY = frozenset({"__array__", "__dlpack__", "__format__", "__repr__", "__str__", "numpy", "tolist"})
_NUMBERS = frozenset(
    {int, float, bool, complex, type(None), torch.dtype, torch.memory_format, torch.device, torch.layout}
)
_PLAIN = frozenset({Tensor})
_REDUCING = ("_foreach_norm", "_foreach_max")
_IN_PLACE = {"__iadd__": "add_", "__isub__": "sub_", "__imul__": "mul_", "__idiv__": "div_", "__itruediv__": "div_"}
_OPERATORS = frozenset({"H", "T", "imag", "mH", "mT", "real"})  # attributes that are operators
_OF_ITSELF = frozenset({
    "__deepcopy__", "__hash__", "__len__", "_has_compatible_shallow_copy_type", "backward", "data_ptr", "detach",
    "detach_", "dim", "element_size", "get_device", "grad", "is_complex", "is_contiguous", "is_floating_point",
    "is_inference", "is_same_size", "is_shared", "is_signed", "ndimension", "nelement", "numel", "register_hook",
    "register_post_accumulate_grad_hook", "requires_grad_", "retain_grad", "size", "storage_offset", "stride",
    "untyped_storage",
})  # fmt: skip


class SplitTensor(DTensor):
    """A tensor of which each rank has a part. Its operators give the results of one device.

    Every rank has to use it at the same point of the program; if one alone does, RuntimeStateError says so.
    `to_local()` is this rank's part, `full_tensor()` the whole.
    """

    __slots__ = ()
    __hash__ = object.__hash__  # as Tensor's; DTensor's would call __torch_function__

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _how(func)(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # as DTensor's own
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _DETACH and type(args[0]) is SplitTensor:  # of each gradient, in each step
            return split_tensor(local_part_of(args[0]), spec_of(args[0]))
        return run(func, args, kwargs or {})

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """The whole tensor. Every rank has to call it, unless each has all of it."""
        if grad_placements is not None:
            return super().full_tensor(grad_placements=grad_placements)
        return _whole(self, "full_tensor")

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """This rank's part. Gradients propagate back."""
        if grad_placements is not None:
            return super().to_local(grad_placements=grad_placements)
        if torch.is_grad_enabled() and self.requires_grad:
            part: Tensor = _Part.apply(self)  # type: ignore[no-untyped-call]
            return part
        return local_part_of(self)

    def redistribute(self, *args: Any, **kwargs: Any) -> DTensor:
        """This tensor with other placements."""
        return as_split(super().redistribute(*args, **kwargs))  # type: ignore[no-any-return]

    def placed(self, part: Tensor) -> SplitTensor:
        """A tensor of this one's shape, placed like it, whose part on this rank is `part`."""
        spec = spec_of(self)
        same = part.dtype == spec.tensor_meta.dtype
        return split_tensor(part, spec if same else spec_like(spec, spec.shape, part.dtype))

    def viewed(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The view of this tensor by the view operator `op`."""
        return _viewed(self, op, args, kwargs)

    def assign(self, value: Tensor) -> None:
        """Take the data of `value`, as `tensor.data = value` does; shape and dtype may change. A plain tensor, which
        every rank has whole, is copied."""
        if not isinstance(value, Tensor):
            raise TypeError(f"the data of a tensor is a tensor, not a {type(value).__name__}")
        new = _placed_like(value, self, "data")
        as_object(Tensor.data.__set__, (), (self, new), {})  # type: ignore[attr-defined]
        set_part(self, local_part_of(new), spec_of(new))

    def write_part(self, part: Tensor) -> None:
        """Write this rank's part; every rank writes its own."""
        _forget_whole(self)
        if part is not local_part_of(self):  # else it was written in place
            local_part_of(self).copy_(part)

    def storage(self) -> NoReturn:
        """Raise RuntimeStateError: there is no memory that holds the tensor."""
        raise RuntimeStateError(
            f"a tensor of shape {list(self.shape)} lies split over the ranks, and no memory holds all of it; save the "
            "model with partway.save or its save_pretrained, and load files with partway.load or load_state_dict"
        )

    def share_memory_(self) -> NoReturn:
        """Raise RuntimeStateError, like `storage`."""
        self.storage()

    def __repr__(self) -> str:  # type: ignore[override]  # as DTensor's own
        return repr(_value(self))

    def __copy__(self) -> Any:
        """Another object with the same memory."""
        copied: Tensor = split_tensor(local_part_of(self), spec_of(self)).requires_grad_(self.requires_grad)
        vars(copied).update(vars(self))
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the whole tensor, as one process does."""
        return _value(self).__reduce_ex__(protocol)


class SplitView(Tensor):
    """A view of a split tensor, such as `p[0]` or `p.t()`, made where no gradients are recorded.

    A part of a view is in general no part of the tensor. So the view keeps the tensor and the chain of view operators.
    Each use gathers the tensor and applies them; a write goes to the tensor's parts. Both share their values, as on one
    device.
    """

    _base_tensor: Any
    _looks: Callable[[Tensor], Tensor]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _how(func)(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # as DTensor's own
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return run(func, args, kwargs or {})

    def viewed(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The view of this view by the view operator `op`."""
        return _viewed(self, op, args, kwargs)

    def looked_at(self, what: str) -> tuple[SplitTensor, Tensor, Tensor]:
        """The split tensor; its whole, for `what`; and the view of the whole."""
        tensor, whole, view = looked_at(vars(self)["_base_tensor"], what)
        return tensor, whole, vars(self)["_looks"](view)

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(_value(self))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _value(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(_value(self), memo)


_SPLIT = frozenset({SplitTensor})
takes_foreach(SplitTensor)


def split_tensor(part: Tensor, spec: Any) -> SplitTensor:
    """The tensor placed as `spec` says, a leaf, whose part on this rank is `part`."""
    tensor: Any = SplitTensor.__new__(SplitTensor, part, spec, requires_grad=False)
    return tensor  # type: ignore[no-any-return]


def as_split(value: Any) -> Any:
    """A DTensor as a SplitTensor, the same object; any other value as it is."""
    if type(value) is DTensor:
        value.__class__ = SplitTensor
    return value


def joined(part: Tensor, spec: Any) -> SplitTensor:
    """The result placed as `spec` says whose part on this rank is `part`; its gradient comes back as a part, and its
    whole is cached at the first gather."""
    result: SplitTensor
    if torch.is_grad_enabled() and part.requires_grad:
        result = _Joined.apply(part, spec)  # type: ignore[no-untyped-call]
    else:
        result = split_tensor(part, spec)
    _forget_whole(result, keeps=True)
    return result


def placed_like(value: Any, tensor: DTensor) -> Any:
    """`value` placed like `tensor`, detached, if it is a tensor of its shape; else `value` itself."""
    if not isinstance(value, Tensor) or value.shape != tensor.shape:
        return value
    return _placed_like(value, tensor, "placing it")


def _placed_like(value: Tensor, tensor: DTensor, what: str) -> SplitTensor:
    spec = spec_like(spec_of(tensor), value.shape, value.dtype)
    if _lies_like(value, tensor):
        return split_tensor(local_part_of(value), spec)
    held = _own_memory(aligned(value.detach(), spec, what))
    return split_tensor(held.zero_() if adds_nothing(spec) else held, spec)


def _own_memory(part: Tensor) -> Tensor:
    """A slice of a whole tensor, copied so that the whole can be freed."""
    return part.clone(memory_format=torch.contiguous_format)


def _viewed(base: Any, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    def look(whole: Tensor) -> Any:
        return op(whole, *args, **kwargs)

    def made(example: Tensor, looks: Callable[[Tensor], Tensor]) -> SplitView:
        view: SplitView = wrapper_like(SplitView, example, base.device)
        vars(view).update(_base_tensor=base, _looks=looks)
        return view

    examples = as_object(
        look, (), (torch.empty_strided(base.shape, base.stride(), dtype=base.dtype, device="meta"),), {}
    )
    if isinstance(examples, Tensor):
        return made(examples, look)
    return [made(example, lambda whole, i=i: look(whole)[i]) for i, example in enumerate(examples)]  # type: ignore[misc]


# -- Wholes -----------------------------------------------------------------------------------------------------------


def _whole(tensor: SplitTensor, what: str) -> Tensor:
    """The whole of a tensor, plain, for `what`. Gradients propagate back. A result is gathered once, until it is
    written to."""
    own = vars(tensor)
    if "_whole" not in own:
        if torch.is_grad_enabled() and tensor.requires_grad:
            # as an object: else a transform of torch.func asks the tensor for it again
            whole: Tensor = as_object(_Whole.apply, (), (tensor, what), {})
            return whole
        return gather(tensor, what)
    part = local_part_of(tensor)  # it counts writes by all tensors that share its memory
    if part.is_inference():
        return gather(tensor, what)
    version = version_of(part)
    if own["_whole"] is None or own["_whole"][1] != version:
        # also for a later use, with gradients or in inference mode, where tensors do not count writes
        with torch.inference_mode(False), torch.enable_grad():
            own["_whole"] = _Whole.apply(tensor, what), version  # type: ignore[no-untyped-call]
    kept: Tensor = own["_whole"][0]
    return kept


def _forget_whole(tensor: SplitTensor, keeps: bool = False) -> None:
    own = vars(tensor)
    if keeps or "_whole" in own:
        own["_whole"] = None


def _value(value: Any) -> Any:
    """A split tensor, or a view of one, as on one device: plain, a leaf, a parameter if it is one."""
    if not isinstance(value, SplitTensor | SplitView):
        return value
    what = "what reads its values"
    with torch.no_grad():
        whole = gather(value, what) if isinstance(value, SplitTensor) else value.looked_at(what)[2]
    if isinstance(value, nn.Parameter):
        return nn.Parameter(whole, requires_grad=value.requires_grad)
    return whole.detach().requires_grad_(value.requires_grad)


# -- Autograd between a tensor, its part, and the whole ---------------------------------------------------------------


class _Whole(torch.autograd.Function):
    """From a tensor to the whole of it. The whole of a leaf is a view, so that autograd forbids writes to it as to a
    leaf."""

    @staticmethod
    def forward(tensor: SplitTensor, what: str) -> Tensor:
        whole = gather(tensor, what)
        return whole.view_as(whole) if tensor.is_leaf else whole

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.set_materialize_grads(False)
        ctx.spec = spec_of(untransformed(inputs[0]))

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return (None if gradient is None else _Split.apply(gradient, ctx.spec)), None  # type: ignore[no-untyped-call]

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], tensor: Any, what: str) -> Any:
        return _plain(tensor), in_dims[0]


class _Split(torch.autograd.Function):
    """From a whole tensor to one placed as a spec says: the gradient of `_Whole`."""

    @staticmethod
    def forward(whole: Tensor, spec: Any) -> Tensor:
        spec = spec_like(spec, whole.shape, whole.dtype)
        return split_tensor(_own_memory(aligned(whole.detach(), spec, "its gradient")), spec)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return None if gradient is None else _plain(gradient), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], whole: Tensor, spec: Any) -> Any:
        moved = tuple(Shard(p.dim + 1) if isinstance(p, Shard) else p for p in spec.placements)
        each = whole.movedim(in_dims[0] or 0, 0)
        batched = dtensor_spec(spec.mesh, moved, tuple(each.shape), each.dtype)
        return _Split.apply(each, batched), 0  # type: ignore[no-untyped-call]


class _Part(torch.autograd.Function):
    """From a tensor to its part on this rank."""

    @staticmethod
    def forward(ctx: Any, tensor: SplitTensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.spec = spec_of(tensor)
        return local_part_of(tensor).detach()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return None if gradient is None else _Joined.apply(gradient, ctx.spec)  # type: ignore[no-untyped-call]


class _Joined(torch.autograd.Function):
    """From the parts of the ranks to the tensor: the gradient of `_Part`."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, spec: Any) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.spec = spec
        return split_tensor(part.detach(), spec)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        if gradient is None:
            return None, None
        if isinstance(gradient, SplitTensor):
            return gradient.to_local() if spec_of(gradient).placements == ctx.spec.placements else aligned(
                gradient, ctx.spec, "its gradient"
            ), None
        return aligned(gradient, ctx.spec, "its gradient"), None


def _plain(value: Any) -> Any:
    return _whole(value, "an operator") if isinstance(value, SplitTensor) else value


# -- PyTorch's functions on split tensors -----------------------------------------------------------------------------

How = Callable[[Callable[..., Any], Any, tuple[Any, ...], Any], Any]  # as __torch_function__


class _Dispatched(TorchDispatchMode):
    """Makes a PyTorch that treats subclasses of DTensor as DTensor call this subclass (`ASKS_SUBCLASSES`)."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if SplitTensor in types:
            return SplitTensor.__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))


def _asked(func: Callable[..., Any], types: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Like `as_object` for a PyTorch that does not call the subclass. The gradients that autograd itself detaches and
    adds up there are DTensors until somebody looks."""
    if func is Tensor.register_hook:
        tensor, hook = args
        args = tensor, lambda gradient: hook(as_split(gradient))
    with _Dispatched():  # type: ignore[no-untyped-call]
        return as_split(as_object(func, types, args, kwargs))


_as_object: How = as_object if ASKS_SUBCLASSES else _asked  # for functions that ask or change the tensor as an object


def _in_memory(func: Callable[..., Any], types: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Give functions that read memory byte by byte the whole; NumPy gets a read-only array, since its writes would be
    lost."""
    result = func(*tree_map(_value, args), **tree_map(_value, dict(kwargs)))
    if getattr(func, "__name__", "") in ("numpy", "__array__"):
        result.flags.writeable = False
    return result


def _with_plain_indices(func: Callable[..., Any], types: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Give functions that read the values of the second operand outside of any operator a plain one."""
    plain = {name: _value(v) if name.startswith("indices") else v for name, v in kwargs.items()}
    return _operator(func, types, (*args[:1], *map(_value, args[1:])), plain)


def _as_itself(func: Callable[..., Any], types: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Run `view_as` and `expand_as`; on the tensor itself they are an idiom to find the node that sums its gradient."""
    tensor = args[0]
    of_itself = len(args) > 1 and args[1] is tensor and isinstance(tensor, SplitTensor)
    if of_itself and torch.is_grad_enabled() and _is_trained(tensor):
        return _as_object(_ALIAS, types, (tensor,), {})  # its node comes right after the tensor's
    return _operator(func, types, args, kwargs)


def _set_data(func: Callable[..., Any], types: Any, args: tuple[Any, ...], kwargs: Any) -> None:
    tensor, value = args
    if isinstance(tensor, SplitTensor):
        tensor.assign(value)
    elif isinstance(tensor, SplitView):
        raise RuntimeStateError(
            f"a view of shape {list(tensor.shape)} of a tensor that lies split takes no data of its own; write to it "
            "with copy_, or set the data of the tensor"
        )
    else:
        func(tensor, _value(value))


def _set_grad(func: Callable[..., Any], types: Any, args: tuple[Any, ...], kwargs: Any) -> None:
    """Set a gradient, with the layout of its tensor."""
    tensor, value = args
    if value is None:
        pass
    elif isinstance(tensor, SplitTensor) and isinstance(value, Tensor) and value.shape == tensor.shape:
        value = value if _lies_like(value, tensor) else _placed_like(value, tensor, "grad")
        tell_of_write("the setting of .grad", [tensor], (), {}, always=True)
    elif not isinstance(tensor, SplitTensor):
        value = _value(value)
    as_object(func, (), (tensor, value), {})


def _lies_like(value: Tensor, tensor: DTensor) -> bool:
    if not isinstance(value, SplitTensor):
        return False
    one, other = spec_of(value), spec_of(tensor)
    return bool(one.placements == other.placements and one.mesh == other.mesh)


def _operator(func: Callable[..., Any], types: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Run an operator. Where gradients are recorded it gets wholes, which autograd sees; else `run` does the rest."""
    if not torch.is_grad_enabled():
        return _as_object(func, types, args, kwargs)
    wholes: dict[int, tuple[SplitTensor, Tensor, Any]] = {}
    name, written = getattr(func, "__name__", "an operator"), args[0] if args else None
    recorded = False

    def look(value: Any) -> Any:
        nonlocal recorded
        recorded = recorded or (isinstance(value, Tensor) and _requires_grad(value))
        return value

    def whole(value: Any) -> Any:
        if not isinstance(value, SplitTensor):
            return value
        known = next((w for t, w, _ in wholes.values() if t is value), None)
        if known is None:
            known = _whole(value, name)
            wholes[id(known)] = value, known, (version_of(known), None if _is_trained(value) else known.grad_fn)
        return known

    tree_map(look, (args, dict(kwargs)))
    if not recorded:
        return _as_object(func, types, args, kwargs)
    args, kwargs = tree_map(whole, args), tree_map(whole, dict(kwargs))
    try:
        result = func(*args, **kwargs)
    except RuntimeError as error:
        if name.endswith("_") and isinstance(written, SplitTensor) and _is_trained(written):  # PyTorch's message:
            raise RuntimeError(
                f"a leaf Variable that requires grad is being used in an in-place operation, {name}; "
                "write to it under torch.no_grad()"
            ) from error
        raise
    for tensor, gathered, (version, grad_fn) in wholes.values():
        if version_of(gathered) != version or (name in WRITES_STATISTICS and not _requires_grad(tensor)):
            if not _is_trained(tensor) and gathered.grad_fn is not grad_fn:
                raise RuntimeStateError(
                    f"a tensor of shape {list(tensor.shape)} that lies split was written in place by {name} where "
                    "gradients are recorded, which its parts would not see; write its full_tensor(), or write under "
                    "torch.no_grad()"
                )
            with torch.no_grad():
                write_whole(tensor, gathered.detach())
                _forget_whole(tensor)
    return wholes[id(result)][0] if id(result) in wholes else result  # an in-place operator returns the written tensor


def _by_element(func: Callable[..., Any], types: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Like `run` for an elementwise operator on tensors with one layout, but without PyTorch's dispatcher: an
    optimizer's step consists of these."""
    like = args[0]
    if torch.is_grad_enabled() or type(like) is not SplitTensor or torch.is_inference_mode_enabled():
        return _operator(func, types, args, kwargs)
    spec = spec_of(like)
    parts = [local_part_of(like)]
    for value in args[1:]:
        if type(value) is SplitTensor and spec_of(value) is spec:
            parts.append(local_part_of(value))
        elif value.__class__ in _NUMBERS or (value.__class__ is Tensor and not value.dim()):
            parts.append(value)
        else:
            return _operator(func, types, args, kwargs)
    if not has_slices(spec) or not all(value.__class__ in _NUMBERS for value in kwargs.values()):
        return _operator(func, types, args, kwargs)
    result = func(*parts, **kwargs)
    if result is not parts[0]:
        return like.placed(result)
    tell_of_write(func.__name__, [like], args, kwargs)
    increment_version(like)
    return like


def _by_position(func: Callable[..., Any], types: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Like `_by_element` for lists, whose tensors at one position have one layout."""
    first = args[0] if isinstance(args[0], list | tuple) else ()
    if torch.is_grad_enabled() or torch.is_inference_mode_enabled() or {*map(type, first)} != _SPLIT:
        return _operator(func, types, args, kwargs)
    specs, fused = [*map(spec_of, first)], func.__name__.startswith("_fused_")
    given = [*args, *kwargs.values()]
    lists: list[Any] = []
    for values in given:
        if not isinstance(values, list | tuple):
            if isinstance(values, Tensor) and values.__class__ is not Tensor:
                return _operator(func, types, args, kwargs)
        elif (kinds := {*map(type, values)}) == _SPLIT:
            if [*map(spec_of, values)] != specs:
                return _operator(func, types, args, kwargs)
            values = [*map(local_part_of, values)]
            if fused and not all(map(Tensor.is_contiguous, values)):  # it walks through the memory of all at once
                return _operator(func, types, args, kwargs)
        elif not kinds <= _NUMBERS and (kinds != _PLAIN or any(map(Tensor.dim, values))):
            return _operator(func, types, args, kwargs)
        lists.append(values)
    if not all(map(has_slices, specs)):
        return _operator(func, types, args, kwargs)
    result = func(*lists[: len(args)], **dict(zip(kwargs, lists[len(args) :], strict=True)))
    if result is not None and result is not lists[0]:
        return type(result)(like.placed(part) for like, part in zip(first, result, strict=True))
    written = (
        first
        if not fused
        else [v for values, own in zip(given, lists, strict=True) if values is not own for v in values]
    )
    if not fused:  # an optimizer's step, whose settings are reported
        tell_of_write(func.__name__, [first], args, kwargs)
    increment_version(written)
    return first if result is not None else None


def _is_trained(tensor: Tensor) -> bool:
    """Whether `tensor` is a leaf with a gradient. Autograd itself refuses to record a write to its whole."""
    return bool(as_object(_IS_LEAF, (), (tensor,), {})) and _requires_grad(tensor)


def _requires_grad(tensor: Tensor) -> bool:
    return bool(as_object(_REQUIRES_GRAD, (), (tensor,), {}))


@lru_cache(maxsize=4096)
def _how(func: Callable[..., Any]) -> How:
    """How to run a function of PyTorch's on a split tensor."""
    name = getattr(func, "__name__", "")
    how: How = _operator
    if name in ("__get__", "__set__", "__delete__"):
        attribute = func.__self__.__name__  # type: ignore[attr-defined]
        if name == "__set__" and attribute in ("data", "grad"):
            how = _set_data if attribute == "data" else _set_grad
        elif attribute not in _OPERATORS:
            how = _as_object
    elif name in _READS_MEMORY:
        how = _in_memory
    elif name == "tensor_split":
        how = _with_plain_indices
    elif name in ("expand_as", "view_as"):
        how = _as_itself
    elif name.startswith("_fused_") or (name.startswith("_foreach_") and name not in _REDUCING):
        how = _by_position
    elif is_by_element(_IN_PLACE.get(name, name)):
        how = _by_element
    elif name in _OF_ITSELF or (name[:1] == "_" != name[1:2] and not hasattr(aten, name)):
        how = _as_object  # a private function that is no operator
    return how
