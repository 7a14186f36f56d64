"""Tensors of a call that the function writes to are afterwards what they are on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from checks import whole
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard as Split
from torch.distributed.tensor import distribute_tensor

import partway as pw
from partway.strategy import CaptureError, RuntimeStateError

MESH = {"dp": 2, "tp": 2}
EXACT = 1e-12
Ranks = Callable[..., list[Any]]


def counts(x: Tensor, w: Tensor, seen: Tensor) -> Tensor:
    """`seen` is read before and after it is written to."""
    y = x @ w + seen
    seen.add_(x.detach().square())
    seen.clamp_(max=5.0)
    return y + seen


def norm(x: Tensor, w: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    return nn.functional.batch_norm(x * w, mean, var, training=True).relu()


def instance_norm(x: Tensor, w: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    return nn.functional.instance_norm(x * w, mean, var, momentum=0.3)


def drawn(*size: int) -> Tensor:
    return torch.randn(size, dtype=torch.float64)


def assert_same(fn: Callable[..., Tensor], given: list[Tensor], **options: Any) -> None:
    sharded = pw.shard(fn, mesh=MESH, **options)
    for each in given[:2]:
        each.requires_grad_()
    one, other = ([t.detach().clone().requires_grad_(t.requires_grad) for t in given] for _ in range(2))
    for _ in range(2):  # the second call starts from what the first one wrote
        expected, found = fn(*one), sharded(*other)
        expected.square().sum().backward()
        found.square().sum().backward()
        torch.testing.assert_close(found, expected, rtol=EXACT, atol=EXACT)
        torch.testing.assert_close(other, one, rtol=EXACT, atol=EXACT)
        for a, b in zip(other, one, strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("split", [None, ("dp", None), ("tp", "dp"), (None, ("dp", "tp"))])
def test_what_a_call_writes_is_there_afterwards(split: Any) -> None:
    assert_same(counts, [drawn(8, 8), drawn(8, 8), drawn(8, 8)], in_strategy={"seen": split, "x": ("dp", None)})


@pytest.mark.parametrize(("fn", "size"), [(norm, (8, 4, 6)), (instance_norm, (4, 4, 8))])
@pytest.mark.parametrize("split", [("dp", "tp", None), ("dp", None, "tp")])
def test_running_statistics_may_be_arguments(fn: Any, size: tuple[int, ...], split: Any) -> None:
    given = [drawn(*size), drawn(*size), torch.zeros(4).double(), torch.ones(4).double()]
    assert_same(fn, given, in_strategy=(split,))


class Cached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.key = nn.Linear(4, 4).double()

    def forward(self, x: Tensor, cache: Tensor) -> Tensor:
        cache[:, 1:2] = self.key(x)
        return cache.sum(1)


@pytest.mark.filterwarnings("ignore:.*has no rule")  # slice_scatter
def test_a_cache_that_is_written_without_gradients() -> None:
    model: Any = Cached()
    x, one, other = drawn(4, 1, 4), torch.zeros(4, 3, 4).double(), torch.zeros(4, 3, 4).double()
    with torch.no_grad():
        expected = model(x, one)
        pw.shard(model, mesh=MESH, in_strategy={"cache": ("dp", None, "tp")})
        torch.testing.assert_close(model(x, other), expected, rtol=EXACT, atol=EXACT)
    torch.testing.assert_close(other, one, rtol=EXACT, atol=EXACT)
    with pytest.raises(pw.RuntimeStateError, match="writes to 'cache' in place what depends on a tensor that needs"):
        model(x, other)


def _launched() -> None:
    mesh = init_device_mesh(torch.get_default_device().type, (2,), mesh_dim_names=("dp",))
    x, w, seen = drawn(8, 8), drawn(8, 8), drawn(8, 8)
    rank, after = pw.get_rank(), seen.clone()
    counts(x, w, after)
    whole = seen.clone()
    pw.shard(counts, mesh=mesh, in_strategy={"seen": ("dp", None)})(x, w, whole)
    torch.testing.assert_close(whole, after, rtol=EXACT, atol=EXACT)
    placed = distribute_tensor(seen.clone(), mesh, [Split(1)])
    pw.shard(counts, mesh=mesh, in_strategy={"seen": ("dp", None)})(x, w, placed)
    torch.testing.assert_close(placed.full_tensor(), after, rtol=EXACT, atol=EXACT)
    with pw.auto_parallel_context(dataset_strategy=((1, 2), (1, 1), (1, 2)), device_num=2):
        part = seen.chunk(2, 1)[rank].clone()
        pw.shard(counts)(x.chunk(2, 1)[rank], w, part)
    torch.testing.assert_close(part, after.chunk(2, 1)[rank], rtol=EXACT, atol=EXACT)


@pytest.mark.gloo
def test_a_rank_writes_its_part(on_ranks: Ranks) -> None:
    on_ranks(2, _launched)


class Aliases(nn.Module):
    """Results that on one device are views of one another, of an argument, a parameter and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        self.register_buffer("seen", torch.ones(4, 2))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = x * self.scale
        return y, y[1:], y, y.view(-1), x, x[1:], self.scale, self.get_buffer("seen"), self.get_buffer("seen").t()


