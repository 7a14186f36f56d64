"""What people look at: how tensors lie on the devices of a mesh.

parts.py      the parts of a tensor and who holds them, as data
drawing.py    these as a table for a terminal and as an SVG
sharding.py   `visualize_sharding`: of what people have in hand
"""
