"""QTensor: inert data that can be stored, moved and decoded, and nothing else."""

import copy
import dataclasses
import io
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

import fp4ext
from fp4ext import QTensor, formats, quantize, reference
from fp4ext.functional import ops
from fp4ext.testing import assert_bytes_equal, generate

NAMES = list(formats.FORMATS)
SHAPES = [(48, 64), (3, 20, 40), (37,), (0, 64), (16, 0), (0,), (2, 0, 32)]


def make(format="nvfp4", shape=(48, 64), dtype=torch.float32, **how):
    return quantize(generate("gaussian", *shape, dtype=dtype), format, **how)


def test_it_is_frozen():
    q = make()
    with pytest.raises(dataclasses.FrozenInstanceError):
        q.codes = q.codes
    assert not isinstance(q, torch.Tensor) and len({q, make()}) == 2


@pytest.mark.parametrize(
    "f",
    [
        lambda q: torch.add(q, 1),
        lambda q: torch.matmul(q, q),
        lambda q: torch.stack([q]),
        lambda q: torch.tensor(q),
        lambda q: torch.as_tensor(q),
        lambda q: torch.nn.functional.linear(torch.ones(2, 64), q),
        lambda q: torch.ones(48, 64) + q,
        lambda q: q @ q,
        lambda q: q * 2,
        lambda q: -q,
        lambda q: q[0],
        lambda q: float(q),
    ],
)
def test_torch_functions_refuse_it(f):
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        f(make())


@pytest.mark.parametrize("format", NAMES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16, torch.float16])
def test_dequantize(format, shape, dtype):
    """Equal to the reference; the default dtype is that of the tensor it was made from."""
    q = make(format, shape, torch.bfloat16)
    wanted = reference.dequantize(q.codes, q.scales, q.global_scale, format, shape[-1], dtype or torch.bfloat16)
    assert_bytes_equal(q.dequantize(dtype), wanted)
    assert q.shape == shape and q.dtype == torch.bfloat16 and q.device == torch.device("cpu")


@pytest.mark.parametrize("outer", formats.NVFP4.outers)
@pytest.mark.parametrize("axis", [-1, -2])
def test_dequantize_with_every_outer_scale(outer, axis):
    q = make(shape=(3, 32, 48), outer=outer, axis=axis)
    assert_bytes_equal(q.dequantize(), reference.dequantize(q.codes, q.scales, q.global_scale, "nvfp4", q.shape[-1]))


def test_dequantize_refuses_a_dtype():
    for dtype in (torch.float64, torch.int8):
        with pytest.raises(TypeError, match="accepted: torch.float32, torch.bfloat16, torch.float16"):
            make().dequantize(dtype)


@pytest.mark.parametrize("format", NAMES)
def test_pieces_of_another_dtype_are_refused(format):
    """Bytes of one format are never read as those of another: neither QTensor nor the ops take them."""
    q = make(format)
    other = make("mxfp8_e5m2" if format == "mxfp8" else "mxfp8")
    for piece in ("codes", "scales"):
        wrong = getattr(q, piece).view(torch.int8)
        with pytest.raises(ValueError, match=f"{piece} is torch.int8 .*; accepted: torch"):
            dataclasses.replace(q, **{piece: wrong})
        stored = list(q.stored())
        stored[("codes", "scales").index(piece)] = wrong
        with pytest.raises(RuntimeError, match=f"{piece} is int8; accepted: uint8"):
            ops.dequantize(*stored, "float32")
    if format == "mxfp8":
        with pytest.raises(ValueError, match="codes is torch.float8_e5m2"):
            dataclasses.replace(q, codes=other.codes)
        with pytest.raises(RuntimeError, match="codes is float8_e5m2; accepted: "):
            ops.dequantize(other.codes, *q.stored()[1:], "float32")


SIZES = [("nvfp4", "tensor", 4.5 + 32 / 3072), ("nvfp4", "row", 5.0), ("mxfp8", None, 8.25), ("mxfp4", None, 4.25)]


@pytest.mark.parametrize("format, outer, bits", SIZES)
def test_size(format, outer, bits):
    """Codes, block scales and one fp32 for the tensor or each row of 64."""
    q = make(format, (48, 64), outer=outer)
    assert q.bits_per_element == bits == 8 * q.nbytes / 3072
    assert f"({format}, shape=(48, 64), {bits:.2f} bits" in repr(q)


def test_an_empty_tensor_has_no_bits_per_element():
    q = make(shape=(0, 64))
    assert q.nbytes == 4 and q.bits_per_element != q.bits_per_element and "nan" in repr(q)


