"""Make the bundled nano model and its task: sums with a running total that is never negative.

The task: ``8+2-5+9=`` has the answer ``14``. Three to five terms from 1 to 9. A problem is held
out if and only if a hash of its text says so, so that the two sides are disjoint by construction
and pre-training cannot have seen a held-out problem.

The model is pre-trained on completions that leave reinforcement learning something to find:

- ``14$``: off the cuff, the truth plus a uniform error;
- ``+2:10-5:5+9:14$``: written out, each carry and each borrow forgotten more often than not.

Imitation therefore stays under one half and its most likely completion has the wrong habit, yet
the right one is sampled often enough to be found.

Everything random comes from ``--seed``: the data are the same bytes on every machine, the model
on one machine with the same torch. This program uses nothing of the package.

    python scripts/make_nano.py
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    DynamicCache,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

EOS, PAD = "$", "_"
VOCABULARY = "0123456789+-=:" + EOS + PAD
"""One token per character; the id is the index."""
IDS = {character: index for index, character in enumerate(VOCABULARY)}

TERMS_SHARE = {3: 1, 4: 2, 5: 3}
"""Share of the problems by number of terms, in sixths."""
SIGNS = "+++--"
"""Each sign is one of these. More plus than minus: more carries, and fewer forgotten borrows that
happen to undo a forgotten carry, so that the wrong habit is seldom right."""
HELD_OUT_ONE_IN = 8
TRAIN_ROWS, HELD_OUT_ROWS = 8192, 512

OFF_THE_CUFF = 0.30
OFF_THE_CUFF_ERROR = 4
FORGET = 0.55

MAX_PROMPT, MAX_COMPLETION = 10, 24
"""Tokens. Five terms need 10 in the prompt and at most 21 written out."""
BATCH, LEARNING_RATE, WARMUP_STEPS = 128, 4e-3, 50
SAMPLES_PER_PROBLEM = 8
THREADS = 1
"""The order of a floating point sum depends on it: one is the same whatever the machine's load."""
REPOSITORY = Path(__file__).resolve().parent.parent


# --- the task ---------------------------------------------------------------------------------


