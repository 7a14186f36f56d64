"""The rules: how each operator splits, and expansions of operators that cannot split as they are.

In: one call of an operator in a captured graph. Out: its `Rule`, which determines its options on every mesh axis; or,
before that, the calls that an expansion replaces it by. How to add an operator: CONTRIBUTING.

    rule.py              rules, their options, and the Emitter that writes a rank's local form
    row.py               a rule as text, "m k, n k -> m n"
    dims.py              helpers of rules that are functions: factors of dims, whole dims, windows
    local_forms.py       helpers of local forms: constants by rank, slices, replaced arguments
    windows.py           the range of an operand that a range of the result depends on
    builder.py           adds the nodes of expansions
    table.py             the one merge of all families: `rule_of`, `has_row`, ROWS, EXPANSIONS and `expand`
    custom.py            rules that users give to operators (`partway.rule`)
    layers/, tensors/    one family of operators a module: its rules, local forms, expansions, and at the end the rows
                         (ROWS) and expansions (EXPANSIONS) that the table merges;
                         layers/padded_convolution.py is a pass that fuses a pad and a convolution into one operator
"""
