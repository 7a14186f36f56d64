"""Every layer of torch.nn in float64, float32 and bfloat16, in training and in evaluation mode, forward and backward:
with the batch split over two ranks, in one process and on two gloo processes, compared with one device.

    python tests/conformance/layers.py                  all without results
    python tests/conformance/layers.py LSTM GRU         only these
    python tests/conformance/layers.py --write          docs/coverage/layers.md, from all results

Kernels differ by dtype, also in the number of their results and in strides. The calls are PyTorch's own samples
(`module_db`), and those below for layers without samples.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from command import arguments
from fuzz import unlike
from operators import fresh
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import partway as pw
from partway.propagation.graph.structure import flatten
from partway.strategy.errors import PartwayError

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "coverage" / "layers.md"
RESULTS = ROOT / "out" / "layers.jsonl"
# If the addends of a gradient cancel, as for a bias before a norm, bfloat16 leaves one right digit, on one device too.
# Near the zero of a ReLU it may leave none: the tolerance is then the difference of one device for nudged operands.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 5e-5, torch.bfloat16: 1e-1}
NUDGES = 16
MOST = 2  # calls of a layer in each dtype and mode
STATUSES = {
    "right": "outputs, buffers and gradients are those of one device",
    "torch": "plain PyTorch raises an error",
    "refused": "an error of Partway says what to do",
    "wrong": "other numbers",
    "raw": "an error that is neither",
}
# Not layers by themselves, or not runnable on a CPU.
LEFT_OUT = {
    "Container", "DataParallel", "LazyConv1d", "LazyConv2d", "LazyConv3d", "LazyConvTranspose1d", "LazyConvTranspose2d",
    "LazyConvTranspose3d", "Module", "ModuleDict", "ModuleList", "ParameterDict", "ParameterList", "RNNBase",
    "RNNCellBase", "SyncBatchNorm",
}  # fmt: skip


@dataclass(frozen=True)
class Call:
    """A layer, and its arguments."""

    build: Callable[[], nn.Module]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Cell:
    """The results of the calls of a layer in one dtype: how many have each status, and the reasons of those that are
    not right."""

    layer: str
    dtype: str
    ranks: str
    counts: dict[str, int]
    reasons: tuple[str, ...]


_IMAGE, _ROWS, _LONG = (4, 4, 6, 6), (4, 6), (4, 4, 6)


def _unpooled(dims: int) -> Callable[[torch.dtype], tuple[Any, ...]]:
    def args(dtype: torch.dtype) -> tuple[Any, ...]:
        pool = getattr(nn.functional, f"max_pool{dims}d")
        x, indices = pool(torch.randn(4, 2, *(6,) * dims, dtype=dtype), 2, return_indices=True)
        return x.requires_grad_(), indices

    return args


def _of(*shapes: tuple[int, ...]) -> Callable[[torch.dtype], tuple[Any, ...]]:
    return lambda dtype: tuple(torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes)


def _labelled(dtype: torch.dtype) -> tuple[Any, ...]:
    return *_of((4, 6))(dtype), torch.arange(4)


# The constructor of a layer, and its arguments in a dtype.
OWN: dict[str, list[tuple[Callable[[], nn.Module], Callable[[torch.dtype], tuple[Any, ...]]]]] = {
    "AdaptiveLogSoftmaxWithLoss": [(lambda: nn.AdaptiveLogSoftmaxWithLoss(6, 8, [2, 5]), _labelled)],
    "AlphaDropout": [(lambda: nn.AlphaDropout(0.3), _of(_ROWS))],
    "ChannelShuffle": [(lambda: nn.ChannelShuffle(2), _of(_IMAGE))],
    "CosineSimilarity": [(nn.CosineSimilarity, _of(_ROWS, _ROWS))],
    "CrossMapLRN2d": [(lambda: nn.CrossMapLRN2d(2), _of(_IMAGE))],
    "Dropout": [(lambda: nn.Dropout(0.3), _of(_ROWS))],
    "Dropout1d": [(lambda: nn.Dropout1d(0.3), _of(_LONG))],
    "Dropout2d": [(lambda: nn.Dropout2d(0.3), _of(_IMAGE))],
    "Dropout3d": [(lambda: nn.Dropout3d(0.3), _of((4, 4, 2, 2, 2)))],
    "EmbeddingBag": [
        (lambda: nn.EmbeddingBag(10, 4, mode="sum"), lambda _: (torch.arange(12).reshape(4, 3) % 10,)),
        (lambda: nn.EmbeddingBag(10, 4, mode="mean"), lambda _: (torch.arange(12) % 10, torch.tensor([0, 3, 3, 9]))),
        (lambda: nn.EmbeddingBag(10, 4, mode="max"), lambda _: (torch.arange(12).reshape(4, 3) % 10,)),
    ],
    "FeatureAlphaDropout": [(lambda: nn.FeatureAlphaDropout(0.3), _of(_IMAGE))],
    "Flatten": [(nn.Flatten, _of(_IMAGE))],
    "Fold": [(lambda: nn.Fold((4, 4), 2), _of((4, 8, 9)))],
    "Hardsigmoid": [(nn.Hardsigmoid, _of(_ROWS))],
    "Identity": [(nn.Identity, _of(_ROWS))],
    "LSTM": [
        (lambda: nn.LSTM(6, 5, 2, bidirectional=True), _of((3, 4, 6))),
        (lambda: nn.LSTM(6, 5, 2, dropout=0.3, batch_first=True), _of((4, 3, 6))),
        (lambda: nn.LSTM(6, 5, proj_size=2), _of((3, 4, 6))),
        (lambda: nn.LSTM(6, 5, bias=False), _of((3, 5, 6))),
    ],
    "GRU": [(lambda: nn.GRU(6, 5, 2, bidirectional=True, dropout=0.3), _of((3, 5, 6)))],
    "LazyBatchNorm1d": [(nn.LazyBatchNorm1d, _of(_LONG))],
    "LazyBatchNorm2d": [(nn.LazyBatchNorm2d, _of(_IMAGE))],
    "LazyBatchNorm3d": [(nn.LazyBatchNorm3d, _of((4, 4, 2, 2, 2)))],
    "LazyInstanceNorm1d": [(lambda: nn.LazyInstanceNorm1d(affine=True), _of(_LONG))],
    "LazyInstanceNorm2d": [(lambda: nn.LazyInstanceNorm2d(affine=True), _of(_IMAGE))],
    "LazyInstanceNorm3d": [(lambda: nn.LazyInstanceNorm3d(affine=True), _of((4, 4, 2, 2, 2)))],
    "LazyLinear": [(lambda: nn.LazyLinear(5), _of(_ROWS))],
    "MaxUnpool1d": [(lambda: nn.MaxUnpool1d(2), _unpooled(1))],
    "MaxUnpool2d": [(lambda: nn.MaxUnpool2d(2), _unpooled(2))],
    "MaxUnpool3d": [(lambda: nn.MaxUnpool3d(2), _unpooled(3))],
    "NLLLoss2d": [(nn.NLLLoss2d, lambda dtype: (*_of(_IMAGE)(dtype), torch.arange(144).reshape(4, 6, 6) % 4))],
    "PairwiseDistance": [(nn.PairwiseDistance, _of(_ROWS, _ROWS))],
    "PixelShuffle": [(lambda: nn.PixelShuffle(2), _of(_IMAGE))],
    "PixelUnshuffle": [(lambda: nn.PixelUnshuffle(2), _of(_IMAGE))],
    "RReLU": [(nn.RReLU, _of(_ROWS))],
    "Sequential": [(lambda: nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3)), _of(_ROWS))],
    "TransformerDecoder": [
        (lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16), 2), _of((5, 4, 8), (6, 4, 8)))
    ],
    "TripletMarginLoss": [(nn.TripletMarginLoss, _of(_ROWS, _ROWS, _ROWS))],
    "TripletMarginWithDistanceLoss": [(nn.TripletMarginWithDistanceLoss, _of(_ROWS, _ROWS, _ROWS))],
    "Unflatten": [(lambda: nn.Unflatten(1, (2, 3)), _of(_ROWS))],
    "Unfold": [(lambda: nn.Unfold(2), _of(_IMAGE))],
    "Upsample": [(lambda: nn.Upsample(scale_factor=2, mode="bilinear"), _of(_IMAGE))],
    "UpsamplingBilinear2d": [(lambda: nn.UpsamplingBilinear2d(scale_factor=2), _of(_IMAGE))],
    "UpsamplingNearest2d": [(lambda: nn.UpsamplingNearest2d(scale_factor=2), _of(_IMAGE))],
}


def layers() -> list[str]:
    """The layers of torch.nn on the page."""
    classes = (kind for kind in vars(nn).values() if isinstance(kind, type) and issubclass(kind, nn.Module))
    return sorted({kind.__name__ for kind in classes} - LEFT_OUT)


def calls(layer: str, dtype: torch.dtype, training: bool) -> Iterator[Call]:
    """The calls of a layer in a dtype."""
    from torch.testing._internal.common_modules import module_db  # imports SciPy, which takes seconds

    for build, args in OWN.get(layer, ()):
        yield Call(lambda build=build: build().to(dtype), args(dtype))  # type: ignore[misc]
    for info in module_db:
        if info.name != f"nn.{layer}":
            continue
        made = info.module_inputs_func(
            info, device=torch.get_default_device(), dtype=dtype, requires_grad=True, training=training
        )
        given = [sample for sample in made if sample.forward_input is not None]
        for sample in given[:: max(1, -(-len(given) // MOST))]:
            made_with, with_ = sample.constructor_input, sample.forward_input

            def build(info: Any = info, made_with: Any = made_with) -> nn.Module:
                module: nn.Module = info.module_cls(*made_with.args, **made_with.kwargs).to(dtype)
                return module

            yield Call(build, tuple(with_.args), dict(with_.kwargs))


def whole(t: Any) -> Any:
    """The plain tensor of all values."""
    return t.full_tensor() if isinstance(t, DTensor) else t


def run(module: nn.Module, call: Call) -> dict[str, Tensor | None]:
    """Outputs, gradients and buffers of one call, with the random numbers of one seed."""
    tensors, structure = flatten((call.args, call.kwargs))
    tensors = [fresh(t) for t in tensors]
    args, kwargs = structure.build(list(tensors))
    leaves = [t for t in tensors if t.requires_grad]
    torch.manual_seed(0)
    outputs = [t for t in flatten(module(*args, **kwargs))[0] if isinstance(t, Tensor)]
    able = [o for o in outputs if o.requires_grad]
    able = [o for o in able if not o.shape] or able
    generator = torch.Generator(torch.get_default_device()).manual_seed(0)
    weights = [torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o.dtype) for o in able]
    if able:
        torch.autograd.backward(able, weights)
    found: dict[str, Tensor | None] = {f"output {i}": whole(o).detach() for i, o in enumerate(outputs)}
    found |= {f"gradient of argument {i}": whole(t.grad) for i, t in enumerate(leaves)}
    found |= {f"gradient of {n}": whole(p.grad) for n, p in module.named_parameters()}
    return found | {f"buffer {n}": whole(b).detach() for n, b in module.named_buffers()}


def batch_split(module: nn.Module, call: Call) -> tuple[Any, ...]:
    """`in_strategy` for the batch of a call's first argument."""
    first = call.args[0] if call.args else None
    if not isinstance(first, Tensor) or not first.dim():
        return ()
    batch_first = next((m.batch_first for m in module.modules() if hasattr(m, "batch_first")), True)
    batch = 1 if first.dim() == 3 and not batch_first else 0
    return (tuple("x" if dim == batch else None for dim in range(first.dim())),)


