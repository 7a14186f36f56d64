"""Layouts of tensors on a device mesh, and the notations that users write for them.

The input is a strategy in any of three notations, with a mesh and a shape. The output is an `Annotation`, which gives
the allowed `Layout`s, or one StrategyError that lists every problem. All values are frozen and checked once.

    mesh, placement, layout   the device mesh, the state of a tensor on one axis, and its state on all axes
    cut                       how ranks cut one dim: slices that may be short, windows that reach into other slices
    notation                  reads and writes the three notations; meshes on which strategies can be written
    validate                  finds every problem of a strategy
    errors                    the tree of exceptions, and `Problem`
    transfer                  a tensor on the way from one mesh to another
    basics/                   helpers of all stages, independent of sharding
    torch_mesh                our mesh as torch's DeviceMesh, and process groups

Two names are not re-exported: the factory `layout.layout`, which would hide its module, and `torch_mesh`, which
imports torch.distributed, which planning does not need.
"""

from typing import TYPE_CHECKING

from .basics.first_use import at_first_use
from .cut import Span
from .errors import (
    CaptureError,
    ContextError,
    DataError,
    ExpertLoadWarning,
    LossError,
    OperatorError,
    PartwayError,
    Problem,
    RuntimeStateError,
    StrategyError,
    UnknownOperatorWarning,
    UntestedTorchWarning,
    VerifyError,
    WholeReadWarning,
    raise_problems,
    shown,
)
from .layout import Layout
from .mesh import Mesh
from .notation import (
    Annotation,
    Form,
    coarsest_mesh,
    counted,
    form_of,
    from_dtensor,
    meshes_of,
    to_dtensor,
    to_ints,
    to_names,
    to_placements,
)
from .placement import (
    BROADCAST,
    PARTIAL,
    PARTIAL_MAX,
    REPLICATE,
    Broadcast,
    Kind,
    Partial,
    Placement,
    Replicate,
    Shard,
    dual,
    kind,
    placement_from_code,
    transpose,
)
from .validate import (
    check_dataset_form,
    check_dataset_strategy,
    check_strategies,
    form_problems,
    is_one_strategy,
    parse,
)

if TYPE_CHECKING:
    from .place import Place, placed
    from .transfer import common_part, within
else:
    __getattr__ = at_first_use(
        __name__,
        {
            "place": "Place placed",
            "transfer": "common_part within",
        },
    )

__all__ = [
    "BROADCAST",
    "PARTIAL",
    "PARTIAL_MAX",
    "REPLICATE",
    "Annotation",
    "Broadcast",
    "CaptureError",
    "ContextError",
    "DataError",
    "ExpertLoadWarning",
    "Form",
    "Kind",
    "Layout",
    "LossError",
    "Mesh",
    "OperatorError",
    "Partial",
    "PartwayError",
    "Place",
    "Placement",
    "Problem",
    "Replicate",
    "RuntimeStateError",
    "Shard",
    "Span",
    "StrategyError",
    "UnknownOperatorWarning",
    "UntestedTorchWarning",
    "VerifyError",
    "WholeReadWarning",
    "check_dataset_form",
    "check_dataset_strategy",
    "check_strategies",
    "coarsest_mesh",
    "common_part",
    "counted",
    "dual",
    "form_of",
    "form_problems",
    "from_dtensor",
    "is_one_strategy",
    "kind",
    "meshes_of",
    "parse",
    "placed",
    "placement_from_code",
    "raise_problems",
    "shown",
    "to_dtensor",
    "to_ints",
    "to_names",
    "to_placements",
    "transpose",
    "within",
]
