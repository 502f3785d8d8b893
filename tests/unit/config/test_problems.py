"""What a faulty recipe is told: the key, the value, what is allowed, and all of it at once."""

# ruff: noqa: E501 - one case a line, so that the messages read as a table

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from headrace.config import ComponentConfig, RunConfig, WeightConfig, parse_config
from headrace.config.schema import NAME, all_keys, sections_in, tags
from headrace.errors import ConfigError

KINDS = tags(sections_in(ComponentConfig))


def tree(**settings: Any) -> dict[str, Any]:  # noqa: ANN401 - whatever TOML can hold
    return {
        "num_steps": 3,
        "model": {"path": "nano"},
        "data": {"train": {"type": "jsonl", "path": "train.jsonl"}},
        "verifier": {"components": {"a": {"kind": "exact"}}},
        **settings,
    }


def problems(recipe: dict[str, Any]) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        parse_config(recipe)
    return caught.value.problems


def train(**source: object) -> dict[str, Any]:
    return tree(data={"train": source})


def components(**named: object) -> dict[str, Any]:
    return tree(verifier={"components": named})


@pytest.mark.parametrize(
    ("recipe", "line"),
    [
        (
            tree(learner={"optimizer": {"learning_rat": 1e-5}}),
            "learner.optimizer.learning_rat: unknown key; did you mean learner.optimizer.learning_rate?",
        ),
        (
            tree(learning_rate=3),
            "learning_rate: unknown key; did you mean learner.optimizer.learning_rate?",
        ),
        (
            tree(learnin_rate=3),
            "learnin_rate: unknown key; did you mean learner.optimizer.learning_rate?",
        ),
        (tree(optimizer={}), "optimizer: unknown key; did you mean learner.optimizer?"),
        (
            tree(sampling={"group_size": 4}),
            "sampling.group_size: unknown key; did you mean group_size?",
        ),
        (
            components(a={"kind": "exact", "markr": "="}),
            "verifier.components.a.markr: unknown key; did you mean verifier.components.a.marker?",
        ),
        (
            components(exact={"kind": "exact", "markr": "="}),
            "verifier.components.exact.markr: unknown key; did you mean verifier.components.exact.marker?",
        ),
        (
            components(a={"kind": "exact", "units": "same"}),
            'verifier.components.a.units: unknown key; only "math" has it',
        ),
        (
            tree(checkpoint={"zebra": 1}),
            "checkpoint.zebra: unknown key; allowed here: every, keep",
        ),
    ],
)
def test_an_unknown_key_is_told_where_it_belongs(recipe: dict[str, Any], line: str) -> None:
    assert problems(recipe) == (line,)


