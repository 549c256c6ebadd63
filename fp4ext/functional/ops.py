"""The one door to torch.ops.fp4ext: a wrapper for each op; fakes.py has what torch.compile and export see of it.

Schemas: csrc/ops/library.cpp. Everything here takes and gives plain tensors; `spec` is a Spec's key. Users call
fp4ext.quantize and fp4ext.gemm. To an op, codes and scales are bytes; the wrappers view them as torch's 8-bit float
types, which few torch functions know.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode

from ..errors import Refused
from ..policy import formats
from .fakes import DTYPES

ROLES = {"x": 0, "w": 1, "dy": 2}
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

Quantized = tuple[Tensor, Tensor, Tensor]


def _typed(spec: str, codes: Tensor, scales: Tensor, global_scale: Tensor) -> Quantized:
    fmt = formats.get(spec.split("/")[0])
    return codes.view(fmt.codes_dtype), scales.view(fmt.scale_dtype), global_scale


def _bytes(t: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
    """t as bytes if its dtype is what the format has; any other is for the op to refuse."""
    return t.view(torch.uint8) if t is not None and t.dtype == dtype else t


def _scale_bytes(t: Tensor) -> Tensor:
    return _bytes(t, t.dtype if t.dtype in {f.scale_dtype for f in formats.FORMATS.values()} else None)


def _stored(codes: Tensor, scales: Tensor | None, global_scale: Tensor | None, format: str) -> tuple:
    """A matrix as ops take it, in four arguments: codes and scales as bytes, outer scale, format."""
    fmt = formats.FORMATS.get(format)
    if fmt:
        codes, scales = _bytes(codes, fmt.codes_dtype), _bytes(scales, fmt.scale_dtype)
    return codes, scales, global_scale, format


def dtype_name(dtype: torch.dtype) -> str:
    """How a dtype crosses a schema. Raises TypeError for one that no op writes."""
    if dtype not in _DTYPE_NAMES:
        raise TypeError(f"out_dtype is {dtype}; accepted: {', '.join(map(str, _DTYPE_NAMES))}")
    return _DTYPE_NAMES[dtype]


def check_plain(name: str, t: Tensor) -> None:
    """Refuse a tensor that carries more than its values: no op has a forward-mode derivative or a batching rule.

    Raises:
        NotImplementedError (a RuntimeError): t has a tangent (torch.autograd.forward_ad), stands inside a transform of
            torch.func (vmap, grad, jvp …), or is traced by torch.jit.
    """
    if torch.jit.is_tracing():
        raise NotImplementedError(f"{name} is traced by torch.jit; accepted: torch.compile, torch.export")
    if not torch.compiler.is_compiling() and torch._C._functorch.is_functorch_wrapped_tensor(t):
        raise NotImplementedError(
            f"{name} is inside a transform of torch.func (vmap, grad, jvp …), for which fp4ext has no rules; accepted: "
            "plain tensors and loss.backward(); leading dimensions are a batch"
        )
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(t).tangent is not None:
        raise NotImplementedError(
            f"{name} has a tangent, and fp4ext has no forward-mode derivatives; accepted: {name} without one "
            "(torch.autograd.forward_ad.unpack_dual), or reverse mode"
        )


def check_written(out: Tensor) -> None:
    """Refuse what autograd lets nobody write: a leaf that requires grad, or an inference tensor outside that mode.

    Raises:
        RuntimeError: that.
    """
    if torch.is_grad_enabled() and out.requires_grad and out.is_leaf:
        raise RuntimeError(
            "out is a leaf that requires grad, which is not to be changed in place; accepted: out.grad, "
            "out.detach(), or a call under torch.no_grad()"
        )
    if not torch.compiler.is_compiling() and out.is_inference() and not torch.is_inference_mode_enabled():
        raise RuntimeError("out is an inference tensor; accepted: out.clone(), or a call under torch.inference_mode()")


def quantize(
    x: Tensor, spec: str, axis: int = -1, rng: Tensor | None = None, role: int = 0, amax: Tensor | None = None
) -> Quantized:
    """Codes, block scales and outer scale of x along `axis` (docs/numerics.md, 2-7)."""
    return _typed(spec, *torch.ops.fp4ext.quantize.default(x, spec, axis, rng, role, amax))


def quantize_rowcol(
    x: Tensor, row_spec: str, col_spec: str, row_rng: Tensor | None = None, col_rng: Tensor | None = None, role: int = 0
) -> tuple[Tensor, ...]:
    """quantize along both axes in one call: the three tensors of axis=-1, then those of axis=-2."""
    out = torch.ops.fp4ext.quantize_rowcol.default(x, row_spec, col_spec, row_rng, col_rng, role)
    return *_typed(row_spec, *out[:3]), *_typed(col_spec, *out[3:])


def requantize(
    codes: Tensor,
    scales: Tensor,
    global_scale: Tensor,
    format: str,
    k: int,
    spec: str,
    axis: int = -1,
    rng: Tensor | None = None,
    role: int = 0,
) -> Quantized:
    """quantize(dequantize(…) in fp32), a band of rows at a time: x̂ is never whole in memory."""
    stored = _stored(codes, scales, global_scale, format)
    return _typed(spec, *torch.ops.fp4ext.requantize.default(*stored, k, spec, axis, rng, role))


def grouped_quantize(
    x: Tensor, offsets: Tensor | None, spec: str, axis: int = -1, rng: Tensor | None = None, role: int = 0
) -> Quantized:
    """quantize of each expert's matrix alone: rows of x [T, K] cut by offsets, or the matrices of x [E, N, K]."""
    return _typed(spec, *torch.ops.fp4ext.grouped_quantize.default(x, offsets, spec, axis, rng, role))


