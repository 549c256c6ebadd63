"""The fuzz of the checkpoint readers, a part of it, and the inputs at which readers once failed (fuzzing.py)."""

import json
import struct

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from . import fuzzing
from .fuzzing import E4M3, E8M0, GOOD, LAYOUTS, U8, judge, mutant

W = "m.0.w.weight"
CODES, BYTES = torch.full((64, 32), 0x77, dtype=U8), torch.full((64, 2), 127, dtype=U8)


def raw(header: str, data: bytes = b"") -> fuzzing.Files:
    text = header.encode("utf-8", "surrogatepass")
    return {"model.safetensors": struct.pack("<Q", len(text)) + text + data}


def entry(dtype="U8", shape=(0,)) -> str:
    return json.dumps({"dtype": dtype, "shape": list(shape), "data_offsets": [0, 0]})


def with_config(name: str, **about) -> fuzzing.Files:
    return GOOD[name] | {"config.json": json.dumps({"quantization_config": about}).encode()}


folder = fuzzing._folder

# What the readers once did wrong with it: a small input of each kind.
FAILURES = {
    "quadratic time for a name that is there twice": lambda: raw(
        "{" + ",".join(f'"{i}":{entry()}' for i in (*range(20_000), 19_999)) + "}"),
    "lengths behind a zero": lambda: folder({
        "m.experts.w13_weight": torch.empty(1, 2**27, 0, dtype=U8), "m.experts.w13_weight.scale2": torch.ones(1),
        "m.experts.w13_weight.scale": torch.empty(1, 2**27, 0).to(E4M3)}),
    "a thousand empty experts": lambda: folder({
        "m.experts.w13_weight": torch.empty(2**15, 0, 32, dtype=U8), "m.experts.w13_weight.scale2": torch.ones(1),
        "m.experts.w13_weight.scale": torch.empty(2**15, 0, 4).to(E4M3)}),
    "escape codes": lambda: raw(f'{{"a\\u001b[31m":{entry("F8_E4M3", (0, 1))}}}'),
    "markup": lambda: raw(f'{{"a[/red]b.q_proj.weight":{entry("F8_E4M3", (0, 1))}}}'),
    "half a surrogate pair": lambda: raw(f'{{"a\\ud800":{entry()}}}'),
    "a name without end": lambda: raw(f'{{"{"x" * 100_000}":{entry("F8_E4M3", (0, 1))}}}'),
    "a Git LFS pointer": lambda: {"model.safetensors": b"version https://git-lfs.github.com/spec/v1\nsize 5\n"},
    "an outer scale that overflows": lambda: folder({
        W: CODES, f"{W}_scale": torch.full((64, 4), 448.0).to(E4M3), f"{W}_scale_2": torch.tensor(3e38)}),
    "MXFP8's scale byte 254": lambda: folder({
        W: torch.full((64, 64), 448.0).to(E4M3), f"{W}_scale": torch.full((64, 2), 254, dtype=U8)}),
    "uint8 scales of 16": lambda: folder({
        "m.0.w.weight_packed": CODES, f"{W}_scale": torch.full((64, 4), 127, dtype=U8)}),
    "int8 codes": lambda: folder({W: CODES.view(torch.int8), "m.0.w.scale": BYTES.view(E8M0)}),
    "NVFP4 of gpt-oss": lambda: folder({
        "m.experts.gate_up_proj": torch.stack([CODES] * 2), "m.experts.gate_up_proj_weight_scale_2": torch.ones(2),
        "m.experts.gate_up_proj_weight_scale": torch.ones(2, 64, 4).to(E4M3)}),
    "a stack under .weight": lambda: folder({
        W: torch.stack([CODES] * 2), f"{W}_scale": torch.ones(2, 64, 4).to(E4M3), f"{W}_scale_2": torch.ones(2)}),
    "no codes": lambda: folder({f"{W}_scale": BYTES, f"{W}_scale_2": torch.ones(())}),
    "a rotation": lambda: with_config("compressed-tensors", transform_config={"R1": 1}),
    "an unknown method": lambda: with_config("plain", quant_method="gptq"),
    "patterns beyond number": lambda: with_config(
        "compressed-tensors", ignore=[f"*{i}*a*b*" for i in range(20_000)] + ["*" * 5000]),
    "weights that no index names": lambda: GOOD["modelopt"] | {"mtp.safetensors": GOOD["plain"]["model.safetensors"]},
    "a swizzled file": lambda: GOOD["comfy"],
    "FP8 beside NVFP4": lambda: GOOD["fp8 beside nvfp4"],
}  # fmt: skip


@pytest.mark.parametrize("name", FAILURES)
def test_what_once_failed(name, tmp_path):
    for layout in LAYOUTS:
        judge(FAILURES[name](), layout, tmp_path)


@pytest.mark.parametrize("kind", GOOD)
def test_what_is_good_is_read(kind, tmp_path):
    for layout in LAYOUTS:
        assert judge(GOOD[kind], layout, tmp_path) == "read"


def fuzz(place, n: int) -> dict[str, int]:
    """n mutants, always the same ones: how many were refused, how many read."""
    seen = {"refused": 0, "read": 0}

    @settings(max_examples=n, deadline=None, suppress_health_check=list(HealthCheck), database=None, derandomize=True)
    @given(st.binary(min_size=48, max_size=48))
    def run(data):
        files, target = mutant(data)
        seen[judge(files, target, place)] += 1

    run()
    return seen


def test_mutants(tmp_path):
    seen = fuzz(tmp_path, 300)
    assert min(seen.values()) > 30, f"else the fuzz proves little: {seen}"


@pytest.mark.slow
def test_many_mutants(tmp_path):
    seen = fuzz(tmp_path, 5_000)
    assert min(seen.values()) > 500, seen
