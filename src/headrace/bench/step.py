"""`bench step [--against trl]`: one training step of a real small model, and its gradient.

Measured: the seconds of a step of `step_workload` as the run itself records them (generation,
scoring, update, weights published), the median over all steps but the first of each process: in
fp32 and in bf16 (sampling in bf16, learning in bf16 over masters in fp32), with a reward that keeps
every group, and with right answers paid, where groups without a spread are not trained on; then of
the nano model. Beside it the least time of a step that this machine's matrix products allow. With
a peer, in the same command on the same machine: headrace in fp32, the peer at each of its batch
shapes, of which the fastest counts, all the rest of headrace, and in fp32 again, so that a drift of
the machine meets both. 16 rollouts a pass was TRL's faster shape (64: 94 s a step where 16 took
82). TRL's time does not depend on the reward: it trains on every group. Last, the gradient of the
first recorded batch against `gradient.plain_gradient`. Not measured: loading, checkpoints,
held-out evaluation, learning.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median

from headrace.bench import step_workload as workload
from headrace.bench.command import run_headrace, run_module
from headrace.bench.result import Benchmark, Figures, Peers, Progress
from headrace.bench.step_workload import Workload
from headrace.bench.trl_records import TrlPlan, TrlTimes
from headrace.errors import ConfigError
from headrace.models.catalogue import resolve_model
from headrace.monitors import read_rollouts, read_run
from headrace.monitors.run_directory import MetricsLine, rollout_file

NUM_MEASURED_STEPS = 2
NUM_NANO_STEPS = 40
TRL_BATCH_SIZES, NANO_BATCH_SIZES = (16,), (64,)

_WARM_UP_STEPS = 1
_NUM_STEPS = _WARM_UP_STEPS + NUM_MEASURED_STEPS
_TRL_PACKAGES = ("trl", "accelerate", "datasets")


def measure(peers: Peers, progress: Progress) -> Figures:
    """Measure headrace, and TRL when asked to.

    Raises ModelError when the model was not fetched, ConfigError when TRL is not installed.
    """
    model = resolve_model(workload.MODEL)
    if peers:
        require_trl()
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as name:
        folder = Path(name)
        fp32 = Workload(model=model, num_steps=_NUM_STEPS)
        nano = Workload(
            model=resolve_model("nano"),
            num_steps=_WARM_UP_STEPS + NUM_NANO_STEPS,
            is_chat=False,
            max_tokens=workload.NANO_MAX_TOKENS,
        )
        first = _run_headrace(fp32, folder / "first", progress)
        trl: dict[str, Mapping[int, TrlTimes]] = {}
        if peers:
            trl["large"] = _run_trl(fp32, TRL_BATCH_SIZES, folder, progress)
            trl["nano"] = _run_trl(nano, NANO_BATCH_SIZES, folder, progress)
        runs = {
            name: _run_headrace(plan, folder / name, progress)
            for name, plan in _variants(fp32).items()
        }
        small = _run_headrace(nano, folder / "nano", progress)
        steps = first + (_run_headrace(fp32, folder / "second", progress) if peers else [])
        figures = headrace_figures(steps) | variant_figures(runs)
        figures["nano_rollouts_per_second"] = workload.ROLLOUTS_PER_STEP / _step_seconds(small)
        figures["flop_bound_ratio_fp32"] = _bound_ratio(model, folder / "first", steps)
        figures["gradient_relative_error"] = _gradient_error(model, folder / "first", progress)
        if trl:
            figures |= trl_figures(steps, trl["large"])
            figures |= speedups(runs, small, trl["large"], trl["nano"])
        return figures


def _variants(fp32: Workload) -> dict[str, Workload]:
    return {
        "bf16": replace(fp32, dtype="bfloat16"),
        "fp32_skip": replace(fp32, pays_answers=True),
        "bf16_skip": replace(fp32, dtype="bfloat16", pays_answers=True),
    }


def require_trl() -> None:
    """Raise ConfigError unless TRL and what it needs can be imported."""
    missing = [name for name in _TRL_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        msg = (
            f"bench step --against trl: {', '.join(missing)} not installed; "
            "run `pip install -c constraints.txt -e '.[trl]'` in the source folder"
        )
        raise ConfigError(msg)


def _run_headrace(plan: Workload, folder: Path, progress: Progress) -> list[MetricsLine]:
    """Return the measured steps of one run, whose recipe and output are in ``folder``."""
    kind = f"{plan.model.name}, {plan.dtype}, {'answers' if plan.pays_answers else 'all'} paid"
    progress(f"headrace ({kind}): {plan.num_steps} steps, the first is not counted")
    recipe, output = workload.write_recipe(folder, plan), folder / "run"
    run_headrace(["train", str(recipe), "--output", str(output)], progress=progress)
    return list(read_run(output).steps[_WARM_UP_STEPS:])


def _run_trl(
    plan: Workload, batch_sizes: Sequence[int], folder: Path, progress: Progress
) -> dict[int, TrlTimes]:
    """Return all steps of TRL's runs, the warm-up included, by rollouts a pass."""
    found = {}
    for size in batch_sizes:
        progress(f"trl ({plan.model.name}), {size} rollouts a pass: {plan.num_steps} steps")
        path, result = folder / "trl-plan.json", folder / "trl-times.json"
        TrlPlan(
            model=str(plan.model),
            num_steps=plan.num_steps,
            batch_size=size,
            max_tokens=plan.max_tokens,
            questions=tuple(question for question, _ in plan.questions),
            is_chat=plan.is_chat,
        ).write(path)
        run_module(
            "headrace.bench.step_trl",
            [str(path), str(result)],
            progress=progress,
            environment={
                "OMP_NUM_THREADS": str(workload.NUM_THREADS),
                # Fetched models are local; a look at the network could only cost time.
                "HF_HUB_OFFLINE": "1",
            },
        )
        found[size] = TrlTimes.read(result)
    return found


