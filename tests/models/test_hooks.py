"""Hooks of every kind on a sharded module see, and change, what they would on one device."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checks import whole
from torch import Tensor, nn

import partway as pw

X = torch.linspace(-1, 2, 32, dtype=torch.float64).view(4, 8)
Seen = list[tuple[str, Any]]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(8, 8, dtype=torch.float64), nn.Tanh()

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.act(self.linear(x)) * scale


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.second = Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x), scale=2.0).square().sum(1)


def snapshot(value: Any) -> Any:
    """What a hook was given, in plain tensors that stay as they are."""
    if isinstance(value, Tensor):
        return whole(value).detach().clone()
    return tuple(map(snapshot, value)) if isinstance(value, tuple | list) else value


# A hook of each kind: what registers it on a module, given where to note what it sees.
def _forward(m: Any, seen: Seen) -> Any:
    return m.register_forward_hook(lambda _, args, out: seen.append(("forward", snapshot((args, out)))))


def _forward_always(m: Any, seen: Seen) -> Any:
    def hook(module: Any, args: Any, kwargs: Any, out: Tensor) -> None:
        seen.append(("forward", snapshot((args, tuple(kwargs.values()), out))))

    return m.register_forward_hook(hook, with_kwargs=True, always_call=True, prepend=True)


def _forward_new(m: Any, seen: Seen) -> Any:
    return m.register_forward_hook(lambda _, args, out: out * 3)


def _pre(m: Any, seen: Seen) -> Any:
    return m.register_forward_pre_hook(lambda _, args: seen.append(("pre", snapshot(args))))


def _pre_new(m: Any, seen: Seen) -> Any:
    return m.register_forward_pre_hook(lambda _, args, kwargs: ((args[0] + 1,), kwargs), with_kwargs=True)


def _full(m: Any, seen: Seen) -> Any:
    return m.register_full_backward_hook(lambda _, into, out: seen.append(("full", snapshot((into, out)))))


def _full_new(m: Any, seen: Seen) -> Any:
    return m.register_full_backward_hook(lambda _, into, out: tuple(None if g is None else g * 2 for g in into))


def _backward_pre(m: Any, seen: Seen) -> Any:
    return m.register_full_backward_pre_hook(lambda _, out: (seen.append(("pre", snapshot(out))), (out[0] * 2,))[1])


def _parameter(m: Any, seen: Seen) -> Any:
    return next(m.parameters()).register_hook(lambda g: (seen.append(("gradient", snapshot(g))), g * 2)[1])


def _accumulated(m: Any, seen: Seen) -> Any:
    hook = lambda p: seen.append(("accumulated", snapshot(p.grad)))  # noqa: E731
    return next(m.parameters()).register_post_accumulate_grad_hook(hook)


KINDS: dict[str, Callable[[Any, Seen], Any]] = {
    "forward": _forward, "forward, kwargs, always": _forward_always, "forward that returns": _forward_new,
    "pre": _pre, "pre that returns": _pre_new, "full backward": _full, "full backward that returns": _full_new,
    "backward pre": _backward_pre, "parameter": _parameter, "accumulated": _accumulated,
}  # fmt: skip
PLACES: dict[str, Callable[[Any], Any]] = {"root": lambda m: m, "inside": lambda m: m.first, "last": lambda m: m.second}
TIMES = ("before shard", "before the first call", "after the first call", "removed")


def story(kind: str, place: str, time: str, shard: Callable[[Any], Any]) -> tuple[Seen, list[Tensor]]:
    """What the hook saw in three steps, and what came of them."""
    seen: Seen = []
    model, found = Model(), list[Tensor]()

    def step() -> None:
        model.zero_grad()
        x = X.clone().requires_grad_()
        y = model(x)
        y.sum().backward()
        found.extend([snapshot(y), snapshot(x.grad), *(snapshot(p.grad) for p in model.parameters())])

    handle: Any = KINDS[kind](PLACES[place](model), seen) if time == "before shard" else None
    model = shard(model)
    if time == "before the first call":
        handle = KINDS[kind](PLACES[place](model), seen)
    step()
    handle = handle or KINDS[kind](PLACES[place](model), seen)
    step()
    if time == "removed":
        handle.remove()
    step()
    return seen, found


def differs(kind: str, place: str, time: str) -> str:
    """How a story of a sharded model is unlike that of a plain one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's, of hooks whose module's inputs need no gradient
        plain = story(kind, place, time, lambda m: m)
        try:
            ours = story(kind, place, time, lambda m: pw.shard(m, mesh={"x": 2}, in_strategy=(("x", None),)))
        except pw.PartwayError as error:
            return f"{kind}, {place}, {time}: refused: {error}"
    (saw, came), (expected, results) = ours, plain
    if [(name, shape(value)) for name, value in saw] != [(name, shape(value)) for name, value in expected]:
        return f"{kind}, {place}, {time}: saw {[name for name, _ in saw]} in place of {[name for name, _ in expected]}"
    pairs = zip(tensors_in((saw, came)), tensors_in((expected, results)), strict=True)
    alike = [torch.allclose(a, b, rtol=1e-9, atol=1e-9) for a, b in pairs]
    return "" if all(alike) else f"{kind}, {place}, {time}: other values {alike}"


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [t for part in value for t in tensors_in(part)] if isinstance(value, tuple | list) else []


