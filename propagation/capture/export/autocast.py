"""torch.autocast on tensors of the meta device, for which no operator has casts.

A call with autocast on tensors of the meta device is traced again with tensors of the CPU, which stand for those of
the device of the autocast (`standing_for`). If that is a GPU, which need not be there, the kernels of the CPU's
autocast are replaced meanwhile by those in this file. PyTorch lists the operators that a device casts; how it casts
them stands in its ATen/autocast_mode.h, and is repeated here.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from threading import get_ident
from typing import Any, TypeVar

import torch
from torch import Tensor

from ....strategy.basics.blocks import afterwards
from ....strategy.errors import CaptureError
from ...torch_internals import (
    OpOverload,
    autocast_library,
    autocasts,
    excluding_autocast,
    schema_of,
    tree_map,
    turned_on,
    with_casts_of,
)

aten = torch.ops.aten
T = TypeVar("T")
_DEVICES = ("cpu", "cuda")


class AutocastOnMeta(Exception):
    """Autocast for `device` is on in a call with tensors of the meta device."""

    def __init__(self, device: str) -> None:
        super().__init__(device)
        self.device = device


@contextlib.contextmanager
def without_autocast() -> Iterator[None]:
    """A block without autocast: a graph and a program have the casts of their function."""
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        yield


def without_casts(name: str, trace: Callable[[], T]) -> T:
    """The result of `trace`, which traces the function `name` with tensors of the meta device.

    Raises AutocastOnMeta if autocast is on around it or in it, whatever it raises itself, and CaptureError if it is for
    another device than the CPU and GPUs of CUDA, or for several.
    """
    devices = {device for device in (*_DEVICES, "mps", "xpu") if torch.is_autocast_enabled(device)}
    if not devices:
        try:
            with _told(lambda device: devices.add(device) if torch.is_autocast_enabled(device) else None):
                traced = trace()
        except Exception:
            if not devices:
                raise
        else:
            if not devices:
                return traced
    if len(devices) > 1 or not devices.issubset(_DEVICES):
        raise CaptureError(
            f"{name} runs in torch.autocast for {' and '.join(sorted(devices))} on tensors of the meta device, which "
            "can stand for those of a CPU or of a CUDA device, and not of several: a plan would be of other dtypes "
            "than a run. Use autocast for one of them, or give tensors of the device itself"
        )
    raise AutocastOnMeta(*devices)


@contextlib.contextmanager
def standing_for(device: str | None) -> Iterator[None]:
    """A block in which tensors of the CPU stand for those of `device`, of type "cuda" or "cpu", in autocast of this
    thread. (The function reads "cpu" from them, so that autocast for it is that for `device`.) None: in no way."""
    with contextlib.ExitStack() as stack:
        if device and torch.get_default_device().type == "meta":
            stack.enter_context(torch.device("cpu"))
        if device == "cuda":
            before = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
            stack.enter_context(afterwards(lambda: _set("cpu", *before)))
            stack.enter_context(_told(_alike))
            stack.enter_context(with_casts_of("cpu", "cuda"))
            _alike("cuda")
        stack.enter_context(_casting("cpu", device or "cpu"))
        stack.enter_context(_casting("cuda", "cuda"))
        yield


@contextlib.contextmanager
def _casting(device: str, other: str) -> Iterator[None]:
    """In the block, autocast for `device` also casts operators that a capture keeps whole, and casts as that for
    `other` in this thread."""
    listed = _listed()
    differing = listed[device] ^ listed[other] | (_DIFFERING if other != device else frozenset())
    with autocast_library(device) as library:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch says once that kernels are replaced
            for name in differing | (_whole(other) - listed[device]):
                kernel = partial(_cast, _operator(name), name, device, other, get_ident())
                library.impl(name, kernel, allow_override=True)
        yield


def _set(device: str, enabled: bool, dtype: torch.dtype) -> None:
    torch.set_autocast_enabled(device, enabled)
    torch.set_autocast_dtype(device, dtype)


def _alike(device: str) -> None:
    """Give autocast for each device the state of that for `device`."""
    if device in _DEVICES:
        for each in _DEVICES:
            _set(each, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))


@contextlib.contextmanager
def _told(changed: Callable[[str], object]) -> Iterator[None]:
    """In the block, call `changed` with the device whenever an autocast of this thread has begun or ended. One for CUDA
    begins without a CUDA device, too."""
    kind, me = torch.autocast, get_ident()
    init, enter, leave = kind.__init__, kind.__enter__, kind.__exit__

    def told_init(
        self: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: bool | None = None
    ) -> None:
        forced = device_type == "cuda" and enabled and get_ident() == me
        init(self, device_type, dtype, enabled and not forced, cache_enabled)
        if forced:
            turned_on(self)

    def told_enter(self: Any) -> Any:
        entered = enter(self)  # type: ignore[no-untyped-call]
        if get_ident() == me:
            changed(self.device)
        return entered

    def told_leave(self: Any, *error: Any) -> Any:
        left = leave(self, *error)
        if get_ident() == me:
            changed(self.device)
        return left

    def restore() -> None:
        for name, method in (("__init__", init), ("__enter__", enter), ("__exit__", leave)):
            setattr(kind, name, method)

    with afterwards(restore):
        for name, method in (("__init__", told_init), ("__enter__", told_enter), ("__exit__", told_leave)):
            setattr(kind, name, method)
        yield


# -- How operators cast


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_LOWER = _names("""
    _addmm_activation _convolution _convolution.deprecated _native_multi_head_attention
    _scaled_dot_product_flash_attention _thnn_fused_gru_cell _thnn_fused_lstm_cell addbmm addmm addmv addr baddbmm bmm
    chain_matmul conv1d conv1d.padding conv2d conv2d.padding conv3d conv3d.padding conv_tbc conv_transpose1d
    conv_transpose2d.input conv_transpose3d.input convolution cudnn_convolution cudnn_convolution_transpose einsum
    gru_cell linalg_multi_dot linalg_vecdot linear lstm_cell matmul mkldnn_rnn_layer mm mv prelu rnn_relu_cell
    rnn_tanh_cell scaled_dot_product_attention
