"""Malformed arguments of every public function, and edited files: Partway raises its own errors, runs nothing, and
gives no wrong result.

    python tests/conformance/malformed.py                       # 2,000 arguments, 400 plans, profiles and entries each
    python tests/conformance/malformed.py --arguments 100 --edits 20 --seed 7

A case passes if it raises a PartwayError (or Python's TypeError for a call that does not match a signature), or gives
the results of one device. Cases are generated from the seed: a failure is printed with the seed that reproduces it.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import pickle
import random
import signal
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import partway as pw
from partway import data
from partway.commands.cli import app
from partway.options.algo import AlgoParameters
from partway.options.parallel import ParallelContext
from partway.propagation.cost.profile import profile_of
from partway.strategy.errors import shown

MESH = {"dp": 2, "tp": 2}
X = torch.linspace(-1.0, 1.0, 32, dtype=torch.float64).reshape(8, 4)
SECONDS = 60  # that one case may take


class Net(nn.Module):
    """Two layers; the result is one number."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(4, 8, dtype=torch.float64), nn.Linear(8, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x))).square().sum()


def f(x: Tensor) -> Tensor:
    return (x * 2).tanh().sum()


def g(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).sum()


class WrongError(Exception):
    """A result that differs from one device."""


# -- Cases and their outcomes ------------------------------------------------------------------------------------------


@dataclass
class Found:
    """The number of cases that were refused and that worked, and the failures."""

    refused: int = 0
    worked: int = 0
    failures: list[str] = field(default_factory=list)

    @property
    def cases(self) -> int:
        return self.refused + self.worked + len(self.failures)

    def __str__(self) -> str:
        kinds = Counter(failure.partition("|")[2].strip().split(":")[0] for failure in self.failures)
        failed = f"{len(self.failures)} failed {dict(kinds) or ''}"
        return f"{self.cases} cases: {self.refused} refused, {self.worked} right, {failed}"


def examine(found: Found, name: str, case: Callable[[], object], canary: Path) -> None:
    """Run one case and record its outcome."""
    try:
        with within(SECONDS), warnings.catch_warnings(action="ignore"):
            case()
    except pw.PartwayError:
        found.refused += 1
    except TypeError as error:
        if _is_of_the_call(error):
            found.refused += 1
        else:
            found.failures.append(f"{name} | {_told(error)}")
    except Exception as error:
        found.failures.append(f"{name} | {_told(error)}")
    else:
        found.worked += 1
    finally:
        reset()
    if canary.exists():
        found.failures.append(f"{name} | code was run")
        canary.rmdir()


def reset() -> None:
    pw.reset_auto_parallel_context()
    pw.reset_algo_parameters()


def _is_of_the_call(error: TypeError) -> bool:
    """Whether Python refused this call, or Partway refused with Python's message a call of a given function."""
    if "and its call does not fit: " in str(error):
        return True
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_code.co_filename == __file__


def _told(error: BaseException) -> str:
    trace, places = error.__traceback__, []
    while trace is not None:
        places.append(f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}")
        trace = trace.tb_next
    return f"{type(error).__name__}: {str(error)[:150]!r} at {' < '.join(places[:-6:-1])}"


