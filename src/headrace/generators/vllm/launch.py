"""The launch of vLLM in a thread, which can be given up at any moment and then leaves nothing."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.errors import GeneratorFailure
from headrace.generators.vllm.processes import FOLDER_PREFIX, ProcessTree, interrupts_kept_out
from headrace.generators.vllm.settings import VllmSettings, exported

END_SECONDS = 30.0
"""A killed process that has not gone by then hangs in the kernel."""
_TICK_SECONDS = 0.25
_ONE_AT_A_TIME = threading.Lock()
"""The environment, through which vLLM is told most things, belongs to the whole process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """A vLLM that came up."""

    client: Any
    """Its AsyncLLM."""
    roots: tuple[int, ...]
    """The engine cores, below which everything else is."""
    directory: Path
    """Where its sockets and temporary files are, and nothing of anybody else's."""


class Launch:
    """One launch; its thread belongs to it alone."""

    def __init__(self, settings: VllmSettings) -> None:
        self._settings = settings
        self._directory = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
        self._is_given_up = False
        self._launched: Launched | None = None
        self._is_over = threading.Event()

    async def run(self, timeout_seconds: float) -> Launched:
        """Return what came up. Raises GeneratorFailure; then, or cancelled, nothing stays behind.

        What a thread that cannot be ended still starts is killed as soon as it is there.
        """
        thread = asyncio.ensure_future(asyncio.to_thread(self._run))
        try:
            done, _ = await asyncio.wait({thread}, timeout=timeout_seconds)
        except BaseException:
            self._give_up()
            raise
        if not done:
            self._give_up()
            msg = (
                f"vLLM was not ready after generator.vllm.start_deadline_seconds = "
                f"{timeout_seconds:g}; raise it if the machine is slow"
            )
            raise GeneratorFailure(msg)
        try:
            return thread.result()
        except Exception as error:
            msg = f"vLLM did not start: {type(error).__name__}: {error}"
            raise GeneratorFailure(msg) from error

    def _run(self) -> Launched:
        try:
            with _ONE_AT_A_TIME:
                launched = self._launched = self._start()
        except BaseException:
            shutil.rmtree(self._directory, ignore_errors=True)
            raise
        finally:
            self._is_over.set()
        return launched

    def _start(self) -> Launched:
        """Import vLLM and start it."""
        variables = self._settings.environment() | {
            "TMPDIR": str(self._directory),
            "VLLM_RPC_BASE_PATH": str(self._directory),
        }
        with interrupts_kept_out(), exported(variables):
            client_type = _client_type()
            self._require_wanted()
            client = client_type.from_engine_args(_engine_arguments(self._settings.arguments()))
        processes = client.engine_core.resources.engine_manager.processes
        return Launched(
            client=client,
            roots=tuple(process.pid for process in processes),
            directory=self._directory,
        )

    def _require_wanted(self) -> None:
        if self._is_given_up:
            msg = "it was given up"
            raise GeneratorFailure(msg)

    def _give_up(self) -> None:
        """End what there is and what the thread will still start, without waiting for it."""
        self._is_given_up = True
        threading.Thread(target=self._clear_away, name="vllm-give-up", daemon=True).start()

    def _clear_away(self) -> None:
        while not self._is_over.wait(_TICK_SECONDS):
            # Killing what the thread waits for lets it end by itself.
            self._end_processes()
        self._end_processes()
        if self._launched is not None:
            end_client(self._launched)
        shutil.rmtree(self._directory, ignore_errors=True)

    def _end_processes(self) -> None:
        ProcessTree.with_variable("TMPDIR", str(self._directory)).end(END_SECONDS)


def end_client(launched: Launched) -> None:
    """Let the client give back what it holds, once its processes are dead."""
    resources = launched.client.engine_core.resources
    # What has happened is no accident that vLLM would have to report.
    resources.engine_dead = True
    launched.client.shutdown(0.0)


def _client_type() -> Any:  # noqa: ANN401 - vLLM's own
    from vllm.v1.engine.async_llm import AsyncLLM  # noqa: PLC0415 - takes seconds

    class Client(AsyncLLM):
        """Is shut down by `VllmEngine.end`, and not once more by the interpreter at its end."""

        def __del__(self) -> None:
            pass

    return Client


def _engine_arguments(arguments: dict[str, object]) -> Any:  # noqa: ANN401 - vLLM's own
    from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: PLC0415 - takes seconds

    return AsyncEngineArgs(**arguments)