@pytest.mark.parametrize(
    ("recipe", "line"),
    [
        (tree(seed="5"), 'seed = "5": must be a whole number, at least 0'),
        (tree(seed=True), "seed = true: must be a whole number, at least 0"),
        (tree(seed=1.5), "seed = 1.5: must be a whole number, at least 0"),
        (tree(seed=-1), "seed = -1: must be a whole number, at least 0"),
        (tree(group_size=0), "group_size = 0: must be a whole number, at least 1"),
        (tree(num_threads=0), "num_threads = 0: must be a whole number, at least 1, at most 4096, or null"),
        (tree(name=3), "name = 3: must be text in quotes"),
        (tree(name="a/b"), 'name = "a/b": must be text that matches ^[A-Za-z0-9][A-Za-z0-9._-]*$'),
        (tree(model={"path": ""}), 'model.path = "": must be text in quotes, not empty'),
        (tree(model={}), "model.path: missing, and it has no default; must be text in quotes, not empty"),
        (tree(learner=3), "learner = 3: must be a table"),
        (tree(model="nano"), 'model = "nano": must be a table with path'),
        (tree(sampling={"temperature": float("nan")}), "sampling.temperature = NaN: must be a number, at least 0, at most 100"),
        (tree(sampling={"temperature": 1e-38}), "sampling.temperature: 1e-38 is neither 0, which is greedy, nor at least 0.001"),
        (tree(sampling={"top_p": 0}), "sampling.top_p = 0: must be a number, above 0, at most 1"),
        (tree(sampling={"min_p": 1.0}), "sampling.min_p = 1.0: must be a number, at least 0, below 1"),
        (tree(sampling={"max_tokens": None}), "sampling.max_tokens = null: must be a whole number, at least 1"),
        (tree(sampling={"stop_strings": "x"}), 'sampling.stop_strings = "x": must be a list of texts in quotes, each not empty'),
        (tree(sampling={"stop_token_ids": ["a", 1, "b"]}), 'sampling.stop_token_ids = ["a", 1, "b"]: must be a list of whole numbers, each at least 0'),
        (tree(sampling={"allowed_token_ids": []}), "sampling: allowed_token_ids without banned_token_ids leaves no token to sample"),
        (tree(sampling={"banned_token_ids": [-1]}), "sampling.banned_token_ids = [-1]: must be a list of whole numbers, each at least 0"),
        (tree(sampling={"min_tokens": 9, "max_tokens": 8}), "sampling: min_tokens = 9 must be at least 0 and at most max_tokens = 8"),
        (tree(eval={"sampling": {"allowed_token_ids": [3], "banned_token_ids": [3]}}), "eval.sampling: allowed_token_ids without banned_token_ids leaves no token to sample"),
        (tree(sampling={"kept_support": True}), "sampling: kept_support = true without top_p, top_k and min_p: all tokens are kept, so there is nothing to record; set one of them or leave it out"),
        (tree(learner={"optimizer": {"betas": [0.9]}}), "learner.optimizer.betas = [0.9]: must be a list of 2 numbers, each at least 0, below 1"),
        (tree(objective={"advantage": "grp"}), 'objective.advantage = "grp": must be one of "grpo", "dr_grpo", "rloo", "rloo_std", "opo", "reinforce_pp", "reinforce_pp_baseline", "gae", "vtrace"'),
        (tree(objective={"loss": "ppo"}), 'objective.loss = "ppo": must be a table, or one of "ppo_clip", "reinforce", "cispo", "gspo", "gmpo", "sapo", "dppo_tv", "prime"'),
        (tree(data={"train": {"type": "jsonl", "path": "x"}, "shuffle": "no"}), 'data.shuffle = "no": must be true or false'),
        (tree(eval={"sampling": {"top_p": 2}}), "eval.sampling.top_p = 2: must be a number, above 0, at most 1"),
        (tree(eval={"pass_at_k": [9]}), "eval.pass_at_k = [9]: each must lie between 1 and eval.num_rollouts = 4"),
        (tree(eval={"greedy": False, "num_rollouts": 0}), "eval.greedy = false with eval.num_rollouts = 0: would measure nothing; set either"),
        (train(path="x"), 'data.train.type: missing; must be one of "jsonl", "parquet", "hf_disk", "reasoning_gym"'),
        (train(type="csv"), 'data.train.type = "csv": must be one of "jsonl", "parquet", "hf_disk", "reasoning_gym"'),
        (train(type="jsonl"), "data.train.path: missing, and it has no default; must be text in quotes"),
        (train(type="jsonl", path=3), "data.train.path = 3: must be text in quotes"),
        (components(a={"kind": 3}), f"verifier.components.a.kind = 3: must be one of {KINDS}"),
        (components(a={}), f"verifier.components.a.kind: missing; must be one of {KINDS}"),
        (components(a=3), "verifier.components.a = 3: must be a table"),
        (components(), "verifier.components = {}: must be a table, not empty"),
        (components(a={"kind": "exact", "weight": 0}), "verifier.components: all have weight 0, so no reward could ever differ"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_told_what_is_allowed(recipe: dict[str, Any], line: str) -> None:
    assert problems(recipe) == (line,)


def test_a_long_wrong_value_is_quoted_only_in_part() -> None:
    (line,) = problems(tree(seed="x" * 500))
    assert len(line) < 150
    assert "...: must be" in line


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"num_epochs": 1}, "num_steps, num_epochs: give exactly one of them"),
        ({"num_steps": None}, "num_steps, num_epochs: give exactly one of them"),
        ({"group_size": 1}, 'group_size = 1 with objective.advantage = "grpo": a group of one'),
        ({"sampling": {"temperature": 0}}, "sampling.temperature = 0: every rollout of a group"),
        ({"sampling": {"top_p": 0.9}}, "sampling.top_p, top_k, min_p with objective.proximal"),
        ({"sampling": {"top_k": 5}}, "sampling.top_p, top_k, min_p with objective.proximal"),
        ({"sampling": {"min_p": 0.1}}, "sampling.top_p, top_k, min_p with objective.proximal"),
        (
            {"sampling": {"min_tokens": 4}},
            "sampling.min_tokens, allowed_token_ids, banned_token_ids",
        ),
        (
            {"sampling": {"allowed_token_ids": [4]}},
            "sampling.min_tokens, allowed_token_ids, banned",
        ),
        ({"sampling": {"banned_token_ids": [4]}}, "sampling.min_tokens, allowed_token_ids, banned"),
        ({"learner": {"num_minibatches": 2}}, "learner.num_minibatches = 2 with max_staleness = 0"),
        (
            {"learner": {"num_minibatches": 4}, "max_staleness": 3, "groups_per_step": 2},
            "learner.num_minibatches = 4 with groups_per_step = 2",
        ),
        (
            {"objective": {"proximal": "recompute"}, "max_staleness": 2},
            'objective.proximal = "recompute" and objective.correction = "none" with max_staleness = 2',
        ),
        (
            {"dynamic_sampling": {}, "group_size": 1, "objective": {"advantage": "reinforce_pp"}},
            "dynamic_sampling with group_size = 1: a group of one never has a spread",
        ),
        (
            {"dynamic_sampling": {}, "objective": {"advantage": "gae"}},
            'dynamic_sampling with objective.advantage = "gae": rewards are not compared within',
        ),
        (
            {"objective": {"critic": {"gamma": 0.9, "rho_bar": 2.0}}},
            'objective.critic.gamma, objective.critic.rho_bar with objective.advantage = "grpo": no',
        ),
        (
            {"objective": {"advantage": "gae", "critic": {"rho_bar": 2.0}}},
            'objective.critic.rho_bar with objective.advantage = "gae": nothing reads it',
        ),
        (
            {
                "objective": {
                    "advantage": "vtrace",
                    "loss": "reinforce",
                    "critic": {"gae_lambda": 0.9},
                }
            },
            'objective.critic.gae_lambda with objective.advantage = "vtrace": nothing reads it',
        ),
        (
            {"objective": {"advantage": "gae", "critic": {"value_clip": 0.2}}},
            "objective.critic.value_clip = 0.2 with learner.num_minibatches = 1: the only update",
        ),
        (
            {"objective": {"advantage": "gae", "loss": "gspo"}},
            'objective.loss = "gspo" with objective.advantage = "gae": its ratio is of a whole',
        ),
        (
            {"objective": {"advantage": "gae", "correction": {"off_policy_mask": 0.1}}},
            'objective.correction.off_policy_mask with objective.advantage = "gae": it goes by the',
        ),
        (
            {"objective": {"advantage": "vtrace"}},
            'objective.advantage = "vtrace" with objective.loss = "ppo_clip": its advantages hold',
        ),
        (
            {"objective": "impala", "sampling": {"top_p": 0.9}},
            'sampling.top_p, top_k, min_p with objective.advantage = "vtrace": the learner',
        ),
        (
            {"objective": {"correction": "tis"}},
            'objective.correction = "tis" with objective.proximal = "generator": the proximal',
        ),
        (
            {"objective": {"correction": {"count_rejected": False}}},
            "objective.correction.count_rejected = false: nothing is rejected",
        ),
        (
            {"objective": {"advantage": "reinforce_pp"}, "group_size": 1, "groups_per_step": 1},
            "group_size = 1 with groups_per_step = 1: a batch of one rollout has no spread",
        ),
        (
            {"objective": {"overlong": {"buffer_tokens": 300}}},
            "objective.overlong.buffer_tokens = 300 with sampling.max_tokens = 256: the",
        ),
        (
            {"objective": {"kl_estimator": "k2"}},
            'objective.kl_estimator = "k2" with objective.kl_coefficient = 0: nothing reads it',
        ),
        (
            {"objective": {"loss": "prime", "proximal": "recompute"}},
            'objective.loss = "dppo_tv" with objective.proximal = "recompute": it compares',
        ),
        (
            {
                "objective": {"loss": "reinforce", "proximal": "recompute", "correction": "tis"},
                "learner": {"num_minibatches": 2},
                "max_staleness": 1,
            },
            'objective.loss = "reinforce" with learner.num_minibatches = 2: it has no ratio',
        ),
        (
            {"objective": {"loss": {"type": "gmpo", "clip_low": 0.1}, "proximal": "recompute"}},
            'objective.loss.clip_low with objective.proximal = "recompute" and learner.num_mini',
        ),
        (
            {"objective": {"loss": {"type": "gspo", "level": "token"}}},
            'objective.loss.level = "token" with objective.correction = "none": where all tokens',
        ),
        (
            {"objective": {"loss": "reinforce", "proximal": "recompute"}},
            'objective.proximal = "recompute" with objective.loss = "reinforce" and objective.corr',
        ),
        (
            {"objective": {"proximal": "loglinear", "correction": "tis"}, "max_staleness": 1},
            'objective.proximal = "loglinear" with max_staleness = 1: where a token is at most',
        ),
        (
            {"objective": {"proximal": "loglinear"}, "max_staleness": 2},
            'objective.proximal = "loglinear" and objective.correction = "none" with max_staleness',
        ),
        (
            {
                "objective": {"proximal": "loglinear", "correction": {"m2po": 0.04}},
                "max_staleness": 2,
            },
            'objective.correction.m2po with objective.proximal = "loglinear": it chooses among',
        ),
        (
            {"pipeline": {"depth": 3}, "max_staleness": 1},
            "pipeline.depth = 3 with max_staleness = 1 and learner.num_minibatches = 1: the last",
        ),
        (
            {"pipeline": {"late": "carry_over"}},
            'pipeline.late = "carry_over" with one batch under way: there is no later one',
        ),
        (
            {"pipeline": {"late": "carry_over", "depth": 1}, "max_staleness": 2},
            'pipeline.late = "carry_over" with one batch under way: there is no later one',
        ),
        (
            {"pipeline": {"late": "cancel"}},
            'pipeline.late = "cancel" with pipeline.surplus_groups = 0: only "cancel" gives',
        ),
        (
            {"eval": {"interleaved": True}},
            "eval.interleaved = true with max_staleness = 0: a synchronous run is the same",
        ),
        (
            {"pipeline": {"surplus_groups": 2}},
            'pipeline.late = "wait" with pipeline.surplus_groups = 2: only "cancel" gives',
        ),
        (
            {"objective": {"loss": "reinforce"}, "max_staleness": 1},
            'objective.loss = "reinforce" and objective.correction = "none" with max_staleness = 1',
        ),
        (
            {
                "objective": {"proximal": "recompute", "correction": {"veto": 1e-4}},
                "max_staleness": 1,
            },
            'objective.proximal = "recompute" and objective.correction with max_staleness = 1',
        ),
        (
            {
                "objective": {
                    "loss": "reinforce",
                    "kl_coefficient": 0.1,
                    "kl_estimator": "k1_reward",
                },
                "sampling": {"top_p": 0.9},
            },
            'sampling.top_p, top_k, min_p with objective.kl_estimator = "k1_reward": the',
        ),
        (
            {
                "objective": {"loss": "reinforce", "correction": {"off_policy_mask": 0.1}},
                "sampling": {"top_p": 0.9},
            },
            "sampling.top_p, top_k, min_p with objective.correction: the learner's log-probs",
        ),
    ],
)
def test_settings_that_cannot_be_meant_together_are_an_error(
    settings: dict[str, Any], line: str
) -> None:
    (problem,) = problems(tree(**settings))
    assert problem.startswith(line)


