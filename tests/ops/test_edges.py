"""What an op owes the rest of PyTorch: version counters, devices, no overlap, arithmetic of its own, errors that say
why."""

import ctypes
import os
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch
from torch.autograd import forward_ad

import fp4ext
from fp4ext import Spec
from fp4ext.testing import assert_bytes_equal, generate

RNG = torch.tensor([0x1234567890ABCDEF, 7])
ENDS = torch.tensor([5, 5, 22], dtype=torch.int32)


def operands(m=8, n=8, k=64):
    return fp4ext.quantize(generate("gaussian", m, k)), fp4ext.quantize(generate("gaussian", n, k, seed=1))


# ---- what is written ----


def test_a_graph_sees_that_out_has_changed():
    x, w = operands()
    p = torch.ones(8, 8, requires_grad=True)
    for out in (torch.zeros(8, 8), torch.zeros(2, 8, 8)[1], torch.zeros(64).view(8, 8)):
        version = out._version
        loss = (p * out).sum()
        assert fp4ext.gemm(x, w, out=out) is out
        assert out._version == version + 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("inside", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_the_op_itself_bumps_the_version(inside):
    x, w = operands()
    out = torch.zeros(8, 8)
    with inside():
        torch.ops.fp4ext.gemm_add(*raw(x), *raw(w), None, out, "invariant", "auto")
    assert out._version == 1 and out.any()


def raw(q):
    return q.codes.view(torch.uint8), q.scales.view(torch.uint8), q.global_scale, q.format.name


def test_other_arguments_are_not_bumped():
    x, w = operands()
    bias, out = torch.ones(8), torch.zeros(8, 8)
    fp4ext.gemm(x, w, bias, out=out)
    fp4ext.gemm(x, w, bias)
    assert {t._version for t in (x.codes, x.scales, w.codes, bias)} == {0}


def test_out_that_nobody_may_write():
    x, w = operands()
    leaf = torch.zeros(8, 8, requires_grad=True)
    with torch.inference_mode():
        frozen = torch.zeros(8, 8)
        fp4ext.gemm(x, w, out=frozen)
    wanted = frozen.clone()
    for out, why in ((leaf, "out is a leaf that requires grad"), (frozen, "out is an inference tensor; accepted: ")):
        for call in (
            lambda: fp4ext.gemm(x, w, out=out),  # noqa: B023
            lambda: torch.ops.fp4ext.gemm_add(*raw(x), *raw(w), None, out, "invariant", "auto"),  # noqa: B023
        ):
            with pytest.raises(RuntimeError, match=why):
                call()
    assert not leaf.any() and torch.equal(frozen, wanted)
    with torch.no_grad():
        fp4ext.gemm(x, w, out=leaf)
    assert torch.equal(leaf.detach(), wanted)


def test_out_that_has_a_history_keeps_its_gradient():
    x, w = operands()
    p = torch.ones(8, 8, requires_grad=True)
    out = p * 2
    fp4ext.gemm(x, w, out=out).sum().backward()
    assert (p.grad == 2).all()


def test_compiled_out():
    x, w = operands()
    f = lambda out: fp4ext.gemm(x, w, out=out).sum()  # noqa: E731
    eager, compiled = torch.ones(8, 8), torch.ones(8, 8)
    f(eager)
    torch.compile(f, fullgraph=True, backend="aot_eager")(compiled)
    assert_bytes_equal(compiled, eager)
    torch._dynamo.reset()


@pytest.mark.parametrize("what", ["x_codes", "x_scales", "x_global", "w_codes", "w_scales", "w_global", "bias"])
@pytest.mark.parametrize("shift", [0, 4, -4])
def test_out_overlaps_nothing(what, shift):
    """Wholly, or by its first or last element; one element further is not overlap."""
    m, n, k = 16, 32, 64
    x, w = operands(m, n, k)
    x = fp4ext.quantize(generate("gaussian", m, k), outer="row")
    w = fp4ext.quantize(generate("gaussian", n, k), outer="row")
    names = ("x_codes", "x_scales", "x_global", "x_format", "w_codes", "w_scales", "w_global", "w_format")
    arguments = dict(zip(names, (*raw(x), *raw(w)), strict=True), bias=torch.ones(n))
    arguments |= dict(accumulate="invariant", backend="auto")
    wanted = torch.ops.fp4ext.gemm(**arguments, out_dtype="float32")
    memory = torch.zeros(3 * m * n * 4, dtype=torch.uint8)
    out = memory[m * n * 4 : 2 * m * n * 4].view(torch.float32).view(m, n)
    source = arguments[what]
    begin = m * n * 4 + {0: 0, 4: m * n * 4 - 4, -4: 4 - source.nbytes}[shift]
    for move, overlaps in ((0, True), (shift, False)) if shift else ((0, True),):
        out.zero_()
        shared = memory[begin + move :][: source.nbytes].view(source.dtype).view(source.shape)
        shared.copy_(source)
        before = memory.clone()
        call = lambda: torch.ops.fp4ext.gemm_add(**{**arguments, what: shared}, out=out)  # noqa: B023, E731
        if overlaps:
            with pytest.raises(RuntimeError, match=f"out shares memory with {what}; accepted: a tensor that overlaps"):
                call()
            assert torch.equal(memory, before)
        else:
            call()
            assert_bytes_equal(out, wanted)


# ---- devices ----


def device_calls():
    """Each op with tensors of its own, by name: every one of which in turn lies on meta."""
    x, stack = generate("gaussian", 24, 64), generate("gaussian", 3, 24, 64)
    key, random = Spec().key, Spec(rounding="stochastic").key
    op, q, qs = torch.ops.fp4ext, raw(fp4ext.quantize(x)), raw(fp4ext.grouped_quantize(stack, Spec()))
    heads = generate("gaussian", 2, 4, 3, 8)
    w = raw(fp4ext.quantize(x))
    choices = ("invariant", "auto")
    return {
        "quantize": (op.quantize, (x, random, -1, RNG, 0, torch.ones(()))),
        "quantize_rowcol": (op.quantize_rowcol, (x, random, random, RNG, RNG.clone(), 0)),
        "amax": (op.amax, (x, Spec(rht=16).key, -1, RNG)),
        "requantize": (op.requantize, (*q, 64, random, -2, RNG, 0)),
        "dequantize": (op.dequantize, (*q, 64, "float32")),
        "grouped_quantize": (op.grouped_quantize, (x, ENDS, random, -1, RNG, 0)),
        "grouped_requantize": (op.grouped_requantize, (*q, 64, ENDS, random, -1, RNG, 0)),
        "grouped_quantize a stack": (op.grouped_quantize, (stack, None, key, -1, None, 0)),
        "gemm": (op.gemm, (*q, *w, torch.ones(24), "float32", *choices)),
        "gemm_add": (op.gemm_add, (*q, *w, torch.ones(24), torch.zeros(24, 24), *choices)),
        "grouped_gemm": (op.grouped_gemm, (*q, *qs, ENDS, "float32", *choices)),
        "attention": (op.attention, (heads, heads.clone(), heads.clone(), torch.zeros(2, dtype=torch.int64), 0.5)),
        "swizzle": (op.swizzle, (q[1], ENDS)),
        "unswizzle": (op.unswizzle, (torch.zeros(2, 1024, dtype=torch.uint8), 12, 5)),
    }


@pytest.mark.parametrize("name", device_calls())
def test_one_device(name):
    op, args = device_calls()[name]
    places = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor)]
    op(*args)
    on_meta = [a.to("meta") if isinstance(a, torch.Tensor) else a for a in args]
    outs = op(*on_meta)
    assert all(t.device.type == "meta" for t in (outs if isinstance(outs, tuple) else [outs]) if t is not None)
    for i in places if len(places) > 1 else []:
        for some, rest in ((args, on_meta), (on_meta, args)):
            mixed = list(rest)
            mixed[i] = some[i]
            with pytest.raises(RuntimeError, match="is on (cpu|meta); accepted: (cpu|meta), where the input is"):
                op(*mixed)


