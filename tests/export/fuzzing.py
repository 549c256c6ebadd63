"""A fuzz of the checkpoint readers: good folders of every layout, changed by what a list of bytes says, then judged.

    python -m tests.export.fuzzing --hours 8        (`make fuzz HOURS=8`)

A folder may be refused by one printable line, or be read: every weight of the shape that the headers say, every value
finite, and the same values again after a conversion into another layout that reports no loss. Nothing else may come
out, and nothing may take longer than LIMIT. test_fuzz.py runs a part of it, and the corpus of past failures.
"""

import argparse
import json
import math
import os
import shutil
import struct
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch
from safetensors.torch import save as to_bytes

from fp4ext import Spec, quantize
from fp4ext.export import Refused, convert_checkpoint, inspect, load
from fp4ext.export.fp8 import Fp8
from fp4ext.export.header import DTYPES
from fp4ext.functional.qtensor import QTensor
from fp4ext.testing import assert_bytes_equal, generate

LIMIT = 10  # seconds of CPU time a folder
U8, E4M3, E8M0 = torch.uint8, torch.float8_e4m3fn, torch.float8_e8m0fnu
Files = dict[str, bytes]


def _w(n=32, k=64, seed=0):
    return generate("gaussian", n, k, seed=seed, dtype=torch.bfloat16)


def _folder(
    tensors: dict, config: dict | None = None, metadata: dict | None = None, quant: dict | None = None
) -> Files:
    files = {"model.safetensors": to_bytes({n: t.contiguous() for n, t in tensors.items()}, metadata)}
    files |= {} if config is None else {"config.json": json.dumps(config).encode()}
    return files | ({} if quant is None else {"hf_quant_config.json": json.dumps(quant).encode()})


def _two(t):
    return torch.stack([t.view(U8)] * 2).view(t.dtype)


def _marker(fmt):
    return torch.tensor(list(json.dumps({"format": fmt}).encode()), dtype=U8)


def good() -> dict[str, Files]:
    """A small good folder of each kind."""
    nv, m8, m4 = quantize(_w(), Spec("nvfp4", "sweep", outer="pow2")), quantize(_w(), "mxfp8"), quantize(_w(), "mxfp4")
    w, x = "m.0.w.weight", "m.0.experts.w13_weight"
    scale_2, fp8 = nv.global_scale.reshape(()), _w().to(E4M3)
    modelopt = {w: nv.codes, f"{w}_scale": nv.scales, f"{w}_scale_2": scale_2}
    packed = {"m.0.w.weight_packed": nv.codes, f"{w}_scale": nv.scales, f"{w}_global_scale": 1 / scale_2.reshape(1)}
    plain = {"m.norm.weight": torch.ones(64), "m.0.attn.k_scale": torch.ones(())}
    said = {"quantization_config": {"quant_method": "compressed-tensors", "ignore": ["lm_head"], "config_groups": {}}}
    blocks = {"a.weight": _w(200, 300).to(E4M3), "a.weight_scale_inv": torch.full((2, 3), 0.5)}
    tensors, metadata = quantize(_w(), Spec("nvfp4", "sweep", outer="row")).to_safetensors("a.b")
    swizzled = torch.zeros(128, 4, dtype=U8).view(E4M3)
    gate = {f"m.experts.{e}.{part}.weight{s}": t for e in range(2) for part in ("gate_proj", "up_proj", "down_proj")
            for s, t in (("", nv.codes), ("_scale", nv.scales), ("_scale_2", scale_2))}  # fmt: skip
    return {
        "plain": _folder({w: _w(), "lm_head.weight": _w(seed=1)}, {"model_type": "x"}),
        "compressed-tensors": _folder(packed | plain, said),
        "mxfp4": _folder({"m.0.w.weight_packed": m4.codes, f"{w}_scale": m4.scales.view(U8)}, said),
        "mxfp8": _folder({w: m8.codes, f"{w}_scale": m8.scales.view(U8)} | plain, said),
        "modelopt": _folder(modelopt | plain | {"m.0.w.input_scale": torch.ones(())}, {}, None, {"quantization": {}}),
        "experts": _folder({n: t.clone() for n, t in gate.items()}),
        "gpt-oss": _folder({"m.experts.down_proj_blocks": _two(m4.codes).unflatten(-1, (2, 16)),
                            "m.experts.down_proj_scales": _two(m4.scales).view(U8)}),
        "inkling": _folder({x: _two(nv.codes), f"{x}.scale": _two(nv.scales), f"{x}.scale2": torch.ones(2),
                            f"{x}.original_shape": torch.tensor([2, 32, 64])}),
        "inkling2": _folder({x: _two(nv.codes), f"{x}_scale": _two(nv.scales), f"{x}_amax": torch.ones(2),
                             f"{x}_outer_scale_denominator": torch.tensor(2688.0)} | plain),
        "fp4ext": _folder(tensors, None, metadata),
        "fp8": _folder({"a.weight": fp8, "a.weight_scale": torch.tensor(0.5), "a.input_scale": torch.tensor(2.0)}),
        "fp8 beside nvfp4": _folder(modelopt | {"a.weight": fp8, "a.weight_scale": torch.ones(32, 1)}),
        "fp8 in blocks": _folder(blocks, {"quantization_config": {"weight_block_size": [128, 128]}}),
        "comfy": _folder({w: nv.codes, f"{w}_scale": swizzled, f"{w}_scale_2": scale_2,
                          "m.0.w.comfy_quant": _marker("nvfp4")}),
    }  # fmt: skip


