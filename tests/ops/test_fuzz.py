"""Any call of any op: refused by the op and its fake alike, or the same bytes however the arguments lie in memory.

A Case is a whole call, as data: hypothesis draws, shrinks and prints it, and a printed one goes into CORPUS below. What
is asked of each is `check`. `make fuzz` draws for as long as one likes.
"""

import math
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

import fp4ext
from fp4ext import formats
from fp4ext.policy.spec import RHTS, ROUNDINGS
from fp4ext.testing import KINDS, assert_bytes_equal, fuzz, generate

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PLAIN = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FORMATS = [*formats.FORMATS, *PLAIN]
FILLS = [*KINDS, "bits"]  # bits: any pattern, signalling NaNs and all
LAYOUTS = ["plain", "offset", "strided", "transposed", "expanded", "flipped", "negated", "inference"]
OF_VALUES = ("offsets[", "start is", "amax holds", "rng has row", "rng has k")  # what no fake can see


@dataclass(frozen=True)
class Case:
    """One call. Sizes are those of a product, [m, k]·[n, k]ᵀ, in e experts; change: (argument, what becomes of it)."""

    op: str
    m: int = 3
    n: int = 5
    k: int = 40
    e: int = 2
    lead: tuple = ()
    formats: tuple = ("nvfp4", "nvfp4")
    specs: tuple = ("nvfp4/amax/nearest/1x16/tensor/none", "nvfp4/sweep/nearest/1x16/row/none")
    dtype: str = "float32"
    axis: int = -1
    role: int = 0
    fill: str = "gaussian"
    layouts: tuple = ("plain",)
    optional: bool = True
    change: tuple | None = None
    isa: str = "portable"
    threads: int = 1
    seed: int = 0


CORPUS = [
    Case("gemm_add", layouts=("plain", "plain", "plain", "offset")),
    Case("gemm", change=(1, "meta")),  # some on meta: memory that nobody wrote
    Case("attention", change=(3, "meta")),
    Case("quantize", specs=("nvfp4/amax/nearest/1x16/expert/none", "mxfp8/ceil/nearest/1x32/none/none")),
    Case("amax", specs=("mxfp8/ceil/nearest/1x32/none/none", "mxfp8/ceil/nearest/1x32/none/none")),
    Case("dequantize", change=(4, 2**63 - 1)),  # k rounded up to a block passed 2^63
    Case("unswizzle", change=(1, 2**62)),
    Case("gemm", k=0),  # nothing to pack: memset of a null pointer
    Case("quantize", m=2**20, n=0, k=0, lead=(2**40,), fill="zeros"),  # sizes beside a zero whose product passes 2^63
]


# ---- from a Case to arguments ----


