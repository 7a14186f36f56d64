"""The least of a sum of costs by vertex and by pair of vertices, and a lower bound on it: numbers, and nothing else.

Input: `Costs`, written out, or a `Network`, of which only messages are computed. Output: a `Found`: one option for each
vertex, its cost, and a lower bound on the cost of every choice. Three operators with two options each, 0 and 1:

    vertex    option 0    option 1          pair    0,0    0,1    1,0    1,1
    a            1           0              a, b     0      5      5      0
    b            3           2              b, c     0      4      4      0
    c            0           6

Each vertex by itself would take the choice 1, 1, 0, which costs (0 + 2 + 0) + (0 + 4) = 6. The least is 4, of 0, 0, 0:
(1 + 3 + 0) + (0 + 0). The docstrings of the modules continue with these numbers.

network.py      the numbers, and the result
eliminate.py    removes one vertex after another: proves the optimum of thin graphs; equal parts are computed once
narrow.py       rules out options that no optimal plan takes, by messages along the edges
visits.py       finds a plan to start from: vertices take what suits their neighbours
optimum.py      the three together, for costs that are written out
many.py         the same for costs that are too many to be written out
least.py        for problems too large to eliminate: reduce.py makes them smaller, messages.py bounds them, forests.py
                finds plans to start from, branch.py divides them
"""
