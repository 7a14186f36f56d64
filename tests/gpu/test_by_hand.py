"""On CUDA: collectives that are called by hand, in manual functions and in processes, give what their formulas say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from collectives import CASES, expected, program, values

import partway as pw
from partway.strategy import Mesh

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

EXACT = {"rtol": 1e-12, "atol": 1e-12}


@pytest.mark.parametrize("sizes", [{"a": 3}, {"dp": 2, "tp": 4}])
def test_manuals_on_cuda_compute_the_formulas(sizes: dict[str, int]) -> None:
    mesh, group = Mesh(sizes), list(sizes)[-1]
    split = ((mesh.axes, None, None),)
    for name, case in CASES.items():
        x = values(mesh).cuda().requires_grad_()
        own = program(case, group)
        y = pw.manual(lambda x, own=own: own(x[0])[None], split, split, mesh=mesh)(x)
        wanted = expected(case, x, mesh, group)
        weights = torch.rand_like(wanted)
        (found,), (right,) = (torch.autograd.grad((z * weights).sum(), x) for z in (y, wanted))
        assert y.is_cuda
        torch.testing.assert_close(y, wanted, **EXACT, msg=lambda text, name=name: f"{name}: {text}")
        torch.testing.assert_close(found, right, **EXACT, msg=lambda text, name=name: f"gradient of {name}: {text}")


def every_case() -> None:
    mesh = Mesh({"a": 2})
    pw.set_mesh(mesh)
    for name, case in CASES.items():
        whole, rank = values(mesh).cuda().requires_grad_(), pw.get_rank()
        wanted = expected(case, whole, mesh, "a")
        x = whole.detach()[rank].clone().requires_grad_()
        y = program(case, "a")(x)
        (right,) = torch.autograd.grad(wanted.sum(), whole)
        (found,) = torch.autograd.grad(y.sum(), x)
        assert y.is_cuda
        torch.testing.assert_close(y, wanted[rank], **EXACT, msg=lambda text, name=name: f"{name}: {text}")
        torch.testing.assert_close(found, right[rank], **EXACT, msg=lambda text, name=name: f"gradient: {name}: {text}")
    pw.set_mesh(None)


@pytest.mark.gloo
def test_gloo_processes_on_a_cuda_device_compute_the_formulas(on_ranks: Callable[..., list[Any]]) -> None:
    on_ranks(2, every_case)


def test_the_checker_takes_tensors_of_cuda() -> None:
    def mean(x: torch.Tensor) -> torch.Tensor:
        return pw.ops.all_reduce(x.mean(), "mean", group="dp")

    assert pw.check_manual(mean, (("dp",),), args=(torch.randn(8, device="cuda"),), mesh={"dp": 4}, whole=torch.mean)
