"""What people look at.

sharding.py   `visualize_sharding`: how what they have in hand lies on the devices of a mesh (strategy/pictures draws it)
"""
