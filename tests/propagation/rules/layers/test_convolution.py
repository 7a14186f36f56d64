"""Every windowed operator under every split of its image: PyTorch's value and gradients.

Calls are drawn with their sizes and options, meshes with their axes; of all options of the rule one that splits an
image is drawn too. What comes before and after the call is elementwise and split alike, so that behind the ends of
short slices are numbers that mean nothing.
"""

import math
import operator
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, assume, given
from hypothesis import strategies as st
from random_examples import examples
from torch import fx

from partway.propagation.graph.graph import Graph
from partway.propagation.graph.port import Port, Role
from partway.propagation.graph.structure import flatten
from partway.propagation.ops.padded_convolution import padded_convolution
from partway.propagation.problem.formulate import formulate
from partway.propagation.search.exact import dynamic_programming
from partway.propagation.torch_internals import FakeTensorMode
from partway.strategy import Mesh

aten = torch.ops.aten
MESHES = [
    {"a": 2},
    {"a": 3},
    {"a": 4},
    {"a": 5},
    {"a": 7},
    {"a": 8},
    {"a": 2, "b": 2},
    {"a": 3, "b": 2},
    {"a": 2, "b": 4},
]


@dataclass(frozen=True)
class Call:
    """A call of an operator; of each tensor in `args` there is its shape."""

    target: object
    args: tuple

    def __str__(self):
        return f"{self.target}{self.args}"


@dataclass(frozen=True)
class Of:
    """The shape of a tensor operand."""

    shape: tuple


def graph_of(call):
    """The graph of cos, the call, and a product, which needs no capture."""
    graph, mode = fx.Graph(), FakeTensorMode()
    ports, tensors = [], []

    def placed(a):
        if not isinstance(a, Of):
            return a
        node = graph.placeholder(f"x{len(ports)}")
        tensor = torch.randn(a.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(ports)))
        tensors.append((3 * tensor).requires_grad_())
        node.meta["val"] = mode.from_tensor(torch.empty(a.shape, dtype=torch.float64))
        ports.append(Port(node, Role.INPUT, node.name, node.name, True))
        return node

    def add(target, *args):
        node = graph.call_function(target, args)
        values = fx.node.map_arg(args, lambda n: n.meta["val"])
        with mode:
            node.meta["val"] = target(*values)
        return node

    args = [placed(a) for a in call.args]
    args[0] = before = add(aten.cos.default, args[0])
    made = add(call.target, *args)
    several = isinstance(made.meta["val"], tuple | list)
    results = [add(operator.getitem, made, i) for i in range(len(made.meta["val"]))] if several else [made]
    results[0] = add(aten.mul.Tensor, results[0], 3.0)
    graph.output(tuple(results))
    outputs = [
        Port(node, Role.RESULT, f"result[{i}]", requires_grad=node.meta["val"].is_floating_point())
        for i, node in enumerate(results)
    ]
    module = fx.GraphModule({}, graph)
    found = Graph(module, tuple(ports), tuple(outputs), flatten(tuple(tensors[: len(outputs)]))[1], {}, {})
    return found, before, made, tensors


def reference(call, tensors):
    """What PyTorch gives."""
    given_tensors = iter(tensors)
    args = [next(given_tensors) if isinstance(a, Of) else a for a in call.args]
    args[0] = args[0].cos()
    made = call.target(*args)
    first, *rest = made if isinstance(made, tuple | list) else (made,)
    return [first * 3.0, *rest]


def splits_window(vertex, option):
    """Whether an option of an operator splits a factor of which it has a halo."""
    return not {halo.factor for halo in vertex.rule.windows}.isdisjoint(option.factors)


def check(lab, call, sizes, pick, every=False):
    """Run the call under options that split its image; `pick` says which of them. Returns how many there are."""
    graph, before, made, tensors = graph_of(call)
    problem = formulate(graph, lab.settings_of(Mesh(sizes), on_unknown_op="error"), {})
    place = {v.node: i for i, v in enumerate(problem.vertices) if v.kind == "operator"}
    vertex = problem.vertices[place[made]]
    windowed = [i for i, option in enumerate(vertex.options) if splits_window(vertex, option)]
    if not windowed:
        return 0
    expected = lab.value_and_gradients(reference(call, tensors), tensors)
    for chosen in windowed if every else [windowed[pick % len(windowed)]]:
        restricted = lab.choose(problem, place[made], [chosen])
        option = vertex.options[chosen]
        if before in place:
            alike = [
                i for i, o in enumerate(problem.vertices[place[before]].options) if o.results == option.operands[:1]
            ]
            restricted = lab.choose(restricted, place[before], alike) if alike else restricted  # addends of no cos
        solution = dynamic_programming(restricted)
        found = lab.value_and_gradients(lab.compiled(restricted, solution.choice)(tensors), tensors)
        lab.assert_same(found, expected, f"{call} as {option.factors} on {sizes}")
    return len(windowed)


