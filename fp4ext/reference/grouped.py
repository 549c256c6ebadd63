"""grouped_quantize and grouped_gemm: each expert's matrices on their own (section 9)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..policy import formats
from ..policy.spec import as_spec
from .gemms import gemm
from .philox import Rng
from .quantization import quantize


def grouped_quantize(x: torch.Tensor, spec, offsets: torch.Tensor | None = None, axis: int = -1, rng=None, role="x"):
    """(codes, scales, global_scale) as the op gives them.

    x [T, K] with offsets, axis -1: [T, ⌈K⌉] and global_scale [T, 1]; axis -2: [K, columns], experts side by side, and
    [E, 1, 1] ([E, K, 1] for outer="row"). x [E, N, K] without offsets: a stack, and [E, 1, 1] ([E, rows, 1]).
    """
    spec = as_spec(spec).of_one_expert()
    ragged, k = offsets is not None, x.shape[-1]
    matrices = _rows(x, offsets) if ragged else list(x)
    parts, row = [], 0
    for e, matrix in enumerate(matrices):
        first = e * k if axis == -2 else row
        state = None if rng is None else Rng.of(rng)
        state = state and Rng(state.seed, state.offset, state.row + first, state.k)
        parts.append([*quantize(matrix, spec, axis, state, role), matrix.shape[0]])
        row += matrix.shape[0]
    codes, scales, outer, counts = zip(*parts, strict=True)
    if not spec.fmt.has_global_scale:
        outer = torch.empty(0)
    elif ragged and axis == -1:
        each = [g.expand(n, 1) for g, n in zip(outer, counts, strict=True)]
        outer = torch.cat([*each, torch.ones(x.shape[0] - row, 1)])
    else:
        outer = torch.stack([g.reshape(-1, 1) for g in outer])
    if not ragged:
        return _stack(codes), _stack(scales), outer
    if axis == -1:
        missing = (0, 0, 0, x.shape[0] - row)
        return _cat(codes, 0, missing), _cat(scales, 0, missing), outer
    block = spec.fmt.block
    columns = (x.shape[0] + len(matrices) * (block - 1)) // block * block
    rest = columns - sum(spec.fmt.padded(n) for n in counts)
    return _cat(codes, 1, (0, rest // spec.fmt.codes_per_byte)), _cat(scales, 1, (0, rest // block)), outer


def grouped_gemm(x, w, offsets: torch.Tensor, out_dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """x [T, K] and w [E, N, K] -> [T, N]; x [M, tokens] and w [N, tokens] -> [E, M, N].

    Operands as in gemm: (codes, scales, global_scale, format) as grouped_quantize gives them, or plain tensors.
    """
    ends = [0, *offsets.tolist()]
    spans = list(zip(ends[:-1], ends[1:], strict=True))
    codes_of = lambda t: t if isinstance(t, torch.Tensor) else t[0]  # noqa: E731
    if codes_of(w).dim() == 2:
        both = [(_tokens(x, e, spans), _tokens(w, e, spans)) for e in range(len(spans))]
        return torch.stack([gemm(a, b, None, out_dtype) for a, b in both])
    ys = [gemm(_slice(x, slice(a, b)), _slice(w, e), None, out_dtype) for e, (a, b) in enumerate(spans)]
    rest = torch.zeros(codes_of(x).shape[0] - ends[-1], ys[0].shape[1], dtype=out_dtype)
    return torch.cat([*ys, rest])


def _rows(x, offsets):
    ends = [0, *offsets.tolist()]
    return [x[a:b] for a, b in zip(ends[:-1], ends[1:], strict=True)]


def _slice(t, at):
    """Rows (a slice) of a matrix, or one matrix of a stack."""
    if isinstance(t, torch.Tensor):
        return t[at]
    codes, scales, outer, format = t
    return codes[at], scales[at], outer[at] if outer is not None and outer.numel() > 1 else outer, format


def _tokens(t, e: int, spans):
    """The tokens of expert e along the contraction."""
    if isinstance(t, torch.Tensor):
        return t[:, spans[e][0] : spans[e][1]]
    codes, scales, outer, format = t
    fmt = formats.get(format)
    start = sum(fmt.padded(b - a) for a, b in spans[:e])
    stop = start + fmt.padded(spans[e][1] - spans[e][0])
    cut = lambda c, per: c[:, start // per : stop // per]  # noqa: E731
    outer = outer[e] if outer is not None and outer.numel() > 1 else outer
    return cut(codes, fmt.codes_per_byte), cut(scales, fmt.block), outer, format


def _cat(parts, dim: int, pad) -> torch.Tensor:
    """Parts of a one-byte dtype, zeros after them."""
    return F.pad(torch.cat([p.view(torch.uint8) for p in parts], dim), pad).view(parts[0].dtype)


def _stack(parts) -> torch.Tensor:
    return torch.stack([p.view(torch.uint8) for p in parts]).view(parts[0].dtype)
