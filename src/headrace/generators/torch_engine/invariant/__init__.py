"""`batch_invariant`: passes in which a row's bits depend on its own sequence and on nothing else.

Every product is made in one of a few shapes, each of which was seen to give the bits of all others
before the first weights (`probes`); a query meets the keys of one cache block at a time, in the
order of the sequence, alone or with others (`attention`); what is left acts on single elements, or
on single rows whose number is one of the few (`runner`).
"""
