"""A compiled stretch of a graph, and the ownership of its results' memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor


class Region:
    """Calls a compiled stretch.

    owned   for each result, whether the call must allocate memory for it alone, as the stretch's operators do. A
            compiler may return equal results in the same memory, or a result as part of a larger one: the first call
            detects this, and all calls copy such results.
    """

    __name__ = "region"  # graphs name its results after it

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
        """The owned results that share memory with an input or another result, or hold more than they need."""
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
