r"""`math`: typed answers, read strictly and compared exactly.

`finding` takes the answer out of a completion; `reading` (`spelling`, `lexer`, `parser`) makes it
values with units; `compare` (`regions`, `units`) goes by the type of the expected answer;
`exact` and `algebra` decide about expressions, the first anywhere, the second in `grading`'s
processes; `judging` is the path from two texts to a judgement, and `component` the verifier. A
worker imports `grading` alone: the config would triple the time of its start.
"""
