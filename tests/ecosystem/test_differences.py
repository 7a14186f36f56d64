"""What differs under a launcher from one process, around a sharded model: docs/under_a_launcher.md has its rows from
here.

    python tests/ecosystem/test_differences.py      writes the page
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import partway as pw

PAGE = Path(__file__).parents[2] / "docs" / "under_a_launcher.md"
Ranks = Callable[..., list[Any]]
Case = tuple[str, str, Callable[[Any], None], str]


def share_data(model: Any) -> None:
    plain = torch.zeros(4, 8)
    model.weight.data = plain
    plain.add_(1)
    assert not model.weight.any()  # in one process it is what `plain` is
    raise RuntimeError("the data are a copy")


def share_a_gradient(model: Any) -> None:
    plain = torch.zeros(4, 8)
    model.weight.grad = plain
    plain.add_(1)
    assert not model.weight.grad.any()
    raise RuntimeError("the gradient is a copy")


def write_an_array(model: Any) -> None:
    model.weight.detach().numpy()[0] = 1


def ask_for_storage(model: Any) -> None:
    model.weight.storage()


def share_memory(model: Any) -> None:
    model.weight.share_memory_()


def set_data_of_a_view(model: Any) -> None:
    model.weight.detach()[0].data = torch.zeros(8)


def write_where_gradients_are_recorded(model: Any) -> None:
    scale = torch.ones((), requires_grad=True)
    model.weight.detach().mul_(scale)


def pickle_a_module(model: Any) -> None:
    pickle.dumps(model)


def assign_a_state_dict(model: Any) -> None:
    other = pw.shard(nn.Linear(8, 4), mesh={"dp": 2}, in_strategy=(("dp", None),))
    other.load_state_dict(model.state_dict(), assign=True)


# what a script does, what happens under a launcher, the script, and what it raises there
CASES: list[Case] = [
    ("`p.data = tensor`, `p.grad = tensor` of a plain tensor", "the values are copied; later writes to one of the two "
     "do not change the other", share_data, "the data are a copy"),
    ("`p.grad = tensor`, and a write to `tensor`", "the same", share_a_gradient, "the gradient is a copy"),
    ("`p.numpy()`", "a read-only array of the whole tensor", write_an_array, "read-only"),
    ("`p.storage()`, safetensors' `save_file`", "an error: no memory holds the tensor; `pw.save` and `save_pretrained` "
     "write them", ask_for_storage, "no memory holds all of it; save the model with partway.save"),
    ("`p.share_memory_()`", "the same error", share_memory, "no memory holds all of it"),
    ("`p[0].data = tensor`", "an error: write to it with `copy_`", set_data_of_a_view, "takes no data of its own"),
    ("a write in place to a split tensor that autograd records", "an error: write under `torch.no_grad()`",
     write_where_gradients_are_recorded, "where gradients are recorded, which its parts would not see"),
    ("`torch.save(model)`, `pickle.dumps(model)`", "an error: save its `state_dict()`", pickle_a_module,
     "is not pickled as a whole"),
    ("`load_state_dict(state, assign=True)` with the `state_dict` of a sharded module", "an error: omit `assign`",
     assign_a_state_dict, "with assign=True two modules would share its memory"),
]  # fmt: skip

HEAD = """# Under a launcher

In one process a sharded model has ordinary parameters. Under a launcher each process holds parts of them. Parameters,
their gradients, optimizer states and split results are DTensors, and every operator of PyTorch on them, also together
with plain tensors, gives the values of one device. Elementwise operators of optimizers, norms and sums compute on the
parts. Other operators, and `.item()`, `float()`, `print`, `torch.save` and pickling, gather the whole tensor first, so
**all ranks have to call them**. If one rank does so alone (`if rank == 0: print(model.weight)`), it gets a
RuntimeStateError within seconds that names what the others are doing. Weights that are whole on every rank, as in data
parallelism, are not gathered, so one rank may read them alone.

`isinstance(p, DTensor)` is true, `p.to_local()` is the process's part and `p.full_tensor()` the whole, so
`torch.distributed.checkpoint` and `clip_grad_norm_` accept parameters. A submodule or a method that you call directly
computes with gathered weights. `torch.save(model.state_dict(), path)` writes the whole state on every rank: give each
rank its own path, or use `pw.save`.

The table lists uses that still behave differently than in one process. `tests/ecosystem/test_differences.py` tests each
of them and writes this page.

| use in a script | effect under a launcher |
| --- | --- |
"""


def page() -> str:
    return HEAD + "".join(f"| {what} | {then} |\n" for what, then, _, _ in CASES)


def test_the_page_has_the_differences() -> None:
    assert PAGE.read_text(encoding="utf-8") == page()


def runs(i: int) -> str:
    """What a case raises."""
    torch.manual_seed(0)
    model = pw.shard(
        nn.Linear(8, 4), mesh={"dp": 2}, in_strategy=(("dp", None),), parameter_plan={"weight": ("dp", None)}
    )
    model(torch.ones(4, 8)).sum().backward()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, of what it will drop
            CASES[i][2](model)
    except Exception as error:
        return str(error)
    return ""


@pytest.mark.gloo
@pytest.mark.parametrize("i", range(len(CASES)), ids=[case[2].__name__ for case in CASES])
def test_what_differs_says_so(i: int, on_ranks: Ranks) -> None:
    for said in on_ranks(2, runs, i):
        assert CASES[i][3] in said


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
