"""A plan's bytes are those that its program sends: of random models, in random dtypes, under random options."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st
from random_examples import examples
from torch import nn

import partway as pw
from partway.strategy.errors import DoesNotFitError

WIDTH, ROWS = 16, 16
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.norm(F.gelu(self.inner(x)))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x.reshape(4, -1, WIDTH)).unflatten(-1, (3, 4, -1)).transpose(1, 3).unbind(2)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(heads.transpose(1, 2).flatten(-2)).reshape(x.shape)


class Twice(nn.Module):
    """One weight that two operators read, as it is and transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2 * WIDTH, WIDTH) / WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x @ self.weight.t()) @ self.weight


class Pixels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(x.reshape(-1, 1, 4, 4))).mean(1).reshape(x.shape)


LAYERS = {each.__name__: each for each in (Residual, Attention, Twice, Pixels)}


@dataclass(frozen=True)
class Case:
    layers: tuple[str, ...]
    dtype: str
    autocast: bool
    mesh: tuple[int, ...]
    split: tuple[int | None, int | None]
    options: tuple[tuple[str, Any], ...]
    algo: tuple[tuple[str, Any], ...]
    level: int

    def compile(self) -> Any:
        torch.manual_seed(0)
        dtype = torch.float32 if self.autocast else DTYPES[self.dtype]
        model = nn.Sequential(*(LAYERS[name]() for name in self.layers)).to(dtype)

        def loss(x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
                return model(x).float().square().mean()

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layers = model

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return loss(x)

        axes = {f"a{i}": size for i, size in enumerate(self.mesh)}
        names = tuple(axes)
        split = tuple(None if at is None or at >= len(names) else names[at] for at in self.split)
        split = split if split[0] is None or split[0] != split[1] else (split[0], None)
        pw.set_auto_parallel_context(**dict(self.options))
        pw.set_algo_parameters(**dict(self.algo))
        x = torch.randn(ROWS, WIDTH, dtype=dtype)
        return pw.compile(Model(), (x,), mesh=axes, in_strategy=(split,), level=self.level)


def options(**values: Any) -> st.SearchStrategy[tuple[tuple[str, Any], ...]]:
    return st.fixed_dictionaries({}, optional={k: st.sampled_from(v) for k, v in values.items()}).map(
        lambda chosen: tuple(chosen.items())
    )


CASES = st.builds(
    Case,
    layers=st.lists(st.sampled_from(sorted(LAYERS)), min_size=1, max_size=3).map(tuple),
    dtype=st.sampled_from(sorted(DTYPES)),
    autocast=st.booleans(),
    mesh=st.sampled_from([(2,), (4,), (2, 2), (2, 4), (8,), (2, 2, 2)]),
    split=st.tuples(st.sampled_from([None, 0, 1]), st.sampled_from([None, 0, 1])),
    options=options(
        gradient_fp32_sync=[True, False],
        gradients_mean=[True, False],
        reshard_after_forward=[True, False],
        enable_parallel_optimizer=[True, False],
        parallel_optimizer_config=[{"parallel_optimizer_threshold": 0}],
        batch_norm_parts=[1, 2],
        search_mode=["dynamic_programming", "recursive_programming", "sharding_propagation"],
    ),
    algo=options(
        fully_use_devices=[True, False], memory_limit=[2e4, 6e4, float("inf")], recompute=["auto", "none", "all"]
    ),
    level=st.sampled_from([0, 1, 2]),
)


def sent(collectives: Any) -> Counter[tuple[str, str]]:
    bytes_by_kind: Counter[tuple[str, str]] = Counter()
    for c in collectives:
        bytes_by_kind[c.phase, c.kind.value] += round(c.wire_bytes)
    return bytes_by_kind


# A gather that the search repeated for a view which nothing computed again reads.
REPEATED = Case(
    layers=("Attention", "Residual", "Attention"), dtype="float16", autocast=True, mesh=(2, 4), split=(0, 0),
    options=(("reshard_after_forward", True),), algo=(("recompute", "all"),), level=2,
)  # fmt: skip


@given(CASES)
@example(REPEATED)
@examples(20)
def test_a_plan_sends_what_its_program_sends(case: Case) -> None:
    pw.reset_auto_parallel_context()
    pw.reset_algo_parameters()
    try:
        compiled = case.compile()
    except DoesNotFitError:
        return
    finally:
        pw.reset_auto_parallel_context()
        pw.reset_algo_parameters()
    assert sent(compiled.plan.collectives) == sent(compiled.program.collectives)


@pytest.mark.parametrize("wide", [True, False])
def test_sums_of_narrow_gradients_are_priced_in_the_dtype_that_is_sent(wide: bool) -> None:
    pw.set_auto_parallel_context(gradient_fp32_sync=wide)
    with torch.device("meta"):
        model, x = nn.Linear(64, 64, bias=False).bfloat16(), torch.empty(512, 64, dtype=torch.bfloat16)
    whole = {"weight": (None, None)}
    compiled = pw.compile(
        model, (x,), mesh={"dp": 8}, in_strategy=(("dp", None),), out_strategy=(("dp", None),), parameter_plan=whole
    )
    (summed,) = compiled.plan.collectives
    assert (summed.dtype, summed.payload_bytes) == (("float32", 4 * 64**2) if wide else ("bfloat16", 2 * 64**2))


def test_a_part_that_is_summed_in_float32_is_rounded_when_the_backward_has_ended() -> None:
    """A cast behind each sum would make the backward wait for it."""
    with torch.device("meta"):
        layers = (nn.Linear(4096, 4096, bias=False).bfloat16() for _ in range(3))
        model, x = nn.Sequential(*layers), torch.empty(65536, 4096, dtype=torch.bfloat16)
    split = {"*.weight": ("dp", None)}
    compiled = pw.compile(
        model, (x,), mesh={"dp": 8}, in_strategy=(("dp", None),), out_strategy=(("dp", None),), parameter_plan=split
    )
    lines = [line for line in str(compiled.program).split("backward\n")[1].splitlines() if ": " in line]
    rounded = [i for i, line in enumerate(lines) if "_to_copy" in line and "dtype=bfloat16" in line]
    products = [i for i, line in enumerate(lines) if ".mm." in line]
    assert len(rounded) == 3
    assert min(rounded) > max(products)
