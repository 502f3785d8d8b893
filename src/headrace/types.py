"""Frozen records that cross a role boundary.

They carry ids, numbers and text, and no tensors: `WeightUpdate` is the one exception, and it
travels from learner to generator without passing through the controller. Absence is ``None``
and never zero: ``Verdict.reward is None`` means "not scored".
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    import torch

LEAST_TEMPERATURE = 0.001
"""Smallest temperature but 0 (greedy). Logits up to 1e35 stay finite in fp32 when divided by it,
and a token that is 0.1 less probable in logits than the best one is as good as never drawn."""

MAX_REWARD = 1e9
"""Rewards lie strictly between this and its negative: NaN and infinities do not."""

FinishReason: TypeAlias = Literal["stop", "length", "abort", "error"]
"""``stop``: a stop id or string; ``length``: a token limit; ``abort``: taken back unfinished, may
go on; ``error``: the logits after its last token were not finite."""


OnUpdate: TypeAlias = Literal["wait", "keep", "recompute", "restart"]
"""What a weight update does to unfinished rollouts: they end first; they go on with the keys and
values they have; they go on with those of the new weights; they begin again at the prompt."""


Late: TypeAlias = Literal["wait", "carry_over", "cancel"]
"""What becomes of a group that is not whole when a batch could be made of others: the batch waits
for it; it is of a later batch, within the bound on staleness; it is given up."""


def num_batches_within(max_staleness: int, updates_per_step: int) -> int:
    """Return how many batches may be under way at once, the one that is trained on included.

    The largest S with (S - 1) u + u - 1 <= ``max_staleness``; docs/STALENESS.md has the proof.
    """
    return (max_staleness - (updates_per_step - 1)) // updates_per_step + 1


def derive_seed(root: int, *path: str | int) -> int:
    """Return a seed in [0, 2**63) that depends on ``root`` and every element of ``path``.

    The one seed tree of a run: ``seed -> role -> prompt id -> rollout index``. Every random
    number is a function of its place in this tree, so there is no generator state to save.
    """
    text = "\x1f".join(str(part) for part in (root, *path))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def group_seed(root: int, group_id: str) -> int:
    """Return the seed of a training group; ``root`` is the run's."""
    return derive_seed(root, "generator", group_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One task, rendered to the exact token ids the policy will see."""

    prompt_id: str
    """Stable across runs and machines: a hash of source and content, or the row's own id."""
    source: str
    """Name of the prompt source; rewards and held-out metrics are also reported by source."""
    text: str
    """The user's part as text, for verifiers, reports and people."""
    token_ids: tuple[int, ...]
    """[P] the rendered prompt: chat template, special tokens and all."""
    answer: str | None = None
    """Expected answer. Only verifiers may read it."""
    metadata: Mapping[str, object] = field(default_factory=dict)
    """Other columns of the row, as they were."""

    def __post_init__(self) -> None:
        if not self.token_ids:
            msg = f"prompt {self.prompt_id} renders to no token at all"
            raise ValueError(msg)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The distribution that tokens are drawn from, and when to stop.

    Masks apply first: forbidden tokens have probability 0 and the others share what is left. Then
    filters, in the order top-k, top-p, min-p, each on the temperature-scaled distribution.
    """

    temperature: float = 1.0
    """Divides the logits; 0 means greedy, and below `LEAST_TEMPERATURE` there is nothing else."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches this; 1 keeps all."""
    top_k: int = 0
    """Keep this many of the most probable tokens; 0 keeps all."""
    min_p: float = 0.0
    """Keep tokens at least this share as probable as the most probable one; 0 keeps all."""
    max_tokens: int = 256
    """Completion tokens at most, the stop token included."""
    stop_token_ids: tuple[int, ...] = ()
    """Any of these ends a rollout; it is kept as its last token."""
    stop_strings: tuple[str, ...] = ()
    """The token that completes one of these in the completion's text ends it."""
    min_tokens: int = 0
    """Tokens that come before the one that a stop id or string ends with: the first so many
    tokens are no stop ids, and a stop string that they complete ends nothing, then or later."""
    allowed_token_ids: tuple[int, ...] | None = None
    """Mask: all other tokens have probability 0; None allows all."""
    banned_token_ids: tuple[int, ...] = ()
    """Mask: these have probability 0."""
    forced_prefix: tuple[int, ...] = ()
    """Every completion begins with these, whatever the masks and stop ids say. They count in
    ``min_tokens`` and ``max_tokens`` and are not trained on."""
    raw_logprobs: bool = False
    """Whether to record log-probs under the model's own distribution as well."""
    kept_support: bool = False
    """Whether to record the tokens that top-k, top-p and min-p left to draw from."""

    def __post_init__(self) -> None:
        if not 0 <= self.min_tokens <= max(self.max_tokens, 0):
            msg = (
                f"min_tokens = {self.min_tokens} must be at least 0 and at most max_tokens = "
                f"{self.max_tokens}"
            )
            raise ValueError(msg)
        for name in ("allowed_token_ids", "banned_token_ids", "forced_prefix"):
            negative = [token for token in getattr(self, name) or () if token < 0]
            if negative:
                msg = f"{name} = {negative}: token ids start at 0"
                raise ValueError(msg)
        if self.forced_prefix and len(self.forced_prefix) >= self.max_tokens:
            msg = (
                f"forced_prefix of {len(self.forced_prefix)} tokens with max_tokens = "
                f"{self.max_tokens} leaves no token to sample; raise max_tokens"
            )
            raise ValueError(msg)
        if self.allowed_token_ids is not None:
            self._refuse_empty(frozenset(self.allowed_token_ids))

    def _refuse_empty(self, allowed: frozenset[int]) -> None:
        """Raise ValueError if masks leave nothing of ``allowed`` at some position."""
        if not allowed - {*self.banned_token_ids}:
            msg = "allowed_token_ids without banned_token_ids leaves no token to sample"
            raise ValueError(msg)
        if not allowed - self.early_banned:
            msg = (
                "allowed_token_ids without banned_token_ids and stop ids leaves no token to sample "
                f"before min_tokens = {self.min_tokens}; allow another one or set min_tokens = 0"
            )
            raise ValueError(msg)

    @property
    def early_banned(self) -> frozenset[int]:
        """Ids that the first ``min_tokens`` tokens cannot be."""
        stop = self.stop_token_ids if self.min_tokens > len(self.forced_prefix) else ()
        return frozenset((*self.banned_token_ids, *stop))

    @property
    def truncates(self) -> bool:
        """Whether top-k, top-p or min-p may give some token probability 0."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0

    @property
    def records_support(self) -> bool:
        """Whether rollouts carry their kept support: asked for, and something filters."""
        return self.kept_support and self.truncates

    @property
    def masks(self) -> bool:
        """Whether some token has probability 0, anywhere in a completion, because a mask says."""
        return self.allowed_token_ids is not None or bool(self.early_banned)


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """Completion tokens [start, end) were sampled by ``policy_version``."""

    policy_version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One sampled trajectory. All sequences have the completion's length T."""

    rollout_index: int
    """Position in its group; part of its seed."""
    completion_ids: tuple[int, ...]
    """[T] exactly the ids that were sampled; never decoded and encoded again."""
    loss_mask: tuple[bool, ...]
    """[T] True where the policy chose the token: not where it was forced."""
    generator_logprobs: tuple[float, ...]
    """[T] under the distribution sampled from (temperature, masks and filters included); nats. 0
    for tokens that were forced."""
    version_spans: tuple[VersionSpan, ...]
    """Cover [0, T) in order; set by the engine at the moment it samples."""
    finish_reason: FinishReason
    text: str
    """The completion decoded without special tokens, for verifiers and people."""
    raw_logprobs: tuple[float, ...] | None = None
    """[T] under the softmax of the logits as they are: no temperature, filter or mask; nats. 0 for
    tokens that were forced. None: not asked for."""
    kept_support: tuple[bytes, ...] | None = None
    """[T] the ids, that token's among them, that masks and filters left to draw from, as
    ``headrace.kept_support`` packs them; empty for tokens that were forced. None: not asked for,
    or no filter was on, and then the masks of the request say it all."""

    def __post_init__(self) -> None:
        length = len(self.completion_ids)
        if not (len(self.loss_mask) == len(self.generator_logprobs) == length):
            msg = (
                f"rollout {self.rollout_index}: {length} ids, {len(self.loss_mask)} mask entries "
                f"and {len(self.generator_logprobs)} log-probs"
            )
            raise ValueError(msg)
        for name in ("raw_logprobs", "kept_support"):
            values = getattr(self, name)
            if values is not None and len(values) != length:
                msg = f"rollout {self.rollout_index}: {length} ids and {len(values)} {name}"
                raise ValueError(msg)
        position = 0
        for span in self.version_spans:
            if span.start != position or span.end <= span.start:
                msg = f"rollout {self.rollout_index}: version spans do not tile [0, {length})"
                raise ValueError(msg)
            position = span.end
        if position != length:
            msg = f"rollout {self.rollout_index}: version spans cover {position} of {length} tokens"
            raise ValueError(msg)

    @property
    def may_go_on(self) -> bool:
        """Whether it was taken back before its end, so that a generator can sample the rest."""
        return self.finish_reason == "abort"

    @property
    def policy_versions(self) -> tuple[int, ...]:
        """[T] the version that sampled each token."""
        return tuple(s.policy_version for s in self.version_spans for _ in range(s.start, s.end))

    @property
    def oldest_version(self) -> int | None:
        """The lowest policy version among its tokens; None for an empty completion."""
        return min((span.policy_version for span in self.version_spans), default=None)


class Outcome(StrEnum):
    """How a verification ended. INFRA is our own failure, never the policy's.

    ABSTAIN: a reward function declined to score, which is no failure.
    """

    PASS = "pass"  # noqa: S105 - an outcome, not a password
    WRONG = "wrong"
    RUNTIME = "runtime"
    TIMEOUT_CPU = "timeout_cpu"
    TIMEOUT_WALL = "timeout_wall"
    OOM = "oom"
    OUTPUT_LIMIT = "output_limit"
    VIOLATION = "violation"
    INFRA = "infra"
    ABSTAIN = "abstain"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a verifier says of one rollout."""

    outcome: Outcome
    reward: float | None
    """None means "not scored": left out of mean, std and count. Never a stand-in for 0."""
    verifier: str
    """Name of the verifier, or of the weighted sum."""
    components: Mapping[str, float | None] = field(default_factory=dict)
    """Reward of every component before weighting, by name; None where one was not scored."""
    detail: str = ""
    """One line for people: what was compared with what, or what went wrong."""
    labels: tuple[str, ...] = ()
    """Notes on what the completion tries, such as ``exits_early``. For people and alarms; no part
    of the reward."""

    def __post_init__(self) -> None:
        if self.outcome is Outcome.INFRA and self.reward is not None:
            msg = f"verdict of {self.verifier}: INFRA carries no reward, got {self.reward}"
            raise ValueError(msg)
        if self.reward is not None and not -MAX_REWARD < self.reward < MAX_REWARD:
            msg = f"verdict of {self.verifier}: reward {self.reward} is not a finite number"
            raise ValueError(msg)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """Ask for the ``group_size`` rollouts of one prompt."""

    group_id: str
    prompt: Prompt
    group_size: int
    sampling: SamplingParams
    seed: int
    """Seed of the group; rollout k uses ``derive_seed(seed, k)``."""
    begun: tuple[Rollout, ...] = ()
    """Rollouts of this group that this or another generator has sampled before. Those that ended
    are given back as they are; those with finish reason ``abort`` go on from their tokens, none of
    which is sampled again; those whose index is missing start at the prompt. Where weights and
    engine are the same, the tokens are those of a rollout that was never interrupted."""

    def __post_init__(self) -> None:
        indexes = [rollout.rollout_index for rollout in self.begun]
        for index in indexes:
            if not 0 <= index < self.group_size:
                msg = (
                    f"group {self.group_id}: begun rollout {index} is none of its "
                    f"{self.group_size}; indexes go from 0 to group_size - 1"
                )
                raise ValueError(msg)
        if len(set(indexes)) != len(indexes):
            msg = f"group {self.group_id}: begun rollouts {sorted(indexes)} name an index twice"
            raise ValueError(msg)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutGroup:
    """The rollouts of one prompt, and their verdicts once scored."""

    group_id: str
    """``epoch/prompt_id`` in training: unique within a run."""
    prompt: Prompt
    rollouts: tuple[Rollout, ...]
    sampling: SamplingParams
    verdicts: tuple[Verdict, ...] | None = None
    """One for each rollout, in order; None until the group is scored."""

    def __post_init__(self) -> None:
        if self.verdicts is not None and len(self.verdicts) != len(self.rollouts):
            msg = (
                f"group {self.group_id}: {len(self.verdicts)} verdicts "
                f"for {len(self.rollouts)} rollouts"
            )
            raise ValueError(msg)

    @property
    def group_size(self) -> int:
        """Rollouts in the group, scored or not."""
        return len(self.rollouts)

    @property
    def rewards(self) -> tuple[float | None, ...]:
        """Reward of each rollout, in order. The group must have been scored."""
        assert self.verdicts is not None, f"group {self.group_id} was not scored"
        return tuple(verdict.reward for verdict in self.verdicts)

    @property
    def oldest_version(self) -> int | None:
        """The lowest policy version among all its tokens; None if it has no token."""
        versions = [rollout.oldest_version for rollout in self.rollouts]
        return min((version for version in versions if version is not None), default=None)

    @property
    def newest_version(self) -> int | None:
        """The highest policy version among all its tokens; None if it has no token."""
        spans = [span for rollout in self.rollouts for span in rollout.version_spans]
        return max((span.policy_version for span in spans), default=None)

    def scored(self, verdicts: Sequence[Verdict]) -> RolloutGroup:
        """Return this group with its verdicts."""
        # Not `dataclasses.replace`, which takes three times as long: once for each group of a run.
        return RolloutGroup(
            group_id=self.group_id,
            prompt=self.prompt,
            rollouts=self.rollouts,
            sampling=self.sampling,
            verdicts=tuple(verdicts),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdate:
    """One published version of the weights, on its way from learner to generator.

    Between processes a `WeightNotice` travels in its place.
    """

    policy_version: int
    tensors: Mapping[str, torch.Tensor]
    """Hugging Face parameter name -> tensor. Valid only until ``update_weights`` returns."""
    checksum: int
    """``models.weights.checksum`` of ``tensors``; the receiver must arrive at the same number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightPart:
    """Bytes that a process reads weights from: all of them, or what changed since another version.

    Its own header says which of the two.
    """

    policy_version: int
    """Of the weights once this part has been read."""
    checksum: int
    """`WeightUpdate.checksum` of all of them, then."""
    place: str
    """Where the bytes lie, as the readers of its store understand it: a path or an address."""
    num_bytes: int
    """How many they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightNotice:
    """Where one published version lies: what another process is told instead of tensors."""

    parts: tuple[WeightPart, ...]
    """The first one holds all weights; each of the others what changed since the one before. Who
    holds one of these versions reads only what comes after it; who holds none reads all."""
    num_readers: int = 1
    """Processes that are told of it at the same time, for who sends to all of them together."""

    def __post_init__(self) -> None:
        versions = [part.policy_version for part in self.parts]
        if not versions or sorted(set(versions)) != versions:
            msg = f"a notice of versions {versions}: it needs one at least, in rising order"
            raise ValueError(msg)

    @property
    def policy_version(self) -> int:
        """The version that is published."""
        return self.parts[-1].policy_version

    @property
    def checksum(self) -> int:
        """`WeightUpdate.checksum` of that version; whoever reads it must arrive at this number."""
        return self.parts[-1].checksum


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one learner step did."""

    policy_version: int
    """After the step. Unchanged if no optimizer update was made."""
    num_updates: int
    """Optimizer updates really made: fewer than asked if there was no signal or it was skipped."""
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One training step, as monitors see it."""

    step: int
    """1 for the first step."""
    num_steps: int
    """The last step of the run."""
    policy_version: int
    metrics: Mapping[str, float]
    groups: tuple[RolloutGroup, ...]
    """The scored groups the step was given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRecord:
    """One held-out evaluation."""

    step: int
    """Training steps done before it; 0 for the one before training."""
    policy_version: int
    metrics: Mapping[str, float]
    groups: tuple[RolloutGroup, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvent:
    """Something worth a line: a start, a resume, a checkpoint, a dropped prompt, a stop."""

    kind: str
    step: int
    message: str
    fields: Mapping[str, object] = field(default_factory=dict)