""")
_PROMOTED = {
    "cpu": _names("cat index_copy stack"),
    "cuda": _names("addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put scatter_add tensordot vdot"),
}
_RESULT_IN_FLOAT32 = _names("""
    cumprod cumsum linalg_matrix_norm linalg_matrix_norm.str_ord linalg_norm linalg_norm.ord_str linalg_vector_norm
    log_softmax.int prod prod.dim_int softmax.int sum sum.dim_IntList
""")
_WITH_DTYPE = {"norm.Scalar": aten.norm.ScalarOpt_dtype, "norm.ScalarOpt_dim": aten.norm.ScalarOpt_dim_dtype}
_DIFFERING = _names("binary_cross_entropy grid_sampler prod prod.dim_int")  # in both lists

# Operators that a capture keeps whole, though autocast casts those that they consist of.
_WHOLE_ON_CPU = _names("cross_entropy_loss nll_loss_nd")
_WHOLE = _WHOLE_ON_CPU | _names("""
    _upsample_bicubic2d_aa.vec _upsample_bilinear2d_aa.vec _upsample_nearest_exact1d.vec _upsample_nearest_exact2d.vec
    _upsample_nearest_exact3d.vec linalg_norm linalg_norm.ord_str pairwise_distance upsample_bicubic2d.vec
    upsample_bilinear2d.vec upsample_linear1d.vec upsample_nearest1d.vec upsample_nearest2d.vec upsample_nearest3d.vec
    upsample_trilinear3d.vec
""")


@lru_cache(maxsize=1)
def _listed() -> dict[str, frozenset[str]]:
    """The names of the operators that each device casts."""
    return {device: autocasts(device) for device in _DEVICES}


def _whole(device: str) -> frozenset[str]:
    return _WHOLE if device == "cuda" else _WHOLE_ON_CPU


def _operator(name: str) -> OpOverload:
    base, _, overload = name.partition(".")
    operator: OpOverload = getattr(getattr(aten, base), overload or "default")
    return operator


def _cast(operator: OpOverload, name: str, key: str, standing: str, tracing: int, *args: Any, **kwargs: Any) -> Any:
    """Call an operator as autocast for the device `key` does; in the thread `tracing`, as that for `standing`."""
    device = standing if get_ident() == tracing else key
    lower = torch.get_autocast_dtype(device)
    with excluding_autocast(key):
        if name not in _listed()[device] | _whole(device):
            return operator(*args, **kwargs)
        if name in _LOWER:
            return _called(operator, lower, args, kwargs)
        if name in _PROMOTED[device]:
            return _called(operator, _widest(lower, args, kwargs), args, kwargs)
        if device == "cpu" or name not in _RESULT_IN_FLOAT32 | _WITH_DTYPE.keys() | {"binary_cross_entropy"}:
            return _called(operator, torch.float32, args, kwargs)
        if name == "binary_cross_entropy":
            raise RuntimeError(
                "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast; combine the "
                "sigmoid with the loss, as torch.nn.functional.binary_cross_entropy_with_logits does"
            )
        if name in _WITH_DTYPE:
            rest = schema_of(operator).arguments[len(args) :]
            values = [*args[1:], *(kwargs.get(each.name, each.default_value) for each in rest)]
            return _WITH_DTYPE[name](args[0], *values, dtype=torch.float32 if _is_cast(args[0]) else args[0].dtype)
        place = [each.name for each in schema_of(operator).arguments].index("dtype")
        given = args[place] if place < len(args) else kwargs.get("dtype")
        if given is not None or not _is_cast(args[0]):
            return operator(*args, **kwargs)
        return operator(*args[:place], **kwargs | {"dtype": torch.float32})


def _is_cast(value: Any) -> bool:
    """Whether autocast casts a tensor: it leaves float64 alone."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype is not torch.float64


def _called(operator: OpOverload, dtype: torch.dtype, args: Any, kwargs: Any) -> Any:
    """The result of an operator for its operands in `dtype`."""
    args, kwargs = tree_map(lambda each: each.to(dtype) if _is_cast(each) else each, (args, kwargs))
    return operator(*args, **kwargs)


def _widest(lower: torch.dtype, args: Any, kwargs: Any) -> torch.dtype:
    """float32 if an operand has it, else the dtype of autocast. Raises TypeError for operands of a third one."""
    dtypes: set[torch.dtype] = set()
    tree_map(lambda each: dtypes.add(each.dtype) if _is_cast(each) else None, (args, kwargs))
    if odd := dtypes - {lower, torch.float32}:
        raise TypeError(f"autocast to {lower} takes no operands of {odd.pop()} here")
    return torch.float32 if torch.float32 in dtypes else lower
