"""PyTorch's samples of its operators, run eagerly on split tensors, on gloo processes, and compared with plain tensors.

    python tests/conformance/eager.py                         all entries on 2 and on 4 processes
    python tests/conformance/eager.py --only norm --ranks 2
    python tests/conformance/eager.py --write                 docs/coverage/eager.md
    python tests/conformance/eager.py --device cuda --ranks 2 over NCCL, on one GPU

In each sample every tensor in turn, and then all of them, is a value that a script finds in a sharded model: a
parameter (a leaf with a gradient), a gradient or a state of an optimizer (without one), or a partial value. Each is
split along every dim, evenly or unevenly by its size, on 4 processes over two axes. Results, gradients for random
cotangents, and tensors after operators in place have to equal those of one device.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1] / "helpers"))

from pool import Pool

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "coverage" / "eager.md"
SAMPLES = 4  # of an entry, evenly spread
DIMS = 2  # of a tensor that are split
STATUSES = "right", "refused", "random", "raw", "wrong"
MEANING = {
    "right": "the results of one device, or the error that PyTorch raises for plain tensors too",
    "refused": "an error that names an alternative",
    "random": "random numbers or uninitialized memory; shapes and dtypes are right",
    "raw": "another error",
    "wrong": "other results",
}


def name_of(info: Any) -> str:
    return f"{info.name}.{info.variant_test_name}" if info.variant_test_name else str(info.name)


def entries() -> dict[str, Any]:
    """The entries that take float64, or otherwise float32, by name."""
    from torch.testing._internal.common_methods_invocations import op_db  # imports SciPy, which takes seconds

    return {name_of(info): info for info in op_db if not info.dtypes.isdisjoint({torch.float64, torch.float32})}


def examine(names: Sequence[str], most: int = SAMPLES) -> list[dict[str, Any]]:
    """On a rank: the results of the entries `names`."""
    from torch.distributed.tensor import DTensor

    assert DTensor
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        known = entries()
        return [_entry(known[name], most) for name in names]


def _entry(info: Any, most: int) -> dict[str, Any]:
    found: Counter[str] = Counter()
    problems: list[str] = []
    for where, given, gradient in _samples(info, most):
        for what, status, text in _cases(info, given, gradient):
            found[status] += 1
            if status in ("raw", "wrong", "refused") and len(problems) < 3:
                problems.append(f"{where} {what}: {text}")
    return {"name": name_of(info), "found": dict(found), "problems": problems}


def _samples(info: Any, most: int) -> Iterator[tuple[str, Any, bool]]:
    device = torch.get_default_device().type
    able = info.supported_dtypes(device)
    dtype = torch.float64 if torch.float64 in able else torch.float32
    gradient = info.supports_autograd and dtype in info.supported_backward_dtypes(device)
    torch.manual_seed(0)
    samples = [s for s in info.sample_inputs(device, dtype, requires_grad=gradient) if _dense(s)]
    step = max(1, len(samples) // most)
    for i, sample in enumerate(samples[::step][:most]):
        yield f"#{i * step}", sample, gradient


def _dense(sample: Any) -> bool:
    return all(t.layout is torch.strided for t in _tensors((sample.input, sample.args, sample.kwargs)))


def _tensors(value: Any) -> list[Tensor]:
    from torch.utils._pytree import tree_leaves

    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _cases(info: Any, given: Any, gradient: bool) -> Iterator[tuple[str, str, str]]:
    """For each way to split the tensors of a sample: its name, its status, and the reason."""
    from torch.utils._pytree import tree_flatten, tree_unflatten

    leaves, spec = tree_flatten(((given.input, *given.args), dict(given.kwargs)))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def called(op: Callable[..., Any], values: dict[int, Any]) -> tuple[Any, list[Tensor]]:
        """The result of a call with some tensors replaced, and their gradients."""
        own = [values.get(i, _fresh(leaf)) for i, leaf in enumerate(leaves)]
        args, kwargs = tree_unflatten(own, spec)
        torch.manual_seed(0)
        result = op(*args, **kwargs)
        needs = [own[i] for i in places if own[i].requires_grad]
        return result, _gradients(given.output_process_fn_grad(result), needs)

    def plainly(op: Callable[..., Any], values: dict[int, Any], recorded: bool) -> Any:
        with torch.set_grad_enabled(recorded):
            return called(op, values)

    undefined = "empty" in info.name or info.name in ("new_empty_strided", "rand_like", "randn_like", "randint_like")
    in_place = info.inplace_variant
    for how, values in _splits(leaves, places, gradient):
        recorded = how.startswith("parameter")
        plain = {i: _fresh(leaves[i], leaves[i].requires_grad and recorded) for i in values}
        yield how, *_compared(lambda v: plainly(info.op, v, recorded), plain, values, undefined)  # noqa: B023
        if in_place and places and 0 in values and isinstance(leaves[0], Tensor) and not recorded:
            _, values = next((h, v) for h, v in _splits(leaves, places, gradient) if h == how)
            plain = {i: _fresh(leaves[i], False) for i in values}
            yield f"in place, {how}", *_compared(lambda v: plainly(in_place, v, False), plain, values, undefined)


def _fresh(leaf: Any, gradient: bool | None = None) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.detach().clone().requires_grad_(leaf.requires_grad if gradient is None else gradient)


def _gradients(result: Any, needs: list[Tensor]) -> list[Any]:
    outputs = [t for t in _tensors(result) if t.requires_grad]
    if not outputs or not needs:
        return []
    generator = torch.Generator(torch.get_default_device()).manual_seed(1)
    weights = [torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o.dtype) for o in outputs]
    return list(torch.autograd.grad(outputs, needs, weights, allow_unused=True))


def _splits(leaves: list[Any], places: list[int], gradient: bool) -> Iterator[tuple[str, dict[int, Any]]]:
    for kind in ("parameter", "gradient", "partial"):
        able = [i for i in places if leaves[i].dim() and leaves[i].numel() and _may_be(leaves[i], kind, gradient)]
        for i in able:
            dims = [d for d, n in enumerate(leaves[i].shape) if n > 1][:: 1 if kind != "partial" else 99][:DIMS]
            for d in dims or ([0] if kind == "partial" else []):
                yield f"{kind} {places.index(i)} dim {d}", {i: _split(leaves[i], d, kind)}
        every = [i for i in able if max(leaves[i].shape) > 1]
        if len(every) > 1:
            dims = {i: next(d for d, n in enumerate(leaves[i].shape) if n > 1) for i in every}
            yield f"{kind}, all", {i: _split(leaves[i], dims[i], kind) for i in every}


def _may_be(leaf: Tensor, kind: str, gradient: bool) -> bool:
    """Whether a tensor can be a parameter, or a partial value."""
    return {"parameter": gradient and leaf.requires_grad, "partial": leaf.is_floating_point()}.get(kind, True)


def _split(leaf: Tensor, dim: int, kind: str) -> Any:
    """The tensor as it is on a rank of a sharded model."""
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, Partial, Replicate

    from partway.runtime.executors.execute import device_mesh
    from partway.runtime.tensors.parameters import shard_tensor
    from partway.runtime.tensors.split_tensor import as_split
    from partway.strategy import Layout, Mesh, Shard
    from partway.strategy.placement import REPLICATE

    size, rank = dist.get_world_size(), dist.get_rank()
    mesh = Mesh({"x": size}) if size == 2 else Mesh({"x": 2, "y": size // 2})
    if kind == "partial":
        share = leaf.detach().clone() if rank < size // 2 else torch.zeros_like(leaf)  # they add up to it exactly
        return as_split(
            DTensor.from_local(share, device_mesh(mesh), [Partial(), *[Replicate()] * (len(mesh.axes) - 1)])
        )
    both = (Shard(dim), Shard(dim)) if size > 2 and leaf.shape[dim] % size == 0 else (Shard(dim), REPLICATE)
    layout = Layout(mesh, both[: len(mesh.axes)] if kind == "parameter" else (REPLICATE, Shard(dim))[-len(mesh.axes) :])
    part = shard_tensor(leaf, layout)
    return torch.nn.Parameter(part) if kind == "parameter" else part


def _compared(
    call: Callable[[dict[int, Any]], Any], plain: dict[int, Any], values: dict[int, Any], undefined: bool
) -> tuple[str, str]:
    from torch.utils._pytree import tree_leaves

    from partway.strategy.errors import PartwayError

    def outcome(values: dict[int, Any]) -> Any:
        try:
            result, gradients = call(values)
            return [_whole(leaf) for leaf in (*tree_leaves(result), *gradients, *values.values())]
        except Exception as error:
            return error

    expected, found = outcome(plain), outcome(values)
    if isinstance(found, PartwayError) and not isinstance(expected, Exception):
        return "refused", _line(found)
    if isinstance(found, Exception) or isinstance(expected, Exception):
        alike = isinstance(found, Exception) and isinstance(expected, Exception)
        if alike:
            return "right", ""
        return ("raw" if isinstance(found, Exception) else "wrong"), _line(found)
    if len(found) != len(expected):
        return "wrong", f"{len(found)} results for {len(expected)}"
    for one, other in zip(found, expected, strict=True):
        if (problem := _difference(one, other, undefined)) is not None:
            return "wrong", problem
    return ("random" if undefined else "right"), ""


def _line(error: Any) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]


def _whole(value: Any) -> Any:
    if isinstance(value, Tensor):
        value = value.detach()
        return (
            value.full_tensor()
            if hasattr(value, "full_tensor")
            else value + 0
            if hasattr(value, "looked_at")
            else value
        )
    return value


def _difference(found: Any, expected: Any, undefined: bool) -> str | None:
    if not isinstance(expected, Tensor):
        same = found == expected or (isinstance(found, float) and abs(found - expected) <= 1e-9 * abs(expected)) or (
            found != found and expected != expected
        )  # fmt: skip
        return None if same or type(found) is type(expected) is object else f"{found!r}, not {expected!r}"
    if not isinstance(found, Tensor) or found.shape != expected.shape or found.dtype != expected.dtype:
        return f"{getattr(found, 'shape', found)} {getattr(found, 'dtype', '')}, not {expected.shape} {expected.dtype}"
    if undefined or expected.layout is not torch.strided:
        return None
    least = 1e-4 if expected.dtype in (torch.float32, torch.complex64) else 1e-8
    try:
        torch.testing.assert_close(found.clone(), expected, rtol=least, atol=least, equal_nan=True)
    except AssertionError as error:
        return str(error).splitlines()[0] + " " + (str(error).splitlines() + [""] * 4)[3]
    return None


# -- All entries ------------------------------------------------------------------------------------------------------


def examine_all(names: Sequence[str], ranks: int, most: int = SAMPLES, together: int = 8) -> Iterator[dict[str, Any]]:
    """The results of `names`, from a pool of `ranks`; an entry that ends a rank is raw."""
    pool = Pool(ranks)
    left = [list(names[i : i + together]) for i in range(0, len(names), together)][::-1]
    while left:
        asked = left.pop()
        try:
            results = pool.call(examine, (asked, most))
        except AssertionError as error:
            pool.close()
            pool = Pool(ranks)
            if len(asked) > 1:
                left += [[name] for name in asked]
                continue
            yield {"name": asked[0], "found": {"raw": 1}, "problems": [str(error)[-300:]]}
            continue
        for each in zip(*results, strict=True):
            yield next((one for one in each if one != each[0]), each[0])
    pool.close()


HEAD = """# Operators on split tensors