def test_a_raw_template_with_a_system_prompt_is_an_error() -> None:
    recipe = tree()
    recipe["data"] |= {"template": "raw", "system_prompt": "Be brief."}
    (problem,) = problems(recipe)
    assert problem.startswith('data.system_prompt: needs data.template = "chat"')


def test_a_user_template_without_the_prompt_is_an_error() -> None:
    recipe = tree()
    recipe["data"] |= {"user_template": "Solve it."}
    (problem,) = problems(recipe)
    assert problem.startswith("data.user_template: must contain {prompt}")


def test_filters_are_allowed_where_the_learner_recomputes_the_denominator() -> None:
    sampling = {"top_p": 0.9, "min_tokens": 2, "banned_token_ids": [5]}
    parse_config(tree(sampling=sampling, objective={"proximal": "recompute"}))


TIS = {"proximal": "recompute", "correction": "tis"}


@pytest.mark.parametrize(
    ("sampling", "names"),
    [
        ({"top_p": 0.9}, "sampling.top_p, top_k, min_p"),
        ({"top_k": 5}, "sampling.top_p, top_k, min_p"),
        ({"min_p": 0.1}, "sampling.top_p, top_k, min_p"),
        ({"min_tokens": 4}, "sampling.min_tokens, allowed_token_ids, banned_token_ids"),
        ({"allowed_token_ids": [4]}, "sampling.min_tokens, allowed_token_ids, banned_token_ids"),
        ({"banned_token_ids": [4]}, "sampling.min_tokens, allowed_token_ids, banned_token_ids"),
    ],
)
def test_a_correction_is_refused_where_not_every_token_could_be_sampled(
    sampling: dict[str, Any], names: str
) -> None:
    (problem,) = problems(tree(sampling=sampling, objective=TIS))
    assert problem.startswith(f'{names} with objective.correction = "tis": the learner')
    assert "the weights would be biased" in problem
    assert problem.endswith('objective.correction = "none"')


