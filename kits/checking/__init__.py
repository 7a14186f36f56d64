"""Check a program of one rank that a person wrote by hand: `pw.check_manual`.

The program runs on every rank of a mesh, in this process, and once more on one rank that has everything whole. There
all collectives do nothing, so it computes the values of one device. Each value of the ranks is compared with its
counterpart there, which gives its placement: the same everywhere, a slice, an addend, or none of these.

    ranks      runs a program on all ranks of a mesh, in lockstep
    records    the values that a rank computes, operator by operator
    matching   pairs the records of two runs
    measured   the placement of a value on each axis, and the factor by which it is too large
    reasons    why a result is wrong: the first value that matches no layout, or has another one than is needed
    report     the report
    checker    `check_manual`
"""
