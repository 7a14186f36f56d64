"""PyTorch's samples of its modules (`module_db`), each split along a dim of its first argument, and compared with one
device."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from fuzz import unlike
from operators import fresh
from torch import Tensor, nn

import partway as pw
from partway.propagation.graph.structure import flatten
from partway.strategy.errors import PartwayError

QUICK = ("nn.GroupNorm", "nn.MaxPool2d", "nn.MultiLabelMarginLoss")
MOST = 3  # samples of a module in each mode
_LAZY = "LazyConv1d", "LazyConv2d", "LazyConv3d", "LazyConvTranspose1d", "LazyConvTranspose2d", "LazyConvTranspose3d"
# Texts of the errors for refused modules.
REFUSED = {f"nn.{name}": "has parameters without a shape yet; call it once before shard" for name in _LAZY}


def infos() -> dict[str, Any]:
    from torch.testing._internal.common_modules import module_db  # imports SciPy, which takes seconds

    return {info.name: info for info in module_db if torch.float64 in info.dtypes}


def names() -> list[str]:
    """The names of all modules of torch.nn with samples, without the import that lists them."""
    return sorted(infos())


def evenly(samples: list[Any]) -> list[Any]:
    """At most this many of them, evenly spaced."""
    return samples[:: max(1, -(-len(samples) // MOST))]


def run(module: nn.Module, sample: Any) -> dict[str, Tensor | None]:
    """Outputs, gradients and buffers of one call."""
    tensors, structure = flatten((sample.args, sample.kwargs))
    tensors = [fresh(t) for t in tensors]
    args, kwargs = structure.build(list(tensors))
    leaves = [t for t in tensors if t.requires_grad]
    torch.manual_seed(0)
    outputs = [t for t in flatten(module(*args, **kwargs))[0] if isinstance(t, Tensor)]
    able = [o for o in outputs if o.requires_grad]
    able = [o for o in able if not o.shape] or able
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o.dtype) for o in able]
    if able:
        torch.autograd.backward(able, weights)
    found: dict[str, Tensor | None] = {f"output {i}": o.detach() for i, o in enumerate(outputs)}
    found |= {f"gradient of argument {i}": t.grad for i, t in enumerate(leaves)}
    found |= {f"gradient of {n}": p.grad for n, p in module.named_parameters()}
    return found | {f"buffer {n}": b.detach() for n, b in module.named_buffers()}


def splits(sample: Any) -> list[tuple[Any, ...]]:
    """`in_strategy` for each dim of the first argument that two ranks divide evenly; none if there is no such dim."""
    first = sample.args[0] if sample.args else None
    if not isinstance(first, Tensor):
        return [()]
    dims = [d for d, n in enumerate(first.shape) if n % 2 == 0 and n]
    return [(tuple("x" if d == dim else None for d in range(first.ndim)),) for dim in dims] or [()]


def examine(info: Any) -> tuple[list[str], list[str], int]:
    """The wrong results, the refusals, and the number of splits tried."""
    wrong, refused, tried = [], [], 0
    for training in (True, False):
        made = info.module_inputs_func(info, device="cpu", dtype=torch.float64, requires_grad=True, training=training)
        for given in evenly(list(made)):
            torch.manual_seed(3)
            args, kwargs = given.constructor_input.args, given.constructor_input.kwargs
            module = info.module_cls(*args, **kwargs).double().train(training)
            sample = given.forward_input
            if sample is None:
                continue
            expected = run(copy.deepcopy(module), sample)
            for strategy in splits(sample):
                tried += 1
                where = f"training={training}, {args}, {kwargs}, {strategy}"
                try:
                    found = run(pw.shard(copy.deepcopy(module), strategy, mesh={"x": 2}), sample)
                except PartwayError as error:
                    refused.append(str(error))
                except Exception as error:
                    wrong.append(f"{where}: {type(error).__name__}: {error}")
                else:
                    wrong += [f"{where}: {off}"] if (off := unlike(found, expected, 1e-9)) else []
    return wrong, refused, tried


def check(name: str) -> None:
    with warnings.catch_warnings(), pw.auto_parallel_context(random_numbers="torch"):
        warnings.simplefilter("ignore")
        wrong, refused, tried = examine(infos()[name])
    assert not wrong, wrong[:3]
    assert tried or name in REFUSED
    assert all(REFUSED.get(name, "nothing is refused") in error for error in refused), refused[:2]


@pytest.mark.parametrize("name", QUICK)
def test_a_module_is_right_however_its_argument_is_split(name: str) -> None:
    check(name)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_module_is_right_or_refused() -> None:
    failed = {}
    for name in names():
        try:
            check(name)
        except AssertionError as error:
            failed[name] = str(error).splitlines()[0][:500]
    assert not failed
