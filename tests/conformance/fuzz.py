"""Random programs, split randomly over simulated ranks, and compared with one device.

    python tests/conformance/fuzz.py --programs 10000 --seed 0
    python tests/conformance/fuzz.py --programs 1 --seed 4711 --shrink     one program, minimized if it fails

A program is a small module generated from a seed: its arguments (with strides of all kinds), parameters, submodules,
and a few lines of Python. It comes with a mesh, annotations, options and a way of training. Outputs, the gradients of
arguments and parameters, and updated parameters and buffers have to equal those of one device, in float64. An error of
Partway is a refusal, counted by its message. Any other error is a failure if plain PyTorch raises none, and so is a
wrong number. A failure is minimized (lines, annotations, options, sizes) and printed as a program to paste into a test.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import faulthandler
import linecache
import logging
import math
import multiprocessing
import random
import re
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import partway as pw
from partway.strategy.errors import PartwayError

SECONDS = 60  # of computing, for one program
MOST = 4096  # elements of one tensor
TOLERANCE = 1e-9
COARSE = {"float32": 2e-4, ".float()": 2e-4, "bfloat16": 0.1}  # of programs that cast to these


# -- Vocabulary of programs --------------------------------------------------------------------------------------------


@dataclass
class _Now:
    """The running step, which has its own arguments, and whether it runs on one device."""

    step: int = 0
    plain: bool = False
    sizes: Mapping[int, Sequence[int]] = field(default_factory=dict)

    def shape(self, shape: Sequence[int]) -> list[int]:
        """`shape` at this step."""
        return [self.sizes[n][self.step] if n in self.sizes else n for n in shape]


_now = _Now()


def T(shape: Sequence[int], seed: int) -> Tensor:
    """Normal random numbers."""
    return torch.randn(_now.shape(shape), generator=torch.Generator().manual_seed(1000 * _now.step + seed))


def I(high: int, shape: Sequence[int], seed: int) -> Tensor:  # noqa: E743
    """Integers below `high`."""
    return torch.randint(high, _now.shape(shape), generator=torch.Generator().manual_seed(1000 * _now.step + seed))


def P(shape: Sequence[int], seed: int) -> nn.Parameter:
    """A parameter."""
    return nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / 2)


def C(value: Tensor, strategy: tuple[Any, ...]) -> Tensor:
    """A constraint inside the program; the identity on one device."""
    return value if _now.plain else pw.shard(lambda x: x, (strategy,))(value)


NAMES = {"torch": torch, "nn": nn, "F": F, "checkpoint": checkpoint, "T": T, "I": I, "P": P, "C": C}


# -- A program ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Argument:
    """An argument of forward: an expression for it, and whether it needs a gradient."""

    name: str
    text: str
    grad: bool = False


@dataclass(frozen=True)
class Line:
    """A line of forward, and the names of its values."""

    names: tuple[str, ...]
    text: str


@dataclass(frozen=True)
class Setting:
    """How a program is split and trained. `mesh`: a dict of axis sizes, or the number of devices.

    sizes       the size that replaces a size of arguments, at each step
    one         whether the reference is Partway on a mesh of one, whose random numbers and parts of BatchNorm are the
                same on every mesh; otherwise it is plain PyTorch
    cotangent   the strides of the gradients passed to backward
    """

    mesh: Any = field(default_factory=lambda: {"a": 2})
    in_strategy: Mapping[str, Any] | None = None
    out_strategy: tuple[Any, ...] | None = None
    parameter_plan: Mapping[str, Any] | None = None
    module_plan: Mapping[str, Any] | None = None
    level: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    algo: Mapping[str, Any] = field(default_factory=dict)
    training: bool = True
    grad: bool = True
    steps: int = 1
    optimizer: str = ""
    accumulate: bool = False
    cotangent: str = "contiguous"
    sizes: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    one: bool = False

    def __str__(self) -> str:
        default = Setting()
        said = {f.name: getattr(self, f.name) for f in fields(self)}
        return ", ".join(f"{n}={v!r}" for n, v in said.items() if n == "mesh" or v != getattr(default, n))


@dataclass(frozen=True)
class Program:
    """`members` are the attributes of `self`: names, and expressions for them. A scalar that is returned first is the
    loss."""

    arguments: tuple[Argument, ...]
    members: tuple[tuple[str, str], ...]
    lines: tuple[Line, ...]
    outputs: tuple[str, ...]
    setting: Setting

    def __str__(self) -> str:
        members = [f"        self.{name} = {text}" for name, text in self.members]
        named = ", ".join(a.name for a in self.arguments)
        given = [f"    {a.name} = {a.text}" + (".detach().requires_grad_()" if a.grad else "") for a in self.arguments]
        return "\n".join(
            [
                "class Model(nn.Module):",
                "    def __init__(self):",
                "        super().__init__()",
                *members,
                "",
                f"    def forward(self, {named}):",
                *(f"        {line.text}" for line in self.lines),
                f"        return {', '.join(self.outputs)}" + ("," if len(self.outputs) == 1 else ""),
                "",
                "def arguments():",
                *given,
                f"    return {named},",
            ]
        )

    def as_test(self) -> str:
        """A program to paste into a test: it is right if `difference` is ''."""
        return f"{self}\n\nassert fuzz.difference(Model, arguments, fuzz.Setting({self.setting})) == ''\n"

    @property
    def tolerance(self) -> float:
        return max((COARSE[name] for name in COARSE if name in str(self)), default=TOLERANCE)


def made(program: Program) -> tuple[type[nn.Module], Callable[[], tuple[Tensor, ...]]]:
    """The class and the arguments of a program."""
    text = str(program)
    file = f"<fuzz {abs(hash(text))}>"
    linecache.cache[file] = (len(text), None, [line + "\n" for line in text.split("\n")], file)
    space: dict[str, Any] = {**NAMES, "__name__": "fuzzed"}
    exec(compile(text, file, "exec"), space)
    return space["Model"], space["arguments"]


# -- Two runs of it ----------------------------------------------------------------------------------------------------

Values = dict[str, Tensor | None]


def _cotangent(kind: str, output: Tensor, seed: int) -> Tensor:
    """The gradient of an output, with its own strides."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "expanded":
        return torch.randn((), generator=generator).to(output.dtype).expand(output.shape)
    shape = output.shape[::-1] if kind == "transposed" else output.shape
    gradient = torch.randn(shape, generator=generator, dtype=torch.float64).to(output.dtype)
    if kind == "transposed":
        return gradient.permute(*reversed(range(output.dim())))
    if kind == "stepped" and output.dim():
        return torch.stack([gradient, gradient], -1).flatten(-2)[..., ::2]
    return gradient


def _backward(outputs: Sequence[Any], kind: str) -> None:
    able = [o for o in outputs if isinstance(o, Tensor) and o.requires_grad]
    if outputs and isinstance(outputs[0], Tensor) and not outputs[0].shape:
        able = [o for o in able if not o.shape]
        torch.autograd.backward(able)
    elif able:
        torch.autograd.backward(able, [_cotangent(kind, o, i) for i, o in enumerate(able)])


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3),
}


