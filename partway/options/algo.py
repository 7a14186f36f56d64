"""The options of the strategy search."""

from __future__ import annotations

from pydantic import Field

from partway.options.base import FrozenOptions
from partway.propagation.problem.problem import Recompute


class AlgoParameters(FrozenOptions):
    """Options of the strategy search. `current_algo()` is the one in force."""

    fully_use_devices: bool = True
    """True: matrix products, convolutions and attention use all devices wherever possible; lighter operators are split
    where that is cheapest. False: the objective alone decides, and devices may repeat small work. MindSpore changed the
    default to False in 2.7. If True was set explicitly, a strategy of split counts that uses only some devices is an
    error."""

    elementwise_op_strategy_follow: bool = False
    """True: an elementwise operator takes the strategy of its consumer, so that no conversion follows it. If it has
    several consumers, its result may be converted for each. False: the objective decides, which is never worse."""

    enable_algo_approxi: bool = False
    """True: the search considers only the strategies of each operator that cost least by themselves, as many as
    `algo_approxi_epsilon` allows. Annotated operators keep every strategy that the annotation allows, and elementwise
    operators that follow their consumer keep its strategy. The certificate of the plan says that strategies were left
    out. False: the search is exact, and rarely takes long."""

    algo_approxi_epsilon: float = Field(
        default=0.1, gt=0, le=1, allow_inf_nan=False, description="a number above 0 and at most 1, such as 0.1"
    )
    """With `enable_algo_approxi`, the search considers 1/epsilon strategies per operator, rounded up: 0.1 keeps 10."""

    tensor_slice_align_enable: bool = False
    """The last dim of a matmul's slices must be a multiple of `tensor_slice_align_size`."""

    tensor_slice_align_size: int = Field(default=16, ge=1, le=1024, description="an int from 1 to 1024")
    """The number of elements for `tensor_slice_align_enable`."""

    memory_limit: float | None = Field(
        default=None, gt=0, description="None, float('inf') or a number of bytes above 0, such as 80e9"
    )
    """The most bytes that a device may hold at a time: parameters, gradients, optimizer states, saved tensors and
    workspaces. The search takes the cheapest plan that it finds within the limit, and the certificate bounds the gap to
    the best one. If no plan fits, the error names a limit, a number of devices and a batch that do, each found by
    planning again. None: the memory of the device less 6 % for the driver, communication and the allocator. The profile
    gives the memory of a device; under a launcher without `device_profile` it is CUDA's free memory of the process, or
    the process's share of the host's memory, on the rank that has least. float("inf"): no limit. MindSpore:
    device_memory_capacity."""

    recompute: Recompute = Field(default=Recompute.AUTO, strict=False)
    """The tensors that the backward recomputes instead of saving. "auto": those that cost nothing (views, casts,
    elementwise operators) and, where the memory limit leaves no room, those that cost least. "none": none. "all": all
    but the tensors between blocks. Calls of torch.utils.checkpoint are kept as written."""

    optimizer_states: float = Field(
        default=2.0, ge=0, allow_inf_nan=False, description="a number of 0 or more, such as 2 for Adam"
    )
    """The number of optimizer states per trained parameter: 0 for SGD, 1 with momentum, 2 for Adam."""

    expert_load: float | None = Field(
        default=None, ge=1, allow_inf_nan=False, description="None or a number of 1 or more, such as 1.5"
    )
    """The rows that the busiest device gets for its experts in a step, over the mean of all devices: 1 if all get as
    many. Time, communication and memory of mixtures of experts are planned for it. If a device gets more, a warning
    names the expert and the devices, and the step goes on with more memory than planned. `pw.record_expert_load`
    measures it. None: 1, without a warning."""
