"""Whether a plan may be used for another call.

A plan holds while a call looks like the one it was made for, and while Python would do the same again. In comes a
function and a call of it; out comes what an earlier plan runs, or nothing, and then the call is planned. Speed counts:
a call like the last one pays for its comparisons only.

    guard.py        whether a call is like the last one: all that a usual call looks at
    courses.py      the plans of a function, by signature, by state, and by the answers to what it asks of values
    sizes.py        the sizes that change from call to call, and what was captured for all of them
    replanning.py   what a call was planned again for
    state.py        what a function reads beside its arguments, compared before each call
    reachable.py    what that can be: whatever the code can reach by the names in it (names.py, libraries.py)
    contents.py     what objects of Python's own types contain, one row for each type
    facts.py        when two values count as the same
    effects.py      what a function writes while it is captured, and each call writes again (snapshot.py)
"""
