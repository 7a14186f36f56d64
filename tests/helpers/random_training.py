"""A random training run: sizes, dtypes, splits, the optimizer, and the step at which it is saved.

A `Case` is plain data, so that ranks in other processes build the same model from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from checks import whole
from hypothesis import strategies as st
from torch import Tensor, nn, optim
from torch.optim import Optimizer

import partway as pw

FLOATS = ["float64", "float32", "bfloat16", "float16"]
OTHERS = ["int64", "int32", "uint8", "bool", "complex64"]
ROWS = 16

EPS = 1e-3  # representable in float16

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": optim.SGD,
    "momentum": partial(optim.SGD, momentum=0.9, nesterov=True),
    "adam": partial(optim.Adam, eps=EPS),
    "amsgrad": partial(optim.AdamW, eps=EPS, amsgrad=True),
    "adagrad": partial(optim.Adagrad, eps=EPS),
    "rmsprop": partial(optim.RMSprop, eps=EPS, momentum=0.5, centered=True),
    "adamax": partial(optim.Adamax, eps=EPS),
    "nadam": partial(optim.NAdam, eps=EPS),
    "radam": partial(optim.RAdam, eps=EPS),
    "adadelta": partial(optim.Adadelta, eps=EPS),
    "asgd": optim.ASGD,
    "rprop": optim.Rprop,
    "lbfgs": lambda p, lr, foreach: optim.LBFGS(p, lr=lr, max_iter=2, history_size=2),
}


@dataclass(frozen=True)
class Mesh:
    """The mesh on which a model is trained; with `axes` None, without Partway. `plan`: the axes that split each dim of
    each parameter; `batch`: those that split the rows of the batch."""

    axes: dict[str, int] | None
    plan: dict[str, tuple[Any, ...]]
    batch: Any

    def shard(self, model: nn.Module) -> Any:
        """The model, on this mesh."""
        if self.axes is None:
            return model
        return pw.shard(model, mesh=self.axes, parameter_plan=self.plan, in_strategy=((self.batch,), (self.batch,)))


@dataclass(frozen=True)
class Case:
    """A run that is saved on mesh `one` after `steps` steps, and loaded on mesh `other` after `late` steps of another
    run."""

    sizes: tuple[int, int, int]  # vocabulary, width, hidden
    dtypes: dict[str, str]  # of the parameters
    buffers: tuple[tuple[str, tuple[int, ...], bool], ...]  # dtype, shape, persistent
    tied: bool
    frozen: bool
    optimizer: str
    foreach: bool | None
    groups: int
    one: Mesh
    other: Mesh
    steps: int
    late: int
    asynchronous: bool


class Net(nn.Module):
    """A model that computes in float64, whatever the dtypes of its parameters are."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        vocabulary, width, hidden = case.sizes
        self.embed = nn.Embedding(vocabulary, width)
        self.inner = nn.Linear(width, hidden)
        self.norm = nn.BatchNorm1d(hidden).double()
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(hidden, width)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Parameter(torch.randn(width, hidden))  # never gets a gradient
        self.empty = nn.Parameter(torch.empty(0, width))
        self.out = nn.Linear(width, vocabulary, bias=False)
        for name, dtype in case.dtypes.items():
            parameter = self.get_parameter(name)
            parameter.data = parameter.data.to(getattr(torch, dtype))
        if case.tied:
            self.out.weight = self.embed.weight
        self.inner.bias.requires_grad_(not case.frozen)
        for i, (dtype, shape, persistent) in enumerate(case.buffers):
            self.register_buffer(f"kept{i}", any_bits(getattr(torch, dtype), shape), persistent)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        inner = nn.functional.linear(self.embed(x).double(), self.inner.weight.double(), self.inner.bias.double())
        hidden = self.drop(self.norm(inner)).tanh()
        made = nn.functional.linear(hidden, self.head.weight.double(), self.head.bias.double())
        scores = nn.functional.linear(made * self.scale.double(), self.out.weight.double())
        return nn.functional.cross_entropy(scores, y)


def shapes_of(sizes: tuple[int, int, int]) -> dict[str, tuple[int, ...]]:
    """The shapes of the parameters of a `Net`."""
    vocabulary, width, hidden = sizes
    return {
        "embed.weight": (vocabulary, width), "inner.weight": (hidden, width), "inner.bias": (hidden,),
        "head.weight": (width, hidden), "head.bias": (width,), "scale": (), "unused": (width, hidden),
        "empty": (0, width), "out.weight": (vocabulary, width),
    }  # fmt: skip


