"""What type checkers see of the public functions: `make check` runs mypy on this file. An error that is ignored has to
be one. Nothing here runs.
"""

from typing import assert_type

import torch
from torch import Tensor, nn

import partway as pw


class Net(nn.Module):
    """A module with a method of its own."""

    def depth(self) -> int:
        """A number."""
        return 1


def scaled(x: Tensor, by: float) -> Tensor:
    """A function of two arguments."""
    return x * by


model = pw.shard(Net(), in_strategy=((2, 1),), mesh={"dp": 2})
assert_type(model, Net)
assert_type(model.depth(), int)
assert_type(pw.shard(in_strategy=((2, 1),))(Net()), Net)

sharded = pw.shard(scaled, (("dp", None), None))
assert_type(sharded(torch.ones(2), by=2.0), Tensor)
assert_type(sharded.plan, pw.Plan)
sharded(torch.ones(2), "2")  # type: ignore[arg-type]


@pw.shard(in_strategy=(("dp", None),), mesh={"dp": 2})
def doubled(x: Tensor) -> Tensor:
    """A decorated function."""
    return 2 * x


assert_type(doubled(torch.ones(2)), Tensor)
doubled(torch.ones(2), 3)  # type: ignore[call-arg]
pw.shard(scaled, in_stategy=((2, 1),))  # type: ignore[call-overload]

pw.set_auto_parallel_context(device_num=8, search_mode="sharding_propagation")
pw.set_auto_parallel_context(device_nmu=8)  # type: ignore[call-arg]
pw.set_auto_parallel_context(device_num="8")  # type: ignore[arg-type]
pw.set_auto_parallel_context(search_mode="fastest")  # type: ignore[arg-type]
with pw.auto_parallel_context(gradients_mean=False, comm_fusion={"allreduce": {"mode": "size", "config": 32}}):
    pw.set_algo_parameters(fully_use_devices=False, memory_limit=80e9)
pw.set_algo_parameters(fully_use_device=False)  # type: ignore[call-arg]
_ = pw.shrad  # type: ignore[attr-defined]
