"""The options of the strategy search."""

from __future__ import annotations

from pydantic import Field

from partway.options.base import FrozenOptions
from partway.propagation.problem.problem import Recompute


class AlgoParameters(FrozenOptions):
    """Options of the strategy search. `current_algo()` is the one in force."""

    fully_use_devices: bool = True
    """Matrix products, convolutions and attention are spread over all devices wherever they can be; lighter operators
    are split where that is cheapest. False: the objective alone decides, and small work may be repeated. The reference
    changed it to False in 2.7, and then leaves half the machine repeating work. Set explicitly to True, a strategy of
    split counts that uses some devices but not all is an error."""

    elementwise_op_strategy_follow: bool = False
    """True: an elementwise operator takes the strategy of what consumes it, so that no conversion follows it. Where
    several operators consume its result the one layout may be converted for each of them. False: the objective
    decides, which is never worse."""

    enable_algo_approxi: bool = False
    """True: of every operator only the strategies that cost least by themselves are looked at, as many as
    `algo_approxi_epsilon` says. What is annotated keeps all that its annotation allows, and elementwise operators that
    follow what consumes them keep theirs. The plan's certificate says that strategies were left out. False: the search
    is exact, and seldom takes long."""

    algo_approxi_epsilon: float = Field(
        default=0.1, gt=0, le=1, allow_inf_nan=False, description="a number above 0 and at most 1, such as 0.1"
    )
    """With `enable_algo_approxi`, 1/epsilon strategies of an operator are looked at, rounded up: 0.1 keeps 10."""

    tensor_slice_align_enable: bool = False
    """The last dim of a matmul's slices must be a multiple of `tensor_slice_align_size`."""

    tensor_slice_align_size: int = Field(default=16, ge=1, le=1024, description="an int from 1 to 1024")
    """Of how many elements, with `tensor_slice_align_enable`."""

    memory_limit: float | None = Field(
        default=None, gt=0, description="None, float('inf') or a number of bytes above 0, such as 80e9"
    )
    """The most bytes that a device may hold at a time: parameters, gradients, optimizer states, what is kept for the
    backward and what operators work with. The cheapest plan found that keeps to it is taken, and its certificate says
    how far off it may be; where there is none it is an error that says what limit, how many devices or what batch would
    do, each found by planning again. None: what the device has, less 6 % for what the driver, communication and the
    allocator take. It has what its profile says; under a launcher, unless `device_profile` is set, what CUDA has free
    for the process, or the host's memory for each process on it, of the rank with the least. float("inf"): any number.
    The reference's device_memory_capacity."""

    recompute: Recompute = Field(default=Recompute.AUTO, strict=False)
    """What the backward computes again in place of keeping it. "auto": what is free to have again (views, casts,
    elementwise operators), and where the memory limit leaves no room whatever costs least. "none": nothing. "all":
    everything but what stands between blocks. Calls of torch.utils.checkpoint stay as a person wrote them."""

    optimizer_states: float = Field(
        default=2.0, ge=0, allow_inf_nan=False, description="a number of 0 or more, such as 2 for Adam"
    )
    """How many copies of each parameter that is trained the optimizer keeps: 0 for SGD, 1 with momentum, 2 for Adam."""
