"""What one rank alone does to what ranks hold alike is told while they train, and never saved."""

import copy
import tempfile
import time

import pytest
import torch
from torch import nn

import partway as pw
from partway.runtime.ranks import ledger as ledgers
from partway.runtime.ranks.agreement import gathered
from partway.runtime.ranks.replicas import in_turn, settings_of
from partway.runtime.ranks.watch import end_watch

WHOLE = {"a.weight": (None, None), "a.bias": (None,), "b.weight": (None, None), "b.bias": (None,)}
SPLIT = {"a.weight": ("dp", None), "a.bias": ("dp",), "b.weight": (None, "dp")}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)

    def forward(self, x):
        return self.b(torch.relu(self.norm(self.a(x))))


def made(plan=None, optimizer=torch.optim.AdamW, **options):
    torch.manual_seed(0)
    pw.set_auto_parallel_context(**options)
    size = pw.get_group_size()
    mesh = {"dp": 2, "tp": size // 2} if size > 2 else {"dp": size}
    model = pw.shard(
        Net(), mesh=mesh, in_strategy=(("dp", None),), out_strategy=((None, None),), parameter_plan=plan or WHOLE
    )
    return model, optimizer(model.parameters(), lr=0.01)


def put(holder, name, value):
    setattr(holder, name, value) if not isinstance(holder, dict) else holder.update({name: value})


ACTS = {  # of one rank, between a backward and a step
    "the learning rate": lambda model, optimizer: put(optimizer.param_groups[0], "lr", 0.02),
    "the weight decay": lambda model, optimizer: put(optimizer.param_groups[0], "weight_decay", 0.2),
    "a state": lambda model, optimizer: optimizer.state[model.a.weight]["exp_avg"].to_local().mul_(2),
    "the count of steps": lambda model, optimizer: optimizer.state[model.a.weight]["step"].add_(1),
    "a gradient that is scaled": lambda model, _: put(model.a.weight, "grad", model.a.weight.grad * 2),
    "a gradient that is zeroed": lambda model, _: model.a.weight.grad.zero_(),
    "a gradient that is left out": lambda model, _: put(model.a.weight, "grad", None),
    "a clip": lambda model, _: nn.utils.clip_grad_value_(model.parameters(), 1e-6),
    "a part that is written to": lambda model, _: model.a.weight.to_local().data[1].add_(1),  # counted nowhere
    "a weight that is written to": lambda model, _: model.a.weight.mul_(1.5),
    "a buffer": lambda model, _: model.norm.running_mean.add_(1),
    "a step too many": lambda model, optimizer: optimizer.step(),
}


def told(what, plan=None, **options):
    """Train for as long as nothing is said of what the last rank does in step 5; what is said."""
    ledgers._PERIOD = 0.02
    optimizer = torch.optim.SGD if what == "the class" and pw.get_rank() else torch.optim.AdamW
    model, optimizer = made(plan, optimizer, **options)
    other = pw.get_rank() == pw.get_group_size() - 1
    hooked = None
    generator = torch.Generator().manual_seed(1)
    try:
        for step in range(3_000):
            x = torch.randn(16, 8, generator=generator)
            labels = x[:, :4].argmax(1)
            if other and step == 5 and what == "a hook":
                hooked = model.a.weight.register_hook(lambda gradient: gradient * 2)
            if other and step >= 5 and what == "the labels":
                labels = (labels + 1) % 4
            loss = nn.functional.cross_entropy(model(x), labels)
            if other and step >= 5 and what == "the loss":
                loss = loss * 2
            optimizer.zero_grad()
            loss.backward()
            if other and step == 5 and what in ACTS:
                with torch.no_grad():
                    ACTS[what](model, optimizer)
            optimizer.step()
            if what == "nothing" and step == 60:
                return None
            time.sleep(0.001)
        return None
    except RuntimeError as error:
        return str(error)
    finally:
        if hooked is not None:
            hooked.remove()


HELD = "rank {last} holds other values than rank {first} of "
STEPPED = "rank {last} stepped its optimizer (or wrote to parameters or buffers) between other calls than rank 0, at "
STEP = "; step the optimizer, and write to parameters and buffers, on every rank or on none"
SET = "rank {last} has an optimizer of other settings than rank 0, at step "
WENT_ON = "rank {last} went on otherwise with a result that is whole on every rank than rank 0, at a call of Net; "
SAID = {
    "the learning rate": SET
    + "6 of AdamW: lr; make optimizers and schedulers alike on every rank, and step them alike",
    "the weight decay": SET + "6 of AdamW: weight_decay; ",
    "the class": SET + "1 of SGD: its class; ",
    "a state": HELD + "exp_avg of a.weight, at step ",
    "the count of steps": HELD + "step of a.weight, at step ",
    "a gradient that is scaled": HELD,
    "a gradient that is zeroed": HELD,
    "a gradient that is left out": "rank {last} has new gradients, or none, of other parameters than rank 0, at step 6 "
    "of AdamW; set gradients to None or to zero on every rank, or on none",
    "a clip": HELD,
    "a hook": HELD,
    "a part that is written to": HELD,
    "a weight that is written to": STEPPED,
    "a buffer": STEPPED + "a call of Net" + STEP,
    "a step too many": STEPPED + "step 7 of AdamW: its class" + STEP,
    "the labels": WENT_ON,
    "the loss": WENT_ON,
}
QUICK = ("the learning rate", "a gradient that is scaled", "a buffer", "the labels")


def ends_with(*arguments):
    """`told`, which ends the ranks: what they compare is over by then."""
    raise RuntimeError(told(*arguments) or "nothing was said")


@pytest.mark.gloo
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "what", [each if each in QUICK else pytest.param(each, marks=pytest.mark.slow) for each in SAID]
)
def test_what_one_rank_alone_does_is_told_while_they_train(on_ranks, size, what):
    said = SAID[what].format(last=size - 1, first=0)
    with pytest.raises(AssertionError) as caught:
        on_ranks(size, ends_with, what)
    assert said in str(caught.value)


