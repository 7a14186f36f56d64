"""Random numbers that are a function of the seed, the operator and the global index."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from partway.propagation.capture.capture import CaptureOptions, capture
from partway.propagation.graph.nodes import draws_random_numbers
from partway.propagation.ops import random_numbers
from partway.propagation.ops.random_numbers import RandomNumbers, draw, keys
from partway.strategy.cut import Cut

CPU = torch.device("cpu")
SIZE = [6, 5, 7]
KINDS = [
    ("bernoulli", [0.3], torch.bool),
    ("bernoulli", [0.3], torch.float64),
    ("uniform", [-1.0, 2.0], torch.float32),
    ("uniform", [0.0, 1.0], torch.float64),
    ("uniform", [0.0, 1.0], torch.bfloat16),
    ("open", [], torch.float32),
    ("normal", [1.0, 2.0], torch.float32),
    ("normal", [0.0, 1.0], torch.float64),
    ("normal", [0.0, 1.0], torch.float16),
    ("integers", [-3, 9], torch.int64),
]


def keys_of(seed, count=1):
    torch.manual_seed(seed)
    return keys(count)


def whole(kind, given, dtype, size, seed=0, stream=False):
    return draw(keys_of(seed)[0], [], [], [], kind, given, size, dtype, CPU, stream)


def part(kind, given, dtype, size, cuts, positions, seed=0, stream=False):
    """What the rank at `positions` draws, as far as its slices go, and where that is."""
    places = [torch.tensor(position) for position in positions]
    found = draw(
        keys_of(seed)[0], places, list(cuts), list(map(str, cuts.values())), kind, given, size, dtype, CPU, stream
    )
    spans = {dim: cut.spans[position] for (dim, cut), position in zip(cuts.items(), positions, strict=True)}
    place = tuple(slice(*spans.get(dim, (0, extent))) for dim, extent in enumerate(size))
    return found[tuple(slice(0, s.stop - s.start) for s in place)], place


CUTS = [
    {0: Cut(6, (2,))},
    {0: Cut(6, (4,))},  # slices of 2, and an empty one
    {1: Cut(5, (2,))},
    {2: Cut(7, (3,))},
    {2: Cut(7, (2, 2))},
    {0: Cut(6, (3,)), 2: Cut(7, (2,))},
    {0: Cut(6, (2,)), 1: Cut(5, (5,)), 2: Cut(7, (7,))},
]


@pytest.mark.parametrize("at_once", [2**15, 4])
@pytest.mark.parametrize(("kind", "given", "dtype"), KINDS)
def test_every_part_of_any_cut_is_a_part_of_one_tensor(monkeypatch, kind, given, dtype, at_once):
    expected = whole(kind, given, dtype, SIZE)
    monkeypatch.setattr(random_numbers, "_AT_ONCE", at_once)
    assert torch.equal(whole(kind, given, dtype, SIZE), expected)
    for cuts in CUTS:
        for positions in itertools.product(*(range(len(cut.spans)) for cut in cuts.values())):
            found, place = part(kind, given, dtype, SIZE, cuts, positions)
            assert torch.equal(found, expected[place]), (cuts, positions)


def test_numbers_with_logarithms_do_not_depend_on_where_a_part_begins():
    size = [3, 4099]
    expected = whole("normal", [0.0, 1.0], torch.float32, size)
    for count in (2, 3, 5, 64):
        cut = Cut(4099, (count,))
        for position in range(count):
            found, place = part("normal", [0.0, 1.0], torch.float32, size, {1: cut}, [position])
            assert torch.equal(found, expected[place])


def test_a_stream_of_a_rank_depends_on_its_place_only():
    cuts = {0: Cut(6, (2,))}
    first, second, again = (
        part("normal", [0.0, 1.0], torch.float64, SIZE, cuts, [position], stream=True)[0] for position in (0, 1, 0)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    for kind, given, dtype in KINDS:
        found = whole(kind, given, dtype, [20000], stream=True).double()
        other = whole(kind, given, dtype, [20000]).double()
        assert abs(found.mean() - other.mean()) < 0.05 * float(other.std())
        assert float(found.std()) == pytest.approx(float(other.std()), rel=0.05)


def distance(sample, distribution):
    """That of Kolmogorov and Smirnov, times the root of the number of samples: above 1.95 once in 1000 times."""
    values = sample.double().flatten().sort().values
    n = len(values)
    below = distribution(values)
    steps = torch.arange(n, dtype=torch.float64) / n
    return float(torch.maximum(below - steps, steps + 1 / n - below).max()) * math.sqrt(n)


def normal_below(x):
    return 0.5 * (1 + torch.erf(x / math.sqrt(2)))


@pytest.mark.parametrize("seed", [0, 1, 12345])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_numbers_have_their_distribution(seed, dtype):
    n = [200_000]
    assert distance(whole("uniform", [0.0, 1.0], dtype, n, seed), lambda x: x) < 1.95
    assert distance(whole("open", [], dtype, n, seed), lambda x: x) < 1.95
    assert distance(whole("normal", [0.0, 1.0], dtype, n, seed), normal_below) < 1.95
    counts = whole("integers", [0, 10], torch.int64, n, seed).bincount(minlength=10).double()
    assert ((counts - 20_000).square() / 20_000).sum() < 27.9  # 9 degrees of freedom, 0.1 %
    for p in (0.1, 0.5, 0.99):
        mean = whole("bernoulli", [p], torch.bool, n, seed).double().mean()
        assert abs(mean - p) < 3.3 * math.sqrt(p * (1 - p) / n[0])


def test_probabilities_of_nothing_and_of_everything_are_certain():
    assert not whole("bernoulli", [0.0], torch.bool, [10000]).any()
    assert whole("bernoulli", [1.0], torch.bool, [10000]).all()
    found = whole("open", [], torch.float32, [2**20])
    assert 0 < found.min() < found.max() < 1
    assert whole("normal", [0.0, 1.0], torch.float32, [2**20]).isfinite().all()


def correlation(a, b):
    return float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]) * math.sqrt(a.numel())


def test_neighbours_and_operators_and_calls_and_seeds_are_not_correlated():
    n = 2**17
    torch.manual_seed(0)
    first, second = (
        [draw(key, [], [], [], "uniform", [0.0, 1.0], [n], torch.float64, CPU, False) for key in keys(2)]
        for _ in range(2)
    )
    assert abs(correlation(first[0], first[1])) < 4
    assert abs(correlation(first[0], second[0])) < 4
    other = draw(keys_of(1)[0], [], [], [], "uniform", [0.0, 1.0], [n], torch.float64, CPU, False)
    assert abs(correlation(first[0], other)) < 4
    halves = draw(keys_of(0)[0], [], [], [], "uniform", [0.0, 1.0], [n], torch.float32, CPU, False).double()
    for distance in (1, 2, 3, 64, 1024):
        for found in (first[0], halves):
            assert abs(correlation(found[:-distance], found[distance:])) < 4


def test_a_call_draws_one_number_of_the_generator():
    torch.manual_seed(3)
    keys(5)
    after = torch.get_rng_state()
    torch.manual_seed(3)
    first = keys(1)
    assert torch.equal(torch.get_rng_state(), after)
    assert torch.equal(first[0], keys_of(3, 5)[0])
    assert not torch.equal(keys(1)[0], first[0])


# -- what PyTorch draws


def relu_with_random_slopes(x):
    return F.rrelu(x, 0.1, 0.3, training=True)


BY_INDEX = {
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.3, training=True),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "bernoulli_": lambda x: torch.empty_like(x).bernoulli_(0.2),
    "bernoulli_of": lambda x: torch.empty_like(x).bernoulli_(x.sigmoid()),
    "cauchy_": lambda x: torch.empty_like(x).cauchy_(1.0, 2.0),
    "complex_normal": lambda x: torch.empty_like(torch.complex(x, x)).normal_(1.0, 2.0).real,
    "complex_randn": lambda x: torch.randn_like(torch.complex(x, x)).imag,
    "complex_uniform": lambda x: torch.empty_like(torch.complex(x, x)).uniform_(1.0, 3.0).imag,
    "dropout": lambda x: F.dropout(x, 0.3),
    "everything_dropped": lambda x: F.dropout(x, 1.0),
    "exponential_": lambda x: torch.empty_like(x).exponential_(2.0),
    "feature_dropout": lambda x: F.dropout1d(x.reshape(1, -1, 1), 0.5).view_as(x),
    "geometric_": lambda x: torch.empty_like(x).geometric_(0.3),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x, dim=0),
    "log_normal_": lambda x: torch.empty_like(x).log_normal_(0.5, 0.25),
    "normal": lambda x: torch.normal(x, x.abs()),
    "normal_": lambda x: torch.empty_like(x).normal_(1.0, 2.0),
    "normal_deviation": lambda x: torch.normal(2.0, x.abs()),
    "normal_mean": lambda x: torch.normal(x, 2.0),
    "rand": lambda x: torch.rand(x.shape) + x,
    "rand_like": torch.rand_like,
    "randint": lambda x: torch.randint(2, 9, x.shape) + x,
    "randint_like": lambda x: torch.randint_like(x, 5),
    "randn": lambda x: torch.randn(x.shape) + x,
    "randn_like": torch.randn_like,
    "random_": lambda x: torch.empty_like(x).random_(7),
    "rrelu": relu_with_random_slopes,
    "uniform_": lambda x: torch.empty_like(x).uniform_(1.0, 3.0),
}


@pytest.mark.parametrize("name", BY_INDEX)
def test_an_operator_draws_by_index_and_from_the_distribution_of_pytorch(name):
    fn = BY_INDEX[name]
    x = torch.linspace(-2, 2, 40 * 60, dtype=torch.float64).view(40, 60)
    graph = capture(fn, (x,), {})
    assert [node.target for node in graph.nodes if draws_random_numbers(node)] == [keys]
    torch.manual_seed(0)
    (found,) = torch.fx.Interpreter(graph.module).run(x)
    expected = torch.cat([fn(x).flatten() for _ in range(20)]).double()
    assert (found.dtype, found.isfinite().all()) == (fn(x).dtype, True)
    ranks = torch.linspace(0.05, 0.95, 7, dtype=torch.float64)
    spread = expected.quantile(ranks)
    near = (found.double().flatten() <= spread[:, None]).double().mean(1)
    true = (expected <= spread[:, None]).double().mean(1)
    assert (near - true).abs().max() < 0.06


def test_what_no_index_tells_is_drawn_whole():
    for fn in (lambda x: torch.multinomial(x, 2), lambda x: x[torch.randperm(4)], torch.poisson):
        graph = capture(fn, (torch.rand(4, 6),), {})
        assert any(draws_random_numbers(node) and node.target is not keys for node in graph.nodes)


def test_pytorchs_numbers_are_drawn_if_asked_for():
    x = torch.randn(4, 6)
    options = CaptureOptions(random_numbers=RandomNumbers.TORCH)
    graph = capture(lambda x: F.dropout(x, 0.3) + torch.rand_like(x), (x,), {}, options)
    torch.manual_seed(0)
    (found,) = torch.fx.Interpreter(graph.module).run(x)
    torch.manual_seed(0)
    torch.testing.assert_close(found, F.dropout(x, 0.3) + torch.rand_like(x))