def _apart(split: Any, out: Any = None) -> None:
    """Each result has memory of its own, in which nothing else shows, however it lies."""
    plain, x = Aliases(), torch.ones(4, 2)
    model = pw.shard(Aliases(), mesh={"dp": 2}, in_strategy=(split,), out_strategy=out)
    results = model(x)
    before = [t.detach().clone() for t in (*plain(x), x, *plain.state_dict().values())]
    for i, result in enumerate(results):
        with torch.no_grad():
            result.fill_(float(i + 2))
        before[i] = torch.full_like(before[i], float(i + 2))
        now = whole([*results, x, *model.state_dict().values()])
        torch.testing.assert_close([t.detach() for t in now], before, rtol=0, atol=0)


SPLITS = [(("dp", None), None), ((None, "dp"), None), (None, None), (("dp", None), (("dp", None), ("dp", None)))]


@pytest.mark.parametrize(("split", "out"), SPLITS)
def test_each_result_has_memory_of_its_own(split: Any, out: Any) -> None:
    _apart(split, out)


@pytest.mark.gloo
def test_each_result_of_a_rank_has_memory_of_its_own(on_ranks: Ranks) -> None:
    for split, out in SPLITS:
        on_ranks(2, _apart, split, out)


# -- Tensors that share memory


def adds(a, b):
    a.add_(1)
    return b * 2


class Buffers(nn.Module):
    def __init__(self, view=True):
        super().__init__()
        self.register_buffer("whole", torch.zeros(4, 2, dtype=torch.float64))
        self.register_buffer("part", self.whole[:2] if view else torch.zeros(2, 2, dtype=torch.float64))

    def forward(self, x):
        self.whole.add_(x)
        return x.sum() + self.part.sum()


def numbers():
    return torch.arange(8.0, dtype=torch.float64).view(4, 2)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("other", [lambda x: x, lambda x: x[:2], lambda x: x.t()])
def test_a_write_into_what_another_argument_shares_is_refused(first, other):
    fn, x = pw.shard(adds, mesh={"a": 2}), numbers()
    if not first:  # planned for tensors apart
        fn(x.clone(), other(x).clone(memory_format=torch.preserve_format))
    said = "adds writes in place to one of (input )?'?a'? and (input )?'?b'?, which share memory.* with clone"
    with pytest.raises((CaptureError, RuntimeStateError), match=said):
        fn(x, other(x))
    assert torch.equal(x, numbers())


def test_parts_of_one_memory_that_lie_apart_may_be_written():
    fn, x, y = pw.shard(adds, mesh={"a": 2}), numbers(), numbers()
    for _ in range(2):
        assert torch.equal(fn(x[:2], x[2:]), adds(y[:2], y[2:]))
        assert torch.equal(x, y)


def test_a_buffer_that_is_written_and_shares_memory_is_refused():
    with pytest.raises(CaptureError, match="Buffers writes in place to one of whole and part, which share memory"):
        pw.shard(Buffers(), mesh={"a": 2})(numbers())
    model = pw.shard(Buffers(view=False), mesh={"a": 2})
    model(numbers())
    with pytest.raises(RuntimeStateError, match="one of 'whole' and 'x', which share memory: a plan would not see"):
        model(model.whole)
    model.part = model.whole[1:3]
    with pytest.raises(RuntimeStateError, match="one of 'whole' and 'part', which share memory: a plan would not see"):
        model(numbers())