def scales():
    """Train to the sixth step, which rank 1 makes with another gradient."""
    model, optimizer = made(compare_replicas=1)
    for step in range(6):
        model(torch.ones(4, 8)).square().sum().backward()
        if step == 5 and pw.get_rank() == 1:
            ACTS["a gradient that is scaled"](model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    end()


@pytest.mark.gloo
def test_a_gradient_is_named_at_its_step_where_all_are_looked_at(on_ranks):
    said = "rank 1 holds other values than rank 0 of the gradient of a.weight, at step 6 of AdamW; "
    with pytest.raises(AssertionError, match=said):
        on_ranks(2, scales)


@pytest.mark.gloo
@pytest.mark.parametrize(
    "what", ["a weight that is written to", "a gradient that is zeroed", "a clip", "the learning rate"]
)
@pytest.mark.slow
def test_so_it_is_where_no_rank_holds_what_another_one_does(on_ranks, what):
    with pytest.raises(AssertionError, match=r"has an optimizer of other|wrote otherwise|stepped its optimizer"):
        on_ranks(2, ends_with, what, SPLIT)


@pytest.mark.gloo
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("options", [{}, {"compare_replicas": 3}, {"enable_parallel_optimizer": True}], ids=str)
def test_nothing_is_said_where_nothing_differs(on_ranks, size, options):
    assert on_ranks(size, nothing, options) == [None] * size


def nothing(options):
    return told("nothing", None, **options)


def keeps_a_gradient():
    """Train until the ranks have been compared often; the last one keeps each gradient, so that autograd copies it."""
    ledgers._PERIOD = 0.002
    model, optimizer = made(SPLIT)
    kept = []
    if pw.get_rank() == 1:
        for parameter in model.parameters():
            parameter.register_hook(kept.append)
    for _ in range(5):
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    raise RuntimeError(pw.shutdown() or f"kept {len(kept)} and said nothing")


@pytest.mark.gloo
def test_whether_a_backward_copies_a_gradient_is_no_difference(on_ranks):
    with pytest.raises(AssertionError) as caught:
        on_ranks(2, keeps_a_gradient)
    assert "kept 30 and said nothing" in str(caught.value)
    assert "kept 0 and said nothing" in str(caught.value)


def end():
    """Raise what the ledgers found when they ended; these ranks are not used again."""
    raise RuntimeError(end_watch() or "nothing differs")


def writes_with(number, listed):
    model, _ = made(SPLIT)
    model(torch.ones(4, 8))
    factor = 1 + number * pw.get_rank()
    with torch.no_grad():
        torch._foreach_mul_([model.a.weight], factor) if listed else model.a.weight.mul_(factor)
    end()


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("number", "listed", "said"),
    [
        (0, False, "nothing differs"),
        (1, False, r"rank 1 wrote otherwise than rank 0 to a tensor that is split, at mul_ of \(16, 8\), 2"),
        (1, True, r"rank 1 wrote otherwise than rank 0 to a tensor that is split, at _foreach_mul_ of \(1,\), 2"),
    ],
    ids=["alike", "others", "others of a list"],
)
def test_what_is_split_is_written_to_with_the_same_numbers(on_ranks, number, listed, said):
    with pytest.raises(AssertionError, match=said):
        on_ranks(2, writes_with, number, listed)


ALONE = {  # what rank 1 does to parts that no other rank holds, and what is said
    "sets a gradient": (
        lambda model, _: put(model.a.weight, "grad", model.a.weight.grad * 2),
        r"rank 1 wrote otherwise than rank 0 to a tensor that is split, at the setting of .grad of \(16, 8\)",
    ),
    "keeps gradients": (
        lambda model, optimizer: put(optimizer, "zero_grad", lambda: None),
        "rank 1 has new gradients, or none, of other parameters than rank 0, at step 3 of AdamW",
    ),
    "loads states": (
        lambda model, optimizer: optimizer.load_state_dict(optimizer.state_dict()),
        "rank 1 has an optimizer of other settings than rank 0, at the load_state_dict of AdamW",
    ),
    "copies a tensor": (
        lambda model, _: model.a.weight.copy_(torch.ones(16, 8)),
        r"rank 1 wrote otherwise than rank 0 to a tensor that is split, at copy_ of \(16, 8\)",
    ),
    "writes to its part": (
        lambda model, _: model.a.weight.to_local().add_(1),
        r"rank 1 stepped its optimizer \(or wrote to parameters or buffers\) between other calls than rank 0",
    ),
}


