"""What a server says of itself, and whether a run can use it as it was launched.

Read once, before the first weights, so that a server that would report something else than the run
needs is refused at the start. A server that leaves a fact out is taken at its least useful.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from headrace.types import OnUpdate

INPUT_RESERVE = 4
"""SGLang's ``max_req_input_len`` is its ``max_req_len`` less 5, and prompt plus completion stay one
below the latter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """What matters of one server's launch options. Sources: ``/server_info``, ``/model_info``."""

    is_deterministic: bool
    """``--enable-deterministic-inference``: without it SGLang leaves seeds unread."""
    overlaps: bool
    """Not ``--disable-overlap-schedule``: it schedules one step ahead of what it has recorded."""
    has_tokenizer: bool
    """Not ``--skip-tokenizer-init``."""
    max_support: int
    """``--sampling-mask-max-tokens``: the largest ``top_k`` whose kept tokens it reports."""
    speculates: bool
    """It runs a draft model."""
    is_disaggregated: bool
    """It does only prefill or only decoding."""
    max_tokens: int | None
    """Prompt and completion together at most; None if it does not say."""
    alters_sampling: bool
    """``--preferred-sampling-params``: it adds to what a request asks for."""
    architectures: tuple[str, ...]
    """Of the model it serves, as in config.json; empty if it does not say."""

    @classmethod
    def of(cls, server_info: Mapping[str, object], model_info: Mapping[str, object]) -> ServerFacts:
        """Read the answers of ``GET /server_info`` and ``GET /model_info``."""
        longest = _whole(server_info.get("max_req_input_len"))
        named = model_info.get("architectures")
        return cls(
            is_deterministic=server_info.get("enable_deterministic_inference") is True,
            overlaps=server_info.get("disable_overlap_schedule") is not True,
            has_tokenizer=server_info.get("skip_tokenizer_init") is not True,
            max_support=_whole(server_info.get("sampling_mask_max_tokens")) or 0,
            speculates=bool(server_info.get("speculative_algorithm")),
            is_disaggregated=server_info.get("disaggregation_mode") not in {"null", None},
            max_tokens=None if longest is None else longest + INPUT_RESERVE,
            alters_sampling=bool(model_info.get("preferred_sampling_params")),
            architectures=tuple(named) if isinstance(named, list) else (),
        )

    def problems(self, on_update: OnUpdate, architecture: str | None) -> Iterator[str]:
        """Yield why no run with these settings can use the server."""
        if on_update == "keep" and self.overlaps:
            yield (
                'generator.on_update = "keep" needs --disable-overlap-schedule: SGLang otherwise '
                "gives the token in flight at an update the new version's name; "
                '"recompute" works with overlap'
            )
        if self.speculates:
            yield "it runs a draft model, whose weights and log-probs headrace cannot vouch for"
        if self.alters_sampling:
            yield "--preferred-sampling-params would change what is sampled; launch it without"
        if self.is_disaggregated:
            yield "it does only prefill or only decoding; give servers that do both"
        if architecture and self.architectures and architecture not in self.architectures:
            yield (
                f"it serves {', '.join(self.architectures)} and the run's model is {architecture}; "
                "launch it with --model-path of the run's model"
            )


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