def is_held_out(prompt: str) -> bool:
    """Return on which side of the split ``prompt`` lies: a function of its text alone."""
    digest = hashlib.blake2b(prompt.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_ONE_IN == 0


def signed_terms(prompt: str) -> list[str]:
    """Return ``["8", "+2", "-5"]`` of ``8+2-5=``."""
    return prompt.rstrip("=").replace("+", " +").replace("-", " -").split()


def running_totals(prompt: str) -> list[int]:
    """Return the totals after each term: the last is the answer."""
    terms = [int(term) for term in signed_terms(prompt)]
    return [sum(terms[: count + 1]) for count in range(len(terms))]


def draw_problem(rng: random.Random, n_terms: int, *, held_out: bool) -> str:
    """Draw terms and signs until the problem is on that side and its total never negative."""
    while True:
        digits = [str(rng.randint(1, 9)) for _ in range(n_terms)]
        prompt = digits[0] + "".join(rng.choice(SIGNS) + digit for digit in digits[1:]) + "="
        if is_held_out(prompt) == held_out and min(running_totals(prompt)) >= 0:
            return prompt


def draw_rows(rng: random.Random, n_rows: int, *, held_out: bool) -> list[dict[str, str]]:
    """Draw ``n_rows`` distinct problems, numbers of terms in exact shares, in random order."""
    prompts: dict[str, None] = {}
    for n_terms, share in TERMS_SHARE.items():
        quota = len(prompts) + round(n_rows * share / sum(TERMS_SHARE.values()))
        while len(prompts) < quota:
            prompts[draw_problem(rng, n_terms, held_out=held_out)] = None
    rows = [{"prompt": prompt, "answer": str(running_totals(prompt)[-1])} for prompt in prompts]
    assert len(rows) == n_rows, "the shares round to a different sum"  # noqa: S101 - impossible
    rng.shuffle(rows)
    return rows


# --- what the model imitates ------------------------------------------------------------------


def next_total(total: int, term: str, *, forget: bool) -> int:
    """Add ``term`` to ``total``; ``forget`` leaves the tens as they were: 8+2 is 0, 12-5 is 17.

    A total that was made wrong earlier can be less than what is taken off: that leaves 0. Else a
    forgotten carry and a forgotten borrow would make each other good, and be rewarded.
    """
    exact = total + int(term)
    if exact < 0:
        return 0
    tens = total // 10 if forget else exact // 10
    return 10 * tens + exact % 10


def written_out(rng: random.Random, prompt: str) -> str:
    """Return running totals such as ``+2:10-5:5+9:14``; mistakes are carried along."""
    first, *rest = signed_terms(prompt)
    total, text = int(first), ""
    for term in rest:
        total = next_total(total, term, forget=rng.random() < FORGET)
        text += f"{term}:{total}"
    return text + EOS


def off_the_cuff(rng: random.Random, prompt: str) -> str:
    """Return the answer plus a uniform error."""
    error = rng.randint(-OFF_THE_CUFF_ERROR, OFF_THE_CUFF_ERROR)
    return str(max(0, running_totals(prompt)[-1] + error)) + EOS


def draw_example(rng: random.Random) -> tuple[str, str]:
    """Draw a prompt from the train side and one completion from the mixture."""
    n_terms = rng.choices(list(TERMS_SHARE), list(TERMS_SHARE.values()))[0]
    prompt = draw_problem(rng, n_terms, held_out=False)
    habit = off_the_cuff if rng.random() < OFF_THE_CUFF else written_out
    return prompt, habit(rng, prompt)


def to_tensors(examples: Iterable[tuple[str, str]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and labels, each [B, T]; padded on the right, loss on completions only."""
    pairs = list(examples)
    length = max(len(prompt) + len(completion) for prompt, completion in pairs)
    tokens = torch.full((len(pairs), length), IDS[PAD])
    labels = torch.full((len(pairs), length), -100)
    for row, (prompt, completion) in enumerate(pairs):
        ids = torch.tensor([IDS[character] for character in prompt + completion])
        tokens[row, : len(ids)] = ids
        labels[row, len(prompt) : len(ids)] = ids[len(prompt) :]
    return tokens, labels


# --- the model --------------------------------------------------------------------------------


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character; another character is an error."""
    tokenizer = Tokenizer(models.WordLevel(IDS))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
        model_max_length=64,
    )


def make_model() -> LlamaForCausalLM:
    """Return an untrained model with 0.64 million weights in fp32."""
    config = LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=IDS[EOS],
        pad_token_id=IDS[PAD],
        dtype="float32",
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=IDS[EOS], pad_token_id=IDS[PAD])
    return model


def schedule(step: int, steps: int) -> float:
    """Return the factor on the learning rate: a linear start, then a cosine to zero."""
    return min(1.0, (step + 1) / WARMUP_STEPS) * 0.5 * (1 + math.cos(math.pi * step / steps))


def pretrain(model: LlamaForCausalLM, rng: random.Random, steps: int) -> None:
    """Imitate the mixture for ``steps`` batches of fresh examples."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    plan = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: schedule(step, steps))
    for step in range(steps):
        tokens, labels = to_tensors(draw_example(rng) for _ in range(BATCH))
        loss = model(input_ids=tokens, labels=labels, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        plan.step()
        if step % 100 == 0 or step == steps - 1:
            print(f"step {step:5d}  loss {loss.item():.4f}", flush=True)


# --- how good it is ---------------------------------------------------------------------------


def is_correct(completion: str, answer: str) -> bool:
    """Return whether it ended, and what follows the last colon (or all of it) is ``answer``."""
    text, ended, _ = completion.partition(EOS)
    return bool(ended) and text.rpartition(":")[2] == answer


@torch.no_grad()
def complete(
    model: LlamaForCausalLM, prompts: Sequence[str], generator: torch.Generator | None
) -> list[str]:
    """Complete prompts of one length at temperature 1, or greedily without ``generator``."""
    tokens = torch.tensor([[IDS[character] for character in prompt] for prompt in prompts])
    cache, drawn = DynamicCache(config=model.config), []
    for _ in range(MAX_COMPLETION):
        logits = model(input_ids=tokens, past_key_values=cache, use_cache=True).logits[:, -1]
        if generator is None:
            tokens = logits.argmax(-1, keepdim=True)
        else:
            tokens = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        drawn.append(tokens)
    return ["".join(VOCABULARY[token] for token in row) for row in torch.cat(drawn, 1).tolist()]


def accuracy(
    model: LlamaForCausalLM, rows: Sequence[dict[str, str]], generator: torch.Generator | None
) -> float:
    """Return the share of correct completions, one per row."""
    correct = 0
    for length in sorted({len(row["prompt"]) for row in rows}):
        group = [row for row in rows if len(row["prompt"]) == length]
        completions = complete(model, [row["prompt"] for row in group], generator)
        pairs = zip(completions, group, strict=True)
        correct += sum(is_correct(completion, row["answer"]) for completion, row in pairs)
    return correct / len(rows)


# --- what is written --------------------------------------------------------------------------

README = """\
# Nano

A task and a model small enough to learn it on a laptop. License: Apache-2.0.

- `train.jsonl` ({train_rows} problems), `heldout.jsonl` ({held_out_rows} problems): sums of 3 to 5
  terms from 1 to 9 whose running total is never negative, such as `8+2-5+9=` with the answer `14`;
  three signs in five are drawn as `+`.
  A problem is held out if the blake2 hash of its text is divisible by {one_in}: no problem is on
  both sides.
- `model/`: a Llama of {parameters:,} weights in fp32 with one token for each of the 16 characters
  `{vocabulary}` (`{eos}` ends, `{pad}` pads). Pre-trained on the train side only:
  {cuff:.0%} of the completions are an answer off the cuff (`14{eos}`, off by up to {error}), the
  rest written-out running totals (`+2:10-5:5+9:14{eos}`) in which each carry or borrow is
  forgotten with probability {forget}.

A completion is correct if it ends within {limit} tokens and what follows its last `:` (or all of
it) is the answer. Held-out accuracy before any reinforcement learning:

| decoding | accuracy |
| --- | --- |
| greedy | {greedy:.3f} |
| sampled at temperature 1 ({samples} per problem) | {sampled:.3f} |

Made on {date} with torch {torch} by

    python scripts/make_nano.py --seed {seed} --steps {steps} --date {date}
"""


def write_rows(path: Path, rows: Iterable[dict[str, str]]) -> None:
    """Write one JSON object per line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_readme(
    arguments: argparse.Namespace, model: LlamaForCausalLM, greedy: float, sampled: float
) -> None:
    """Write what was made, how, and how good it is."""
    text = README.format(
        train_rows=TRAIN_ROWS,
        held_out_rows=HELD_OUT_ROWS,
        one_in=HELD_OUT_ONE_IN,
        parameters=model.num_parameters(),
        vocabulary=VOCABULARY,
        eos=EOS,
        pad=PAD,
        cuff=OFF_THE_CUFF,
        error=OFF_THE_CUFF_ERROR,
        forget=FORGET,
        limit=MAX_COMPLETION,
        greedy=greedy,
        sampled=sampled,
        samples=SAMPLES_PER_PROBLEM,
        date=arguments.date,
        torch=torch.__version__,
        seed=arguments.seed,
        steps=arguments.steps,
    )
    (arguments.output / "README.md").write_text(text, encoding="utf-8")


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Make the bundled nano model and its task.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1400, help="pre-training batches")
    parser.add_argument("--output", type=Path, default=REPOSITORY / "src/headrace/recipes/nano")
    parser.add_argument("--date", default=datetime.now(UTC).date().isoformat(), help="for README")
    return parser.parse_args()


