"""What stands for a parameter that another has taken the place of."""

import contextlib
import copy
import gc
import io

import pytest
import torch
from torch import nn

from partway.runtime.tensors.replaced import carried, current, let_go, replace
from partway.runtime.tensors.tracked import TRACKED
from partway.strategy import RuntimeStateError


def pair():
    """An old parameter, and the one that took its place."""
    old, new = nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.arange(6.0).view(2, 3))
    replace(old, new, "fc.weight")
    return old, new


def test_what_is_done_with_the_old_parameter_is_done_with_the_new_one():
    old, new = pair()
    assert isinstance(old, nn.Parameter)
    assert current(old) is new
    assert current(new) is new
    assert torch.equal(old, new)
    assert old.requires_grad
    assert torch.equal(torch.stack([old, old]).sum(0), 2 * new)
    (old * 2).sum().backward()
    assert old.grad is new.grad
    old.grad = None
    assert new.grad is None
    old.decay = 0.5
    assert new.decay == old.decay == 0.5
    with torch.no_grad():
        old.add_(1)
        torch._foreach_mul_([old], 2.0)
    assert torch.equal(new, 2 * (torch.arange(6.0).view(2, 3) + 1))
    assert torch.autograd.grad(new.sum(), [old])[0].sum() == 6
    old.requires_grad_(False)
    assert not new.requires_grad


def test_a_parameter_may_be_replaced_again():
    old, new = pair()
    newer = nn.Parameter(torch.zeros(1))
    replace(new, newer, "fc.weight")
    assert current(old) is newer
    assert old.shape == (1,)


def test_a_copy_of_the_old_parameter_is_one_of_the_new_one():
    old, new = pair()
    assert type(copy.deepcopy(old)) is nn.Parameter
    assert torch.equal(copy.deepcopy([old, new])[0], new)
    file = io.BytesIO()
    torch.save(old, file)
    file.seek(0)
    assert torch.equal(torch.load(file), new)


def test_a_gradient_that_still_reaches_the_old_parameter_is_refused():
    old = nn.Parameter(torch.ones(2))
    earlier = (old * 2).sum()
    replace(old, nn.Parameter(torch.ones(2)), "fc.weight")
    with pytest.raises(RuntimeStateError, match=r"a gradient reached what was parameter fc\.weight before its module"):
        earlier.backward()
    with contextlib.suppress(RuntimeError):  # of a PyTorch that does not ask stand-ins here: no gradient is lost
        (current(old) * 2).sum().backward(inputs=[old])
        assert torch.equal(old.grad, torch.full((2,), 2.0))


def test_memory_of_the_old_parameter_is_let_go_and_so_is_the_parameter():
    old, new = pair()
    let_go([new])
    with torch._C.DisableTorchFunction():
        assert old.untyped_storage().nbytes() == 0
        assert old.shape == (0,)
    assert new.untyped_storage().nbytes() == 24
    assert old.shape == (2, 3)
    known = len(TRACKED.replaced)
    del old
    gc.collect()
    assert len(TRACKED.replaced) == known - 1


def test_a_hook_that_looks_for_the_old_parameter_is_named():
    parameter, others = nn.Parameter(torch.ones(1)), {}

    def hook(given):
        others[given]

    with pytest.raises(
        RuntimeStateError, match=r"a hook of parameter fc\.weight looks it up in a dict .*, after shard"
    ):
        carried("fc.weight", hook)(parameter)
    with pytest.raises(KeyError, match="1"):
        carried("fc.weight", lambda given: {}[1])(parameter)
    others[parameter] = 1
    carried("fc.weight", hook)(parameter)