def nudged(t: Any) -> Any:
    """A tensor whose elements are the next larger or the next smaller floating-point numbers; other values
    unchanged."""
    if not isinstance(t, Tensor) or not t.is_floating_point():
        return t
    away = torch.where(torch.rand(t.shape) < 0.5, torch.inf, -torch.inf).to(t.dtype)
    return torch.nextafter(t.detach(), away).requires_grad_(t.requires_grad)


def without_last_digits(
    found: dict[str, Tensor | None], expected: dict[str, Tensor | None], module: nn.Module, call: Call
) -> dict[str, Tensor | None]:
    """`found`, with the values of `expected` wherever one device differs as much for nudged operands."""
    spread: Counter[str] = Counter()
    for seed in range(NUDGES):
        torch.manual_seed(seed)
        other = copy.deepcopy(module)
        for p in other.parameters():
            p.data = nudged(p.data)
        near = run(
            other, Call(call.build, tuple(map(nudged, call.args)), {k: nudged(v) for k, v in call.kwargs.items()})
        )
        for name, value in near.items():
            spread[name] = max(spread[name], distance(value, expected[name]))
    return {n: expected[n] if distance(value, expected[n]) <= spread[n] else value for n, value in found.items()}


def distance(one: Tensor | None, other: Tensor | None) -> float:
    if one is None or other is None or one.shape != other.shape:
        return 0.0 if one is other else float("inf")
    return float((one.double() - other.double()).norm())


