"""The fake of each op, for torch.compile, torch.export and meta tensors: shapes and dtypes of its results, and errors.

A fake refuses what the op refuses, with a RuntimeError before anything runs. It cannot refuse what depends on values:
ends of experts that decrease, starts of attention, an amax or an rng out of range. All tensors of a call must be on one
device; a call with only some of them on meta would otherwise return uninitialized memory.

Source: csrc/ops/checks.h, stored.h, operand.h and the ops beside them, which check the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from ..policy import formats
from ..policy.formats import Format
from ..policy.spec import Spec

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PLAIN = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
ACCUMULATE = ("invariant", "fast")
BACKENDS = {"cpu": ("auto", "cpu"), "cuda": ("auto", "emulated", "fast", "native")}
MOST = 2**48  # the largest length that is given as a number

Quantized = tuple[Tensor, Tensor, Tensor]  # codes, block scales, outer scale (empty where the format has none)
Stored = tuple[Tensor, Tensor | None, Tensor | None, str]  # an operand: codes, block scales, outer scale, format
Shape = Sequence[int]

Fake = TypeVar("Fake", bound=Callable[..., object])
register_fake: Callable[[str], Callable[[Fake], Fake]] = torch.library.register_fake


def _require(condition: bool | torch.SymBool, given: str, accepted: str) -> None:
    torch._check(condition, lambda: f"{given}; accepted: {accepted}")  # type: ignore[no-untyped-call]  # torch's


def _one_of(name: str, value: str, accepted: Collection[str]) -> None:
    _require(value in accepted, f"unknown {name} {value!r}", ", ".join(accepted))


def _dtype(name: str, t: Tensor, *accepted: torch.dtype) -> None:
    _require(t.dtype in accepted, f"{name} is {t.dtype}", ", ".join(map(str, accepted)))


def _float(name: str, t: Tensor) -> None:
    _dtype(name, t, torch.float32, torch.bfloat16, torch.float16)


def _length(name: str, n: int) -> None:
    _require(n >= 0, f"{name} is {n}", "from 0 to 2^48")
    _require(n <= MOST, f"{name} is {n}", "from 0 to 2^48")


def _shape(name: str, t: Tensor, wanted: Shape) -> None:
    accepted = str(list(wanted))
    _require(t.dim() == len(wanted), f"{name} has shape {list(t.shape)}", accepted)
    for have, want in zip(t.shape, wanted, strict=True):
        _require(have == want, f"{name} has shape {list(t.shape)}", accepted)


def _one_device(x: Tensor, **others: Tensor | None) -> None:
    for name, t in others.items():
        if t is not None:
            _require(t.device == x.device, f"{name} is on {t.device}", f"{x.device}, where the input is")


# Quantization -------------------------------------------------------------------------------------------------------


def _spec(key: str, axis: int, rng: Tensor | None, role: int = 0) -> Spec:
    _require(key.count("/") == 5, f"spec is {key!r}", "six parts, format/scale/rounding/block/outer/rht")
    try:
        spec = Spec.parse(key)
    except ValueError as error:  # an op raises RuntimeErrors alone
        raise RuntimeError(str(error)) from None
    _require(axis in (-1, -2), f"axis is {axis}", "-1, -2")
    _require(0 <= role <= 2, f"role is {role}", "0 (x), 1 (w), 2 (dy)")
    if rng is None:
        _require(not spec.needs_rng, "rng is missing: this spec rounds or rotates at random", "int64 {seed, offset}")
    else:
        _dtype("rng", rng, torch.int64)
        _require(
            rng.dim() == 1 and rng.shape[0] in (2, 4), f"rng has shape {list(rng.shape)}", "[2] {seed, offset} or [4]"
        )
    return spec


def _global_shape(spec: Spec, shape: list[int]) -> list[int]:
    """The shape of the outer scales of a result of that shape."""
    return {"none": [0], "row": [*shape[:-1], 1], "expert": [shape[0], 1, 1]}.get(spec.group, [])


def _quantized(like: Tensor, x_shape: Shape, spec: Spec, axis: int) -> Quantized:
    """Empty results for an x of that shape, on the device of `like`."""
    shape, least = list(x_shape), 2 if axis == -2 else 1
    _require(len(shape) >= least, f"x has {len(shape)} dimensions", f"at least {least} with axis={axis}")
    if spec.group == "expert":
        _require(len(shape) == 3, f"x has {len(shape)} dimensions", "3, [experts, rows, K], with outer='expert'")
    if axis == -2:
        shape[-2:] = shape[-1], shape[-2]
    return _results(like, shape[:-1], spec.fmt.padded(shape[-1]), spec.fmt, _global_shape(spec, shape))


def fake_quantized(x: Tensor, key: str, axis: int) -> Quantized:
    """Empty tensors of the shapes that `quantize` returns; codes and block scales are bytes."""
    return _quantized(x, x.shape, Spec.parse(key), axis)


def _results(like: Tensor, rows: list[int], k: int, fmt: Format, outer: list[int]) -> Quantized:
    codes = like.new_empty([*rows, k // fmt.codes_per_byte], dtype=torch.uint8)
    scales = like.new_empty([*rows, k // fmt.block], dtype=torch.uint8)
    return codes, scales, like.new_empty(outer, dtype=torch.float32)


@register_fake("fp4ext::quantize")
def _(x: Tensor, spec: str, axis: int, rng: Tensor | None, role: int, amax: Tensor | None) -> Quantized:
    _float("x", x)
    _one_device(x, rng=rng, amax=amax)
    parsed = _spec(spec, axis, rng, role)
    out = _quantized(x, x.shape, parsed, axis)
    if amax is not None:
        _require(parsed.outer != "none", f"amax is given for {parsed.format}, which has no outer scale", "None")
        _dtype("amax", amax, torch.float32)
        _shape("amax", amax, out[2].shape)
    return out


@register_fake("fp4ext::quantize_rowcol")
def _(
    x: Tensor, row_spec: str, col_spec: str, row_rng: Tensor | None, col_rng: Tensor | None, role: int
) -> tuple[Tensor, ...]:
    _float("x", x)
    _one_device(x, row_rng=row_rng, col_rng=col_rng)
    _spec(row_spec, -1, row_rng, role), _spec(col_spec, -2, col_rng, role)
    return fake_quantized(x, row_spec, -1) + fake_quantized(x, col_spec, -2)


@register_fake("fp4ext::amax")
def _(x: Tensor, spec: str, axis: int, rng: Tensor | None) -> Tensor:
    _float("x", x)
    _one_device(x, rng=rng)
    parsed = _spec(spec, axis, rng)
    _require(parsed.outer != "none", f"amax of {parsed.format}, which has no outer scale", "nvfp4")
    return _quantized(x, x.shape, parsed, axis)[2]


def _stored(codes: Tensor, scales: Tensor, global_scale: Tensor, format: str, k: int) -> list[int]:
    """Check a stored matrix and give the shape of x̂."""
    _one_of("format", format, formats.FORMATS)
    fmt = formats.get(format)
    _dtype("codes", codes, torch.uint8)
    _dtype("scales", scales, torch.uint8)
    _one_device(codes, scales=scales, global_scale=global_scale)
    _length("k", k)
    _require(codes.dim() > 0, "codes has no dimensions", "at least 1")
    rows, padded = list(codes.shape[:-1]), fmt.padded(k)
    _shape("codes", codes, [*rows, padded // fmt.codes_per_byte])
    _shape("scales", scales, [*rows, padded // fmt.block])
    if fmt.has_global_scale:
        _dtype("global_scale", global_scale, torch.float32)
        n = global_scale.numel()
        if n != 1 and not (len(rows) == 2 and n == rows[0]):
            _require(n == math.prod(rows), f"global_scale has {n} values", f"one, or one per expert or row of {rows}")
    return [*rows, k]


@register_fake("fp4ext::requantize")
def _(
    codes: Tensor,
    scales: Tensor,
    global_scale: Tensor,
    format: str,
    k: int,
    spec: str,
    axis: int,
    rng: Tensor | None,
    role: int,
) -> Quantized:
    _one_device(codes, rng=rng)
    shape = _stored(codes, scales, global_scale, format, k)
    return _quantized(codes, shape, _spec(spec, axis, rng, role), axis)


@register_fake("fp4ext::dequantize")
def _(codes: Tensor, scales: Tensor, global_scale: Tensor, format: str, k: int, out_dtype: str) -> Tensor:
    shape = _stored(codes, scales, global_scale, format, k)
    _one_of("out_dtype", out_dtype, DTYPES)
    return codes.new_empty(shape, dtype=DTYPES[out_dtype])


# Experts ------------------------------------------------------------------------------------------------------------


def _ends(offsets: Tensor) -> int:
    """The number of experts, from their offsets."""
    _dtype("offsets", offsets, torch.int32)
    _require(offsets.dim() == 1, f"offsets has shape {list(offsets.shape)}", "[E], the ends of the experts' rows")
    _require(offsets.shape[0] > 0, f"offsets has shape {list(offsets.shape)}", "the ends of at least 1 expert")
    return offsets.shape[0]


def _grouped(like: Tensor, x_shape: Shape, offsets: Tensor | None, spec: Spec, axis: int) -> Quantized:
    shape, fmt, colwise, by_row = list(x_shape), spec.fmt, axis == -2, spec.group == "row"
    wanted = 3 if offsets is None else 2
    _require(len(shape) == wanted, f"x has shape {shape}", "[T, K] with offsets, or [E, N, K] without")
    if offsets is None:
        experts, n, k = shape
        rows, along = ([experts, k], fmt.padded(n)) if colwise else ([experts, n], fmt.padded(k))
        outer = [experts, rows[1] if by_row else 1, 1]
    else:
        (tokens, k), experts = shape, _ends(offsets)
        rows, along = [tokens], fmt.padded(k)
        outer = [tokens, 1]
        if colwise:
            rows, along = [k], (tokens + experts * (fmt.block - 1)) // fmt.block * fmt.block
            outer = [experts, k if by_row else 1, 1]
    return _results(like, rows, along, fmt, outer if fmt.has_global_scale else [0])


def fake_grouped(x: Tensor, offsets: Tensor | None, key: str, axis: int) -> Quantized:
    """Empty tensors of the shapes that `grouped_quantize` returns; codes and block scales are bytes."""
    return _grouped(x, x.shape, offsets, Spec.parse(key), axis)


@register_fake("fp4ext::grouped_quantize")
def _(x: Tensor, offsets: Tensor | None, spec: str, axis: int, rng: Tensor | None, role: int) -> Quantized:
    _float("x", x)
    _one_device(x, offsets=offsets, rng=rng)
    _spec(spec, axis, rng, role)
    return fake_grouped(x, offsets, spec, axis)


@register_fake("fp4ext::grouped_requantize")
def _(
    codes: Tensor,
    scales: Tensor,
    global_scale: Tensor,
    format: str,
    k: int,
    offsets: Tensor | None,
    spec: str,
    axis: int,
    rng: Tensor | None,
    role: int,
) -> Quantized:
    _one_device(codes, offsets=offsets, rng=rng)
    shape = _stored(codes, scales, global_scale, format, k)
    return _grouped(codes, shape, offsets, _spec(spec, axis, rng, role), axis)


# Products -----------------------------------------------------------------------------------------------------------


def _operand(
    side: str,
    codes: Tensor,
    scales: Tensor | None,
    outer: Tensor | None,
    format: str,
    dims: int | None,
    experts: int = 1,
    along_k: bool = False,
) -> tuple[int, int]:
    """Check one operand, and give the number of elements that a row stores and the least K that they may hold.

    dims: the number of dimensions; None for any.
    """
    _one_of(f"{side}_format", format, [*formats.FORMATS, *PLAIN])
    fmt = formats.FORMATS.get(format)
    _dtype(f"{side}_codes", codes, torch.uint8 if fmt else PLAIN[format])
    _require(
        codes.dim() >= 1 if dims is None else codes.dim() == dims,
        f"{side}_codes has shape {list(codes.shape)}",
        f"{'at least 1' if dims is None else dims} dimensions",
    )
    rows, stored = codes.shape[:-1], codes.shape[-1] * (fmt.codes_per_byte if fmt else 1)
    least = stored
    if fmt:
        _require(stored % fmt.block == 0, f"{side}_codes stores {stored} elements a row", f"a multiple of {fmt.block}")
        _require(scales is not None, f"{side}_scales is None", f"[.., K/{fmt.block}]")
        assert scales is not None
        _dtype(f"{side}_scales", scales, torch.uint8)
        _shape(f"{side}_scales", scales, [*rows, stored // fmt.block])
        least = stored - fmt.block + 1
    else:
        _require(scales is None, f"{side}_scales is a tensor", f"None for {format}")
    if outer is not None:
        n, every = outer.numel(), math.prod(rows) * (experts if along_k else 1)
        if n != 0:
            _dtype(f"{side}_global", outer, torch.float32)
        if n not in (0, 1, experts):
            _require(n == every, f"{side}_global has shape {list(outer.shape)}", f"1, {experts} or {every} values")
    return stored, least


def _same_k(x: tuple[int, int], w: tuple[int, int]) -> None:
    given, accepted = f"x_codes stores {x[0]} elements a row and w_codes {w[0]}", "both the same K, padded to blocks"
    _require(x[1] <= w[0], given, accepted)
    _require(w[1] <= x[0], given, accepted)


def _choices(x: Tensor, accumulate: str, backend: str) -> None:
    _one_of("accumulate", accumulate, ACCUMULATE)
    _one_of("backend", backend, BACKENDS.get(x.device.type, {b: None for names in BACKENDS.values() for b in names}))


def _dense(x: Stored, w: Stored, bias: Tensor | None, accumulate: str, backend: str) -> list[int]:
    """Check the arguments of a dense product and give the shape of y."""
    names = [f"{side}_{part}" for side in "xw" for part in ("codes", "scales", "global")]
    _one_device(x[0], **dict(zip(names, (*x[:3], *w[:3]), strict=True)), bias=bias)
    _same_k(_operand("x", *x, None), _operand("w", *w, 2))
    if bias is not None:
        _float("bias", bias)
        _shape("bias", bias, [w[0].shape[0]])
    _choices(x[0], accumulate, backend)
    return [*x[0].shape[:-1], w[0].shape[0]]


@register_fake("fp4ext::gemm")
def _(
    x_codes: Tensor,
    x_scales: Tensor | None,
    x_global: Tensor | None,
    x_format: str,
    w_codes: Tensor,
    w_scales: Tensor | None,
    w_global: Tensor | None,
    w_format: str,
    bias: Tensor | None,
    out_dtype: str,
    accumulate: str,
    backend: str,
) -> Tensor:
    x, w = (x_codes, x_scales, x_global, x_format), (w_codes, w_scales, w_global, w_format)
    shape = _dense(x, w, bias, accumulate, backend)
    _one_of("out_dtype", out_dtype, ("bfloat16", "float32"))
    return x_codes.new_empty(shape, dtype=DTYPES[out_dtype])


@register_fake("fp4ext::gemm_add")
def _(
    x_codes: Tensor,
    x_scales: Tensor | None,
    x_global: Tensor | None,
    x_format: str,
    w_codes: Tensor,
    w_scales: Tensor | None,
    w_global: Tensor | None,
    w_format: str,
    bias: Tensor | None,
    out: Tensor,
    accumulate: str,
    backend: str,
) -> None:
    x, w = (x_codes, x_scales, x_global, x_format), (w_codes, w_scales, w_global, w_format)
    _one_device(x_codes, out=out)
    shape = _dense(x, w, bias, accumulate, backend)
    _dtype("out", out, torch.float32)
    _shape("out", out, shape)
    _require(out.is_contiguous(), "out has gaps between its elements", "a contiguous tensor")


@register_fake("fp4ext::grouped_gemm")
def _(
    x_codes: Tensor,
    x_scales: Tensor | None,
    x_global: Tensor | None,
    x_format: str,
    w_codes: Tensor,
    w_scales: Tensor | None,
    w_global: Tensor | None,
    w_format: str,
    offsets: Tensor,
    out_dtype: str,
    accumulate: str,
    backend: str,
) -> Tensor:
    _one_device(
        x_codes,
        x_scales=x_scales,
        x_global=x_global,
        w_codes=w_codes,
        w_scales=w_scales,
        w_global=w_global,
        offsets=offsets,
    )
    _one_of("out_dtype", out_dtype, ("bfloat16", "float32"))
    _choices(x_codes, accumulate, backend)
    _require(w_codes.dim() in (2, 3), f"w_codes has shape {list(w_codes.shape)}", "[E, N, K], or [N, tokens]")
    experts, by_rows = _ends(offsets), w_codes.dim() == 3
    x = _operand("x", x_codes, x_scales, x_global, x_format, 2, 1 if by_rows else experts, True)
    w = _operand("w", w_codes, w_scales, w_global, w_format, 3 if by_rows else 2, experts, not by_rows)
    if by_rows:
        _require(w_codes.shape[0] == experts, f"w_codes has shape {list(w_codes.shape)}", f"[{experts}, N, K]")
        _same_k(x, w)
    shape = [*([] if by_rows else [experts]), x_codes.shape[0], w_codes.shape[-2]]
    return x_codes.new_empty(shape, dtype=DTYPES[out_dtype])


@register_fake("fp4ext::attention")
def _(q: Tensor, k: Tensor, v: Tensor, start: Tensor | None, scale: float) -> Tensor:
    _one_device(q, k=k, v=v, start=start)
    for name, x in (("q", q), ("k", k), ("v", v)):
        _float(name, x)
        _require(x.dim() == 4, f"{name} has shape {list(x.shape)}", "[batch, heads, rows, head_dim]")
    _dtype("v", v, k.dtype)
    (batch, heads, m, d), (groups, t) = q.shape, k.shape[1:3]
    _shape("k", k, [batch, groups, t, d])
    _shape("v", v, k.shape)
    _require(heads % groups == 0 if groups > 0 else heads == 0, f"q has {heads} heads and k {groups}", "a multiple")
    _require(math.isfinite(scale), f"scale is {scale}", "a finite number")
    if start is not None:
        _dtype("start", start, torch.int64)
        _shape("start", start, [batch])
    if batch != 0:
        _require(t >= m, f"k has {t} rows and q {m}", "at least as many")
    return q.new_empty(q.shape)


# Layouts ------------------------------------------------------------------------------------------------------------


@register_fake("fp4ext::swizzle")
def _(scales: Tensor, offsets: Tensor | None = None) -> Tensor:
    _dtype("scales", scales, torch.uint8)
    _one_device(scales, offsets=offsets)
    accepted = "[.., rows, blocks]" if offsets is None else "[rows, blocks] with offsets"
    fits = scales.dim() >= 2 if offsets is None else scales.dim() == 2
    _require(fits, f"scales has shape {list(scales.shape)}", accepted)
    rows, columns = scales.shape[-2], (scales.shape[-1] + 3) // 4 * 4
    if offsets is not None:
        return scales.new_empty(((rows + 127 * _ends(offsets)) // 128 * 128, columns))
    return scales.new_empty((*scales.shape[:-2], (rows + 127) // 128 * 128 * columns))


@register_fake("fp4ext::unswizzle")
def _(swizzled: Tensor, rows: int, columns: int) -> Tensor:
    _dtype("swizzled", swizzled, torch.uint8)
    _length("rows", rows)
    _length("columns", columns)
    size = (rows + 127) // 128 * 128 * ((columns + 3) // 4 * 4)
    _require(swizzled.dim() > 0, "swizzled has no dimensions", f"[.., {size}]")
    _require(swizzled.shape[-1] == size, f"swizzled has shape {list(swizzled.shape)}", f"[.., {size}]")
    return swizzled.new_empty((*swizzled.shape[:-1], rows, columns))