def trained(model: nn.Module, arguments: Callable[[], tuple[Tensor, ...]], setting: Setting) -> Iterator[Values]:
    """The outputs, the gradients and the arguments after each step; finally the parameters and buffers."""
    parameters = list(model.parameters())
    optimizer = OPTIMIZERS[setting.optimizer](parameters) if setting.optimizer and parameters else None
    _now.sizes = setting.sizes
    for step in range(setting.steps):
        _now.step = step
        given = arguments()
        torch.manual_seed(step)
        held = setting.accumulate and step + 1 < setting.steps and hasattr(model, "no_sync")
        with torch.set_grad_enabled(setting.grad), model.no_sync() if held else contextlib.nullcontext():  # type: ignore[operator]
            outputs = model(*given)
            if setting.grad:
                _backward(outputs, setting.cotangent)
        found: Values = {f"output {i}": o.detach() if isinstance(o, Tensor) else o for i, o in enumerate(outputs)}
        found |= {f"gradient of argument {i}": t.grad for i, t in enumerate(given) if t.requires_grad}
        found |= {f"argument {i}": t.detach() for i, t in enumerate(given)}
        if not held and (not setting.accumulate or step + 1 == setting.steps):
            found |= {f"gradient of {n}": _copy(p.grad) for n, p in model.named_parameters()}
            if optimizer is not None:
                optimizer.step()
            if not setting.accumulate:
                model.zero_grad()
        yield {f"step {step}, {name}": value for name, value in found.items()}
    yield {name: t.detach().clone() for name, t in model.state_dict().items()}


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()


def _together(parts: Iterator[Values]) -> Values:
    return {name: value for part in parts for name, value in part.items()}


@contextlib.contextmanager
def _alone(plain: bool, dtype: torch.dtype = torch.float64) -> Iterator[None]:
    """Default options and float64 inside the block; the earlier settings afterwards."""
    before = torch.get_default_dtype()
    pw.reset_auto_parallel_context()
    pw.reset_algo_parameters()
    _now.plain = plain
    torch.set_default_dtype(dtype)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_default_dtype(before)
        _now.plain, _now.sizes = False, {}
        pw.reset_auto_parallel_context()
        pw.reset_algo_parameters()


def _model(build: type[nn.Module], setting: Setting) -> nn.Module:
    torch.manual_seed(7)
    return build().train(setting.training)


def on_one_device(build: type[nn.Module], arguments: Callable[[], tuple[Tensor, ...]], setting: Setting) -> Values:
    with _alone(plain=True):
        model = _model(build, setting)
        if setting.one:
            parts = {n: v for n, v in setting.options.items() if n in ("random_numbers", "batch_norm_parts")}
            pw.set_auto_parallel_context(**parts)
            model = pw.shard(model, mesh={"one": 1})
        return _together(trained(model, arguments, setting))


def split(build: type[nn.Module], arguments: Callable[[], tuple[Tensor, ...]], setting: Setting) -> Values:
    with _alone(plain=False):
        model = _model(build, setting)
        devices = setting.mesh if isinstance(setting.mesh, int) else math.prod(setting.mesh.values())
        pw.set_auto_parallel_context(device_num=devices, **setting.options)
        pw.set_algo_parameters(**setting.algo)
        sharded = pw.shard(
            model,
            setting.in_strategy,
            setting.out_strategy,
            parameter_plan=setting.parameter_plan,
            module_plan=setting.module_plan,
            mesh=None if isinstance(setting.mesh, int) else setting.mesh,
            level=setting.level,
        )
        return _together(trained(sharded, arguments, setting))


def unlike(found: Values, expected: Values, tolerance: float) -> str:
    if list(found) != list(expected):
        return f"{sorted(set(found) ^ set(expected))} on one side only"
    exact = [t for t in expected.values() if isinstance(t, Tensor) and t.is_floating_point() and t.numel()]
    largest = max((t.double().norm().item() for t in exact), default=0.0)
    worst = {}
    for name, value in expected.items():
        other = found[name]
        if not isinstance(value, Tensor) or not isinstance(other, Tensor):
            if _zero(value) and _zero(other):
                continue  # PyTorch has no gradient where Partway has zeros, or the other way round
            if isinstance(value, Tensor) or isinstance(other, Tensor) or value != other:
                return f"{name} is {_said(other)}, not {_said(value)}"
            continue
        if (other.shape, other.dtype) != (value.shape, value.dtype):
            return f"{name} is {_said(other)}, not {_said(value)}"
        kind = torch.complex128 if value.is_complex() else torch.float64
        a, b = (t.to(kind).nan_to_num(1e4, 1e5, -1e5) for t in (other, value))
        error, allowed = (a - b).norm().item(), tolerance * (b.norm().item() + 1e-3 * largest)
        if error > allowed:
            worst[name] = f"{name} is off by {error:.1e} of {b.norm().item():.1e}"
    return next(iter(worst.values()), "")


def _zero(value: Any) -> bool:
    return value is None or (isinstance(value, Tensor) and not value.count_nonzero())


def _said(value: Any) -> str:
    return f"{value.dtype}{list(value.shape)}" if isinstance(value, Tensor) else repr(value)


