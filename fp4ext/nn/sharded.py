"""A linear layer on DTensors: which product each rank makes, and what its result is of the whole.

With x [.., K], w [N, K] and y [.., N], each dimension of the mesh falls under one line of this table. R: each rank has
the whole; S(d): it has a shard along d; P: the sum over ranks is the whole.

    x      w     y      dx     dw    db     what users call it
    R      R     R      R      R     R      replicated
    S(d)   R     S(d)   S(d)   P     P      data or sequence parallel (d is no contraction)
    R      S(0)  S(-1)  P      S(0)  S(0)   column-wise tensor parallel
    S(-1)  S(1)  P      S(-1)  S(1)  R      row-wise tensor parallel

Where the placements of x and w stand in no line, x is redistributed to fit w: a quantizer is not linear, so a partial
x is summed first. Local products are those of the plain layer on each rank's shards (shards.py); only DTensor
communicates, and where it does so is as for torch's own linear layers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from ..errors import Refused
from ..functional.autograd import Context
from .shards import groups_key, shares_amax

Whole = Callable[[Tensor], Tensor]


def operands(
    x: Tensor, w: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, tuple[int, ...], str, Whole]:
    """What this rank multiplies, and what its product is.

    Args:
        x, w, bias: DTensors on one mesh. x [.., K], w [N, K], bias [N].

    Returns:
        The local x, w and bias, through which gradients flow back to the DTensors; `place` and `groups` of their
        Shards; the function that makes a DTensor [.., N] of the rank's product.

    Raises:
        Refused: a plain tensor beside a DTensor, meshes that differ, a weight whose placement is in no line of the
            table above.
    """
    x, w = _checked("x", x), _checked("weight", w)
    bias = None if bias is None else _checked("bias", bias)
    mesh = w.device_mesh
    for name, t in {"x": x, "bias": bias}.items():
        if t is not None and t.device_mesh != mesh:
            raise Refused(f"{name} is on {t.device_mesh} and the weight on {mesh}; accepted: one mesh")
    last = x.dim() - 1
    lines = [_line(a, b, last) for a, b in zip(x.placements, w.placements, strict=True)]
    of_x, of_w, of_y, of_dx, of_dw, of_bias, of_db = (tuple(column) for column in zip(*lines, strict=True))
    x = x.redistribute(mesh, of_x)
    place, groups = _shards(x, w)
    local_x = x.to_local(grad_placements=of_dx)
    local_w = w.redistribute(mesh, of_w).to_local(grad_placements=of_dw)
    local_bias = None
    if bias is not None:
        local_bias = bias.redistribute(mesh, of_bias).to_local(grad_placements=of_db)
        if any(isinstance(p, Partial) and mesh.get_local_rank(i) for i, p in enumerate(of_y)):
            local_bias = _Elsewhere.apply(local_bias)  # type: ignore[no-untyped-call]

    shape = torch.Size((*x.shape[:-1], w.shape[0]))
    stride = torch.empty(shape, device="meta").stride()

    def whole(y: Tensor) -> Tensor:
        return DTensor.from_local(y, mesh, of_y, run_check=False, shape=shape, stride=stride)

    return local_x, local_w, local_bias, place, groups, whole


def _checked(name: str, t: Tensor) -> DTensor:
    if not isinstance(t, DTensor):
        raise Refused(
            f"{name} is a plain tensor beside a DTensor; accepted: x, weight and bias all DTensors (a layer under "
            "fully_shard is called through its module, which gathers the weight first)"
        )
    return t


def _line(x: Placement, w: Placement, last: int) -> tuple[Placement, ...]:
    """One line of the table: the placements of x, w, y, dx, dw, bias and db on one dimension of the mesh."""
    replicated = Replicate()
    if w.is_shard(0):
        return replicated, w, Shard(last), Partial(), w, Shard(0), Shard(0)
    if w.is_shard(1):
        return Shard(last), w, Partial(), Shard(last), w, replicated, replicated
    if not w.is_replicate():
        raise Refused(f"the weight is placed as {w}; accepted: Replicate(), Shard(0), Shard(1)")
    if x.is_shard() and not x.is_shard(last):
        return x, w, x, x, Partial(), replicated, Partial()
    return (replicated,) * 7


def _shards(x: DTensor, w: DTensor) -> tuple[tuple[int, ...], str]:
    """Where the local x and w, and the gradient of their product, lie in the wholes: place and groups of Shards.

    Leading dimensions of x are a batch, which one matrix [T, K] holds row by row, and x has a range of its rows where
    only the first of them is cut. Where another one is, rows are counted on from the first that this rank has: ranks
    draw apart, but not as one process would.
    """
    mesh, last = w.device_mesh, x.dim() - 1
    (x_at, x_groups), (w_at, w_groups) = _cuts(x), _cuts(w)
    row = 0
    for d in range(last):
        row = row * x.shape[d] + x_at[d]
    tokens = [group for d in range(last) for group in x_groups[d]]
    cuts = tokens, x_groups[last], w_groups[0], w_groups[1], tokens, w_groups[0]
    shared = [role for role in ("x", "w", "dy") if shares_amax(role)]
    names = [mesh.get_group(i).group_name for i in range(mesh.ndim)]
    return (row, x_at[last], *w_at, row, w_at[0]), groups_key(names, cuts, shared)


def _cuts(t: DTensor) -> tuple[list[int], list[list[str]]]:
    """For each dimension of t: the place of this rank's first element, and the groups over which it is cut.

    DTensor cuts as torch.chunk does: every shard has ceil(size / ranks) elements, the last ones fewer.
    """
    at, sizes = [0] * t.dim(), list(t.shape)
    groups: list[list[str]] = [[] for _ in t.shape]
    for i, placement in enumerate(t.placements):
        if not placement.is_shard():
            continue
        if type(placement) is not Shard:
            raise Refused(f"a tensor is placed as {placement}; accepted: Replicate(), Shard(d), Partial()")
        d, ranks, rank = placement.dim % t.dim(), t.device_mesh.size(i), t.device_mesh.get_local_rank(i)
        chunk = -(-sizes[d] // ranks)
        start = min(rank * chunk, sizes[d])
        at[d] += start
        sizes[d] = min(chunk, sizes[d] - start)
        groups[d].append(t.device_mesh.get_group(i).group_name)
    return at, groups


class _Elsewhere(torch.autograd.Function):
    """Zeros in place of a bias that another rank adds, so that the sum over ranks has it once; its gradient is every
    rank's."""

    @staticmethod
    def forward(ctx: Context, bias: Tensor) -> Tensor:
        return torch.zeros_like(bias)

    @staticmethod
    def backward(ctx: Context, db: Tensor) -> Tensor:
        return db
