"""The published runs as rows: what each says, as which recipe it is planned, and why some cannot be expressed.

`published_runs.csv` quotes its sources; its columns `derived` and `notes` say what was computed from what was printed.
A row states a throughput in one or more of tokens/s, TFLOP/s, MFU and seconds per step. One of them is compared:
tokens/s, else seconds, else TFLOP/s or MFU by the formula of the row's source (`Source.flops`).
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from published_models import Architecture
from published_plans import Spec

CSV = Path(__file__).with_name("published_runs.csv")

# -- Sources -----------------------------------------------------------------------------------------------------------


def _dense(a: Architecture, sequence: int, parameters: int) -> float:
    """FLOPs per token of the forward and backward: 6 per parameter, and 12 hidden * sequence per layer for attention
    without a mask (Chowdhery et al., "PaLM", 2022, appendix B)."""
    return 6.0 * parameters + 12.0 * a.layers * a.hidden * sequence


def palm(a: Architecture, sequence: int) -> float:
    """All parameters count (llm-foundry, scripts/train/benchmarking)."""
    return _dense(a, sequence, a.parameters(sequence))


def torchtitan(a: Architecture, sequence: int) -> float:
    """Without the parameters of the embedding (torchtitan, `get_num_flop_per_token`)."""
    return _dense(a, sequence, a.parameters(sequence) - a.vocab * a.hidden)


def nanotron(a: Architecture, sequence: int) -> float:
    """Matrix products, attention without a mask, and the output layer (nanotron, `get_flops`)."""
    products = a.layers * (a.in_block - 2 * a.hidden) + a.vocab * a.hidden
    return _dense(a, sequence, products)


def megatron(a: Architecture, sequence: int) -> float:
    """72 layers hidden^2 (1 + s / 6 hidden + vocab / 12 layers hidden), without recomputation (Megatron-LM,
    `num_floating_point_operations`)."""
    return 72.0 * a.layers * a.hidden**2 * (1 + sequence / (6 * a.hidden) + a.vocab / (12 * a.layers * a.hidden))


def megatron_recomputing(a: Architecture, sequence: int) -> float:
    """96 layers hidden^2 (1 + s / 6 hidden + vocab / 16 layers hidden), with the forward run again (Narayanan et al.,
    "Efficient Large-Scale Language Model Training on GPU Clusters", 2021, equation 3)."""
    return 96.0 * a.layers * a.hidden**2 * (1 + sequence / (6 * a.hidden) + a.vocab / (16 * a.layers * a.hidden))


@dataclass(frozen=True)
class Source:
    """What all rows of a source have in common, where a row says nothing else.

    family        of the models
    flops         the source's formula of FLOPs per token
    sum32         gradients are reduced in float32
    overlapped    collectives of parameters and gradients run beside computation; otherwise gradients are reduced after
                  the backward
    weights, masters   bytes per parameter of the weights at rest, and of float32 copies beside them
    compiled      elementwise operators are fused where the row does not say whether they are
    sequence_parallel  tensor parallelism splits the sequence between the products
    zero          the stage of ZeRO over dp where the row says none
    flash         attention is one kernel
    loss32        float32 copies of the logits that the loss holds beside those of the program: PyTorch's cross entropy
                  of float32 logits keeps its result and makes their gradient
    """

    family: str
    flops: Callable[[Architecture, int], float]
    sum32: bool
    overlapped: bool = True
    weights: int = 4
    masters: int = 0
    compiled: bool = False
    sequence_parallel: bool = True
    zero: int = 0
    flash: bool = True
    loss32: int = 0


SOURCES = {  # by the beginning of the source's name
    # FSDP2 with bfloat16 parameters and float32 reductions, float32 weights at rest
    "torchtitan": Source("llama", torchtitan, sum32=True, compiled=True, loss32=2),
    # gradients are summed in float32 beside bfloat16 weights, whose float32 copies ZeRO 1 splits
    "nanotron": Source("llama", nanotron, sum32=True, weights=2, masters=4, loss32=2),
    "Megatron-LM README images/model_table": Source(
        "gpt", megatron, sum32=True, weights=2, masters=4, compiled=True, zero=1
    ),
    "Megatron-LM README images/cases": Source(
        "gpt", megatron_recomputing, sum32=False, overlapped=False, weights=2, masters=4, compiled=True,
        sequence_parallel=False, flash=False,
    ),
    "Megatron-LM images/tables": Source(
        "gpt", megatron_recomputing, sum32=False, overlapped=False, weights=2, masters=4, compiled=True,
        sequence_parallel=False, flash=False,
    ),
    # FSDP1 with mixed_precision: PURE, so bfloat16 reductions; float32 weights at rest
    "MosaicML": Source("gpt", palm, sum32=False),
    "IBM": Source("llama", palm, sum32=False, weights=2, compiled=True),
}  # fmt: skip

KINDS = {  # of GPUs, by a pattern of the column gpu
    "H100 96GB|H100 94": "H100 96GB",
    "h100_80gb|H100 80GB|^H100$|DGX-H100": "H100 80GB",
    "A100 40GB|a100_40gb": "A100 40GB",
    "A100 80GB|a100_80gb": "A100 80GB",
    "V100": "V100 32GB",
    "H200": "H200",
    "B200": "B200",
}

RECOMPUTE = {  # what the backward computes again, by the beginning of the column recompute
    "none": "none",
    "full": "full",
    "selective per op": "every second product",
    "selective layer": "every second block",
    "selective: every 2nd layer": "every second block",
}


# -- Rows --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """A row of the file, by the names of its columns, and its place in the file."""

    number: int
    values: dict[str, str]

    def __getattr__(self, name: str) -> str:
        try:
            return self.__dict__["values"][name]
        except KeyError:
            raise AttributeError(name) from None

    def count(self, name: str, default: int = 1) -> int:
        """A whole number of a column; `default` if it is empty."""
        return int(self.values[name] or default)

    @property
    def label(self) -> str:
        """The source in a word, and the model."""
        return f"{self.short} {self.model}"

    @property
    def short(self) -> str:
        """The source in a few words."""
        return re.sub(r"MosaicML llm-foundry scripts/train/benchmarking/README.md: ", "MosaicML ", self.source)[:44]

    @property
    def kind(self) -> str:
        """The kind of GPU."""
        return next((kind for pattern, kind in KINDS.items() if re.search(pattern, self.gpu)), self.gpu)

    @property
    def layout(self) -> str:
        """The layout in a few words."""
        names = ("dp", "fsdp", "tp", "pp", "cp", "ep")
        sizes = [f"{name}{self.values[name]}" for name in names if self.values[name] not in ("", "1")]
        zero = f" zero{self.zero}" if self.zero else ""
        return f"{' '.join(sizes) or 'one GPU'}{zero} mb{self.microbatch or '?'} ga{self.grad_accum or '?'} s{self.seq}"

    @cached_property
    def rules(self) -> Source | None:
        return next((rules for start, rules in SOURCES.items() if self.source.startswith(start)), None)

    @cached_property
    def why_not(self) -> str:
        """Why it cannot be expressed; "" if it can."""
        v = self.values
        if (
            v["ep"] not in ("", "1")
            or "MoE" in self.model
            or "Nemotron" in self.model
            or "GPT-OSS" in self.model.upper()
        ):
            return "experts (ep > 1, or a mixture of experts)"
        if re.search("fp8|nvfp4", self.dtype.lower()):
            return "computes in 8 bits or fewer"
        if v["pp"] not in ("", "1"):
            return "a pipeline (pp > 1)"
        if v["cp"] not in ("", "1"):
            return "context parallelism (cp > 1)"
        if self.rules is None:
            return "nothing is known of its implementation"
        if not self.architecture:
            return "the shapes of the model are not printed"
        if not all(re.fullmatch("[0-9]*", v[name]) for name in ("dp", "fsdp")):
            return "the size of a group is not printed"
        if (not self.recompute or self.recompute == "selective") and self.rules.flops is not megatron:
            return "what is computed again is not printed"
        if "async TP" in self.notes and self.source.startswith("torchtitan"):
            return "asynchronous tensor parallelism (products in pieces beside their collectives)"
        if not self.measured:
            return "no throughput is printed"
        return ""

    @cached_property
    def assumed(self) -> str:
        """What is assumed beside what the source says; such rows are predicted, but neither fitted nor judged."""
        found = []
        if not self.microbatch:
            found.append("microbatch 2" if self.global_sequences >= 2 else "microbatch 1")
        if not self.recompute:
            found.append("no recomputation")
        if not self.heads and self.hidden:
            found.append("heads of 128")
        return ", ".join(found)

    @cached_property
    def architecture(self) -> Architecture | None:
        v = self.values
        if "Llama-3-8B" in self.model and not v["hidden"]:
            return Architecture("llama", 32, 4096, 32, 8, 14336, 128256, tied=False)
        if not v["hidden"] or not v["layers"] or self.rules is None:
            return None
        hidden = int(v["hidden"])
        heads = int(v["heads"] or hidden // 128)
        llama = self.rules.family == "llama"
        tied = not llama or "tied embedding" in self.notes
        return Architecture(
            self.rules.family,
            int(v["layers"]),
            hidden,
            heads,
            int(v["kv"] or heads),
            int(v["ffn"]),
            int(v["vocab"]),
            tied,
            self.rules.flash,
        )

    @property
    def ranks_of_batch(self) -> int:
        """The ranks that have different sequences."""
        return self.count("dp") * self.count("fsdp")

    @property
    def global_sequences(self) -> int:
        """Sequences of a step on one rank."""
        if self.global_batch:
            return max(int(self.global_batch) // self.ranks_of_batch, 1)
        return self.count("microbatch") * self.count("grad_accum")

    @property
    def microbatches(self) -> int:
        """Forwards and backwards of one step."""
        return self.global_sequences // self.spec.microbatch

    @property
    def tokens(self) -> float:
        """Tokens of a step for each GPU."""
        return self.global_sequences * self.ranks_of_batch * int(self.seq) / int(self.n_gpus)

    @cached_property
    def spec(self) -> Spec:
        """As what it is planned."""
        rules, architecture = self.rules, self.architecture
        assert rules is not None and architecture is not None
        dp, fsdp, tp = (self.count(name) for name in ("dp", "fsdp", "tp"))
        zero = int(self.zero or rules.zero)
        return Spec(
            model=architecture, dp=dp, fsdp=fsdp, tp=tp, split_dp=zero >= 1 and dp > 1 and fsdp == 1,
            regather=fsdp > 1 and zero != 2, sequence_parallel=tp > 1 and rules.sequence_parallel,
            again=next((again for start, again in RECOMPUTE.items() if self.recompute.startswith(start)), "none"),
            free_again=self.compiled or rules.family == "llama", sum32=rules.sum32,
            microbatch=int(self.microbatch or min(2, self.global_sequences)), sequence=int(self.seq),
            dtype="float16" if self.dtype.lower().startswith("fp16") else "bfloat16",
        )  # fmt: skip

    @property
    def layers(self) -> tuple[int, int]:
        """The two numbers of layers with which it is planned."""
        first = 4 if self.memory else 2
        return (first, first + 2) if self.spec.again == "every second block" else (first, first + 1)

    @property
    def planned(self) -> Spec:
        """The spec whose ingredients are recorded: with fewer ranks and one microbatch, unless memory is compared."""
        return self.spec if self.memory else self.spec.with_few_ranks()

    @property
    def specs(self) -> tuple[Spec, Spec]:
        """The specs that are planned, with few layers and with more."""
        few, more = self.layers
        return self.planned.with_layers(few), self.planned.with_layers(more)

    @property
    def compiled(self) -> bool:
        """Whether elementwise operators are fused into one kernel."""
        said = self.values["compile"]
        return said == "Y" if said else bool(self.rules and self.rules.compiled)

    @property
    def peak_flops(self) -> float:
        """The peak by which the source divides for MFU."""
        peaks = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12, "V100": 125e12}
        return next(peak for name, peak in peaks.items() if self.kind.startswith(name))

    @cached_property
    def flops_per_token(self) -> float:
        """By the source's formula."""
        assert self.rules is not None and self.architecture is not None
        return self.rules.flops(self.architecture, int(self.seq))

    @cached_property
    def measured(self) -> float:
        """The seconds of a step that the source printed, or that follow from what it printed; 0 if none do."""
        v = self.values
        if v["tokens_per_s_per_gpu"] and self.global_batch:
            return self.tokens / float(v["tokens_per_s_per_gpu"])
        if v["step_s"]:
            return float(v["step_s"])
        if derived := re.search(r"step ([0-9.]+) s", v["derived"]):
            return float(derived[1])
        rate = float(v["TFLOPs_per_gpu"] or 0) * 1e12 or float(v["MFU_pct"] or 0) / 100 * self.peak_flops
        return self.flops_per_token * self.tokens / rate if rate else 0.0

    @property
    def memory(self) -> float:
        """The peak memory that is printed, in bytes; 0 if none is."""
        if not self.peak_mem:
            return 0.0
        unit = 2.0**30 if "GiB" in self.mem_unit or "2^30" in self.mem_unit else 1e9
        return float(self.peak_mem) * unit


def rows() -> tuple[Run, ...]:
    """All rows of the file."""
    with CSV.open(newline="") as file:
        return tuple(Run(number, dict(values)) for number, values in enumerate(csv.DictReader(file)))
