"""What works in one process works under a launcher: each of these is run on virtual devices, and on 2 and 4 ranks."""

from __future__ import annotations

import copy
import functools
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checks import whole
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import partway as pw

Ranks = Callable[..., list[Any]]
EXACT = 1e-10


class Net(nn.Module):
    """A classifier that returns its loss and the scores, or the scores alone."""

    def __init__(self, wide: int = 64) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, wide), nn.Linear(wide, 256)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        scores = self.last(self.first(x).relu())
        return scores if y is None else (F.cross_entropy(scores, y), scores)


def pair(devices: int, **options: Any) -> tuple[nn.Module, Any]:
    """A plain model, and one that is sharded."""
    pw.set_auto_parallel_context(device_num=devices)
    torch.manual_seed(0)
    plain = Net().double()
    options = {"mesh": {"dp": devices}, "in_strategy": (("dp", None), ("dp",))} | options
    return plain, pw.shard(copy.deepcopy(plain), **options)


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(64, 16, dtype=torch.float64), torch.randint(0, 256, (64,))


def step(model: Any, optimizer: torch.optim.Optimizer) -> Tensor:
    loss: Tensor = model(*batch())[0]
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def assert_same(one: nn.Module, other: nn.Module) -> None:
    for (name, found), expected in zip(one.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(
            whole(found), whole(expected), rtol=EXACT, atol=EXACT, msg=lambda m, n=name: f"{n}: {m}"
        )


def step_in_backward(optimizer: torch.optim.Optimizer, parameter: Tensor) -> None:
    optimizer.step()
    optimizer.zero_grad()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


# -- What a script does, with one device's numbers ---------------------------------------------------------------------


def results_beside_a_loss(devices: int) -> None:
    """Metrics, printing and further losses, of scores that are not worth gathering in each step."""
    plain, model = pair(devices)
    x, y = batch()
    (loss, scores), (expected, others) = model(x, y), plain(x, y)
    assert type(loss) is Tensor
    assert loss.item() == pytest.approx(expected.item(), rel=EXACT)
    assert scores.shape == (64, 256)
    assert len(scores) == 64
    assert scores.dtype is torch.float64
    assert str(scores)
    accuracy = (scores.argmax(-1) == y).double().mean()
    assert accuracy.item() == (others.argmax(-1) == y).double().mean().item()
    (loss + 0.1 * scores.square().mean()).backward()
    (expected + 0.1 * others.square().mean()).backward()
    torch.testing.assert_close(whole(model.first.weight.grad), plain.first.weight.grad, rtol=EXACT, atol=EXACT)
    kept = model(x, y)[1].detach()
    kept.mul_(2)[0] = 1.0
    torch.testing.assert_close(kept.sum(), 2 * others.detach()[1:].sum() + 256)
    assert torch.equal(torch.cat([kept, kept])[64:], kept + torch.zeros(64, 256))
    assert torch.equal(torch.tensor(kept.numpy()), torch.stack(list(kept)))
    file = io.BytesIO()
    torch.save(kept, file)
    file.seek(0)
    assert torch.equal(torch.load(file), kept)
    assert type(model(x)) is Tensor


def results_are_whole_if_asked(devices: int) -> None:
    _, model = pair(devices)
    with pw.auto_parallel_context(whole_results=True):
        assert [type(t) for t in model(*batch())] == [Tensor, Tensor]
    pw.reset_auto_parallel_context()
    _, model = pair(devices, out_strategy=(None, (None, None)))
    assert [type(t) for t in model(*batch())] == [Tensor, Tensor]


def inference_first(devices: int) -> None:
    """The first call, and a shard, in inference mode, where what it returns is used and written; then it trains."""
    for options in ({}, {"parameter_plan": {"first.bias": ("dp",)}}):
        plain, _ = pair(devices)
        model = copy.deepcopy(plain)
        with torch.inference_mode(bool(options)):
            model = pw.shard(model, mesh={"dp": devices}, in_strategy=(("dp", None), ("dp",)), **options)
        steppers = adam(plain), adam(model)
        with torch.inference_mode():
            (loss, scores), (expected, others) = model(*batch()), plain(*batch())
            assert loss.item() == pytest.approx(expected.item(), rel=EXACT)
            assert torch.equal(scores.argmax(-1), others.argmax(-1))
            for kept in (scores, others):
                kept.mul_(2)[0] = 1.0
            torch.testing.assert_close(scores.detach().sum(), others.sum())
        torch.testing.assert_close(scores + torch.zeros(64, 256), others)
        for one, stepper in zip((plain, model), steppers, strict=True):
            step(one, stepper)
        assert_same(model, plain)


def averages_of_weights(devices: int) -> None:
    """An average that is made before the first call follows the model, on a given mesh and on one that is chosen."""
    for options in ({}, {"mesh": None, "in_strategy": None}):
        plain, model = pair(devices, **options)
        averages = [AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(0.9)) for m in (plain, model)]
        for one, average in zip((plain, model), averages, strict=True):
            optimizer = adam(one)
            for _ in range(3):
                step(one, optimizer)
                average.update_parameters(one)
        assert_same(averages[1].module, averages[0].module)
        x, y = batch()
        torch.testing.assert_close(averages[1](x, y)[0], averages[0](x, y)[0], rtol=EXACT, atol=EXACT)
        averages[1].update_parameters(model)


