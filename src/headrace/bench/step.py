"""`bench step [--against trl]`: one training step of a real small model, and its gradient.

Measured: the seconds of a step of `step_workload` as the run itself records them (generation,
scoring, update, weights published), the median over all steps but the first of each process. With
a peer, in the same command on the same machine: headrace, the peer at each of its batch shapes, of
which the fastest counts, headrace again, so that a drift of the machine meets both. 16 rollouts a
pass was TRL's faster shape (64: 94 s a step where 16 took 82). Then the gradient of the first
recorded batch against `gradient.plain_gradient`. Not measured: loading, checkpoints,
held-out evaluation, learning (the reward has nothing to teach).
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median

from headrace.bench import step_workload as workload
from headrace.bench.command import run_headrace, run_module
from headrace.bench.result import Benchmark, Figures, Peers, Progress
from headrace.bench.trl_records import TrlPlan, TrlTimes
from headrace.errors import ConfigError
from headrace.models.catalogue import resolve_model
from headrace.monitors import read_rollouts, read_run
from headrace.monitors.run_directory import MetricsLine, rollout_file

NUM_MEASURED_STEPS = 2
TRL_BATCH_SIZES = (16,)

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
        recipe = workload.write_recipe(folder, model, _NUM_STEPS)
        steps = _run_headrace(recipe, folder / "first", progress)
        trl: dict[int, TrlTimes] = {}
        if peers:
            trl = {size: _run_trl(model, size, folder, progress) for size in TRL_BATCH_SIZES}
            steps += _run_headrace(recipe, folder / "second", progress)
        error = _gradient_error(model, recipe, folder / "first", progress)
    return headrace_figures(steps) | {"gradient_relative_error": error} | trl_figures(steps, trl)


def require_trl() -> None:
    """Raise ConfigError unless TRL and what it needs can be imported."""
    missing = [name for name in _TRL_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        msg = (
            f"bench step --against trl: {', '.join(missing)} not installed; "
            "run `pip install -c constraints.txt -e '.[trl]'` in the source folder"
        )
        raise ConfigError(msg)


def _run_headrace(recipe: Path, output: Path, progress: Progress) -> list[MetricsLine]:
    """Return the measured steps of one run."""
    progress(f"headrace: {_NUM_STEPS} steps, the first is not counted")
    run_headrace(["train", str(recipe), "--output", str(output)], progress=progress)
    return list(read_run(output).steps[_WARM_UP_STEPS:])


def _run_trl(model: Path, batch_size: int, folder: Path, progress: Progress) -> TrlTimes:
    """Return all steps of one TRL run, the warm-up included."""
    progress(f"trl, {batch_size} rollouts a pass: {_NUM_STEPS} steps, the first is not counted")
    plan, result = folder / "trl-plan.json", folder / f"trl-{batch_size}.json"
    TrlPlan(model=str(model), num_steps=_NUM_STEPS, batch_size=batch_size).write(plan)
    run_module(
        "headrace.bench.step_trl",
        [str(plan), str(result)],
        progress=progress,
        environment={
            "OMP_NUM_THREADS": str(workload.NUM_THREADS),
            # Fetched models are local; a look at the network could only cost time.
            "HF_HUB_OFFLINE": "1",
        },
    )
    return TrlTimes.read(result)


def _gradient_error(model: Path, recipe: Path, output: Path, progress: Progress) -> float:
    import torch

    from headrace.bench.gradient import gradient_relative_error
    from headrace.config import load_config

    progress("gradient of the first batch, sequence by sequence in plain torch")
    torch.set_num_threads(workload.NUM_THREADS)
    # Version 0 sampled the first batch: the model as it lies on disk.
    groups = read_rollouts(rollout_file(output, "step", 1))
    return gradient_relative_error(model, load_config(recipe), groups)


def headrace_figures(steps: Sequence[MetricsLine]) -> dict[str, float]:
    """Return the figures of the measured steps, medians except for shares and lengths."""

    def values(name: str) -> list[float]:
        return [line.metrics[name] for line in steps]

    seconds = median(values("controller/time/step_seconds"))
    num_groups = workload.GROUPS_PER_STEP * len(steps)
    return {
        "step_seconds": seconds,
        "generate_seconds": median(values("controller/time/generate_seconds")),
        "update_seconds": median(values("controller/time/update_seconds")),
        "rollouts_per_second": workload.ROLLOUTS_PER_STEP / seconds,
        "num_groups_kept_share": sum(values("learner/groups/num_trained")) / num_groups,
        "completion_tokens_mean": fmean(values("generator/completion_tokens/mean")),
    }


def trl_figures(steps: Sequence[MetricsLine], runs: Mapping[int, TrlTimes]) -> dict[str, float]:
    """Return the figures of TRL at its faster batch size; none when it was not run."""
    if not runs:
        return {}
    seconds = {size: median(run.step_seconds[_WARM_UP_STEPS:]) for size, run in runs.items()}
    best = min(seconds, key=seconds.__getitem__)
    fastest = runs[best]
    return {
        "trl_step_seconds": seconds[best],
        "trl_rollouts_per_second": workload.ROLLOUTS_PER_STEP / seconds[best],
        "trl_batch_size": best,
        "trl_num_groups_kept_share": 1.0 - fmean(fastest.no_spread_share[_WARM_UP_STEPS:]),
        "trl_completion_tokens_mean": fmean(fastest.completion_tokens[_WARM_UP_STEPS:]),
        "speedup_vs_trl_fp32": seconds[best] / headrace_figures(steps)["step_seconds"],
    }


BENCHMARK = Benchmark(
    name="step",
    summary="one training step of SmolLM2-135M in fp32, alone or beside TRL",
    measure=measure,
    peers=("trl",),
)