def shape(value: Any) -> Any:
    """A value with its tensors as their shapes."""
    if isinstance(value, Tensor):
        return list(value.shape)
    return tuple(map(shape, value)) if isinstance(value, tuple | list) else value


EVERY = [(kind, place, time) for kind in KINDS for place in PLACES for time in TIMES]
QUICK = [(kind, ("root", "inside", "last")[i % 3], TIMES[i % 4]) for i, kind in enumerate([*KINDS, *KINDS])][:12]


@pytest.mark.parametrize(("kind", "place", "time"), QUICK)
def test_a_hook_sees_what_it_would_on_one_device(kind: str, place: str, time: str) -> None:
    assert not differs(kind, place, time)


@pytest.mark.slow
def test_every_hook_sees_what_it_would_on_one_device() -> None:
    assert [said for case in EVERY if (said := differs(*case))] == []


@pytest.mark.gloo
def test_hooks_of_parameters_stay_with_them_on_two_processes(on_ranks: Callable[..., list[Any]]) -> None:
    cases = [("parameter", "inside", "before shard"), ("accumulated", "inside", "before the first call")]
    cases += [("full backward", "last", "before shard"), ("forward", "inside", "removed")]
    assert on_ranks(2, all_of, cases) == [[], []]


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("kind", KINDS)
def test_every_hook_on_two_processes(on_ranks: Callable[..., list[Any]], kind: str) -> None:
    for case in [case for case in EVERY if case[0] == kind]:  # a call each: the time of a call is limited
        assert on_ranks(2, all_of, [case]) == [[], []]


def all_of(cases: list[tuple[str, str, str]]) -> list[str]:
    return [said for case in cases if (said := differs(*case))]


