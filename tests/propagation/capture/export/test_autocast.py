"""Plans on the meta device have the casts of autocast on the device that it is for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from autocasting import AROUND, WAYS, Net
from torch import Tensor, nn

import partway as pw
from partway.propagation.capture.capture import capture, capture_any_size, graph_at
from partway.propagation.capture.export import autocast
from partway.propagation.capture.export.autocast import standing_for
from partway.propagation.graph.graph import Graph
from partway.propagation.graph.nodes import describe, operator_name
from partway.propagation.torch_internals import FakeTensorMode, all_operator_names, autocasts
from partway.strategy.errors import CaptureError


@contextmanager
def on(device: str, dtype: torch.dtype = torch.bfloat16, enabled: bool = True) -> Iterator[None]:
    """torch.autocast, also for a GPU that is not there."""
    before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    torch.set_autocast_enabled(device, enabled)
    torch.set_autocast_dtype(device, dtype)
    yield
    torch.set_autocast_enabled(device, before[0])
    torch.set_autocast_dtype(device, before[1])


class Layers(nn.Module):
    """Products, norms, attention with dropout, and a loss, with autocast inside."""

    def __init__(self, device: str, dtype: torch.dtype, **more: bool) -> None:
        super().__init__()
        self.table, self.norm, self.linear = nn.Embedding(10, 8), nn.LayerNorm(8), nn.Linear(8, 8)
        self.count: Tensor
        self.register_buffer("count", torch.zeros(()))
        self.context = torch.autocast(device, dtype, **more)

    def forward(self, ids: Tensor) -> Tensor:
        self.count += 1
        with self.context:
            q = self.norm(self.linear(self.table(ids)))[:, None]
            y = F.dropout(F.scaled_dot_product_attention(q, q, q), 0.1, self.training)
            loss = F.cross_entropy(self.linear(y).flatten(0, 2), ids.flatten()) + y.softmax(-1).sum()
        return loss + self.linear(y.float()).square().mean()


def texts(graph: Graph) -> list[str]:
    return [f"{operator_name(node)} {describe(node)}" for node in graph.nodes]


def captured(make: Callable[[], nn.Module], *sizes: int, dtype: torch.dtype = torch.float32, **modes: Any) -> list[str]:
    """The operators of a module's capture on the meta device, which is that on the CPU."""
    found = []
    for device in ("meta", "cpu"):
        with torch.device(device):
            module, x = make(), torch.zeros(*sizes, dtype=dtype)
        with on("cpu", **modes) if modes else torch.no_grad():
            graph = capture(module, (x,), {})
        assert graph.device == device
        found.append(texts(graph))
    assert found[0] == found[1]
    return found[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("way", WAYS)
def test_on_the_meta_device_it_is_that_of_the_cpu(way: str, dtype: torch.dtype) -> None:
    operators = captured(lambda: Net(way, dtype), 6, 8, enabled=way in AROUND)
    assert f"aten.linear.default {str(dtype).removeprefix('torch.')}[6, 16]" in operators
    last = "float32" if way in ("nested", "off inside") else str(dtype).removeprefix("torch.")
    assert f"aten.linear.default {last}[6, 4]" in operators


@pytest.mark.parametrize("more", [{}, {"cache_enabled": False}, {"enabled": False}])
@pytest.mark.parametrize("train", [True, False])
def test_on_the_meta_device_layers_cast_as_on_the_cpu(train: bool, more: dict[str, bool]) -> None:
    operators = captured(lambda: Layers("cpu", torch.bfloat16, **more).train(train), 2, 4, dtype=torch.long)
    expected = "float32" if more.get("enabled") is False else "bfloat16"
    assert f"aten.linear.default {expected}[2, 4, 8]" in operators


@pytest.mark.filterwarnings("ignore:.*Disabling autocast:UserWarning")
@pytest.mark.parametrize("inside", [True, False])
def test_on_the_meta_device_it_is_that_of_a_gpu_that_is_not_there(inside: bool) -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

        def of(self, x: Tensor) -> Tensor:
            y = self.linear(self.norm(self.linear(x)))
            return F.cross_entropy(y, y.detach().argmax(1)) + y.softmax(-1).sum()

        def forward(self, x: Tensor) -> Tensor:
            if not inside:
                return self.of(x)
            with torch.autocast("cuda", torch.bfloat16):
                return self.of(x)

    with torch.device("meta"):
        module, x = Loss(), torch.empty(6, 8)
        with on("cuda", enabled=not inside):
            compiled = pw.compile(module, (x,), mesh={"dp": 2}, in_strategy=(("dp", None),))
    operators = texts(compiled.graph)
    assert operators.count("aten.linear.default bfloat16[6, 8]") == 2
    assert "aten.layer_norm.default float32[6, 8]" in operators
    assert "aten.softmax.int float32[6, 8]" in operators
    assert operators.count("aten._to_copy.default bfloat16[8, 8]") == 2  # of a weight, for each product
    assert compiled.graph.outputs[0].node.meta["val"].dtype is torch.float32
    assert {node.meta["val"].device.type for node in compiled.graph.nodes if describe(node).endswith("]")} == {"cpu"}
    assert compiled.program.backward is not None


def test_on_the_meta_device_the_dtype_of_a_gpu_is_the_default_and_can_be_asked() -> None:
    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cuda"):
                asked = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled() else torch.float64
                with torch.autocast(x.device.type, enabled=False):
                    y = self.linear(x)
                return self.linear(y.to(asked))

    with torch.device("meta"):
        graph = capture(Asks(), (torch.empty(6, 8),), {})
    assert [text for text in texts(graph) if "linear" in text] == [
        "aten.linear.default float32[6, 8]",
        "aten.linear.default float16[6, 8]",
    ]


def test_on_the_meta_device_a_function_casts_its_inputs_as_on_a_gpu() -> None:
    class Square(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        @torch.amp.custom_bwd(device_type="cuda")
        def backward(ctx: Any, gradient: Tensor) -> Any:
            (x,) = ctx.saved_tensors
            return 2 * x * gradient

    def fn(x: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            result: Tensor = Square.apply(x @ x)  # type: ignore[no-untyped-call]
        return result

    graph = capture(fn, (torch.empty(6, 6, device="meta", requires_grad=True),), {})
    assert graph.outputs[0].node.meta["val"].dtype is torch.float32
    assert "aten.matmul.default bfloat16[6, 6]" in texts(graph)


def test_on_the_meta_device_a_capture_for_any_size_casts_too() -> None:
    module, x, y = Net("inside").to("meta"), torch.empty(6, 8, device="meta"), torch.empty(9, 8, device="meta")
    graph = graph_at(capture_any_size(module, (x,), {}, frozenset({(0, 0)})), (y,), {})
    assert "aten.linear.default bfloat16[9, 16]" in texts(graph)
    assert graph.device == "meta"


def test_on_the_meta_device_it_is_for_one_device() -> None:
    def fn(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = x @ x
        with torch.autocast("cuda", torch.bfloat16):
            return x @ y

    with pytest.raises(
        CaptureError, match=r"fn runs in torch\.autocast for cpu and cuda on tensors of the meta device"
    ):
        capture(fn, (torch.empty(4, 4, device="meta"),), {})


# -- The casts of a GPU, beside PyTorch's own for fake tensors of one

LABELS = torch.zeros(8, dtype=torch.long)
CALLS: dict[str, Callable[..., Any]] = {
    "addcmul": lambda x, y, n: torch.addcmul(x, y, x),
    "bce": lambda x, y, n: F.binary_cross_entropy_with_logits(x, y),
    "cat": lambda x, y, n: torch.cat([x, y]),
    "cat alike": lambda x, y, n: torch.cat([x, x]),
    "cosine": lambda x, y, n: F.cosine_similarity(x, y),
    "cross entropy": lambda x, y, n: F.cross_entropy(x, n),
    "cumsum": lambda x, y, n: x.cumsum(0),
    "dot": lambda x, y, n: x[0].dot(y[0]),
    "einsum": lambda x, y, n: torch.einsum("ij,jk->ik", x, y),
    "exp": lambda x, y, n: y.exp() * x.exp(),
    "fft": lambda x, y, n: torch.fft.fft(y).abs(),
    "group norm": lambda x, y, n: F.group_norm(x, 2),
    "interpolate": lambda x, y, n: F.interpolate(x[None], scale_factor=2),
    "bicubic": lambda x, y, n: F.interpolate(x[None, None], scale_factor=2, mode="bicubic"),
    "linear": lambda x, y, n: F.linear(x, y),
    "linalg norm": lambda x, y, n: torch.linalg.norm(x),
    "logsumexp": lambda x, y, n: x.logsumexp(0),
    "mean": lambda x, y, n: x.mean(),
    "mse": lambda x, y, n: F.mse_loss(x, x),
    "multi dot": lambda x, y, n: torch.linalg.multi_dot([x, y, x]),
    "mv": lambda x, y, n: y.mv(x[0]),
    "nll": lambda x, y, n: F.nll_loss(x, n),
    "norm": lambda x, y, n: x.norm(),
    "norm of dim": lambda x, y, n: x.norm(2, 1),
    "norm of dim kept": lambda x, y, n: aten.norm.ScalarOpt_dim(x, 2, [1], keepdim=True),
    "pairwise": lambda x, y, n: F.pairwise_distance(x, x + 1),
    "pow": lambda x, y, n: x**2,
    "prod": lambda x, y, n: x.prod(),
    "rms norm": lambda x, y, n: F.rms_norm(x, (8,)),
    "softmax": lambda x, y, n: x.softmax(-1),
    "softmax with dtype": lambda x, y, n: x.softmax(-1, dtype=torch.bfloat16),
    "stack": lambda x, y, n: torch.stack([x, x]),
    "sum": lambda x, y, n: x.sum() + x.sum(0),
    "sum of float64": lambda x, y, n: y.double().sum(),
    "sum of integers": lambda x, y, n: n.sum(),
    "tensordot": lambda x, y, n: torch.tensordot(x, y, 1),
    "trace": lambda x, y, n: x.trace(),
}
aten = torch.ops.aten


UNKNOWN = {  # which PyTorch cannot run on fake tensors of a GPU that is not there
    "bicubic": torch.float32, "dot": torch.float32, "interpolate": torch.float32, "mv": torch.bfloat16
}  # fmt: skip
GIVEN = (torch.empty(8, 8, dtype=torch.bfloat16), torch.empty(8, 8), LABELS)


def test_operators_cast_as_on_a_gpu() -> None:
    expected: dict[str, torch.dtype] = dict(UNKNOWN)
    with FakeTensorMode(), on("cuda"):
        given = [torch.empty(t.shape, dtype=t.dtype, device="cuda") for t in GIVEN]
        expected |= {name: call(*given).dtype for name, call in CALLS.items() if name not in UNKNOWN}
    with on("cuda"), standing_for("cuda"):
        assert {name: call(*GIVEN).dtype for name, call in CALLS.items()} == expected

    def every(*tensors: Tensor) -> list[Tensor]:
        return [call(*tensors) for call in CALLS.values()]

    with on("cuda"):
        graph = capture(every, tuple(t.to("meta") for t in GIVEN), {})
    found = [port.node.meta["val"].dtype for port in graph.outputs]
    assert dict(zip(CALLS, found, strict=True)) == expected


def test_a_loss_that_the_cpu_casts_in_parts_is_captured_in_float32() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        graph = capture(F.nll_loss, (torch.rand(8, 8).bfloat16(), LABELS), {})
    assert graph.outputs[0].node.meta["val"].dtype is torch.float32


def test_an_unsafe_loss_is_refused_as_on_a_gpu() -> None:
    with on("cuda"), pytest.raises(CaptureError, match="unsafe to autocast"):
        capture(F.binary_cross_entropy, (torch.empty(8, device="meta"), torch.empty(8, device="meta")), {})


def test_the_kernels_of_the_cpu_come_back_and_other_names_are_those_of_pytorch() -> None:
    with standing_for("cuda"):
        assert "exp" in autocasts("cpu")
    assert "exp" not in autocasts("cpu")
    names = {name.removeprefix("aten::") for name in all_operator_names()}
    named = autocast._LOWER | autocast._RESULT_IN_FLOAT32 | autocast._WITH_DTYPE.keys() | autocast._WHOLE
    assert not (named | autocast._PROMOTED["cpu"] | autocast._PROMOTED["cuda"] | autocast._DIFFERING) - names
