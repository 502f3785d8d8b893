"""Which matrices of a decoder are cut between the ranks that compute one rollout together.

Megatron's cut (Shoeybi et al. 2019, arXiv:1909.08053): what reads a layer's input is cut by its
outputs, so each rank has whole heads and whole gates; what writes a layer's output is cut by its
inputs, and the sums are added up over the ranks. Embedding, norms and output layer are whole on
every rank. Norms of single heads see a part of the heads, so their gradient is a part too; of the
output layer, `split_head` says who computes what.
"""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from headrace.models.decoder import Decoder

_BY_OUTPUTS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_BY_INPUTS = ("o_proj", "down_proj")
_OF_HEADS = ("q_norm", "k_norm")


def split_matrices(decoder: Decoder, mesh: DeviceMesh) -> None:
    """Cut the matrices of ``decoder``, whose memory nothing was read into yet, over ``mesh``."""
    plan: dict[str, ParallelStyle] = {}
    for name, _ in decoder.named_modules():
        leaf = name.rpartition(".")[2]
        if leaf in _BY_OUTPUTS:
            plan[name] = ColwiseParallel()
        elif leaf in _BY_INPUTS:
            plan[name] = RowwiseParallel()
    # No rank sends its weights to the others: each reads its part from the files.
    parallelize_module(decoder, mesh, plan, src_data_rank=None)


def cut_dimension(name: str) -> int | None:
    """Return the dimension along which a parameter is cut; None where every rank has all of it."""
    module, _, kind = name.rpartition(".")
    leaf = module.rpartition(".")[2]
    if leaf in _BY_OUTPUTS:
        return 0
    return 1 if leaf in _BY_INPUTS and kind == "weight" else None


def sees_part_of_heads(name: str) -> bool:
    """Whether each rank computes a part of a parameter's gradient, to be added up."""
    return name.rpartition(".")[0].rpartition(".")[2] in _OF_HEADS