@pytest.mark.parametrize("part", ["codes", "scales", "global_scale"])
def test_a_part_of_a_qtensor_on_another_device(part):
    x, w = operands()
    object.__setattr__(x, part, getattr(x, part).to("meta"))
    for call in (lambda: fp4ext.gemm(x, w), lambda: x.dequantize(), lambda: fp4ext.quantize(x)):
        with pytest.raises((RuntimeError, ValueError), match="is on (cpu|meta); accepted: (cpu|meta)"):
            call()


# ---- values that an op refuses ----


SHAPES = {"tensor": (), "pow2": (), "row": (8, 1), "row_pow2": (8, 1), "expert": (2, 1, 1), "expert_pow2": (2, 1, 1)}


@pytest.mark.parametrize("outer, shape", SHAPES.items())
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, -1.0, -1e-45])
def test_amax_that_is_none(outer, shape, value):
    x = generate("gaussian", *([2, 8, 64] if outer.startswith("expert") else [8, 64]))
    amax = torch.ones(shape)
    for good in (0.0, -0.0, 1e-45, 3.4e38):
        fp4ext.quantize(x, outer=outer, amax=torch.full(shape, good))
    amax.view(-1)[-1] = value
    with pytest.raises(RuntimeError, match=r"amax holds .*; accepted: finite numbers from 0 on"):
        fp4ext.quantize(x, outer=outer, amax=amax)