GOOD = good()
KINDS = list(GOOD)
NAMES = [
    "weight",
    "weight_packed",
    "weight_scale",
    "weight_scale_2",
    "weight_scale_inv",
    "weight_global_scale",
    "scale",
]
NAMES += ["input_scale", "input_global_scale", "weight_zero_point", "comfy_quant", "codes", "scales", "global_scale"]
NAMES += ["experts.w13_weight", "experts.w2_weight_amax", "experts.gate_up_proj", "k_scale", "\x1b[31mx", "\ud800", ""]
BYTES = [b"\xff" * 4, b"\x7f" * 4, b"\x00" * 4, b"\x00\x00\x80\x7f", b"\xff\xff\x7f\x7f", b"\x7c", b"\xfe", b"\x80"]
JSON = [None, True, -1, 2**70, 1e308, "", "x" * 3000, [], {}, [[1]], "nvfp4", "\x1b[0m", {"format": "nvfp4"}]
KEYS = ["quantization_config", "quant_method", "transform_config", "weight_block_size", "config_groups", "ignore"]
KEYS += [
    "kv_cache_scheme",
    "format",
    "dtype",
    "model_type",
    "quantization",
    "weights",
    "block_structure",
    "text_config",
]
LAYOUTS = ["compressed-tensors", "modelopt", "gpt-oss", "inkling", "inkling2", "fp4ext"]


class Genes:
    """Bytes that make choices; zeros once they are used up."""

    def __init__(self, data: bytes):
        self.data, self.at = data, 0

    def below(self, n: int) -> int:
        """A number from 0 to n − 1, of two bytes."""
        two = self.data[self.at : self.at + 2].ljust(2, b"\0")
        self.at += 2
        return int.from_bytes(two, "little") % max(1, n)

    def of(self, things):
        return things[self.below(len(things))]

    @property
    def left(self) -> bool:
        return self.at < len(self.data)


def mutant(data: bytes) -> tuple[Files, str]:
    """(a changed folder, the layout to convert it into), as the bytes say."""
    genes = Genes(data)
    files = dict(GOOD[genes.of(KINDS)])
    target = genes.of(LAYOUTS)
    for _ in range(1 + genes.below(3)):
        if genes.left:
            CHANGES[genes.below(len(CHANGES))](files, genes)
    return files, target


