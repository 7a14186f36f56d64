"""Embeddings whose table is on the servers: the rows that a batch looks up are pulled, and their gradients pushed.

The module stays the same object. While it runs, its weight is a small one of the rows that are looked up, and its
indices are those in it. Each call has a weight of its own, so that an embedding may be called several times in a step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from partway.ps.service.client import Pushed
from partway.strategy import RuntimeStateError

Embedding = nn.Embedding | nn.EmbeddingBag
Pull = Callable[[Tensor], Tensor]  # rows by their numbers, ascending


class RemoteTable:
    """An embedding's rows, from `pull`. `name`: for messages."""

    def __init__(self, module: Embedding, name: str, pull: Pull) -> None:
        self._module, self._name, self._pull = module, name, pull
        self._parameter = module.weight
        self._padding = module.padding_idx
        self._handles = [
            module.register_forward_pre_hook(self._before, with_kwargs=True),
            module.register_forward_hook(self._after, always_call=True),
        ]

    def _before(self, module: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        given = args[0] if args else kwargs["input"]
        if type(given) is not Tensor or torch.compiler.is_exporting() or given.is_meta:
            raise RuntimeStateError(
                f"{self._name} is a table on the servers, whose rows are pulled by their numbers: it cannot be "
                "captured; shard the part of the model after it"
            )
        rows, places = torch.unique(given.detach().to("cpu", torch.int64), return_inverse=True)
        if len(rows) and not 0 <= int(rows[0]) <= int(rows[-1]) < module.num_embeddings:
            raise IndexError(
                f"{self._name} has {module.num_embeddings} rows, and was asked for rows {int(rows[0])} to "
                f"{int(rows[-1])}"
            )
        device = given.device
        own = nn.Parameter(self._pull(rows).to(device), requires_grad=self._parameter.requires_grad)
        if torch.is_grad_enabled() and own.requires_grad:
            own.register_post_accumulate_grad_hook(self._accumulate(rows))
        module.weight = own
        padding = None
        if self._padding is not None and len(found := (rows == self._padding).nonzero()):
            padding = int(found[0])
        module.padding_idx = padding
        local = places.to(device, given.dtype)
        return ((local, *args[1:]), kwargs) if args else (args, {**kwargs, "input": local})

    def _after(self, module: Any, args: Any, result: Any) -> None:
        module.weight = self._parameter
        module.padding_idx = self._padding

    def _accumulate(self, rows: Tensor) -> Callable[[Tensor], None]:
        """A hook that adds the gradient of a call to that of the table, where other code that reads gradients finds
        it."""

        def add(own: Tensor) -> None:
            assert own.grad is not None
            dense = own.grad.to_dense() if own.grad.is_sparse else own.grad
            own.grad = None
            table = self._parameter
            at = rows[None].to(dense.device)
            mine = torch.sparse_coo_tensor(at, dense, table.shape, check_invariants=False, is_coalesced=True)
            table.grad = mine.to(table.device) if table.grad is None else table.grad + mine.to(table.device)

        return add

    def gradient(self) -> Pushed:
        """The rows that have gradients, each once, and their gradients; None if there are none."""
        if self._parameter.grad is None:
            return None
        whole = self._parameter.grad.coalesce()
        rows, gradient = whole.indices()[0].cpu(), whole.values().cpu()
        if self._padding is not None:
            kept = rows != self._padding
            rows, gradient = rows[kept], gradient[kept]
        return rows, gradient
