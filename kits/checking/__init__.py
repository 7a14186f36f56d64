"""Is what a person wrote by hand right? `pw.check_manual`.

The program of one rank runs on every rank of a mesh, in this process, and once more on one rank that has everything
whole. There all collectives do nothing, so that it computes what one device does. Each value of the ranks is compared
with its counterpart there, which tells what it is in the placement algebra: alike everywhere, a slice, an addend, or
none of these.

    ranks      runs a program on all ranks of a mesh, in lockstep
    records    what a rank computes, operator by operator
    matching   which records of two runs belong together
    measured   what a value is: its placement on each axis, and how many times too large it is
    reasons    why a result is wrong: the first value that is none, or that is not what it should be
    report     what is told
    checker    `check_manual`
"""
