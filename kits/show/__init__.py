"""What people look at.

sharding.py   `visualize_sharding`: how what they have in hand lies on the devices of a mesh
pages.py      `partway show`: pages of plans that were saved, and what differs between two
timeline.py   `record_timeline`: what runs when, as a list and as a page
sheet.py      a page of text, tables and pictures, which fetches nothing
"""