class Hooked(nn.Module):
    """A module that puts hooks on its own tensors."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.a, self.b = nn.Linear(8, 8, dtype=torch.float64), nn.Linear(8, 8, dtype=torch.float64)
        self.seen: list[Tensor] = []
        self.gradient: Any = None

    def keep(self, gradient: Tensor) -> None:
        self.gradient = gradient

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        earlier = h * 2
        h.register_hook(lambda g: self.seen.append(g.clone()))
        h.register_hook(lambda g: g * 3)
        h.register_hook(self.keep)
        h.register_hook(lambda g: g * 100).remove()
        y: Tensor = self.b(torch.tanh(h) + earlier)
        return y


def steps(model: Any, more: Callable[[], Any] = lambda: 0.0, count: int = 3) -> list[Tensor]:
    """Results and gradients of some steps, with `more` in the loss."""
    found = []
    for _ in range(count):
        model.zero_grad()
        x = X.clone().requires_grad_()
        y = model(x)
        (y.square().sum() + more()).backward()
        found += [y, x.grad, *(p.grad for p in model.parameters()), *model.buffers()]
        found += [*getattr(model, "seen", []), *([model.gradient] if hasattr(model, "gradient") else [])]
    return [snapshot(tensor) for tensor in found]


def split(model: Any) -> Any:
    return pw.shard(model, mesh={"x": 2}, in_strategy=(("x", None),))


def assert_alike(ours: list[Tensor], plain: list[Tensor]) -> None:
    assert len(ours) == len(plain)
    assert [i for i, (a, b) in enumerate(zip(ours, plain, strict=True)) if not torch.allclose(a, b, rtol=1e-9)] == []


def test_hooks_on_tensors_inside_see_and_change_whole_gradients() -> None:
    assert_alike(steps(split(Hooked())), steps(Hooked()))


@pytest.mark.parametrize("how", ["dict", "list"])
def test_what_a_hook_keeps_has_its_gradient(how: str) -> None:
    def features(model: Any) -> list[Tensor]:
        kept: Any = {} if how == "dict" else []

        def hook(module: Any, args: Any, out: Tensor) -> None:
            if how == "dict":
                kept["out"] = out
            else:
                kept[:] = [out]

        model.first.register_forward_hook(hook)
        return steps(model, lambda: (kept["out"] if how == "dict" else kept[0]).square().sum())

    assert_alike(features(split(Model())), features(Model()))


def test_a_gradient_of_what_a_hook_kept_unseen_is_refused() -> None:
    kept: list[Tensor] = []

    def hide(tensor: Tensor) -> None:
        kept.append(tensor)

    def hook(module: Any, args: Any, out: Tensor) -> None:
        hide(out)
        float(out.sum())  # cannot be captured, so that it is taken for one that only looks

    model = Model()
    model.first.register_forward_hook(hook)
    split(model)(X)
    with pytest.raises(
        pw.RuntimeStateError, match=r"a gradient reached a tensor that the forward hook .* of module 'fir"
    ):
        kept[-1].sum().backward()


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("what", ["spectral_norm", "weight_norm"])
def test_hooks_that_compute_a_parameter_run_once(what: str, inside: bool) -> None:
    def build() -> Any:
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            module = getattr(nn.utils, what)(nn.Linear(8, 8, dtype=torch.float64))
        return nn.Sequential(module, nn.Tanh()) if inside else module

    assert_alike(steps(pw.shard(build(), mesh={"x": 2})), steps(build()))


def test_hooks_of_all_modules_run_for_each() -> None:
    seen: list[str] = []
    handle = nn.modules.module.register_module_forward_hook(lambda m, args, out: seen.append(type(m).__name__))
    try:
        model = split(Model())
        seen.clear()
        for _ in range(2):
            model(X)
    finally:
        handle.remove()
    assert seen == ["Linear", "Tanh", "Block", "Linear", "Tanh", "Block", "Model"] * 2


def _retains(x: Tensor) -> Tensor:
    (x * 2).retain_grad()
    return x


def _uses_another(x: Tensor) -> Tensor:
    h, mask = x * 2, torch.sigmoid(x)
    h.register_hook(lambda g: g * mask)
    return h


@pytest.mark.parametrize(
    ("fn", "said"),
    [(_retains, r"retain_grad\(\) inside a sharded function keeps no gradient; read it in a hook"),
     (_uses_another, "the hook _uses_another.<locals>.<lambda> of a tensor uses other tensors of the call")],
)  # fmt: skip
def test_hooks_that_cannot_be_right_are_refused(fn: Any, said: str) -> None:
    with pytest.raises(pw.CaptureError, match=said):
        pw.shard(fn, mesh={"x": 2})(X.clone().requires_grad_())


def test_the_old_backward_hook_is_refused() -> None:
    model = Model()
    model.first.register_backward_hook(lambda *_: None)
    with pytest.raises(
        pw.CaptureError, match="of module 'first' was registered with register_backward_hook, which sees"
    ):
        split(model)(X)