@pytest.mark.parametrize("key", ["nvfp4/amax/stochastic", "mxfp8/ceil/stochastic", "nvfp4/amax/nearest/1x16/tensor/64"])
def test_a_shard_begins_with_a_block(key):
    """k = 7 had the bits of k = 0, and row = -1 those of 2^32 - 1."""
    spec, x = Spec.parse(key), generate("gaussian", 8, 128)
    place = lambda row, k: torch.tensor([1, 2, row, k])  # noqa: E731
    unit = 64 if spec.rht == "64" else spec.fmt.block
    for k in (0, unit, 7 * unit, 2**32 - unit):
        fp4ext.quantize(x, spec, rng=place(2**32 - 1, k))
    for k in (1, 7, 8, unit // 2, unit + 1):
        with pytest.raises(RuntimeError, match=rf"rng has k {k}; accepted: a multiple of \d+"):
            fp4ext.quantize(x, spec, rng=place(0, k))
    for row, k, name in ((-1, 0, "row -1"), (2**32, 0, "row"), (0, -unit, "k"), (0, 2**32, "k 4294967296")):
        with pytest.raises(RuntimeError, match=rf"rng has {name}.*; accepted: from 0 to 2\^32 - 1"):
            fp4ext.quantize(x, spec, rng=place(row, k))
    with pytest.raises(RuntimeError, match="rng has k 8"):
        fp4ext.grouped_quantize(x, spec, torch.tensor([3, 8], dtype=torch.int32), axis=-2, rng=place(0, 8))


# ---- the arithmetic of an op is its own ----

MXCSR_UP, MXCSR_ZERO = 0x800, 0xC00  # glibc's FE_UPWARD, FE_TOWARDZERO on x86


@contextmanager
def arithmetic(flush=False, rounding=0):
    libm = ctypes.CDLL("libm.so.6")
    torch.set_flush_denormal(flush)
    libm.fesetround(rounding)
    try:
        yield libm
    finally:
        libm.fesetround(0)
        torch.set_flush_denormal(False)


def inputs():
    """Data whose bits hang on subnormals and on the rounding."""
    made = {}
    for kind in ("tiny", "wide"):
        w = generate(kind, 40, 1040, seed=1)
        made[kind] = generate(kind, 72, 1040), w, w.bfloat16()
    return made


def results(data):
    """Of every op."""
    made = {}
    for kind, (x, w, w_bf16) in data.items():
        for key in (
            "nvfp4/sweep",
            "nvfp4/amax/stochastic",
            "nvfp4/sweep/eden/1x16/row/128x2",
            "nvfp4/four_over_six/nearest/16x16",
            "nvfp4/minvar/nearest/1x16/pow2",
            "mxfp8",
            "mxfp4/floor",
        ):
            spec = Spec.parse(key)
            q = fp4ext.quantize(x, spec, rng=RNG)
            made[kind, key] = q
            made[kind, key, "columns"] = fp4ext.quantize(x, spec, axis=-2, rng=RNG)
            made[kind, key, "again"] = fp4ext.quantize(q, "nvfp4", axis=-2)
            made[kind, key, "experts"] = fp4ext.grouped_quantize(
                x, spec, torch.tensor([30, 66], dtype=torch.int32), rng=RNG
            )
            made[kind, key, "values"] = q.dequantize(torch.float32)
            made[kind, key, "half"] = q.dequantize(torch.float16)
            made[kind, key, "y"] = fp4ext.gemm(q, fp4ext.quantize(w, spec, rng=RNG), out_dtype=torch.float32)
            made[kind, key, "mixed"] = fp4ext.gemm(q, w_bf16)
        heads = x[:, :256].reshape(1, 72, 4, 64).transpose(1, 2)
        made[kind, "attention"] = fp4ext.attention(heads, heads, heads)
        made[kind, "plain"] = fp4ext.gemm(x, w, out_dtype=torch.float32)
    flat = {}
    for name, thing in made.items():
        parts = thing.tensors() if hasattr(thing, "tensors") else {"": thing}
        flat |= {(*name, part): t.reshape(-1).view(torch.uint8) for part, t in parts.items()}
    return flat


@pytest.mark.skipif(sys.platform != "linux" or os.uname().machine != "x86_64", reason="rounding modes of x86")
def test_flushing_and_rounding_are_the_ops_own(isa):
    torch.set_num_threads(2)
    data = inputs()
    wanted = results(data)
    for how in ({"flush": True}, {"rounding": MXCSR_UP}, {"flush": True, "rounding": MXCSR_ZERO}):
        with arithmetic(**how) as libm:
            got = results(data)
            assert libm.fegetround() == how.get("rounding", 0)
            tiny = torch.full((4,), 1e-39) * 1.0
            assert (tiny == 0).all() == how.get("flush", False), "the caller's own arithmetic is as it was"
        for name, t in wanted.items():
            assert got[name].numpy().tobytes() == t.numpy().tobytes(), (how, name)


# ---- errors that say why ----


def run(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment}, timeout=120
    )


