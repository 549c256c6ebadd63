"""quantize, the op: equal to the reference byte for byte, on every path."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fp4ext
from fp4ext import reference
from fp4ext.functional import ops
from fp4ext.policy.spec import RHTS, ROUNDINGS, Spec
from fp4ext.testing import KINDS, assert_bytes_equal, assert_same_quantized, generate

RNG = torch.tensor([0x1234567890ABCDEF, 7])


def specs():
    """Every combination that Spec accepts, the RHT thinned to one of each kind."""
    out = []
    for fmt in fp4ext.formats.FORMATS.values():
        for scale, rounding, block, outer, rht in itertools.product(
            fmt.scale_rules, ROUNDINGS, fmt.blocks, fmt.outers, ("none", "16", "128x2")
        ):
            try:
                out.append(Spec(fmt.name, scale, rounding, block, outer, rht))
            except ValueError:
                pass
    return out


ALL = specs()


def check(x, spec, axis=-1, role=0):
    """Equal to the reference on every instruction set of this machine."""
    wanted = reference.quantize(x, spec, axis, RNG, role)
    before = fp4ext._C.isa()
    try:
        for isa in fp4ext._C.isas():
            fp4ext._C.force_isa(isa)
            got = ops.quantize(x, spec.key, axis, RNG, role)
            assert_same_quantized(got, wanted, f"{spec} axis={axis} {tuple(x.shape)} {x.dtype} {isa}")
    finally:
        fp4ext._C.force_isa(before)


def test_there_are_many_specs():
    assert len(ALL) > 150


@pytest.mark.parametrize("spec", ALL, ids=lambda s: s.key)
def test_every_spec_equals_the_reference(spec):
    shape = (2, 16, 128) if spec.group == "expert" else (16, 256)
    turn = ALL.index(spec)
    for i, axis in enumerate((-1, -2)):
        for kind in ("gaussian", KINDS[1 + (2 * turn + i) % (len(KINDS) - 1)]):
            check(generate(kind, *shape, seed=turn), spec, axis)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_kind_of_data(kind, dtype):
    x = generate(kind, 48, 128, seed=5, dtype=dtype)
    for key in (
        "nvfp4",
        "nvfp4/sweep",
        "nvfp4/four_over_six/nearest/16x16",
        "nvfp4/minvar/stochastic",
        "nvfp4/sweep/eden/1x16/tensor/128x2",
        "nvfp4/amax/eden/1x16/row/128",
        "nvfp4/amax/eden_block/1x16/tensor/128",
        "nvfp4/amax/stochastic/16x16/pow2",
        "mxfp8",
        "mxfp8_e5m2/floor",
        "mxfp4/ceil/stochastic",
    ):
        for axis in (-1, -2):
            check(x, Spec.parse(key), axis)


@pytest.mark.parametrize("rows", [127, 128, 300])
@pytest.mark.parametrize(
    "key", ["nvfp4", "nvfp4/sweep/eden/1x16/row/16x2", "nvfp4/amax/stochastic/1x16/pow2/32", "mxfp8", "mxfp4"]
)
def test_columns_longer_than_a_line(key, rows):
    """Column-wise vectors are 128 deep, whatever the block and the RHT, and the last of a column may be shorter."""
    for dtype, columns in ((torch.float32, 150), (torch.bfloat16, 264)):
        check(generate("gaussian", rows, columns, seed=rows, dtype=dtype), Spec.parse(key), -2)


@pytest.mark.parametrize("fmt", [f for f in fp4ext.formats.FORMATS.values() if "ceil" in f.scale_rules], ids=str)
def test_ceil_beside_the_largest_value_of_every_scale(fmt):
    """max·2^k and what is one ulp below take 2^k, one ulp above takes 2^(k+1): a float log2 is off by one there.

    k runs over every power for which all three are normal; scales are clamped at both ends (section 3).
    """
    e = fmt.element
    low, high = -126 - round(math.log2(e.min)), 127 - e.max_exponent
    for k in range(-126 - e.max_exponent + 1, high + 1):
        at, x = torch.tensor(e.max) * 2.0**k, torch.zeros(3, 32)
        x[:, 5] = torch.stack([at.nextafter(torch.tensor(0.0)), at, at.nextafter(torch.tensor(torch.inf))])
        assert x[:, 5].isfinite().all() and (x[:, 5] >= 2.0**-126).all()
        check(x, Spec(fmt.name, "ceil"))
        scales = ops.quantize(x, Spec(fmt.name, "ceil").key)[1].view(torch.uint8)[:, 0].to(torch.int64) - 127
        assert scales.tolist() == [min(max(wanted, low), high) for wanted in (k, k, k + 1)], k


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(ALL),
    st.lists(st.integers(0, 40), min_size=1, max_size=4),
    st.integers(0, 300),
    st.sampled_from([-1, -2]),
    st.sampled_from(RHTS),
)
def test_shapes(spec, lead, k, axis, rht):
    """Any leading dimensions, ragged lengths, empty tensors, transposed and strided views."""
    if spec.rht != "none" and rht != "none":
        spec = spec.with_(rht=rht)
    shape = [*lead[-2:], k] if spec.group == "expert" else [*lead, k]
    if spec.group == "expert":
        shape = ([1] * 3 + shape)[-3:]
    if len(shape) == 1 and axis == -2:
        axis = -1
    while torch.Size(shape).numel() > 5000:
        shape = [s // 2 for s in shape]
    x = generate("gaussian", *shape, seed=k)
    check(x, spec, axis)
    if len(shape) >= 2:
        check(x.transpose(-1, -2), spec, axis)
        check(x[..., ::2], spec, axis)


@pytest.mark.parametrize("key", ["nvfp4/sweep", "nvfp4/amax/stochastic", "nvfp4/sweep/eden/1x16/tensor/128x2", "mxfp8"])
def test_threads_do_not_matter(key):
    x = generate("gaussian", 200, 1024)
    before = torch.get_num_threads()
    try:
        results = []
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            results.append([ops.quantize(x, Spec.parse(key).key, axis, RNG) for axis in (-1, -2)])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert_same_quantized(b, a, key)


@pytest.mark.parametrize(
    "key",
    [
        "nvfp4",
        "nvfp4/four_over_six/nearest/16x16",
        "nvfp4/amax/stochastic",
        "nvfp4/sweep/eden/1x16/tensor/128x2",
        "mxfp4",
    ],
)
def test_rowcol_is_both_directions(key, isa):
    x = generate("student_t3", 96, 160, dtype=torch.bfloat16)
    key = Spec.parse(key).key
    both = ops.quantize_rowcol(x, key, key, RNG, RNG, 2)
    assert_same_quantized(both[:3], ops.quantize(x, key, -1, RNG, 2), "row")
    assert_same_quantized(both[3:], ops.quantize(x, key, -2, RNG, 2), "column")


@pytest.mark.parametrize("n", [64, 96, 128, 192, 256, 384])
def test_square_sizes_on_both_sides_of_thresholds(n, isa):
    """A block's bytes depend on the block and the outer scale alone, whichever path takes it."""
    x = generate("gaussian", 384, 384)
    x[0, 0] = 8.0  # the largest, so that every corner has the same outer scale
    spec = Spec("nvfp4", "sweep")
    whole = ops.quantize(x, spec.key)
    part = ops.quantize(x[:n, :n], spec.key)
    assert_bytes_equal(part[0], whole[0][:n, : n // 2], "codes")
    assert_bytes_equal(part[1], whole[1][:n, : n // 16], "scales")


def test_sixteen_by_sixteen_transposes_exactly(isa):
    x = generate("wide", 80, 112)
    for scale in ("amax", "four_over_six", "sweep"):
        key = Spec("nvfp4", scale, block="16x16").key
        codes, scales, outer = ops.quantize(x, key)
        codes_t, scales_t, outer_t = ops.quantize(x, key, -2)
        row = ops.dequantize(codes, scales, outer, "nvfp4", 112, "float32")
        col = ops.dequantize(codes_t, scales_t, outer_t, "nvfp4", 80, "float32")
        assert_bytes_equal(col, row.T, scale)


def test_symmetric_input_draws_different_bits_for_rows_and_columns():
    """One random stream for both copies would make their errors equal."""
    x = generate("gaussian", 256, 256)
    x = x + x.T
    key = Spec("nvfp4", rounding="stochastic").key
    row, col = (ops.quantize(x, key, axis, RNG)[0] for axis in (-1, -2))
    other = ops.quantize(x, key, -1, RNG + 1)[0]
    agree = lambda a, b: torch.cat([(a & 15) == (b & 15), (a >> 4) == (b >> 4)]).double().mean().item()  # noqa: E731
    sd = (0.25 / x.numel()) ** 0.5
    assert abs(agree(row, col) - agree(row, other)) < 6 * sd < 1 - agree(row, other)


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("key", ["nvfp4/amax/stochastic", "nvfp4/sweep/eden/1x16/tensor/128x2", "nvfp4/sweep"])
def test_shards_with_a_shared_amax_make_the_whole(key, axis, isa):
    """Shards whose amaxes differ 10x, each given the whole's amax and its own coordinates."""
    x = generate("gaussian", 256, 256)
    x[:128] *= 10
    key = Spec.parse(key).key
    whole = ops.quantize(x, key, axis, RNG)
    amax = torch.stack([ops.amax(part, key, axis, RNG) for part in (x[:128], x[128:])]).amax(0)
    seed, offset = RNG.tolist()
    first, second = (
        ops.quantize(part, key, axis, torch.tensor([seed, offset, *((row, 0) if axis == -1 else (0, row))]), amax=amax)
        for part, row in ((x[:128], 0), (x[128:], 128))
    )
    together = 0 if axis == -1 else -1
    join = lambda i: torch.cat([first[i].view(torch.uint8), second[i].view(torch.uint8)], together)  # noqa: E731
    assert_bytes_equal(join(0), whole[0].view(torch.uint8), "codes")
    assert_bytes_equal(join(1), whole[1].view(torch.uint8), "scales")


def test_constant_tensor_stochastic_is_not_zero(isa):
    """64x64 of 2.3, stochastically rounded, keeps its mean."""
    x = torch.full((64, 64), 2.3)
    q = ops.quantize(x, Spec("nvfp4", rounding="stochastic").key, -1, RNG)
    mean = ops.dequantize(*q, "nvfp4", 64, "float32").mean()
    assert abs(mean - 2.3) < 2.3 * 0.02


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp8", "mxfp8_e5m2", "mxfp4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dequantize_equals_the_reference(fmt, dtype, isa):
    x = generate("nonfinite", 3, 40, 72)
    q = ops.quantize(x, Spec(fmt).key)
    got = ops.dequantize(*q, fmt, 72, ops.dtype_name(dtype))
    assert_bytes_equal(got, reference.dequantize(*q, fmt, 72, dtype), fmt)


BAD = {
    "x is int64": lambda: ops.quantize(torch.ones(4, 16, dtype=torch.int64), Spec().key),
    "rounding float64 twice": lambda: ops.quantize(torch.ones(4, 16, dtype=torch.float64), Spec().key),
    "six parts": lambda: ops.quantize(torch.ones(4, 16), "nvfp4"),
    "unknown format 'fp5'": lambda: ops.quantize(torch.ones(4, 16), "fp5/amax/nearest/1x16/tensor/none"),
    "does not belong": lambda: ops.quantize(torch.ones(4, 16), "nvfp4/ceil/nearest/1x16/tensor/none"),
    "biased with this scale rule": lambda: ops.quantize(
        torch.ones(4, 16), "nvfp4/sweep/stochastic/1x16/tensor/none", -1, RNG
    ),
    "rng is missing": lambda: ops.quantize(torch.ones(4, 16), Spec(rounding="stochastic").key),
    "rng has shape [3]": lambda: ops.quantize(
        torch.ones(4, 16), Spec(rounding="stochastic").key, -1, torch.ones(3, dtype=torch.int64)
    ),
    "rng is float32": lambda: ops.quantize(torch.ones(4, 16), Spec(rounding="stochastic").key, -1, torch.ones(2)),
    "axis is 0": lambda: ops.quantize(torch.ones(4, 16), Spec().key, 0),
    "x has 1 dimensions": lambda: ops.quantize(torch.ones(16), Spec().key, -2),
    "amax has shape [2]": lambda: ops.quantize(torch.ones(4, 16), Spec().key, -1, None, 0, torch.ones(2)),
    "with outer='expert': 3": lambda: ops.quantize(torch.ones(4, 16), Spec(outer="expert").key),
    "scales has shape [4, 1]": lambda: ops.dequantize(
        torch.zeros(4, 16, dtype=torch.uint8),
        torch.zeros(4, 1).to(torch.float8_e4m3fn),
        torch.ones(()),
        "nvfp4",
        32,
        "float32",
    ),
    "codes has shape [4, 16]": lambda: ops.dequantize(
        torch.zeros(4, 16, dtype=torch.uint8),
        torch.zeros(4, 2).to(torch.float8_e4m3fn),
        torch.ones(()),
        "nvfp4",
        64,
        "float32",
    ),
}


@pytest.mark.parametrize("message", BAD, ids=lambda m: m)
def test_refusals_name_the_argument(message):
    with pytest.raises(RuntimeError) as error:
        BAD[message]()
    assert message in str(error.value)


@pytest.mark.parametrize(
    "key", ["nvfp4/sweep", "nvfp4/amax/stochastic/1x16/row/16", "mxfp8", "nvfp4/amax/nearest/16x16"]
)
def test_opcheck(key):
    x = torch.randn(24, 40)
    for axis in (-1, -2):
        torch.library.opcheck(torch.ops.fp4ext.quantize.default, (x, Spec.parse(key).key, axis, RNG, 0, None))
    key = Spec.parse(key).key
    torch.library.opcheck(torch.ops.fp4ext.quantize_rowcol.default, (x, key, key, RNG, RNG, 0))
    q = torch.ops.fp4ext.quantize.default(x, key, -1, RNG, 0, None)
    torch.library.opcheck(torch.ops.fp4ext.dequantize.default, (*q, key.split("/")[0], 40, "bfloat16"))


def test_compiled_equals_eager():
    spec = Spec("nvfp4", "sweep", "eden", rht="128x2").key

    def f(x):
        codes, scales, outer = ops.quantize(x * 2, spec, -1, RNG)
        return ops.dequantize(codes, scales, outer, "nvfp4", x.shape[-1], "float32") + 1

    x = torch.randn(16, 256)
    assert torch.equal(torch.compile(f, fullgraph=True)(x), f(x))


def test_draws_follow_torch_manual_seed():
    x = torch.randn(2)
    torch.manual_seed(5)
    a, b = ops.draw_rng(x, 2), ops.draw_rng(x, 2)
    torch.manual_seed(5)
    assert torch.equal(ops.draw_rng(x, 2), a) and not torch.equal(a, b)
    torch.manual_seed(5)
    compiled = torch.compile(lambda x: (ops.draw_rng(x, 2), ops.draw_rng(x, 2)), fullgraph=True)
    c, d = compiled(x)
    assert torch.equal(a, c) and torch.equal(b, d)


@pytest.mark.parametrize("source", ["nvfp4/sweep", "nvfp4/amax/nearest/16x16", "nvfp4/amax/nearest/1x16/row", "mxfp8"])
@pytest.mark.parametrize(
    "target",
    [
        "nvfp4/sweep/eden/1x16/tensor/128x2",
        "nvfp4/amax/stochastic/1x16/row",
        "nvfp4/sweep/nearest/16x16",
        "mxfp4/floor",
    ],
)
def test_requantize_is_quantize_of_dequantize(source, target, isa):
    """In bands of rows, with ragged ends, from a stack of matrices."""
    x = generate("student_t3", 2, 136, 208, dtype=torch.bfloat16)
    source, target = Spec.parse(source), Spec.parse(target)
    stored = (*ops.quantize(x, source.key), source.format, 208)
    values = ops.dequantize(*stored, "float32")
    for axis in (-1, -2):
        got = ops.requantize(*stored, target.key, axis, RNG, 1)
        assert_same_quantized(got, ops.quantize(values, target.key, axis, RNG, 1), f"{source} to {target}")
