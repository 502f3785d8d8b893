from __future__ import annotations

import pytest
import torch

from headrace.models.weights import copied_update, same_bits, weight_update


@pytest.mark.parametrize("shape", [(3, 64), (500, 192), (7, 5), (1 << 15,), (0, 64), ()])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_number_is_rounded_as_torch_rounds_it(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    # Bits of every kind: ordinary numbers, those below the normal ones, infinities.
    words = torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int64).to(torch.int32)
    masters = torch.where(words.view(torch.float32).isnan(), torch.inf, words.view(torch.float32))
    halves = torch.tensor([0x3F808000, 0x3F818000, 0x00000001, 0x00008000], dtype=torch.int32)
    edges = torch.cat((halves.view(torch.float32), torch.zeros(60))).view(1, 64)
    tensors = {"w": masters, "edges": edges, "turned": torch.randn(32, 16).t()}
    targets = {name: torch.empty(t.shape, dtype=dtype) for name, t in tensors.items()}
    update = copied_update(3, tensors, targets)
    expected = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    assert all(same_bits(update.tensors[name], tensor) for name, tensor in expected.items())
    assert update.checksum == weight_update(3, expected).checksum


def test_a_nan_stays_one() -> None:
    masters = torch.full((2, 64), torch.nan)
    masters.view(torch.int32)[1] += 1
    target = torch.empty(2, 64, dtype=torch.bfloat16)
    copied_update(1, {"w": masters}, {"w": target})
    assert bool(target.isnan().all())
