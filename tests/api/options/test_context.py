"""The parallel context: what it takes, what it refuses and says, and that it comes back as it was."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from partway.fusion import Fusion, FusionMode, FusionPolicies
from partway.options.algo import AlgoParameters
from partway.options.context import (
    auto_parallel_context,
    current,
    current_algo,
    get_algo_parameters,
    get_auto_parallel_context,
    reset_algo_parameters,
    reset_auto_parallel_context,
    set_algo_parameters,
    set_auto_parallel_context,
)
from partway.options.parallel import DatasetMode, ParallelContext, ParallelMode
from partway.strategy.errors import ContextError

KINDS = ("allreduce", "allgather", "reducescatter")
AUTO = {"mode": "auto", "config": None}
GROUPED = Fusion(FusionMode.AUTO)

DEFAULTS = {
    "parallel_mode": "stand_alone",
    "search_mode": "dynamic_programming",
    "device_num": 1,
    "dataset_strategy": "full_batch",
    "full_batch": True,
    "gradients_mean": True,
    "batch_norm_parts": 1,
    "gradient_fp32_sync": True,
    "parameter_broadcast": False,
    "all_reduce_fusion_config": None,
    "comm_fusion": {"openstate": True, **dict.fromkeys(KINDS, AUTO)},
    "strategy_ckpt_config": {"load_file": "", "save_file": "", "only_trainable_params": True},
    "enable_parallel_optimizer": False,
    "parallel_optimizer_config": {"parallel_optimizer_threshold": 64},
    "reshard_after_forward": None,
    "enable_compile_cache": True,
    "compile_cache_path": "",
    "backend": "eager",
    "whole_results": False,
    "compare_replicas": True,
    "random_numbers": "counter",
    "on_unknown_op": "warn",
    "device_profile": None,
}
ALGO_DEFAULTS = {
    "fully_use_devices": True,
    "elementwise_op_strategy_follow": False,
    "enable_algo_approxi": False,
    "algo_approxi_epsilon": 0.1,
    "tensor_slice_align_enable": False,
    "tensor_slice_align_size": 16,
    "memory_limit": None,
    "recompute": "auto",
    "optimizer_states": 2.0,
    "expert_load": None,
}


def message_of(call: Callable[..., Any], **options: object) -> str:
    with pytest.raises(ContextError) as error:
        call(**options)
    return str(error.value)


def allreduce(**config: object) -> dict[str, object]:
    return {"comm_fusion": {"allreduce": config}}


def fused(**kinds: object) -> dict[str, object]:
    return {"openstate": True, **dict.fromkeys(KINDS, AUTO), **kinds}


def test_defaults_are_these() -> None:
    assert {key: get_auto_parallel_context(key) for key in ParallelContext.model_fields} == DEFAULTS
    assert {key: get_algo_parameters(key) for key in AlgoParameters.model_fields} == ALGO_DEFAULTS
    assert current().fusion_policies == FusionPolicies(GROUPED, GROUPED, GROUPED)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[("parallel_mode", mode) for mode in ("stand_alone", "data_parallel", "semi_auto_parallel", "auto_parallel")],
        *[("search_mode", f"{mode}_programming") for mode in ("dynamic", "recursive")],
        ("search_mode", "sharding_propagation"),
        ("device_num", 16384),
        ("dataset_strategy", "full_batch"),
        ("dataset_strategy", ((1, 1, 1, 8), (1,))),
        ("full_batch", True),
        ("gradients_mean", False),
        ("batch_norm_parts", 8),
        ("parameter_broadcast", True),
        ("all_reduce_fusion_config", [20, 35]),
        ("all_reduce_fusion_config", None),
        ("comm_fusion", {"openstate": False, "allreduce": None, "allgather": None, "reducescatter": None}),
        ("comm_fusion", fused(allreduce=None)),
        ("comm_fusion", fused(allreduce=AUTO)),
        ("comm_fusion", fused(allreduce={"mode": "size", "config": 32}, allgather={"mode": "size", "config": 64})),
        ("comm_fusion", fused(allreduce={"mode": "index", "config": [20, 35]})),
        ("comm_fusion", fused(**{key: {"mode": "overlap", "config": None} for key in KINDS})),
        ("strategy_ckpt_config", {"load_file": "", "save_file": "plan.json", "only_trainable_params": False}),
        ("enable_parallel_optimizer", True),
        ("parallel_optimizer_config", {"parallel_optimizer_threshold": 0}),
        ("reshard_after_forward", True),
        ("gradient_fp32_sync", False),
        ("enable_compile_cache", False),
        ("compile_cache_path", "plans"),
        ("backend", "inductor"),
        ("whole_results", True),
        ("compare_replicas", False),
        ("compare_replicas", 100),
        ("random_numbers", "torch"),
        ("random_numbers", "rank"),
        ("on_unknown_op", "error"),
        ("device_profile", "ascend910"),
    ],
)
def test_an_option_reads_back_as_it_was_set_and_can_be_set_again(key: str, value: object) -> None:
    set_auto_parallel_context(**{key: value})
    assert get_auto_parallel_context(key) == value
    set_auto_parallel_context(**{key: get_auto_parallel_context(key)})
    assert get_auto_parallel_context(key) == value


WRONG: list[tuple[dict[str, object], str]] = [
    ({"device_nums": 8}, "device_nums is not an option; did you mean 'device_num'? (all options: parallel_mode, sea"),
    ({"xyzzy": 1}, "xyzzy is not an option (all options: parallel_mode, search_mode, device_num, dataset_strategy, fu"),
    ({"pipeline_stages": 2}, "pipeline_stages is MindSpore's and not an option here: pipeline parallelism is not avai"),
    ({"global_rank": 0}, "read the rank with partway.get_rank()"),
    ({"enable_alltoall": True}, "an all-to-all is always used where a conversion calls for one"),
    ({"loss_repeated_mean": True}, "repeated computation never scales a gradient here"),
    ({"auto_parallel_search_mode": "x"}, "use search_mode"),
    ({"strategy_ckpt_load_file": "x"}, 'use strategy_ckpt_config={"load_file": ...}'),
    ({"grad_accumulation_step": 4}, "no_sync()"),
    ({"device_num": "8"}, "device_num: got '8' (str); accepts an int from 1 to 16384"),
    ({"device_num": 8.0}, "device_num: got 8.0 (float); accepts an int from 1 to 16384"),
    ({"device_num": True}, "device_num: got True (bool); accepts an int from 1 to 16384"),
    ({"device_num": 0}, "device_num: got 0 (int); accepts an int from 1 to 16384"),
    ({"device_num": 16385}, "device_num: got 16385 (int); accepts an int from 1 to 16384"),
    ({"device_num": None}, "device_num: got None (NoneType); accepts an int from 1 to 16384"),
    (
        {"parallel_mode": "hybrid_parallel"},
        "parallel_mode: got 'hybrid_parallel' (str); accepts one of 'stand_alone', 'data_parallel', "
        "'semi_auto_parallel', 'auto_parallel'",
    ),
    (
        {"search_mode": 1},
        "search_mode: got 1 (int); accepts one of 'sharding_propagation', 'dynamic_programming', "
        "'recursive_programming'",
    ),
    ({"batch_norm_parts": 0}, "batch_norm_parts: got 0 (int); accepts an int of 1 or more"),
    ({"batch_norm_parts": 2.0}, "batch_norm_parts: got 2.0 (float); accepts an int of 1 or more"),
    ({"batch_norm_parts": True}, "batch_norm_parts: got True (bool); accepts an int of 1 or more"),
    ({"gradient_fp32_sync": 1}, "gradient_fp32_sync: got 1 (int); accepts True or False"),
    ({"enable_compile_cache": "no"}, "enable_compile_cache: got 'no' (str); accepts True or False"),
    (
        {"compile_cache_path": None},
        "compile_cache_path: got None (NoneType); accepts a folder, or '' for PARTWAY_CACHE_DIR",
    ),
    ({"whole_results": 1}, "whole_results: got 1 (int); accepts True or False"),
    (
        {"compare_replicas": 0},
        "compare_replicas: got 0 (int); accepts True, False, or an int of 1 or more",
    ),
    (
        {"compare_replicas": "yes"},
        "compare_replicas: got 'yes' (str); accepts True, False, or an int of 1 or more",
    ),
    (
        {"random_numbers": "seed"},
        "random_numbers: got 'seed' (str); accepts one of 'counter', 'torch', 'rank'",
    ),
    ({"backend": "jit"}, "backend: got 'jit' (str); accepts one of 'eager', 'inductor'"),
    ({"reshard_after_forward": 8}, "reshard_after_forward: got 8 (int); accepts None, True or False"),
    ({"on_unknown_op": "ignore"}, "on_unknown_op: got 'ignore' (str); accepts one of 'warn', 'error'"),
    ({"full_batch": 1}, "full_batch: got 1 (int); accepts True or False"),
    ({"gradients_mean": "yes"}, "gradients_mean: got 'yes' (str); accepts True or False"),
    (
        {"dataset_strategy": "half_batch"},
        "dataset_strategy: 'half_batch' is unknown; write 'data_parallel' or 'full_batch', or a tup",
    ),
    (
        {"dataset_strategy": ((1, 1, 4, 2), (1,))},
        "\n  - dataset_strategy, input 0: (1, 1, 4, 2) splits 2 dims (2, 3); ",
    ),
    ({"dataset_strategy": ((1, 1), (8,))}, "dataset_strategy, input 1: (8,) splits it 8 ways, more than input 0"),
    (
        {"dataset_strategy": [(8, 1), (1,)]},
        "dataset_strategy: [(8, 1), (1,)] is a list; write the tuple ((8, 1), (1,))",
    ),
    ({"dataset_strategy": ((8.0, 1),)}, "dataset_strategy, input 0: dim 0 has 8.0 as its split count; write an int"),
    (
        {"dataset_strategy": ((1, 8), (1,)), "parallel_mode": "data_parallel"},
        "dataset_strategy=((1, 8), (1,)) with parallel_mode='data_parallel', which splits every input along its first "
        "dim; write 'data_parallel' or 'full_batch', or set parallel_mode='semi_auto_parallel' or 'auto_parallel'",
    ),
    (
        {"full_batch": True, "parallel_mode": "stand_alone"},
        "dataset_strategy='full_batch' with parallel_mode='stand_alone', in which nothing is split; set another p",
    ),
    (
        {"full_batch": True, "dataset_strategy": ((8, 1), (8,))},
        "full_batch=True contradicts dataset_strategy=((8, 1), (8,)); full_batch=True is short for "
        "dataset_strategy='full_batch', so change one of them",
    ),
    ({"full_batch": False, "dataset_strategy": "full_batch"}, "full_batch=False contradicts dataset_strategy='full_b"),
    ({"all_reduce_fusion_config": []}, "all_reduce_fusion_config: takes at least one index, such as [20, 35], not an"),
    ({"all_reduce_fusion_config": [35, 20]}, "all_reduce_fusion_config: takes ascending indices; write [20, 35] for "),
    ({"all_reduce_fusion_config": [20, 20]}, "all_reduce_fusion_config: takes each index once; [20, 20] repeats 20"),
    ({"all_reduce_fusion_config": [0, 20]}, "all_reduce_fusion_config: takes whole numbers, 1 or more; [0, 20] has 0"),
    ({"all_reduce_fusion_config": 20}, "all_reduce_fusion_config: takes a list of indices such as [20, 35], not 20"),
    ({"all_reduce_fusion_config": [True, 3]}, "takes whole numbers, 1 or more; [True, 3] has True"),
    (
        {"comm_fusion": 64},
        "comm_fusion: got 64 (int); accepts a dict with the keys openstate, allreduce, allgather and reducescatter",
    ),
    ({"comm_fusion": None}, "comm_fusion: got None (NoneType); accepts a dict with the keys openstate, allreduce, all"),
    (
        {"comm_fusion": {"allgather": {"mode": "index", "config": [3]}}},
        'comm_fusion["allgather"]: mode index is one of allreduce only; write one of auto, size, overlap',
    ),
    ({"comm_fusion": {"reducescatter": {}}}, 'comm_fusion["reducescatter"]: takes {"mode": ..., "config": ...} with '),
    (
        {"comm_fusion": {"reducescatter": {"mode": "size", "config": -1}}},
        'comm_fusion["reducescatter"]: mode size takes a whole number of MB, 1 or more, not -1',
    ),
    (
        {"comm_fusion": {"allreduced": {}}},
        "comm_fusion[\"allreduced\"] is not an option; did you mean 'allreduce'? (all options: openstate, allreduce",
    ),
    ({"comm_fusion": {1: True}}, 'comm_fusion["1"] is not an option (all options: openstate, '),
    ({"comm_fusion": {"openstate": "on"}}, "comm_fusion[\"openstate\"]: got 'on' (str); accepts True or False"),
    ({"comm_fusion": {"allreduce": "auto"}}, 'comm_fusion["allreduce"]: takes {"mode": ..., "config": ...} with no o'),
    (allreduce(config=32), "with no other keys, or a list of indices, not {'config': 32}"),
    (allreduce(mode="big", config=None), "mode 'big' is unknown; write one of auto, size, index, overlap"),
    (allreduce(mode="auto", config=64), "mode auto takes no config (a group is at most 64 MB), not 64; mode size tak"),
    (allreduce(mode="overlap", config=64), "mode overlap takes no config (the cost model chooses the groups), not 64"),
    (allreduce(mode="size"), 'comm_fusion["allreduce"]: mode size takes a whole number of MB, 1 or more, not None'),
    (allreduce(mode="size", config=0), "mode size takes a whole number of MB, 1 or more, not 0"),
    (allreduce(mode="size", config=1.5), "mode size takes a whole number of MB, 1 or more, not 1.5"),
    (allreduce(mode="index", config=[3, 1]), "mode index takes ascending indices; write [1, 3] for [3, 1]"),
    (
        {"all_reduce_fusion_config": [20]} | allreduce(mode="size", config=32),
        'all_reduce_fusion_config and comm_fusion["allreduce"] both say how to group AllReduces; '
        "set one of them to None",
    ),
    (
        {"strategy_ckpt_config": {"load": "x"}},
        "strategy_ckpt_config[\"load\"] is not an option; did you mean 'load_file'?",
    ),
    ({"strategy_ckpt_config": {"save_file": 3}}, 'strategy_ckpt_config["save_file"]: got 3 (int); accepts a path, or'),
    (
        {"strategy_ckpt_config": {"load_file": "/nowhere/plan.json"}},
        "strategy_ckpt_config[\"load_file\"]: there is no file '/nowhere/plan.json'",
    ),
    (
        {"device_profile": 3},
        "device_profile: got 3 (int); accepts None, the name of a preset such as 'h100', or the pa",
    ),
    (
        {"device_profile": "/nowhere/profile.json"},
        "device_profile: no device profile '/nowhere/profile.json': there is no such file, and the presets are a100, ",
    ),
    (
        {"parallel_optimizer_config": {"parallel_optimizer_threshold": -1}},
        'parallel_optimizer_config["parallel_optimizer_threshold"]: got -1 (int); accepts an int of 0 or more (KB)',
    ),
    (
        {"parallel_optimizer_config": {"optimizer_level": "level1"}},
        'parallel_optimizer_config["optimizer_level"] is MindSpore\'s and not an option here: use enable_parallel_opt',
    ),
]


@pytest.mark.parametrize(("options", "says"), WRONG, ids=lambda value: str(value)[:50])
def test_a_wrong_call_says_why_and_changes_nothing(options: dict[str, object], says: str) -> None:
    set_auto_parallel_context(search_mode="sharding_propagation")
    before = current()
    for call in (set_auto_parallel_context, lambda **options: auto_parallel_context(**options).__enter__()):
        message = message_of(call, parameter_broadcast=True, **options)
        assert says in message
        assert "auto_parallel_context changed nothing:\n  - " in message
        assert current() is before


EPSILON = "accepts a number above 0 and at most 1, such as 0.1"
ALGO_WRONG: list[tuple[dict[str, object], str]] = [
    ({"fully_use_devices": 1}, "fully_use_devices: got 1 (int); accepts True or False"),
    ({"tensor_slice_align_size": 0}, "tensor_slice_align_size: got 0 (int); accepts an int from 1 to 1024"),
    ({"tensor_slice_align_size": 1025}, "tensor_slice_align_size: got 1025 (int); accepts an int from 1 to 1024"),
    ({"fully_use_device": True}, "fully_use_device is not an option; did you mean 'fully_use_devices'?"),
    ({"enable_algo_approxi": 1}, "enable_algo_approxi: got 1 (int); accepts True or False"),
    (
        {"elementwise_op_strategy_follow": "yes"},
        "elementwise_op_strategy_follow: got 'yes' (str); accepts True or False",
    ),
    *(
        ({"algo_approxi_epsilon": value}, f"algo_approxi_epsilon: got {value!r} ({type(value).__name__}); {EPSILON}")
        for value in (0, 0.0, 1.5, -0.1, float("nan"), float("inf"), "0.1", None, True)
    ),
]


@pytest.mark.parametrize(("options", "says"), ALGO_WRONG, ids=lambda value: str(value)[:50])
def test_a_wrong_algo_parameter_says_why_and_changes_nothing(options: dict[str, object], says: str) -> None:
    before = current_algo()
    message = message_of(set_algo_parameters, tensor_slice_align_enable=True, **options)
    assert message.startswith("set_algo_parameters changed nothing:\n")
    assert says in message
    assert current_algo() is before


@pytest.mark.parametrize("epsilon", [1, 1.0, 0.1, 1e-6, 5e-324])
def test_epsilon_is_any_number_above_0_up_to_1(epsilon: float) -> None:
    set_algo_parameters(enable_algo_approxi=True, algo_approxi_epsilon=epsilon)
    assert get_algo_parameters("algo_approxi_epsilon") == epsilon


def test_all_failures_of_one_call_are_in_one_error() -> None:
    message = message_of(
        set_auto_parallel_context,
        device_num="8",
        serch_mode="sharding_propagation",
        parallel_mode="stand_alone",
        full_batch=True,
        comm_fusion={"openstate": 1, "allgather": {}, "allreduce": {"mode": "size", "config": -1}},
    )
    title, *problems = message.splitlines()
    assert title == "set_auto_parallel_context changed nothing:"
    assert sorted(problem.removeprefix("  - ").split()[0] for problem in problems) == [
        'comm_fusion["allgather"]:',
        'comm_fusion["allreduce"]:',
        'comm_fusion["openstate"]:',
        "dataset_strategy='full_batch'",
        "device_num:",
        "serch_mode",
    ]


def test_a_long_value_is_cut_short_in_the_error() -> None:
    message = message_of(set_auto_parallel_context, device_num=list(range(1000)))
    assert "..." in message
    assert len(message) < 200


@pytest.mark.parametrize("get", [get_auto_parallel_context, get_algo_parameters])
def test_reading_an_unknown_option_lists_the_closest_names(get: Callable[[str], object]) -> None:
    with pytest.raises(ContextError, match=rf"^{get.__name__}:\n  - xyzzy is not an option \(all options: "):
        get("xyzzy")
    with pytest.raises(ContextError, match="did you mean 'device_num'"):
        get_auto_parallel_context("device_count")


def test_options_add_up_over_calls_and_reset_takes_all_back() -> None:
    set_auto_parallel_context(device_num=8)
    set_auto_parallel_context(search_mode="sharding_propagation")
    assert (current().device_num, current().search_mode) == (8, "sharding_propagation")
    reset_auto_parallel_context()
    assert {key: get_auto_parallel_context(key) for key in ParallelContext.model_fields} == DEFAULTS
    assert not current().device_num_was_set


def test_resetting_algo_parameters_takes_all_back() -> None:
    set_algo_parameters(fully_use_devices=False, tensor_slice_align_size=32)
    reset_algo_parameters()
    assert {key: get_algo_parameters(key) for key in AlgoParameters.model_fields} == ALGO_DEFAULTS


def test_an_option_set_to_its_default_counts_as_set() -> None:
    assert (current().mode_was_set, current().device_num_was_set) == (False, False)
    set_auto_parallel_context(parallel_mode="stand_alone", device_num=1)
    assert current().mode_was_set
    assert current().device_num_was_set


def test_a_contradiction_with_an_earlier_call_is_refused() -> None:
    set_auto_parallel_context(parallel_mode="data_parallel", all_reduce_fusion_config=[20])
    refused = message_of(set_auto_parallel_context, dataset_strategy=((8, 1),))
    assert "parallel_mode='data_parallel'" in refused
    assert "set one of them to None" in message_of(set_auto_parallel_context, **allreduce(mode="auto", config=None))
    set_auto_parallel_context(all_reduce_fusion_config=None, **allreduce(mode="size", config=2))
    assert current().fusion_policies == FusionPolicies(Fusion(FusionMode.SIZE, 2), GROUPED, GROUPED)


def test_a_dataset_strategy_can_be_taken_back_before_leaving_the_auto_modes() -> None:
    set_auto_parallel_context(parallel_mode="auto_parallel", dataset_strategy=((8, 1),))
    message_of(set_auto_parallel_context, parallel_mode="data_parallel")
    set_auto_parallel_context(parallel_mode="data_parallel", dataset_strategy="data_parallel")
    assert current().parallel_mode is ParallelMode.DATA_PARALLEL


@pytest.mark.parametrize(
    ("options", "holds"),
    [
        ({}, "full_batch"),
        ({"parallel_mode": "auto_parallel"}, "full_batch"),
        ({"parallel_mode": "semi_auto_parallel"}, "full_batch"),
        ({"parallel_mode": "data_parallel"}, "data_parallel"),
        ({"parallel_mode": "data_parallel", "dataset_strategy": "full_batch"}, "full_batch"),
        ({"parallel_mode": "data_parallel", "full_batch": True}, "full_batch"),
        ({"full_batch": False}, "data_parallel"),
        ({"dataset_strategy": ((1, 8),)}, ((1, 8),)),
    ],
)
def test_the_dataset_strategy_reads_what_each_process_is_given(options: dict[str, Any], holds: Any) -> None:
    with auto_parallel_context(**options) as context:
        assert get_auto_parallel_context("dataset_strategy") == holds
        assert get_auto_parallel_context("full_batch") is (holds == "full_batch")
        assert context.gives_parts is (holds != "full_batch")
        with auto_parallel_context(search_mode="sharding_propagation"):  # what follows was not set
            assert get_auto_parallel_context("dataset_strategy") == holds
    set_auto_parallel_context(parallel_mode="data_parallel")
    set_auto_parallel_context(parallel_mode="auto_parallel")
    assert get_auto_parallel_context("dataset_strategy") == "full_batch"


def test_full_batch_and_its_dataset_strategy_read_the_same() -> None:
    with auto_parallel_context(full_batch=True) as context:
        assert context.dataset_strategy is DatasetMode.FULL_BATCH
        set_auto_parallel_context(full_batch=False)
        assert current().dataset_strategy is DatasetMode.DATA_PARALLEL
    with auto_parallel_context(dataset_strategy="full_batch") as context:
        assert context.full_batch


def test_fusion_policies_are_what_follows_from_both_options() -> None:
    index = Fusion(FusionMode.INDEX, (20, 35))
    with auto_parallel_context(all_reduce_fusion_config=[20, 35]) as context:
        assert context.fusion_policies == FusionPolicies(index, GROUPED, GROUPED)
        set_auto_parallel_context(comm_fusion={"allreduce": None, "allgather": {"mode": "size", "config": 32}})
        assert current().fusion_policies == FusionPolicies(index, Fusion(FusionMode.SIZE, 32), GROUPED)
        set_auto_parallel_context(all_reduce_fusion_config=None)
        assert current().fusion_policies == FusionPolicies(None, Fusion(FusionMode.SIZE, 32), GROUPED)
        set_auto_parallel_context(comm_fusion={"openstate": False, "allgather": {"mode": "auto"}})
        assert current().fusion_policies == FusionPolicies()
    with auto_parallel_context(comm_fusion={key: {"mode": "overlap"} for key in KINDS}) as context:
        assert context.fusion_policies == FusionPolicies(*[Fusion(FusionMode.OVERLAP)] * 3)
    with auto_parallel_context(comm_fusion=dict.fromkeys(KINDS)) as context:
        assert context.fusion_policies == FusionPolicies()
    with auto_parallel_context(comm_fusion={"openstate": True}) as context:
        assert context.fusion_policies == ParallelContext().fusion_policies


def test_comm_fusion_reads_as_it_is_in_force() -> None:
    set_auto_parallel_context(all_reduce_fusion_config=[20, 35])
    shown = fused(allreduce={"mode": "index", "config": [20, 35]})
    assert get_auto_parallel_context("comm_fusion") == shown
    assert f"comm_fusion                default  {shown}\n" in current().describe()
    set_auto_parallel_context(comm_fusion=get_auto_parallel_context("comm_fusion"))  # says the same twice
    assert get_auto_parallel_context("comm_fusion") == shown
    assert "set one of them to None" in message_of(set_auto_parallel_context, all_reduce_fusion_config=[20])
    set_auto_parallel_context(comm_fusion={"allgather": None}, all_reduce_fusion_config=None)
    assert get_auto_parallel_context("comm_fusion") == fused(allgather=None)


def test_an_existing_strategy_file_is_taken_and_looked_for_only_once(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text("{}")
    set_auto_parallel_context(strategy_ckpt_config={"load_file": str(file)})
    file.unlink()
    set_auto_parallel_context(device_num=8)
    assert get_auto_parallel_context("strategy_ckpt_config")["load_file"] == str(file)


def test_nested_contexts_each_restore_what_was_before() -> None:
    set_auto_parallel_context(device_num=2)
    outermost = current()
    with auto_parallel_context(device_num=4, full_batch=True):
        outer = current()
        with auto_parallel_context(device_num=8):
            set_auto_parallel_context(parameter_broadcast=True)
            assert (current().device_num, current().full_batch) == (8, True)
        assert current() is outer
    assert current() is outermost


def test_a_context_is_restored_after_an_exception() -> None:
    before = current()
    with pytest.raises(ZeroDivisionError), auto_parallel_context(device_num=8):
        raise ZeroDivisionError
    assert current() is before


def test_a_refused_inner_context_leaves_the_outer_one_in_force() -> None:
    with auto_parallel_context(device_num=8) as outer:
        with pytest.raises(ContextError), auto_parallel_context(device_num=0):
            pass
        assert current() is outer


def test_a_context_decorates_a_function() -> None:
    @auto_parallel_context(device_num=8)
    def devices() -> int:
        return current().device_num

    assert (devices(), devices(), current().device_num) == (8, 8, 1)


def test_an_option_holds_in_a_thread_started_later() -> None:
    seen: list[int] = []
    set_auto_parallel_context(device_num=8)
    thread = threading.Thread(target=lambda: seen.append(current().device_num))
    thread.start()
    thread.join()
    assert seen == [8]


def test_calls_from_many_threads_lose_no_option() -> None:
    keys = ["full_batch", "parameter_broadcast", "enable_parallel_optimizer"]
    for _ in range(50):
        reset_auto_parallel_context()
        threads = [threading.Thread(target=set_auto_parallel_context, kwargs={key: True}) for key in keys]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(get_auto_parallel_context(key) for key in keys)


def test_the_context_prints_as_a_table_that_tells_set_from_default() -> None:
    set_algo_parameters(fully_use_devices=False)
    assert str(current_algo()) == (
        "fully_use_devices               set      False\n"
        "elementwise_op_strategy_follow  default  False\n"
        "enable_algo_approxi             default  False\n"
        "algo_approxi_epsilon            default  0.1\n"
        "tensor_slice_align_enable       default  False\n"
        "tensor_slice_align_size         default  16\n"
        "memory_limit                    default  None\n"
        "recompute                       default  'auto'\n"
        "optimizer_states                default  2.0\n"
        "expert_load                     default  None"
    )
    with auto_parallel_context(comm_fusion={"allreduce": {"mode": "size", "config": 32}, "allgather": None}):
        assert (
            "set      {'openstate': True, 'allreduce': {'mode': 'size', 'config': 32}, 'allgather': None, "
            "'reducescatter': {'mode': 'auto', 'config': None}}\n" in current().describe()
        )


@pytest.mark.parametrize("options", [ParallelContext, AlgoParameters])
def test_every_option_says_what_it_accepts(options: type[ParallelContext] | type[AlgoParameters]) -> None:
    for key in options.model_fields:
        with pytest.raises(ContextError, match=rf"{key}: .*\b(accepts|write|takes) "):
            (set_auto_parallel_context if options is ParallelContext else set_algo_parameters)(**{key: 3 + 4j})


def test_the_context_is_frozen_and_can_be_a_cache_key() -> None:
    key = "device_num"
    with pytest.raises(ValueError, match="frozen"):
        setattr(current(), key, 8)
    set_auto_parallel_context(device_num=8, **allreduce(mode="index", config=[20, 35]))
    assert hash(current()) == hash(current().model_copy())