def any_bits(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Values with random bits, among them NaN with payloads, infinities and negative zeros."""
    if dtype is torch.bool:
        return torch.rand(shape) < 0.5
    bits = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8)
    return bits.view(dtype).reshape(shape)


def made(case: Case, mesh: Mesh, seed: int) -> tuple[Any, Optimizer]:
    """A model on a mesh and its optimizer, with values and options computed from the seed."""
    torch.manual_seed(seed)
    model = mesh.shard(Net(case))
    parameters = [p for p in model.parameters() if p.requires_grad]
    cut = len(parameters) // case.groups
    groups = [{"params": parameters[:cut]}] if case.groups == 1 else [
        {"params": parameters[:cut], "lr": 0.02 + seed}, {"params": parameters[cut:]}
    ]  # fmt: skip
    return model, OPTIMIZERS[case.optimizer](groups, lr=0.01 + seed, foreach=case.foreach)


def train(case: Case, model: Any, optimizer: Optimizer, steps: range) -> Tensor:
    """The losses of several steps, each with its own batch."""
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x, y = (torch.randint(0, case.sizes[0], (ROWS,), generator=generator) for _ in range(2))

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(x, y)
            loss.backward()
            return loss

        losses.append(optimizer.step(closure).item())
    return torch.tensor(losses, dtype=torch.float64)


def state_of(model: Any, optimizer: Optimizer) -> dict[str, Any]:
    """Everything that a checkpoint has to save, as whole tensors, by name."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        assert all(id(parameter) in names for parameter in group["params"])
    states = {names[id(p)]: whole(dict(state)) for p, state in optimizer.state.items()}
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    held = {name: whole(tensor.detach()).clone() for name, tensor in model.state_dict(keep_vars=True).items()}
    return {"model": held, "optimizer": _copied(states), "groups": groups}


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_copied(part) for part in value]
    return value.clone() if isinstance(value, Tensor) else value


def assert_same_bits(found: Any, expected: Any, where: str = "") -> None:
    """Check that tensors have the same dtype, shape and bits, and that all other values are equal."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key in expected:
            assert_same_bits(found[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), where
        for i, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same_bits(one, other, f"{where}.{i}")
    elif isinstance(expected, Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), where
        one, other = (t.contiguous().reshape(-1).view(torch.uint8) for t in (found, expected))
        assert torch.equal(one, other), f"{where}: {found} instead of {expected}"
    else:
        assert found == expected, where


def saved(folder: str, case: Case) -> tuple[dict[str, Any], Tensor]:
    """Train and save. Return the saved state, and the losses of two more steps."""
    model, optimizer = made(case, case.one, seed=0)
    train(case, model, optimizer, range(case.steps))
    saving: Any = pw.save(folder, model, optimizer, asynchronous=case.asynchronous)
    state = state_of(model, optimizer)
    losses = train(case, model, optimizer, range(case.steps, case.steps + 2))
    if case.asynchronous:
        saving.wait()
    return state, losses


def loaded(folder: str, case: Case) -> tuple[dict[str, Any], Tensor]:
    """Load into a model with other values. Return the loaded state, and the losses of two more steps."""
    model, optimizer = made(case, case.other, seed=1)
    train(case, model, optimizer, range(7, 7 + case.late))
    own = {name: buffer.clone() for name, buffer in model.named_buffers() if name not in model.state_dict()}
    pw.load(folder, model, optimizer)
    assert_same_bits({name: model.get_buffer(name) for name in own}, own)
    return state_of(model, optimizer), train(case, model, optimizer, range(case.steps, case.steps + 2))


# -- Strategies of hypothesis


@st.composite
def meshes(draw: Any, axes: st.SearchStrategy[Any], shapes: dict[str, tuple[int, ...]]) -> Mesh:
    """A mesh, and the dims that it splits."""
    sizes = draw(axes)
    names = list(sizes or ())

    def strategy(shape: tuple[int, ...]) -> tuple[Any, ...]:
        """Assign each axis to one dim, or to none. Two may share a dim that they divide, since a DTensor requires
        that."""
        places = [draw(st.sampled_from([None, *(dim for dim, size in enumerate(shape) if size > 1)])) for _ in names]
        split: list[Any] = []
        for dim, size in enumerate(shape):
            mine = tuple(name for name, at in zip(names, places, strict=True) if at == dim)
            together = len(mine) > 1 and size % math.prod(sizes[axis] for axis in mine) == 0
            split.append(mine if together else mine[0] if mine else None)
        return tuple(split)

    plan = {name: strategy(shape) for name, shape in shapes.items() if draw(st.booleans())}
    return Mesh(sizes, plan, draw(st.sampled_from([None, *names])))


@st.composite
def cases(
    draw: Any, one: st.SearchStrategy[Any], other: st.SearchStrategy[Any], optimizers: Collection[str] = OPTIMIZERS
) -> Case:
    """Cases saved on a mesh with axes of `one` and loaded on one with axes of `other`; if these are equal, often on the
    same mesh."""
    size = st.sampled_from([1, 2, 3, 4, 5, 7, 8, 11, 13])
    sizes = draw(st.sampled_from([2, 3, 5, 8, 13])), draw(size), draw(size)
    tied = draw(st.booleans())
    shapes = {name: shape for name, shape in shapes_of(sizes).items() if not (tied and name == "out.weight")}
    buffer_shapes = st.lists(st.sampled_from([0, 1, 2, 3, 5]), max_size=3).map(tuple)
    buffers = st.lists(st.tuples(st.sampled_from(FLOATS + OTHERS), buffer_shapes, st.booleans()), max_size=3)
    mesh, others = draw(meshes(one, shapes)), meshes(other, shapes)
    optimizer = draw(st.sampled_from(list(optimizers)))
    return Case(
        sizes=sizes, dtypes={name: draw(st.sampled_from(FLOATS)) for name in shapes if draw(st.booleans())},
        buffers=tuple(draw(buffers)), tied=tied, frozen=draw(st.booleans()), optimizer=optimizer,
        foreach=draw(st.sampled_from([None, False, True])),
        groups=1 if optimizer == "lbfgs" else draw(st.sampled_from([1, 2])),
        one=mesh, other=draw(st.one_of(st.just(mesh), others) if other is one else others),
        steps=draw(st.integers(0, 2)), late=draw(st.integers(0, 1)), asynchronous=draw(st.booleans()),
    )  # fmt: skip
