"""What each pass made of a planned call, in files for people: PARTWAY_SAVE_GRAPHS.

In come the values that passes make, heard around each of them (`propagation/capture/capture.py` and `passes.py` say
what may stand there); out come the files of one folder for each call. `partway diff` reads them again.

    asked      what the environment asks for
    record     hears the passes of one call, and writes; who asks for nothing has a record that does nothing
    by_hand    the graphs of collectives that ranks call by hand, outside of anything planned
    folders    where: a folder for each rank and planned call, which no other run writes to
    stages     the files, in order: which value each shows, and from which level on
    text       a graph, a plan or a program as text
    operators  the lines of one graph: calls, collectives, strategies, source lines
    pictures   the same as Graphviz's dot (level 3)
    figures    what a graph has: nodes, operators, collectives, bytes; and how two differ
    index      the table of what each pass changed, for people and as data
    saved      folders and plans, read again
    compare    how two planned calls differ
"""
