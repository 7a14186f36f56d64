"""Minimize a sum of costs by vertex and by pair of vertices, and bound it from below. The room knows only numbers.

Three operators with two options each, 0 and 1:

    vertex    option 0    option 1          pair    0,0    0,1    1,0    1,1
    a            1           0              a, b     0      5      5      0
    b            3           2              b, c     0      4      4      0
    c            0           6

If each vertex takes its own cheapest option, the choice is 1, 1, 0, which costs (0 + 2 + 0) + (0 + 4) = 6. The
minimum is 4, for the choice 0, 0, 0: (1 + 3 + 0) + (0 + 0). The modules continue this example.

Input: `Costs`, written out, or a `Network`, of which only messages are computed. Output: a `Found`: one option for each
vertex, its cost, and a lower bound on the cost of every choice.

network.py      the numbers, and the result
eliminate.py    eliminates one vertex after another: proves the optimum of graphs of small width;
                equal parts are computed once
narrow.py       rules out options that no optimal plan takes, by messages along the edges
visits.py       finds a plan to start from: each vertex takes its cheapest option given its neighbours
optimum.py      the three together, for costs that are written out
many.py         the same for costs that are too many to be written out
least.py        for problems too large to eliminate: reduce.py shrinks them, messages.py bounds them, forests.py
                finds plans to start from, branch.py branches
"""