def test_a_correction_makes_recomputed_logprobs_good_for_rollouts_of_older_policies() -> None:
    parse_config(tree(objective=TIS, max_staleness=3))
    weight = {"level": "token", "mode": "truncate", "high": 5.0}
    own = {"proximal": "recompute", "correction": {"weight": weight}}
    parse_config(tree(objective=own, max_staleness=3, sampling={"forced_prefix": "So"}))
    for name in ("seq_tis", "seq_mis", "geo_rs", "icepop", "trl", "slime_mis"):
        parse_config(tree(objective={**TIS, "correction": name}, max_staleness=3))


@pytest.mark.parametrize("loss", ["ppo_clip", "cispo", "gspo", "gmpo", "sapo", "prime"])
def test_a_ratio_to_the_generator_is_good_for_rollouts_of_older_policies(loss: str) -> None:
    parse_config(tree(objective={"loss": loss}, max_staleness=3))


@pytest.mark.parametrize("objective", [{}, TIS, {"loss": "prime"}])
def test_filters_are_allowed_where_the_kept_tokens_are_recorded(objective: dict[str, Any]) -> None:
    sampling = {"top_p": 0.9, "min_tokens": 2, "banned_token_ids": [5], "kept_support": True}
    parse_config(tree(sampling=sampling, objective=objective))


