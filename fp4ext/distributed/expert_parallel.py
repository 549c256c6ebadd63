"""Expert parallel: each rank of a mesh holds some of the experts, and tokens travel to theirs and back.

    parallelize_module(model, mesh, {"layers.0.experts": ExpertParallel()})

Every rank passes its own tokens, sorted by expert, with their offsets, as it would to whole experts, and gets their
results. An expert sees the tokens of all ranks together, in the order of the ranks: its outer scales and its products
are those of one process with the whole batch.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd, wait_tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from ..errors import Refused
from ..nn.experts import Experts


class ExpertParallel(ParallelStyle):
    """Shard the experts of a fp4ext.Experts over a mesh of one dimension, and exchange tokens around it.

    x [T, K] and offsets int32 [E] are this rank's tokens and the ends of all experts' rows among them; T and the
    offsets differ between ranks. The result is [T, K], zero past the last offset. Every rank of the mesh makes each
    call, with any number of tokens, none included.

    Raises:
        Refused: a module that is no fp4ext.Experts, a mesh that does not divide the number of experts or has several
            dimensions.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, Experts):
            raise Refused(f"ExpertParallel is given a {type(module).__name__}; accepted: fp4ext.Experts")
        experts, ranks = module.down_proj.shape[0], device_mesh.size()
        if device_mesh.ndim != 1 or experts % ranks:
            raise Refused(
                f"the mesh has {device_mesh.ndim} dimensions and {ranks} ranks, for {experts} experts; accepted: one "
                "dimension, whose size divides the number of experts"
            )
        exchange = _Exchange(device_mesh, experts)
        return distribute_module(module, device_mesh, _shard, exchange.to_experts, exchange.from_experts)


def _shard(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
    for key, p in list(module.named_parameters(recurse=False)):
        module.register_parameter(key, nn.Parameter(distribute_tensor(p, mesh, [Shard(0)])))


class _Exchange:
    """The way of one call's tokens to their experts, and back."""

    def __init__(self, mesh: DeviceMesh, experts: int):
        self.group, self.ranks, self.own = mesh.get_group(), mesh.size(), experts // mesh.size()
        self._back: list[tuple[Tensor, list[int], list[int], int]] = []

    def to_experts(self, module: nn.Module, inputs: tuple, mesh: DeviceMesh) -> tuple[Tensor, Tensor]:
        """(x, offsets) of this rank's tokens → those of this rank's experts."""
        x, offsets = inputs
        counts = torch.diff(offsets, prepend=offsets.new_zeros(1)).view(self.ranks, self.own)
        arriving = wait_tensor(all_to_all_single(counts, None, None, self.group))  # [from rank, own expert]
        # The number of tokens to and from each rank: sizes that the host has to know, one synchronization per call.
        leave, arrive = torch.stack((counts.sum(1), arriving.sum(1))).tolist()
        rows = all_to_all_single_autograd(x[: sum(leave)].contiguous(), arrive, leave, self.group)
        expert = torch.arange(self.own, device=x.device).repeat(self.ranks).repeat_interleave(arriving.flatten())
        order = expert.argsort(stable=True)  # of an expert's tokens those of rank 0 first
        self._back.append((order, leave, arrive, x.shape[0]))
        return wait_tensor(rows)[order], arriving.sum(0).cumsum(0).to(torch.int32)

    def from_experts(self, module: nn.Module, y: Tensor, mesh: DeviceMesh) -> Tensor:
        """The experts' results, each at the rank and row of its token."""
        order, leave, arrive, tokens = self._back.pop()
        rows = torch.empty_like(y).index_copy(0, order, y)
        home = wait_tensor(all_to_all_single_autograd(rows, leave, arrive, self.group))
        return nn.functional.pad(home, (0, 0, 0, tokens - home.shape[0]))
