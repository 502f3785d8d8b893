"""Executions on other machines: a server that offers an executor over HTTP, and its client.

`wire` is what they say to each other; `desk`, `server` and `serving` are one side, `endpoint` and
`executor` the other. Only `server` and `serving` need the extra ``serve``.
"""
