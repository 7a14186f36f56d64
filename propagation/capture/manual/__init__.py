"""Manual functions, which a person wrote for one rank, captured as one program of all ranks.

manual_capture.py   from a function of one rank to the program of all ranks
by_rank.py          programs that ask for their rank; permutations.py: exchanges with neighbours
"""
