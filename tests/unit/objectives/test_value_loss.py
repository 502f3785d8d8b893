"""The critic's loss against its formula, token by token."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.objectives.value_loss import value_loss

NUMBERS = st.floats(-3.0, 3.0, allow_nan=False, width=32)


def literal(value: float, target: float, before: float, clip: float) -> float:
    held = before + max(-clip, min(clip, value - before))
    return max((value - target) ** 2, (held - target) ** 2) / 2


@given(rows=st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), min_size=1), clip=st.floats(0.01, 2.0))
def test_the_clipped_loss_is_the_larger_of_the_two(
    rows: list[tuple[float, float, float]], clip: float
) -> None:
    values, targets, before = (torch.tensor(c, dtype=torch.float64) for c in zip(*rows))  # noqa: B905 - rows are triples
    mask = torch.ones(len(rows), dtype=torch.bool)
    found, _ = value_loss(values, targets, loss_mask=mask, values_before=before, clip=clip)
    expected = [literal(v, t, b, clip) for v, t, b in rows]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


def gradient(value: float, target: float, before: float, clip: float | None) -> float:
    leaf = torch.tensor([value], requires_grad=True)
    found, _ = value_loss(
        leaf,
        torch.tensor([target]),
        loss_mask=torch.tensor([True]),
        values_before=torch.tensor([before]),
        clip=clip,
    )
    (grad,) = torch.autograd.grad(found.sum(), leaf)
    return float(grad)


def test_a_value_beyond_its_range_has_no_gradient_towards_what_lies_further_on() -> None:
    assert gradient(1.0, 3.0, 0.0, None) == -2.0
    assert gradient(1.0, 3.0, 0.0, 2.0) == -2.0, "within the range"
    assert gradient(1.0, 3.0, 0.0, 0.5) == 0.0, "beyond it, and the target further on"
    assert gradient(1.0, -3.0, 0.0, 0.5) == 4.0, "beyond it, and the target the other way"


def test_what_a_masked_cell_holds_changes_neither_loss_nor_gradient() -> None:
    nan = float("nan")
    values = torch.tensor([1.0, nan, 2.0], requires_grad=True)
    targets, before = torch.tensor([0.0, nan, 0.0]), torch.tensor([0.0, nan, 1.5])
    mask = torch.tensor([True, False, True])
    for clip in (None, 1.0):
        found, _ = value_loss(values, targets, loss_mask=mask, values_before=before, clip=clip)
        (grad,) = torch.autograd.grad(found.sum(), values)
        assert found[1] == 0.0
        assert grad[1] == 0.0
        assert bool(found.isfinite().all())
        assert bool(grad.isfinite().all())
