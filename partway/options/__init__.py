"""The options that a person sets: what there is, what is accepted, and what holds.

In go keyword arguments of `set_auto_parallel_context` and its like. Out come frozen values, each validated once, or one
ContextError that lists all that is wrong.

    parallel     `ParallelContext`, the options of the parallel context, and those that are options themselves
    algo         `AlgoParameters`, the options of the strategy search
    fields       the closed choices and the types of fields that pydantic does not have
    base         what all options have in common
    refusals     from what pydantic refuses to one error in the user's words
    in_force     which value holds: that of the process, or of a `with` that this thread is in

The functions that users call, and the two values in force, are in `partway.options.context`.
"""
