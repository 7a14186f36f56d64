"""The least of a sum of costs by vertex and by pair of vertices, and a bound on it: numbers, and nothing else.

In: `Costs`, written out, or a `Network`, of which only messages are computed. Out: a `Found`: one option for each
vertex, what that costs, and what no choice costs less than. Three operators with two options each, 0 and 1:

    vertex    option 0    option 1          pair    0,0    0,1    1,0    1,1
    a            1           0              a, b     0      5      5      0
    b            3           2              b, c     0      4      4      0
    c            0           6

Each vertex by itself would take the choice 1, 1, 0, which costs (0 + 2 + 0) + (0 + 4) = 6. The least is 4, of 0, 0, 0:
(1 + 3 + 0) + (0 + 0). The heads of the modules go on with these numbers.

network.py      the numbers
eliminate.py    vertices go one after another: the optimum, proven, where graphs are thin; equal parts are computed once
narrow.py       options that no optimal plan takes, by messages along the edges
visits.py       a plan to start from: vertices take what suits their neighbours
optimum.py      the three together, for costs that are written out
many.py         the same where costs are too many to be written out
least.py        where elimination is too much: reduce.py makes a problem smaller, messages.py bounds it, forests.py
                finds plans to start from, branch.py divides it
found.py        what is returned
progress.py     how far a search under way has come, for who listens
"""