def test_a_batch_estimator_takes_groups_of_one() -> None:
    parse_config(tree(objective={"advantage": "reinforce_pp"}, group_size=1))


def test_a_name_stands_for_its_table() -> None:
    named = parse_config(tree(objective={"loss": "prime", "correction": "none"})).objective
    table = {"type": "dppo_tv", "delta": 0.2, "anchor": 0.001}
    assert named == parse_config(tree(objective={"loss": table})).objective
    masked = parse_config(tree(objective={**TIS, "correction": "seq_mis"})).objective.correction
    assert masked.weight == WeightConfig(level="sequence", mode="mask", low=0.5, high=2.0)
    assert masked.rejects


@pytest.mark.parametrize("bound", [0, -1.0, 1e9, float("inf"), float("nan")])
def test_a_bound_that_no_weight_could_have_is_refused(bound: float) -> None:
    weight = {"level": "token", "mode": "truncate", "high": bound}
    correction = {"weight": weight}
    (problem,) = problems(tree(objective={"proximal": "recompute", "correction": correction}))
    assert problem.startswith("objective.correction.weight.high = ")
    assert problem.endswith("must be a number, above 0, at most 1e+08")


@pytest.mark.parametrize(
    ("part", "line"),
    [
        ({"weight": {"level": "token", "mode": "truncate", "low": 0.5, "high": 2.0}}, "nothing"),
        ({"weight": {"level": "token", "mode": "clip", "high": 2.0}}, "give low or use it"),
        ({"weight": {"level": "token", "mode": "mask", "low": 3.0, "high": 2.0}}, "not below"),
        (
            {"rejection": {"divergence": "k3", "reduction": "sum", "low": 0.5, "high": 2.0}},
            "never negative",
        ),
        ({"rejection": {"divergence": "k1", "reduction": "sum", "high": 0.5}}, "use 1 or more"),
    ],
)
def test_a_bound_that_nothing_reads_or_that_rejects_all_is_refused(
    part: dict[str, Any], line: str
) -> None:
    (problem,) = problems(tree(objective={"proximal": "recompute", "correction": part}))
    assert problem.startswith(f"objective.correction.{next(iter(part))}: ")
    assert line in problem


