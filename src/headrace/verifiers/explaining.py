"""How the verdict on one completion comes about, for a person who asks.

Decides nothing: each component says itself what it does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headrace.config import CodeConfig, ComponentConfig, MathConfig
from headrace.types import Prompt
from headrace.verifiers.code import explaining as code
from headrace.verifiers.code.component import CodeComponent
from headrace.verifiers.math.component import MathComponent
from headrace.verifiers.sandbox.execution import Executor


async def explain_completion(
    component: ComponentConfig,
    *,
    answer: str | None,
    completion: str,
    row: Mapping[str, object],
    executor: Executor | None,
) -> Sequence[str]:
    """Return lines; none for a component whose verdict's detail says it all.

    ``executor`` runs the program where ``component`` runs one; it is left open.
    """
    match component:
        case CodeConfig():
            assert executor is not None, "whoever has code explained has a place to run it"
            prompt = Prompt(
                prompt_id="verify", source="verify", text="", token_ids=(0,), metadata=row
            )
            return code.explain(await CodeComponent(component, executor).report(prompt, completion))
        case MathConfig() if answer is not None:
            math = MathComponent(component)
            try:
                return math.explain(answer, completion, task=str(row.get("prompt", "")))
            finally:
                await math.close()
        case _:
            return ()