def grouped_requantize(
    codes: Tensor,
    scales: Tensor,
    global_scale: Tensor,
    format: str,
    k: int,
    offsets: Tensor | None,
    spec: str,
    axis: int = -1,
    rng: Tensor | None = None,
    role: int = 0,
) -> Quantized:
    """grouped_quantize(dequantize(…) in fp32), a band of rows at a time."""
    stored = _stored(codes, scales, global_scale, format)
    return _typed(spec, *torch.ops.fp4ext.grouped_requantize.default(*stored, k, offsets, spec, axis, rng, role))


def amax(x: Tensor, spec: str, axis: int = -1, rng: Tensor | None = None) -> Tensor:
    """The largest finite magnitude of each outer group, after the spec's RHT: what `quantize` measures for itself."""
    return torch.ops.fp4ext.amax.default(x, spec, axis, rng)


def dequantize(codes: Tensor, scales: Tensor, global_scale: Tensor, format: str, k: int, out_dtype: str) -> Tensor:
    """x̂ = element · fl(float(scale) · global_scale), the padding cut off at k."""
    return torch.ops.fp4ext.dequantize.default(*_stored(codes, scales, global_scale, format), k, out_dtype)


def gemm(
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
    accumulate: str = "invariant",
    backend: str = "auto",
) -> Tensor:
    """y = x̂·ŵᵀ + bias, contraction last on both (docs/numerics.md, 9)."""
    return torch.ops.fp4ext.gemm.default(
        *_stored(x_codes, x_scales, x_global, x_format),
        *_stored(w_codes, w_scales, w_global, w_format),
        bias,
        out_dtype,
        accumulate,
        backend,
    )


def attention(q: Tensor, k: Tensor, v: Tensor, start: Tensor | None, scale: float) -> Tensor:
    """softmax(scale · q·kᵀ)·v over each query's past, in a fixed order (docs/numerics.md, 11)."""
    return torch.ops.fp4ext.attention.default(q, k, v, start, scale)


def gemm_add(
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
    accumulate: str = "invariant",
    backend: str = "auto",
) -> None:
    """out += gemm(…) in fp32; out is changed."""
    torch.ops.fp4ext.gemm_add.default(
        *_stored(x_codes, x_scales, x_global, x_format),
        *_stored(w_codes, w_scales, w_global, w_format),
        bias,
        out,
        accumulate,
        backend,
    )


_ADDED_TO = 9  # where `out` stands in the schema of gemm_add
_IMPLEMENTATIONS = torch.library.Library("fp4ext", "IMPL")


def _gemm_add_and_bump(keys, *args):
    """Below autograd, as torch's own in-place ops: what saved `out` for its backward will see that it has changed."""
    check_written(args[_ADDED_TO])
    with torch._C._AutoDispatchBelowADInplaceOrView():
        torch.ops.fp4ext.gemm_add.default.redispatch(keys & torch._C._after_ADInplaceOrView_keyset, *args)
    torch.autograd.graph.increment_version(args[_ADDED_TO])


_IMPLEMENTATIONS.impl("gemm_add", _gemm_add_and_bump, "ADInplaceOrView", with_keyset=True)


def grouped_gemm(
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
    accumulate: str = "invariant",
    backend: str = "auto",
) -> Tensor:
    """gemm of each expert's rows with its matrix of w [E, N, K]; or, where w has 2 dimensions, over its tokens."""
    return torch.ops.fp4ext.grouped_gemm.default(
        *_stored(x_codes, x_scales, x_global, x_format),
        *_stored(w_codes, w_scales, w_global, w_format),
        offsets,
        out_dtype,
        accumulate,
        backend,
    )