def state_dicts(devices: int) -> None:
    """Plain tensors before and after the first call, strict and not, copied and assigned."""
    other = Net().double()
    for called in (False, True):
        for options in ({}, {"assign": True}, {"strict": False}):
            plain, model = pair(devices)
            if called:
                step(model, adam(model))
            before = [type(p) for p in model.parameters()]
            found = model.load_state_dict(copy.deepcopy(other.state_dict()), **options)
            assert not found.missing_keys
            plain.load_state_dict(other.state_dict())
            assert [type(p) for p in model.parameters()] == before
            torch.testing.assert_close(step(model, adam(model)), step(plain, adam(plain)), rtol=EXACT, atol=EXACT)
            assert_same(model, plain)
    plain, model = pair(devices)
    wrapped = nn.ModuleDict({"inner": model})
    wrapped.load_state_dict({f"inner.{name}": value for name, value in other.state_dict().items()})
    assert_same(model, other)
    step(model, adam(model))
    fresh = pair(devices)[1]
    fresh.load_state_dict(model.state_dict())
    assert_same(fresh, model)
    step(fresh, adam(fresh))
    with pytest.raises(RuntimeError, match=r"size mismatch for first\.weight"):
        model.load_state_dict(Net(32).double().state_dict())
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "last\.bias"'):
        model.load_state_dict({k: v for k, v in other.state_dict().items() if k != "last.bias"})


def copies(devices: int) -> None:
    plain, model = pair(devices)
    early = copy.deepcopy(model)
    step(model, adam(model))
    late = copy.deepcopy(model)
    step(plain, adam(plain))
    assert_same(late, plain)
    for one in (early, late):
        step(one, adam(one))
    assert_same(early, plain)
    assert [whole(p).shape for p in early.parameters()] == [p.shape for p in plain.parameters()]


def parameters_that_come_later(devices: int) -> None:
    """A new head, a low-rank adapter and tied weights, before and after the first call."""

    def operate(model: Any) -> None:
        torch.manual_seed(2)
        model.last = nn.Linear(64, 200).double()
        model.first.bias = nn.Parameter(torch.randn(64, dtype=torch.float64))
        model.first.register_parameter("scale", nn.Parameter(torch.ones((), dtype=torch.float64)))

    for calls in (0, 2):
        models = pair(devices)
        for model in models:
            optimizer = adam(model)
            for _ in range(calls):
                step(model, optimizer)
            operate(model)
            optimizer = adam(model)
            for _ in range(2):
                loss = model(batch()[0], batch()[1] % 200)[0]
                (
                    loss + 0.1 * (model.first.scale - 2).square() + sum(p.square().sum() for p in model.parameters())
                ).backward()
                optimizer.step()
                optimizer.zero_grad()
        assert_same(models[1], models[0])
        assert len({type(p) for p in models[1].parameters()}) == 1


def hooks_of_parameters(devices: int) -> None:
    """Masks of gradients, and an optimizer in the backward, set before shard, before the first call, and after it."""
    for when in ("before shard", "before the call", "after the call"):
        found = []
        for sharded in (False, True):
            torch.manual_seed(0)
            model: Any = Net().double()
            seen: list[str] = []

            def register(model: Any = model, seen: list[str] = seen) -> None:
                model.first.weight.register_hook(lambda gradient: gradient * 0.5)
                model.last.bias.register_hook(lambda gradient: seen.append("last.bias"))
                steps = {name: torch.optim.SGD([p], lr=0.1) for name, p in model.named_parameters()}
                for name, p in model.named_parameters():
                    p.register_post_accumulate_grad_hook(functools.partial(step_in_backward, steps[name]))

            if when == "before shard":
                register()
            if sharded:
                pw.set_auto_parallel_context(device_num=devices)
                model = pw.shard(model, mesh={"dp": devices}, in_strategy=(("dp", None), ("dp",)))
            if when == "before the call":
                register(model)
            if when == "after the call":
                model(*batch())
                register(model)
            for _ in range(2):
                model(*batch())[0].backward()
            assert seen == ["last.bias"] * 2
            found.append(model)
        assert_same(found[1], found[0])


SCRIPTS = [
    results_beside_a_loss, results_are_whole_if_asked, inference_first, averages_of_weights, state_dicts, copies,
    parameters_that_come_later, hooks_of_parameters,
]  # fmt: skip
every_script = pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)


@every_script
def test_in_one_process(script: Callable[[int], None]) -> None:
    script(2)


@pytest.mark.gloo
@every_script
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_under_a_launcher(script: Callable[[int], None], ranks: int, on_ranks: Ranks) -> None:
    on_ranks(ranks, script, ranks)
