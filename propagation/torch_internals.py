"""The only file of this stage that imports private modules of PyTorch.

Each name, and why:

    torch._subclasses.FakeTensorMode   shapes without data; torch.export hands out fake tensors, and no public
                                       name makes more of them in the same mode
    torch._ops.OpOverload              the type of torch.ops.aten.add.Tensor; torch.ops does not export it
    torch.utils._pytree                the flattening that torch.export itself uses (torch.utils.pytree is not
                                       in 2.11)
    torch.fx.experimental.proxy_tensor make_fx; public use is documented, the module is not
"""

from __future__ import annotations

from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "OpOverload",
    "TreeSpec",
    "make_fx",
    "tree_flatten",
    "tree_map",
    "tree_unflatten",
]