def does_alone(what):
    model, optimizer = made(SPLIT)
    for step in range(3):
        model(torch.ones(4, 8)).sum().backward()
        if step == 1 and pw.get_rank():
            with torch.no_grad():
                ALONE[what][0](model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    end()


@pytest.mark.gloo
@pytest.mark.parametrize("what", ALONE)
def test_what_one_rank_does_to_its_own_parts_is_told(on_ranks, what):
    with pytest.raises(AssertionError, match=ALONE[what][1]):
        on_ranks(2, does_alone, what)


def hides(compare):
    """Rank 1 changes an element that is in no sample of these two calls."""
    pw.set_auto_parallel_context(compare_replicas=compare)
    torch.manual_seed(0)
    model = pw.shard(
        nn.Linear(64, 64), mesh={"dp": 2}, in_strategy=(("dp", None),), parameter_plan={"weight": (None,) * 2}
    )
    model(torch.ones(4, 64))
    if pw.get_rank():
        model.weight.to_local().data.view(-1)[37] += 1
    model(torch.ones(4, 64))
    end()


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("compare", "said"), [(True, "nothing differs"), (2, "rank 1 holds other values than rank 0 of weight, at call 2")]
)
def test_an_element_that_is_in_no_sample_is_told_where_all_are_looked_at(on_ranks, compare, said):
    with pytest.raises(AssertionError, match=said):
        on_ranks(2, hides, compare)


def averages():
    """Train; rank 0 alone keeps a moving average of the weights, which are whole on every rank."""
    model, optimizer = made()
    average = copy.deepcopy(model) if pw.get_rank() == 0 else None
    for _ in range(5):
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if average is not None:
            with torch.no_grad():
                for kept, parameter in zip(average.parameters(), model.parameters(), strict=True):
                    kept.lerp_(parameter, 0.1)
    end()


@pytest.mark.gloo
def test_one_rank_may_keep_an_average_of_what_all_hold(on_ranks):
    with pytest.raises(AssertionError, match="nothing differs"):
        on_ranks(2, averages)


def saved(compare):
    model, optimizer = made(compare_replicas=compare)
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    last = pw.get_rank() == pw.get_group_size() - 1
    folder = gathered("choose a folder", tempfile.mkdtemp())[0]
    pw.save(folder, model, optimizer)
    if last:
        with torch.no_grad():
            model.a.weight.to_local()[3, 5] += 1
        optimizer.state[model.b.bias]["exp_avg"].to_local()[0] = 5
        optimizer.param_groups[0]["lr"] = 0.5
        model.norm.running_var[2] = 7
    try:
        return pw.save(folder, model, optimizer).name
    except RuntimeError as error:
        return str(error)


@pytest.mark.gloo
@pytest.mark.parametrize("size", [2, 4])
def test_what_ranks_do_not_hold_alike_is_not_saved(on_ranks, size):
    last = size - 1
    said = (
        "the ranks do not hold the same, and what is saved would be what one of them holds; see what only one of them "
        "did, or set compare_replicas=False to save it as it is:\n"
        f"  - a.weight: rank {last} has other values than rank 0\n"
        f"  - norm.running_var: rank {last} has other values than rank 0\n"
        f"  - the optimizer's state.b.bias.exp_avg: rank {last} has other values than rank 0\n"
        f"  - the settings of optimizer.0: rank {last} has other values than rank 0"
    )
    assert on_ranks(size, saved, True) == [said] * size
    assert on_ranks(size, saved, False) == ["checkpoint-000002"] * size


def test_each_has_its_turn():
    items = list(range(10))
    seen = [in_turn(items, time, 0) for time in range(1, 6)]
    assert {item for chosen, _ in seen for item in chosen} == set(items)
    assert not any(whole for _, whole in seen)
    assert in_turn(items, 6, 3) == (items, True)
    assert in_turn([1, 2], 5, 0) == ([1, 2], False)
    assert in_turn([], 5, 0) == ([], False)


def test_settings_are_what_groups_say_beside_their_parameters():
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([{"params": [weight]}], lr=torch.tensor(0.5), betas=(0.8, 0.9), capturable=False)
    found = settings_of(optimizer.param_groups)
    assert found["lr"] == ("0.5",)
    assert found["betas"] == ((0.8, 0.9),)
    assert "params" not in found
    optimizer.param_groups[0]["key"] = object()
    assert settings_of(optimizer.param_groups)["key"] == ("object",)