class Call:
    """The arguments of a Case, before anything is changed."""

    def __init__(self, case):
        self.case, self.g = case, torch.Generator().manual_seed(case.seed)

    def floats(self, *shape, dtype=None):
        dtype = dtype or DTYPES[self.case.dtype]
        if self.case.fill == "bits":
            as_bytes = torch.randint(0, 256, (math.prod(shape) * dtype.itemsize,), generator=self.g).to(torch.uint8)
            return as_bytes.view(dtype).view(shape)
        return generate(self.case.fill, *shape, seed=self.case.seed, dtype=dtype)

    def bytes(self, *shape):
        return torch.randint(0, 256, shape, generator=self.g).to(torch.uint8)

    def rng(self):
        state = torch.randint(-(2**62), 2**62, (2,), generator=self.g)
        return torch.cat([state, torch.tensor([3, 256])]) if self.case.optional else state

    def ends(self, rows):
        return torch.sort(torch.randint(0, rows + 1, (max(self.case.e, 1),), generator=self.g)).values.to(torch.int32)

    def globals(self, *groups):
        """One value, or one for each of so many."""
        n = groups[self.case.seed % len(groups)]
        return torch.rand(n, generator=self.g) + 0.5

    def stored(self, *shape, format=None):
        """Codes, scales and global scale of random bytes."""
        fmt = formats.get(format or next((f for f in self.case.formats if f in formats.FORMATS), "mxfp8"))
        *rows, k = shape
        padded = fmt.padded(k)
        codes, scales = self.bytes(*rows, padded // fmt.codes_per_byte), self.bytes(*rows, padded // fmt.block)
        outer = self.globals(1, math.prod(rows)) if fmt.has_global_scale else torch.empty(0)
        return codes, scales, outer, fmt.name

    def operand(self, format, *shape):
        if format in PLAIN:
            return self.floats(*shape, dtype=PLAIN[format]), None, None, format
        codes, scales, outer, name = self.stored(*shape, format=format)
        return codes, scales, outer if outer.numel() else None, name

    def x(self):
        c = self.case
        return self.floats(*c.lead, c.m, c.k)

    def arguments(self):
        return getattr(self, self.case.op)()

    def quantize(self):
        c = self.case
        return [self.x(), c.specs[0], c.axis, self.rng(), c.role, None]

    def quantize_rowcol(self):
        c = self.case
        return [self.x(), *c.specs, self.rng(), self.rng(), c.role]

    def amax(self):
        c = self.case
        return [self.x(), c.specs[0], c.axis, self.rng()]

    def requantize(self):
        c = self.case
        return [*self.stored(*c.lead, c.m, c.k), c.k, c.specs[0], c.axis, self.rng(), c.role]

    def dequantize(self):
        c = self.case
        return [*self.stored(*c.lead, c.m, c.k), c.k, c.dtype]

    def grouped_quantize(self):
        c = self.case
        x, ends = (self.floats(c.m, c.k), self.ends(c.m)) if c.optional else (self.floats(c.e, c.m, c.k), None)
        return [x, ends, c.specs[0], c.axis, self.rng(), c.role]

    def grouped_requantize(self):
        c = self.case
        shape, ends = ((c.m, c.k), self.ends(c.m)) if c.optional else ((c.e, c.m, c.k), None)
        return [*self.stored(*shape), c.k, ends, c.specs[0], c.axis, self.rng(), c.role]

    def gemm(self):
        c = self.case
        x, w = self.operand(c.formats[0], *c.lead, c.m, c.k), self.operand(c.formats[1], c.n, c.k)
        bias = self.floats(c.n) if c.optional else None
        return [*x, *w, bias, ("float32", "bfloat16")[c.seed % 2], "invariant", "auto"]

    def gemm_add(self):
        c = self.case
        *operands, _, _, _ = self.gemm()
        return [*operands, self.floats(*c.lead, c.m, c.n, dtype=torch.float32), "invariant", "auto"]

    def grouped_gemm(self):
        c = self.case
        if c.optional:
            x, w = self.operand(c.formats[0], c.m, c.k), self.operand(c.formats[1], max(c.e, 1), c.n, c.k)
            return [*x, *w, self.ends(c.m), "float32", "invariant", "auto"]
        tokens = c.k + 32 * max(c.e, 1)
        x, w = self.operand(c.formats[0], c.m, tokens), self.operand(c.formats[1], c.n, tokens)
        return [*x, *w, self.ends(c.k), "bfloat16", "invariant", "auto"]

    def attention(self):
        c = self.case
        keys, groups = c.m + c.n, max(c.e, 1)
        q = self.floats(2, 2 * groups, c.m, c.k % 33)
        k, v = (self.floats(2, groups, keys, c.k % 33) for _ in range(2))
        return [q, k, v, torch.tensor([0, c.n]) if c.optional else None, 0.25]

    def swizzle(self):
        c = self.case
        return [self.bytes(c.m, c.k % 9), self.ends(c.m)] if c.optional else [self.bytes(*c.lead, c.m, c.k % 9), None]

    def unswizzle(self):
        c = self.case
        size = (c.m + 127) // 128 * 128 * ((c.k % 9 + 3) // 4 * 4)
        return [self.bytes(*c.lead, size), c.m, c.k % 9]


SCHEMAS = (Path(__file__).parents[2] / "csrc/ops/library.cpp").read_text()
OPS = re.findall(r'"(\w+)\(Tensor', SCHEMAS)


def laid_out(t, layout):
    """The same values, or for "expanded" others, in memory of another form."""
    if layout == "offset":
        return torch.cat([t.new_zeros(1), t.reshape(-1)])[1:].view(t.shape)
    if layout == "strided":
        return torch.stack([t, t], -1)[..., 0]
    if layout == "transposed" and t.dim() >= 2:
        return t.mT.contiguous().mT
    if layout == "expanded" and t.dim() >= 1 and t.shape[0] and t.dtype not in (torch.int32, torch.int64):
        return t[:1].expand(t.shape)
    if layout == "flipped" and t.dim() >= 1:
        return t.flip(-1).flip(-1)
    if layout == "negated" and t.is_floating_point():
        return torch._neg_view(t.neg())
    if layout == "inference":
        with torch.inference_mode():
            return t.clone()
    return t


CHANGES = [
    "meta", "none", "float32", "float16", "float64", "uint8", "int64", "longer", "shorter", "wider", "flatter", "empty",
    "scalar", "", "bogus", "mxfp8", "bf16", "nan", -3, 0, 1, 2, 7, 2**62, 2**63 - 1,
]  # fmt: skip


def changed(a, how):
    """An argument, or something else in its place that a schema lets through."""
    if isinstance(a, str):
        return how if isinstance(how, str) else a + "/none"
    if isinstance(a, float):
        return math.nan if how == "nan" else float(how) if isinstance(how, int) else math.inf
    if isinstance(a, int):
        return how if isinstance(how, int) else -1
    if a is None:
        return torch.zeros(2, 2)
    if isinstance(how, int):
        return a.reshape(-1)[: abs(how) % 5]
    if how in ("float32", "float16", "float64", "uint8", "int64"):
        return a.to(getattr(torch, how))
    forms = {
        "meta": lambda: a.to("meta"),
        "longer": lambda: torch.cat([a, a[..., :1]], -1) if a.dim() else a[None],
        "shorter": lambda: a[..., :-1] if a.dim() else a,
        "wider": lambda: a.unsqueeze(0),
        "flatter": lambda: a.reshape(-1),
        "empty": lambda: a[:0] if a.dim() else a[None][:0],
        "scalar": lambda: a.new_zeros(()),
    }
    return forms.get(how, lambda: a.reshape(-1)[::2])()


# ---- what is asked ----


def outcome(op, args):
    """("refused", why) or ("done", tensors)."""
    try:
        out = op(*args)
    except (RuntimeError, ValueError) as error:
        return "refused", str(error)
    return "done", [out] if isinstance(out, torch.Tensor) else list(out or [])


def form(t):
    return t.shape, t.dtype, t.device, t.stride()


def contents(args):
    return [a.clone() if isinstance(a, torch.Tensor) and a.device.type == "cpu" else None for a in args]


def check(case):
    op = getattr(torch.ops.fp4ext, case.op).default
    args, huge = Call(case).arguments(), math.prod(case.lead) * case.m * case.k > 2**24
    tensors = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor)]
    for i, at in enumerate(tensors):
        args[at] = laid_out(args[at], case.layouts[i % len(case.layouts)])
    if case.change:
        at, how = case.change[0] % len(args), case.change[1]
        args[at] = changed(args[at], how)
    if huge:
        return

    # The fake first: it changes nothing, and neither does a refusal.
    written = args[9] if case.op == "gemm_add" else None
    before, was = contents(args), [version(a) for a in args]
    copies = [a.clone() if isinstance(a, torch.Tensor) and a.is_inference() else a for a in args]
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in copies]
        said, fake = outcome(op, fakes)
    fp4ext._C.force_isa(case.isa)
    torch.set_num_threads(case.threads)
    did, real = outcome(op, args)
    assert [version(a) for a in args] == [
        v if v is None or did == "refused" or a is not written else v + 1 for v, a in zip(was, args, strict=True)
    ]
    for a, b in zip(args, before, strict=True):
        if b is not None and (a is not written or did == "refused"):
            assert_bytes_equal(a.clone(), b, "an argument")
    if did == "refused":
        assert "API call" not in real and "bad_alloc" not in real, real
        if case.op == "gemm_add" and isinstance(written, torch.Tensor) and written.is_inference():
            assert "inference tensor" in real or said == "refused"
        else:
            assert said == "refused" or any(what in real for what in OF_VALUES), f"the fake took it: {real}"
        return
    assert said == "done", f"the fake refused: {fake}"
    assert [form(t)[:2] for t in real] == [form(t)[:2] for t in fake]
    if any(t.device.type == "meta" for t in args if isinstance(t, torch.Tensor)):
        assert all(t.device.type == "meta" for t in real)
        return
    assert [form(t) for t in real] == [form(t) for t in fake]

    # The same bytes from dense arguments, by another instruction set and another number of threads.
    dense = [
        a if b is None else b.clone(memory_format=torch.contiguous_format) for a, b in zip(args, before, strict=True)
    ]
    fp4ext._C.force_isa(fp4ext._C.isas()[-1])
    torch.set_num_threads(3 - case.threads)
    wanted = outcome(op, dense)[1]
    if written is not None:
        real, wanted = [args[9]], [dense[9]]
    for i, (a, b) in enumerate(zip(real, wanted, strict=True)):
        assert_bytes_equal(a, b, f"result {i}")


