"""A server that answers as SGLang 0.5.23 documents, with a deterministic model instead of one.

Written down from SGLang's published source: endpoints, shapes, which keys exist, and the semantics
that a client can fall over: the front answers a pause before its scheduler, an abort before its
request is forgotten, a running request that is paused in place answers no abort, a flush with
requests active fails although the weights have changed. It is strict where SGLang is lenient:
a key that it does not know is refused everywhere. It samples for real: its tokens depend on the
weights it was given, on the keys and values they were computed under, on seed and position.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

VOCAB = 50
EOS = 2
Json = dict[str, Any]
Answer = tuple[int, "Json | bytes"]
Endpoint = Callable[[Json], Awaitable[Answer]]

SAMPLING_KEYS = frozenset(
    """max_new_tokens stop stop_token_ids stop_regex temperature top_p top_k min_p frequency_penalty
    presence_penalty repetition_penalty min_new_tokens n json_schema regex ebnf structural_tag
    ignore_eos skip_special_tokens spaces_between_special_tokens no_stop_trim stream_interval
    logit_bias sampling_seed custom_params beam_width watermark choice""".split()  # noqa: SIM905 - a table
)
GENERATE_KEYS = """rid input_ids sampling_params return_logprob logprob_start_len extra_key
    return_sampling_mask"""
UPDATE_KEYS = """model_path load_format abort_all_requests weight_version is_async torch_empty_cache
    keep_pause recapture_cuda_graph token_step flush_cache manifest"""
KEYS = {
    "/generate": frozenset(GENERATE_KEYS.split()),
    "/pause_generation": frozenset({"mode"}),
    "/continue_generation": frozenset({"torch_empty_cache"}),
    "/abort_request": frozenset({"rid", "abort_all"}),
    "/flush_cache": frozenset[str](),
    "/update_weights_from_disk": frozenset(UPDATE_KEYS.split()),
}


class Refused(Exception):
    """Answered with HTTP 400 and this message."""


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what announces itself by no event."""
    while not condition():  # noqa: ASYNC110 - as the docstring says
        await asyncio.sleep(0.001)


def decode(ids: Sequence[int]) -> str:
    """Token 0 is special and has no text; the others are a character each."""
    return "".join(chr(64 + token) for token in ids if token)


def digest(*parts: object) -> int:
    """A number that depends on all ``parts``."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big")


def logits_of(weights: int, context: Sequence[tuple[int, int]]) -> np.ndarray:
    """[VOCAB] after ``context``: each token with the weights that its key and value are of."""
    return np.random.default_rng(digest(weights, tuple(context))).normal(size=VOCAB) * 1.5


class Digests:
    """A model whose logits are noise that depends on its weights and on all its context."""

    eos = EOS

    def load(self, directory: Path) -> int:
        """Return a digest of the tensors in ``directory``."""
        files = sorted(directory.glob("*.safetensors"))
        tensors = {name: t for path in files for name, t in load_file(path).items()}
        return digest(*((name, tensors[name].tobytes()) for name in sorted(tensors)))

    def logits(self, weights: int, context: Sequence[tuple[int, int]]) -> np.ndarray:
        """Return [vocabulary]."""
        return logits_of(weights, context)


def uniform(seed: int, position: int) -> float:
    """In [0, 1), by seed and position in the sequence."""
    return digest("uniform", seed, position) / 2**64


@dataclass(eq=False)
class Running:
    """One request, from its arrival to its answer."""

    rid: str
    prompt: list[int]
    sampling: Json
    extra_key: str | None
    wants_support: bool
    answer: asyncio.Future[Json]
    output: list[int] = field(default_factory=list)
    logprobs: list[list[Any]] = field(default_factory=list)
    masks: list[list[int]] = field(default_factory=list)
    mask_logprobs: list[float] = field(default_factory=list)
    cached_weights: list[int] = field(default_factory=list)
    """Of every token in the cache, the weights it was computed under."""
    changes: list[tuple[str, int]] = field(default_factory=list)
    """(version, tokens) at each change of weights."""
    num_cached: int = 0
    is_to_abort: bool = False
    in_scheduler: bool = False


@dataclass
class Model:
    """Launch options that a client can see."""

    deterministic: bool = True
    overlap: bool = False
    tokenizer: bool = True
    max_support: int = 40
    max_req_input_len: int = 120
    speculative: str | None = None
    disaggregation: str = "null"
    preferred: Json | None = None
    architectures: tuple[str, ...] = ("LlamaForCausalLM",)
    api_key: str | None = None
    force_stream_interval: int = 4
    """Tokens after which the scheduler hands a silent request's tokens to the front; 50 there."""
    digests: Any = field(default_factory=Digests)
    """What computes: `Digests`, or one with its members."""


