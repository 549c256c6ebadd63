"""A checkpoint from a stranger: refused with the name of what is wrong, or loaded right. Nothing in between."""

import json
import os
import struct

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save, save_file

import fp4ext
from fp4ext.export import Refused, load
from fp4ext.export import save as export
from fp4ext.export.header import read_header

from .models import folder_of


def file_of(header, data=b"", length=None) -> bytes:
    """A safetensors file with this header, an object or bytes, whatever it says."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype="F32", shape=(2,), offsets=(0, 8), **more) -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)} | more


EIGHT = bytes(8)
HEADERS = {
    "too short for a header": b"\x01\x02",
    "its header claims 99 bytes": file_of({}, length=99),
    "its header claims 18446744073709551615 bytes": file_of({}, length=2**64 - 1),
    "not valid JSON": file_of(b"{]"),
    "not valid JSON ('utf-8'": file_of(b"\xff\xfe{}"),
    "JSON nested too deep": file_of(b"[" * 200_000),
    "'a' is there twice": file_of(b'{"a": 1, "a": 2}'),
    "NaN is no JSON number": file_of(b'{"a": NaN}'),
    "its header is a list": file_of([]),
    "its header is a int": file_of(b"7"),
    "__metadata__ is not all text": file_of({"__metadata__": {"a": 1}}),
    "__metadata__ is not all": file_of({"__metadata__": []}),
    "tensor 'a': its entry is not {dtype, shape, data_offsets}": file_of({"a": 3}),
    "tensor 'a': its entry is not": file_of({"a": entry(more=1)}),
    "tensor 'a': dtype is 'F99'": file_of({"a": entry("F99")}, EIGHT),
    "tensor 'a': dtype is ['F32']": file_of({"a": entry() | {"dtype": ["F32"]}}, EIGHT),
    "tensor 'a': shape is [-2]": file_of({"a": entry(shape=[-2])}, EIGHT),
    "tensor 'a': shape is [True]": file_of({"a": entry(shape=[True])}, EIGHT),
    "tensor 'a': shape is [2.0]": file_of({"a": entry(shape=[2.0])}, EIGHT),
    "tensor 'a': shape is '2'": file_of({"a": entry() | {"shape": "2"}}, EIGHT),
    "tensor 'a': shape is [1, 1, 1": file_of({"a": entry(shape=[1] * 99)}, EIGHT),
    "tensor 'a': shape is [9223372036854775808]": file_of({"a": entry(shape=[2**63])}, EIGHT),
    "not valid JSON (Exceeds the limit": file_of(b'{"a": {"dtype": "F32", "shape": [' + b"9" * 5000 + b"]}}"),
    "tensor 'a': data_offsets is [8, 0]": file_of({"a": entry(offsets=[8, 0])}, EIGHT),
    "tensor 'a': data_offsets is [0]": file_of({"a": entry(offsets=[0])}, EIGHT),
    "tensor 'a': data_offsets is [-8, 0]": file_of({"a": entry(offsets=[-8, 0])}, EIGHT),
    "tensor 'a': F32 [3] takes 12 bytes, its offsets span 8": file_of({"a": entry(shape=[3])}, EIGHT),
    "F32 [9007199254740991, 9007199254740991] takes": file_of({"a": entry(shape=[2**53 - 1] * 2)}, EIGHT),
    "tensor 'a' ends at byte 8 of 4": file_of({"a": entry()}, bytes(4)),
    "tensor 'b' begins at byte 4, where 8 follows": file_of({"a": entry(), "b": entry(offsets=[4, 12])}, bytes(12)),
    "tensor 'b' begins at byte 12, where 8 follows": file_of({"a": entry(), "b": entry(offsets=[12, 20])}, bytes(20)),
    "4 bytes after the last tensor": file_of({"a": entry()}, bytes(12)),
}


@pytest.mark.parametrize("message", HEADERS, ids=lambda m: m[:40])
def test_headers(message, tmp_path):
    path = tmp_path / "a.safetensors"
    path.write_bytes(HEADERS[message])
    with pytest.raises(Refused) as error:
        load(path)
    assert message in str(error.value) and str(path) in str(error.value) and "\n" not in str(error.value)


def test_no_file_a_folder_and_a_pipe(tmp_path):
    with pytest.raises(Refused, match="not there"):
        load(tmp_path / "none")
    with pytest.raises(Refused, match="no safetensors file in it"):
        load(tmp_path)
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(Refused, match="not a regular file"):
        load(tmp_path)


def test_a_pickle_is_not_opened(tmp_path):
    torch.save({"a": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(Refused, match="no safetensors file in it"):
        load(tmp_path)
    with pytest.raises(Refused, match="header claims"):
        load(tmp_path / "pytorch_model.bin")


# An index

A, B = {"a": torch.ones(2)}, {"b": torch.ones(2)}


def sharded(folder, weight_map, one=A, two=B):
    folder.mkdir(exist_ok=True)
    save_file(one, folder / "1.safetensors")
    save_file(two, folder / "2.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_a_good_index(tmp_path):
    assert set(load(sharded(tmp_path, {"a": "1.safetensors", "b": "2.safetensors"}))) == {"a", "b"}


INDEXES = {
    "tensor 'a' lies in '../1.safetensors'": {"a": "../1.safetensors"},
    "tensor 'a' lies in '/etc/passwd'": {"a": "/etc/passwd"},
    "tensor 'a' lies in '..'": {"a": ".."},
    "tensor 'a' lies in ''": {"a": ""},
    "tensor 'a' lies in 'x\\\\1.safetensors'": {"a": "x\\1.safetensors"},
    "no weight_map of names": {"a": ["1.safetensors"]},
    "no weight_map": {},
    "3.safetensors: cannot be read": {"a": "1.safetensors", "b": "3.safetensors"},
    "tensor 'b' is here, the index does not list it": {"a": "1.safetensors", "c": "2.safetensors"},
    "tensor 'c' is in no file": {"a": "1.safetensors", "b": "2.safetensors", "c": "1.safetensors"},
    "tensor 'a' is here, the index has it in 2.safetensors": {"a": "2.safetensors", "b": "1.safetensors"},
}


@pytest.mark.parametrize("message", INDEXES)
def test_indexes(message, tmp_path):
    with pytest.raises(Refused) as error:
        load(sharded(tmp_path, INDEXES[message]))
    assert message in str(error.value)


def test_a_tensor_in_two_shards(tmp_path):
    with pytest.raises(Refused, match="tensor 'a' is also in 1.safetensors"):
        load(sharded(tmp_path, {"a": "1.safetensors", "b": "2.safetensors"}, two=A | B))


@pytest.mark.parametrize("name", ["config.json", "hf_quant_config.json", "model.safetensors.index.json"])
def test_json_beside(name, tmp_path):
    save_file(A, tmp_path / "model.safetensors")
    for text in ("[]", "{", '{"a": 1, "a": 1}', "[" * 100_000):
        (tmp_path / name).write_text(text)
        with pytest.raises(Refused, match=name):
            load(tmp_path)
    with open(tmp_path / name, "wb") as file:
        file.truncate(65_000_000)
    with pytest.raises(Refused, match="accepted: at most 64000000"):
        load(tmp_path)


@pytest.mark.parametrize("about", [[], "fp8", {"ignore": 3}, {"ignore": [1, {}]}, {"quant_method": ["modelopt"]}])
def test_a_config_of_another_kind_is_harmless(about, tmp_path):
    folder_of(tmp_path, GOOD["compressed-tensors"](), {"quantization_config": about, "dtype": ["x"]})
    assert load(tmp_path)["m.0.w.weight"].shape == (32, 64)
    fp4ext.export.inspect(tmp_path)


# Pieces of weights

NV = fp4ext.quantize(torch.randn(32, 64, generator=torch.Generator().manual_seed(0)), "nvfp4")
MX8 = fp4ext.quantize(torch.randn(32, 64, generator=torch.Generator().manual_seed(0)), "mxfp8")
MX4 = fp4ext.quantize(torch.randn(32, 64, generator=torch.Generator().manual_seed(0)), "mxfp4")
W, X13 = "m.0.w.weight", "m.0.experts.w13_weight"
U8 = torch.uint8


def two(t):
    return torch.stack([t.view(U8)] * 2).view(t.dtype)


GOOD = {
    "compressed-tensors": lambda: {
        "m.0.w.weight_packed": NV.codes,
        "m.0.w.weight_scale": NV.scales,
        "m.0.w.weight_global_scale": torch.tensor([3584.0]),
    },
    "compressed-tensors mxfp4": lambda: {"m.0.w.weight_packed": MX4.codes, "m.0.w.weight_scale": MX4.scales.view(U8)},
    "compressed-tensors mxfp8": lambda: {W: MX8.codes, f"{W}_scale": MX8.scales.view(U8)},
    "modelopt": lambda: {W: NV.codes, f"{W}_scale": NV.scales, f"{W}_scale_2": torch.tensor(1 / 4096)},
    "gpt-oss": lambda: {
        "m.experts.down_proj_blocks": two(MX4.codes).unflatten(-1, (2, 16)),
        "m.experts.down_proj_scales": two(MX4.scales).view(U8),
    },
    "inkling": lambda: {
        X13: two(NV.codes),
        f"{X13}.scale": two(NV.scales),
        f"{X13}.scale2": torch.ones(2),
        f"{X13}.original_shape": torch.tensor([2, 32, 64]),
    },
    "inkling2": lambda: {
        X13: two(NV.codes),
        f"{X13}_scale": two(NV.scales),
        f"{X13}_amax": torch.ones(2),
        f"{X13}_outer_scale_denominator": torch.tensor(2688.0),
    },
    "inkling2 mxfp8": lambda: {X13: two(MX8.codes), f"{X13}_scale": two(MX8.scales).view(U8)},
}
OPTIONAL = (".original_shape",)


@pytest.mark.parametrize("layout", GOOD)
def test_good_pieces(layout, tmp_path):
    checkpoint = load(folder_of(tmp_path, GOOD[layout]()))
    assert checkpoint.layout.name == layout.split(" ")[0]
    (name,) = checkpoint
    assert checkpoint.shape(name) == tuple(checkpoint[name].shape) and checkpoint[name].shape[-2:] == (32, 64)


@pytest.mark.parametrize("layout", GOOD)
def test_a_missing_piece_is_named(layout, tmp_path):
    """A scale that is not there is never read as 0 or 1."""
    for i, missing in enumerate(GOOD[layout]()):
        if missing.endswith(OPTIONAL):
            continue
        pieces = GOOD[layout]()
        del pieces[missing]
        if list(pieces) == [W] or all(key == X13 for key in pieces):
            pieces |= {f"other.{key}": value.clone() for key, value in GOOD[layout]().items()}
        folder_of(tmp_path / str(i), pieces)
        with pytest.raises(Refused) as error:
            load(tmp_path / str(i))
        stem = missing.rpartition("_" if missing.endswith("_proj_scales") else ".")[0].split("_blocks")[0]
        assert stem.removesuffix("_proj") in str(error.value), (missing, str(error.value))


@pytest.mark.parametrize("layout", GOOD)
def test_pieces_of_another_dtype_or_shape(layout, tmp_path):
    wider = lambda t: t.view(U8).short() if t.element_size() == 1 else t.double()  # noqa: E731
    other = lambda t: t[..., :-1] if t.numel() > 1 else t.repeat(3, 3)  # noqa: E731
    for i, piece in enumerate(GOOD[layout]()):
        for change in (wider, other):
            pieces = GOOD[layout]()
            pieces[piece] = change(pieces[piece])
            if pieces[piece].shape == (1,) and change is other:
                continue  # one outer scale for two experts is as good as two equal ones
            folder = folder_of(tmp_path / f"{i}{change is wider}", pieces)
            with pytest.raises(Refused, match="m.0|m.experts"):
                dict(load(folder))


@pytest.mark.parametrize("layout", GOOD)
def test_scale_bytes_that_are_no_scales(layout, tmp_path):
    pieces = GOOD[layout]()
    piece = next(name for name in pieces if name.endswith(("scale", "scales")) and pieces[name].element_size() == 1)
    bad = [0xFF] if pieces[piece].dtype == U8 else [0x7F, 0x80, 0xC0, 0xFF]
    for value in bad:
        pieces = {name: t.clone() for name, t in GOOD[layout]().items()}
        pieces[piece].view(U8).view(-1)[5] = value
        folder_of(tmp_path / f"{value}", pieces)
        checkpoint = load(tmp_path / f"{value}")
        (name,) = checkpoint
        with pytest.raises(Refused, match=f"{name}.*scale byte {value:#04x} at .* is NaN or negative"):
            checkpoint[name]
        assert "is NaN or negative" in fp4ext.export.inspect(tmp_path / f"{value}").faults[0]
        target = "fp4ext"
        with pytest.raises(Refused, match="is NaN or negative"):
            export(tmp_path / f"{value}", tmp_path / "out", target)
        assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt", "inkling", "inkling2"])
def test_outer_scales_that_are_no_scales(layout, value, tmp_path):
    pieces = {name: t.clone() for name, t in GOOD[layout]().items()}
    for name in pieces:
        if pieces[name].dtype == torch.float32:
            pieces[name].view(-1)[0] = value
    checkpoint = load(folder_of(tmp_path, pieces))
    (name,) = checkpoint
    with pytest.raises(Refused, match=f"{name}.*outer scale has .* in it; accepted: finite, positive"):
        checkpoint[name]


def test_a_divisor_of_zero(tmp_path):
    pieces = GOOD["compressed-tensors"]() | {"m.0.w.weight_global_scale": torch.zeros(1)}
    with pytest.raises(Refused, match="outer scale has 0.0 in it"):
        load(folder_of(tmp_path, pieces))[W]


def test_nan_elements(tmp_path):
    codes = MX8.codes.clone()
    codes.view(U8)[3, 3] = 0x7F
    with pytest.raises(Refused, match="an element is NaN"):
        load(folder_of(tmp_path, {W: codes, f"{W}_scale": MX8.scales.view(U8)}))[W]


DOUBLES = {
    "m.0.w.weight' has no meaning beside": GOOD["compressed-tensors"]() | {W: torch.ones(32, 64)},
    "tensors of modelopt and inkling2": GOOD["modelopt"]() | GOOD["inkling2"](),
    "weight_zero_point": GOOD["compressed-tensors"]()
    | {"m.0.w.weight_zero_point": torch.zeros(32, 4, dtype=torch.int8)},
}


@pytest.mark.parametrize("message", DOUBLES)
def test_pieces_too_many(message, tmp_path):
    with pytest.raises(Refused) as error:
        load(folder_of(tmp_path, DOUBLES[message]))
    assert message in str(error.value)


@pytest.mark.parametrize("shape", ["", "x", "9" * 5000, "9" * 15 + ",64", "-1,64", "64", "1," * 20, "32,-64", "٣,64"])
def test_a_shape_in_the_metadata(shape, tmp_path):
    tensors, metadata = NV.to_safetensors("a.b")
    save_file(tensors, tmp_path / "m.safetensors", metadata | {"a.b.shape": shape})
    with pytest.raises(Refused, match="a.b"):
        load(tmp_path / "m.safetensors")["a.b"]


# 10,000 small files


def _seeds():
    seeds = [save(pieces()) for pieces in GOOD.values()]
    t, m = NV.to_safetensors("a.b")
    return [*seeds, save({k: v.contiguous() for k, v in t.items()}, m)]


SEEDS = _seeds()
PIECES = [b"null", b"-1", b"1e9", b"true", b"[]", b'"U8"', b'"F8_E4M3"', b"9" * 30, b"..", b"/", b"_scale", b"\xff" * 8]


def mutant(genes: bytes) -> bytes:
    """A good file with up to three places overwritten, cut out, doubled, filled or flipped.

    The first gene chooses the file, and whether the length before the header is made right again: else few get past the
    first check. Then six genes a change: how, where (the header twice as often as the data), at which byte, with what.
    """
    data = bytearray(SEEDS[(genes[0] >> 1) % len(SEEDS)])
    header = 8 + int.from_bytes(data[:8], "little")
    for i in range(1, len(genes) - 5, 6):
        how, where, high, low, which, raw = genes[i : i + 6]
        at = high << 8 | low
        at = at % header if where % 3 else header + at % max(1, len(data) - header)
        piece = PIECES[which] if which < len(PIECES) else bytes([raw, which])
        if how % 5 == 0:
            data[at : at + len(piece)] = piece
        elif how % 5 == 1:
            data[at:at] = piece
        elif how % 5 == 2:
            del data[at : at + raw // 4]
        elif how % 5 == 3:
            data[at:at] = data[at : at + raw // 4]
        elif at < len(data):
            data[at] ^= 1 << raw % 8
    end = data.rfind(b"}}")
    if genes[0] & 1 and end > 8:
        data[:8] = struct.pack("<Q", end + 2 - 8)
    return bytes(data)


def judge(path) -> str:
    """ "loaded" or "refused"; anything else that comes out is a fault."""
    try:
        checkpoint = load(path)
        for name, weight in checkpoint.items():
            assert tuple(weight.shape) == checkpoint.shape(name), name
            if isinstance(weight, fp4ext.QTensor):
                assert bool(weight.dequantize(torch.float32).isfinite().all()) or weight.global_scale is not None
    except Refused as error:
        assert str(error) and "\n" not in str(error)
        return "refused"
    return "loaded"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    shm = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    path = tmp_path_factory.mktemp("fuzz") / "m.safetensors"
    if shm:
        path = type(path)(shm) / f"fp4ext-fuzz-{os.getpid()}.safetensors"
    yield path
    path.unlink(missing_ok=True)


SEEN = {"refused": 0, "loaded": 0}


def test_the_seeds_load(place):
    for seed in SEEDS:
        place.write_bytes(seed)
        assert judge(place) == "loaded"


@pytest.mark.slow
@settings(max_examples=10_000, deadline=None, suppress_health_check=list(HealthCheck), database=None, derandomize=True)
@given(st.binary(min_size=7, max_size=19))
def test_mutants(place, genes):
    place.write_bytes(mutant(genes))
    SEEN[judge(place)] += 1


@pytest.mark.slow
def test_the_mutants_were_of_both_kinds():
    """Else the fuzz proves nothing: all refused by the first check, or hardly changed."""
    assert sum(SEEN.values()) >= 9_000 or sum(SEEN.values()) == 0
    if SEEN["loaded"]:
        assert SEEN["loaded"] > 200 and SEEN["refused"] > 2_000, SEEN


def test_read_header_keeps_the_files_order(place):
    place.write_bytes(SEEDS[0])
    assert list(read_header(place).slots) == list(json.loads(SEEDS[0][8 : 8 + int.from_bytes(SEEDS[0][:8], "little")]))