CALLS = {
    "quantize": "fp4ext.quantize(torch.ones(8, 64))",
    "mxfp8": "fp4ext.quantize(torch.ones(8, 64), 'mxfp8')",
    "gemm": "fp4ext.gemm(torch.ones(8, 64), torch.ones(8, 64))",
    "attention": "fp4ext.attention(*[torch.ones(1, 1, 4, 8)] * 3)",
}


def test_an_unknown_instruction_set_is_named():
    code = "import torch, fp4ext\n"
    for call in CALLS.values():
        code += f"try: {call}\nexcept ValueError as e: print(e)\n"
    lines = run(code, FP4EXT_ISA="bogus").stdout.splitlines()
    assert lines == ["unknown instruction set 'bogus'; accepted: portable, avx2, avx512"] * len(CALLS)


def test_out_of_memory_says_so():
    """Of a tensor that torch allocates, and of what an op keeps beside its tensors, on any thread."""
    torch_says = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
    x = torch.ones(1, 1).expand(2**28, 2**20)
    with pytest.raises(RuntimeError) as error:
        fp4ext.gemm(torch.ones(2**20, 1), torch.ones(1, 1).expand(2**24, 1), out_dtype=torch.float32)
    assert "memory" in str(error.value) and "API call" not in str(error.value) or not torch_says
    with pytest.raises(RuntimeError, match="memory"):
        fp4ext.quantize(x)
    code = f"""
import resource, torch, fp4ext
q, k = torch.ones(1, 1, 300, 8), torch.ones(1, 1, 1, 8).expand(1, 1, 2**26, 8)
{CALLS["attention"]}
torch.set_num_threads(2)
{CALLS["gemm"]}
have = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (have + 2**28, have + 2**28))
try: fp4ext.attention(q, k, k)
except RuntimeError as e: print(e)
"""
    done = run(code)
    assert done.stdout.startswith("out of memory: no room for what this call keeps"), done.stderr


# ---- what an op has no rules for ----