def test_to():
    q = make(outer="row")
    for device in ("meta", torch.device("meta")):
        moved = q.to(device)
        assert moved.device.type == "meta" and moved.shape == q.shape and moved.format is q.format
        assert {t.device.type for t in moved.tensors().values()} == {"meta"} and moved.dequantize().shape == q.shape
    assert_bytes_equal(q.to("cpu").dequantize(), q.dequantize())
    for wrong in (torch.bfloat16, "fp4", None):
        with pytest.raises((TypeError, RuntimeError)):
            q.to(wrong)


# On disk


def roundtrip(path, **qs):
    """Through a real file: {name: QTensor} there and back."""
    tensors, metadata = {}, {}
    for name, q in qs.items():
        t, m = q.to_safetensors(name)
        tensors |= t
        metadata |= m
    save_file(tensors, path, metadata)
    with safe_open(path, "pt") as f:
        loaded = {key: f.get_tensor(key) for key in f.keys()}  # noqa: SIM118
        return {name: QTensor.from_safetensors(name, loaded, f.metadata()) for name in qs}


def same(a: QTensor, b: QTensor):
    assert (a.format, a.shape, a.dtype) == (b.format, b.shape, b.dtype) and a.tensors().keys() == b.tensors().keys()
    for name, t in a.tensors().items():
        assert_bytes_equal(t, b.tensors()[name], name)


@pytest.mark.parametrize("shape", SHAPES)
def test_safetensors_round_trip(tmp_path, shape):
    """Every format in one file, under dotted names."""
    qs = {f"layers.0.{name}": make(name, shape, torch.bfloat16) for name in NAMES}
    for name, q in roundtrip(tmp_path / "q.safetensors", **qs).items():
        same(q, qs[name])


@pytest.mark.parametrize("outer", formats.NVFP4.outers)
@pytest.mark.parametrize("axis", [-1, -2])
def test_safetensors_keep_every_outer_scale(tmp_path, outer, axis):
    q = make(shape=(3, 32, 48), outer=outer, axis=axis)
    same(roundtrip(tmp_path / "q.safetensors", w=q)["w"], q)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(NAMES), st.lists(st.integers(0, 20), min_size=1, max_size=4), st.sampled_from(["row", "pow2"]))
def test_what_is_stored_is_what_is_read(format, shape, outer):
    q = make(format, shape, torch.float16, outer=outer if format == "nvfp4" else None)
    same(QTensor.from_safetensors("a.b", *q.to_safetensors("a.b")), q)


@pytest.mark.parametrize("missing", ["codes", "scales", "global_scale", "format", "shape", "dtype"])
def test_a_missing_piece_is_named(missing):
    parts = make().to_safetensors("w")
    for part in parts:
        part.pop(f"w.{missing}", None)
    with pytest.raises(KeyError, match=f"w.{missing}"):
        QTensor.from_safetensors("w", *parts)


def test_another_name_is_named():
    with pytest.raises(KeyError, match="no QTensor 'v' here: missing v.format, v.shape, v.dtype, v.codes, v.scales"):
        QTensor.from_safetensors("v", *make().to_safetensors("w"))


ILL_FITTING = {
    "w.codes is torch.uint8 (47, 32); accepted: torch.uint8 (48, 32)": {"codes": lambda q: q.codes[1:]},
    "w.codes is torch.int8 (48, 32)": {"codes": lambda q: q.codes.view(torch.int8)},
    "w.scales is torch.float8_e4m3fn (48, 3); accepted: torch.float8_e4m3fn (48, 4)": {
        "scales": lambda q: q.scales[:, 1:]},
    "w.scales is torch.uint8": {"scales": lambda q: q.scales.view(torch.uint8)},
    "w.global_scale is torch.float32 (2,); accepted: torch.float32 () or (48, 1)": {
        "global_scale": lambda q: torch.ones(2)},
    "w.global_scale is torch.float64": {"global_scale": lambda q: torch.ones((), dtype=torch.float64)},
    "unknown format 'fp5'; formats: nvfp4": {"format": lambda q: "fp5"},
    "w.codes is torch.uint8 (48, 32); accepted: torch.float8_e4m3fn (48, 64)": {"format": lambda q: "mxfp8"},
    "w.shape is '48,x'; accepted: lengths such as '64,128'": {"shape": lambda q: "48,x"},
    "w.shape is ''": {"shape": lambda q: ""},
    "w.shape is '-1,64'": {"shape": lambda q: "-1,64"},
    "w.dtype is 'float64'; accepted: float32, bfloat16, float16": {"dtype": lambda q: "float64"},
    "w.dtype is 'nn'": {"dtype": lambda q: "nn"},
}  # fmt: skip


