"""Split tensors on gloo processes: autograd, writes, views, and what is sent. (What people do with them is in
tests/ecosystem/test_around.py, each of PyTorch's operators in tests/conformance/eager.py.)"""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate

import partway as pw
from partway.runtime import device_mesh
from partway.runtime.tensors.parameters import as_dtensor, gradient_of, shard_tensor
from partway.runtime.tensors.split_operators import run
from partway.runtime.tensors.split_tensor import SplitTensor, SplitView, as_split, placed_like
from partway.runtime.torch_internals import local_part_of, spec_of
from partway.strategy import REPLICATE, Layout, Mesh, RuntimeStateError, Shard

pytestmark = pytest.mark.gloo


def values():
    return torch.arange(35.0, dtype=torch.float64).reshape(7, 5) / 7


def layouts(ranks):
    """Even and uneven ones, along one axis and along two."""
    mesh = Mesh({"x": ranks}) if ranks == 2 else Mesh({"x": 2, "y": 2})
    rest = (REPLICATE,) * (len(mesh.axes) - 1)
    found = [Layout(mesh, (Shard(dim), *rest)) for dim in (0, 1)] + [Layout(mesh, (REPLICATE, *rest))]
    return found if ranks == 2 else [*found, Layout(mesh, (Shard(0), Shard(1))), Layout(mesh, (REPLICATE, Shard(0)))]


def split(layout, parameter=False):
    tensor = shard_tensor(values(), layout)
    return nn.Parameter(tensor) if parameter else tensor


def every_layout(check):
    for layout in layouts(dist.get_world_size()):
        check(layout)


def is_a_dtensor(layout):
    p = split(layout, parameter=True)
    assert type(p) is SplitTensor
    assert isinstance(p, DTensor)
    assert isinstance(p, nn.Parameter)
    assert torch.equal(p.full_tensor(), values())
    assert type(p.redistribute(placements=[Replicate()] * len(p.placements))) is SplitTensor
    assert torch.equal(pickle.loads(pickle.dumps(p)), values())
    assert type(copy.deepcopy(p)) is SplitTensor


def writes_in_place_count_as_versions(layout):
    p = split(layout)
    before = p._version
    p.mul_(2)
    assert p._version == before + 1
    torch._foreach_add_([p, split(layout)], 1.0)
    assert p._version > before + 1
    assert torch.equal(p.full_tensor(), values() * 2 + 1)


def views_share_values(layout):
    p = split(layout)
    view, row, parts = p.t(), p[2], p.split(2, dim=1)
    if layout.cuts:
        assert {type(view), type(row), *map(type, parts)} == {SplitView}
    view[1].fill_(5.0)
    row.mul_(2)
    parts[2].neg_()
    view.detach()[0, 6] = 9.0
    expected = values()
    expected.t()[1].fill_(5.0)
    expected[2].mul_(2)
    expected[:, 4:].neg_()
    expected[6, 0] = 9.0
    assert torch.equal(p.full_tensor(), expected)
    p.zero_()
    assert not view.any()
    assert view.shape == (5, 7)
    if layout.cuts:
        with pytest.raises(
            RuntimeStateError, match=r"a view of shape \[5, 7\] .* takes no data of its own; write to it"
        ):
            view.data = values()


def gradients_are_split_again(layout):
    p, plain = split(layout, parameter=True), values().requires_grad_()
    for one in (p, plain):
        loss = (one.t() @ one).square().sum() + (one * 2 + torch.ones(5)).tanh().sum()
        (first,) = torch.autograd.grad(loss, one, create_graph=True)
        (loss + first.square().sum()).backward()
    assert type(p.grad) is SplitTensor
    assert p.grad.placements == p.placements
    torch.testing.assert_close(p.grad.full_tensor(), plain.grad)
    generator = torch.Generator(torch.get_default_device()).manual_seed(0)
    weight = torch.randn(7, 5, dtype=torch.float64, generator=generator).requires_grad_()
    (p.detach() * weight).sum().backward()
    assert type(weight.grad) is torch.Tensor
    assert torch.equal(weight.grad, values())


def parts_and_their_gradients(layout):
    p = split(layout, parameter=True)
    part = p.to_local()
    (part * 3).sum().backward()
    assert torch.equal(p.grad.full_tensor(), torch.full((7, 5), 3.0, dtype=torch.float64))


def gradients_have_the_strides_of_their_parameters(layout):
    p = split(layout, parameter=True)
    held = local_part_of(p)
    wide = torch.ones(held.shape[0] + 1, held.shape[1] + 3, dtype=torch.float64)  # a short slice of a padded one
    assert local_part_of(gradient_of(p, wide)).stride() == held.stride()
    assert local_part_of(gradient_of(p, held.t().contiguous().t())).stride() == held.stride()
    p.grad = values().t().contiguous().t()
    assert local_part_of(p.grad).stride() == held.stride()
    p.data = values().t().contiguous().t()
    assert local_part_of(p).is_contiguous()
    assert local_part_of(placed_like(values().t().contiguous().t(), p)).is_contiguous()


def data_may_have_another_shape_and_dtype(layout):
    p = split(layout, parameter=True)
    p.data = torch.ones(6, 5)
    assert (p.shape, p.dtype) == ((6, 5), torch.float32)
    assert spec_of(p).tensor_meta.dtype is torch.float32
    assert torch.equal(p.full_tensor(), torch.ones(6, 5))
    with pytest.raises(TypeError, match="the data of a tensor is a tensor, not a int"):
        p.data = 3