def _parts(file: bytes) -> tuple[dict, bytes]:
    n = int.from_bytes(file[:8], "little")
    try:
        header = json.loads(file[8 : 8 + n])
        return (header if isinstance(header, dict) else {}), file[8 + n :]
    except ValueError:
        return {}, file[8 + n :]


def _joined(header: dict, data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def _change_header(files: Files, genes: Genes) -> None:
    """A tensor gets another name, dtype, shape; it goes, or comes twice; offsets mostly stay right."""
    header, data = _parts(files["model.safetensors"])
    names = [n for n, e in header.items() if isinstance(e, dict) and e.keys() == {"dtype", "shape", "data_offsets"}]
    if not names:
        return
    name, how = genes.of(names), genes.below(6)
    entry = header[name]
    if how == 0:
        header[f"{name.rpartition('.')[0]}.{genes.of(NAMES)}"] = header.pop(name)
    elif how == 1:
        size = DTYPES[entry["dtype"]].itemsize if entry.get("dtype") in DTYPES else 1
        entry["dtype"] = genes.of([d for d, t in DTYPES.items() if t.itemsize == size])
    elif how == 2:
        shape = entry["shape"]
        ways = [
            shape[::-1],
            [1, *shape],
            [math.prod(shape)],
            shape[1:],
            [*shape[:-1], 2, shape[-1] // 2] if shape else [1],
        ]
        entry["shape"] = genes.of(ways)
    elif how == 3:
        entry["shape"] = [0, *entry["shape"][1:]] if genes.below(2) else [2**40, 0]
        begin, end = entry["data_offsets"]
        data = data[:begin] + data[end:]
        entry["data_offsets"] = [begin, begin]
        for other in names:
            header[other]["data_offsets"] = [o - (end - begin) * (o >= end) for o in header[other]["data_offsets"]]
        entry["data_offsets"] = [begin, begin]
    elif how == 4:
        header[f"copy.{name}"] = header.pop(name)
    else:
        other = genes.of(names)
        header[name], header[other] = header[other], header[name]
    files["model.safetensors"] = _joined(header, data)


def _change_data(files: Files, genes: Genes) -> None:
    file = bytearray(files["model.safetensors"])
    begin = 8 + int.from_bytes(file[:8], "little")
    piece = genes.of(BYTES)
    at = begin + genes.below(len(file) - begin)
    file[at : at + len(piece)] = piece
    files["model.safetensors"] = bytes(file)


def _change_bytes(files: Files, genes: Genes) -> None:
    name = genes.of(sorted(files))
    file = bytearray(files[name])
    at = genes.below(len(file))
    if genes.below(3):
        file[at : at + 1] = bytes([genes.below(256)])
    elif genes.below(2):
        del file[at : at + 1 + genes.below(64)]
    else:
        file[at:at] = file[at : at + 1 + genes.below(64)]
    files[name] = bytes(file)


def _change_json(files: Files, genes: Genes) -> None:
    """A key of a config, at some depth, gets another value."""
    name = genes.of(["config.json", "hf_quant_config.json"])
    try:
        value = json.loads(files.get(name, b"{}"))
    except ValueError:
        return
    value = value if isinstance(value, dict) else {}
    at = value
    for _ in range(genes.below(3)):
        key = genes.of(KEYS)
        at[key] = at[key] if isinstance(at.get(key), dict) else {}
        at = at[key]
    at[genes.of(KEYS)] = genes.of(JSON)
    files[name] = json.dumps(value).encode()


def _change_metadata(files: Files, genes: Genes) -> None:
    header, data = _parts(files["model.safetensors"])
    metadata = header.get("__metadata__")
    metadata = metadata if isinstance(metadata, dict) else {}
    keys = sorted({*metadata, "_quantization_metadata", "quantization_config", "a.b.shape", "a.b.format"})
    values = ["", "nvfp4", "32,64", "9" * 400, '{"layers": {"m.0.w": {"format": "nvfp4"}}}', "[" * 5000, "{}", "\ud800"]
    metadata[genes.of(keys)] = genes.of(values)
    files["model.safetensors"] = _joined({"__metadata__": metadata} | header, data)


def _add_file(files: Files, genes: Genes) -> None:
    other = GOOD[genes.of(KINDS)]["model.safetensors"]
    name = genes.of(["mtp.safetensors", "consolidated.safetensors", "model.safetensors.index.json", "tokenizer.json"])
    index = json.dumps({"weight_map": dict.fromkeys(_parts(files["model.safetensors"])[0], "model.safetensors")})
    files[name] = index.encode() if name.endswith("index.json") else other


CHANGES = [_change_header, _change_data, _change_bytes, _change_json, _change_metadata, _add_file, _change_header]


def judge(files: Files, target: str, place: Path) -> str:
    """ "refused" or "read". Raises whatever is a fault.

    Args:
        files: name → bytes. target: a layout to convert into. place: an empty folder, emptied again afterwards.
    """
    start = time.process_time()
    try:
        source, out = place / "in", place / "out"
        source.mkdir()
        for name, data in files.items():
            (source / name).write_bytes(data)
        return _judged(source, out, target)
    except Refused as error:
        assert str(error).isprintable() and 10 < len(str(error)) < 1100, str(error)
        return "refused"
    finally:
        for path in place.iterdir():
            shutil.rmtree(path)
        assert time.process_time() - start < LIMIT, "slow"


def _judged(source: Path, out: Path, target: str) -> str:
    checkpoint = load(source)
    assert all(c.isprintable() or c == "\n" for c in str(inspect(source)))
    values = {}
    for name, w in checkpoint.items():
        assert tuple(w.shape) == checkpoint.shape(name), name
        if isinstance(w, (QTensor, Fp8)):
            values[name] = w.dequantize(torch.float32)
            assert bool(values[name].isfinite().all()), name
    if not values:
        return "read"
    try:
        report = convert_checkpoint(source, out, target)
    except Refused as error:
        assert not out.exists() and str(error).isprintable()
        return "read"
    assert all(c.isprintable() or c == "\n" for c in str(report))
    again = load(out)
    for name, value in values.items():
        if name in again and not report.lost and isinstance(again[name], (QTensor, Fp8)):
            assert_bytes_equal(again[name].dequantize(torch.float32), value, name)
    return "read"


def main() -> int:
    """Fuzz for some hours. Ends with 1 at the first fault, whose bytes it prints and whose folder it keeps."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--hours", type=float, default=float(os.environ.get("FUZZ_HOURS", 1)))
    parser.add_argument("--keep", type=Path, default=Path("build/fuzz"), help="where the folder of a fault is kept")
    args = parser.parse_args()
    torch.set_num_threads(1)
    seen, until = {"refused": 0, "read": 0}, time.monotonic() + args.hours * 3600
    with tempfile.TemporaryDirectory(prefix="fp4ext-fuzz-") as place:
        while time.monotonic() < until:
            data = os.urandom(48)
            files, target = mutant(data)
            try:
                seen[judge(files, target, Path(place))] += 1
            except Exception:  # noqa: BLE001  (a fault, whatever it is)
                traceback.print_exc()
                args.keep.mkdir(parents=True, exist_ok=True)
                for name, content in files.items():
                    (args.keep / name).write_bytes(content)
                print(f"a fault: add bytes.fromhex({data.hex()!r}) to FAILURES in test_fuzz.py; folder: {args.keep}")
                return 1
    print(f"{sum(seen.values()):,} folders: {seen['refused']:,} refused, {seen['read']:,} read")
    return 0


if __name__ == "__main__":
    sys.exit(main())
