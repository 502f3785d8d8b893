"""What runs on the other side of the wall: the standard library alone, on the cell's interpreter.

Nothing here knows what a program is meant to answer. The rest of headrace is not reachable from it.
"""
