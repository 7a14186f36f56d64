"""A stretch of a graph that a compiler made one call of, and whose memory its results are."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor


class Region:
    """Calls what a compiler made of a stretch.

    owned   for each result whether the call makes memory for it and for nothing else, as the stretch's operators do. A
            compiler may give equal results one memory, or one a part of something larger; then the first call sees it,
            and it and all later ones copy them.
    """

    __name__ = "region"  # what its results are called after in a graph

    def __init__(self, run: Callable[..., Sequence[Tensor]], owned: Sequence[bool]) -> None:
        self._run, self.owned = run, tuple(owned)
        self._copied: tuple[int, ...] | None = None

    def __call__(self, *inputs: Tensor) -> Sequence[Tensor]:
        """The results of the stretch."""
        results = self._run(*inputs)
        if self._copied is None:
            self._copied = self._not_alone(inputs, results)
        if not self._copied:
            return results
        results = list(results)
        for i in self._copied:
            results[i] = results[i].clone()
        return results

    def _not_alone(self, inputs: Sequence[Tensor], results: Sequence[Tensor]) -> tuple[int, ...]:
        """The owned results that have their memory with another, or more of it than they need."""
        held = [_memory(tensor) for tensor in (*inputs, *results)]
        return tuple(
            i
            for i, (result, owned) in enumerate(zip(results, self.owned, strict=True))
            if owned and result.numel() and (held.count(_memory(result)) > 1 or _is_part(result))
        )


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _is_part(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()
