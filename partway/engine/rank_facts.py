"""The facts that must be the same on every rank of a launched program: the inputs of a call's plan, and the plan."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from partway.compiler.compiled import Compiled
from partway.options.algo import AlgoParameters
from partway.options.parallel import ParallelContext
from partway.propagation.graph.nodes import draws_random_numbers
from partway.propagation.graph.printer import operators_in
from partway.requests.request import Request
from partway.requests.user_rules import rules
from partway.reuse.cache import software, text_of_graph
from partway.runtime.ranks.agreement import Fact, facts_of

_OWN = frozenset(  # a rank may have its own paths: the content of a file is compared, not its path
    {"compile_cache_path", "enable_compile_cache", "strategy_ckpt_config", "device_profile"}
)
_ASKED = ("in_strategy", "out_strategy", "parameter_plan", "module_plan", "device", "level", "inference", "dynamic")
SEED = "seed every rank alike with torch.manual_seed"


def asked(request: Request) -> Iterator[Fact]:
    """The arguments of `shard`."""
    fix = "give shard the same arguments on every rank"
    for name in _ASKED:
        yield Fact(name, repr(getattr(request, name)), fix=fix)
    yield Fact("mesh", str(request.own_mesh), fix=fix)
    for i, plan in enumerate(request.plans):
        yield Fact(f"plan {i}", str(plan), plan.model_dump_json(), fix)


def options(context: ParallelContext, algo: AlgoParameters) -> Iterator[Fact]:
    """The options of a call, and whether each was set."""
    for holder in (context, algo):
        for name, value in holder:
            if name not in _OWN:
                origin = "" if name in holder.model_fields_set else " (by default)"
                yield Fact(f"option {name}", f"{value!r}{origin}", fix="set the same options on every rank")


def modes(fn: Any) -> Iterator[Fact]:
    """The modes of a call: gradients, autocast, training."""
    fix = "call it in the same mode on every rank"
    yield Fact("torch.is_grad_enabled()", str(torch.is_grad_enabled()), fix=fix)
    yield Fact("torch.is_inference_mode_enabled()", str(torch.is_inference_mode_enabled()), fix=fix)
    autocast = {
        device: str(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else "off"
        for device in ("cpu", "cuda")
    }
    yield Fact("autocast", str(autocast), fix=fix)
    if isinstance(fn, nn.Module):
        training = {path or "it": module.training for path, module in fn.named_modules()}
        yield Fact("training mode", f"on in {_which(training, 'module')}", str(training), fix)
        needing = {name: parameter.requires_grad for name, parameter in fn.named_parameters()}
        yield Fact("requires_grad", f"True for {_which(needing, 'parameter')}", str(needing), fix)


def versions() -> Iterator[Fact]:
    """The software and the rules of users: different versions may plan differently."""
    yield Fact("the software", software(), fix="install the same versions on every host")
    for operator, row in rules().items():
        yield Fact(f"the rule of {operator}", repr(row), fix="call pw.rule alike on every rank")


def of_plan(compiled: Compiled) -> Iterator[Fact]:
    """The stages of a plan, from the captured graph to the program that runs."""
    fix = "the model's code, or what it reads, differs between ranks: run the same on every rank"
    yield Fact("the captured graph", "\n".join(text_of_graph(compiled.graph)), fix=fix)
    yield from facts_of({f"the constant {name}": t for name, t in compiled.graph.constants.items()}, fix)
    fix = "give every rank the same device_profile"
    yield Fact("the device profile", compiled.profile.model_dump_json(indent=1), fix=fix)
    fix = "plan with the same options, versions and plan files on every rank"
    yield Fact("the mesh of the plan", str(compiled.mesh), fix=fix, follows=1)
    yield Fact("the plan", str(compiled.plan), compiled.plan.model_dump_json(), fix, follows=2)
    program = operators_in(str(compiled.program))  # without source lines, which a cached program lacks
    yield Fact("the program", "\n".join(program), fix=fix, follows=3)


def draws(compiled: Compiled) -> bool:
    """Whether a planned call draws random numbers."""
    nodes = compiled.graph.nodes
    return any(node.op == "call_function" and draws_random_numbers(node) for node in nodes)


def _which(flags: dict[str, bool], noun: str) -> str:
    """The names with a flag set: all, none, or the shorter list of those with it and those without it."""
    has = [name for name, flag in flags.items() if flag]
    lacks = [name for name, flag in flags.items() if not flag]
    if not lacks:
        return f"all {noun}s"
    if not has:
        return f"no {noun}"
    return f"only {_few(has)}" if len(has) <= len(lacks) else f"all but {_few(lacks)}"


def _few(names: list[str]) -> str:
    rest = f" and {len(names) - 5} more" if len(names) > 5 else ""
    digest = hashlib.sha256("\n".join(names).encode()).hexdigest()[:6] if rest else ""
    return ", ".join(names[:5]) + rest + (f" (of the digest {digest})" if digest else "")