A script with a sharded model also uses its parameters, their gradients and the states of optimizers, which are split
under a launcher. Here the samples of PyTorch's database of operators (`op_db`) run on such tensors, {samples} of each
entry, on {ranks} gloo processes, mixed with plain tensors: each tensor of a sample in turn, and then all of them, is a
parameter, a gradient, or a partial value, split along up to two of its dims, also for operators in place. Results,
gradients and written tensors are compared with plain PyTorch {version}, in float64.
`python tests/conformance/eager.py --write` writes this page; `make test` runs a part of it.

| processes | entries | {statuses} |
| --: | --: | {rule} |
{totals}

{meanings}
"""
NOT_RIGHT = """
Refused cases, with the first error of each entry:

| entry | processes | cases | the first |
| --- | --: | --: | --- |
{lines}
"""


def page(results: dict[int, list[dict[str, Any]]], most: int) -> str:
    totals, lines = [], []
    for ranks, each in results.items():
        total: Counter[str] = sum((Counter(r["found"]) for r in each), Counter())
        totals.append(f"| {ranks} | {len(each)} | " + " | ".join(str(total[s]) for s in STATUSES) + " |")
        for result in each:
            bad = {s: n for s, n in result["found"].items() if s in ("refused", "raw", "wrong")}
            for status, count in bad.items():
                why = (result["problems"] or [""])[0].replace("|", "\\|")
                lines.append(f"| {result['name']} | {ranks} | {count} {status} | {why} |")
    return (HEAD + NOT_RIGHT * bool(lines)).format(
        samples=most, ranks=" and ".join(map(str, results)), version=".".join(torch.__version__.split(".")[:2]),
        statuses=" | ".join(STATUSES), rule=" | ".join("--:" for _ in STATUSES), totals="\n".join(totals),
        meanings="\n".join(f"* {status}: {MEANING[status]}" for status in STATUSES), lines="\n".join(lines),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="entries whose names match this regular expression")
    parser.add_argument("--samples", type=int, default=SAMPLES)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--write", action="store_true", help="write docs/coverage/eager.md")
    given = parser.parse_args()
    os.environ["PARTWAY_TEST_DEVICE"] = given.device
    names = [name for name in entries() if re.search(given.only, name)]
    results: dict[int, list[dict[str, Any]]] = {}
    for ranks in given.ranks:
        since = time.monotonic()
        results[ranks] = []
        for result in examine_all(names, ranks, given.samples):
            results[ranks].append(result)
            if set(result["found"]) & {"raw", "wrong", "refused"}:
                print(ranks, result["name"], result["found"], *result["problems"], sep="\n    ", flush=True)
        total: Counter[str] = sum((Counter(r["found"]) for r in results[ranks]), Counter())
        print(f"{ranks} processes: {dict(total)} of {len(names)} entries, {time.monotonic() - since:.0f} s", flush=True)
    if given.write:
        PAGE.write_text(page(results, given.samples), encoding="utf-8")


if __name__ == "__main__":
    multiprocessing.freeze_support()
    main()
