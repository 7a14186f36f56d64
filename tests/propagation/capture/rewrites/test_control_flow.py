"""Control flow: branches and loops give what they give on one device, forward and backward."""

import copy

import pytest
import torch
from torch import nn
from torch._higher_order_ops import associative_scan, scan, while_loop
from torch._higher_order_ops.map import map as map_rows
from torch.utils._python_dispatch import TorchDispatchMode

import partway as pw
from partway.propagation.capture.capture import capture
from partway.propagation.capture.rewrites import control_flow as control
from partway.propagation.ops.python import functions


class Net(nn.Module):
    """One matrix, and a constant vector."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.w = nn.Parameter(torch.randn(4, 4, dtype=torch.float64))
        self.register_buffer("c", torch.ones(4, dtype=torch.float64))

    def start(self, x):
        return torch.zeros_like(x[0])


class Branch(Net):
    def forward(self, x):
        y, z = torch.cond(x.sum() > 0, lambda x: (x @ self.w, x.sum()), lambda x: (x * 2 + self.c, x.mean()), (x,))
        return y.pow(2).sum() * z


class Recurrence(Net):
    def forward(self, x):
        def body(carry, row):
            new = torch.tanh(carry @ self.w + row)
            return new, new * 2

        last, rows = scan(body, self.start(x), x)
        return (last.sum() + rows).mean()


class Loop(Net):
    def forward(self, x):
        _, z = while_loop(lambda i, z: z.sum() < 50, lambda i, z: (i + 1, z * 1.5), (torch.tensor(0), x.abs()))
        return (z @ self.w).sum()


class Prefix(Net):
    def forward(self, x):
        return associative_scan(lambda a, b: a * b, x @ self.w, 0, combine_mode="generic").sum()


class Rows(Net):
    def forward(self, x):
        return map_rows(lambda row, w: torch.tanh(row @ w), x, self.w).pow(2).sum()


class BranchInLoop(Net):
    def forward(self, x):
        def body(carry, row):
            new = torch.cond(row.sum() > 0, lambda c, r: torch.tanh(c @ self.w + r), lambda c, r: c - r, (carry, row))
            return new, new.clone()

        last, rows = scan(body, self.start(x), x)
        return rows.pow(2).mean() + last.sum()


def by_hand(net, x):
    """What the loops compute, in Python: PyTorch itself does not differentiate all of them."""
    match net:
        case Recurrence() | BranchInLoop():
            carry, rows = net.start(x), []
            for row in x:
                if isinstance(net, Recurrence) or row.sum() > 0:
                    carry = torch.tanh(carry @ net.w + row)
                else:
                    carry = carry - row
                rows.append(carry)
            rows = torch.stack(rows)
            return (carry.sum() + rows * 2).mean() if isinstance(net, Recurrence) else rows.pow(2).mean() + carry.sum()
        case Loop():
            z = x.abs()
            while z.sum() < 50:
                z = z * 1.5
            return (z @ net.w).sum()
        case Prefix():
            y = x @ net.w
            rows = [y[0]]
            for row in y[1:]:
                rows.append(rows[-1] * row)
            return torch.stack(rows).sum()
        case Rows():
            return torch.tanh(x @ net.w).pow(2).sum()
        case Branch():
            y, z = (x @ net.w, x.sum()) if x.sum() > 0 else (x * 2 + net.c, x.mean())
            return y.pow(2).sum() * z


@pytest.fixture(autouse=True)
def _quiet(recwarn):
    """Branches run whole on every device, which a warning says."""
    return recwarn


def check(kind, x):
    one, x1, x2 = kind(), x.clone().requires_grad_(), x.clone().requires_grad_()
    expected = by_hand(one, x1)
    expected.backward()
    split = pw.shard(kind(), mesh={"x": 2}, in_strategy=(("x", None),))
    found = split(x2)
    found.backward()
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(x2.grad, x1.grad, rtol=1e-12, atol=1e-12)
    for mine, theirs in zip(split.parameters(), one.parameters(), strict=True):
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in (mine, theirs)]
        torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)
    return split


@pytest.mark.parametrize("kind", [Recurrence, Loop, Prefix, Rows, BranchInLoop])
def test_loops_give_the_value_and_the_gradients_of_one_device(kind):
    torch.manual_seed(1)
    check(kind, torch.randn(6, 4, dtype=torch.float64))


def test_a_branch_is_not_said_to_lack_a_rule_of_its_own(recwarn):
    check(Branch, torch.rand(6, 4, dtype=torch.float64))
    (said,) = {str(w.message) for w in recwarn if issubclass(w.category, pw.UnknownOperatorWarning)}
    assert said == (
        "a branch, or a loop that ends by a value (torch.cond, while_loop), is not an operator with a rule; its "
        "operands are gathered and it runs replicated"
    )


@pytest.mark.parametrize("sign", [1, -1])
def test_branches_give_the_value_and_the_gradients_of_one_device(sign):
    torch.manual_seed(1)
    check(Branch, sign * torch.rand(6, 4, dtype=torch.float64))


@pytest.mark.parametrize("kind", [Recurrence, BranchInLoop])
def test_a_loop_of_many_operators_stays_a_loop(kind, monkeypatch):
    monkeypatch.setattr(control, "MOST_NODES", 3)
    torch.manual_seed(1)
    split = check(kind, torch.randn(6, 4, dtype=torch.float64))
    assert "partway.run.default" in [o.operator for o in split.plan.operators]


def test_a_loop_of_few_operators_is_planned_operator_by_operator():
    found = [node.target for node in capture(Recurrence(), (torch.randn(6, 4, dtype=torch.float64),), {}).nodes]
    assert found.count(torch.ops.aten.tanh.default) == 6
    assert functions.run not in found


@torch.library.custom_op("partway_tests::note", mutates_args=("total", "count"))
def note(total: torch.Tensor, x: torch.Tensor, by: float, count: torch.Tensor | None = None) -> torch.Tensor:
    """Adds `by` times the columns' sums of `x`; returns the largest of each."""
    total.add_(x.sum(0), alpha=by)
    if count is not None:
        count.add_(len(x))
    return x.amax(0)


