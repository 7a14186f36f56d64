"""The published runs: every row is predicted or has a reason, and formulas agree with what the sources print."""

import pytest
from published import by_package
from published_fit import kendall
from published_pipelines import predicted, without_stages
from published_plans import MICROBATCH
from published_rows import rows
from published_seconds import Step, Way, graph_of, scaled

RUNS = rows()
EXPRESSED = [run for run in RUNS if not run.why_not]


def test_every_row_is_expressed_or_has_a_reason():
    assert len(RUNS) == 253
    assert all(run.why_not or run.measured > 0 for run in RUNS)
    assert {run.values["pp"] for run in EXPRESSED} == {"1"}
    assert not any("fp8" in run.dtype for run in EXPRESSED)


@pytest.mark.parametrize("start", ["MosaicML", "nanotron", "Megatron-LM images/tables"])
def test_printed_rates_follow_from_the_formula_of_the_source(start):
    for run in EXPRESSED:
        if run.source.startswith(start):
            rate = run.flops_per_token * run.tokens / run.measured
            if run.TFLOPs_per_gpu:
                assert rate / 1e12 == pytest.approx(float(run.TFLOPs_per_gpu), rel=0.01)
            elif run.MFU_pct:
                assert 100 * rate / run.peak_flops == pytest.approx(float(run.MFU_pct), rel=0.01)


def test_batches_of_rows_agree():
    for run in EXPRESSED:
        if run.microbatch and run.global_batch:
            assert run.spec.microbatch * run.microbatches * run.ranks_of_batch == int(run.global_batch)


def test_planned_sizes_grow_with_the_microbatch_where_a_prime_divides_them():
    sizes = {
        n for run in EXPRESSED for a in [run.architecture] for n in (a.hidden, a.ffn, a.vocab, a.heads, int(run.seq))
    }
    assert all(size % MICROBATCH for size in sizes)


def _columns():
    """A matrix product, an all-reduce of its gradient, and an operator that reads the result."""
    return {
        "operator": ["placeholder", "aten.mm.default", "all_reduce", "aten._to_copy.default", "output"],
        "flops": [0, 22, 0, 0, 0], "moved": [0, 33, 0, 8, 0], "fixed": [0, 11, 0, 8, 0], "written": [0] * 5,
        "held": [11, 22, 22, 4, 0], "still": [0, 11, 11, 4, 0], "dtype": ["float32"] * 5,
        "reads": [[], [0], [1], [2], [3]], "axes": ["", "", "dp", "", ""], "payload": [0, 0, 7, 0, 0],
        "weights": ["", "", "g", "", ""], "flags": ["v", "", "", "", "v"],
    }  # fmt: skip


def test_work_of_the_batch_is_scaled_and_work_of_weights_is_not():
    found = scaled(_columns(), 2.0)
    assert found["flops"][1] == 44
    assert found["moved"][1] == 55
    assert found["moved"][3] == 8
    assert found["payload"][2] == 7


def test_readers_of_reduced_gradients_do_not_wait():
    graph = graph_of(_columns(), Way(compiled=False))
    assert [item.message is None for item in graph.items] == [True, False, True]
    assert not graph.items[2].all_input_nodes


def test_gradients_are_reduced_last_without_overlap():
    graph = graph_of(_columns(), Way(compiled=False, overlapped=False))
    assert graph.items[-1].message is not None


def test_no_collective_of_parameters_runs_before_the_last_microbatch():
    graph = graph_of(_columns(), Way(compiled=False, parameters=False))
    assert all(item.message is None for item in graph.items)


def test_kendalls_tau_counts_pairs_in_the_same_order():
    assert kendall([(1, 1), (2, 2), (3, 3)]) == 1
    assert kendall([(1, 3), (2, 2), (3, 1)]) == -1


def test_rows_with_stages_take_their_share_of_layers_and_the_bubble():
    """Of equal layers without a head on two stages: (m + 1) / 2 forwards and backwards of all, and what is sent."""
    (run,) = [each for each in RUNS if each.n_gpus == "16" and each.values["pp"] == "2" and each.hidden == "2048"]
    plain = without_stages(run)
    assert not plain.why_not
    assert run.why_not == "a pipeline (pp > 1)"

    def of_layers(layers):
        phase = {name: values * layers for name, values in _PRODUCT.items()}
        return {"phases": {"forward": phase, "backward": phase}, "parameters": 0, "held": {}}

    prices = by_package(plain.kind)
    found = predicted(run, Step(plain, *map(of_layers, plain.layers)), prices)
    layer, count = graph_of(_PRODUCT, Way(plain.compiled)).seconds(prices, plain.spec.mesh), plain.microbatches
    half = plain.spec.model.layers / 2 * 2 * layer
    assert (count + 1) * half < found.pipeline < 1.03 * (count + 1) * half
    assert half < found.bubble < 2 * half
    assert (found.gradients, found.optimizer) == (0, 0)


_PRODUCT = {  # a large matrix product
    "operator": ["aten.mm.default"], "flops": [10**12], "moved": [10**6], "fixed": [0], "written": [0], "held": [1],
    "still": [0], "dtype": ["bfloat16"], "reads": [[]], "axes": [""], "payload": [0], "weights": [""], "flags": [""],
}  # fmt: skip
