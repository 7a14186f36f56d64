"""The generated parts of docs/options.md, the page of all options.

python tests/conformance/options.py --write docs/options.md, between its marks

Each option is listed with the type that type checkers see, its default, and the docstring below its field, which
`help(pw.set_auto_parallel_context)` shows too. The text outside the marks is written by hand.
"""

from __future__ import annotations

import argparse
import inspect
import re
import textwrap
from pathlib import Path
from typing import Any

import partway as pw
from partway.fusion import FusionMode
from partway.options.algo import AlgoParameters
from partway.options.base import FrozenOptions
from partway.options.parallel import ParallelContext
from partway.options.typed import AlgoOptions, ParallelOptions, meanings

PAGE = Path(__file__).parents[2] / "docs" / "options.md"
MARK = "<!-- {}: written by `python tests/conformance/options.py --write`; do not edit -->"
END = "<!-- end -->"

PARALLEL: dict[str, tuple[str, ...]] = {  # every option belongs to one purpose
    "What is split": ("parallel_mode", "device_num", "dataset_strategy", "full_batch", "whole_results"),
    "How plans are found": ("search_mode", "device_profile", "on_unknown_op", "strategy_ckpt_config"),
    "Numbers": (
        "gradients_mean",
        "gradient_fp32_sync",
        "batch_norm_parts",
        "random_numbers",
        "compare_replicas",
        "parameter_broadcast",
    ),
    "Memory": ("enable_parallel_optimizer", "parallel_optimizer_config", "reshard_after_forward"),
    "Speed": ("comm_fusion", "all_reduce_fusion_config", "backend", "enable_compile_cache", "compile_cache_path"),
}
ALGO: dict[str, tuple[str, ...]] = {
    "Devices and memory": ("fully_use_devices", "memory_limit", "recompute", "optimizer_states", "expert_load"),
    "What the search looks at": (
        "enable_algo_approxi", "algo_approxi_epsilon", "elementwise_op_strategy_follow",
        "tensor_slice_align_enable", "tensor_slice_align_size",
    ),
}  # fmt: skip


def sections() -> dict[str, str]:
    """The generated text between the marks of each name."""
    arguments = (inspect.getdoc(pw.shard) or "").split("\n\n")[1]
    return {
        "shard": f"```text\n{arguments}\n```",
        "parallel": _listing(ParallelOptions, ParallelContext, PARALLEL),
        "algo": _listing(AlgoOptions, AlgoParameters, ALGO),
    }


def page(text: str) -> str:
    """The page `text` with new text between its marks."""
    for name, section in sections().items():
        start = MARK.format(name)
        before, mark, rest = text.partition(start)
        assert mark, f"docs/options.md has no line {start}"
        text = f"{before}{start}\n\n{section}\n\n{END}{rest.partition(END)[2]}"
    return text


def _listing(options: type[Any], model: type[FrozenOptions], groups: dict[str, tuple[str, ...]]) -> str:
    assert sorted(name for names in groups.values() for name in names) == sorted(model.model_fields)
    lines = []
    for purpose, names in groups.items():
        lines += [f"### {purpose}", ""]
        for name in names:
            lines += [*_option(name, _type(options.__annotations__[name]), model), ""]
    return "\n".join(lines).rstrip()


def _option(name: str, written: str, model: type[FrozenOptions]) -> list[str]:
    default = getattr(model(), name)
    parts = type(default) if isinstance(default, FrozenOptions) else None
    shown = "" if parts else f", default `{model().model_dump()[name]!r}`"
    lines = [f"**`{name}`**: `{written}`{shown}", "", _text(meanings(model)[name])]
    if parts:
        lines += ["", "Its keys:", "", *(_key(key, parts) for key in parts.model_fields)]
    if name == "comm_fusion":
        modes = inspect.cleandoc(FusionMode.__doc__ or "").split("\n\n")[1]
        lines += ["", "The modes:", "", "```text", *modes.splitlines(), "```"]
    return lines


def _key(key: str, model: type[FrozenOptions]) -> str:
    return f"- `{key}`, default `{model().model_dump()[key]!r}`: {' '.join(meanings(model)[key].split())}"


def _type(annotation: Any) -> str:
    """An annotation as users write its values: `Literal["a", "b"] | None` is `"a" | "b" | None`."""
    written = getattr(annotation, "__forward_arg__", str(annotation)).replace("'", '"')
    return re.sub(r"Literal\[([^]]*)\]", lambda found: found[1].replace(", ", " | "), written)


def _text(meaning: str) -> str:
    return "\n".join(textwrap.wrap(" ".join(meaning.split()), 120, break_on_hyphens=False, break_long_words=False))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write docs/options.md")
    written = page(PAGE.read_text(encoding="utf-8"))
    if parser.parse_args().write:
        PAGE.write_text(written, encoding="utf-8")