@note.register_fake
def _(total, x, by, count=None):
    return x.new_empty(x.shape[1])


@torch.library.custom_op("partway_tests::double_", mutates_args=("x",))
def double_(x: torch.Tensor) -> None:
    x.mul_(2)


class Noting(nn.Module):
    """Notes what goes through it, in buffers and in a part of a tensor of its own."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("total", torch.zeros(4))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        y = x @ self.w
        largest = note(self.total, y.detach(), 0.5, count=self.count)
        rows = x[:3] * 0 + 1
        double_(rows[1:])
        return (y.tanh() * largest).sum() + (self.total * rows).sum() / self.count


def test_an_operator_that_writes_to_its_operands_runs_on_gathered_ones(recwarn):
    x = torch.randn(6, 4, dtype=torch.float64)
    plain = Noting().double()
    split = pw.shard(copy.deepcopy(plain), {"x": ("dp", None)}, mesh={"dp": 2})
    for _ in range(2):
        losses = [module(x) for module in (plain, split)]
        for loss in losses:
            loss.backward()
        torch.testing.assert_close(*losses)
    torch.testing.assert_close(split.w.grad, plain.w.grad)
    torch.testing.assert_close(split.total, plain.total)
    assert int(split.count) == 12
    assert split.plan.unknown_operators == ("partway_tests.note.default", "partway_tests.double_.default")
    said = [str(w.message) for w in recwarn if issubclass(w.category, pw.UnknownOperatorWarning)]
    assert said == [
        "partway_tests.note.default writes to its operands, which no rule can say; its operands are gathered and it "
        "runs replicated\npartway_tests.double_.default writes to its operands, which no rule can say; its operands "
        "are gathered and it runs replicated"
    ]


def test_random_numbers_in_a_branch_are_refused():
    def fn(x):
        return torch.cond(x.sum() > 0, lambda x: x * torch.rand_like(x), lambda x: x * 2, (x,))

    said = r"torch.cond in the function draws random numbers \(aten.rand_like.default\).*draw them before"
    with pytest.raises(pw.CaptureError, match=r"(?s)" + said):
        capture(fn, (torch.randn(4),), {})


@pytest.mark.parametrize("call", [torch.ops.partway.run, lambda x, text: torch.ops.partway.run_backward(x, x, text)])
def test_the_operator_runs_nothing_that_capture_did_not_write(call, tmp_path):
    text = f"import os\nos.mkdir({str(tmp_path / 'ran')!r})\ndef forward(*x): return x\ndef like(*x): return x\n"
    with pytest.raises(pw.RuntimeStateError, match="which is not a key of what was captured in this process"):
        call([torch.ones(2)], text)
    assert not (tmp_path / "ran").exists()


def test_an_exported_program_with_a_text_of_its_own_runs_nothing(tmp_path):
    class Hostile(nn.Module):
        def forward(self, x):
            return torch.ops.partway.run([x], key)[0]

    key = functions.made_of("def forward(x): return [x + 1]\n\ndef like(x): return [x]\n")
    x = torch.ones(2)
    torch.export.save(torch.export.export(Hostile(), (x,)), tmp_path / "program.pt2")
    functions.FUNCTIONS.pop(key)  # another process
    program = torch.export.load(tmp_path / "program.pt2").module()
    with pytest.raises(pw.RuntimeStateError, match="it runs nothing else"):
        program(x)
    with pytest.raises(pw.PartwayError, match="which is not a key of what was captured"):
        pw.shard(program, mesh={"x": 2})(x)


class Seen(TorchDispatchMode):
    """Sees operators."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore:the TorchDispatchMode")
@pytest.mark.parametrize("kind", [Branch, Loop])
def test_under_a_dispatch_mode_gradients_are_those_of_one_device(kind):
    x = torch.rand(6, 4, dtype=torch.float64)
    with Seen():
        split = check(kind, x)
    torch.testing.assert_close(split(x), by_hand(kind(), x), rtol=1e-12, atol=1e-12)


def test_a_branch_may_be_captured_after_one_that_was_refused():
    def refused(x):
        y = torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x - 1, (x,))
        return y if x.max() > 0 else x

    with pytest.raises(pw.CaptureError, match="may not have a cond as well"):
        pw.shard(refused, mesh={"x": 2})(torch.ones(4, 4))
    check(Branch, torch.rand(6, 4, dtype=torch.float64))
