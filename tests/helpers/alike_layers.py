"""Functions with layers that are alike, and with layers that are not though they look it."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

WIDTH, LAYERS = 4, 5


class Layer(nn.Module):
    """A layer with two children and a place of its own."""

    def __init__(self, place: int = 0, width: int = WIDTH) -> None:
        super().__init__()
        self.place = place
        self.norm, self.inner, self.outer = (
            nn.LayerNorm(width),
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width),
        )

    def forward(self, x: Tensor) -> Any:
        return x + self.outer(torch.relu(self.inner(self.norm(x))))


class Deep(nn.Module):
    """Layers, one after the other."""

    def __init__(self, layer: Callable[[int], nn.Module], layers: int = LAYERS) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer(place) for place in range(layers))

    def forward(self, x: Tensor, *more: Any, **kwargs: Any) -> Any:
        for layer in self.layers:
            x = layer(x, *more, **kwargs)
        return x


X = torch.zeros(2, 3, WIDTH, requires_grad=True)


class Returns(Layer):
    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return {"y": y, "kept": (x, y.mean(-1), None, 3)}


class ReadsDict(Deep):
    def forward(self, x: Tensor) -> Any:
        means = []
        for layer in self.layers:
            found = layer(x)
            x, mean = found["y"], found["kept"][1]
            assert found["kept"][0] is not x
            assert found["kept"][2:] == (None, 3)
            means.append(mean)
        return x, means[-1]


class Drops(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x), 0.1, self.training)


class Keywords(Layer):
    def forward(self, x: Tensor, *, mask: Tensor | None = None, scale: float = 1.0) -> Tensor:
        y: Tensor = super().forward(x)
        return y * scale if mask is None else y.masked_fill(mask, scale)


class WithMask(Deep):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        mask = mask.logical_not()
        for layer in self.layers:
            x = layer(x, mask=mask, scale=0.5)
        return x


class Counts(Layer):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        y: Tensor = super().forward(x)
        return y


class Checkpointed(Deep):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


class Attends(nn.Module):
    def __init__(self, place: int) -> None:
        super().__init__()
        self.place, self.heads = place, 2
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        parts = self.qkv(x).unflatten(-1, (3, self.heads, WIDTH // self.heads)).unbind(-3)
        q, k, v = (part.transpose(1, 2) for part in parts)
        weights = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5 + bias).softmax(-1)
        return x + self.out((weights @ v).transpose(1, 2).flatten(2)), weights


class Attending(Deep):
    def forward(self, x: Tensor) -> Tensor:
        bias = torch.full((x.shape[1], x.shape[1]), -1.0).triu(1)
        for layer in self.layers:
            x, _ = layer(x, bias)
        return x


class TwoKinds(Deep):
    def __init__(self) -> None:
        super().__init__(lambda place: (Layer, Drops)[place % 2](place), 8)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Deep(Layer, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x).relu()
        return x


class Frozen(Deep):
    """The first layer is given what needs no gradient."""

    def __init__(self) -> None:
        super().__init__(Layer, 6)
        self.table = nn.Embedding(5, WIDTH).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(self.table(x))
        return y


class Autocast(Deep):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            with torch.autocast("cpu", torch.bfloat16):
                x = layer(x)
        return x


class OneAutocast(Deep):
    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            with torch.autocast("cpu", torch.bfloat16, enabled=i == 3):
                x = layer(x)
        return x


class Written(Deep):
    """Writes in place to what layers gave."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            x.mul_(2)
        return x


FIRST = Layer()


def own_encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 2, 8, batch_first=True), 5)


ALIKE: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...], int]] = {
    "returns a dict": (lambda: ReadsDict(Returns), (X,), 3),
    "dropout": (lambda: Deep(Drops), (X,), 3),
    "keywords": (lambda: WithMask(Keywords), (X, X > 0), 3),
    "counts in Python": (lambda: Deep(Counts), (X,), 3),
    "checkpointed": (lambda: Checkpointed(Layer), (X,), 3),
    "attention whose weights nothing reads": (lambda: Attending(Attends), (X,), 3),
    "two kinds": (TwoKinds, (X,), 4),
    "nested": (Nested, (X,), 10),
    "deep copies": (lambda: Deep(lambda _: copy.deepcopy(FIRST)), (X,), 3),
    "the first is given no gradient": (Frozen, (torch.zeros(2, 3, dtype=torch.long),), 3),
    "in a Sequential": (lambda: nn.Sequential(*map(Layer, range(5))), (X,), 3),
    "torch's own": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 2, 8, batch_first=True), 5),
        (X,),
        3,
    ),
    "autocast around": (lambda: Autocast(Layer), (X,), 3),
}