def swizzle(scales: Tensor, offsets: Tensor | None = None) -> Tensor:
    """Block scales [.., rows, blocks] to the tensor cores' layout, [.., size], padding zeroed (law 10).

    With offsets, the ends of the experts' rows: [capacity, blocks in fours], each expert's rows padded on their own,
    one expert's layout after the other's; zeros past the last. capacity: what they can take, whatever the offsets.
    """
    return torch.ops.fp4ext.swizzle.default(_scale_bytes(scales), offsets).view(scales.dtype)


def unswizzle(swizzled: Tensor, rows: int, columns: int) -> Tensor:
    """The inverse of swizzle: [.., rows, columns]."""
    return torch.ops.fp4ext.unswizzle.default(_scale_bytes(swizzled), rows, columns).view(swizzled.dtype)


# Random state -------------------------------------------------------------------------------------------------------
#
# Random bits come from torch's generator, so torch.manual_seed repeats a run and whatever saves torch's RNG state saves
# fp4ext's. A compiler must neither repeat, drop, merge nor reorder the draws. Three properties hold that:
#
# - An op that draws also returns what its caller needs (layer_ops.py: the layer's output), so it is not dead code, and
#   it returns the states it drew, so the backward reads them instead of drawing again.
# - It is tagged nondeterministic_seeded: checkpointing inside torch.compile restores the generator before it repeats
#   the op.
# - While a graph is traced, each such op takes the states of the previous one as the argument `after`. That is a data
#   dependency, which keeps program order through every pass and makes no two calls equal.


def draw_states(like: Tensor, streams: int, rank: int | None = None) -> Tensor:
    """RNG states {seed, offset}, int64 [streams, 2], drawn now from torch's generator for the device of `like`.

    Trainers give all ranks one seed. Then the rounding of what the ranks share, such as the weights in dgrad and the
    signs of an RHT, would be common to all and the mean over ranks would keep its noise. So the rank is folded in:
    this process's own, or `rank`, where several draw alike.
    """
    states = torch.randint(2**63 - 1, (streams, 2), dtype=torch.int64, device=like.device)
    rank = _own_rank() if rank is None else rank
    return states ^ (rank * 0x9E3779B97F4A7C15 & 2**63 - 1) if rank else states  # an odd constant: all ranks differ


def set_draw_rank(rank: int | None) -> None:
    """Say which rank's random bits this process draws; None: torch.distributed's own, 0 without it.

    Ranks with one number and one seed draw the same bits, which is for those that hold shards of one replica.

    Raises:
        ValueError: a rank that is no whole number from 0.
    """
    global _draw_rank
    if rank is not None and (isinstance(rank, bool) or not isinstance(rank, int) or rank < 0):
        raise Refused(f"rank is {rank!r}; accepted: a whole number from 0, or None")
    _draw_rank = rank


_draw_rank: int | None = None


def _own_rank() -> int:
    if _draw_rank is not None:
        return _draw_rank
    distributed = torch.distributed
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0


def random_op(name: str, states: int | None) -> Callable:
    """Decorate a function that draws RNG states, to make it the op fp4ext::`name`.

    Its last parameter is `after: Tensor | None = None`, which it ignores. `states` is the position among its outputs
    of the states it drew; None where they are its only output.
    """

    def decorate(function: Callable) -> torch.library.CustomOpDef:
        op = torch.library.custom_op(
            f"fp4ext::{name}", function, mutates_args=(), tags=torch.Tag.nondeterministic_seeded
        )

        @op.register_torch_dispatch(ProxyTorchDispatchMode)
        def _(mode, overload, types, args, kwargs):
            schema = overload._schema.arguments
            args = [*args, *(kwargs.get(a.name, a.default_value) for a in schema[len(args) :])]
            args[-1] = _last_draw.get(mode.tracer)
            out = mode.__torch_dispatch__(overload, types, tuple(args), {})
            _last_draw[mode.tracer] = out if states is None else out[states]
            return out

        return op

    return decorate


# For each graph that is being traced, the states that its last random op drew.
_last_draw: MutableMapping = WeakKeyDictionary()


@random_op("draw_rng", states=None)
def draw_rng(like: Tensor, streams: int, after: Tensor | None = None) -> Tensor:
    """draw_states as an op."""
    return draw_states(like, streams)


@draw_rng.register_fake
def _(like, streams, after=None):
    return like.new_empty((streams, 2), dtype=torch.int64)
