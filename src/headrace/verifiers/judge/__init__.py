"""A language model as a judge, over any OpenAI-compatible interface.

What it is asked (`question`), how its answer is read (`answer`), how votes become one (`ballot`),
how the endpoint is called (`endpoint`), and the component that does all four (`component`).
"""
