"""vLLM behind the Generator role. Nothing of vLLM is imported before its engine is started."""

from headrace.generators.vllm.generator import VllmGenerator
from headrace.generators.vllm.settings import VllmSettings

__all__ = ["VllmGenerator", "VllmSettings"]
