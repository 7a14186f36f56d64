"""What a rank's ledger holds of its calls, and how two of them are compared."""

import threading
import time

import pytest
import torch
import torch.distributed as dist

import partway as pw
from partway.propagation.torch_internals import FakeTensorMode
from partway.runtime import ledger as ledgers
from partway.runtime.ledger import Ledger, WriteCounts, sample
from partway.runtime.watch import watch


class Counted(Ledger):
    """A ledger whose turns are counted."""

    turns = 0

    def _turn(self, last=False):
        result = super()._turn(last)
        self.turns += 1
        return result

    def has_turned(self, times):
        """Wait for so many turns more."""
        end = self.turns + times
        while self.turns < end:
            assert self._thread.is_alive()
            time.sleep(0.001)


@pytest.fixture
def pair(monkeypatch):
    """The ledgers of two ranks, and what they tell."""
    monkeypatch.setattr(ledgers, "_PERIOD", 0.002)
    store, told = dist.HashStore(), []
    both = [Counted(store, rank, (0, 1), told.append) for rank in (0, 1)]
    yield *both, told, store
    for each in both:
        threading.Thread(target=each.end, args=(False,)).start()


def test_ranks_are_compared_after_turns_in_which_nothing_ran(pair):
    first, second, told, _ = pair
    for pause in (0, 3, 30):
        for step in range(5):
            for each in (first, second):
                each.ran(step, "a call", draws=False)
            if pause:
                first.has_turned(pause)
                second.has_turned(pause)
    assert told == []
    first.ran(1, "a call", draws=False)
    second.ran(2, "a call", draws=False)
    while not told:
        time.sleep(0.001)
    assert told[0].startswith("rank 1 ran another program (or left out a step) than rank 0, at a call")


def compared(first, second):
    """Whether both are between two turns, and all of their lines are done with."""
    with first._work, second._work:
        return not (first._lines or second._lines or second._own) and first._page == second._page


def test_lines_and_pages_do_not_pile_up(pair):
    first, second, told, store = pair
    for _ in range(50):
        for step in range(2000):
            for each in (first, second):
                each.ran(step, "a call", draws=False)
        while not compared(first, second):
            time.sleep(0.001)
        assert store.num_keys() == 0
    assert told == []


def test_a_ledger_without_lines_ends_when_the_first_one_does(pair):
    first, second, told, store = pair
    for each in (first, second):
        each.called("a call")
    while not compared(first, second):
        time.sleep(0.001)
    ends = [threading.Thread(target=each.end, args=(False,)) for each in (second, first)]
    ends[0].start()
    ends[0].join(0.1)
    assert ends[0].is_alive()
    ends[1].start()
    for each in ends:
        each.join()
    assert store.num_keys() == 0  # the last page was read, so that nobody waited in vain
    assert told == []


@pytest.mark.parametrize("more", [0, 1])
def test_what_one_rank_alone_did_last_is_told_at_the_end(pair, more):
    first, second, told, _ = pair
    for each in (first, second):
        each.called("a call")
    while not compared(first, second):
        time.sleep(0.001)
    pair[more].called("another call")
    ends = [threading.Thread(target=each.end, args=(False,)) for each in (first, second)]
    for each in ends:
        each.start()
    for each in ends:
        each.join()
    assert told == [
        f"rank {more} called more collectives than rank {1 - more} before that ended; let all ranks of a group call "
        "collectives in one order, on tensors of one shape and dtype"
    ]


@pytest.mark.parametrize("alike", [0, 1, 3])
def test_what_comes_after_the_first_rank_has_ended_is_told_at_the_next_turn(alike):
    store, told = dist.HashStore(), []
    both = first, second = [Ledger(store, rank, (0, 1), told.append) for rank in (0, 1)]
    for call in range(alike):
        for each in both:
            each.called(f"call {call}")
    first._turn(last=True)
    second._turn()
    assert told == []
    second.called("one more")
    second._turn()
    for each in both:
        each._ends.set()
    assert [line.partition(";")[0] for line in told] == ["rank 1 called more collectives than rank 0 before that ended"]


LINES = {  # of a rank's own: what is noted, and what is said of it
    "runs": (lambda ledger, rank: ledger.ran(rank, "a call", draws=False), "ran another program"),
    "random": (lambda ledger, rank: ledger.ran(7, "a call", draws=True), "drew from a random generator in another"),
    "inputs": (
        lambda ledger, rank: ledger.given([torch.ones(3), torch.full((3,), rank)], "a call"),
        "was given inputs of other values",
    ),
    "first input": (
        lambda ledger, rank: ledger.given([torch.full((3,), rank), torch.ones(3)], "a call"),
        "was given inputs of other values",
    ),
    "gradients": (lambda ledger, rank: ledger.came_back(torch.full((3,), rank), "a call"), "went on otherwise with a"),
    "parts": (lambda ledger, rank: ledger.shared(torch.full((3,), rank), "a call"), "was given another part of the"),
    "steps": (lambda ledger, rank: ledger.stepped((1, rank), "a call"), "stepped its optimizer (or wrote to"),
    "copies": (lambda ledger, rank: ledger.holds(torch.full((3,), rank), "a call"), "holds other values"),
    "a checksum of copies": (lambda ledger, rank: ledger.holds(rank, "a call"), "holds other values"),
    "writes": (lambda ledger, rank: ledger.writes(("aten.add_", (3,), rank)), "wrote otherwise"),
    "kept": (lambda ledger, rank: ledger.kept((rank,), "step 1"), "has new gradients, or none, of other parameters"),
    "settings": (lambda ledger, rank: ledger.settings((0.1, rank), "a step: lr"), "has an optimizer of other settings"),
    "calls": (lambda ledger, rank: ledger.called(f"all_reduce of {rank}"), "called another collective"),
}


