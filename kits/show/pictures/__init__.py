"""Pictures of a tensor's parts on the devices of a mesh.

parts.py     the parts of the tensor and their devices, as data
drawing.py   these as a table for a terminal and as an SVG
"""
