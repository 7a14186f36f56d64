"""Calls whose sizes change: how many plans they take, how long a new size takes, and what stays in memory.

    python benchmarks/sizes.py                         # 200 batch sizes and lengths of each model, 4 virtual devices
    python benchmarks/sizes.py --models llama --sizes 20

For each model a loop draws a batch size (and a length, or a side of images) for every call, trains one step and runs
one in inference, and compares losses and gradients with one device. Printed are: plans that were searched, the largest
relative error, the median seconds of a first call, of a call of a new size, and of a known one, beside a plan for each
size (`dynamic=False`, over fewer sizes), and the process's memory after each quarter of the calls.
"""

from __future__ import annotations

import random
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from script import start
from torch import Tensor, nn

sys.path[:0] = [str(Path(__file__).parents[1] / "tests" / name) for name in ("models", "helpers")]

import images  # noqa: E402
import zoo  # noqa: E402
from checks import loss_of, whole  # noqa: E402

import partway as pw  # noqa: E402
from partway.requests.request import engine_of  # noqa: E402

MESH = {"dp": 2, "tp": 2}
ALONE = 8  # sizes of which each is planned by itself, for comparison
Batch = Mapping[str, Tensor]


def _images(rows: int, side: int) -> Batch:
    target = torch.randint(0, images.CLASSES + 1, (rows, 8 * side, 8 * side))
    return {"image": torch.randn(rows, 3, 8 * side, 8 * side, dtype=torch.float64), "target": target}


def _cased(name: str) -> Callable[[int, int], Batch]:
    def batch(rows: int, length: int) -> Batch:
        made = zoo.CASES[name].batch(size=rows)
        if "input_ids" not in made:
            return made
        ids = torch.randint(0, zoo.VOCABULARY, (rows, length))
        return {"input_ids": ids, "labels": ids.clone()}

    return batch


class _Rotary(nn.Module):
    """The cosines and sines of positions, in the dtype of the model."""

    def __init__(self, frequencies: Tensor) -> None:
        super().__init__()
        self.register_buffer("frequencies", frequencies.double())

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = (position_ids.unsqueeze(-1) * self.frequencies).repeat(1, 1, 2)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def _llama() -> nn.Module:
    """Without what transformers computes in float32 whatever it is given (norms, positions, the loss): no two ways to
    the same number would agree to more digits than that has."""
    model: Any = zoo.CASES["llama"].build()
    model.loss_function = zoo.next_token_loss
    model.model.rotary_emb = _Rotary(model.model.rotary_emb.inv_freq)
    for inner in list(model.modules()):
        for name, norm in list(inner.named_children()):
            if type(norm).__name__ == "LlamaRMSNorm":
                plain = nn.RMSNorm(len(norm.weight), eps=norm.variance_epsilon, dtype=torch.float64)
                plain.load_state_dict(norm.state_dict())
                setattr(inner, name, plain)
    return model


MODELS: Mapping[str, tuple[Callable[[], nn.Module], Callable[[int, int], Batch]]] = {
    "mlp": (zoo.CASES["mlp"].build, _cased("mlp")),
    "llama": (_llama, _cased("llama")),
    "vit": (zoo.CASES["vit"].build, _cased("vit")),
    "resnet50": (zoo.CASES["resnet50"].build, _cased("resnet50")),
    "unet": (lambda: images.UNet().double(), _images),
}


def step(model: Any, batch: Batch) -> tuple[float, dict[str, Tensor]]:
    """The loss and the gradients of one step of training."""
    model.zero_grad()
    loss = loss_of(model.train()(**batch))
    loss.backward()
    return float(whole(loss.detach())), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def errors(model: Any, plain: nn.Module, batch: Batch) -> tuple[float, float, float]:
    """The seconds that the sharded model took for a step, and how far its loss and its gradients are from one device's,
    relative to that and to the largest gradient."""
    start = time.perf_counter()
    loss, gradients = step(model, batch)
    took = time.perf_counter() - start
    expected, others = step(plain, batch)
    largest = max(gradient.norm().item() for gradient in others.values())
    off = max((whole(gradients[name]) - other).norm().item() for name, other in others.items()) / largest
    with torch.inference_mode():
        evaluated, wanted = (float(whole(loss_of(one.eval()(**batch)))) for one in (model, plain))
    return took, max(abs(loss / expected - 1), abs(evaluated / wanted - 1)), off


def drawn(count: int, seed: int) -> Iterator[tuple[int, int]]:
    """Batch sizes and lengths."""
    numbers = random.Random(seed)
    for _ in range(count):
        yield numbers.randint(2, 24), numbers.randint(4, 16)


def resident() -> float:
    """Megabytes that this process holds."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def measure(name: str, count: int) -> None:
    """One row for a model."""
    build, batch_of = MODELS[name]
    torch.manual_seed(0)
    plain = build()
    torch.manual_seed(0)
    model: Any = pw.shard(build(), mesh=MESH)
    new: list[float] = []
    known: list[float] = []
    seen: set[tuple[tuple[int, ...], ...]] = set()
    worst, memory, first = 0.0, [], 0.0
    for i, sizes in enumerate(drawn(count, seed=1)):
        torch.manual_seed(i)
        batch = batch_of(*sizes)
        took, loss, gradients = errors(model, plain, batch)
        shapes = tuple(tuple(tensor.shape) for tensor in batch.values())
        if i == 0:
            first = took
        elif i > 1:
            (known if shapes in seen else new).append(took)
        seen.add(shapes)
        worst = max(worst, loss, gradients)
        if (i + 1) % (count // 4) == 0:
            memory.append(resident())
    engine = engine_of(model)
    assert engine is not None
    torch.manual_seed(0)
    alone: Any = pw.shard(build(), mesh=MESH, dynamic=False)
    apart: list[float] = []
    for rows, length in drawn(ALONE, seed=2):
        start = time.perf_counter()
        step(alone, batch_of(rows, length))
        apart.append(time.perf_counter() - start)
    each = statistics.median(apart)
    middle = statistics.median(new) if new else float("nan")
    quartiles = statistics.quantiles(new, n=4) if len(new) > 1 else [middle] * 3
    held = " -> ".join(f"{each:.0f}" for each in memory)
    print(
        f"{name:9} {engine.searched:5} plans  {len(seen):4} sizes  error {worst:.1e}  first {first:6.2f} s  new size "
        f"{middle:5.2f} s ({quartiles[0]:.2f} to {quartiles[2]:.2f})  known {statistics.median(known or [0]):5.3f} s  "
        f"planned alone {each:5.2f} s, ratio {middle / each:.2f}  memory {held} MB",
        flush=True,
    )


def main(
    models: Annotated[str, typer.Option(help="which, with commas between")] = ",".join(MODELS),
    sizes: Annotated[int, typer.Option(min=4, help="calls of each model")] = 200,
    quick: Annotated[bool, typer.Option("--quick", help="12 calls of the MLP and of Llama")] = False,
) -> None:
    """Print a row for each model."""
    if quick:
        models, sizes = "mlp,llama", 12
    torch.set_num_threads(1)
    pw.set_auto_parallel_context(enable_compile_cache=False)  # of an earlier run, which had the same sizes
    for name in models.split(","):
        measure(name, sizes)


if __name__ == "__main__":
    start(main)