@pytest.mark.parametrize("kind", LINES)
def test_each_kind_of_line_is_compared(kind):
    store, told = dist.HashStore(), []
    both = [Ledger(store, rank, (0, 1), told.append) for rank in (0, 1)]
    note, said = LINES[kind]
    for alike in (True, False):
        for rank, each in enumerate(both):
            torch.manual_seed(0 if alike else rank)
            note(each, 0 if alike else rank)
        for each in both:
            each._turn()
        assert len(told) == (not alike)
    for each in both:
        each._ends.set()
    assert told[0].startswith(f"rank 1 {said}")


def test_every_element_has_its_turn():
    seen = {int(each) for turn in range(15) for each in sample(torch.arange(1000), turn)}
    assert seen == set(range(1000))


def drifts(idle, wait):
    """Rank 1 goes on with another batch; nothing ends the ranks but the error."""
    ledgers._PERIOD = 0.02
    torch.manual_seed(0)
    model = pw.shard(torch.nn.Linear(16, 4), mesh={"dp": 2}, in_strategy=(("dp", None),))
    x = torch.randn(8, 16)
    for step in range(100_000):
        if step == 5:
            time.sleep(idle)
        model(x + 1 if step >= 10 and pw.get_rank() else x)
        time.sleep(wait)
    return "nothing was said"


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("idle", "wait"), [(0.3, 0.05), *(pytest.param(*each, marks=pytest.mark.slow) for each in [(0, 0), (0.3, 0)])]
)
def test_drift_is_told_while_the_ranks_run_whatever_their_pace(on_ranks, idle, wait):
    with pytest.raises(AssertionError, match="rank 1 was given inputs of other values than rank 0"):
        on_ranks(2, drifts, idle, wait)


def alive():
    """The thread compares for as long as the ranks run."""
    model = pw.shard(torch.nn.Linear(16, 4), mesh={"dp": 2}, in_strategy=(("dp", None),))
    model(torch.ones(8, 16))
    own = watch().ledger("ledger", range(2))
    time.sleep(3 * ledgers._PERIOD)
    return own._thread.is_alive()


@pytest.mark.gloo
def test_the_thread_outlives_idle_turns(on_ranks):
    assert on_ranks(2, alive) == [True, True]


@pytest.mark.parametrize(
    "laid_out",
    [
        lambda x: x.contiguous(memory_format=torch.channels_last),
        lambda x: x.permute(3, 1, 2, 0).contiguous().permute(3, 1, 2, 0),
        lambda x: x[:1].expand(4, -1, -1, -1) * 1,
        lambda x: torch.stack([x, x])[1],
        lambda x: torch.cat([x, x], 3)[..., :6],
    ],
    ids=["channels_last", "turned", "expanded", "a part", "padded"],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int32, torch.bool])
def test_the_same_elements_are_looked_at_whatever_the_strides_are(laid_out, dtype):
    x = torch.arange(4 * 3 * 5 * 6).reshape(4, 3, 5, 6).remainder(7).to(dtype)
    given = laid_out(x)
    found, expected = sample(given), sample(given.contiguous())
    assert found is not None
    assert torch.equal(found, expected)
    assert 64 <= len(found) <= 128


def test_a_scalar_and_a_tensor_of_no_elements_are_looked_at():
    assert sample(torch.tensor(3.0)).tolist() == [3.0]
    assert sample(torch.ones(0, 4).T).tolist() == []


def test_what_has_no_values_here_is_not_looked_at():
    with FakeTensorMode():
        assert sample(torch.ones(3)) is None
    assert sample(torch.ones(3, device="meta")) is None
    assert sample(torch.ones(3).to_sparse()) is None


def test_a_step_of_an_optimizer_between_two_calls_is_seen():
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    written, optimizer = WriteCounts(), torch.optim.SGD(parameters, foreach=False)

    def counts():
        return written([(str(i), parameter) for i, parameter in enumerate(parameters)])

    assert counts() == (0, 0, 0)
    assert counts() == (0, 0, 0)
    for parameter in parameters[::2]:
        parameter.grad = torch.ones(2)
    optimizer.step()
    assert counts() == (1, 0, 1)
    assert counts() == (0, 0, 0)
    with torch.no_grad():
        parameters[2].add_(1).add_(1)
    parameters[1] = torch.nn.Parameter(torch.ones(2))
    assert counts() == (0, -1, 2)