class Reads(Layer):
    """What it does depends on its place."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)
        return y.sin() if self.place == 3 else y


class Slides(Layer):
    def __init__(self, place: int) -> None:
        super().__init__(place)
        self.window = 2 if place % 2 else None

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)
        return y if self.window is None else y.roll(self.window, 1)


class Constant(Layer):
    """A number of its own, which differs in one layer."""

    def __init__(self, place: int) -> None:
        super().__init__(place)
        self.scale = [1.0, 1.0, 1.0, 0.5, 1.0][place]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x) * self.scale
        return y


class Hidden(Layer):
    """As `Constant`, where it does not show in an attribute of the module."""

    def __init__(self, place: int) -> None:
        super().__init__(place)
        self.options = {"scale": [1.0, 1.0, 1.0, 0.5, 1.0][place]}

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x) * self.options["scale"]
        return y


class SignedZero(Hidden):
    def __init__(self, place: int) -> None:
        super().__init__(place)
        self.options["scale"] = [0.0, 0.0, 0.0, -0.0, 0.0][place]


class Closure(Layer):
    def __init__(self, place: int) -> None:
        super().__init__(place)
        self.act = torch.sin if place == 3 else torch.cos

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x) + super().forward(x)


class Global(Layer):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        Global.calls += 1
        y: Tensor = super().forward(x)
        return y * 2 if Global.calls % LAYERS == 4 else y


class Keeps(Layer):
    """Keeps a tensor, which a later layer reads."""

    kept: list[Tensor] = []  # noqa: RUF012

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)
        before = self.kept[-1] if self.kept else y
        self.kept.append(y * 2)
        return y + before


class KeepsAll(Deep):
    def forward(self, x: Tensor) -> Any:
        Keeps.kept.clear()
        return super().forward(x), list(Keeps.kept)


class Caches(Layer):
    """Puts a tensor into what it is given."""

    def forward(self, x: Tensor, cache: list[Tensor]) -> Tensor:
        y = self.inner(x)
        cache.append(y)
        return x + self.outer(y)


class WithCache(Deep):
    def forward(self, x: Tensor) -> Any:
        cache: list[Tensor] = []
        for layer in self.layers:
            x = layer(x, cache)
        return x, cache


class InPlace(Layer):
    def forward(self, x: Tensor) -> Tensor:
        x = x + 0
        x.add_(super().forward(x))
        return x


class WritesOutside(Layer):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)
        self.total.add_(y.detach().sum())
        return y


class Totals(Deep):
    def __init__(self) -> None:
        super().__init__(WritesOutside)
        self.register_buffer("total", torch.zeros(()))
        for layer in self.layers:
            vars(layer)["total"] = self.total

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            vars(layer)["total"] = self.total
        y: Tensor = super().forward(x)
        return y


class Views(Layer):
    """Returns a view of what it is given, too."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), x.view(-1)


class ReadsViews(Deep):
    def forward(self, x: Tensor) -> Tensor:
        total = 0
        for layer in self.layers:
            x, flat = layer(x)
            total = total + flat.sum()
        return x + total


class NoGrad(Layer):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = x.abs().mean()
        y: Tensor = super().forward(x) * scale
        return y


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 2


class WithFunction(Layer):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Straight.apply(super().forward(x))
        return y


class CheckpointsInside(Layer):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return y


class Normalises(nn.Module):
    def __init__(self, place: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(3, 3, 1), nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.conv(x))


class Rotary(Layer):
    """A table that all share, computed outside, in an attribute."""

    table: Any = None

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x) * self.table[0]
        return y


class SharedTable(Deep):
    def forward(self, x: Tensor) -> Tensor:
        Rotary.table = [x.cos()]
        y: Tensor = super().forward(x)
        Rotary.table = None
        return y


class TablesApart(Deep):
    """As `SharedTable`, with another table for one layer."""

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            Rotary.table = [x.cos()] if i in (0, 3) else Rotary.table
            x = layer(x)
        Rotary.table = None
        return x


class Same(nn.Module):
    """Asks whether it is given one tensor twice."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(WIDTH, WIDTH), nn.Identity()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.linear(x) + (x if x is y else self.other(y) * 2)


class SameOnce(Deep):
    def forward(self, x: Tensor) -> Tensor:
        first = x.sin()
        x = x.cos()
        for i, layer in enumerate(self.layers):
            x = layer(x, x if i == 3 else first)
        return x


class Marks(Layer):
    """Notes on a tensor that it was here."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        if hasattr(y, "seen"):
            y = y.sin()
        y.seen = True
        return x + self.outer(y)


class Other(Layer):
    """Calls another of two modules that are alike and have no parameters."""

    def __init__(self, place: int) -> None:
        super().__init__(place)
        self.one, self.two = nn.Tanh(), nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)
        z: Tensor = (self.two if self.place == 3 else self.one)(y)
        return z


