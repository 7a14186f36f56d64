"""How a tensor lies on the devices of a mesh, as pictures.

parts.py     the parts of the tensor and who holds them, as data
drawing.py   these as a table for a terminal and as an SVG
"""