def outcome(call: Call, dtype: torch.dtype, training: bool) -> tuple[str, str]:
    """The status of one call, and the reason if it is not right."""
    torch.manual_seed(3)
    module = call.build().train(training)
    plain: Exception | None = None
    expected: dict[str, Tensor | None] = {}
    try:
        expected = run(copy.deepcopy(module), call)
    except Exception as error:
        plain = error
    where = f"{'training' if training else 'evaluation'}, {module}"
    try:
        found = run(pw.shard(copy.deepcopy(module), batch_split(module, call), mesh={"x": 2}), call)
    except PartwayError as error:
        return ("torch", str(plain)) if plain else ("refused", str(error))
    except Exception as error:
        return ("torch", str(plain)) if plain else ("raw", f"{where}: {type(error).__name__}: {error}")
    if plain:
        return "torch", str(plain)
    off = unlike(found, expected, TOLERANCES[dtype])
    if off and dtype is torch.bfloat16:
        off = unlike(without_last_digits(found, expected, module, call), expected, TOLERANCES[dtype])
    return ("wrong", f"{where}: {off}") if off else ("right", "")


def examine(layer: str, dtype: torch.dtype) -> Cell:
    """The results of a layer in a dtype, on the ranks of this process."""
    torch.manual_seed(7)  # the samples draw numbers, alike on every rank
    counts: Counter[str] = Counter()
    reasons: dict[str, None] = {}
    with warnings.catch_warnings(), pw.auto_parallel_context(random_numbers="torch"):
        warnings.simplefilter("ignore")
        for training in (True, False):
            for call in calls(layer, dtype, training):
                status, why = outcome(call, dtype, training)
                counts[status] += 1
                if why:
                    reasons[f"{status}: {' '.join(why.split())[:300]}"] = None
    ranks = "launched" if "RANK" in os.environ else "simulated"
    return Cell(layer, str(dtype).removeprefix("torch."), ranks, dict(counts), tuple(reasons))