@pytest.mark.parametrize("message", ILL_FITTING, ids=lambda m: m)
def test_an_ill_fitting_piece_is_named(message):
    q = make()
    tensors, metadata = q.to_safetensors("w")
    for key, change in ILL_FITTING[message].items():
        (tensors if f"w.{key}" in tensors else metadata)[f"w.{key}"] = change(q)
    with pytest.raises(ValueError) as error:
        QTensor.from_safetensors("w", tensors, metadata)
    assert message in str(error.value)


def test_an_outer_scale_that_a_format_lacks_is_refused():
    tensors, metadata = make("mxfp8").to_safetensors("w")
    with pytest.raises(ValueError, match="w.global_scale is .*; accepted: none, for mxfp8"):
        QTensor.from_safetensors("w", tensors | {"w.global_scale": torch.ones(())}, metadata)


# Copies


def copies(q):
    """A QTensor by every way in which Python and torch copy things."""

    def saved(weights_only):
        buffer = io.BytesIO()
        torch.save({"q": q}, buffer)
        buffer.seek(0)
        return torch.load(buffer, weights_only=weights_only)["q"]

    yield copy.copy(q)
    yield copy.deepcopy(q)
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        yield pickle.loads(pickle.dumps(q, protocol))
    yield from (saved(False), saved(True))


@pytest.mark.parametrize("format", NAMES)
def test_a_copy_keeps_the_format_itself(format):
    """`format is …` decides in many places, so a Format has one object for each name."""
    q = make(format)
    for made in copies(q):
        same(made, q)
        assert made.format is q.format and made.format.element is q.format.element


@pytest.mark.parametrize("name", NAMES)
def test_a_format_is_one_object(name):
    fmt = formats.FORMATS[name]
    for made in (copy.copy(fmt), copy.deepcopy(fmt), pickle.loads(pickle.dumps(fmt)), copy.deepcopy([fmt])[0]):
        assert made is fmt
    assert copy.deepcopy(fmt.element) is fmt.element and pickle.loads(pickle.dumps(fmt.element)) is fmt.element


def test_a_copied_weight_multiplies_as_the_weight():
    """The layer of a copied QTensor quantizes its input too, and is exported as the layer was."""
    for name in ("nvfp4", "mxfp8"):
        q = make(name)
        of = lambda w: fp4ext.nn.packed_layers.QuantizedLinear.of(w, None, "end_to_end" if name == "nvfp4" else "mxfp8")  # noqa: B023, E731
        layer, copied = of(q), of(copy.deepcopy(q))
        assert layer.x is not None and copied.x == layer.x
        assert copy.deepcopy(layer).format is q.format


# The constructor

PARTS = {
    "codes is torch.int8": {"codes": lambda q: q.codes.view(torch.int8)},
    "codes is torch.uint8 (47, 32); accepted: torch.uint8 (48, 32)": {"codes": lambda q: q.codes[1:]},
    "codes is list; accepted: a Tensor": {"codes": lambda q: [1]},
    "scales is torch.uint8": {"scales": lambda q: q.scales.view(torch.uint8)},
    "scales is torch.float8_e4m3fn (48, 3)": {"scales": lambda q: q.scales[:, 1:]},
    "global_scale is None; accepted: torch.float32": {"global_scale": lambda q: None},
    "global_scale is torch.float64": {"global_scale": lambda q: q.global_scale.double()},
    "global_scale is torch.float32 (2,)": {"global_scale": lambda q: torch.ones(2)},
    "format is 'nvfp4'; accepted: a Format": {"format": lambda q: "nvfp4"},
    "dtype is torch.float64; accepted: torch.float32, torch.bfloat16, torch.float16": {
        "dtype": lambda q: torch.float64},
    "codes is torch.uint8 (48, 32); accepted: torch.uint8 (48, 40)": {"shape": lambda q: torch.Size((48, 80))},
}  # fmt: skip


@pytest.mark.parametrize("message", PARTS, ids=lambda m: m)
def test_parts_that_do_not_fit_are_refused(message):
    q = make()
    with pytest.raises((ValueError, TypeError)) as error:
        dataclasses.replace(q, **{key: change(q) for key, change in PARTS[message].items()})
    assert message in str(error.value)


def test_a_format_without_an_outer_scale_takes_none():
    with pytest.raises(ValueError, match="global_scale is .*; accepted: none, for mxfp8"):
        dataclasses.replace(make("mxfp8"), global_scale=torch.ones(()))