def test_a_name_that_is_none_is_told_which_there_are() -> None:
    (problem,) = problems(tree(objective={"loss": "ppo"}))
    assert problem.startswith('objective.loss = "ppo": must be a table, or one of "ppo_clip", ')
    (problem,) = problems(tree(objective={"correction": "mis"}))
    assert problem.startswith('objective.correction = "mis": must be a table, or one of "none", ')


def test_an_option_of_another_loss_is_told_where_it_belongs() -> None:
    (problem,) = problems(tree(objective={"loss": {"type": "cispo", "clip_high": 0.3}}))
    assert problem.startswith("objective.loss.clip_high: unknown key; only ")
    (problem,) = problems(tree(objective={"clip_high": 0.3}))
    assert problem == "objective.clip_high: unknown key; did you mean objective.loss.clip_high?"


def test_three_faults_are_three_lines_in_the_order_of_the_recipe() -> None:
    recipe = tree(
        learner={"optimizer": {"learning_rat": 1e-5}}, seed="one", data={"train": {"type": "csv"}}
    )
    assert [line.split(" ")[0] for line in problems(recipe)] == [
        "data.train.type",
        "learner.optimizer.learning_rat:",
        "seed",
    ]


def test_a_contradiction_is_found_beside_a_misspelt_key() -> None:
    recipe = tree(sampling={"temperatur": 1, "temperature": 0}, learner={"num_minibatches": 9})
    assert [line.split(" ")[0] for line in problems(recipe)] == [
        "sampling.temperatur:",
        "sampling.temperature",
        "learner.num_minibatches",
        "learner.num_minibatches",
    ]


def test_a_contradiction_is_not_claimed_of_a_key_that_is_itself_wrong() -> None:
    assert len(problems(tree(num_steps="many"))) == 1
    assert len(problems(tree(max_staleness="two", learner={"num_minibatches": 2}))) == 1


def test_an_empty_recipe_is_told_everything_it_needs() -> None:
    assert [line.split(":")[0] for line in problems({})] == [
        "model",
        "data",
        "verifier",
        "num_steps, num_epochs",
    ]


def faults(recipe: dict[str, Any]) -> tuple[str, ...]:
    try:
        parse_config(recipe)
    except ConfigError as error:
        return error.problems
    return ()