def transformed_calls():
    q, heads = fp4ext.quantize(generate("gaussian", 8, 64)), generate("gaussian", 1, 2, 8, 64)
    stack = fp4ext.grouped_quantize(generate("gaussian", 3, 8, 64), Spec())
    one, two = heads[:, :1], heads[:, :, :2]
    return {
        "quantize": (lambda x: fp4ext.quantize(x).dequantize(), "x"),
        "grouped_quantize": (lambda x: fp4ext.grouped_quantize(x, Spec(), ENDS).dequantize(), "x"),
        "gemm x": (lambda x: fp4ext.gemm(x, q, out_dtype=torch.float32), "x"),
        "gemm w": (lambda x: fp4ext.gemm(q, x, out_dtype=torch.float32), "w"),
        "bias": (lambda x: fp4ext.gemm(q, q, x[:8, 0], out_dtype=torch.float32), "bias"),
        "grouped_gemm": (lambda x: fp4ext.grouped_gemm(x, stack, ENDS, torch.float32), "x"),
        "q": (lambda x: fp4ext.attention(x[None, None], heads, heads), "q"),
        "k": (lambda x: fp4ext.attention(two, x[None, None], one), "k"),
        "out": (lambda x: fp4ext.gemm(q, q, out=x[:8, :8].contiguous()), "out"),
        "amax": (lambda x: fp4ext.quantize(heads, amax=x[0, 0]).dequantize(), "amax"),
    }


@pytest.mark.parametrize("name", transformed_calls())
def test_no_derivative_is_dropped(name):
    f, argument = transformed_calls()[name]
    x, tangent = generate("gaussian", 24, 64), torch.ones(24, 64)
    with forward_ad.dual_level():
        with pytest.raises(NotImplementedError, match=f"{argument} has a tangent, and fp4ext has no forward-mode"):
            f(forward_ad.make_dual(x, tangent))
        with torch.no_grad(), pytest.raises(NotImplementedError, match=f"{argument} has a tangent"):
            f(forward_ad.make_dual(x, tangent))
    inside = f"{argument} is inside a transform of torch.func"
    for transform in (
        lambda: torch.func.jvp(f, (x,), (tangent,)),
        lambda: torch.func.vmap(f)(x[None]),
        lambda: torch.func.grad(lambda x: f(x).sum())(x),
        lambda: torch.func.functionalize(f)(x),
    ):
        with pytest.raises(NotImplementedError, match=inside):
            transform()
    with pytest.raises(NotImplementedError, match=r"\w+ is traced by torch.jit; accepted: torch.compile"):
        torch.jit.trace(f, (x,))


def test_plain_tensors_inside_a_level_are_taken():
    x, w = generate("gaussian", 8, 64), fp4ext.quantize(generate("gaussian", 8, 64))
    wanted = fp4ext.gemm(x, w)
    with forward_ad.dual_level():
        assert_bytes_equal(fp4ext.gemm(x, w), wanted)


# ---- counting ----


def test_flops():
    from torch.utils.flop_counter import FlopCounterMode

    def count(f):
        with FlopCounterMode(display=False) as mode:
            f()
        return mode.get_total_flops()

    x, w = operands(10, 24, 40)  # stored as 48
    assert count(lambda: fp4ext.gemm(x, w)) == 2 * 10 * 24 * 48
    assert count(lambda: fp4ext.gemm(x, generate("gaussian", 24, 40))) == 2 * 10 * 24 * 40
    assert count(lambda: fp4ext.gemm(x, w, out=torch.zeros(10, 24))) == 2 * 10 * 24 * 48
    mx = [fp4ext.quantize(generate("gaussian", n, 40), "mxfp8") for n in (10, 24)]  # stored as 64
    assert count(lambda: fp4ext.gemm(*mx)) == 2 * 10 * 24 * 64
    assert count(lambda: fp4ext.gemm(mx[0], w)) == 2 * 10 * 24 * 48
    tokens = generate("gaussian", 24, 64)
    q, stack = fp4ext.grouped_quantize(tokens, Spec(), ENDS), fp4ext.grouped_quantize(torch.ones(3, 16, 64), Spec())
    assert count(lambda: fp4ext.grouped_gemm(q, stack, ENDS)) == 2 * 24 * 16 * 64
    plain = generate("gaussian", 32, 24)
    assert count(lambda: fp4ext.grouped_gemm(plain, plain[:8], ENDS)) == 2 * 32 * 8 * 24
    heads = generate("gaussian", 2, 4, 5, 8)
    assert count(lambda: fp4ext.attention(heads, heads[:, :2], heads[:, :2])) == 4 * 2 * 4 * 5 * 5 * 8
    assert count(lambda: fp4ext.quantize(tokens)) == 0
    layer = fp4ext.Linear(64, 32, bias=False)
    x = generate("gaussian", 48, 64).requires_grad_()
    assert count(lambda: layer(x).sum().backward()) == 3 * 2 * 48 * 64 * 32
