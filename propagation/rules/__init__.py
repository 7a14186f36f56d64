"""The rules: how each operator splits, and what is written with other operators so that it splits.

In: one call of an operator in a captured graph. Out: its `Rule`, from which its options on every mesh axis follow; or,
before that, the calls that an expansion replaces it by. How to add an operator: CONTRIBUTING.

    rule.py              what a rule says, the options that follow, and the Emitter that writes what a rank runs
    row.py               a rule as text, "m k, n k -> m n"
    dims.py              what rules that are functions share: factors of dims, whole dims, windows
    local_forms.py       what local forms share: constants by rank, slices, replaced arguments
    windows.py           which range of an operand a range of the result is made of
    builder.py           what expansions write nodes with
    table.py             the one merge of all families: `rule_of`, `has_row`, ROWS and EXPANSIONS
    expand.py            the pass that replaces operators by their expansions
    custom.py            rules that users give to operators (`partway.rule`)
    layers/, tensors/    one family of operators a module: its rules, local forms, expansions, and at the end the rows
                         (ROWS) and expansions (EXPANSIONS) that the table merges;
                         layers/padded_convolution.py is a pass, which makes one operator of a pad and a convolution
"""
