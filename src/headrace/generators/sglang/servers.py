"""The servers of one generator: which can be used, how many requests each has, what they are told.

A server is used while it holds the weights that were published last and answers. One that is lost
takes its open calls with it, at once, so that they can be made elsewhere; it may come back with the
next weights.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Literal, TypeVar

from headrace.config import SGLangConfig
from headrace.errors import GeneratorFailure, WeightSyncError
from headrace.generators.sglang.client import Server, ServerRefused, repeated
from headrace.generators.sglang.facts import ServerFacts

T = TypeVar("T")

PauseMode = Literal["in_place", "retract"]
"""``in_place`` keeps the cache of running requests; ``retract`` gives it up and queues them."""
ABORT_AGAIN_SECONDS = 1.0
"""SGLang forgets an abort that arrives before the request it is for, so it is told again."""


class OpenCall:
    """A ``/generate`` that a server is at work on."""

    def __init__(self, rid: str, http: asyncio.Task[dict[str, object]]) -> None:
        self.rid = rid
        self.http = http
        self.is_over = asyncio.Event()
        """Set once what it brought is part of its rollout."""
        self.lost: str | None = None
        """Why its server can no longer answer; set before ``http`` is cancelled."""
        self.is_given_up = False
        """Set before ``http`` is cancelled because an abort was not answered."""


class Member:
    """One server and what the generator knows of it."""

    def __init__(self, server: Server, options: SGLangConfig) -> None:
        self.server = server
        self.facts: ServerFacts | None = None
        self.loaded: str | None = None
        """Name of the version that it has confirmed; None while unknown."""
        self.lost: str | None = "it has not been asked yet"
        """Why it cannot be used; None while it answers."""
        self.calls: set[OpenCall] = set()
        self.heard_at = 0.0
        """When it last answered a call or was found well, by the monotonic clock."""
        self.examining = asyncio.Lock()
        self._options = options

    @property
    def url(self) -> str:
        """Where it is."""
        return self.server.url

    def lose(self, cause: str) -> None:
        """Stop using it; what is open on it fails now."""
        self.lost, self.loaded, self.facts = cause, None, None
        for call in self.calls:
            call.lost = cause
            call.http.cancel()

    async def read_facts(self) -> ServerFacts:
        """Ask what it is, once. Raises ServerLost, ServerBusy, ServerRefused."""
        seconds = self._options.control_deadline_seconds
        server_info = await self.server.get("/server_info", seconds)
        return ServerFacts.of(server_info, await self.server.get("/model_info", seconds))

    async def weight_version(self) -> object:
        """Return the name of the weights that it says it holds."""
        seconds = self._options.control_deadline_seconds
        reply = await self._asked(lambda: self.server.get("/model_info", seconds))
        return reply.get("weight_version")

    async def pause(self, mode: PauseMode) -> None:
        """Return once its scheduler has stopped, not only its front."""
        seconds = self._options.control_deadline_seconds
        body = {"mode": mode}
        await self._asked(lambda: self.server.post("/pause_generation", body, seconds))
        # The front answers before the scheduler has read the order. It reads them in turn, and this
        # question is one that the scheduler answers.
        await self._asked(lambda: self.server.get("/server_info", seconds))

    async def resume(self) -> None:
        """Let it go on."""
        seconds = self._options.control_deadline_seconds
        await self._asked(lambda: self.server.post("/continue_generation", {}, seconds))

    async def load(self, directory: Path, name: str) -> None:
        """Load the checkpoint in ``directory`` as version ``name`` and see that it took it.

        Its cache is left as it is: asked to flush it in the same breath with requests active,
        SGLang reports a failure although the weights have changed, and keeps the old name.
        """
        body = {
            "model_path": str(directory),
            # Left out, it would be the format of the launch, which may be "dummy".
            "load_format": "safetensors",
            "weight_version": name,
            "flush_cache": False,
        }
        seconds = self._options.update_deadline_seconds
        path = "/update_weights_from_disk"
        reply = await self._asked(lambda: self.server.post(path, body, seconds))
        if reply.get("success") is not True:
            msg = f"{self.url}{path}: {reply.get('message', reply)}"
            raise ServerRefused(msg)
        held = await self.weight_version()
        if held != name:
            msg = (
                f"{self.url} says it loaded version {name} and holds {held!r}; "
                "does another run use the server?"
            )
            raise WeightSyncError(msg)

    async def flush(self) -> None:
        """Forget all cached keys and values. Raises ServerRefused while requests run."""
        seconds = self._options.control_deadline_seconds
        await self._asked(lambda: self.server.tell("/flush_cache", {}, seconds))

    async def interrupt(self, call: OpenCall) -> None:
        """Return once ``call`` is over: with what it has sampled, or given up if nothing comes.

        Told until the call is over, because an abort that overtakes its request is forgotten.
        """
        try:
            async with asyncio.timeout(self._options.control_deadline_seconds):
                while not call.is_over.is_set():
                    await self._abort(call.rid)
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(call.is_over.wait(), ABORT_AGAIN_SECONDS)
        except (TimeoutError, GeneratorFailure):
            call.is_given_up = True
            call.http.cancel()
            await call.is_over.wait()

    async def _abort(self, rid: str) -> None:
        seconds = self._options.control_deadline_seconds
        await self._asked(lambda: self.server.tell("/abort_request", {"rid": rid}, seconds))

    async def is_well(self) -> bool:
        """Ask whether it still generates: it answers with a token, if it has none to make."""
        seconds = self._options.control_deadline_seconds
        try:
            await self._asked(lambda: self.server.see("/health_generate", seconds))
        except GeneratorFailure:
            return False
        return True

    async def _asked(self, call: Callable[[], Awaitable[T]]) -> T:
        """Ask what may be asked twice."""
        return await repeated(call, self._options.max_retries)


def usable(members: Sequence[Member], name: str | None) -> list[Member]:
    """Return those that hold version ``name`` and answer."""
    return [m for m in members if m.lost is None and m.loaded == name and name is not None]


def least_open(members: Sequence[Member], name: str | None) -> Member:
    """Return the usable member with the fewest open calls. Raises GeneratorFailure without one."""
    found = usable(members, name)
    if not found:
        causes = "; ".join(f"{m.url}: {m.lost or 'it holds other weights'}" for m in members)
        msg = f"no SGLang server is left: {causes}"
        raise GeneratorFailure(msg)
    return min(found, key=lambda member: len(member.calls))