class Random(Layer):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)
        return y + torch.randn_like(y) * torch.rand(())


class Unrolled(nn.Module):
    """Layers that are called from other lines."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = map(Layer, range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        x = self.b(x)
        x = self.c(x)
        return self.d(x)


class Skips(Deep):
    """Gives each layer what an earlier one gave."""

    def forward(self, x: Tensor) -> Tensor:
        before = [x, x.sin()]
        for layer in self.layers:
            before.append(layer(before[-1], before[-2]))
        return before[-1]


class Tied(Deep):
    def __init__(self) -> None:
        super().__init__(Layer)
        for layer in self.layers[1:]:
            layer.inner.weight = self.layers[0].inner.weight


class OneTied(Deep):
    def __init__(self) -> None:
        super().__init__(Layer)
        self.layers[4].inner.weight = self.layers[2].inner.weight


class TwiceTheSame(Deep):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = super().forward(x)
        return x


class FirstAgain(Deep):
    def forward(self, x: Tensor) -> Tensor:
        for layer in (*self.layers, self.layers[1]):
            x = layer(x)
        return x


class Precise(Deep):
    """One layer in another precision."""

    def __init__(self) -> None:
        super().__init__(Layer)
        self.layers[3].double()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x.to(layer.inner.weight.dtype))
        return x


class Default(Layer):
    """Makes tensors of the default dtype, which it changes."""

    def forward(self, x: Tensor) -> Tensor:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64 if self.place == 3 else torch.float32)
        try:
            y: Tensor = super().forward(x) + torch.ones(WIDTH).type_as(x)
            return y
        finally:
            torch.set_default_dtype(before)


class Catches(Reads):
    """Goes on where something is raised."""

    def forward(self, x: Tensor) -> Tensor:
        try:
            return super().forward(x)
        except BaseException:
            return x


class Counted(Layer):
    """Counts the layers whose tensors have not been seen."""

    count = 0

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        Counted.count += not hasattr(y, "seen")
        y.seen = True
        return x + self.outer(y)


class Doubles(TorchFunctionMode):
    """A mode that gives twice what relu gives."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.relu else result


class AroundRelu(Deep):
    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            with Doubles() if i == 3 else contextlib.nullcontext():
                x = layer(x)
        return x


class InsideRelu(Layer):
    def forward(self, x: Tensor) -> Tensor:
        with Doubles() if self.place == 3 else contextlib.nullcontext():
            y: Tensor = super().forward(x)
        return y


class Conjugates(Layer):
    def forward(self, x: Tensor) -> Tensor:
        z = torch.complex(x, super().forward(x))
        return (z.conj() if self.place == 3 else z).imag


class Bag:
    """What nobody can look into."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


class Bags(Layer):
    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return y, Bag(y * 2)


class OpensBags(Deep):
    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros(())
        for layer in self.layers:
            x, bag = layer(x)
            total = total + bag.x.sum()
        return x + total


class Fills(Layer):
    """Puts a tensor into an object, and reads the one that is there."""

    def forward(self, x: Tensor, bag: Bag) -> Tensor:
        y: Tensor = super().forward(x) + bag.x
        bag.x = y * 2
        return y


class WithBag(Deep):
    def forward(self, x: Tensor) -> Any:
        bag = Bag(x)
        for layer in self.layers:
            x = layer(x, bag)
        return x, bag.x


class Passes(Layer):
    """Returns a list that it is given, which the caller changes."""

    def forward(self, x: Tensor, seen: list[Any]) -> Any:
        return super().forward(x), seen


class PassesOn(Deep):
    def forward(self, x: Tensor) -> Any:
        seen: list[Any] = []
        for layer in self.layers:
            x, same = layer(x, seen)
            assert same is seen
            same.append(1)
        return x * len(seen)


class Inspects(Deep):
    """Asks for the signature of a layer."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            given = {"mask": None} if "mask" in inspect.signature(layer.forward).parameters else {}
            x = layer(x, **given) * (2 if given else 3) + (layer.forward.__self__ is layer)
        return x


class Branches(Layer):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)
        z: Tensor = torch.cond(y.sum() > 0, torch.sin, torch.cos, (y,))
        return z


class Branching(Deep):
    """Layers in a branch."""

    def forward(self, x: Tensor) -> Tensor:
        layers: nn.ModuleList = self.layers

        def all_of_them(y: Tensor) -> Tensor:
            for layer in layers:
                y = layer(y)
            return y

        y: Tensor = torch.cond(x.sum() > 0, all_of_them, torch.sin, (x,))
        return y


class Maps(Layer):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.func.vmap(super().forward)(x)
        return y


