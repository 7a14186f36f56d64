"""The page of a plan, for Plan.save_html, `partway show`, and notebooks.

outline.py     the operators as a tree of modules; repeated layers as one
facts.py       data for the page's script beside the plan: the tree, crossings, layouts, alternatives
tables.py      tables and bars: costs, collectives, memory, annotations
markup.py      text escaped for a page, and the head of a page
document.py    the file: all of it, and the scripts and styles in assets/
"""