# -- Calls


LEAD = st.sampled_from([(1, 2), (2, 3)])


def sizes_of(draw, count, low, high=13):
    return tuple(draw(st.integers(low, high)) for _ in range(count))


def dims_of(draw, low=1, high=3):
    """How many spatial dims, two more often than not."""
    return draw(st.sampled_from([n for n in (2, 1, 2, 3) if low <= n <= high]))


@st.composite
def convolutions(draw):
    count = dims_of(draw)
    kernel = sizes_of(draw, count, 1, 4)
    stride, dilation = sizes_of(draw, count, 1, 3), sizes_of(draw, count, 1, 2)
    padding = sizes_of(draw, count, 0, 3)
    groups, channels = draw(st.sampled_from([(1, (2, 3)), (2, (4, 2)), (2, (2, 4)), (3, (3, 3))]))
    low = max(d * (k - 1) + 1 - 2 * p for k, d, p in zip(kernel, dilation, padding, strict=True))
    size = sizes_of(draw, count, max(low, 2), max(low, 2) + 10 // count)
    weight = Of((channels[1], channels[0] // groups, *kernel))
    bias = draw(st.sampled_from([None, Of(channels[1:])]))
    batch = () if draw(st.integers(0, 5)) == 0 else (2,)
    target = (aten.conv1d, aten.conv2d, aten.conv3d)[count - 1]
    args = [Of((*batch, channels[0], *size)), weight, bias, list(stride)]
    words = {"valid": not any(padding), "same": set(stride) == {1}}
    word = draw(st.sampled_from([None, None, *(word for word, fits in words.items() if fits)]))
    if word:
        return Call(target.padding, (*args, word, list(dilation), groups))
    return Call(target.default, (*args, list(padding), list(dilation), groups))


@st.composite
def padded_convolutions(draw):
    count = dims_of(draw)
    mode = draw(st.sampled_from(["constant", "reflect", "replicate", "circular"]))
    kernel, stride, dilation = sizes_of(draw, count, 1, 3), sizes_of(draw, count, 1, 2), sizes_of(draw, count, 1, 2)
    size = sizes_of(draw, count, 6, 8 if count == 3 else 13)
    pad = [draw(st.integers(-1 if mode == "constant" else 0, 3)) for _ in range(2 * count)]
    padded = [n + pad[2 * i] + pad[2 * i + 1] for i, n in enumerate(reversed(size))]
    assume(all(n > d * (k - 1) for n, d, k in zip(reversed(padded), dilation, kernel, strict=True)))
    value = draw(st.sampled_from([0.0, 1.5])) if mode == "constant" else 0.0
    groups = draw(st.sampled_from([1, 2]))
    bias = draw(st.sampled_from([None, Of((2,))]))
    args = (
        Of((2, 2, *size)),
        Of((2, 2 // groups, *kernel)),
        bias,
        pad,
        mode,
        value,
        list(stride),
        list(dilation),
        groups,
    )
    return Call(padded_convolution, args)


@st.composite
def transposed(draw):
    count = dims_of(draw)
    kernel, stride, dilation = sizes_of(draw, count, 1, 4), sizes_of(draw, count, 1, 4), sizes_of(draw, count, 1, 2)
    output = [draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True)]
    size = sizes_of(draw, count, 2, 9 // count + 2)
    whole = [
        (n - 1) * s + d * (k - 1) + 1 + o for n, s, d, k, o in zip(size, stride, dilation, kernel, output, strict=True)
    ]
    padding = [draw(st.integers(0, min(3, (n - 1) // 2))) for n in whole]
    groups, channels = draw(st.sampled_from([(1, (2, 3)), (2, (4, 2)), (2, (2, 4)), (3, (3, 3))]))
    bias = draw(st.sampled_from([None, Of(channels[1:])]))
    batch = () if draw(st.integers(0, 5)) == 0 else (2,)
    target = (aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input)[count - 1]
    tensors = Of((*batch, channels[0], *size)), Of((channels[0], channels[1] // groups, *kernel)), bias
    return Call(target, (*tensors, list(stride), padding, output, groups, list(dilation)))


@st.composite
def pools(draw):
    count = dims_of(draw)
    kernel = sizes_of(draw, count, 1, 4)
    stride = draw(st.sampled_from([list(sizes_of(draw, count, 1, 4)), []]))
    padding = [draw(st.integers(0, k // 2)) for k in kernel]
    kind = draw(st.sampled_from(["max", "index", "mean"]))
    dilation = sizes_of(draw, count, 1, 1 if kind == "mean" else 2)
    low = max(d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True))
    size = sizes_of(draw, count, low, low + 12 // count)
    x, ceil = Of((*draw(LEAD)[: draw(st.sampled_from([2, 2, 1]))], *size)), draw(st.booleans())
    if kind == "mean":
        target = (aten.avg_pool1d, aten.avg_pool2d, aten.avg_pool3d)[count - 1].default
        rest = [draw(st.sampled_from([None, 3]))] if count > 1 else []
        return Call(target, (x, list(kernel), stride, padding, ceil, draw(st.booleans()), *rest))
    plain = (aten.max_pool1d, aten.max_pool2d, aten.max_pool3d)
    telling = (aten.max_pool1d_with_indices, aten.max_pool2d_with_indices, aten.max_pool3d_with_indices)
    target = (plain if kind == "max" else telling)[count - 1].default
    call = Call(target, (x, list(kernel), stride, padding, list(dilation), ceil))
    assume(reference(call, [torch.zeros(x.shape)])[0].isfinite().all())  # a window of nothing but padding
    return call


@st.composite
def blocks(draw):
    kernel, stride, dilation = sizes_of(draw, 2, 1, 3), sizes_of(draw, 2, 1, 3), sizes_of(draw, 2, 1, 2)
    padding = sizes_of(draw, 2, 0, 2)
    low = [max(2, d * (k - 1) + 1 - 2 * p) for k, d, p in zip(kernel, dilation, padding, strict=True)]
    size = [draw(st.integers(n, n + 8)) for n in low]
    if draw(st.integers(0, 3)) == 0:  # one row of blocks
        size[0], padding = low[0], (0, padding[1])
        size[0] = dilation[0] * (kernel[0] - 1) + 1
    lead = draw(LEAD)[: draw(st.sampled_from([2, 2, 1]))]
    sizes = [list(kernel), list(dilation), list(padding), list(stride)]
    if draw(st.booleans()):
        return Call(aten.im2col.default, (Of((*lead, *size)), *sizes))
    every = zip(size, kernel, dilation, padding, stride, strict=True)
    count = math.prod((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, d, p, s in every)
    return Call(aten.col2im.default, (Of((*lead[:-1], lead[-1] * math.prod(kernel), count)), size, *sizes))


@st.composite
def unfolds(draw):
    size = sizes_of(draw, draw(st.integers(1, 3)), 3)
    dim = draw(st.integers(-len(size), len(size) - 1))
    return Call(aten.unfold.default, (Of(size), dim, draw(st.integers(1, size[dim])), draw(st.integers(1, 4))))


@st.composite
def interpolations(draw):
    kind = draw(st.sampled_from(["nearest", "nearest-exact", "linear", "cubic"]))
    count = 2 if kind == "cubic" else dims_of(draw)
    size = sizes_of(draw, count, 2, 9)
    target = {
        "nearest": (aten.upsample_nearest1d, aten.upsample_nearest2d, aten.upsample_nearest3d),
        "nearest-exact": (
            aten._upsample_nearest_exact1d, aten._upsample_nearest_exact2d, aten._upsample_nearest_exact3d,
        ),
        "linear": (aten.upsample_linear1d, aten.upsample_bilinear2d, aten.upsample_trilinear3d),
        "cubic": (None, aten.upsample_bicubic2d, None),
    }[kind][count - 1].vec  # fmt: skip
    corners = [] if "nearest" in kind else [draw(st.booleans())]
    by_scale = draw(st.integers(0, 2))
    scales, sizes = None, None
    if by_scale == 0:
        sizes = list(sizes_of(draw, count, 2, 17 if count < 3 else 9))
    elif by_scale == 1:
        scales = [float(draw(st.sampled_from([2, 3, 1]))) for _ in size]
    else:
        scales = [draw(st.sampled_from([1.5, 0.5, 2.0, 0.7, 1.3, 2.5, 3.0, 1.1])) for _ in size]
    return Call(target, (Of((*draw(LEAD), *size)), sizes, *corners, scales))


@st.composite
def pads(draw):
    mode = draw(st.sampled_from(["constant", "reflect", "replicate", "circular"]))
    count = dims_of(draw)
    size = sizes_of(draw, count, 5, 10)
    pad = [draw(st.integers(-2, 4 if mode == "constant" else 2)) for _ in range(2 * count)]
    value = draw(st.sampled_from([None, 0.0, 1.5])) if mode == "constant" else None
    return Call(aten.pad.default, (Of((*draw(LEAD), *size)), pad, mode, value))


@st.composite
def slices(draw):
    size = sizes_of(draw, draw(st.integers(1, 3)), 3, 17)
    dim = draw(st.integers(-len(size), len(size) - 1))
    start = draw(st.sampled_from([None, *range(-4, 6)]))
    stop = draw(st.sampled_from([None, -1, -2, *range(4, 20)]))
    assume(len(range(size[dim])[start:stop]) > 1)
    return Call(aten.slice.Tensor, (Of(size), dim, start, stop, draw(st.integers(1, 3))))


@st.composite
def rolls(draw):
    size = sizes_of(draw, draw(st.integers(1, 3)), 2)
    dims = draw(st.lists(st.integers(0, len(size) - 1), min_size=1, max_size=3))
    return Call(aten.roll.default, (Of(size), [draw(st.integers(-20, 20)) for _ in dims], dims))


OPERATORS = {
    "convolution": convolutions(),
    "padded convolution": padded_convolutions(),
    "transposed convolution": transposed(),
    "pool": pools(),
    "blocks": blocks(),
    "unfold": unfolds(),
    "interpolation": interpolations(),
    "pad": pads(),
    "slice": slices(),
    "roll": rolls(),
}


@pytest.mark.parametrize("name", OPERATORS)
@examples(10, suppress_health_check=list(HealthCheck), phases=(Phase.generate,))
@given(st.data())
def test_a_split_image_gives_what_the_whole_one_does(name, lab, data):
    call, sizes = data.draw(OPERATORS[name]), data.draw(st.sampled_from(MESHES))
    assume(check(lab, call, sizes, data.draw(st.integers(0, 100))))


@pytest.mark.slow
@pytest.mark.parametrize("name", OPERATORS)
@examples(30, suppress_health_check=list(HealthCheck), phases=(Phase.generate,))
@given(st.data())
def test_every_split_of_an_image_gives_what_the_whole_one_does(name, lab, data):
    call, sizes = data.draw(OPERATORS[name]), data.draw(st.sampled_from(MESHES))
    check(lab, call, sizes, data.draw(st.integers(0, 100)))


# -- One after another


def network(x, w, v):
    """Windowed operators of which each reads what another one made of short slices."""
    y = F.conv2d(x, w, padding=1).sigmoid()
    z = F.max_pool2d(y, 3, 2, 1, ceil_mode=True)
    z = F.interpolate(F.avg_pool2d(z, 3, 1, 1, count_include_pad=False), scale_factor=2, mode="bilinear")
    z = F.conv_transpose2d(z, v, stride=2, padding=1, output_padding=1).roll(3, 2)
    z = F.interpolate(F.pad(z, (0, 0, 2, 1), mode="circular"), size=(y.shape[2], 9), mode="bicubic", align_corners=True)
    return (z[:, :, 1:-1] * y[:, :, 2:, :9]).square().sum()


@pytest.mark.parametrize("height", [8, 13, 17])
@pytest.mark.parametrize("sizes", [{"a": 2}, {"a": 5}, {"a": 2, "b": 3}, {"a": 8}], ids=str)
def test_behind_the_ends_of_short_slices_nothing_enters(lab, sizes, height):
    generator = torch.Generator().manual_seed(0)
    shapes = (1, 2, height, 10), (2, 2, 3, 3), (2, 2, 3, 3)
    args = [torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_() for shape in shapes]
    problem = lab.problem_of(network, tuple(args), Mesh(sizes))
    split = 0
    for i, vertex in enumerate(problem.vertices):
        halo = next((halo for halo in getattr(vertex.rule, "windows", ()) if vertex.rule.dim_of(halo) == 2), None)
        if halo is not None:
            options = enumerate(vertex.options)
            rows = [place for place, option in options if set(option.factors) == {halo.factor}]
            problem, split = lab.choose(problem, i, rows) if rows else problem, split + bool(rows)
    assert split >= 5
    expected = lab.value_and_gradients([network(*args)], args)
    lab.check_choice(problem, dynamic_programming(problem).choice, network, args, expected, f"{height} on {sizes}")