def version(a):
    return a._version if isinstance(a, torch.Tensor) and not a.is_inference() else None


# ---- the draws ----


def specs():
    def of(name):
        fmt = formats.get(name)
        parts = [fmt.scale_rules, ROUNDINGS, fmt.blocks, fmt.outers, RHTS]
        return st.tuples(*map(st.sampled_from, parts)).map(lambda rest: "/".join((name, *rest)))

    return st.sampled_from(list(formats.FORMATS)).flatmap(of).filter(lambda key: taken(key) or hash_of(key) % 8 == 0)


def taken(key):
    try:
        fp4ext.Spec.parse(key)
    except ValueError:
        return False
    return True


def hash_of(key):
    return sum(key.encode())


SIZES = st.sampled_from([0, 1, 2, 3, 4, 5, 15, 16, 17, 31, 33, 64, 130])
LENGTHS = st.sampled_from([0, 1, 8, 15, 16, 17, 31, 32, 33, 40, 64, 80, 128, 144, 272, 1040])
CASES = st.builds(
    Case,
    op=st.sampled_from(OPS),
    m=SIZES,
    n=SIZES,
    k=LENGTHS,
    e=st.integers(0, 4),
    lead=st.sampled_from([(), (), (), (2,), (3,), (0,), (2, 2)]),
    formats=st.tuples(st.sampled_from(FORMATS), st.sampled_from(FORMATS)),
    specs=st.tuples(specs(), specs()),
    dtype=st.sampled_from(list(DTYPES)),
    axis=st.sampled_from([-1, -2]),
    role=st.integers(0, 2),
    fill=st.sampled_from(FILLS),
    layouts=st.lists(st.sampled_from(LAYOUTS), min_size=1, max_size=4).map(tuple),
    optional=st.booleans(),
    change=st.none() | st.tuples(st.integers(0, 12), st.sampled_from(CHANGES)),
    isa=st.sampled_from(fp4ext._C.isas()),
    threads=st.integers(1, 2),
    seed=st.integers(0, 2**32),
)
HOW = dict(deadline=None, database=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(autouse=True, scope="module")
def same_isa_afterwards():
    before = fp4ext._C.isa()
    yield
    fp4ext._C.force_isa(before)


@settings(max_examples=400, derandomize=True, **HOW)
@given(CASES)
def test_some_calls(case):
    check(case)


@pytest.mark.parametrize("case", CORPUS, ids=lambda case: case.op)
def test_past_failures(case):
    check(case)


@pytest.mark.fuzz
@pytest.mark.slow
def test_calls_for_as_long_as_one_asks():
    for number in fuzz.rounds():
        run = given(CASES)(check)
        run = settings(max_examples=300, phases=[Phase.generate, Phase.shrink], **HOW)(run)
        seed(number)(run)()
