"""The options as type checkers and `help` see them: the type of each.

The models define accepted values and meanings; `tests/api/options/test_typed.py` checks that the names here are theirs.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypedDict, TypeVar

from partway.options.base import FrozenOptions


class ParallelOptions(TypedDict, total=False):
    """The arguments of `set_auto_parallel_context` and `auto_parallel_context`."""

    parallel_mode: Literal["stand_alone", "data_parallel", "semi_auto_parallel", "auto_parallel"]
    search_mode: Literal["dynamic_programming", "sharding_propagation", "recursive_programming"]
    device_num: int
    dataset_strategy: Literal["data_parallel", "full_batch"] | tuple[tuple[int, ...], ...]
    full_batch: bool
    gradients_mean: bool
    batch_norm_parts: int
    gradient_fp32_sync: bool
    parameter_broadcast: bool
    all_reduce_fusion_config: Sequence[int] | None
    comm_fusion: Mapping[str, bool | Mapping[str, Any] | None]
    strategy_ckpt_config: Mapping[str, str | bool]
    enable_parallel_optimizer: bool
    parallel_optimizer_config: Mapping[str, int]
    reshard_after_forward: bool | None
    enable_compile_cache: bool
    compile_cache_path: str
    backend: Literal["eager", "inductor"]
    compare_replicas: bool | int
    random_numbers: Literal["counter", "torch", "rank"]
    whole_results: bool
    on_unknown_op: Literal["warn", "error"]
    device_profile: str | None


class AlgoOptions(TypedDict, total=False):
    """The arguments of `set_algo_parameters`."""

    fully_use_devices: bool
    elementwise_op_strategy_follow: bool
    enable_algo_approxi: bool
    algo_approxi_epsilon: float
    tensor_slice_align_enable: bool
    tensor_slice_align_size: int
    memory_limit: float | None
    recompute: Literal["auto", "none", "all"]
    optimizer_states: float
    expert_load: float | None


F = TypeVar("F", bound=Callable[..., Any])


def listing(options: type[Any], model: type[FrozenOptions]) -> Callable[[F], F]:
    """A decorator that appends `options` to the docstring of a function, each with type, default and meaning."""

    def extended(function: F) -> F:
        function.__doc__ = f"{inspect.getdoc(function)}\n\n{listed(options, model)}\n"
        return function

    return extended


def listed(options: type[Any], model: type[FrozenOptions]) -> str:
    """The options of a TypedDict as text, each with its type, its default and its meaning in `model`."""
    said, defaults = meanings(model), model().model_dump()
    lines = []
    for name, written in options.__annotations__.items():
        lines.append(f"    {name}: {getattr(written, '__forward_arg__', written)} = {defaults[name]!r}")
        lines += textwrap.wrap(said.get(name, ""), 112, initial_indent=" " * 8, subsequent_indent=" " * 8)
    return "\n".join(["Options:", "", *lines])


@functools.lru_cache(maxsize=256)
def meanings(model: type[FrozenOptions]) -> dict[str, str]:
    """The docstring below each field of a model, read from its source; empty if there is no source."""
    try:
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(model))).body
    except (OSError, TypeError):
        return {}
    assert isinstance(definition, ast.ClassDef)
    return {
        field.target.id: inspect.cleandoc(said.value.value)
        for field, said in itertools.pairwise(definition.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(said, ast.Expr) and isinstance(said.value, ast.Constant) and isinstance(said.value.value, str)
    }
