"""Pictures and pages for people.

sharding.py   `visualize_sharding`: draws how a tensor lies on the devices of a mesh
pages.py      `partway show`: pages of saved plans, and the differences between two
timeline.py   `record_timeline`: the times of operators and collectives, as a list and as a page
sheet.py      a page of text, tables and pictures, which fetches nothing
"""
