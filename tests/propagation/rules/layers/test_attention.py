"""Attention that is written out, with dropout."""

import pytest
import torch
import torch.nn.functional as F
from expansions import check, randn, run

import partway as pw
from partway.propagation.capture.capture import capture

aten = torch.ops.aten


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"scale": 0.2},
        {"mask": "bool"},
        {"mask": "float"},
        {"mask": "keys"},
    ],
)
@pytest.mark.parametrize("p", [0.0, 0.25])
def test_attention(lab, options, p):
    options = dict(options)
    kind = options.pop("mask", None)
    masks = {
        None: None,
        "bool": torch.ones(5, 5, dtype=torch.bool).tril(),
        "float": randn(2, 1, 5, 5, grad=False),
        "keys": torch.tensor([[True, True, False, True, True]]),
    }

    def attention(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, masks[kind], dropout_p=p, **options)

    graph = check(lab, attention, randn(2, 3, 5, 4), randn(2, 3, 5, 4), randn(2, 3, 5, 4))
    whole = aten.scaled_dot_product_attention.default in {node.target for node in graph.nodes}
    assert whole == (p == 0)


@pytest.mark.parametrize(("width", "of_values"), [(6, 4), (4, 6)])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.2}, {"enable_gqa": True}, {"masked": True}])
def test_values_of_another_width(lab, width, of_values, options):
    options = dict(options)
    heads, mask = 3, torch.ones(5, 5, dtype=torch.bool).tril() if options.pop("masked", False) else None

    def attention(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, mask, **options)

    queries = heads * (2 if options.get("enable_gqa") else 1)
    check(lab, attention, randn(2, queries, 5, width), randn(2, heads, 5, width), randn(2, heads, 5, of_values))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_with_values_of_another_width_no_scores_are_held(device):
    length = 512
    q, k, v = (torch.randn(1, 2, length, w, device=device, requires_grad=True) for w in (24, 24, 16))
    model = pw.shard(
        lambda q, k, v: F.scaled_dot_product_attention(q * 2, k, v).sum(), mesh={"x": 2}, in_strategy=((None,) * 4,) * 3
    )
    model.prepare(q, k, v)
    assert model.plan.memory.total < 2 * length * length * 4


@pytest.mark.parametrize("options", [{}, {"is_causal": True}])
def test_attention_with_dropout_whose_queries_are_broadcast_over_the_batch(lab, options):
    def attention(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.25, **options)

    check(lab, attention, randn(3, 5, 4), randn(2, 3, 6, 4), randn(2, 3, 6, 4))


def test_with_dropout_too_a_mask_that_hides_all_keys_gives_zeros():
    def attention(x):
        return F.scaled_dot_product_attention(x, x, x, torch.zeros(5, 5, dtype=torch.bool), dropout_p=0.25)

    x = randn(2, 5, 4, grad=False)
    assert torch.equal(attention(x), torch.zeros_like(x))
    (found,) = run(capture(attention, (x,), {}), attention, (x,)).values()
    assert torch.equal(found, torch.zeros_like(x))