def difference(
    build: type[nn.Module],
    arguments: Callable[[], tuple[Tensor, ...]],
    setting: Setting,
    tolerance: float = TOLERANCE,
) -> str:
    """The first difference from one device, '' if there is none. Raises the errors of `shard` and of its calls."""
    expected = on_one_device(build, arguments, setting)
    return unlike(split(build, arguments, setting), expected, tolerance)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a program: right, refused, wrong, foreign (an error that is not Partway's), slow, or void (plain
    PyTorch cannot run it, or its result depends on rounding)."""

    kind: str
    reason: str = ""

    @property
    def failed(self) -> bool:
        return self.kind in ("wrong", "foreign", "slow")

    def alike(self, other: Outcome) -> bool:
        """Whether both fail in the same way."""
        first, second = (re.sub(r"\d+", "#", o.reason.split("\n")[0])[:60] for o in (self, other))
        return self.failed and self.kind == other.kind and (self.kind == "wrong" or first == second)


class _Late(BaseException):
    pass


def _ring(*_: Any) -> None:
    raise _Late


def checked(program: Program) -> Outcome:
    """Run a program on one device and split, and compare."""
    build, arguments = made(program)
    try:
        expected = on_one_device(build, arguments, program.setting)
    except PartwayError as error:
        return Outcome("refused", _reason(error))
    except Exception as error:
        return Outcome("void", f"{type(error).__name__}: {error}")
    signal.signal(signal.SIGVTALRM, _ring)
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    try:
        found = split(build, arguments, program.setting)
    except PartwayError as error:
        return Outcome("refused", _reason(error))
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        return Outcome("foreign", f"{type(error).__name__}: {error} ({last.filename.split('/')[-1]}:{last.lineno})")
    except _Late:
        return Outcome("slow", f"not done after {SECONDS} s")
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    off = unlike(found, expected, program.tolerance)
    if not off:
        return Outcome("right")
    return Outcome("void", "rounding decides") if _shaky(program, expected) else Outcome("wrong", off)


def _shaky(program: Program, expected: Values) -> bool:
    """Whether tiny changes of the arguments cause much larger changes on one device."""
    build, arguments = made(program)
    noise, tiny = torch.Generator().manual_seed(0), 1e-3 * program.tolerance

    def moved() -> tuple[Tensor, ...]:
        return tuple(
            (t.detach() * (1 + tiny * torch.rand(t.shape, generator=noise))).requires_grad_(t.requires_grad)
            if t.is_floating_point()
            else t
            for t in arguments()
        )

    return bool(unlike(on_one_device(build, moved, program.setting), expected, program.tolerance))


def _reason(error: PartwayError) -> str:
    """The message of an error, without names and numbers."""
    lines = [line.strip(" -") for line in str(error).splitlines() if line.strip()]
    text = " | ".join(lines[:2])
    return f"{type(error).__name__}: " + re.sub(r"\b[vxpm]?\d+\b|\[[^]]*\]", "#", text)[:160]


# -- Random programs ---------------------------------------------------------------------------------------------------

SIZES = (1, 2, 2, 3, 4, 4, 5, 6, 7, 8, 8, 8, 11, 12, 13, 16)
SIDES = (1, 3, 4, 5, 6, 7, 8, 9, 12, 16)


class Writer:
    """Writes a program line by line. Each line is run at once on one device, so that every shape is known."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.model = nn.Module()
        self.arguments: list[Argument] = []
        self.members: list[tuple[str, str]] = []
        self.lines: list[Line] = []
        self.values: dict[str, Tensor] = {}
        self.mesh = self.random.choice(MESHES)
        self._counts: collections.Counter[str] = collections.Counter()

    # names

    def name(self, letter: str) -> str:
        self._counts[letter] += 1
        return f"{letter}{self._counts[letter] - 1}"

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def one(self, *choices: Any) -> Any:
        return self.random.choice(choices)

    def size(self) -> int:
        return 0 if self.chance(0.004) else self.random.choice(SIZES)

    def number(self) -> int:
        return self.random.randrange(1, 1000)

    # values

    def argument(self, shape: Sequence[int] | None = None, text: str = "", grad: bool | None = None) -> str:
        """A new argument."""
        name = self.name("x")
        shape = tuple(self.size() for _ in range(self.one(1, 2, 2, 3, 3, 4, 4))) if shape is None else tuple(shape)
        if not text:
            while math.prod(shape) > MOST // 2:
                shape = tuple(max(1, n // 2) for n in shape)
            text = self.strided(shape)
            grad = self.chance(0.7) if grad is None else grad
        value = eval(text, dict(NAMES))
        argument = Argument(name, text, bool(grad))
        self.arguments.append(argument)
        self.values[name] = value.detach().requires_grad_(argument.grad)
        return name

    def strided(self, shape: tuple[int, ...]) -> str:
        """An expression for a tensor of `shape`, in one of many memory formats."""
        seed, kind = self.number(), self.random.random()
        if kind < 0.5 or not shape or 0 in shape:
            return f"T({shape}, {seed})"
        if kind < 0.6:
            order = self.random.sample(range(len(shape)), len(shape))
            inner = tuple(shape[order.index(d)] for d in range(len(shape)))
            return f"T({inner}, {seed}).permute({tuple(order)})"
        if kind < 0.7 and len(shape) == 4:
            return f"T({shape}, {seed}).contiguous(memory_format=torch.channels_last)"
        if kind < 0.8:
            dim = self.random.randrange(len(shape))
            small = tuple(1 if d == dim else n for d, n in enumerate(shape))
            return f"T({small}, {seed}).expand({shape})"
        if kind < 0.9:
            dim = self.random.randrange(len(shape))
            large = tuple(2 * n if d == dim else n for d, n in enumerate(shape))
            steps = ", ".join("::2" if d == dim else ":" for d in range(len(shape)))
            return f"T({large}, {seed})[{steps}]"
        strides, at = [], 1
        for n in reversed(shape):
            strides.insert(0, at + self.one(0, 0, 1))
            at = strides[0] * n
        return f"T(({at + 4},), {seed}).as_strided({shape}, {tuple(strides)}, {self.one(0, 3)})"

    def tensor(self, dims: Sequence[int] = (), test: Callable[[Tensor], bool] = lambda t: True) -> str:
        """A floating-point value with one of these numbers of dims, preferably a late one, or a new argument if there
        is none."""
        fits = [
            name
            for name, t in self.values.items()
            if t.is_floating_point() and (not dims or t.dim() in dims) and test(t)
        ]
        if fits and self.chance(0.93):
            at = max(self.random.randrange(len(fits)), self.random.randrange(len(fits)))
            return fits[at]
        for _ in range(20):
            sizes = [self.size() for _ in range(self.one(*(dims or (1, 2, 3, 4))))]
            while math.prod(sizes) > MOST // 2:
                sizes = [max(1, n // 2) for n in sizes]
            if test(torch.empty(sizes)):
                return self.argument(sizes)
        raise Unfit

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.values[name].shape)

    def dim(self, name: str) -> int:
        """One of its dims, counted from the front or the back."""
        n = self.values[name].dim()
        if not n:
            raise Unfit
        return self.random.randrange(-n, n)

    def like(self, name: str) -> str:
        """A value of the same shape: a value of the program, a parameter, or an argument."""
        shape = self.shape(name)
        fits = [n for n, t in self.values.items() if tuple(t.shape) == shape and t.is_floating_point()]
        if self.chance(0.7):
            return str(self.random.choice(fits))
        return self.parameter(shape) if self.chance(0.5) else self.argument(shape)

    def broadcast(self, name: str) -> str:
        """A value that broadcasts to its shape."""
        shape = self.shape(name)
        sizes = [1 if self.chance(0.4) else n for n in shape[self.random.randrange(len(shape) + 1) :]]
        return self.parameter(sizes) if self.chance(0.6) else self.argument(sizes)

    def parameter(self, shape: Sequence[int]) -> str:
        same = [n for n, _ in self.members if n[0] == "p" and tuple(getattr(self.model, n).shape) == tuple(shape)]
        if same and self.chance(0.3):
            return "self." + self.random.choice(same)  # tied
        return self.member("p", f"P({tuple(shape)}, {self.number()})")

    def member(self, letter: str, text: str) -> str:
        name = self.name(letter)
        setattr(self.model, name, eval(text, dict(NAMES)))
        self.members.append((name, text))
        return f"self.{name}"

    # lines

    def add(self, text: str, names: Sequence[str]) -> None:
        """Add a line if it runs, its value is not too large, and its numbers stay small."""
        space = {**NAMES, **self.values, "self": self.model}
        before = {n: (t, t._version) for n, t in self.values.items()}
        exec(text, space)
        found = {name: space[name] for name in names}
        for value in found.values():
            if not isinstance(value, Tensor) or value.numel() > MOST or value.dim() > 6:
                raise Unfit
            if value.is_floating_point() and value.numel() and not value.detach().abs().max() < 100:
                raise Unfit
        if any(t._version != version for t, version in before.values()):
            raise Unfit  # arguments are written by lines of their own kind
        self.values |= found
        self.lines.append(Line(tuple(names), text))

    def statement(self) -> None:
        """Try kinds of lines until one is possible."""
        for _ in range(30):
            kept = (len(self.arguments), len(self.members), dict(self.values))
            try:
                made = self.random.choices(KINDS, WEIGHTS)[0](self)
                text, count = made if isinstance(made, tuple) else (made, 1)
                names = [self.name("v") for _ in range(count)]
                if ";" in text or "\n" in text:
                    text = text.replace("OUT", names[0])
                else:
                    text = f"{', '.join(names)} = {text}"
                self.add(text, names)
                return
            except Exception as error:
                if not isinstance(error, Unfit | RuntimeError | ValueError | IndexError | TypeError):
                    raise
                for argument in self.arguments[kept[0] :]:
                    kept[2].pop(argument.name, None)
                del self.arguments[kept[0] :], self.members[kept[1] :]
                self.values = kept[2]


class Unfit(Exception):
    """This kind of line is not possible here."""


# Kinds of lines: the expression of a line, and its number of values, if it is not one.

KINDS: list[Callable[[Writer], Any]] = []
WEIGHTS: list[int] = []


def kind(weight: int) -> Callable[[Callable[[Writer], Any]], Callable[[Writer], Any]]:
    def add(make: Callable[[Writer], Any]) -> Callable[[Writer], Any]:
        KINDS.append(make)
        WEIGHTS.append(weight)
        return make

    return add


@kind(6)
def _pointwise(w: Writer) -> str:
    x = w.tensor()
    form = w.one(
        "torch.relu({})", "{}.tanh()", "F.gelu({})", "torch.sigmoid({})", "{}.sin()", "F.silu({})", "{}.abs()", "-{}",
        "{} * 2", "1 - {}", "{}.square() / 4", "F.leaky_relu({}, 0.1)", "{}.clamp(-1, 1)", "({} > 0).double()",
        "F.softplus({})", "{}.exp().clamp(max=8)", "{}.double()", "{}.detach()", "F.hardtanh({})", "F.elu({})",
        "{}.contiguous()", "{}.clone()", "torch.zeros_like({})", "{}.sign()", "{} / 3", "torch.rsqrt({}.abs() + 1)",
    )  # fmt: skip
    return str(form).format(x)


@kind(8)
def _binary(w: Writer) -> str:
    x = w.tensor()
    y = w.like(x) if w.chance(0.5) else w.broadcast(x)
    form = w.one(
        "{} + {}", "{} * {}", "{} - {}", "torch.maximum({}, {})", "torch.lerp({}, {}, 0.3)", "{} / ({}.abs() + 1)",
        "torch.add({}, {}, alpha=2)", "torch.where({} > 0, {}, 0.0)", "torch.addcmul({0}, {1}, {0})",
        "torch.atan2({}, {}.abs() + 1)", "torch.hypot({}, {})",
    )  # fmt: skip
    return str(form).format(*((x, y) if w.chance(0.7) else (y, x)))


@kind(7)
def _rearranged(w: Writer) -> str:
    x = w.tensor((1, 2, 3, 4, 5))
    n = len(w.shape(x))
    choice = w.random.randrange(12)
    if choice < 3:
        return f"{x}.transpose({w.dim(x)}, {w.dim(x)})"
    if choice < 6:
        return f"{x}.permute({tuple(w.random.sample(range(n), n))})"
    if choice == 6:
        return f"{x}.movedim({w.dim(x)}, {w.dim(x)})"
    if choice == 7:
        return f"{x}.flip({w.dim(x)})"
    if choice == 8:
        return f"{x}.roll({w.one(1, -1, 2)}, {w.dim(x)})"
    if choice == 9:
        return f"{x}.mT" if n > 1 else f"{x}.t()"
    if choice == 10:
        return f"torch.rot90({x}, {w.one(1, 2)}, ({0}, {n - 1}))"
    return f"{x}.transpose({w.dim(x)}, {w.dim(x)}).contiguous()"


@kind(7)
def _viewed(w: Writer) -> str:
    x = w.tensor()
    shape = w.shape(x)
    choice = w.random.randrange(12)
    if choice < 3:
        at = w.random.randrange(len(shape) + 1)
        return f"{x}.unsqueeze({at})"
    if choice == 3:
        return f"{x}.squeeze()"
    if choice == 4:
        return f"{x}.squeeze({w.dim(x)})"
    if choice < 7 and len(shape) > 1:
        at = w.random.randrange(len(shape) - 1)
        return f"{x}.flatten({at}, {w.random.randrange(at + 1, len(shape))})"
    if choice < 9:
        dim = w.dim(x)
        n = shape[dim]
        parts = [k for k in range(1, n + 1) if n % k == 0]
        k = w.one(*parts)
        return f"{x}.unflatten({dim}, ({k}, {n // k}))"
    if choice == 9:
        return f"{x}.reshape(-1)"
    total = math.prod(shape)
    divisors = [k for k in range(1, total + 1) if total % k == 0]
    a = w.one(*divisors)
    b = w.one(*[k for k in divisors if (total // a) % k == 0])
    method = w.one("reshape", "reshape", "view")
    return f"{x}.{method}({w.one((a, total // a), (a, b, total // a // b))})"


@kind(5)
def _sliced(w: Writer) -> str:
    x = w.tensor((1, 2, 3, 4, 5))
    shape, dim = w.shape(x), w.dim(x) % len(w.shape(x))
    n = shape[dim]
    choice = w.random.randrange(9)
    if choice < 3:
        at = w.random.randrange(n)
        cut = w.one(f"{at}:", f":{at + 1}", f"{at}", "::2", f"{-at - 1}", "None", f"{at}:{at + 1}", "1:-1")
        return f"{x}[{', '.join([':'] * dim + [cut])}]"
    if choice == 3:
        at = w.random.randrange(n)
        return f"{x}.narrow({dim}, {at}, {w.random.randrange(1, n - at + 1)})"
    if choice == 4:
        return f"{x}.select({dim}, {w.random.randrange(n)})"
    if choice == 5:
        return f"{x}[..., {w.random.randrange(shape[-1])}]"
    if choice == 6:
        size = w.random.randrange(1, n + 1)
        return f"{x}.unfold({dim}, {size}, {w.one(1, 2, size)})"
    if choice == 7:
        return f"{x}.diagonal({w.one(0, 1)}, {w.dim(x)}, {w.dim(x)})"
    return f"torch.tril({x})" if w.chance(0.5) else f"torch.triu({x}, 1)"


@kind(4)
def _parts(w: Writer) -> tuple[str, int]:
    x = w.tensor((1, 2, 3, 4))
    dim = w.dim(x)
    n = w.shape(x)[dim]
    choice = w.random.randrange(4)
    if choice == 0 and 1 < n < 5:
        return f"{x}.unbind({dim})", n
    if choice == 1 and n > 1:
        at = w.random.randrange(1, n)
        return f"{x}.split(({at}, {n - at}), {dim})", 2
    k = w.one(2, 3)
    if -(-n // max(1, -(-n // k))) != k:
        raise Unfit
    if choice == 2:
        return f"torch.tensor_split({x}, {k}, {dim})", k
    return f"{x}.chunk({k}, {dim})", k


@kind(4)
def _joined(w: Writer) -> str:
    x = w.tensor((1, 2, 3, 4))
    if w.chance(0.4):
        return f"torch.stack(({x}, {w.like(x)}), {w.dim(x)})"
    dim = w.dim(x) % len(w.shape(x))
    fits = [
        n for n, t in w.values.items()
        if t.is_floating_point() and t.dim() == len(w.shape(x))
        and all(d == dim or t.shape[d] == w.shape(x)[d] for d in range(t.dim()))
    ]  # fmt: skip
    return f"torch.cat(({x}, {w.one(*fits)}{', ' + x if w.chance(0.2) else ''}), {dim})"


@kind(4)
def _spread(w: Writer) -> str:
    x = w.tensor((1, 2, 3, 4))
    shape, choice = w.shape(x), w.random.randrange(6)
    if choice == 0 and 1 in shape:
        wide = [w.size() if n == 1 else w.one(-1, n) for n in shape]
        return f"{x}.expand({tuple(wide)})"
    if choice == 1:
        return f"{x}.expand({w.size()}, {', '.join(map(str, shape))})"
    if choice == 2:
        return f"{x}.repeat({', '.join(str(w.one(1, 1, 2)) for _ in shape)})"
    if choice == 3:
        return f"{x}.repeat_interleave({w.one(2, 3)}, {w.dim(x)})"
    if choice == 4:
        mode = w.one("constant", "reflect", "replicate", "circular")
        if mode == "constant" or len(shape) > 2:
            many = (
                w.random.randrange(1, len(shape)) if mode == "constant" and len(shape) > 1 else max(1, len(shape) - 2)
            )
            pad = tuple(w.one(0, 1, 2) for _ in range(2 * many))
            return f"F.pad({x}, {pad}, mode={mode!r})"
    return f"torch.tile({x}, (2,))"


@kind(6)
def _reduced(w: Writer) -> str:
    x = w.tensor((1, 2, 3, 4, 5))
    name = w.one("sum", "sum", "mean", "mean", "amax", "amin", "logsumexp", "var", "std", "prod", "norm", "argmax")
    dims: Any = w.dim(x)
    if name not in ("prod", "argmax") and w.chance(0.3):
        dims = tuple(w.random.sample(range(len(w.shape(x))), w.random.randrange(1, len(w.shape(x)) + 1)))
    keep = ", keepdim=True" if w.chance(0.4) else ""
    if name == "norm":
        return f"torch.linalg.vector_norm({x} + 2, dim={dims}{keep})"
    if name == "argmax":
        return f"{x}.argmax({dims}{keep}).double()"
    x = f"({x} / 2)" if name == "prod" else x
    correction = ", correction=0" if name in ("var", "std") and w.chance(0.5) else ""
    return f"{x}.{name}(dim={dims}{correction}{keep})"


@kind(5)
def _along(w: Writer) -> str:
    x = w.tensor((1, 2, 3, 4))
    dim = w.dim(x)
    form = w.one(
        "{}.softmax({})", "{}.softmax({})", "{}.log_softmax({})", "({} / 4).cumsum({})",
        "({}.abs() / 4 + 0.5).cumprod({})",
        "{}.cummax({}).values", "{}.sort({}).values", "F.normalize({}, dim={})", "{}.logcumsumexp({})",
        "{}.diff(dim={})", "{}.max({}).values", "{}.median({}).values", "F.softmin({}, {})",
        "torch.fft.rfft({}, dim={}).abs()",
        "{}.renorm(2, {}, 1.5)", "{}.argsort({}).double()",
    )  # fmt: skip
    return str(form).format(x, dim)


@kind(6)
def _projected(w: Writer) -> str:
    x = w.tensor((2, 3, 4))
    n, m = w.shape(x)[-1], w.random.choice(SIZES)
    scale = f"{max(n, 1) ** 0.5:.1f}"
    choice = w.random.randrange(8)
    if choice < 3:
        bias = ", " + w.parameter((m,)) if w.chance(0.5) else ""
        return f"F.linear({x}, {w.parameter((m, n))}{bias}) / {scale}"
    if choice == 3:
        return w.member("m", f"nn.Linear({n}, {m})") + f"({x})"
    if choice == 4:
        return f"{x} @ {w.parameter((n, m))} / {scale}"
    if choice == 5 and len(w.shape(x)) > 2:
        letters = "abcd"[: len(w.shape(x))]
        kept = "".join(w.random.sample(letters, len(letters) - 1))
        return f"torch.einsum('{letters},{letters[-1]}z->{kept}z', {x}, {w.parameter((n, m))}) / {scale}"
    if choice == 6:
        return w.member("m", f"nn.Sequential(nn.Linear({n}, {m}), nn.GELU(), nn.Linear({m}, {n}))") + f"({x})"
    return f"{x} @ {x}.mT / {scale}"


@kind(3)
def _contracted(w: Writer) -> str:
    x = w.tensor((2, 3, 4))
    others = [n for n, t in w.values.items() if t.is_floating_point() and t.dim() == 2 and t.shape[0] == w.shape(x)[-1]]
    y = w.one(*others) if others else w.argument((w.shape(x)[-1], w.random.choice(SIZES)))
    form = w.one(
        "{} @ {}", "torch.matmul({}, {})", "torch.tensordot({}, {}, 1)", "torch.einsum('...i,ij->...j', {}, {})"
    )
    return str(form).format(x, y) + " / 4"


@kind(6)
def _normed(w: Writer) -> str:
    x = w.tensor((2, 3, 4), lambda t: t.numel() > 1)
    shape = w.shape(x)
    choice = w.random.randrange(9)
    if choice < 2:
        tail = shape[w.random.randrange(len(shape)) :]
        weights = f", {w.parameter(tail)}, {w.parameter(tail)}" if w.chance(0.5) else ""
        return f"F.layer_norm({x}, {tail}{weights})"
    if choice < 5 and len(shape) > 2:
        if not w.values[x].requires_grad:
            raise Unfit  # PyTorch's own backward ends the process for images in channels_last without a gradient
        groups = w.one(*[k for k in range(1, shape[1] + 1) if shape[1] % k == 0])
        weights = f", {w.parameter(shape[1:2])}, {w.parameter(shape[1:2])}" if w.chance(0.5) else ""
        return f"F.group_norm({x}, {groups}{weights})"
    if choice == 5:
        return f"F.rms_norm({x}, {shape[-1:]}, {w.parameter(shape[-1:])})"
    if choice == 6 and len(shape) > 2:
        return f"F.instance_norm({x})"
    if choice == 7 and len(shape) > 2:
        return f"F.local_response_norm({x}, 3)"
    number = {2: 1, 3: 1, 4: 2}[len(shape)]
    return w.member("m", f"nn.BatchNorm{number}d({shape[1]})") + f"({x})"


def _images(w: Writer) -> str:
    def fits(t: Tensor) -> bool:
        return min(t.shape) > 0

    fitting = [n for n, t in w.values.items() if t.dim() == 4 and t.is_floating_point() and fits(t)]
    if fitting and w.chance(0.8):
        return str(w.one(*fitting[-3:]))
    return w.argument((w.one(1, 2, 3, 4, 8), w.one(1, 2, 3, 4, 6, 8), w.one(*SIDES), w.one(*SIDES)))


@kind(6)
def _convolved(w: Writer) -> str:
    x = _images(w)
    _, c, h, _ = w.shape(x)
    out, k = w.one(1, 2, 3, 4, 6, 8), w.one(1, 2, 3, 3, 5)
    stride, pad, dilation = w.one(1, 1, 2, 3), w.one(0, 1, k // 2), w.one(1, 1, 1, 2)
    groups = w.one(*[g for g in range(1, c + 1) if c % g == 0 and out % g == 0]) if w.chance(0.3) else 1
    said = f"stride={stride}, padding={pad}, dilation={dilation}, groups={groups}"
    choice = w.random.randrange(6)
    if choice < 2:
        bias = w.parameter((out,)) if w.chance(0.5) else "None"
        return f"F.conv2d({x}, {w.parameter((out, c // groups, k, k))}, {bias}, {said}) / {max(1, k)}"
    if choice == 2:
        mode = w.one("zeros", "reflect", "replicate", "circular")
        return w.member("m", f"nn.Conv2d({c}, {out}, {k}, {said}, padding_mode={mode!r})") + f"({x})"
    if choice == 3:
        extra = w.one(0, stride - 1)
        text = (
            f"nn.ConvTranspose2d({c}, {out}, {k}, {stride}, {min(pad, k - 1)}, output_padding={extra}, groups={groups})"
        )
        return w.member("m", text) + f"({x})"
    if choice == 4:
        return w.member("m", f"nn.Conv1d({c}, {out}, {k}, padding={pad}, groups={groups})") + f"({x}.flatten(2))"
    return f"F.unfold({x}, {k}, padding={pad}, stride={stride})" if h else ""


@kind(4)
def _pooled(w: Writer) -> str:
    x = _images(w)
    k = w.one(2, 2, 3)
    form = w.one(
        f"F.max_pool2d({{}}, {k}, {w.one(1, 2)}, {w.one(0, 1)})",
        f"F.avg_pool2d({{}}, {k}, {w.one(1, 2)}, {w.one(0, 1)})",
        f"F.adaptive_avg_pool2d({{}}, {w.one(1, 2, 3)})", f"F.adaptive_max_pool2d({{}}, {w.one(1, 2)})",
        "F.interpolate({}, scale_factor=2, mode='nearest')",
        f"F.interpolate({{}}, size=({w.one(3, 6)}, {w.one(4, 5)}), mode='bilinear')",
        "F.pixel_unshuffle({}, 2)", "F.pixel_shuffle({}, 2)", f"F.lp_pool2d({{}} + 3, 2, {k})",
        "F.channel_shuffle({}, 2)",
        "F.interpolate({}, scale_factor=2, mode='bicubic', align_corners=True)",
        "F.max_pool2d({}, 3, 2, 1, ceil_mode=True)",
    )  # fmt: skip
    return str(form).format(x)


@kind(4)
def _attended(w: Writer) -> str:
    x = w.tensor((3, 4), lambda t: 0 not in t.shape)
    q = x if w.chance(0.5) else w.like(x)
    n = w.shape(x)[-2]
    more = w.one("", "", ", is_causal=True", f", attn_mask={w.parameter((n, n))}")
    if w.chance(0.25) and len(w.shape(x)) == 3:
        heads = w.one(*[k for k in range(1, w.shape(x)[-1] + 1) if w.shape(x)[-1] % k == 0])
        return (
            w.member("m", f"nn.MultiheadAttention({w.shape(x)[-1]}, {heads}, batch_first=True)") + f"({q}, {x}, {x})[0]"
        )
    return f"F.scaled_dot_product_attention({q}, {x}, {x}{more})"


@kind(5)
def _looked_up(w: Writer) -> str:
    x = w.tensor((1, 2, 3, 4), lambda t: 0 not in t.shape)
    shape, dim = w.shape(x), w.dim(x) % len(w.shape(x))
    n, many = shape[dim], w.random.choice(SIZES)
    choice = w.random.randrange(9)
    if choice == 0:
        return f"F.embedding({w.integers(n_of(w), w.one((many,), (many, 3)))}, {w.parameter((n_of(w), 8))})"
    if choice == 1:
        return f"{x}.index_select({dim}, {w.integers(n, (many,))})"
    if choice == 2:
        sizes = tuple(many if d == dim else k for d, k in enumerate(shape))
        return f"{x}.gather({dim}, {w.integers(n, sizes)})"
    if choice == 3:
        return f"{x}[{', '.join([':'] * dim + [w.integers(n, (many,))])}]"
    if choice == 4:
        other = w.like(x)
        return f"{x}.scatter_add({dim}, {w.integers(n, shape)}, {other})"
    if choice == 5:
        rows = tuple(many if d == dim else k for d, k in enumerate(shape))
        return f"{x}.index_add({dim}, {w.integers(n, (many,))}, {w.argument(rows)})"
    if choice == 6:
        return f"torch.take_along_dim({x}, {x}.argsort({dim}), {dim})"
    if choice == 7:
        return f"{x}.scatter({dim}, {w.integers(n, tuple(1 if d == dim else k for d, k in enumerate(shape)))}, 0.5)"
    return f"{x}.topk({max(1, n // 2)}, {dim}).values"


def n_of(w: Writer) -> int:
    return 11


def _integers(self: Writer, high: int, shape: Sequence[int]) -> str:
    return self.argument(text=f"I({high}, {tuple(shape)}, {self.number()})")


Writer.integers = _integers  # type: ignore[attr-defined]


@kind(4)
def _written(w: Writer) -> str:
    x = w.tensor((1, 2, 3, 4), lambda t: 0 not in t.shape)
    shape, dim = w.shape(x), w.dim(x) % len(w.shape(x))
    at = w.random.randrange(shape[dim])
    place = f"{', '.join([':'] * dim + [w.one(f'{at}', f'{at}:', '::2')])}"
    value = w.one("0.5", f"{x}[{place}].tanh()", f"{x}[{place}] * 2")
    action = w.one(
        f"OUT[{place}] = {value}", f"OUT[{place}] += {value}", f"OUT.mul_({w.like(x)})", "OUT.relu_()", "OUT.neg_()",
        f"OUT[{place}].fill_(0.25)", f"OUT.masked_fill_({x} > 0.5, 0.1)",
        f"OUT.transpose(0, -1).add_({w.like(x)}.transpose(0, -1))",
        f"OUT.copy_({w.like(x)})", f"OUT[{x} > 1] = 0.3", f"OUT.select({dim}, {at}).mul_(3)",
        "OUT.view(-1).clamp_(-1, 1)",
    )  # fmt: skip
    start = w.one(f"{x}.clone()", f"{x} * 1", f"{x}.contiguous() + 0", f"torch.zeros_like({x}) + {x}")
    return f"OUT = {start}; {action}"


@kind(3)
def _masked(w: Writer) -> str:
    x = w.tensor((1, 2, 3, 4))
    y = w.like(x)
    form = w.one(
        "{0}.masked_fill({1} > 0, 0.0)", "torch.where({1} > 0.2, {0}, {1})", "torch.where({1} < 0, {0} * 2, 0.5)",
        "{0} * ({1} > 0)", "torch.where(torch.isfinite({0}), {0}, {1})", "torch.where(({0} > 0) & ({1} > 0), {0}, {1})",
        "{0} * torch.arange({2}).view({3})",
    )  # fmt: skip
    n = w.shape(x)[-1]
    return str(form).format(x, y, n, (1,) * (len(w.shape(x)) - 1) + (n,)) + w.one("", " / 2")


@kind(3)
def _dropped(w: Writer) -> str:
    x = w.tensor((1, 2, 3, 4))
    if w.chance(0.5):
        return w.member("m", f"nn.Dropout({w.one(0.1, 0.5)})") + f"({x})"
    form = w.one("F.dropout({}, 0.3)", "{} + torch.rand_like({})", "{} * torch.bernoulli(torch.full_like({}, 0.5))",
                 "F.alpha_dropout({}, 0.2)", "{} + torch.randn({}.shape)")  # fmt: skip
    return str(form).format(x, x)


@kind(2)
def _cast(w: Writer) -> str:
    x = w.tensor((1, 2, 3, 4))
    form = w.one(
        "{}.float().tanh().double()", "{}.bfloat16().double()", "{}.float()", "({}.float() * 2).to(torch.float64)",
        "torch.view_as_real(torch.complex({0}, {0} * 2)).sum(-1)", "({} * 3).long().double()", "{}.bool().double()",
        "torch.polar({0}.abs(), {0}).real",
    )  # fmt: skip
    return str(form).format(x)


@kind(3)
def _lost(w: Writer) -> str:
    x = w.tensor((2, 3, 4), lambda t: t.numel() > 0)
    shape = w.shape(x)
    choice = w.random.randrange(5)
    if choice < 2:
        labels = w.integers(shape[1], (shape[0], *shape[2:]))  # type: ignore[attr-defined]
        more = w.one("", "", ", label_smoothing=0.1", ", ignore_index=0", ", reduction='none'", ", reduction='sum'")
        return f"F.cross_entropy({x}, {labels}{more})"
    y = w.like(x)
    form = w.one("F.mse_loss({}, {})", "F.l1_loss({}, {}, reduction='none')", "F.smooth_l1_loss({}, {})",
                 "F.binary_cross_entropy_with_logits({}, {}.sigmoid())",
                 "F.kl_div({}.log_softmax(-1), {}.softmax(-1), reduction='batchmean')",
                 "F.cosine_similarity({}, {}, dim=-1)", "F.huber_loss({}, {}, reduction='sum') / 8")  # fmt: skip
    return str(form).format(x, y)


@kind(4)
def _residual(w: Writer) -> str:
    """A value added to itself, with permutations between."""
    x = w.tensor((2, 3, 4))
    shape = w.shape(x)
    n = len(shape)
    order = w.random.sample(range(n), n)
    back = tuple(order.index(d) for d in range(n))
    middle = w.one("", ".contiguous()", ".tanh()", ".clone()", ".relu().contiguous()")
    if n == 4 and w.chance(0.4):
        return f"{x} + {x}.flatten(2).transpose(1, 2){middle}.transpose(1, 2).reshape({x}.shape)"
    return f"{x} {w.one('+', '-', '*')} {x}.permute({tuple(order)}){middle}.permute({back})"


@kind(1)
def _recomputed(w: Writer) -> str:
    x = w.tensor((2, 3))
    n = w.shape(x)[-1]
    text = f"nn.Sequential(nn.Linear({n}, {n}), nn.Tanh(), nn.LayerNorm({n}))"
    return f"checkpoint({w.member('m', text)}, {x}, use_reentrant=False)"


@kind(2)
def _constrained(w: Writer) -> str:
    x = w.tensor((1, 2, 3, 4))
    return f"C({x}, {_strategy(w, w.mesh, w.shape(x))})"


@kind(1)
def _buffered(w: Writer) -> str:
    x = w.tensor((1, 2, 3))
    n = w.shape(x)[-1]
    return f"{x} * {w.member('b', f'nn.Buffer(T(({n},), {w.number()}))')}"


@kind(1)
def _recurrent(w: Writer) -> str:
    x = w.tensor((3,), lambda t: 0 not in t.shape)
    n = w.shape(x)[-1]
    if w.shape(x)[1] > 6:
        raise Unfit
    return (
        w.member("m", f"nn.{w.one('LSTM', 'GRU', 'RNN')}({n}, {w.one(2, 4)}, batch_first={w.chance(0.5)})")
        + f"({x})[0]"
    )


MESHES = (
    {"a": 2}, {"a": 4}, {"a": 8}, {"a": 3}, {"a": 5}, {"a": 2, "b": 2}, {"a": 2, "b": 4}, {"a": 4, "b": 2}, {"a": 3,
    "b": 2},
    {"a": 2, "b": 2, "c": 2}, {"a": 1, "b": 4}, 2, 4, 8, 6,
)  # fmt: skip


def _axes_of(mesh: Any) -> list[str]:
    return [] if isinstance(mesh, int) else list(mesh)


def _strategy(w: Writer, mesh: Any, shape: Sequence[int]) -> tuple[Any, ...]:
    """A random annotation: axis names, or split counts."""
    dims: list[Any] = [None] * len(shape)
    if isinstance(mesh, int) or w.chance(0.15):
        total = mesh if isinstance(mesh, int) else math.prod(mesh.values())
        counts = [1] * len(shape)
        if shape:
            counts[w.random.randrange(len(shape))] = w.one(*[k for k in range(1, total + 1) if total % k == 0])
        return tuple(counts)
    for axis in _axes_of(mesh):
        if shape and w.chance(0.6):
            d = w.random.randrange(len(shape))
            dims[d] = axis if dims[d] is None else (*((dims[d],) if isinstance(dims[d], str) else dims[d]), axis)
    return tuple(dims)


OPTIONS: dict[str, tuple[Any, ...]] = {
    "search_mode": ("recursive_programming", "sharding_propagation"),
    "parallel_mode": ("semi_auto_parallel", "data_parallel", "auto_parallel"),
    "enable_parallel_optimizer": (True,),
    "reshard_after_forward": (True, False),
    "gradient_fp32_sync": (False,),
    "comm_fusion": ({"openstate": False}, {"allreduce": {"mode": "size", "config": 1}},
    {"allreduce": {"mode": "overlap"}}),
    "random_numbers": ("torch",),
    "all_reduce_fusion_config": ([1, 3],),
    "dataset_strategy": ("full_batch",),
}  # fmt: skip
ALGO: dict[str, tuple[Any, ...]] = {
    "fully_use_devices": (False,),
    "elementwise_op_strategy_follow": (True,),
    "enable_algo_approxi": (True,),
    "tensor_slice_align_enable": (True,),
}


def _some(w: Writer, share: float, choices: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    return {name: w.one(*values) for name, values in choices.items() if w.chance(share)}


def _setting(w: Writer, outputs: Sequence[str]) -> Setting:
    mesh = w.mesh
    options = _some(w, 0.08, OPTIONS)
    if options.get("enable_parallel_optimizer"):
        options["parallel_optimizer_config"] = {"parallel_optimizer_threshold": 0}
    if any("BatchNorm" in text for _, text in w.members) and w.chance(0.1):
        options["batch_norm_parts"] = w.one(2, 4)
    given = {a.name: _strategy(w, mesh, w.shape(a.name)) for a in w.arguments if w.chance(0.4)}
    weights = {n: _strategy(w, mesh, getattr(w.model, n).shape) for n, _ in w.members if n[0] == "p" and w.chance(0.3)}
    for name, _ in w.members:
        if name[0] == "m" and w.chance(0.2):
            inner = dict(getattr(w.model, name).named_parameters())
            if inner:
                path, parameter = w.one(*inner.items())
                weights[f"{name}.{path}"] = _strategy(w, mesh, parameter.shape)
    outs = tuple(_strategy(w, mesh, w.shape(o)) if w.chance(0.6) else None for o in outputs) if w.chance(0.15) else None
    steps = w.one(1, 1, 1, 2, 3)
    accumulate = steps > 1 and w.chance(0.15) and bool(w.members)
    return Setting(
        mesh=mesh,
        in_strategy=given if given and w.chance(0.7) else None,
        out_strategy=outs,
        parameter_plan=weights if weights and w.chance(0.7) else None,
        level=w.one(0, 0, 0, 1, 2),
        options=options,
        algo=_some(w, 0.08, ALGO),
        training=w.chance(0.85),
        grad=w.chance(0.92),
        steps=steps,
        optimizer=w.one("", "sgd", "adam", "adamw") if not accumulate else "",
        accumulate=accumulate,
        cotangent=w.one("contiguous", "transposed", "expanded", "stepped"),
    )


def generate(seed: int) -> Program:
    """The program of a seed."""
    while True:
        with contextlib.suppress(Unfit):
            return _written_at_random(seed)
        seed += 1_000_003


def _written_at_random(seed: int) -> Program:
    with _alone(plain=True):
        torch.manual_seed(seed)
        w = Writer(seed)
        for _ in range(w.random.randrange(1, 3)):
            w.argument()
        for _ in range(w.random.randrange(2, 11)):
            w.statement()
        used = re.findall(r"\bv\d+\b", " ".join(line.text.partition("=")[2] for line in w.lines))
        ends = [n for line in w.lines for n in line.names if n not in used]
        outputs = w.random.sample(ends, min(len(ends), w.one(1, 1, 2, 3)))
        extra = [n for n in w.values if n[0] == "v" and n not in outputs]
        if extra and w.chance(0.2):
            outputs.append(w.one(*extra))
        if not outputs:
            raise Unfit
        if w.chance(0.4):
            able = [o for o in outputs if w.values[o].requires_grad and w.values[o].is_floating_point()]
            if able:
                text = " + ".join(f"{o}.{w.one('mean()', 'square().sum()', 'sum()')}" for o in able)
                w.add(f"loss = ({text}) * 0.01", ["loss"])
                outputs = ["loss", *(outputs if w.chance(0.4) else [])]
        setting = _setting(w, outputs)
        return pruned(Program(tuple(w.arguments), tuple(w.members), tuple(w.lines), tuple(outputs), setting))


# -- Smaller programs that fail alike ----------------------------------------------------------------------------------


def _names(text: str) -> set[str]:
    return set(re.findall(r"\b(?:[vx]\d+|loss)\b", text)) | set(re.findall(r"self\.([pmb]\d+)", text))


def pruned(program: Program) -> Program:
    """The program without the lines that its outputs do not need, and with the reference that its random numbers
    require."""
    needed, lines = set(program.outputs), []
    for line in reversed(program.lines):
        if needed & set(line.names):
            lines.insert(0, line)
            needed |= _names(line.text)
    arguments = tuple(a for a in program.arguments if a.name in needed) or program.arguments[:1]
    members = tuple(m for m in program.members if m[0] in needed)
    setting, kept = program.setting, {a.name for a in arguments}
    if setting.in_strategy:
        given = {n: s for n, s in setting.in_strategy.items() if n in kept}
        setting = replace(setting, in_strategy=given or None)
    if setting.parameter_plan:
        held = {n for n, _ in members}
        plan = {n: s for n, s in setting.parameter_plan.items() if n.split(".")[0] in held}
        setting = replace(setting, parameter_plan=plan or None)
    text = " ".join([*(t for _, t in members), *(line.text for line in lines)])
    draws = re.search(r"ropout|rand|bernoulli", text) and setting.options.get("random_numbers") != "torch"
    setting = replace(setting, one=bool(draws) or "batch_norm_parts" in setting.options)
    return replace(program, arguments=arguments, members=members, lines=tuple(lines), setting=setting)


def _shapes(program: Program) -> dict[str, tuple[int, ...]]:
    """The shape of every value."""
    with _alone(plain=True):
        build, arguments = made(program)
        model = _model(build, program.setting)
        space = {**NAMES, "self": model, **dict(zip((a.name for a in program.arguments), arguments(), strict=True))}
        for line in program.lines:
            exec(line.text, space)
        names = [a.name for a in program.arguments] + [n for line in program.lines for n in line.names]
        return {n: tuple(space[n].shape) for n in names if space[n].is_floating_point()}


def _renamed(program: Program, line: Line, name: str, other: str) -> Program:
    """`program` without `line`, with `name` replaced by `other` in later lines."""
    at = program.lines.index(line)

    def put(text: str) -> str:
        return re.sub(rf"\b{name}\b", other, text)

    lines = (*program.lines[:at], *(replace(later, text=put(later.text)) for later in program.lines[at + 1 :]))
    outputs = tuple(dict.fromkeys(map(put, program.outputs)))
    return replace(program, lines=lines, outputs=outputs, setting=replace(program.setting, out_strategy=None))


def _without_lines(program: Program) -> Iterator[Program]:
    shapes = _shapes(program)
    for line in reversed(program.lines):
        for name in line.names:
            if name not in shapes:
                continue
            before = [n for n in shapes if n in _names(line.text) and n not in line.names]
            for other in [n for n in before if shapes[n] == shapes[name]]:
                yield _renamed(program, line, name, other)
            fresh = f"x{max((int(a.name[1:]) for a in program.arguments), default=0) + 1}"
            cut = _renamed(program, line, name, fresh) if len(line.names) == 1 else None
            if cut is not None and line is not program.lines[-1]:
                argument = Argument(fresh, f"T({shapes[name]}, 1)", program.setting.grad)
                yield replace(cut, arguments=(*cut.arguments, argument))


def _plainer_settings(program: Program) -> Iterator[Program]:
    setting, default = program.setting, Setting()
    for f in fields(setting):
        if f.name not in ("mesh", "one") and getattr(setting, f.name) != getattr(default, f.name):
            yield replace(program, setting=replace(setting, **{f.name: getattr(default, f.name)}))
    for name in ("in_strategy", "parameter_plan", "options", "algo"):
        given = getattr(setting, name) or {}
        for key in given if len(given) > 1 else ():
            rest = {k: v for k, v in given.items() if k != key}
            yield replace(program, setting=replace(setting, **{name: rest}))
    if isinstance(setting.mesh, int):
        smaller: Any = [2] if setting.mesh > 2 else []
    else:
        smaller = [
            {k: v for k, v in setting.mesh.items() if k != axis} for axis in setting.mesh if len(setting.mesh) > 1
        ]
        smaller += [{**setting.mesh, axis: 2} for axis, n in setting.mesh.items() if n > 2]
    for mesh in smaller:
        yield replace(program, setting=replace(setting, mesh=mesh))


def _fewer_outputs(program: Program) -> Iterator[Program]:
    for output in program.outputs if len(program.outputs) > 1 else ():
        rest = tuple(o for o in program.outputs if o != output)
        yield replace(program, outputs=rest, setting=replace(program.setting, out_strategy=None))


def _plainer_arguments(program: Program) -> Iterator[Program]:
    shapes = _shapes(program)
    for i, a in enumerate(program.arguments):
        if a.grad:
            yield replace(
                program, arguments=(*program.arguments[:i], replace(a, grad=False), *program.arguments[i + 1 :])
            )
        if a.name in shapes and a.text != (text := f"T({shapes[a.name]}, 1)"):
            yield replace(
                program, arguments=(*program.arguments[:i], replace(a, text=text), *program.arguments[i + 1 :])
            )


def _smaller_sizes(program: Program) -> Iterator[Program]:
    """The program with one number of its shapes changed everywhere."""
    texts = (
        [a.text for a in program.arguments] + [t for _, t in program.members] + [line.text for line in program.lines]
    )
    numbers = sorted({int(n) for text in texts for n in re.findall(r"(?<![\w.])\d+(?![\w.])", text)}, reverse=True)

    def put(text: str, old: int, new: int) -> str:
        return re.sub(rf"(?<![\w.]){old}(?![\w.])", str(new), text)

    for old in numbers:
        for new in [k for k in (1, 2, 3, 4, 8) if k < old <= 64]:
            yield replace(
                program,
                arguments=tuple(replace(a, text=put(a.text, old, new)) for a in program.arguments),
                members=tuple((n, put(text, old, new)) for n, text in program.members),
                lines=tuple(replace(line, text=put(line.text, old, new)) for line in program.lines),
            )


def shrunk(program: Program, outcome: Outcome, seconds: float = 120.0) -> tuple[Program, Outcome]:
    """A smaller program with the same failure."""
    end = time.monotonic() + seconds
    ways = (_fewer_outputs, _without_lines, _plainer_settings, _plainer_arguments, _smaller_sizes)
    again = True
    while again:
        again = False
        for way in ways:
            found = True
            while found and time.monotonic() < end:
                found = False
                for smaller in way(program):
                    if time.monotonic() > end:
                        break
                    try:
                        smaller = pruned(smaller)
                        now = checked(smaller)
                    except (Exception, _Late):
                        continue
                    if now.alike(outcome) and str(smaller) + str(smaller.setting) != str(program) + str(
                        program.setting
                    ):
                        program, outcome, found, again = smaller, now, True, True
                        break
    return program, outcome


# -- Many of them ------------------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """The number of programs with each outcome."""

    counts: collections.Counter[str] = field(default_factory=collections.Counter)
    refusals: collections.Counter[str] = field(default_factory=collections.Counter)
    failures: list[tuple[int, Program, Outcome]] = field(default_factory=list)

    def add(self, seed: int, program: Program, outcome: Outcome) -> None:
        self.counts[outcome.kind] += 1
        if outcome.kind == "refused":
            self.refusals[outcome.reason] += 1
        if outcome.failed:
            self.failures.append((seed, program, outcome))

    def __str__(self) -> str:
        refusals = [f"  {count:5d}  {reason}" for reason, count in self.refusals.most_common(40)]
        return "\n".join([str(dict(self.counts)), *refusals])


def one(seed: int) -> tuple[int, Program, Outcome]:
    """The program of a seed, and its outcome."""
    program = generate(seed)
    return seed, program, checked(program)


def run(seeds: Sequence[int], processes: int = 1) -> Iterator[tuple[int, Program, Outcome]]:
    if processes == 1:
        yield from map(one, seeds)
        return
    with multiprocessing.get_context("forkserver").Pool(processes, maxtasksperchild=500) as pool:
        yield from pool.imap(one, seeds, chunksize=8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--shrink", action="store_true", help="minimize failing programs")
    parser.add_argument("--print", action="store_true", help="print every program")
    given = parser.parse_args()
    torch.set_num_threads(1)
    faulthandler.enable()
    logging.getLogger("torch").setLevel(logging.CRITICAL)  # it logs errors that are caught
    tally, started = Tally(), time.monotonic()
    for seed, program, outcome in run(range(given.seed, given.seed + given.programs), given.processes):
        tally.add(seed, program, outcome)
        if given.print:
            print(f"# seed {seed}: {outcome}\n{program.as_test()}", flush=True)
        if outcome.failed:
            smaller, now = shrunk(program, outcome) if given.shrink else (program, outcome)
            print(f"\n# seed {seed}: {now.kind}: {now.reason}\n{smaller.as_test()}", flush=True)
        if sum(tally.counts.values()) % 500 == 0:
            print(f"# {seed}: {dict(tally.counts)}, {time.monotonic() - started:.0f} s", flush=True)
    print(tally)


if __name__ == "__main__":
    main()