@contextmanager
def within(seconds: int) -> Iterator[None]:
    """Raise TimeoutError if the block takes longer."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def same(found: Any, expected: Tensor) -> None:
    if not isinstance(found, Tensor) or not torch.allclose(found.double(), expected.double(), rtol=1e-9, atol=1e-9):
        raise WrongError(f"{found} in place of {expected}")


def step(model: Any, plain: Any = None) -> None:
    """Check that a call and its backward give the results of one device."""
    plain = plain if plain is not None else Net()
    x, y = (X.clone().requires_grad_() for _ in range(2))
    expected = plain(y)
    found = model(x)
    same(found, expected)
    found.backward()
    expected.backward()
    same(x.grad, y.grad)
    if isinstance(plain, nn.Module):
        for name, parameter in model.named_parameters():
            same(parameter.grad, plain.get_parameter(name).grad)


# -- Arguments ---------------------------------------------------------------------------------------------------------


class Canary:
    """Makes a folder if it is unpickled or run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def _deep(levels: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(levels):
        found = [found]
    return found


VALUES: dict[str, Callable[[], Any]] = {
    "None": lambda: None, "True": lambda: True, "0": lambda: 0, "-1": lambda: -1, "3": lambda: 3,
    "2**63": lambda: 2**63, "10**30": lambda: 10**30, "-10**30": lambda: -(10**30), "5,000 digits": lambda: 10**5000,
    "1.5": lambda: 1.5,
    "nan": lambda: math.nan, "inf": lambda: math.inf, "1j": lambda: 1j, "''": lambda: "", "text": lambda: "dp",
    "nul": lambda: "\0", "long": lambda: "x" * 5000, "code": lambda: "__import__('os').mkdir('ran')",
    "braces": lambda: "{{",
    "bytes": lambda: b"dp", "()": lambda: (), "[]": list, "{}": dict, "(None,)": lambda: (None,),
    "('dp',)": lambda: ("dp",),
    "(('dp', None),)": lambda: (("dp", None),), "(('dp', 'dp'),)": lambda: (("dp", "dp"),),
    "((10**30, 1),)": lambda: ((10**30, 1),), "(('zz', None),)": lambda: (("zz", None),), "[[2]]": lambda: [[2]],
    "deep": lambda: _deep(2000), "{'dp': 10**30}": lambda: {"dp": 10**30}, "{'x': None}": lambda: {"x": None},
    "{1: 2}": lambda: {1: 2}, "{'x': 0}": lambda: {"x": 0}, "set": lambda: {1, 2}, "range": lambda: range(3),
    "object": object, "...": lambda: ..., "type": lambda: nn.Linear, "function": lambda: len,
    "tensor": lambda: torch.ones(2), "meta": lambda: torch.ones(2, device="meta"), "0-dim": lambda: torch.tensor(3.0),
    "array": lambda: np.ones((2, 2)), "numpy nan": lambda: np.float64("nan"), "numpy int": lambda: np.int64(2),
    "path": lambda: Path("/nowhere/at/all"), "folder": lambda: Path("/"), "device": lambda: "/dev/null",
    "generator": lambda: (i for i in range(2)), "error": lambda: ValueError("x"), "module": lambda: nn.Linear(2, 2),
    "lambda": lambda: lambda *a, **k: None, "Shard(0)": lambda: pw.Shard(0), "Shard(99)": lambda: pw.Shard(99),
    "mesh": lambda: pw.Mesh({"dp": 2}), "nested ('dp',)": lambda: ((("dp",),),), "list of 10**5": lambda: [0] * 10**5,
}  # fmt: skip


def _called(**options: Any) -> None:
    step(pw.shard(f, **{"mesh": MESH, **options}), f)


def _compiled(**options: Any) -> object:
    return pw.compile(f, **{"args": (X,), "mesh": MESH, **options}).plan


def _with(option: str, value: Any) -> None:
    pw.set_auto_parallel_context(**{option: value})
    step(pw.shard(f, mesh=MESH), f)


def _with_algo(option: str, value: Any) -> None:
    pw.set_algo_parameters(**{option: value})
    step(pw.shard(f, mesh=MESH), f)


def _in_block(option: str, value: Any) -> None:
    with pw.auto_parallel_context(**{option: value}):
        step(pw.shard(f, mesh=MESH), f)


_PLAN: list[Any] = []


def plan() -> Any:
    """A plan, made once."""
    if not _PLAN:
        _PLAN.append(pw.compile(Net(), (X,), mesh=MESH).plan)
    return _PLAN[0]


def _word(value: Any) -> str:
    return (value if isinstance(value, str) else shown(value)).replace("\0", "")


def _command(*arguments: Any) -> None:
    found = CliRunner().invoke(app, [_word(argument) for argument in arguments])
    if found.exit_code not in (0, 1, 2) or not isinstance(found.exception, SystemExit | None):
        raise found.exception or WrongError(f"exit code {found.exit_code}")


TARGETS: dict[str, Callable[[Any], object]] = {
    **{f"shard({name})": lambda v, name=name: _called(**{name: v})
       for name in ("mesh", "in_strategy", "out_strategy", "parameter_plan", "device", "level", "module_plan", "plan",
                    "zz")},
    **{f"compile({name})": lambda v, name=name: _compiled(**{name: v})
       for name in ("args", "kwargs", "mesh", "in_strategy", "out_strategy", "parameter_plan", "device", "level",
                    "module_plan", "plan", "zz")},
    **{f"set_auto_parallel_context({name})":
       lambda v, name=name: _with(name, v) for name in ParallelContext.model_fields},
    **{f"auto_parallel_context({name})":
       lambda v, name=name: _in_block(name, v) for name in ParallelContext.model_fields},
    **{f"set_algo_parameters({name})":
       lambda v, name=name: _with_algo(name, v) for name in AlgoParameters.model_fields},
    "strategy_ckpt_config load_file": lambda v: _with("strategy_ckpt_config", {"load_file": v}),
    "strategy_ckpt_config save_file": lambda v: _with("strategy_ckpt_config", {"save_file": v}),
    "comm_fusion of a kind": lambda v: _with("comm_fusion", {"allreduce": v}),
    "parallel_optimizer_config": lambda v: _with("parallel_optimizer_config", {"parallel_optimizer_threshold": v}),
    "get_auto_parallel_context": lambda v: pw.get_auto_parallel_context(v),
    "get_algo_parameters": lambda v: pw.get_algo_parameters(v),
    "shard(fn)": lambda v: pw.shard(v, mesh=MESH),
    "compile(fn)": lambda v: pw.compile(v, (X,), mesh=MESH),
    "a call": lambda v: pw.shard(lambda x: x, mesh=MESH)(v),
    "a call by name": lambda v: pw.shard(f, mesh=MESH)(zz=v),
    "two arguments": lambda v: pw.shard(lambda x, y: x.sum(), mesh=MESH)(X, v),
    "in_strategy of a tensor": lambda v: _called(in_strategy=(v,)),
    "in_strategy of a dim": lambda v: _called(in_strategy=((v, None),)),
    "in_strategy by name": lambda v: _called(in_strategy={"x": v}),
    "in_strategy of a name": lambda v: _called(in_strategy={v: ("dp", None)}),
    "out_strategy of a tensor": lambda v: _called(out_strategy=(v,)),
    "two in_strategies": lambda v: pw.shard(g, (("dp", None), v), mesh=MESH)(X, X.t()),
    "parameter_plan of one": lambda v: step(pw.shard(Net(), mesh=MESH, parameter_plan={"up.weight": v})),
    "parameter_plan of a dim": lambda v: step(pw.shard(Net(), mesh=MESH, parameter_plan={"up.weight": (v, None)})),
    "parameter_plan of a name": lambda v: step(pw.shard(Net(), mesh=MESH, parameter_plan={v: ("tp", None)})),
    "module_plan of one": lambda v: step(pw.shard(Net(), mesh=MESH, module_plan={"up": v})),
    "module_plan of a side": lambda v: step(pw.shard(Net(), mesh=MESH, module_plan={"up": {"in_strategy": v}})),
    "module_plan of a name": lambda v: step(pw.shard(Net(), mesh=MESH, module_plan={v: {"in_strategy": (None,)}})),
    "a constraint inside": lambda v: pw.shard(lambda x: pw.shard(torch.relu, in_strategy=(v,))(x).sum(), mesh=MESH)(X),
    "a size of the mesh": lambda v: _called(mesh={"x": v}),
    "a name of the mesh": lambda v: _called(mesh={v: 2}),
    "Mesh": lambda v: pw.Mesh(v),
    "Mesh of a size": lambda v: pw.Mesh({"x": v}),
    "Mesh.flat": lambda v: pw.Mesh.flat(v),
    "Mesh.of_sizes": lambda v: pw.Mesh.of_sizes(v),
    "Mesh.index": lambda v: pw.Mesh(MESH).index(v),
    "Mesh.size": lambda v: pw.Mesh(MESH).size(v),
    "Mesh.coordinate": lambda v: pw.Mesh(MESH).coordinate(v),
    "Mesh.rank": lambda v: pw.Mesh(MESH).rank(v),
    "Mesh.group": lambda v: pw.Mesh(MESH).group(v, "dp"),
    "Mesh.group of an axis": lambda v: pw.Mesh(MESH).group(0, v),
    "Layout": lambda v: pw.Layout(pw.Mesh(MESH), v),
    "Layout of a placement": lambda v: pw.Layout(pw.Mesh(MESH), (v, v)),
    "Layout(mesh)": lambda v: pw.Layout(v, (pw.Shard(0),)),
    "Layout.local_shape": lambda v: pw.Layout(pw.Mesh(MESH), (pw.Shard(0), pw.Replicate())).local_shape(v),
    "Shard": lambda v: pw.Shard(v),
    "Partial": lambda v: pw.Partial(v),
    "Plan.load": lambda v: pw.Plan.load(v),
    "Plan.save": lambda v: plan().save(v),
    "Plan.explain": lambda v: plan().explain(v),
    "Plan.explain(alternatives)": lambda v: plan().explain("up", alternatives=v),
    "Plan.table(rows)": lambda v: plan().table(rows=v),
    "Plan.table(width)": lambda v: plan().table(width=v),
    "save_chrome_trace": lambda v: pw.save_chrome_trace(v, {}),
    "save_chrome_trace(sources)": lambda v: pw.save_chrome_trace("trace.json", v),
    "save_chrome_trace of a source": lambda v: pw.save_chrome_trace("trace.json", {"a": v}),
    "init(simulate)": lambda v: pw.init(simulate=v),
    "init(backend)": lambda v: pw.init(simulate=2, backend=v),
    "rule(operator)": lambda v: pw.rule(v, "b -> b").remove(),
    "rule(text)": lambda v: pw.rule("aten::relu6", v, replace=True).remove(),
    "rule(reduce)": lambda v: pw.rule("aten::relu6", "b -> b", reduce=v, replace=True).remove(),
    "rule(whole)": lambda v: pw.rule("aten::relu6", "b -> b", whole=v, replace=True).remove(),
    "rule(linear)": lambda v: pw.rule("aten::relu6", "b -> b", linear=v, replace=True).remove(),
    "rule(local)": lambda v: pw.rule("aten::relu6", "b -> b", local=v, replace=True).remove(),
    "data.part_of": lambda v: data.part_of(v, 0, devices=4),
    "data.part_of(rank)": lambda v: data.part_of((2, 2), v, devices=4),
    "data.part_of(mesh)": lambda v: data.part_of((2, 2), 0, mesh=v),
    "data.part_of(devices)": lambda v: data.part_of((2, 2), 0, devices=v),
    "data.Part": lambda v: data.Part(v, v),
    "data.Part of a split": lambda v: data.Part((0, 0), (v, 1)),
    "data.Part.whole": lambda v: data.Part.whole(v),
    "data.planned_part": lambda v: data.planned_part(v),
    "data.to_global": lambda v: data.to_global(X, v, pw.Mesh(MESH)),
    "data.to_global(part)": lambda v: data.to_global(v, ("dp", None), pw.Mesh(MESH)),
    "data.whole_batch": lambda v: data.whole_batch(X, v, pw.Mesh(MESH)),
    "data.whole_batch(part)": lambda v: data.whole_batch(v, ("dp", None), pw.Mesh(MESH)),
    "data.whole_batch(mesh)": lambda v: data.whole_batch(X, ("dp", None), v),
    "data.to_global(mesh)": lambda v: data.to_global(X, ("dp", None), v),
    "data.distributed_sampler": lambda v: data.distributed_sampler(v, data.Part.whole(2)),
    "data.distributed_sampler(part)": lambda v: data.distributed_sampler([1, 2], v),
    "data.distributed_sampler(seed)": lambda v: data.distributed_sampler([1, 2], data.Part.whole(2), seed=v),
    "data.distributed_sampler(dim)": lambda v: data.distributed_sampler([1, 2], data.Part.whole(2), dim=v),
    "data.web_dataset": lambda v: next(iter(data.web_dataset(v, data.Part.whole(2), seed=0))),
    "data.web_dataset(part)": lambda v: data.web_dataset("a.tar", v, seed=0),
    "data.web_dataset(seed)": lambda v: data.web_dataset("a.tar", data.Part.whole(2), seed=v),
    "data.web_dataset(dim)": lambda v: data.web_dataset("a.tar", data.Part.whole(2), seed=0, dim=v),
    "data.web_dataset(allow)": lambda v: data.web_dataset("pipe:x", data.Part.whole(2), seed=0, allow=v),
    "data.RandomCrop": lambda v: data.RandomCrop(v, seed=0),
    "data.RandomCrop(seed)": lambda v: data.RandomCrop(2, seed=v),
    "data.RandomCrop(padding)": lambda v: data.RandomCrop(2, seed=0, padding=v),
    "data.RandomFlip": lambda v: data.RandomFlip(v),
    "data.RandomFlip(horizontal)": lambda v: data.RandomFlip(0, horizontal=v),
    "data.SlicePatches": lambda v: data.SlicePatches(v),
    "data.SlicePatches(slice_mode)": lambda v: data.SlicePatches(1, 1, v),
    "data.SlicePatches(fill_value)": lambda v: data.SlicePatches(1, 1, fill_value=v),
    "data.SlicePatches()()": lambda v: data.SlicePatches(2, 1)(v),
    "data.WindowReader": lambda v: data.WindowReader(v).read(data.Window(0, 1, 0, 1)),
    "data.WindowReader(level)": lambda v: data.WindowReader(np.ones((4, 4)), level=v),
    "data.WindowReader(axes)": lambda v: data.WindowReader(np.ones((4, 4)), axes=v),
    "data.WindowReader.read": lambda v: data.WindowReader(np.ones((4, 4))).read(v),
    "data.View": lambda v: data.View.of(v),
    "data.Epoch.set": lambda v: data.Epoch().set(v),
    "profile_of": lambda v: profile_of(v),
    "partway bench fusion --model": lambda v: _command("bench", "fusion", "--model", v, "--rounds", 0),
    "partway bench fusion --world": lambda v: _command("bench", "fusion", "--world", v, "--rounds", 0),
    "partway calibrate --processes": lambda v: _command("calibrate", "--processes", v, "--device", "none"),
    "partway calibrate --out": lambda v: _command("calibrate", "--out", v, "--device", "none"),
    "partway": lambda v: _command(v),
}  # fmt: skip


def arguments(count: int, seed: int, folder: Path) -> Found:
    """`count` pairs of an argument of a function and a wrong value for it; every argument in turn."""
    found, draws = Found(), random.Random(seed)
    pairs = [(target, value) for target in TARGETS for value in VALUES]
    draws.shuffle(pairs)
    plan()
    for target, value in pairs[:count]:
        examine(found, f"{target} <- {value}", lambda t=target, v=value: TARGETS[t](VALUES[v]()), folder / "ran")
    return found


# -- Edits of files ----------------------------------------------------------------------------------------------------

SCALARS = (
    None,
    True,
    0,
    -1,
    2,
    3,
    2**63,
    10**30,
    1.5,
    1e308,
    "",
    "dp",
    "S0",
    "S1",
    "S9",
    "R",
    "P",
    "x" * 500,
    [],
    {},
    [1],
    "\0",
)


def edited(tree: Any, draws: random.Random) -> Any:
    """A copy of JSON data with one to three changes."""
    found = copy.deepcopy(tree)
    for _ in range(draws.choice((1, 1, 1, 2, 3))):
        places = list(_places(found))
        holder, key = draws.choice(places)
        match draws.randrange(6):
            case 0:
                holder[key] = draws.choice(SCALARS)
            case 1:
                del holder[key]
            case 2:
                other, name = draws.choice(places)
                holder[key] = copy.deepcopy(other[name])
            case 3 if isinstance(holder, list):
                holder.insert(draws.randrange(len(holder) + 1), copy.deepcopy(draws.choice((*SCALARS, holder[key]))))
            case 4 if isinstance(holder, dict):
                holder[draws.choice(("extra", "name", *map(str, range(3))))] = draws.choice(SCALARS)
            case _:
                number = holder[key]
                holder[key] = (
                    number * draws.choice((-1, 2, 10**25)) if isinstance(number, int | float) else [holder[key]]
                )
        if not isinstance(found, dict | list) or not list(_places(found)):
            break
    return found


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    keys = list(tree) if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    for key in keys:
        yield tree, key
        yield from _places(tree[key])


def bytes_of(text: bytes, draws: random.Random) -> bytes:
    """A copy of bytes with damage: flipped bits, a missing end or middle, or additional bytes."""
    found, at = bytearray(text), draws.randrange(len(text))
    match draws.randrange(5):
        case 0:
            for _ in range(draws.choice((1, 1, 5, 50))):
                found[draws.randrange(len(found))] ^= 1 << draws.randrange(8)
        case 1:
            del found[at:]
        case 2:
            del found[at : at + draws.randrange(1, 100)]
        case 3:
            found[at:at] = bytes(draws.randrange(256) for _ in range(draws.randrange(1, 50)))
        case 4:
            found[at:at] = draws.choice((b"9" * 5000, b"[" * 3000, b'"\\u0000', b"1e999", b"NaN", b"-"))
    return bytes(found)


def _edit(text: bytes, draws: random.Random) -> bytes:
    if draws.random() < 0.25:
        return bytes_of(text, draws)
    return json.dumps(edited(json.loads(text), draws)).encode()


def plans(count: int, seed: int, folder: Path) -> Found:
    """`count` edits of a saved plan, which is read, shown, explained, followed, and used for the layouts of
    parameters."""
    found, draws, path = Found(), random.Random(seed), folder / "plan.json"
    text = (
        pw.compile(Net(), (X,), mesh=MESH, parameter_plan={"up.weight": ("tp", None)}).plan.model_dump_json().encode()
    )

    def case() -> None:
        read = pw.Plan.load(path)
        _ = str(read), read.explain("*", alternatives=0), read.parameters, read.predicted_time, repr(read)
        if draws.random() < 0.5:
            step(pw.shard(Net(), plan=str(path)))
        else:
            with pw.auto_parallel_context(strategy_ckpt_config={"load_file": str(path)}):
                step(pw.shard(Net()))

    for i in range(count):
        path.write_bytes(_edit(text, draws))
        examine(found, f"plan {i} of seed {seed}", case, folder / "ran")
    return found


def profiles(count: int, seed: int, folder: Path) -> Found:
    """`count` edits of a device profile, which is read and used for planning."""
    found, draws, path = Found(), random.Random(seed), folder / "profile.json"
    text = profile_of("cpu").model_dump_json().encode()

    def case() -> None:
        pw.set_auto_parallel_context(device_profile=str(path))
        model = pw.shard(Net(), mesh=MESH, in_strategy=(("dp", None),))
        step(model)
        _ = str(model.plan), model.program.schedule

    for i in range(count):
        path.write_bytes(_edit(text, draws))
        examine(found, f"profile {i} of seed {seed}", case, folder / "ran")
    return found


def caches(count: int, seed: int, folder: Path) -> Found:
    """`count` edits of the cache entries of a step: damaged, edited, swapped, replaced by pickles. A step runs after
    each edit."""
    found, draws, home = Found(), random.Random(seed), folder / "cache"
    before = {name: os.environ.pop(name, None) for name in ("PARTWAY_CACHE", "PARTWAY_VERIFY")}

    def case() -> None:
        pw.set_auto_parallel_context(compile_cache_path=str(home))
        step(pw.shard(Net(), mesh=MESH, in_strategy=(("dp", None),)))

    case()
    good = {path: path.read_bytes() for path in home.glob("*/*")}
    assert len(good) == 4, "a capture, a plan, its forward and a program were kept"
    for i in range(count):
        for path, content in good.items():
            path.write_bytes(content)
        path = draws.choice(list(good))
        head, _, body = good[path].partition(b"\n")
        match draws.randrange(5):
            case 0:
                path.write_bytes(bytes_of(good[path], draws))
            case 1:
                path.write_bytes(head + b"\n" + _edit(body, draws))
            case 2:
                path.write_bytes(good[draws.choice([other for other in good if other != path])])
            case 3:
                path.write_bytes(draws.choice((b"", head + b"\n")) + pickle.dumps(Canary(folder / "ran")))
            case 4:
                path.write_bytes(bytes_of(head + b"\n", draws) + body)
        examine(found, f"entry {i} of seed {seed}", case, folder / "ran")
    os.environ.update({name: value for name, value in before.items() if value is not None})
    return found


KINDS = {"arguments": arguments, "plans": plans, "profiles": profiles, "caches": caches}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arguments", type=int, default=2000)
    parser.add_argument("--edits", type=int, default=400, help="of plans, of profiles, and of entries of the cache")
    parser.add_argument("--only", choices=KINDS)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    os.environ["PARTWAY_CACHE"] = "0"
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for name, kind in KINDS.items():
            if given.only in (None, name):
                found = kind(given.arguments if name == "arguments" else given.edits, given.seed, Path(folder))
                print(f"{name}: {found}", *found.failures, sep="\n    ", flush=True)
                failed |= bool(found.failures)
    sys.exit(failed)


if __name__ == "__main__":
    main()
