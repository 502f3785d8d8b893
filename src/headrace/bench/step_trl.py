"""The workload of `bench step` done by TRL's GRPOTrainer: the program of a process of its own.

Run as ``python -m headrace.bench.step_trl PLAN RESULT``. Measured: from the begin of a step to its
end, as TRL's callbacks say: generation, rewards and update. Its log, checkpoints, evaluation,
gradient checkpointing and bf16 are off; ``batch_size`` is the caller's to choose for the best.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from headrace.bench import step_workload as workload
from headrace.bench.step_reward import reward
from headrace.bench.trl_records import TrlPlan, TrlTimes

Text = str | Sequence[Mapping[str, str]]
"""Plain, or a conversation."""


def run(plan: TrlPlan) -> TrlTimes:
    """Train ``plan.num_steps`` steps."""
    import torch

    torch.set_num_threads(workload.NUM_THREADS)
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        clock = _step_clock()
        trainer = _trainer(plan, folder, clock)
        trainer.train()
        log = [line for line in trainer.state.log_history if "frac_reward_zero_std" in line]
    return TrlTimes(
        step_seconds=tuple(clock.seconds),
        completion_tokens=tuple(line["completions/mean_length"] for line in log),
        no_spread_share=tuple(line["frac_reward_zero_std"] for line in log),
    )


def _trainer(plan: TrlPlan, folder: str, clock: object) -> Any:  # noqa: ANN401 - untyped package
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # By name: a type checker must find the same here whether or not the extra is installed.
    trainer = importlib.import_module("trl").GRPOTrainer
    questions = list(plan.questions)
    prompts: list[Any] = questions
    if plan.is_chat:
        prompts = [[{"role": "user", "content": question}] for question in questions]
    return trainer(
        model=AutoModelForCausalLM.from_pretrained(plan.model, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(plan.model),
        args=_settings(plan, folder),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        reward_funcs=_rewards,
        callbacks=[clock],
    )


def _settings(plan: TrlPlan, folder: str) -> Any:  # noqa: ANN401 - untyped package
    return importlib.import_module("trl").GRPOConfig(
        output_dir=folder,
        max_steps=plan.num_steps,
        per_device_train_batch_size=plan.batch_size,
        gradient_accumulation_steps=workload.ROLLOUTS_PER_STEP // plan.batch_size,
        num_generations=workload.GROUP_SIZE,
        max_completion_length=plan.max_tokens,
        temperature=1.0,
        beta=0.0,
        learning_rate=workload.LEARNING_RATE,
        lr_scheduler_type="constant",
        shuffle_dataset=False,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        # Once a step, after its end: this is where lengths and spreads are read from.
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
    )


def _rewards(
    *, prompts: Sequence[Text], completions: Sequence[Text], **_columns: object
) -> list[float]:
    """`step_reward.reward` as TRL calls it: completions of a chat are conversations of one turn."""
    return [
        reward(_content(prompt), _content(completion), None, {})
        for prompt, completion in zip(prompts, completions, strict=True)
    ]


def _content(text: Text) -> str:
    return text if isinstance(text, str) else text[-1]["content"]


def _step_clock() -> Any:  # noqa: ANN401 - untyped package
    """Return a callback whose ``seconds`` holds the time of every step."""
    from transformers import TrainerCallback

    class StepClock(TrainerCallback):
        def __init__(self) -> None:
            self.seconds: list[float] = []
            self._began = 0.0

        def on_step_begin(self, *_: object, **__: object) -> None:
            self._began = time.monotonic()

        def on_step_end(self, *_: object, **__: object) -> None:
            self.seconds.append(time.monotonic() - self._began)

    return StepClock()


def main(plan_path: str, result_path: str) -> None:
    """Read the plan, run it, write what it took."""
    plan = TrlPlan.read(Path(plan_path))
    result = json.dumps(asdict(run(plan)))
    Path(result_path).write_text(result, encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
