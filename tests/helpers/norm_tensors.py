"""Tensors for the tests of norms: data far from zero, weight and bias, and layouts of images."""

import torch

from partway.strategy import Layout, Replicate, Shard

EPS = 1e-5


def drawn(*shape, mean=0.0, dtype=torch.float64):
    """Normal numbers about `mean`, the same for each number of dims."""
    generator = torch.Generator().manual_seed(len(shape))
    return (torch.randn(shape, generator=generator, dtype=torch.float64) + mean).to(dtype)


def vectors(size, dtype=torch.float64):
    """A weight and a bias of `size` channels."""
    return tuple(torch.linspace(low, 2, size, dtype=dtype).requires_grad_() for low in (0.5, -1))


def placed(mesh, splits):
    """The layout that splits the dims `splits[axis]`."""
    return Layout(mesh, tuple(Shard(splits[axis]) if axis in splits else Replicate() for axis in mesh.axes))