def in_place_where_gradients_are_recorded_is_an_error(layout):
    p = split(layout, parameter=True)
    leaf = (
        r"a leaf Variable that requires grad is being used in an in-place operation, add_; write .* under torch.no_grad"
    )
    with pytest.raises(RuntimeError, match=leaf):
        p.add_(1)
    with pytest.raises(RuntimeError, match=r"in-?place"):
        p[0].zero_()
    buffer = split(layout)
    with pytest.raises(
        RuntimeStateError, match=r"shape \[7, 5\] that lies split was written in place by mul_ where grad"
    ):
        buffer.mul_(torch.ones(5, dtype=torch.float64, requires_grad=True))
    assert torch.equal(p.full_tensor(), values())


def arrays_cannot_be_written(layout):
    array = split(layout).cpu().numpy()
    assert array.sum() == pytest.approx(values().sum().item())
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1


def fused_operators_of_one_tensor(layout):
    """Named as the steps of optimizers are, which take lists; a CPU comes by it only through other operators."""
    with torch.no_grad():
        found = run(torch.ops.aten._fused_rms_norm.default, (split(layout), [5], None, 1e-5), {})[0]
    torch.testing.assert_close(found, nn.functional.rms_norm(values(), [5], eps=1e-5))


def memory_is_refused(layout):
    for ask in (SplitTensor.storage, SplitTensor.share_memory_):
        with pytest.raises(
            RuntimeStateError, match=r"shape \[7, 5\] lies split over the ranks, and no memory holds all"
        ):
            ask(split(layout))


CHECKS = [
    is_a_dtensor, writes_in_place_count_as_versions, views_share_values, gradients_are_split_again,
    parts_and_their_gradients, gradients_have_the_strides_of_their_parameters, data_may_have_another_shape_and_dtype,
    in_place_where_gradients_are_recorded_is_an_error, arrays_cannot_be_written, fused_operators_of_one_tensor,
    memory_is_refused,
]  # fmt: skip


def run_check(name):
    every_layout(next(check for check in CHECKS if check.__name__ == name))


@pytest.mark.parametrize("name", [check.__name__ for check in CHECKS])
@pytest.mark.parametrize("ranks", [2, 4])
def test_on_every_layout(name, ranks, on_ranks):
    on_ranks(ranks, run_check, name)


WRITES = {
    "in place": lambda y: y.mul_(2),
    "detached": lambda y: y.detach().mul_(2),
    "data": lambda y: y.data.mul_(2),
    "a view": lambda y: y.view(-1).mul_(2),
    "a list": lambda y: torch._foreach_mul_([y], 2.0),
    "items": lambda y: y.__setitem__(slice(None), 2.0),
    "rows of data": lambda y: [row.mul_(2) for row in y.data],
}


def kept_wholes():
    layout = Layout(Mesh({"x": 2}), (Shard(0),))
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        for how, write in WRITES.items():
            with mode():
                result = as_dtensor(torch.ones(2, 3), layout, (4, 3), device_mesh(layout.mesh))
                assert result.full_tensor().sum() == 12
                write(result)
                assert result.full_tensor().sum() == 24, (mode, how)


def test_the_whole_of_a_result_that_was_gathered_is_dropped_where_it_is_written_to(on_ranks):
    on_ranks(2, kept_wholes)


def partial_values():
    mesh = device_mesh(Mesh({"x": 2}))
    rank = dist.get_rank()
    tensor = as_split(DTensor.from_local(values() * (rank + 1) / 3, mesh, [Partial()]))
    torch.testing.assert_close(tensor.norm(), values().norm())
    torch.testing.assert_close(float(tensor.sum()), float(values().sum()))
    tensor.mul_(2)
    torch.testing.assert_close(tensor.full_tensor(), values() * 2)
    largest = as_split(DTensor.from_local(values() - rank, mesh, [Partial("max")]))
    torch.testing.assert_close(largest.full_tensor(), values())


def test_a_partial_value_is_never_read_as_a_share(on_ranks):
    on_ranks(2, partial_values)


def counted():
    """What a norm, a clip and an optimizer's step send: one exchange of numbers, and no whole."""
    from partway.runtime.tensors import gather as gathering

    sent = []
    original = gathering._gathered
    gathering._gathered = lambda part, *rest: sent.append(part.numel()) or original(part, *rest)
    try:
        layout = Layout(Mesh({"x": 2}), (Shard(0),))
        ps = [split(layout, parameter=True) for _ in range(3)]
        for p in ps:
            p.grad = torch.ones(7, 5, dtype=torch.float64)
        optimizers = [torch.optim.AdamW(ps, foreach=True), torch.optim.SGD(ps, lr=0.1, momentum=0.9)]
        nn.utils.clip_grad_norm_(ps, 1.0)
        assert sent == [1, 3]  # what for, and a number for each
        sent.clear()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.step()
        assert sent == []
    finally:
        gathering._gathered = original


def test_steps_and_clips_send_no_tensor(on_ranks):
    on_ranks(2, counted)


def overflows():
    """The scale after a step in which a gradient is infinite on rank 1 alone."""
    torch.manual_seed(0)
    model = pw.shard(nn.Linear(8, 4), mesh={"tp": 2}, parameter_plan={"weight": ("tp", None), "bias": ("tp",)})
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", 4.0)
    scaler.scale(model(torch.ones(2, 8)).sum()).backward()
    before = model.weight.full_tensor()
    if dist.get_rank():
        model.weight.grad.to_local()[0, 0] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale(), torch.equal(model.weight.full_tensor(), before)


def test_a_gradient_that_overflows_on_one_rank_skips_the_step_on_all(on_ranks):
    assert on_ranks(2, overflows) == [(2.0, True)] * 2