class DropsMore(Layer):
    """Returns something random that may not be read."""

    def forward(self, x: Tensor) -> Any:
        y = nn.functional.dropout(super().forward(x), 0.1)
        return y, nn.functional.dropout(y, 0.5)


class ReadsOnce(Deep):
    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros(())
        for i, layer in enumerate(self.layers):
            x, more = layer(x)
            total = total + more.sum() if i == 3 else total
        return x + total


class ReadsSome(Deep):
    """Reads nothing of what one layer gives."""

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            y = layer(x)
            x = x if i == 3 else y
        return x


def hooked() -> nn.Module:
    fn = Deep(Layer)
    fn.layers[3].inner.register_forward_hook(lambda module, args, result: result * 2)
    return fn


def evaluated() -> nn.Module:
    fn = Deep(Drops)
    fn.layers[3].eval()
    return fn


def patched() -> nn.Module:
    fn = Deep(Layer)
    inner = fn.layers[3].inner
    inner.forward = lambda x: nn.functional.linear(x, inner.weight)
    return fn


def strided() -> nn.Module:
    fn = Deep(Layer)
    fn.layers[3].inner.weight = nn.Parameter(torch.zeros(WIDTH, 2 * WIDTH).t())
    return fn


HOSTILE: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...]]] = {
    "reads its place": (lambda: Deep(Reads), (X,)),
    "alternates": (lambda: Deep(Slides, 8), (X,)),
    "another number": (lambda: Deep(Constant), (X,)),
    "another number inside an object": (lambda: Deep(Hidden), (X,)),
    "another sign of zero": (lambda: Deep(SignedZero), (X,)),
    "another function": (lambda: Deep(Closure), (X,)),
    "counts in a class": (lambda: Deep(Global), (X,)),
    "keeps tensors": (lambda: KeepsAll(Keeps), (X,)),
    "fills a cache": (lambda: WithCache(Caches), (X,)),
    "writes to its own": (lambda: Deep(InPlace), (X,)),
    "writes to a buffer outside": (Totals, (X,)),
    "writes to what layers gave": (lambda: Written(Layer), (X,)),
    "returns views": (lambda: ReadsViews(Views), (X,)),
    "no_grad inside": (lambda: Deep(NoGrad), (X,)),
    "an autograd.Function": (lambda: Deep(WithFunction), (X,)),
    "checkpoint inside": (lambda: Deep(CheckpointsInside), (X,)),
    "BatchNorm": (lambda: Deep(Normalises), (X,)),
    "BatchNorm in evaluation": (lambda: Deep(Normalises).eval(), (X,)),
    "a shared table": (lambda: SharedTable(Rotary), (X,)),
    "another table": (lambda: TablesApart(Rotary), (X,)),
    "one tensor twice": (lambda: SameOnce(Same), (X,)),
    "marks a tensor": (lambda: Deep(Marks), (X,)),
    "another module without parameters": (lambda: Deep(Other), (X,)),
    "random numbers": (lambda: Deep(Random), (X,)),
    "called from other lines": (Unrolled, (X,)),
    "skips": (lambda: Skips(Same), (X,)),
    "tied": (Tied, (X,)),
    "one tied": (OneTied, (X,)),
    "called twice": (lambda: TwiceTheSame(Layer), (X,)),
    "a traced one called again": (lambda: FirstAgain(Layer), (X,)),
    "one in another precision": (Precise, (X,)),
    "one with another default dtype": (lambda: Deep(Default), (X,)),
    "one autocast": (lambda: OneAutocast(Layer), (X,)),
    "catches everything": (lambda: Deep(Catches), (X,)),
    "counts what it has not seen": (lambda: Deep(Counted), (X,)),
    "modes around": (lambda: AroundRelu(Layer), (X,)),
    "a mode inside": (lambda: Deep(InsideRelu), (X,)),
    "conjugates": (lambda: Deep(Conjugates), (X,)),
    "an object with a tensor": (lambda: OpensBags(Bags), (X,)),
    "fills an object": (lambda: WithBag(Fills), (X,)),
    "a list of the caller's": (lambda: PassesOn(Passes), (X,)),
    "asks for signatures": (lambda: Inspects(Keywords), (X,)),
    "a branch inside": (lambda: Deep(Branches), (X,)),
    "inside of a branch": (lambda: Branching(Layer), (X,)),
    "a transform inside": (lambda: Deep(Maps), (X,)),
    "random numbers that one reads": (lambda: ReadsOnce(DropsMore), (X,)),
    "nothing reads one": (lambda: ReadsSome(Drops), (X,)),
    "one with a hook": (hooked, (X,)),
    "one in evaluation": (evaluated, (X,)),
    "one with another forward": (patched, (X,)),
    "one with other strides": (strided, (X,)),
}
