"""One fault of each class that `make test` has to detect, with a test that fails with the fault.

    make canaries                                                   runs all of them, in about 10 minutes
    python tests/conformance/canaries.py runtime/ranks/ledger.py    those in the named files

`make test` omits long tests (tests/helpers/tiers.py), so it could miss faults that all tests together detect. Each row
of CANARIES is a plausible fault: a text is replaced in a copy of Partway. The named test has to be part of `make test`,
pass in the unchanged copy, and fail with the fault. If the test becomes long, name another one, or keep it (`KEPT` in
tiers.py).

There is one row for each class of fault in the whole compiler. mutations.py has a row for each mechanism that prevents
silent wrong results, with tests of any length.
"""

from __future__ import annotations

import argparse
import sys

from mutations import Mutation, survivors

TIER = "not long and not slow and not gpu"  # the markers of the tests that `make test` runs

_ROWS: tuple[tuple[str, str, str, str, str], ...] = (
    (
        "the gradient of a conversion is converted in the wrong direction",
        "strategy/placement.py",
        "return dual(target), dual(source)", "return dual(source), dual(target)",
        "strategy/test_placement.py::test_each_conversion_and_its_transpose_keep_what_a_stack_means",
    ),
    (
        "the gradient of a replicated parameter is not summed over the ranks",
        "strategy/placement.py",
        "case Broadcast():\n            return PARTIAL", "case Broadcast():\n            return REPLICATE",
        "propagation/program/test_differentiate.py::test_each_copy_has_its_own_conversions",
    ),
    (
        "an operator's row declares it linear although it is not, so that it accepts addends",
        "propagation/rules/tensors/linear_algebra.py",
        'aten.mm.default: Row("m k, k n -> m n", reduce="k", linear=("0", "1"),',
        'aten.mm.default: Row("m k, k n -> m n", reduce="k", linear=("0 1",),',
        "propagation/rules/test_table.py::"
        "test_every_option_computes_the_value_and_the_gradients_of_strided_operands[mm.default-4x4-4x4]",
    ),
    (
        "a rule allows a split whose parts are not those of the result",
        "propagation/rules/tensors/shapes.py",
        "        even=begun,\n", "",
        "propagation/rules/test_uneven.py::test_a_factor_that_begins_a_dim_is_cut_evenly",
    ),
    (
        "a mean divides by the local count and not by the global one",
        "propagation/rules/tensors/reductions.py",
        "    aten.var_mean.dim: _expand_var_mean,\n}",
        "    aten.var_mean.dim: _expand_var_mean,\n}\nfor _mean in (aten.mean.default, aten.mean.dim):\n"
        "    del EXPANSIONS[_mean]\n    ROWS[_mean] = _reduction_rule",
        "propagation/rules/tensors/test_reductions.py::test_a_mean_is_a_sum_over_the_global_count",
    ),
    (
        "the padding of an uneven slice is counted",
        "propagation/rules/rule.py",
        '-math.inf if rule.reduce_by == "max" else 0.0', "None",
        "propagation/rules/test_uneven.py::test_all_operators_of_a_chain_on_short_slices_at_once",
    ),
    (
        "the halo of a convolution begins in the wrong place",
        "propagation/rules/windows.py",
        "return start * self.stride - self.before, (stop - 1)", "return start * self.stride, (stop - 1)",
        "propagation/rules/layers/test_convolution.py::test_a_split_image_gives_what_the_whole_one_does[convolution]",
    ),
    (
        "the statistics of a batch norm are not those of all elements of a channel",
        "propagation/rules/layers/batch_norm.py",
        "count, dtype = math.prod(shape(x)[d] for d in dims), wide", "count, dtype = shape(x)[0], wide",
        "propagation/rules/layers/test_batch_norm.py::test_batch_norm[True-options0-shape1]",
    ),
    (
        "random numbers depend on how a tensor is split",
        "propagation/ops/random_numbers.py",
        "Cut.of_text(cut).spans[position][0]", "0",
        "propagation/ops/test_random_numbers.py::test_every_part_of_any_cut_is_a_part_of_one_tensor",
    ),
    (
        "the price of a collective has the wrong number of bytes",
        "propagation/ops/collectives.py",
        "return 2 * _once(payload, n)", "return _once(payload, n)",
        "propagation/cost/test_cost.py::test_a_ring_of_4_ranks",
    ),
    (
        "computation has no price",
        "propagation/cost/cost.py",
        "computing / share + moved", "moved",
        "propagation/cost/test_cost.py::test_an_operator_takes_the_time_of_its_operations_and_of_its_bytes",
    ),
    (
        "the search finds a plan that is not the cheapest one",
        "propagation/minsum/eliminate.py",
        "int(np.argmin(total))", "int(np.argmax(total))",
        "propagation/minsum/test_eliminate.py::test_elimination_finds_the_optimum_and_proves_it",
    ),
    (
        "the search claims a proof that it does not have",
        "propagation/minsum/eliminate.py",
        "costs.of(tuple(choice)), bound,", "costs.of(tuple(choice)), costs.of(tuple(choice)),",
        "propagation/minsum/test_eliminate.py::test_shared_arrays_with_small_tables_keep_the_bound",
    ),
    (
        "the search exceeds the memory limit",
        "propagation/search/within_memory.py",
        "if limit is None or first.peak <= limit:\n        return _solution", "if True:\n        return _solution",
        "propagation/search/test_within_memory.py::test_every_search_keeps_to_the_limit[sharding_propagation]",
    ),
    (
        "the search ignores annotations",
        "propagation/problem/formulate.py",
        "if name not in self.allowed:\n            return layouts", "if True:\n            return layouts",
        "propagation/problem/test_formulate.py::"
        "test_an_elementwise_operator_takes_the_layout_that_is_annotated_behind_it[placement0]",
    ),
    (
        "an invalid argument is accepted, here a dataset_strategy",
        "strategy/validate.py",
        "if len(split) > 1:", "if False:",
        "strategy/test_validate.py::test_the_dataset_strategies_that_the_reference_excludes_are_rejected",
    ),
    (
        "a message lacks the suggestion of a similar name",
        "strategy/basics/suggest.py",
        "if matches else otherwise", "if False else otherwise",
        "strategy/basics/test_suggest.py::test_close_names_are_suggested",
    ),
    (
        "lowering omits a collective",
        "propagation/program/lower.py",
        "if counts and self.settings.mesh.size(*step.axes) > 1:",
        "if counts and kind(step.source, step.target) is not Kind.ALL_REDUCE:",
        "propagation/program/test_lower.py::test_the_program_of_a_megatron_mlp",
    ),
    (
        "the gradients of a value with two readers are not added",
        "propagation/program/differentiate.py",
        "add(gradients[node], gradient) if node in gradients else gradient", "gradient",
        "propagation/program/test_differentiate.py::test_a_step_computes_what_autograd_does[tied-]",
    ),
    (
        "a recomputed value differs from the first one, here in random numbers",
        "propagation/program/recompute.py",
        "if draws_random_numbers(node) or alone:", "if alone:",
        "propagation/program/test_recompute.py::"
        "test_checkpointed_blocks_give_the_numbers_of_one_device_and_are_not_kept[0.5-batch]",
    ),
    (
        "second derivatives have the placements of first ones",
        "strategy/placement.py",
        "return BROADCAST if placement == PARTIAL else dual(placement)", "return dual(placement)",
        "models/test_second_derivatives.py::test_uses_are_those_of_one_device[penalty-tensor]",
    ),
    (
        "collectives of several dtypes form one group",
        "fusion/members.py",
        "return self.axes, self.source, self.target, self.dtype",
        "return self.axes, self.source, self.target, torch.float32",
        "fusion/test_fuse.py::test_other_dtypes_axes_and_targets_do_not_share_a_collective",
    ),
    (
        "a group of collectives runs before one of its members is ready",
        "fusion/cycles.py",
        "if piece and _independent(piece, position, before):", "if piece:",
        "fusion/test_cycles.py::test_member_that_needs_another_of_its_group_starts_a_new_piece",
    ),
    (
        "simulated ranks reduce in the wrong way",
        "runtime/executors/meetings.py",
        "torch.maximum if self._c.source == PARTIAL_MAX else torch.add", "torch.maximum",
        "runtime/executors/test_simulate.py::test_a_conversion_keeps_the_value_of_the_whole",
    ),
    (
        "gloo's ranks reduce in the wrong way",
        "runtime/executors/issue.py",
        "dist.ReduceOp.MAX if c.source == PARTIAL_MAX else dist.ReduceOp.SUM", "dist.ReduceOp.SUM",
        "runtime/executors/test_execute.py::test_a_group_of_conversions_is_one_collective_with_the_results_of_each[2]",
    ),
    (
        "the result of a collective is read without waiting for it",
        "runtime/executors/issue.py",
        "work.wait()", "pass",
        "runtime/executors/test_execute.py::test_a_group_of_conversions_is_one_collective_with_the_results_of_each[2]",
    ),
    (
        "the writes of a call to buffers are lost",
        "partway/engine/runner.py",
        "writes.append((Tensor.copy_, buffer(), value))", "pass",
        "propagation/program/test_recompute.py::"
        "test_a_checkpoint_that_nothing_is_learned_of_updates_buffers_without_a_word",
    ),
    (
        "a cache of keys and values is overwritten although the caller still reads it",
        "runtime/code/written.py",
        "and memory.count(node) == 1 ", "",
        "runtime/code/test_written.py::test_numbers_are_those_of_one_device[returned-2-False]",
    ),
    (
        "an optimizer's states of a split parameter are not split",
        "runtime/tensors/optimizers.py",
        "_placed(state, new) if placed else state", "state",
        "runtime/tensors/test_optimizers.py::"
        "test_an_optimizer_with_states_made_before_shard_or_the_first_call_trains_like_that_of_one_device",
    ),
    (
        "ranks follow a plan without agreeing on it",
        "runtime/ranks/agreement.py",
        "if any(each", "if False and any(each",
        "runtime/ranks/test_agreement.py::test_tensors_that_differ_are_named_on_every_rank",
    ),
    (
        "the runs of ranks are not compared afterwards",
        "runtime/ranks/ledger.py",
        "if theirs != ours:", "if False:",
        "runtime/ranks/test_ledger.py::test_each_kind_of_line_is_compared[runs]",
    ),
    (
        "a plan is used although a value that the function reads has changed",
        "partway/reuse/guard.py",
        "            and self._state.holds()\n", "",
        "api/reuse/test_guard.py::test_a_module_that_was_replaced_is_used",
    ),
    (
        "a plan is used for a call of another kind, here of another dtype",
        "partway/reuse/guard.py",
        "        and tensor.dtype is dtype\n", "",
        "api/reuse/test_guard.py::test_another_dtype_of_an_input_is_planned_for",
    ),
    (
        "a plan for other sizes or numbers is used although its guards do not hold",
        "propagation/capture/symbols.py",
        "        if not least <= size <= most:", "        if False:",
        "propagation/capture/test_symbols.py::test_a_size_that_takes_another_branch_is_refused",
    ),
    (
        "a plan for other options is read from disk",
        "partway/reuse/cache.py",
        "*text_of_graph(graph), *map(repr, content))", "*text_of_graph(graph))",
        "models/test_cache.py::test_other_content_is_planned_anew[mesh]",
    ),
    (
        "a saved plan is not followed",
        "propagation/plan/replay.py",
        "choice.append(int(rows[0]) if len(rows) else 0)", "choice.append(0)",
        "models/test_given_plans.py::test_the_same_program_and_the_same_numbers_without_a_search[mlp]",
    ),
    (
        "a damaged checkpoint is loaded",
        "kits/checkpoints/loading.py",
        "if zlib.crc32((path / name).read_bytes()) != checksum:", "if False:",
        "kits/checkpoints/test_loading.py::test_a_damaged_file_is_named",
    ),
    (
        "hooks are not called",
        "propagation/capture/hooks.py",
        "answer = call(*seen)", "answer = None",
        "models/test_hooks.py::test_a_hook_sees_what_it_would_on_one_device",
    ),
)  # fmt: skip
CANARIES = tuple(Mutation(words, file, text, by, f"tests/{test}") for words, file, text, by, test in _ROWS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="paths in the checkout, such as runtime/ranks/ledger.py; none: all")
    files = parser.parse_args().files
    rows = [row for row in CANARIES if not files or row.file in files]
    missed = survivors(rows, TIER)
    sys.stdout.write(f"{len(rows) - missed} of {len(rows)} were caught\n")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
