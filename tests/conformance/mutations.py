"""For each mechanism that prevents a silent wrong number or an endless wait, the test that fails without it.

    python tests/conformance/mutations.py                       runs all of them, in an hour
    python tests/conformance/mutations.py runtime/ranks/ledger.py     those in the named files
    python tests/conformance/mutations.py --write               writes docs/coverage/mutations.md, and runs none

Each row of MUTATIONS removes one mechanism: a text is replaced in a copy of Partway. The named test has to pass in the
unchanged copy, and to fail in the changed one.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "helpers"))

from sources import STAGES, sources

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "coverage" / "mutations.md"
SECONDS = 200  # of a test: what waits without end has failed by then
PASSED, FAILED = 0, 1  # what pytest ends with; other numbers say that the test did not run


@dataclass(frozen=True)
class Mutation:
    """A mechanism, and the test that fails without it.

    words   what the mechanism does
    file    its file, by the path in the checkout
    text    the text to replace, which occurs once in the file
    by      the replacement
    test    the test's node id
    """

    words: str
    file: str
    text: str
    by: str
    test: str


def of_file(file: str, *rows: tuple[str, str, str, str]) -> tuple[Mutation, ...]:
    return tuple(Mutation(words, file, text, by, f"tests/{test}") for words, text, by, test in rows)


_SPLIT = "runtime/ranks/test_replicas.py::test_what_is_split_is_written_to_with_the_same_numbers"
_TOLD = "runtime/ranks/test_replicas.py::test_what_one_rank_alone_does_is_told_while_they_train"
MUTATIONS: dict[str, tuple[Mutation, ...]] = {
    "Ranks agree before they follow a plan": (
        *of_file(
            "runtime/ranks/agreement.py",
            (
                "facts of ranks are compared",
                "if any(each", "if False and any(each",
                "runtime/ranks/test_agreement.py::test_tensors_that_differ_are_named_on_every_rank",
            ),
            (
                "the values of a tensor are a part of its fact",
                "str(checksum(tensor))", '""',
                "runtime/ranks/test_agreement.py::test_tensors_that_differ_are_named_on_every_rank",
            ),
            (
                "the checksum of a fact is compared besides its text",
                r"{self.text}\n{self.checksum}", "{self.text}",
                "runtime/ranks/test_agreement.py::test_tensors_that_differ_are_named_on_every_rank",
            ),
            (
                "ranks that meet at different points of the program get an error",
                "if len(set(purposes.values())) > 1:", "if False:",
                "runtime/ranks/test_agreement.py::test_values_of_all_ranks_are_gathered_where_they_are_at_one_point_of_the_program",
            ),
            (
                "a rank that fails before a meeting still takes part in it",
                '_agree(purpose, [], f"{type(error).__name__}: {error}", detail, among)', "pass",
                "runtime/ranks/test_agreement.py::test_a_block_that_fails_on_one_rank_is_an_error_on_all",
            ),
            (
                "a failure on one rank is an error on the others",
                "if not error and refused and len(refused) < len(each_rank):", "if False:",
                "runtime/ranks/test_agreement.py::test_a_block_that_fails_on_one_rank_is_an_error_on_all",
            ),
        ),
        *of_file(
            "runtime/ranks/flights.py",
            (
                "a rank that has ended before a GPU's collective is reported",
                "if any(doing.mark == ENDED", "if False and any(doing.mark == ENDED",
                "runtime/ranks/test_flights.py::test_a_rank_that_has_not_come_and_has_ended_will_not",
            ),
            (
                "a rank that waits for all others elsewhere is reported where a GPU waits for it",
                "marks == {MEETS}", "False",
                "runtime/ranks/test_flights.py::test_a_rank_that_waits_for_all_elsewhere_will_not_come",
            ),
            (
                "a rank that has started a collective is waited for, even if it has ended",
                "if doing.given.get(flight.group, 0) < flight.number", "",
                "runtime/ranks/test_flights.py::test_a_rank_that_has_come_or_may_come_is_waited_for",
            ),
            (
                "a collective that makes progress is not a wait",
                "if first != self._first:", "if False:",
                "runtime/ranks/test_flights.py::test_what_goes_on_is_looked_at_anew",
            ),
            (
                "the watching thread keeps running",
                "while not self._over.wait(_LOOK):", "for _ in range(2):",
                "runtime/ranks/test_flights.py::test_the_thread_looks_until_it_is_stopped",
            ),
        ),
        *of_file(
            "runtime/launching/gpus.py",
            (
                "two ranks do not share a GPU without permission",
                "elif number > 1:", "elif False:",
                "runtime/launching/test_gpus.py::test_a_rank_without_a_gpu_is_told_of_who_has_it_and_what_to_do",
            ),
        ),
        *of_file(
            "runtime/executors/issue.py",
            (
                "a collective is waited for before its result is read",
                "work.wait()", "pass",
                "runtime/test_races.py::test_a_step_whose_collectives_are_late_has_the_same_numbers",
            ),
        ),
        *of_file(
            "partway/engine/placing.py",
            (
                "parameters are compared when a module is sharded",
                'facts += facts_of(named, "seed every rank alike, or set parameter_broadcast=True")', "pass",
                "models/test_gloo_features.py::test_ranks_that_differ_are_refused_on_every_rank",
            ),
            (
                "random generators are compared when a module is sharded",
                "facts += facts_of(generators(), SEED, follows=2)", "pass",
                "models/test_gloo_features.py::test_ranks_that_differ_are_refused_on_every_rank",
            ),
            (
                "the whole inputs of a first call are compared",
                "facts += facts_of(whole, _whole_fix(context))", "pass",
                "models/test_gloo_features.py::test_ranks_that_give_different_whole_batches_are_refused",
            ),
            (
                "parameters added to a sharded module are compared",
                "agree(purpose, facts, self._among)", "pass",
                "models/test_gloo_features.py::test_parameters_that_are_added_and_differ_are_refused",
            ),
            (
                "ranks that share a part of an input have to pass equal values in a first call",
                "if content != parts.contents[first]:", "if False:",
                "models/test_own_parts.py::test_ranks_that_share_a_part_and_are_given_others_are_told",
            ),
            (
                "the parts of a batch have to form a whole",
                "if rest or (count == 1 and len(set(sizes)) > 1):", "if False:",
                "api/engine/test_placing.py::test_parts_that_make_no_whole_are_refused_with_their_sizes",
            ),
            (
                "captures and plans are compared",
                "facts += of_plan(compiled)", "pass",
                "models/test_gloo_features.py::test_ranks_whose_forwards_differ_are_refused",
            ),
            (
                "random generators are compared before the first call that draws",
                "if draws(compiled):", "if False:",
                "models/test_gloo_features.py::test_ranks_that_are_seeded_otherwise_before_a_call_that_draws_are_refused",
            ),
        ),
        *of_file(
            "partway/engine/engine.py",
            (
                "if one rank's part has another shape, all ranks look for another plan",
                "if last is not None and last.runner.own and placing(", "if False and placing(",
                "models/test_own_parts.py::test_processes_train_on_their_parts_as_one_device_on_the_batch",
            ),
        ),
    ),
    "No rank waits forever": of_file(
        "runtime/ranks/watch.py",
        (
            "the frames of a rank that captures are not inspected",
            "if self._planning and self._at is None and self._waits is None:", "if False:",
            "runtime/ranks/test_watch.py::test_a_rank_that_captures_says_so_and_is_not_disturbed",
        ),
        (
            "the next call raises a difference",
            "raise found", "pass",
            "conformance/test_ranks.py::test_a_rank_that_differs_is_found[later_values]",
        ),
        (
            "the rank that finds a difference tells the others",
            'self._ring(rank, f"{_TOLD}{text}")', "pass",
            "runtime/launching/test_process.py::test_a_difference_that_is_found_at_exit_is_in_the_status",
        ),
        (
            "a rank keeps a difference that another one reports",
            "self._broken = request.removeprefix(_TOLD)", "pass",
            "runtime/launching/test_process.py::test_a_difference_that_is_found_at_exit_is_in_the_status",
        ),
        (
            "remaining lines are compared at the end",
            "ledger.end(failed)", "pass",
            "runtime/launching/test_process.py::test_a_difference_that_is_found_at_exit_is_in_the_status",
        ),
        (
            "a process that ends with a difference has an exit status for it",
            'raise OSError("the ranks differ")', "pass",
            "runtime/launching/test_process.py::test_a_difference_that_is_found_at_exit_is_in_the_status",
        ),
        (
            "a rank whose process is gone is not waited for",
            "not is_alive(int(process))", "False",
            "kits/checkpoints/test_killed_ranks.py::test_a_rank_0_that_ends_before_it_says_how_a_meeting_went_is_named",
        ),
        (
            "a meeting ends if rank 0, which reports its result, has ended",
            "(left > 0 and not self._has_ended(first))", "left > 0",
            "kits/checkpoints/test_killed_ranks.py::test_a_rank_0_that_ends_before_it_says_how_a_meeting_went_is_named",
        ),
        (
            "a wait for a rank that has ended is an error",
            "if any(doing.mark == ENDED for doing in last.values()):", "if False:",
            "kits/checkpoints/test_killed_ranks.py::test_a_rank_0_that_ends_before_it_says_how_a_meeting_went_is_named",
        ),
        (
            "a wait inside PyTorch ends if a rank has ended",
            "[rank for rank in self._others() if self._has_ended(rank)]", "[]",
            "kits/checkpoints/test_killed_ranks.py::test_a_rank_that_ends_while_the_ranks_connect_is_named_before_the_timeout",
        ),
        (
            "ranks that wait for each other in two collectives get an error",
            "if len(looks) == _SURE and waiting", "if False and waiting",
            "api/ops/test_groups.py::test_ranks_that_call_in_other_groups_do_not_wait_in_vain[elsewhere-told1]",
        ),
        (
            "a waiting rank reports its state",
            'self._own.set(f"{request}/{self.rank}", json.dumps(asdict(self.doing())))', "pass",
            "api/ops/test_groups.py::test_ranks_that_call_in_other_groups_do_not_wait_in_vain[elsewhere-told1]",
        ),
        (
            "a meeting ends after the timeout if a rank is busy elsewhere",
            "if left <= 0:", "if False:",
            "runtime/ranks/test_watch.py::test_a_rank_that_is_busy_elsewhere_is_waited_for_until_the_timeout",
        ),
        (
            "rank 0, which may host the store, stays until all know that a meeting has failed",
            'if self._store.check([f"parted/{key}/{rank}" for rank in ranks]):', "if True:",
            "runtime/ranks/test_watch.py::test_rank_0_stays_until_the_others_know_that_a_meeting_has_failed",
        ),
    )
    + of_file(
        "runtime/ranks/world.py",
        (
            "a second process group has its own watch",
            "if group is not dist.group.WORLD:", "if group is make:",
            "runtime/ranks/test_watch.py::test_a_second_process_group_has_a_watch_of_its_own",
        ),
    )
    + of_file(
        "runtime/ranks/answering.py",
        (
            "a store that does not answer is not waited for",
            "timeout=0 if self._silent else self._seconds + more", "",
            "runtime/ranks/test_answering.py::test_an_answer_that_does_not_come_is_an_error",
        ),
    ),
    "The runs of ranks are compared afterwards": (
        *of_file(
            "runtime/ranks/ledger.py",
            (
                "the thread continues after a turn in which nothing ran",
                "self._ends.wait(_PERIOD) or self._over", "self._ends.wait(_PERIOD) or self._turn()",
                "runtime/ranks/test_ledger.py::test_ranks_are_compared_after_turns_in_which_nothing_ran",
            ),
            (
                "writes to a rank's part are counted",
                "return version_of(tensor) + part", "return version_of(tensor)",
                "runtime/ranks/test_replicas.py::test_what_one_rank_does_to_its_own_parts_is_told[writes to its part]",
            ),
            (
                "the thread checks whether this rank waits for others",
                "self._besides()", "pass",
                "runtime/ranks/test_stragglers.py::test_a_slow_rank_is_named_while_they_train",
            ),
            (
                "the thread is started",
                "self._thread.start()", "pass",
                "runtime/ranks/test_ledger.py::test_ranks_are_compared_after_turns_in_which_nothing_ran",
            ),
            (
                "lines are compared",
                "if theirs != ours:", "if False:",
                "runtime/ranks/test_ledger.py::test_each_kind_of_line_is_compared[runs]",
            ),
            (
                "the program that runs has a line",
                'self._lines.append(("runs", identity, where))', "pass",
                "runtime/ranks/test_ledger.py::test_each_kind_of_line_is_compared[runs]",
            ),
            (
                "the state of the generator has a line if a program draws",
                'self._lines.append(("random", torch.get_rng_state(), where))', "pass",
                "runtime/ranks/test_ledger.py::test_each_kind_of_line_is_compared[random]",
            ),
            (
                "a call's inputs have a line",
                'self._lines.append(("inputs", ', 'len(("inputs", ',
                "runtime/ranks/test_ledger.py::test_each_kind_of_line_is_compared[inputs]",
            ),
            (
                "each input of a call counts, not only the last",
                "cpu().numpy().data, start)", "cpu().numpy().data)",
                "runtime/ranks/test_ledger.py::test_each_kind_of_line_is_compared[first input]",
            ),
            (
                "the gradient of a whole result has a line",
                'self._lines.append(("gradients", ', 'len(("gradients", ',
                "runtime/ranks/test_ledger.py::test_each_kind_of_line_is_compared[gradients]",
            ),
            (
                "a part of the batch that ranks share has a line",
                'self._lines.append(("parts", ', 'len(("parts", ',
                "runtime/ranks/test_ledger.py::test_each_kind_of_line_is_compared[parts]",
            ),
            (
                "writes to parameters between two calls have a line",
                'self._lines.append(("steps", written, where))', "pass",
                "runtime/ranks/test_ledger.py::test_each_kind_of_line_is_compared[steps]",
            ),
            (
                "elements of replicas have a line",
                'self._lines.append(("copies", what, where))', "pass",
                "runtime/ranks/test_ledger.py::test_each_kind_of_line_is_compared[copies]",
            ),
            (
                "the write of an operator to a split tensor has a line",
                'self._lines.append(("writes", what, what))', "pass",
                "runtime/ranks/test_ledger.py::test_each_kind_of_line_is_compared[writes]",
            ),
            (
                "an optimizer's settings have a line",
                'self._lines.append(("settings", setting, where))', "pass",
                "runtime/ranks/test_ledger.py::test_each_kind_of_line_is_compared[settings]",
            ),
            (
                "a collective of `pw.ops` has a line",
                'self._lines.append(("calls", zlib.crc32(what.encode()), what))', "pass",
                "runtime/ranks/test_ledger.py::test_each_kind_of_line_is_compared[calls]",
            ),
            (
                "the first rank reports its last line",
                "[_END] * (last and not ended)", "[]",
                "runtime/ranks/test_ledger.py::test_what_one_rank_alone_did_last_is_told_at_the_end[1]",
            ),
            (
                "a line after the end of the first rank is reported in the next turn",
                "if self._ended and self._differs([_END]):", "if False:",
                "runtime/ranks/test_ledger.py::test_what_comes_after_the_first_rank_has_ended_is_told_at_the_next_turn[1]",
            ),
            (
                "pages that all ranks have read are removed",
                'self._store.delete_key(f"{self._name}/{self._page}")', "pass",
                "runtime/ranks/test_ledger.py::test_lines_and_pages_do_not_pile_up",
            ),
            (
                "the same elements are compared for any strides",
                "return tensor[_places(tensor.shape, step)]", "return None",
                "runtime/ranks/test_ledger.py::test_the_same_elements_are_looked_at_whatever_the_strides_are",
            ),
            (
                "other elements are compared in each turn",
                "[turn % step :: step]", "[::step]",
                "runtime/ranks/test_ledger.py::test_every_element_has_its_turn",
            ),
            (
                "writes are counted",
                "m - n if t is u", "0 if t is u",
                "runtime/ranks/test_ledger.py::test_a_step_of_an_optimizer_between_two_calls_is_seen",
            ),
            (
                "a replaced parameter counts as written",
                "if t is u else -1", "",
                "runtime/ranks/test_ledger.py::test_a_step_of_an_optimizer_between_two_calls_is_seen",
            ),
        ),
        *of_file(
            "partway/engine/placing.py",
            (
                "each call records its inputs",
                "own_ledger.given([tensors[i] for i in wholes], where)", "pass",
                "conformance/test_ranks.py::test_a_rank_that_differs_is_found[later_values]",
            ),
            (
                "each call records the writes before it",
                "own_ledger.stepped(written(held), where)", "pass",
                f"{_TOLD}[a buffer-2]",
            ),
            (
                "each call records its parts",
                "ledger.shared(tensors[i], at)", "pass",
                "models/test_own_parts.py::test_a_rank_that_is_given_another_part_later_is_told",
            ),
            (
                "each call records elements of parameters and buffers",
                'note(copies, f"call {call} of {name}", call, whole, among)', "pass",
                f"{_TOLD}[a part that is written to-2]",
            ),
            (
                "the gradient of a whole result is recorded",
                "if result.requires_grad:", "if False:",
                "models/test_own_parts.py::test_a_loss_of_labels_that_broadcast_against_the_batch_is_told",
            ),
        ),
        *of_file(
            "runtime/tensors/optimizers.py",
            (
                "a step records which gradients are new, kept or None",
                "ledger.kept(tuple(", "(lambda *_: None)(tuple(",
                "runtime/ranks/test_replicas.py::test_what_one_rank_does_to_its_own_parts_is_told[keeps gradients]",
            ),
            (
                "loading an optimizer's states is recorded",
                "optimizer.register_load_state_dict_post_hook(_after_load)", "pass",
                "runtime/ranks/test_replicas.py::test_what_one_rank_does_to_its_own_parts_is_told[loads states]",
            ),
            (
                "an optimizer's class is recorded",
                'ledger.settings(type(optimizer).__qualname__, f"{where}: its class")', "pass",
                f"{_TOLD}[the class-2]",
            ),
            (
                "an optimizer's settings are recorded",
                'ledger.settings(values, f"{where}: {setting}")', "pass",
                f"{_TOLD}[the learning rate-2]",
            ),
            (
                "gradients are recorded",
                '"the gradient": parameter.grad, ', "",
                "runtime/ranks/test_replicas.py::test_a_gradient_is_named_at_its_step_where_all_are_looked_at",
            ),
            (
                "an optimizer's states are recorded",
                ", **optimizer.state.get(parameter, {})", "",
                f"{_TOLD}[a state-2]",
            ),
            (
                "an optimizer gets the replacements of its parameters",
                "if known.state != now:", "if False:",
                "runtime/tensors/test_optimizers.py::test_an_optimizer_of_a_parameter_that_was_replaced_gets_the_new_one_with_the_"
                "states_of_the_old_one",
            ),
        ),
        *of_file(
            "runtime/tensors/split_operators.py",
            (
                "operators that write to a split tensor are recorded",
                "tell_of_write(_name(op), ", "(lambda *_: None)(_name(op), ",
                "runtime/ranks/test_replicas.py::test_what_one_rank_does_to_its_own_parts_is_told[copies a tensor]",
            ),
            (
                "the numbers that they write are recorded",
                "if number is not None", "if False",
                "runtime/ranks/test_replicas.py::test_what_is_split_is_written_to_with_the_same_numbers[others]",
            ),
            (
                "writes of a backward are not recorded",
                " or (in_backward() and not always)", "",
                "runtime/ranks/test_replicas.py::test_whether_a_backward_copies_a_gradient_is_no_difference",
            ),
            (
                "a backward copies a split gradient as parts",
                'if _name(op) == "new_empty_strided"', "if False",
                "runtime/ranks/test_replicas.py::test_whether_a_backward_copies_a_gradient_is_no_difference",
            ),
            (
                "a gradient that is not finite on one rank is not finite on all",
                'found.copy_(exchange(mesh, found.reshape(1), "gradients that are not finite").amax()'
                ".reshape(found.shape))", "pass",
                "runtime/tensors/test_split_tensor.py::test_a_gradient_that_overflows_on_one_rank_skips_the_step_on_all",
            ),
        ),
        *of_file(
            "runtime/tensors/split_tensor.py",
            (
                "assigned gradients are recorded",
                'tell_of_write("the setting of .grad", [tensor], (), {}, always=True)', "pass",
                "runtime/ranks/test_replicas.py::test_what_one_rank_does_to_its_own_parts_is_told[sets a gradient]",
            ),
            (
                "operators on parts that bypass PyTorch's dispatcher are recorded",
                "tell_of_write(func.__name__, [like], args, kwargs)", "pass",
                "runtime/ranks/test_replicas.py::test_what_is_split_is_written_to_with_the_same_numbers[others]",
            ),
            (
                "operators on lists are recorded",
                "tell_of_write(func.__name__, [first], args, kwargs)", "pass",
                f"{_SPLIT}[others of a list]",
            ),
        ),
        *of_file(
            "runtime/ranks/replicas.py",
            (
                "each replica has its turn",
                "items[(time * count + k) % len(items)]", "items[k]",
                "runtime/ranks/test_replicas.py::test_each_has_its_turn",
            ),
            (
                "all replicas are compared every N turns",
                "if every > 0 and time % every == 0:", "if False:",
                "runtime/ranks/test_replicas.py::test_each_has_its_turn",
            ),
            (
                "all elements are summed when all replicas are compared",
                "checksum(part) if whole else sample(part, time)", "sample(part, time)",
                "runtime/ranks/test_replicas.py::test_an_element_that_is_in_no_sample_is_told_where_all_are_looked_at",
            ),
            (
                "an optimizer's settings are read from all of its groups",
                "_plain(group.get(key)) for group in groups", "_plain(group.get(key)) for group in []",
                "runtime/ranks/test_replicas.py::test_settings_are_what_groups_say_beside_their_parameters",
            ),
        ),
    ),
    "Checkpoints are complete and consistent": (
        *of_file(
            "kits/checkpoints/saving.py",
            (
                "replicas that differ are not saved",
                "if found := differing(", "if found := [] and differing(",
                "runtime/ranks/test_replicas.py::test_what_ranks_do_not_hold_alike_is_not_saved",
            ),
            (
                "optimizers whose settings differ are not saved",
                'if name.startswith(f"{OPTIMIZER}.")', "if False",
                "runtime/ranks/test_replicas.py::test_what_ranks_do_not_hold_alike_is_not_saved",
            ),
            (
                "ranks save into the same folder",
                'agree(f"save a checkpoint in {folder}", facts)', "pass",
                "kits/checkpoints/test_checkpoints.py::test_what_goes_wrong_on_one_rank_is_told_to_all_and_changes_nothing",
            ),
        ),
        *of_file(
            "runtime/ranks/replicas.py",
            (
                "checksums of the values to save are computed",
                "groups.setdefault(ranks, {})[name] = checksum(part)", "groups.setdefault(ranks, {})[name] = 0",
                "runtime/ranks/test_replicas.py::test_what_ranks_do_not_hold_alike_is_not_saved",
            ),
            (
                "the checksums of ranks are compared",
                "if by_rank[other][group] != value:", "if False:",
                "runtime/ranks/test_replicas.py::test_what_ranks_do_not_hold_alike_is_not_saved",
            ),
        ),
        *of_file(
            "kits/checkpoints/ranks.py",
            (
                "a failure of one rank while it saves or loads is an error on all",
                'if text), None)', "if False), None)",
                "kits/checkpoints/test_checkpoints.py::test_what_goes_wrong_on_one_rank_is_told_to_all_and_changes_nothing",
            ),
        ),
        *of_file(
            "kits/checkpoints/folder.py",
            (
                "one job at a time saves into a folder",
                "if not ours:", "if False:",
                "kits/checkpoints/test_saving.py::test_two_jobs_that_save_into_one_folder_at_once_are_told",
            ),
        ),
        *of_file(
            "kits/checkpoints/loading.py",
            (
                "the sizes of files are checked",
                "if file.stat().st_size != size:", "if False:",
                "kits/checkpoints/test_loading.py::test_a_damaged_file_is_named",
            ),
            (
                "the content of files is checked",
                "if zlib.crc32((path / name).read_bytes()) != checksum:", "if False:",
                "kits/checkpoints/test_loading.py::test_a_damaged_file_is_named",
            ),
            (
                "the values of tensors are checked",
                "if checksum_of(checkpoint.path, place, slices, report) != checksum:", "if False:",
                "kits/checkpoints/test_loading.py::test_a_damaged_file_is_named",
            ),
            (
                "an optimizer has to have the saved groups",
                "if [*map(set, groups)] != [*map(set, known)]:", "if False:",
                "kits/checkpoints/test_loading.py::test_an_optimizer_that_was_made_otherwise_is_refused",
            ),
            (
                "each rank gets its own values back",
                "blobs |= {name: own[name] for name in differ}", "pass",
                "kits/checkpoints/test_checkpoints.py::test_what_goes_wrong_on_one_rank_is_told_to_all_and_changes_nothing",
            ),
        ),
        *of_file(
            "kits/checkpoints/manifest.py",
            (
                "a manifest is checked",
                "if manifest.checksum != _checksum_of(tree):", "if False:",
                "kits/checkpoints/test_loading.py::test_any_other_byte_is_found_by_the_file_that_it_is_in[partway.json]",
            ),
            (
                "all parts of a tensor have to be in the files",
                "            if count:\n", "            if False:\n",
                "kits/checkpoints/test_loading.py::test_forged_parts_are_named",
            ),
        ),
    ),
    "A program runs only the calls that it was made for": (
        *of_file(
            "partway/reuse/guard.py",
            (
                "a call has to have the plan's options",
                "(context is self.context or context == self.context)", "True",
                "api/reuse/test_guard.py::test_what_a_plan_depends_on_is_planned_for[the context]",
            ),
            (
                "a call has to have the plan's options of the algorithm",
                "(current_algo() is self._algo or current_algo() == self._algo)", "True",
                "api/reuse/test_guard.py::test_what_a_plan_depends_on_is_planned_for[the algorithm's parameters]",
            ),
            (
                "a call has to have the plan's settings of PyTorch",
                "and modes() == self._modes", "",
                "api/reuse/test_guard.py::test_autocast_is_a_plan_of_its_own",
            ),
            (
                "a call with gradients needs a plan with gradients",
                "and _inference(self._by_mode) == self._inference", "",
                "api/reuse/test_guard.py::test_a_call_that_takes_gradients_is_not_one_that_takes_none",
            ),
            (
                "a call has to have the plan's rules of users' operators",
                "and version() == self._rules", "",
                "api/requests/test_user_rules.py::test_a_rule_that_comes_after_the_first_call_is_used_by_the_next",
            ),
            (
                "the tensors of a call have to match those of the plan",
                "and all(map(_is_like, tensors, self._tensors))", "",
                "api/reuse/test_guard.py::test_what_a_plan_depends_on_is_planned_for[shape]",
            ),
            (
                "the tensors of a call have to have the plan's dtypes",
                "and tensor.dtype is dtype", "",
                "api/reuse/test_guard.py::test_another_dtype_of_an_input_is_planned_for",
            ),
            (
                "the same inputs have to need gradients",
                "and tensor.requires_grad is needs", "",
                "api/reuse/test_guard.py::test_what_a_plan_depends_on_is_planned_for[requires_grad of an input]",
            ),
            (
                "the attributes of a call's tensors are compared",
                "(attributes == _NOTHING if not vars(tensor) else fact(attributes_of(tensor)) == attributes)", "True",
                "models/test_state.py::test_attributes_of_tensors_are_those_of_the_call",
            ),
            (
                "strides that the code queried are compared",
                "(self._asks is None or self._asks.answers(tensors) == self._answers)", "True",
                "models/test_state.py::test_a_function_that_asks_how_a_tensor_lies_in_memory_is_planned_for_each[_branch]",
            ),
            (
                "arguments other than tensors are compared",
                "if not structure.is_like(self._structure):", "if False:",
                "api/reuse/test_guard.py::test_what_a_plan_depends_on_is_planned_for[a plain value]",
            ),
            (
                "the training mode of each module is compared",
                "and [*map(_TRAINING, self._modules)] == self._training", "",
                "api/reuse/test_guard.py::test_what_a_plan_depends_on_is_planned_for[training of a module inside]",
            ),
            (
                "the number of parameters of a module is compared",
                "and [*map(len, self._stores)] == self._sizes", "",
                "api/reuse/test_guard.py::test_a_parameter_that_was_added_is_used",
            ),
            (
                "the identities of parameters are compared",
                "and all(map(is_, chain.from_iterable(self._held), self._parameters_in_order))", "",
                "api/reuse/test_guard.py::test_a_parameter_that_was_replaced_is_used",
            ),
            (
                "the same parameters have to need gradients",
                "and [*map(_FACTS, self._parameters)] == self._facts", "",
                "api/reuse/test_guard.py::test_what_a_plan_depends_on_is_planned_for[requires_grad of a parameter]",
            ),
            (
                "the placements of input DTensors are compared",
                "and (spec is None or spec_of(tensor) == spec)", "",
                "models/test_gloo_dtensors.py::test_inputs_keep_their_placements",
            ),
            (
                "values that the code reads are compared",
                "and self._state.holds()", "",
                "models/test_state.py::test_globals_and_closures_may_change",
            ),
            (
                "the dtype of autocast is compared",
                'torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None', "None",
                "api/reuse/test_guard.py::test_each_dtype_of_autocast_is_a_plan_of_its_own",
            ),
            (
                "function modes are compared",
                "*[(type(mode), fact(vars(mode))) for mode in function_modes()],", "",
                "api/reuse/test_guard.py::test_what_a_function_mode_changes_is_planned_for",
            ),
        ),
        *of_file(
            "partway/reuse/state.py",
            (
                "attributes that the code reads are compared",
                "all(map(is_, map(getitem, self._stores, self._keys), self._values))", "True",
                "models/test_state.py::test_a_change_of_what_is_read_is_seen[attribute]",
            ),
            (
                "elements of lists that it reads are compared",
                "and all(map(is_, chain.from_iterable(self._views), self._elements))", "",
                "models/test_state.py::test_a_change_of_what_is_read_is_seen[element of a list]",
            ),
            (
                "environment variables that it reads are compared",
                "and (self._environment is None or self._environment == _environment())", "",
                "models/test_state.py::test_variables_of_the_environment_may_change",
            ),
            (
                "tensors whose values it read as numbers are compared",
                "and (not self.read or [*map(_version, self.read)] == self._versions)", "",
                "models/test_contents.py::test_what_courses_took_of_tensors_is_compared_for_each",
            ),
            (
                "the functions that it calls are compared",
                "and all(map(is_, chain.from_iterable(map(_CODE, self._functions)), self._codes))", "",
                "models/test_state.py::test_a_function_whose_code_is_replaced_is_captured_anew",
            ),
        ),
    ),
    "Calls share a decomposition only if they decompose equally": (
        *of_file(
            "propagation/capture/rewrites/one_by_one.py",
            (
                "calls with numbers of other types differ",
                "(node.target, text, tuple(", '(node.target, text.replace(".0", ""), tuple(',
                "propagation/capture/rewrites/test_one_by_one.py"
                "::test_calls_of_one_operator_are_of_one_kind_only_where_they_are_written_alike[numbers]",
            ),
            (
                "calls with other strides differ",
                "val.stride(), val.storage_offset(), val.requires_grad", "val.requires_grad",
                "propagation/capture/rewrites/test_one_by_one.py"
                "::test_calls_of_one_operator_are_of_one_kind_only_where_they_are_written_alike[layouts]",
            ),
        ),
        *of_file(
            "propagation/torch_internals.py",
            (
                "a call that writes without a mark in its schema is found",
                "if any(map(has_data_mutation, tensors)):", "if False:",
                "propagation/capture/rewrites/test_one_by_one.py::test_what_is_not_certain_is_written_out_whole[write_unsaid]",
            ),
        ),
    ),
    "Files on disk are used only for what they were made for": (
        *of_file(
            "partway/reuse/cache.py",
            (
                "the checksum of an entry is checked",
                r'if head + b"\n" != self._head(name, data):', "if False:",
                "models/test_cache.py::test_a_damaged_file_is_made_anew_with_a_warning",
            ),
            (
                "the bytes of an entry are checked",
                " {hashlib.sha256(data).hexdigest()}", "",
                "api/reuse/test_cache.py::test_an_entry_with_another_byte_is_made_anew",
            ),
            (
                "the name of an entry has to match its content",
                "{_FORMAT} {self._digest} {name}", "{_FORMAT} {name}",
                "api/reuse/test_cache.py::test_an_entry_under_the_name_of_another_is_made_anew[moved]",
            ),
            (
                "an entry has to belong to this user",
                "if hasattr(os, \"geteuid\") and (status", "if False and (status",
                "api/reuse/test_cache.py::test_an_entry_that_others_may_write_is_made_anew",
            ),
            (
                "an entry has to have the requested kind",
                "if not isinstance(value, kinds):", "if False:",
                "api/reuse/test_cache.py::test_an_entry_with_a_right_digest_and_another_type_is_made_anew",
            ),
            (
                "the folder has to belong to this user",
                "if status.st_uid != os.geteuid():", "if False:",
                "api/reuse/test_cache.py::test_a_folder_of_another_user_is_not_used",
            ),
            (
                "the folder must not be writable by others",
                "if status.st_mode & 0o077:", "if False:",
                "api/reuse/test_cache.py::test_a_folder_that_others_may_use_is_not_used",
            ),
            (
                "the folder must not be replaceable by others",
                "if mode & 0o022 and not mode & stat.S_ISVTX:", "if False:",
                "api/reuse/test_cache.py::test_a_folder_below_one_that_others_may_write_to_is_not_used",
            ),
            (
                "a version includes the text of Partway",
                "digest.update(path.read_bytes())", "pass",
                "api/reuse/test_cache.py::test_the_text_of_partway_and_the_version_of_pytorch_are_content",
            ),
            (
                "a plan on disk has to be of this version",
                "Files(folder, software(), *text_of_graph(graph)", "Files(folder, *text_of_graph(graph)",
                "api/reuse/test_cache.py::test_entries_of_another_version_are_not_used",
            ),
            (
                "a version includes the version of PyTorch",
                'f"torch {torch.__version__}, partway', 'f"partway',
                "api/reuse/test_cache.py::test_the_text_of_partway_and_the_version_of_pytorch_are_content",
            ),
            (
                "the key of a plan on disk includes options and request",
                "*map(repr, content)", "",
                "models/test_cache.py::test_other_content_is_planned_anew[context]",
            ),
            (
                "the key of a plan on disk includes the arguments of operators",
                "{node.args} ", "",
                "models/test_cache.py::test_other_code_is_planned_anew",
            ),
            (
                "programs with derivatives of users' operators are not cached",
                "or (derived and not self._derivable)", "",
                "api/requests/test_user_rules.py::test_the_cache_knows_rules_and_keeps_no_derivative_of_a_custom_operator",
            ),
        ),
        *of_file(
            "partway/compiler/driver.py",
            (
                "the key of a plan on disk includes the rules of users' operators",
                "text_of(inputs.rules),", "",
                "api/requests/test_user_rules.py::test_the_cache_knows_rules_and_keeps_no_derivative_of_a_custom_operator",
            ),
        ),
        *of_file(
            "partway/compiler/captures.py",
            (
                "the key of a capture includes the values that the code reads",
                "own, reads, call.structure.key()", "own, call.structure.key()",
                "api/compiler/test_captures.py::test_what_changed_is_captured_anew",
            ),
            (
                "the key of a capture includes the modes",
                "list(_parameters(fn)), modes()", "list(_parameters(fn))",
                "api/compiler/test_captures.py::test_other_modes_of_torch_are_captured_anew",
            ),
            (
                "the key of a capture includes the rank",
                'f"rank {get_rank()} of {get_group_size()}", ', "",
                "api/compiler/test_captures.py::test_ranks_have_captures_of_their_own",
            ),
            (
                "the key of a capture includes the installed packages",
                "software(), installed(), content", "software(), content",
                "api/compiler/test_captures.py::test_other_packages_are_captured_anew",
            ),
        ),
        *of_file(
            "strategy/basics/files.py",
            (
                "files that another process is writing are not removed",
                "not fresh and bool(_lock(number))", "not fresh",
                "api/reuse/test_cache.py::test_what_another_process_writes_now_is_left",
            ),
        ),
    ),
    "A job that was ended continues as if it had not been": (
        *of_file(
            "kits/checkpoints/resume.py",
            (
                "the states of random generators are restored",
                "self._set_random(_named(found, _NOW))", "pass",
                "kits/checkpoints/test_resume.py::test_every_epoch_is_shuffled_as_it_would_have_been[3-a generator]",
            ),
            (
                "a repeated epoch draws the same numbers",
                "self._set_random(self._began)", "pass",
                "kits/checkpoints/test_resume.py::test_every_epoch_is_shuffled_as_it_would_have_been[3-Python's]",
            ),
            (
                "after that, random generators have the states of the checkpoint",
                "self._set_random(now)", "pass",
                "kits/checkpoints/test_resume.py::test_every_epoch_is_shuffled_as_it_would_have_been[3-Python's]",
            ),
            (
                "a loader that cannot continue within an epoch is refused",
                "if sampler.replacement or", "if False and",
                "kits/checkpoints/test_resume.py::test_a_loader_that_cannot_go_on_within_an_epoch_is_named",
            ),
            (
                "a training that is asked to end saves and ends",
                "ends = self._ends()", "ends = False",
                "kits/checkpoints/test_resume.py::test_steps_go_on_in_one_process",
            ),
            (
                "all ranks end after the same step",
                "and self.step >= int(store.get(_STOP))", "",
                "kits/checkpoints/test_resume.py::test_ranks_end_after_the_same_step_where_one_is_told_before_another_has_ended_"
                "the_step_before",
            ),
            (
                "a checkpoint is saved every N steps",
                "or self.step % self.every == 0", "",
                "kits/checkpoints/test_resume.py::test_a_training_that_was_ended_has_the_losses_of_one_that_was_not[raise-1]",
            ),
        ),
        *of_file(
            "kits/ps/service/cluster.py",
            (
                "a job with a parameter server survives a minute without Ray's head",
                "keeper.PATIENCE: str(10**6),", "",
                "kits/ps/test_parameter_server_chaos.py::test_a_job_outlives_a_head_that_is_away_for_longer_than_ray_waits",
            ),
        ),
        *of_file(
            "runtime/launching/scheduler.py",
            (
                "a worker whose process has ended has failed",
                "elif _is_gone(card):", "elif False:",
                "runtime/launching/test_scheduler.py::test_a_worker_that_fails_ends_all_with_its_name[a kill]",
            ),
            (
                "a worker that is silent has failed",
                "elif now - beats[rank][1] > (", "elif False and now > (",
                "runtime/launching/test_scheduler.py::test_a_worker_that_fails_ends_all_with_its_name[a stop]",
            ),
            (
                "a worker of another version is refused",
                "if card.versions != versions():", "if False:",
                "runtime/launching/test_scheduler.py::test_a_worker_that_does_not_fit_is_told_so_and_the_others_go_on[version]",
            ),
            (
                "nothing of the previous attempt is read",
                'return f"partway/{attempt}/{name}"', 'return f"partway/1/{name}"',
                "runtime/launching/test_worker.py::test_the_others_start_again_and_wait_for_its_place_to_be_taken",
            ),
            (
                "a job does not wait for workers that have succeeded",
                "if done and time.monotonic() >", "if False and time.monotonic() >",
                "runtime/launching/test_worker.py::test_a_job_of_which_a_part_has_ended_well_does_not_start_again",
            ),
        ),
        *of_file(
            "runtime/launching/worker.py",
            (
                "a worker that its job has abandoned is ended",
                "os._exit(1)", "pass",
                "runtime/launching/test_scheduler.py::test_a_worker_that_meets_nobody_is_ended_with_its_job",
            ),
            (
                "a worker whose scheduler has ended ends",
                "except RuntimeError as error:\n", "except ZeroDivisionError as error:\n",
                "runtime/launching/test_scheduler.py::test_workers_end_where_their_scheduler_is_gone",
            ),
            (
                "a failed worker does not restart beside its replacement",
                'if self._how == "done" or self._rank == over.failed:', 'if self._how == "done":',
                "runtime/launching/test_worker.py::test_the_others_start_again_and_wait_for_its_place_to_be_taken",
            ),
        ),
    ),
    "Rows of experts reach their experts, and come back": (
        *of_file(
            "propagation/rules/layers/experts.py",
            (
                "the slots of tokens that were sent once are no rows of an exchange",
                "replace(rows, copy=_COPY)", "rows",
                "propagation/rules/layers/test_experts.py::test_every_way_to_split_rows_gives_the_numbers_of_one_device",
            ),
            (
                "experts are not cut in another order than their rows",
                "alone = {rule.experts: 1} if rule.experts else {}", "alone = {}",
                "propagation/rules/layers/test_experts.py::test_products_of_routed_rows_split_in_every_way_on_two_axes",
            ),
            (
                "experts are cut over all axes with an option by expert, in the order of the mesh",
                "for axis, size in _sizes(emit, *BY_EXPERT).items():", "for axis, size in _sizes(emit, *ways).items():",
                "propagation/rules/layers/test_experts.py::test_every_way_to_split_rows_gives_the_numbers_of_one_device",
            ),
        ),
        *of_file(
            "propagation/ops/experts.py",
            (
                "an expert that there is not is refused",
                "_check_range(flat, experts)\n", "pass\n",
                "propagation/ops/test_experts.py::test_an_expert_that_there_is_not_is_refused",
            ),
        ),
        *of_file(
            "propagation/capture/rewrites/experts.py",
            (
                "a mixture whose rows something else reads stays as it is",
                "self._check_readers(end)\n", "pass\n",
                "propagation/capture/rewrites/test_experts.py::test_what_is_not_recognised_stays_as_it_is[ReadsRows]",
            ),
            (
                "rows that are read with and without their weights stay as they are",
                "if self.weighted is not None and _is_read(self._rows):", "if False:",
                "propagation/capture/rewrites/test_experts.py::test_what_is_not_recognised_stays_as_it_is[WeightedAndNot]",
            ),
            (
                "rows that are sorted by descending expert stay as they are",
                'argument(node, "descending") or len(shape(what)) != 1', "len(shape(what)) != 1",
                "propagation/capture/rewrites/test_experts.py::test_what_is_not_recognised_stays_as_it_is[Descending]",
            ),
        ),
        *of_file(
            "fusion/exchanges.py",
            (
                "random operators keep their order",
                "\n        and not draws_random_numbers(node)", "",
                "fusion/test_exchanges.py::test_collectives_and_random_operators_keep_their_order_but_for_exchanges",
            ),
            (
                "collectives keep their order, but for exchanges",
                "return not kind_of(*node.args[1:3]).communicates", "return True",
                "fusion/test_exchanges.py::test_collectives_and_random_operators_keep_their_order_but_for_exchanges",
            ),
        ),
        *of_file(
            "runtime/torch_internals.py",
            (
                "compiled code does not run with numbers of rows that it does not allow",
                "return run(*inputs) if allowed else module(*inputs)", "return run(*inputs)",
                "models/test_inductor.py::test_rows_whose_numbers_the_code_does_not_allow_run_without_it",
            ),
        ),
    ),
}  # fmt: skip


def all_of(files: Sequence[str] = ()) -> list[Mutation]:
    """All mutations in some files, or in all."""
    return [row for rows in MUTATIONS.values() for row in rows if not files or row.file in files]


# -- running them


def source_of(file: str) -> Path:
    """The file with that path in the checkout; in a wheel it is elsewhere."""
    return sources()[file]


def changed(row: Mutation) -> str:
    """The file without the mechanism."""
    source = source_of(row.file).read_text(encoding="utf-8")
    assert source.count(row.text) == 1, f"{row.file} has {row.text!r} {source.count(row.text)} times, not once"
    return source.replace(row.text, row.by)


@contextmanager
def copied() -> Iterator[Path]:
    """A folder with a copy of Partway, and of its tests."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        package = source_of("partway/__init__.py").parent
        shutil.copytree(
            package, tree / "partway", ignore=shutil.ignore_patterns("__pycache__")
        )  # with what it links to
        for part in ("tests", "benchmarks", "examples", "pyproject.toml"):
            copy = shutil.copy if (ROOT / part).is_file() else shutil.copytree
            copy(ROOT / part, tree / part)
        yield tree


