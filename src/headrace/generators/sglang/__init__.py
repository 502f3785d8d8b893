"""The SGLang generator: an adapter over the HTTP interface of servers that run elsewhere.

Written against the published source of SGLang 0.5.23 and tested against a server that implements
its documented shapes. It has not been run against SGLang itself here: there is no build of it
without a GPU. docs/ENGINES.md says what that leaves open.
"""

from headrace.generators.sglang.generator import SGLangGenerator

__all__ = ["SGLangGenerator"]