def page(cells: list[Cell]) -> str:
    """docs/coverage/layers.md."""
    by_place = {(cell.layer, cell.dtype, cell.ranks): cell for cell in cells}
    total: Counter[str] = sum((Counter(cell.counts) for cell in by_place.values()), Counter())
    dtypes = [str(dtype).removeprefix("torch.") for dtype in TOLERANCES]
    names, version = sorted({cell.layer for cell in cells}), torch.__version__.partition("+")[0]
    lines = [
        "# Layers",
        "",
        f"Written by `python tests/conformance/layers.py --write`; do not edit. torch {version}.",
        "",
        f"{len(names)} layers of torch.nn, in training and in evaluation mode, forward and backward, each call with",
        "its batch split over 2 ranks, as virtual devices of one process and as 2 processes on gloo. Kernels differ by",
        "dtype, so each layer is tested in three dtypes. `make conformance` checks this page.",
        "",
        "| | calls | |",
        "| --- | --: | --- |",
        *(f"| {status} | {total[status]} | {meaning} |" for status, meaning in STATUSES.items()),
        "",
        "A cell has the results of the calls in one process and, if they differ, those on two.",
        "",
        f"| layer | {' | '.join(dtypes)} |",
        "| --- |" + " --- |" * len(dtypes),
    ]
    for name in names:
        columns = []
        for dtype in dtypes:
            pair = [by_place.get((name, dtype, ranks)) for ranks in ("simulated", "launched")]
            said = [", ".join(f"{n} {s}" for s, n in sorted(cell.counts.items())) if cell else "" for cell in pair]
            columns.append(said[0] if said[0] == said[1] else " / ".join(said))
        lines.append(f"| {name} | {' | '.join(columns)} |")
    others: dict[str, None] = {}
    for cell in by_place.values():
        others |= {f"- {cell.layer}, {cell.dtype}: {why}": None for why in cell.reasons if not why.startswith("torch")}
    if others:
        lines += ["", "## Not right", "", *others]
    return "\n".join(lines) + "\n"


def kept() -> list[Cell]:
    """The earlier results, the latest of each last."""
    if not RESULTS.exists():
        return []
    read = map(json.loads, RESULTS.read_text(encoding="utf-8").splitlines())
    return [Cell(**{**row, "reasons": tuple(row["reasons"])}) for row in read]


def work(names: list[str]) -> None:
    """Examine layers on the ranks of this process; the first rank writes the results."""
    torch.set_num_threads(1)
    torch.set_default_device(os.environ.get("PARTWAY_TEST_DEVICE"))
    torch.backends.cudnn.allow_tf32 = False  # of float32 it would keep 10 bits
    pw.init(simulate=2)
    for name in names:
        for dtype in TOLERANCES:
            cell = examine(name, dtype)
            if os.environ.get("RANK", "0") == "0":
                with RESULTS.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(cell)) + "\n")
                print(cell.ranks, name, cell.dtype, cell.counts, *cell.reasons[:2], flush=True)
    pw.shutdown()


def main() -> None:
    if os.environ.get("LAYERS"):
        work(os.environ["LAYERS"].split())
        return
    given = arguments(__doc__, RESULTS)
    launched = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", __file__]
    for ranks, command in (("simulated", [sys.executable, __file__]), ("launched", launched)):
        done = {cell.layer for cell in kept() if cell.ranks == ranks}
        names = given.names or [name for name in layers() if name not in done]
        environment = {**os.environ, "LAYERS": " ".join(names), "OMP_NUM_THREADS": "1", "PARTWAY_VERIFY": "1"}
        if names:
            subprocess.run(command, env={**environment, "PARTWAY_CACHE": "0"}, check=False)
    if given.write:
        PAGE.write_text(page(kept()), encoding="utf-8")


if __name__ == "__main__":
    main()