Fault = Callable[[asyncio.StreamWriter, Json], "Json | bytes | None"]
"""Given the connection and the true answer; returns what to send instead. None: nothing, ever."""


class ContractServer:
    """One server. Lives in the event loop of its test."""

    def __init__(self, model: Model | None = None) -> None:
        self.model = model or Model()
        self.port = 0
        self.seen: list[tuple[str, Json]] = []
        """Every request: path and body."""
        self.faults: dict[str, list[Fault]] = {}
        """By path, what happens to its next answers."""
        self.credit: int | None = None
        """Scheduler steps left; None has no end."""
        self.num_steps = 0
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.StreamWriter] = set()
        self._handlers: set[asyncio.Task[None]] = set()
        self._reset()

    def _reset(self) -> None:
        self.weights, self.version, self.front_version = 0, "default", "default"
        self.is_paused = self.front_paused = False
        self.front: dict[str, Running] = {}
        self.queue: list[Running] = []
        self.running: list[Running] = []
        self.cache: dict[tuple[str | None, tuple[int, ...]], int] = {}
        self._unpaused = asyncio.Event()
        self._unpaused.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Listen, on the port of the last time if there was one."""
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        self._steps = asyncio.create_task(self._schedule())

    async def die(self) -> None:
        """Drop everything at once, as a killed process does; `start` is a new launch."""
        if self._server is None:
            return
        self._server.close()
        self._server = None
        self._steps.cancel()
        for writer in self._connections:
            writer.transport.abort()
        for handler in self._handlers:
            handler.cancel()
        await asyncio.gather(*self._handlers, self._steps, return_exceptions=True)
        self._reset()

    async def stepped(self, number: int) -> None:
        """Wait until ``number`` more steps are made, and allow no more."""
        self.credit = (self.credit or 0) + number
        await until(lambda: not self.credit)

    def bodies(self, path: str) -> list[Json]:
        return [body for seen, body in self.seen if seen == path]

    # --- HTTP ---------------------------------------------------------------------------------

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handler = asyncio.create_task(self._serve(reader, writer))
        self._handlers.add(handler)
        handler.add_done_callback(self._handlers.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(writer)
        try:
            while await self._serve_one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self._connections.discard(writer)
            writer.close()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        except asyncio.IncompleteReadError:
            return False
        method, target, _ = head[0].split(" ")
        headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in head[1:] if line)}
        raw = await reader.readexactly(int(headers.get("content-length", 0)))
        path = target.split("?")[0]
        body: Json = json.loads(raw) if raw else {}
        self.seen.append((path, body))
        answering = asyncio.create_task(self._respond(method, path, body, headers))
        gone = asyncio.create_task(reader.read(1))
        try:
            await asyncio.wait({answering, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():  # the client hung up: SGLang drops its request
                self._drop(body.get("rid"))
                return False
            return await self._write(writer, path, *answering.result())
        finally:
            # The client sends its next request after this answer, so nothing of it was read here.
            for task in (answering, gone):
                task.cancel()
            await asyncio.gather(answering, gone, return_exceptions=True)

    async def _write(
        self, writer: asyncio.StreamWriter, path: str, status: int, content: Json | bytes
    ) -> bool:
        if self.faults.get(path):
            changed = self.faults[path].pop(0)(writer, content if isinstance(content, dict) else {})
            if changed is None:
                await asyncio.Event().wait()
            assert changed is not None
            content = changed
            if isinstance(content, dict) and "_status" in content:
                status = content.pop("_status")
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        writer.write(f"HTTP/1.1 {status} X\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)
        await writer.drain()
        return not writer.is_closing()

    async def _respond(self, method: str, path: str, body: Json, headers: dict[str, str]) -> Answer:
        key = self.model.api_key
        if key is not None and headers.get("authorization") != f"Bearer {key}":
            return 401, {"error": "Unauthorized"}
        endpoint = self._endpoints().get((method, path))
        if endpoint is None:
            return 404, {"detail": "Not Found"}
        if unknown := body.keys() - KEYS.get(path, frozenset(body)):
            return 400, {"error": {"message": f"unknown field {sorted(unknown)}"}}
        try:
            return await endpoint(body)
        except Refused as refused:
            return 400, {"error": {"message": str(refused)}}

    def _endpoints(self) -> dict[tuple[str, str], Endpoint]:
        return {
            ("GET", "/server_info"): self._server_info,
            ("GET", "/model_info"): self._model_info,
            ("GET", "/health_generate"): self._health,
            ("POST", "/generate"): self._generate,
            ("POST", "/pause_generation"): self._pause_request,
            ("POST", "/continue_generation"): self._continue,
            ("POST", "/abort_request"): self._abort,
            ("POST", "/flush_cache"): self._flush_request,
            ("POST", "/update_weights_from_disk"): self._update,
        }

    async def _health(self, _: Json) -> Answer:
        return 200, b""

    async def _pause_request(self, body: Json) -> Answer:
        self.pause(body.get("mode", "abort"))
        return 200, {"message": "Generation paused successfully.", "status": "ok"}

    async def _continue(self, _: Json) -> Answer:
        self.is_paused = self.front_paused = False
        self._unpaused.set()
        return 200, {"message": "Generation continued successfully.", "status": "ok"}

    async def _flush_request(self, _: Json) -> Answer:
        return (200, b"Cache flushed.\n") if self._flush() else (400, b"Flush cache failed.\n")

    async def _server_info(self, _: Json) -> Answer:
        return 200, {
            "version": "0.5.23",
            "enable_deterministic_inference": self.model.deterministic,
            "disable_overlap_schedule": not self.model.overlap,
            "skip_tokenizer_init": not self.model.tokenizer,
            "sampling_mask_max_tokens": self.model.max_support,
            "speculative_algorithm": self.model.speculative,
            "disaggregation_mode": self.model.disaggregation,
            "max_req_input_len": self.model.max_req_input_len,
            "internal_states": [{}],
        }

    async def _model_info(self, _: Json) -> Answer:
        return 200, {
            "model_path": "somewhere",
            "is_generation": True,
            "preferred_sampling_params": self.model.preferred,
            "weight_version": self.front_version,
            "architectures": list(self.model.architectures),
        }

    # --- the front ----------------------------------------------------------------------------

    async def _generate(self, body: Json) -> Answer:
        sampling = dict(body["sampling_params"])
        if unknown := sampling.keys() - SAMPLING_KEYS:
            msg = f"unknown field `{min(unknown)}`"
            raise Refused(msg)
        self._check(body, sampling)
        request = Running(
            rid=body["rid"],
            prompt=body["input_ids"],
            sampling=sampling,
            extra_key=body.get("extra_key"),
            wants_support=body.get("return_sampling_mask", False),
            answer=asyncio.get_running_loop().create_future(),
        )
        if request.rid in self.front:
            msg = f"Duplicate request ID: {request.rid}"
            raise Refused(msg)
        self.front[request.rid] = request
        try:
            while self.front_paused:
                await self._unpaused.wait()
            request.in_scheduler = True
            self.queue.append(request)
            return 200, await request.answer
        finally:
            self.front.pop(request.rid, None)

    def _check(self, body: Json, sampling: Json) -> None:
        if not body["return_logprob"] or body["logprob_start_len"] != -1:
            msg = "the contract is about log-probs of the completion"
            raise Refused(msg)
        if len(body["input_ids"]) >= self.model.max_req_input_len:
            msg = "The input is longer than the model's context length"
            raise Refused(msg)
        if not 0 <= sampling["min_new_tokens"] <= sampling["max_new_tokens"]:
            msg = "min_new_tokens must be in [0, max_new_tokens]"
            raise Refused(msg)
        needs_text = sampling.get("stop") or sampling["min_new_tokens"]
        if needs_text and not self.model.tokenizer:
            msg = "unavailable when skip_tokenizer_init=True"
            raise Refused(msg)
        if body.get("return_sampling_mask") and not 1 < sampling["top_k"] <= self.model.max_support:
            msg = f"return_sampling_mask requires 1 < top_k <= {self.model.max_support}"
            raise Refused(msg)

    async def _abort(self, body: Json) -> Answer:
        rid = body.get("rid", "")
        if rid not in self.front:
            return 200, b""  # forgotten: it may have overtaken its request
        for request in [r for r in self.queue if r.rid.startswith(rid)]:
            self.queue.remove(request)
            # What the scheduler has not handed over yet is lost.
            handed = len(request.output) // self.model.force_stream_interval
            self._reply(request, {"type": "abort", "message": "Abort in waiting queue"}, handed)
        for request in self.running:
            request.is_to_abort |= request.rid.startswith(rid)
        return 200, b""

    def _drop(self, rid: str | None) -> None:
        self.queue = [r for r in self.queue if r.rid != rid]
        self.running = [r for r in self.running if r.rid != rid]

    def pause(self, mode: str) -> None:
        """Stop, front and scheduler."""
        if mode not in {"abort", "retract", "in_place"}:
            msg = f"mode {mode}"
            raise Refused(msg)
        self.front_paused = self.is_paused = True
        self._unpaused.clear()
        if mode == "retract":
            for request in self.running:
                request.cached_weights = []
            self.queue += self.running
            self.running = []

    def _flush(self) -> bool:
        if self.running or (self.queue and not self.is_paused):
            return False
        self.cache = {}
        return True

    async def _update(self, body: Json) -> Answer:
        await until(lambda: self.is_paused or not self.front)  # the writer's lock
        try:
            self.weights = self._loaded(Path(body["model_path"]), body.get("load_format"))
        except (OSError, Refused) as error:
            return 400, {"success": False, "message": str(error), "num_paused_requests": 0}
        version = body.get("weight_version")
        if version is not None and version != self.version:
            for request in [*self.running, *self.queue]:
                if request.output:
                    request.changes.append((self.version, len(request.output)))
            self.version = version
        if body.get("flush_cache", True) and not self._flush():
            message = "Weights were updated, but the cache was not flushed"
            return 400, {"success": False, "message": message, "num_paused_requests": 0}
        if version is not None:
            self.front_version = version
        return 200, {"success": True, "message": "", "num_paused_requests": 0}

    def _loaded(self, directory: Path, load_format: str | None) -> int:
        if load_format not in {"auto", "safetensors"}:
            msg = f"load_format {load_format} would load something else"
            raise Refused(msg)
        json.loads((directory / "config.json").read_text())
        if not any(directory.glob("*.safetensors")):
            msg = f"no safetensors in {directory}"
            raise Refused(msg)
        weights: int = self.model.digests.load(directory)
        return weights

    # --- the scheduler ------------------------------------------------------------------------

    async def _schedule(self) -> None:
        while True:
            await asyncio.sleep(0)
            if self.is_paused or self.credit == 0 or not (self.queue or self.running):
                await asyncio.sleep(0.001)
                continue
            self.running += self.queue
            self.queue = []
            for request in list(self.running):
                self._step(request)
            self.num_steps += 1
            if self.credit is not None:
                self.credit -= 1

    def _step(self, request: Running) -> None:
        """One token. Context that is not in the request's cache is computed now, or found."""
        self._prefill(request)
        context = list(zip(request.prompt + request.output, request.cached_weights, strict=True))
        self._sample(request, self.model.digests.logits(self.weights, context), len(context))
        if reason := self._finish_reason(request):
            self.running.remove(request)
            self._reply(request, reason, None)

    def _prefill(self, request: Running) -> None:
        tokens = tuple(request.prompt + request.output)
        is_new = not request.cached_weights
        for end in range(len(request.cached_weights) + 1, len(tokens) + 1):
            key = (request.extra_key, tokens[:end])
            is_found = is_new and key in self.cache
            computed_under = self.cache[key] if is_found else self.weights
            self.cache[key] = computed_under
            request.cached_weights.append(computed_under)
            request.num_cached += is_found and end <= len(request.prompt)

    def _sample(self, request: Running, logits: np.ndarray, position: int) -> None:
        sampling = request.sampling
        for token, bias in sampling.get("logit_bias", {}).items():
            logits[int(token)] += bias
        if len(request.output) < sampling["min_new_tokens"]:
            logits[[self.model.digests.eos, *sampling.get("stop_token_ids", [])]] = -np.inf
        greedy = sampling["temperature"] == 0
        scaled = logits if greedy else logits / sampling["temperature"]
        logprobs = scaled - np.logaddexp.reduce(scaled)
        kept = np.argsort(-logprobs, kind="stable")[: 1 if greedy else self._top_k(sampling)]
        kept = kept[logprobs[kept] >= logprobs[kept[0]] + np.log(max(sampling["min_p"], 1e-300))]
        among = logprobs[kept] - np.logaddexp.reduce(logprobs[kept])
        seed = sampling["sampling_seed"] if self.model.deterministic else self.num_steps
        drawn = np.searchsorted(np.cumsum(np.exp(among)), uniform(seed, position), side="right")
        chosen = min(int(drawn), len(kept) - 1)
        token = int(kept[chosen])
        request.output.append(token)
        request.logprobs.append([float(logprobs[token]), token, None])
        request.masks.append(sorted(kept.tolist()))
        request.mask_logprobs.append(float(among[chosen]))

    def _top_k(self, sampling: Json) -> int:
        return sys.maxsize if sampling["top_k"] == -1 else int(sampling["top_k"])

    def _finish_reason(self, request: Running) -> Json | None:
        sampling, output = request.sampling, request.output
        if request.is_to_abort:  # before any other end, as SGLang looks
            return {"type": "abort", "message": "Abort"}
        for stop in sampling.get("stop", []):
            if stop in decode(output):
                return {"type": "stop", "matched": stop}
        if output[-1] in {self.model.digests.eos, *sampling.get("stop_token_ids", [])}:
            return {"type": "stop", "matched": output[-1]}
        room = self.model.max_req_input_len + 4 - len(request.prompt)
        if len(output) >= min(sampling["max_new_tokens"], room):
            return {"type": "length", "length": len(output)}
        return None

    def _reply(self, request: Running, reason: Json, handed_intervals: int | None) -> None:
        shown = len(request.output)
        if handed_intervals is not None:
            shown = handed_intervals * self.model.force_stream_interval
        meta: Json = {
            "id": request.rid,
            "finish_reason": reason,
            "completion_tokens": shown,
            "weight_version": self.version,
            "weight_versions": self._spans(request, shown),
            "output_token_logprobs": request.logprobs[:shown],
            "output_token_logprobs_length": shown,
            "input_token_logprobs": [],
        }
        if handed_intervals is None:
            meta |= {"prompt_tokens": len(request.prompt), "cached_tokens": request.num_cached}
        if request.wants_support and handed_intervals is None:
            meta["output_token_sampling_mask"] = request.masks[:shown]
            meta["output_token_sampling_logprobs"] = request.mask_logprobs[:shown]
            meta["output_token_sampling_mask_length"] = shown
        output = request.output[:shown]
        if not request.answer.done():
            text = decode(output)
            request.answer.set_result({"text": text, "output_ids": output, "meta_info": meta})

    def _spans(self, request: Running, shown: int) -> list[Json]:
        spans: list[Json] = []
        for version, end in [*request.changes, (self.version, len(request.output))]:
            start = spans[-1]["end"] if spans else 0
            if spans and end <= start:
                continue
            spans.append({"version": version, "start": start, "end": end})
        visible = [span for span in spans if span["start"] < shown or span["start"] == 0]
        return [{**span, "end": min(span["end"], shown)} for span in visible]
