"""From raw files to a corpus: read, filter, deduplicate, decontaminate, mask, tokenise.

The work is cut into units, each a function of the content of its inputs and of the recipe. A
finished unit is a folder that appears whole; nothing else is remembered. So a run may be killed
anywhere, and its output depends neither on the number of workers nor on who finishes first.
"""