KEYS = sorted({path for path in all_keys(RunConfig) if NAME not in path})
VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
VALUES |= st.lists(VALUES, max_size=2) | st.dictionaries(st.sampled_from(["type", "x"]), VALUES)


@hypothesis_settings(deadline=None)
@given(st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=6))
def test_no_recipe_however_wrong_is_answered_with_anything_but_its_faults(
    settings: dict[tuple[str, ...], object],
) -> None:
    recipe = tree()
    for path, value in settings.items():
        node = recipe
        for part in path[:-1]:
            child = node.get(part)
            node[part] = node = child if isinstance(child, dict) else {}
        node[path[-1]] = value
    found = faults(recipe)
    assert all(line and "\n" not in line for line in found)
    assert len(set(found)) == len(found)


def test_a_faulty_recipe_is_refused_without_starting_anything() -> None:
    code = (
        "import sys, threading\n"
        "from headrace.config import parse_config\n"
        "from headrace.errors import ConfigError\n"
        "try:\n    parse_config({'seed': -1})\n"
        "except ConfigError as error:\n    print(len(error.problems), threading.active_count())\n"
        "print('multiprocessing' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["5", "1", "False"]


def test_unknown_keys_beside_a_missing_one_are_all_told() -> None:
    recipe = tree()
    recipe["data"]["eval"] = {"type": "jsonl", "file": "x", "prompt": "y"}
    told = problems(recipe)
    assert [line.split(":")[0] for line in told] == [
        "data.eval.file",
        "data.eval.prompt",
        "data.eval.path",
    ]


@pytest.mark.parametrize(
    ("recipe", "line"),
    [
        (
            tree(learner={"optimizer": {"betas": [0.9, 1.0]}}),
            "learner.optimizer.betas = [0.9, 1.0]: must be a list of 2 numbers, each at least 0, below 1",
        ),
        (
            tree(sampling={"stop_strings": ["a", ""]}),
            'sampling.stop_strings = ["a", ""]: must be a list of texts in quotes, each not empty',
        ),
        (
            tree(sampling={"stop_token_ids": [-1]}),
            "sampling.stop_token_ids = [-1]: must be a list of whole numbers, each at least 0",
        ),
        (
            tree(num_threads=99999999999),
            "num_threads = 99999999999: must be a whole number, at least 1, at most 4096, or null",
        ),
        (
            tree(sampling={"stop_token_ids": [99999999999999999999]}),
            "sampling.stop_token_ids = [99999999999999999999]: no whole number here may lie beyond 2^64",
        ),
        (
            tree(num_steps=-(2**65)),
            "num_steps = -36893488147419103232: no whole number here may lie beyond 2^64",
        ),
    ],
)
def test_a_value_that_no_run_could_use_is_told_its_range(recipe: dict[str, Any], line: str) -> None:
    assert problems(recipe) == (line,)


def test_objectives_of_more_than_a_loss_have_names() -> None:
    impala = parse_config(tree(objective="impala", max_staleness=3)).objective
    assert (impala.advantage, impala.loss.type, impala.has_critic) == ("vtrace", "reinforce", True)
    ppo = parse_config(tree(objective="ppo", group_size=1)).objective
    assert (ppo.advantage, ppo.loss.type) == ("gae", "ppo_clip")
    (problem,) = problems(tree(objective="grpo"))
    assert problem == 'objective = "grpo": must be a table, or one of "ppo", "impala"'


def test_a_critics_bars_are_in_order() -> None:
    own = {"advantage": "vtrace", "loss": "reinforce", "critic": {"c_bar": 2.0}}
    (problem,) = problems(tree(objective=own))
    assert problem.startswith("objective.critic: c_bar = 2 is above rho_bar = 1")


def test_a_token_ratio_of_a_whole_rollout_means_something_with_a_critic() -> None:
    parse_config(tree(objective={"advantage": "gae", "loss": {"type": "gspo", "level": "token"}}))