def _bound_ratio(model: Path, folder: Path, steps: Sequence[MetricsLine]) -> float:
    """Return the time of a step over the least that this machine's products allow."""
    import torch

    from headrace.bench.step_bound import operations_per_second, step_operations
    from headrace.models.decoder_config import DecoderConfig
    from headrace.models.hf_files import read_hf_config

    groups = read_rollouts(rollout_file(folder / "run", "step", _NUM_STEPS))
    operations = step_operations(DecoderConfig.from_hf(read_hf_config(model)), groups)
    return (
        _step_seconds(steps)
        * operations_per_second(torch.float32, workload.NUM_THREADS)
        / operations
    )


def _gradient_error(model: Path, folder: Path, progress: Progress) -> float:
    import torch

    from headrace.bench.gradient import gradient_relative_error
    from headrace.config import load_config

    progress("gradient of the first batch, sequence by sequence in plain torch")
    torch.set_num_threads(workload.NUM_THREADS)
    # Version 0 sampled the first batch: the model as it lies on disk.
    groups = read_rollouts(rollout_file(folder / "run", "step", 1))
    return gradient_relative_error(model, load_config(folder / "step.toml"), groups)


def headrace_figures(steps: Sequence[MetricsLine]) -> dict[str, float]:
    """Return the figures of the measured steps, medians except for shares and lengths."""
    seconds = _step_seconds(steps)
    return {
        "step_seconds": seconds,
        "generate_seconds": median(_values(steps, "controller/time/generate_seconds")),
        "update_seconds": median(_values(steps, "controller/time/update_seconds")),
        "rollouts_per_second": workload.ROLLOUTS_PER_STEP / seconds,
        "num_groups_kept_share": _kept_share(steps),
        "completion_tokens_mean": fmean(_values(steps, "generator/completion_tokens/mean")),
    }


def variant_figures(runs: Mapping[str, Sequence[MetricsLine]]) -> dict[str, float]:
    """Return seconds of a step and the share of groups trained on, by the name of a variant."""
    figures = {}
    for name, steps in runs.items():
        figures[f"step_seconds_{name}"] = _step_seconds(steps)
        figures[f"num_groups_kept_share_{name}"] = _kept_share(steps)
    return figures


def _values(steps: Sequence[MetricsLine], name: str) -> list[float]:
    return [line.metrics[name] for line in steps]


def _step_seconds(steps: Sequence[MetricsLine]) -> float:
    return median(_values(steps, "controller/time/step_seconds"))


def _kept_share(steps: Sequence[MetricsLine]) -> float:
    num_groups = workload.GROUPS_PER_STEP * len(steps)
    return sum(_values(steps, "learner/groups/num_trained")) / num_groups


def trl_figures(steps: Sequence[MetricsLine], runs: Mapping[int, TrlTimes]) -> dict[str, float]:
    """Return the figures of TRL at its faster batch size, and headrace's speed beside it."""
    best = _fastest(runs)
    seconds, fastest = _trl_seconds(runs), runs[best]
    return {
        "trl_step_seconds": seconds,
        "trl_rollouts_per_second": workload.ROLLOUTS_PER_STEP / seconds,
        "trl_batch_size": best,
        "trl_num_groups_kept_share": 1.0 - fmean(fastest.no_spread_share[_WARM_UP_STEPS:]),
        "trl_completion_tokens_mean": fmean(fastest.completion_tokens[_WARM_UP_STEPS:]),
        "speedup_vs_trl_fp32": seconds / _step_seconds(steps),
    }


def speedups(
    runs: Mapping[str, Sequence[MetricsLine]],
    nano: Sequence[MetricsLine],
    trl: Mapping[int, TrlTimes],
    trl_nano: Mapping[int, TrlTimes],
) -> dict[str, float]:
    """Return how much faster every variant is than TRL in fp32, and the nano model than TRL's."""
    large = {
        f"speedup_vs_trl_{name}": _trl_seconds(trl) / _step_seconds(steps)
        for name, steps in runs.items()
    }
    return large | {
        "trl_nano_rollouts_per_second": workload.ROLLOUTS_PER_STEP / _trl_seconds(trl_nano),
        "speedup_vs_trl_nano": _trl_seconds(trl_nano) / _step_seconds(nano),
    }


def _fastest(runs: Mapping[int, TrlTimes]) -> int:
    return min(runs, key=lambda size: median(runs[size].step_seconds[_WARM_UP_STEPS:]))


def _trl_seconds(runs: Mapping[int, TrlTimes]) -> float:
    return median(runs[_fastest(runs)].step_seconds[_WARM_UP_STEPS:])


BENCHMARK = Benchmark(
    name="step",
    summary="one training step of SmolLM2-135M and of the nano model, alone or beside TRL",
    measure=measure,
    peers=("trl",),
)
