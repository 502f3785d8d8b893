from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from cuda_lab import CudaLab, RecordingGraph, assert_alike, run_out, slow_paged_decode
from torch import Tensor

from headrace.generators.torch_engine import products
from headrace.generators.torch_engine.cpu.runner import FusedRunner
from headrace.generators.torch_engine.cuda.decode_graphs import DecodeGraphs
from headrace.generators.torch_engine.cuda.runner import find_paged_decode
from headrace.generators.torch_engine.cuda.table_attention import DecodeInputs
from headrace.generators.torch_engine.engine import Engine
from headrace.generators.torch_engine.forms import can_multiply_int8
from headrace.generators.torch_engine.runner import ModelRunner
from headrace.generators.torch_engine.runner_choice import choose_runner
from headrace.models.decoder import Decoder

CPU = torch.device("cpu")
SCRATCH = 9


@pytest.fixture(autouse=True)
def _no_packing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a device, matrices lie as they are published, not in panels."""
    monkeypatch.setattr(products, "can_hold", lambda *_: False)
    monkeypatch.setattr(products, "can_hold_int8", lambda *_: False)
    yield
    RecordingGraph.made = 0


@dataclass
class Passes:
    """Stands for a decoder: returns what it read, and remembers how many rows it was given."""

    sizes: list[int] = field(default_factory=list)
    inputs: list[DecodeInputs] = field(default_factory=list)

    def __call__(self, inputs: DecodeInputs) -> Tensor:
        self.sizes.append(inputs.numbers.shape[1])
        self.inputs.append(inputs)
        return torch.cat((inputs.numbers.T, inputs.table.long()), dim=1)


def graphs(forward: Callable[[DecodeInputs], Tensor], max_rows: int = 40) -> DecodeGraphs:
    return DecodeGraphs(
        forward, RecordingGraph, max_rows=max_rows, max_blocks=3, scratch=SCRATCH, device=CPU
    )


def numbers(count: int) -> Tensor:
    return torch.arange(100, 100 + 3 * count).view(3, count)


def test_rows_are_filled_up_to_the_next_size_and_only_real_ones_come_back() -> None:
    passes = Passes()
    decode = graphs(passes)
    for layout, count in enumerate([3, 4, 1, 17, 20, 40, 3]):
        table = torch.arange(2 * count).view(count, 2)
        found = decode(numbers(count), table, layout)
        assert torch.equal(found[:, :3], numbers(count).T)
        assert torch.equal(found[:, 3:5], table)
    assert passes.sizes == [4, 1, 32, 48]
    assert RecordingGraph.made == 4


def test_rows_of_nobody_read_and_write_the_scratch_block_alone() -> None:
    passes = Passes()
    decode = graphs(passes)
    decode(numbers(4), torch.ones(4, 2, dtype=torch.int64), 0)
    decode(numbers(3), torch.ones(3, 2, dtype=torch.int64), 1)
    (inputs,) = passes.inputs
    assert inputs.numbers[:, 3].tolist() == [0, 0, SCRATCH]
    assert int(inputs.table[3, 0]) == SCRATCH


def test_a_table_is_read_again_only_with_another_layout() -> None:
    decode = graphs(Passes())
    first, second = torch.zeros(2, 2, dtype=torch.int64), torch.ones(2, 2, dtype=torch.int64)
    decode(numbers(2), first, 0)
    assert torch.equal(decode(numbers(2), second, 0)[:, 3:5], first)
    assert torch.equal(decode(numbers(2), second, 1)[:, 3:5], second)


@pytest.fixture
def lab() -> CudaLab:
    """Of decoders whose tables, which are read whole here, are no longer than needed."""
    lab = CudaLab("cpu")
    lab.decoder = partial(lab.decoder, max_position_embeddings=96)  # type: ignore[method-assign]
    return lab


def graphed(lab: CudaLab, decoder: Decoder, **options: int) -> Engine:
    return lab.engine(decoder, slow_paged_decode, RecordingGraph, **options)


@pytest.mark.parametrize("has_graphs", [True, False])
@pytest.mark.parametrize(
    "changes",
    [{}, {"model_type": "mistral", "sliding_window": 5}, {"attention_bias": True}],
    ids=["llama", "sliding", "biases"],
)
def test_rollouts_are_those_of_the_plain_runner(
    lab: CudaLab, changes: dict[str, Any], *, has_graphs: bool
) -> None:
    decoder = lab.decoder(**changes)
    make_graph = RecordingGraph if has_graphs else None
    found = run_out(lab.engine(decoder, slow_paged_decode, make_graph), lab.requests())
    assert_alike(found, run_out(lab.plain_engine(decoder), lab.requests()))
    assert bool(RecordingGraph.made) == has_graphs


@pytest.mark.parametrize("max_rows", [3, 8])
def test_more_rows_than_the_largest_graph_has_are_decoded_without_one(
    lab: CudaLab, max_rows: int
) -> None:
    decoder = lab.decoder()
    found = run_out(graphed(lab, decoder, max_rows=max_rows), lab.requests())
    assert_alike(found, run_out(lab.plain_engine(decoder), lab.requests()))
    assert RecordingGraph.made == {3: 1, 8: 2}[max_rows]


def test_rollouts_are_preempted_and_go_on_where_blocks_are_few(lab: CudaLab) -> None:
    decoder = lab.decoder()
    engine = graphed(lab, decoder, num_blocks=40)
    assert_alike(
        run_out(engine, lab.requests()), run_out(lab.plain_engine(decoder), lab.requests())
    )
    assert engine.statistics.num_preemptions > 0


@pytest.mark.parametrize("is_quantized", [False, True])
def test_new_weights_are_sampled_from_by_graphs_captured_under_the_former_ones(
    lab: CudaLab, *, is_quantized: bool
) -> None:
    if is_quantized and not can_multiply_int8(CPU):
        pytest.skip("this processor has no exact products of eight bits")
    first, second = (lab.decoder(seed=n, attention_bias=True) for n in range(2))
    engine = graphed(lab, first, is_quantized=is_quantized)
    run_out(engine, lab.requests())
    made = RecordingGraph.made
    engine.load(lab.update(second, version=2))
    found = run_out(engine, lab.requests())
    assert RecordingGraph.made == made
    # The same arithmetic: eight bits make a step of what was a last bit.
    fresh = lab.engine(second, slow_paged_decode, None, is_quantized=is_quantized)
    assert_alike(found, run_out(fresh, lab.requests()))


def test_graphs_go_on_after_everything_was_cleared(lab: CudaLab) -> None:
    decoder = lab.decoder()
    engine = graphed(lab, decoder)
    engine.submit(lab.requests())
    for _ in range(4):
        engine.step()
    engine.clear()
    assert_alike(
        run_out(engine, lab.requests()), run_out(lab.plain_engine(decoder), lab.requests())
    )


def test_a_missing_triton_is_said_and_no_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(
        sys.modules, "headrace.generators.torch_engine.cuda.decode_kernel", raising=False
    )
    assert find_paged_decode() is None
    assert "install triton" in caplog.text


@pytest.mark.parametrize(("head_dim", "kind"), [(32, FusedRunner), (16, ModelRunner)])
def test_the_processor_keeps_its_own_runners(
    lab: CudaLab, head_dim: int, kind: type[ModelRunner]
) -> None:
    runner = choose_runner(
        lab.decoder(head_dim=head_dim).config,
        16,
        torch.float32,
        CPU,
        num_blocks=4,
        max_rows=4,
        is_quantized=False,
        batch_invariant=False,
    )
    assert type(runner) is kind
