"""quantize and dequantize (docs/numerics.md, 2-7).

    x ─ transpose if axis=-2 ─ rotate if rht ─ pad K with +0 ─ A ─ block scales ─ codes
                                                                   └ eden: scales corrected, then rounded stochastically
A block that holds a NaN or an infinity is read as zeros, which gives the codes 0, and its scale is set to NaN last.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..policy import formats
from ..policy.formats import E4M3, Format
from ..policy.spec import Spec, as_spec
from . import hadamard
from .block_scale import Outer, e8m0_scales, enc, normalizer, nvfp4_scales, outer_scales
from .elements import (
    _fp32,
    decode_e2m1,
    decode_e4m3,
    decode_e5m2,
    decode_e8m0,
    encode_e2m1,
    encode_e2m1_stochastic,
    encode_e4m3,
    encode_e4m3_stochastic,
    encode_e5m2,
    encode_e5m2_stochastic,
    pack_nibbles,
    unpack_nibbles,
)
from .fp32 import at_most, divide, f32, from_bits, sum_in_order
from .philox import ROLES, block_bits, element_bits, usage

ENCODE = {
    "e2m1": (encode_e2m1, encode_e2m1_stochastic),
    "e4m3": (encode_e4m3, encode_e4m3_stochastic),
    "e5m2": (encode_e5m2, encode_e5m2_stochastic),
}
DECODE = {"e2m1": decode_e2m1, "e4m3": decode_e4m3, "e5m2": decode_e5m2}
EDEN_SWEEP_GAIN = 1.0067  # section 7
TILE = 16  # rows of a 16x16 tile


def quantize(
    x: torch.Tensor, spec: Spec | str, axis: int = -1, rng=None, role: str | int = "x", amax: torch.Tensor | None = None
):
    """x -> (codes, scales, global_scale).

    Args:
        x: fp32, bf16 or fp16, 1-D (one row) to N-D, any strides.
        spec: a Spec or its key.
        axis: -1, or -2 to quantize x.mT.
        rng: int64 tensor {seed, offset} or {seed, offset, row, k}, where the spec draws random bits.
        role: "x", "w", "dy" or 0, 1, 2: which random stream.
        amax: A given by the caller (fp32, shape of global_scale), instead of the measured one.

    Returns:
        codes: uint8 [.., rows, Kpad/2] (E2M1), or float8_e4m3fn / float8_e5m2 [.., rows, Kpad].
        scales: float8_e4m3fn / float8_e8m0fnu [.., rows, Kpad/block].
        global_scale: fp32, the decode multiplier: [] (tensor, pow2), [.., rows, 1] (row), [E, 1, 1] (expert), [0] (MX).
        Leading sizes and rows are those of the output: for axis -2, rows = the columns of x. A 1-D x has no rows axis.
    """
    spec = as_spec(spec)
    fmt = spec.fmt
    view = _rotated_view(x, spec, axis, rng)
    view = F.pad(view, (0, -view.shape[-1] % fmt.block))
    if fmt.has_global_scale:
        a = _amax(view, spec) if amax is None else f32(amax)
        outer = outer_scales(a, spec.scale, spec.pow2, eden=spec.is_eden)
    else:
        outer = None

    bad = _blocks(~torch.isfinite(view), spec, axis).any(dim=-1)
    bad = _per_row(bad, spec, view.shape[-2])
    view = torch.where(bad.repeat_interleave(fmt.block, dim=-1), 0.0, view)

    blocks = _blocks(view, spec, axis)
    if fmt.has_global_scale:
        scales = _per_row(nvfp4_scales(blocks, outer, spec.scale, spec.rounding), spec, view.shape[-2])
        multiplier = enc(scales, outer.decode)
    else:
        scales = e8m0_scales(blocks, fmt.element, spec.scale)
        multiplier = from_bits((254 - scales.to(torch.int64)) << 23)  # 2^(127-e), from bits
    scaled = view * multiplier.repeat_interleave(fmt.block, dim=-1)

    direction, role = _direction(axis), ROLES.get(role, role)
    rows, k = view.shape[:-1].numel(), view.shape[-1]  # rows count through a stack
    nearest, stochastic = ENCODE[fmt.element.name]
    if spec.rounding == "stochastic":
        random = element_bits(rng, rows, k, usage("element", direction, role)).view(view.shape)
        codes = stochastic(scaled, random)
    else:
        codes = nearest(scaled)
    if spec.is_eden:
        n = hadamard.effective_n(hadamard.parse(spec.rht)[0], k) if spec.rounding == "eden" else fmt.block
        random = block_bits(rng, rows, k, fmt.block, usage("scale", direction, role)).view(scales.shape)
        gain = f32(EDEN_SWEEP_GAIN if spec.scale == "sweep" else 1.0)
        scales = _eden_scales(view, codes, scales, outer, gain, n, fmt.block, random)
        outer = Outer(outer.encode, outer.decode * gain)

    scales = torch.where(bad, 0x7F if fmt.has_global_scale else 0xFF, scales).to(torch.uint8)
    codes = pack_nibbles(codes) if fmt.codes_per_byte == 2 else codes
    global_scale = outer.decode.clone() if fmt.has_global_scale else torch.empty(0)
    if x.dim() == 1:
        codes, scales = codes[0], scales[0]
        global_scale = global_scale[0] if spec.group == "row" else global_scale
    return codes.view(fmt.codes_dtype), scales.view(fmt.scale_dtype), global_scale


def amax_of(x: torch.Tensor, spec: Spec | str, axis: int = -1, rng=None) -> torch.Tensor:
    """A of section 2: max|x| over the finite values of each outer group (of the rotated values). fp32, shape of
    global_scale."""
    spec = as_spec(spec)
    if not spec.fmt.has_global_scale:
        return torch.empty(0)
    a = _amax(_rotated_view(x, spec, axis, rng), spec)
    return a[0] if x.dim() == 1 and spec.group == "row" else a


def dequantize(
    codes, scales, global_scale, format: Format | str, shape_k: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """x̂ = fl(q·fl(float(s)·global_scale)), [.., rows, shape_k], rounded last to `dtype`. Section 2, 3.

    Under an RHT these are the rotated values, padded to a multiple of 16: ask for that shape_k.
    """
    fmt = formats.get(format)
    q = elements_of(codes, fmt)
    s = scales_of(scales, fmt)
    if global_scale is not None and global_scale.numel():
        s = s * global_scale
    return (q * s.repeat_interleave(fmt.block, dim=-1))[..., :shape_k].to(dtype)


def elements_of(codes: torch.Tensor, fmt: Format) -> torch.Tensor:
    """fp32 element values [.., Kpad] of stored codes."""
    return DECODE[fmt.element.name](unpack_nibbles(codes) if fmt.codes_per_byte == 2 else codes)


def scales_of(scales: torch.Tensor, fmt: Format) -> torch.Tensor:
    """fp32 block scales of stored scale bytes, without the global scale."""
    return decode_e4m3(scales) if fmt.has_global_scale else decode_e8m0(scales)


def _eden_scales(r, codes, scales, outer: Outer, gain, n: int, block: int, random) -> torch.Tensor:
    """The stored scales of section 7: each n elements corrected by their S / gain, then rounded stochastically."""
    p = normalizer(outer.decode)
    r = r * p
    decoded = decode_e2m1(codes) * (decode_e4m3(scales) * outer.decode * p).repeat_interleave(block, dim=-1)
    over = sum_in_order((r * r).unflatten(-1, (-1, n)))
    under = sum_in_order((r * decoded).unflatten(-1, (-1, n)))
    usable = torch.isfinite(over) & torch.isfinite(under) & (over > 0) & (under > 0)
    correction = divide(torch.where(usable, divide(over, under), f32(1.0)), gain).repeat_interleave(n // block, dim=-1)
    return encode_e4m3_stochastic(at_most(decode_e4m3(scales) * correction, E4M3.max), random)


def _rotated_view(x: torch.Tensor, spec: Spec, axis: int, rng) -> torch.Tensor:
    """fp32 [.., rows, K]: what is quantized, contraction last."""
    view = _fp32(x)
    if _direction(axis):
        if x.dim() < 2:
            raise ValueError(f"axis=-2 needs at least 2 dimensions, got shape {tuple(x.shape)}")
        view = view.mT
    if x.dim() == 0:
        raise ValueError("a scalar has no axis to quantize along")
    view = view[None] if x.dim() == 1 else view
    if spec.group == "expert" and x.dim() != 3:
        raise ValueError(f"outer='expert' needs a stacked 3-D tensor, got shape {tuple(x.shape)}")
    if spec.rht != "none":
        view = hadamard.rht(view, *hadamard.parse(spec.rht), rng)
    return view


def _amax(view: torch.Tensor, spec: Spec) -> torch.Tensor:
    magnitude = torch.where(torch.isfinite(view), view.abs(), 0.0)
    dims = {"row": (-1,), "expert": (-2, -1)}.get(spec.group)
    if dims is None:
        return magnitude.max() if magnitude.numel() else torch.zeros(())
    shape = [1 if d - view.dim() in dims else size for d, size in enumerate(view.shape)]
    return magnitude.amax(dim=dims, keepdim=True) if magnitude.numel() else torch.zeros(shape)


def _blocks(view: torch.Tensor, spec: Spec, axis: int) -> torch.Tensor:
    """[.., rows, Kpad] -> [.., rows, Kpad/block, block]; tiles: [.., ⌈rows/16⌉, Kpad/16, 256].

    The elements of a tile stand in the row-major order of x, not of the view: so the sums, hence the bytes, of axis -2
    are those of axis -1, and one copy is the transpose of the other. Missing rows are zeros, which add nothing.
    """
    if spec.block != "16x16":
        return view.reshape(*view.shape[:-1], view.shape[-1] // spec.fmt.block, spec.fmt.block)
    *stack, rows, k = view.shape
    padded = F.pad(view, (0, 0, 0, -rows % TILE))
    tiles = padded.reshape(*stack, (rows + TILE - 1) // TILE, TILE, k // TILE, TILE).transpose(-3, -2)
    return (tiles.mT if _direction(axis) else tiles).flatten(-2)


def _per_row(per_block: torch.Tensor, spec: Spec, rows: int) -> torch.Tensor:
    """[.., blocks of rows, blocks] -> [.., rows, blocks]: a tile's value repeated for its 16 rows."""
    if spec.block != "16x16":
        return per_block
    return per_block.repeat_interleave(TILE, dim=-2)[..., :rows, :]


def _direction(axis: int) -> int:
    if axis not in (-1, -2):
        raise ValueError(f"axis must be -1 or -2, got {axis}")
    return -1 - axis
