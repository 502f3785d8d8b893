from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from code_lab import Grade, InProcess

from headrace.config import CodeConfig
from headrace.types import Prompt
from headrace.verifiers.code.component import CodeComponent, CodeReport


@pytest.fixture
def executor() -> InProcess:
    return InProcess()


@pytest.fixture
def grade(executor: InProcess) -> Grade:
    """Grade one completion: ``grade(row, completion, **config)``."""

    def run(row: Mapping[str, object], completion: str, **options: Any) -> CodeReport:  # noqa: ANN401 - keys of a config
        component = CodeComponent(CodeConfig(kind="code", **options), executor)
        prompt = Prompt(prompt_id="p", source="train", text="", token_ids=(0,), metadata=row)
        return asyncio.run(component.report(prompt, completion))

    return run