def main() -> None:
    """Write the data, pre-train and write the model, then measure it and say so."""
    arguments = parse_arguments()
    torch.set_num_threads(THREADS)
    torch.use_deterministic_algorithms(mode=True)
    torch.manual_seed(arguments.seed)
    arguments.output.mkdir(parents=True, exist_ok=True)

    # Streams of their own: more pre-training does not change the data.
    rng = random.Random(f"rows {arguments.seed}")  # noqa: S311 - no secret
    held_out = draw_rows(rng, HELD_OUT_ROWS, held_out=True)
    write_rows(arguments.output / "heldout.jsonl", held_out)
    write_rows(arguments.output / "train.jsonl", draw_rows(rng, TRAIN_ROWS, held_out=False))

    model = make_model()
    pretrain(model, random.Random(f"examples {arguments.seed}"), arguments.steps)  # noqa: S311
    model.eval().save_pretrained(arguments.output / "model")
    make_tokenizer().save_pretrained(arguments.output / "model")

    greedy = accuracy(model, held_out, None)
    generator = torch.Generator().manual_seed(arguments.seed)
    sampled = accuracy(model, held_out * SAMPLES_PER_PROBLEM, generator)
    print(f"held out: greedy {greedy:.3f}, sampled {sampled:.3f}")
    write_readme(arguments, model, greedy, sampled)


if __name__ == "__main__":
    main()