def run(tree: Path, tests: Sequence[str], only: str = "") -> tuple[int, str]:
    """Run tests in a copy, only those with the markers `only`. Return pytest's exit status and output."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--timeout", str(SECONDS), "-p", "no:cacheprovider", *tests]
    command += ["-m", only] if only else []
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "PARTWAY_CACHE": "0"}
    ended = subprocess.run(
        command, cwd=tree, env=environment, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return ended.returncode, ended.stdout


def fails_without(tree: Path, row: Mutation, only: str = "") -> str:
    """Remove a mechanism from a copy, run its test, and restore it. Return "" if the test fails, and otherwise what
    happened. `only`: the markers that the test must have."""
    stage, _, inside = row.file.partition("/")
    path = tree / "partway" / (stage if stage in STAGES else "") / inside
    before = path.read_text(encoding="utf-8")
    compile(without := changed(row), row.file, "exec")
    try:
        path.write_text(without, encoding="utf-8")
        shutil.rmtree(path.parent / "__pycache__", ignore_errors=True)  # which goes by seconds
        status, said = run(tree, [row.test], only)
    finally:
        path.write_text(before, encoding="utf-8")
        shutil.rmtree(path.parent / "__pycache__", ignore_errors=True)
    if status == PASSED:
        return "no test fails"
    return "" if status == FAILED else f"the test did not run:\n{said[-2000:]}"


def survivors(rows: Sequence[Mutation], only: str = "") -> int:
    """Try each of `rows` in a copy and print the results. Return the number of those that no test detects. `only`: the
    markers that their tests must have."""
    found = 0
    with copied() as tree:
        status, said = run(tree, list(dict.fromkeys(row.test for row in rows)), only)
        if status != PASSED:
            sys.exit(f"the tests do not pass as it is:\n{said[-4000:]}")
        for row in rows:
            began = time.monotonic()
            problem = fails_without(tree, row, only)
            found += bool(problem)
            said = problem or f"{row.test} fails"
            sys.stdout.write(f"{row.file}: {row.words}: {said} ({time.monotonic() - began:.0f} s)\n")
            sys.stdout.flush()
    return found


HEAD = """# Which test fails without which mechanism

A check that no test needs may be dead code. Each row below is a mechanism that prevents a silent wrong number or an
endless wait, with the test that fails without it. `python tests/conformance/mutations.py` removes each mechanism from
a copy and runs its test, and `--write` writes this page; `make test-long` checks that the mechanisms still exist.
"""


def page() -> str:
    lines = [HEAD]
    for title, rows in MUTATIONS.items():
        lines += [f"## {title}", "", "| mechanism | file | the test that fails without it |", "| --- | --- | --- |"]
        lines += [f"| {row.words} | `{row.file}` | {_shown(row.test)} |" for row in rows]
        lines.append("")
    return "\n".join(lines)


def _shown(test: str) -> str:
    file, _, name = test.removeprefix("tests/").partition("::")
    return f"`{file}`: `{name}`"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="paths in the checkout, such as runtime/ranks/ledger.py; none: all")
    parser.add_argument("--write", action="store_true", help="write docs/coverage/mutations.md, and run nothing")
    given = parser.parse_args()
    if given.write:
        PAGE.write_text(page(), encoding="utf-8")
        return
    sys.exit(bool(survivors(all_of(given.files))))


if __name__ == "__main__":
    main()
