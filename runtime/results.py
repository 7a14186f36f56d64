"""Results that stay split: large tensors that a function returns beside its loss, and that nobody may ever look at.

To gather one in every step would cost more than most steps. So it is a DTensor, of which each rank has its part; but
unlike another DTensor it mixes with plain tensors, and what is done with it is what one device would do: any operator
works on the whole tensor, which is gathered when it is first used. Its shape, dtype and printed form need no gathering.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, distribute_tensor

from ..propagation.torch_internals import DisableTorchFunction, tree_map, version_of
from ..strategy.errors import RuntimeStateError
from ..strategy.layout import Layout
from .agreement import agree
from .parameters import as_dtensor
from .torch_internals import local_part_of, spec_of

_VIEWS = frozenset(getattr(Tensor, name).__get__ for name in ("H", "T", "data", "imag", "mH", "mT", "real"))
_OF_A_PART = frozenset({
    "__hash__", "__len__", "detach", "dim", "element_size", "is_complex", "is_contiguous", "is_floating_point",
    "is_inference", "is_signed", "ndimension", "nelement", "numel", "requires_grad_", "size", "stride",
})  # fmt: skip


class SplitResult(DTensor):
    """A result of which each rank has a part. Operators work on the whole, and so do plain tensors beside it.

    Every rank has to use it at the same point of the program; where one alone does, RuntimeStateError says so.
    `to_local()` is this rank's part, `full_tensor()` the whole.
    """

    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if _is_of_a_part(func) and "_whole" not in vars(args[0]):
            with DisableTorchFunction():
                return _mixing(func(*args, **dict(kwargs or {})))
        split: dict[int, tuple[SplitResult, int]] = {}

        def whole(value: Any) -> Any:
            if not isinstance(value, SplitResult):
                return value
            gathered = value._gathered(func)
            split[id(gathered)] = value, version_of(gathered)
            return gathered

        args, kwargs = tree_map(whole, args), tree_map(whole, dict(kwargs or {}))
        result = func(*args, **kwargs)
        for value, version in split.values():
            if version_of(value._gathered(func)) != version:
                value._write_part()
        return split[id(result)][0] if id(result) in split else result  # an operator in place returns what it wrote

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """The whole tensor. The first time every rank has to come."""
        if grad_placements is None:
            return self._gathered(DTensor.full_tensor)
        return super().full_tensor(grad_placements=grad_placements)

    def __repr__(self) -> str:  # type: ignore[override]  # as DTensor's own
        """This rank's part, since only one rank may print."""
        return f"SplitResult(shape={list(self.shape)}, placements={self.placements}, part={local_part_of(self)})"

    def write_part(self, part: Tensor) -> None:
        """Write this rank's part; every rank writes its own. The whole, if it was gathered, is of before."""
        vars(self).pop("_whole", None)
        if part is not local_part_of(self):  # else it was written where it lies
            local_part_of(self).copy_(part)

    def _gathered(self, func: Callable[..., Any]) -> Tensor:
        """The whole, gathered the first time, for the operator `func`."""
        own = vars(self)
        if "_whole" not in own:
            name = getattr(func, "__name__", "an operator")
            agree(f"gather a result of shape {list(self.shape)}, which {name} needs whole", ())
            # also for a later use, with gradients or in inference mode, where tensors do not say when they were written
            with DisableTorchFunction(), torch.inference_mode(False), torch.enable_grad():
                own["_whole"] = _Whole.apply(self)  # type: ignore[no-untyped-call]
        whole: Tensor = own["_whole"]
        return whole

    def _write_part(self) -> None:
        """The whole was written in place: so is the part."""
        whole = vars(self)["_whole"]
        if whole.requires_grad:
            raise RuntimeStateError(
                f"a result of shape {list(self.shape)} that lies split was written in place where gradients are "
                "recorded, which its parts would not see; write its full_tensor(), or set whole_results=True"
            )
        with torch.no_grad(), DisableTorchFunction():
            part = distribute_tensor(whole, self.device_mesh, self.placements, src_data_rank=None)
            local_part_of(self).copy_(local_part_of(part))


def split_result(part: Tensor, layout: Layout, shape: tuple[int, ...], mesh: DeviceMesh) -> SplitResult:
    """The result of global `shape` whose part on this rank is `part`; its gradient comes back as a part."""
    result: SplitResult = _mixing(as_dtensor(part, layout, shape, mesh))
    return result


class _Whole(torch.autograd.Function):
    """All of a result. (That of DTensor is a view, which must not be written in place.)"""

    @staticmethod
    def forward(ctx: Any, result: SplitResult) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.place = result.device_mesh, result.placements
        return DTensor(local_part_of(result).detach(), spec_of(result), requires_grad=False).full_tensor()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Tensor | None:
        return None if gradient is None else distribute_tensor(gradient, *ctx.place, src_data_rank=None)


def _mixing(value: Any) -> Any:
    """A DTensor as a result that mixes; anything else as it is."""
    if type(value) is DTensor:
        value.__class__ = SplitResult
    return value


def _is_of_a_part(func: Callable[..., Any]) -> bool:
    """Whether what `func` gives of a tensor needs no other rank's part."""
    name = getattr(func, "__name__", "")
    return func not in _VIEWS if name == "__get__" else name in _OF_A_PART
