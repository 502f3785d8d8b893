"""GeneratorHost: a generator as its pool sees it, inside the process or actor that holds it.

Owns: weights never go back to an earlier publication, whatever arrives late; whatever is answered
carries the incarnation; and what is wrong with this process is told apart from what the generator
says, since the pool tries the former elsewhere. Knows no pipes: whoever carries questions and
answers calls it from one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing, contextmanager
from typing import Any, assert_never

from headrace.errors import GeneratorFailure, HeadraceError, WeightSyncError
from headrace.generators.pool.proxy import (
    Beat,
    Deliveries,
    Delivery,
    Hosted,
    MemberLostError,
    Question,
    Report,
)
from headrace.generators.progress import Marks, Progress, TellsProgress
from headrace.types import GenerationRequest, WeightNotice


class GeneratorHost:
    """Serves one generator. Used from one event loop."""

    def __init__(self, hosted: Hosted, *, incarnation: int) -> None:
        self._generator = hosted.generator
        self._weights = hosted.weights
        self._incarnation = incarnation
        self._loading = asyncio.Lock()
        self._publication = -1
        """Number of the last publication that was taken up."""
        self._policy_version: int | None = None

    async def generate(self, requests: Sequence[GenerationRequest]) -> Deliveries:
        """Yield each group as it becomes whole. Raises what `GeneratorProxy.generate` does."""
        groups = self._generator.generate(requests)
        with _faults_told_apart():
            async with AsyncExitStack() as stack:
                if isinstance(groups, AsyncGenerator):
                    # What nobody waits for any more is taken back now, and not some time.
                    await stack.enter_async_context(aclosing(groups))
                async for group in groups:
                    yield Delivery(incarnation=self._incarnation, group=group)

    async def answer(self, question: Question, *arguments: Any) -> Any:  # noqa: ANN401 - by question
        """Do what is asked and return the answer.

        ``update_weights(publication, notice)``: numbers of publications only grow.
        ``pause()``, ``resume()``, ``abort(group_ids)``: see `Interruptible`.
        ``progress(marks)``: return a `Report`, an empty one where the generator tells nothing.
        ``beat()``: return a `Beat`.
        """
        with _faults_told_apart():
            match question:
                case "update_weights":
                    await self._update(*arguments)
                case "pause":
                    await self._generator.pause()
                case "resume":
                    await self._generator.resume()
                case "abort":
                    await self._generator.abort(*arguments)
                case "progress":
                    return await self._report(*arguments)
                case "beat":
                    return self._beat()
                case _:
                    assert_never(question)
        return None

    def _beat(self) -> Beat:
        return Beat(
            incarnation=self._incarnation,
            policy_version=self._policy_version,
            metrics=dict(self._generator.metrics()),
        )

    async def _report(self, marks: Marks) -> Report:
        generator, progress = self._generator, Progress()
        if isinstance(generator, TellsProgress):
            progress = await generator.progress(marks)
        return Report(incarnation=self._incarnation, progress=progress)

    async def _update(self, publication: int, notice: WeightNotice) -> None:
        async with self._loading:
            if publication <= self._publication:
                msg = (
                    f"version {notice.policy_version} came as publication {publication} after "
                    f"publication {self._publication} was taken up; it is stale and was not loaded"
                )
                raise WeightSyncError(msg)
            opened = self._weights.open(notice)
            update = await asyncio.to_thread(opened.__enter__)
            try:
                await self._generator.update_weights(update)
            finally:
                await asyncio.to_thread(opened.__exit__, None, None, None)
            self._publication, self._policy_version = publication, notice.policy_version

    async def close(self) -> None:
        """Close the generator and let go of weights. Idempotent."""
        await self._generator.close()
        self._weights.close()


@contextmanager
def _faults_told_apart() -> Iterator[None]:
    """Raise MemberLostError for what is no word of headrace's, or rests on what is none."""
    try:
        yield
    except (GeneratorFailure, WeightSyncError) as failure:
        cause = failure.__cause__
        if isinstance(cause, Exception) and not isinstance(cause, HeadraceError):
            raise MemberLostError(str(failure)) from cause
        raise
    except (HeadraceError, MemberLostError):
        raise
    except Exception as error:
        msg = f"{type(error).__name__}: {error}"
        raise MemberLostError(msg) from error
