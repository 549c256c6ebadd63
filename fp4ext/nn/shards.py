"""How one rank's shard of a linear layer's operands is quantized: where it lies in the whole, and who has the rest.

Two properties of a quantized operand belong to the whole matrix. Random bits hang on the logical place of an element
(docs/numerics.md, 5), so a shard passes the place of its first one. An outer scale is made of the amax of the whole, so
ranks that share it reduce their amaxes. With both, a shard has the bytes that one process would give to its part of the
whole matrix.

A shared amax costs one reduction of a few numbers per operand. Weights share it, so that the bytes that are trained are
those that are exported, whatever the mesh. Activations and gradients have a scale per shard, which is at least as
accurate; `share_amax` makes them share it too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group

from ..functional import ops
from ..functional.qtensor import QTensor
from ..functional.quantization import quantize
from ..policy.spec import Spec

_ROTATION = 128  # the longest RHT: a cut at its multiples leaves every rotated vector whole


@dataclass(frozen=True)
class Shard:
    """A shard of a matrix.

    Attributes:
        row, column: the place of its first element in the whole matrix.
        row_groups, column_groups: names of the process groups over which the rows and the columns are cut.
        shares_amax: whether the ranks of these groups give it one outer scale, that of the whole.
    """

    row: int = 0
    column: int = 0
    row_groups: tuple[str, ...] = ()
    column_groups: tuple[str, ...] = ()
    shares_amax: bool = False

    def quantize(self, t: Tensor | QTensor, spec: Spec, axis: int, rng: Tensor | None, role: str) -> QTensor:
        """fp4ext.quantize of this shard t [rows, columns] of the whole matrix, or of its transpose (axis -2)."""
        rng = self._state(rng, spec, axis)
        groups = self._sharing(spec, axis)
        if not groups:
            return quantize(t, spec, axis=axis, rng=rng, role=role)
        values = t.dequantize(torch.float32) if isinstance(t, QTensor) else t
        amax = ops.amax(values, spec.key, axis, rng)
        for group in groups:
            amax = torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce(amax, "max", group))
        q = quantize(values, spec, axis=axis, rng=rng, role=role, amax=amax)
        return QTensor(q.codes, q.scales, q.global_scale, q.format, q.shape, t.dtype)

    def _state(self, rng: Tensor | None, spec: Spec, axis: int) -> Tensor | None:
        """The RNG state {seed, offset, row, k} of a GEMM, for this shard.

        Blocks and rotated vectors that a cut divides are not those of the whole. Their bits then hang on their place in
        the shard, under a seed that no other shard has.
        """
        if rng is None or not spec.needs_rng:
            return None
        row, k = (self.row, self.column) if axis == -1 else (self.column, self.row)
        tiles_whole = spec.block != "16x16" or row % 16 == 0
        if tiles_whole and k % (_ROTATION if spec.rht else spec.fmt.block) == 0:
            return torch.cat((rng, _on_device(row, k, rng.device)))
        apart = (k * 0x9E3779B97F4A7C15 ^ row * 0xC2B2AE3D27D4EB4F) & 2**63 - 1  # odd constants
        return rng ^ _on_device(apart, 0, rng.device)

    def _sharing(self, spec: Spec, axis: int) -> tuple[str, ...]:
        """The process groups over which the amax of a quantization is reduced."""
        if not self.shares_amax or not spec.fmt.has_global_scale:
            return ()
        if spec.group == "row":
            return self.column_groups if axis == -1 else self.row_groups
        return (*self.row_groups, *self.column_groups)


@lru_cache(maxsize=4096)
def _on_device(a: int, b: int, device: torch.device) -> Tensor:
    return torch.tensor([a, b], dtype=torch.int64, device=device)


@dataclass(frozen=True)
class Shards:
    """The shards of x [T, K], w [N, K] and dy [T, N] that one rank has. They cross an op's schema in two arguments.

    Attributes:
        place: the row and the column of the first element of x, of w and of dy; symbolic where shapes are dynamic.
        groups: the names of the mesh's groups; then, for x, w and dy, the groups over which rows and columns are cut,
            and the roles whose amax is shared. Written by `groups_key`.
    """

    place: Sequence[int]
    groups: str

    def of(self, role: str) -> Shard:
        """The shard of "x", "w" or "dy"."""
        at = ("x", "w", "dy").index(role)
        _, cuts, shared = _parsed(self.groups)
        row, column = self.place[2 * at : 2 * at + 2]
        row_groups, column_groups = cuts[2 * at : 2 * at + 2]
        return Shard(row, column, row_groups, column_groups, role in shared)

    def draw_rank(self) -> int:
        """The first rank of the mesh, whose random bits all its ranks draw."""
        own = torch.distributed.get_rank()
        first = own
        for name in _parsed(self.groups)[0]:
            first -= own - min(torch.distributed.get_process_group_ranks(_resolve_process_group(GroupName(name))))
        return first


def groups_key(mesh: Sequence[str], cuts: Sequence[Sequence[str]], shared: Sequence[str]) -> str:
    """Shards.groups. mesh: the names of its groups. cuts: those that cut the rows and columns of x, w and dy."""
    return "/".join("+".join(names) for names in (mesh, *cuts, shared))


@lru_cache(maxsize=4096)
def _parsed(groups: str) -> tuple[tuple[str, ...], list[tuple[str, ...]], tuple[str, ...]]:
    mesh, *cuts, shared = (tuple(filter(None, part.split("+"))) for part in groups.split("/"))
    return mesh, cuts, shared


_share_all = False


@contextmanager
def share_amax(on: bool = True) -> Iterator[None]:
    """Within it, sharded activations and gradients are quantized with the outer scale of the whole tensor, too.

    Then each rank's codes and scales are those of one process with the whole batch and the whole weight, where cuts lie
    between blocks. It costs a reduction per operand. It is of the process, not of a thread.
    """
    global _share_all
    before, _share_all = _share_all, on
    try:
        yield
    finally:
        _share_all = before


def shares_amax(role: str) -> bool:
    """Whether an operand of this role is given the outer scale of the whole."""
    return role == "w" or _share_all
