"""How actors are started and asked: Ray's handles and references have no types of their own."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import ray
from ray.exceptions import RayError


def start_actor(kind: Any, *arguments: object, **options: object) -> Any:  # noqa: ANN401 - Ray's
    """Return the handle of a new actor of the class ``kind``, which ``ray.remote`` made one."""
    return kind.options(**options).remote(*arguments)


async def answer_of(reference: Any) -> Any:  # noqa: ANN401 - Ray's
    """Wait for what ``reference`` stands for; unblocked by the answer or by the actor's death."""
    return await reference


async def kill_actor(actor: Any) -> None:  # noqa: ANN401 - Ray's
    """Kill ``actor``; one that Ray knows no more is dead."""
    with contextlib.suppress(RayError, ValueError):
        await asyncio.to_thread(ray.kill, actor)


def one_line(error: BaseException) -> str:
    """Return what Ray says in a screenful as one line."""
    return " ".join(str(error).split()) or type(error).__name__
