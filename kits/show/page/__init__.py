"""The page of a plan: Plan.save_html, `partway show`, and what a notebook shows.

outline.py     the operators as a tree of modules; repeated layers as one
facts.py       what the page's script is told beside the plan: the tree, crossings, layouts, alternatives
tables.py      tables and bars: costs, collectives, memory, annotations
markup.py      text that is only text, and the head of a page
document.py    the file: all of it, and the scripts and styles in assets/
"""
