"""Mutants: kernels with one thing wrong, each built from the sources with one edit and run against what must catch it.

`python -m tests.simt.mutants` prints a line of JSON for each: its name, and why it was caught, or null where it lived.
A mutant is caught where a result differs, where the machine ends the launch (a deadlock, a pointer that is not aligned,
a collective that not all lanes reach), or where nothing comes back in time.

What the machine cannot see, and no mutant here tries: the text of an instruction, an ISA misread on both sides. Those are
for ptxas, tests/test_sass.py and the self-test of a device's first launch.
"""
# ruff: noqa: E501  (a table reads best with a mutant a line)

import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from fp4ext.policy.spec import Spec
from fp4ext.testing import assert_bytes_equal, assert_same_quantized, generate

from .build import CSRC, build
from .conftest import Machine
from .operands import operand
from .test_attention import check as check_attention
from .test_attention import qkv, test_in_turns, test_underflow_keeps_the_sign_of_what_is_read_alone
from .test_experts import test_equal_the_cpu, test_the_rotation_of_each_expert_has_its_own_length
from .test_experts import test_swizzle as check_swizzle
from .test_gemm import check_bound, gemm, test_added_to_y, test_decode_is_prefill, test_over_tokens
from .test_gemm_lanes import check as check_lanes
from .test_gemm_lanes import test_no_stripe_of_tiles_is_lost, test_the_sign_of_zero, unaligned
from .test_gemm_native import test_many_tiles
from .test_ops import test_codes_at_any_address
from .test_quantize import test_magnitude

KERNELS = CSRC / "cuda"
OF_EXPERTS = "nvfp4/sweep/eden/1x16/tensor/128x2"  # an outer scale and a rotation for each
PATIENCE = 300  # seconds for the checks of one mutant; they take a few


def quantize(machine, *keys):
    """Ragged and full, in both directions at once, under several schedules."""
    for seed, shape in enumerate(((130, 144), (64, 128), (2, 40, 100))):
        x = generate("gaussian", *shape, seed=seed, dtype=(torch.bfloat16, torch.float32)[seed % 2])
        for asynchronous in machine.MODES:
            machine.configure(seed, asynchronous)
            for key in keys:
                key = Spec.parse(key).key
                rng = torch.tensor([5, 6])
                args = x, key, key, rng, rng, 1
                got, wanted = machine.ops.quantize_rowcol(*args), torch.ops.fp4ext.quantize_rowcol(*args)
                assert_same_quantized(got[:3], wanted[:3], key)
                assert_same_quantized(got[3:], wanted[3:], key)
                args = x, key, -1, rng, 1, None
                assert_same_quantized(machine.ops.quantize(*args), torch.ops.fp4ext.quantize(*args), key)


def multiply(machine, kernel, *formats, m=70, n=40):
    """Bitwise on integers with scales that differ, and within the bound; two chunks of K and a ragged end."""
    k = 1408 if kernel != "decode" else 5248
    m = min(m, 13) if kernel == "decode" else m
    for seed, asynchronous in enumerate((*machine.MODES, "late")):
        for format in formats:
            machine.configure(seed, asynchronous)
            x, w = operand(format, m, k, seed=seed, integers=True), operand(format, n, k, seed=9 + seed, integers=True)
            one = int(x.scales[0, 0])
            step = 8 if format == "nvfp4" else 1
            for o in (x, w):  # powers of two, another for each block
                o.scales += (torch.arange(o.scales.numel()).view_as(o.scales) % 3 * step).to(torch.uint8)
            assert int(x.scales[0, 0]) == one
            wanted = torch.ops.fp4ext.gemm(*x.parts, *w.parts, None, "float32", "invariant", "cpu")
            assert_bytes_equal(gemm(machine, kernel, x, w), wanted, f"{kernel} {format}")
            x, w = operand(format, m, k, seed=seed), operand(format, n, k, seed=9 + seed)
            check_bound(gemm(machine, kernel, x, w), x, w, native=format if kernel.startswith("sm1") else None)


def grouped(machine, kernel):
    offsets, rows = [0, 3, 3, 10], 12
    x, w = operand("nvfp4", rows, 256, seed=1), operand("nvfp4", 4, 24, 256, seed=2, outer="row")
    y = gemm(machine, kernel, x, w, None, torch.tensor(offsets, dtype=torch.int32))
    for e, (start, end) in enumerate(zip([0, *offsets], offsets, strict=False)):
        if end > start:
            check_bound(y[start:end], x[start:end], w[e])
    assert not y[10:].any()


def blocks(machine):
    quantize(machine, "nvfp4/amax/stochastic", "nvfp4/sweep/eden/1x16/row/128x2")


def by_block(machine):
    quantize(machine, "nvfp4/amax/eden_block/1x16/tensor/128")


def magnitudes(machine):
    for k in (-100, 115):
        test_magnitude(machine, "nvfp4/sweep/eden/1x16/tensor/128x2", k)


def experts(machine):
    test_equal_the_cpu(machine, OF_EXPERTS, [130, 130, 161, 161, 240])
    test_the_rotation_of_each_expert_has_its_own_length(machine, OF_EXPERTS)


def many_tiles(machine):
    """More tiles of rows than a grid may have along y."""
    x, w = operand("nvfp4", 128 * 7 + 1, 64, seed=1), operand("nvfp4", 4, 64, seed=2)
    check_bound(gemm(machine, "invariant", x, w), x, w)


def odd_codes(machine):
    test_codes_at_any_address(machine, "nvfp4", 1)


def swizzle(machine):
    for offsets in ([0, 3, 131], [130, 130, 161]):
        check_swizzle(machine, offsets)


def tiles(machine):
    quantize(machine, "nvfp4/four_over_six/nearest/16x16", "nvfp4/amax/stochastic/16x16")


def invariant(machine):
    multiply(machine, "invariant", "nvfp4", "mxfp8")
    grouped(machine, "invariant")


def over_tokens(machine):
    for formats in (("mxfp8_e5m2", "nvfp4"), ("nvfp4", "nvfp4")):
        test_over_tokens(machine, *formats, [0, 16, 17])
    test_added_to_y(machine, "invariant", ("mxfp8", "nvfp4"))


def decode(machine):
    multiply(machine, "decode", "nvfp4")
    grouped(machine, "decode")


def decode_is_prefill(machine):
    test_decode_is_prefill(machine, "nvfp4", "nvfp4", "hardware")


def lanes(machine):
    for seed, (m, n, k) in enumerate(((17, 40, 2085), (5, 67, 1040), (33, 9, 31))):
        machine.configure(seed)
        for formats in (("fp32", "fp32"), ("fp16", "nvfp4")):
            x, w = operand(formats[0], m, k, seed=seed, outer="row"), operand(formats[1], n, k, seed=9, outer="row")
            check_lanes(machine, x, w)
            check_lanes(machine, unaligned(x), w)
    test_the_sign_of_zero(machine)
    test_no_stripe_of_tiles_is_lost(machine)


def sm120(machine):
    multiply(machine, "sm120", "nvfp4", "mxfp8")


def sm100(machine):
    multiply(machine, "sm100", "nvfp4", "mxfp8")
    for asynchronous in machine.MODES:
        test_many_tiles(machine, "sm100", "nvfp4", asynchronous)


def sm100_pairs(machine):
    multiply(machine, "sm100_pairs", "nvfp4", "mxfp8", m=200, n=100)
    x, w = operand("nvfp4", 400, 256, seed=1, integers=True), operand("nvfp4", 140, 256, seed=2, integers=True)
    wanted = torch.ops.fp4ext.gemm(*x.parts, *w.parts, None, "float32", "invariant", "cpu")
    for asynchronous in machine.MODES:
        test_many_tiles(machine, "sm100_pairs", "nvfp4", asynchronous)
        assert_bytes_equal(gemm(machine, "sm100_pairs", x, w), wanted, "four tiles")


def attention(machine):
    for seed, (m, t, d) in enumerate(((1, 300, 20), (40, 290, 70), (6, 70, 33))):
        machine.configure(seed, machine.MODES[seed])
        check_attention(machine, *qkv(1, 4, 2, m, t, d, seed=seed))
    test_underflow_keeps_the_sign_of_what_is_read_alone(machine)
    test_in_turns(machine, 50, 1)


def self_test(machine, kernel, sm):
    """What a device's first launch does, which sees no race but by its result. Where it fails, the status says so and the emulated kernel is used."""
    machine.configure(races=False)
    machine.ops.set_device(0, sm)
    why = machine.ops.self_test(kernel)
    if why:
        line = machine.ops.status(0).split("\n")[1]
        assert line == f"built, but it failed its self-test on device 0: {why}", line
        x, w = operand("nvfp4", 20, 128, seed=1), operand("nvfp4", 24, 128, seed=2)
        y = machine.ops.gemm(*x.parts, *w.parts, None, "float32", "invariant", "auto")
        assert_bytes_equal(y, gemm(machine, "invariant", x, w), "the fallback")
    assert not why, f"self-test: {why}"


def finish(machine):
    """What torch's product leaves, ended by the law: every row, column and both global scales."""
    machine.ops.set_device(0, 90)
    x, w = operand("nvfp4", 20, 128, seed=1, outer="row"), operand("nvfp4", 1030, 128, seed=2, outer="row")
    y = machine.ops.gemm(*x.parts, *w.parts, None, "float32", "fast", "fast")
    check_bound(y, x, w, "toward_zero")


def self_test_sm120(machine):
    self_test(machine, "sm120", 120)


def self_test_sm100(machine):
    self_test(machine, "sm100", 100)


def self_test_pairs(machine):
    """What a device's first launch does besides. Where it fails, the status says so and single blocks are used."""
    machine.configure(races=False)
    machine.ops.set_device(0, 100)
    why = machine.ops.self_test("sm100_pairs") or machine.ops.same_bits("sm100_pairs", "sm100")
    if why:
        line = machine.ops.status(0).split("\n")[1]
        assert line.startswith("available: ") and "; not by pairs of thread blocks: " in line and line.endswith(why), (
            line
        )
        assert machine.ops.route(1000, 1) == "native"
        x, w = operand("nvfp4", 140, 256, seed=1), operand("nvfp4", 70, 256, seed=2)
        y = machine.ops.gemm(*x.parts, *w.parts, None, "float32", "invariant", "auto")
        assert_bytes_equal(y, gemm(machine, "sm100", x, w), "the fallback")
    assert not why, f"self-test: {why}"


# What each check runs: only these are built from the mutant's text.
RUNS = {
    finish: "generic/gemm_finish.cu",
    blocks: "generic/quantize_nvfp4_random.cu",
    magnitudes: "generic/quantize_nvfp4_random.cu",
    by_block: "generic/quantize_nvfp4_random.cu",
    tiles: "generic/quantize_16x16.cu",
    swizzle: "generic/dequantize.cu",
    odd_codes: "generic/dequantize.cu",
    many_tiles: "sm80/gemm_invariant.cu",
    experts: "generic/quantize_nvfp4_random.cu",
    invariant: "sm80/gemm_invariant.cu",
    over_tokens: "sm80/gemm_invariant.cu",
    decode: "sm80/gemm_decode.cu",
    decode_is_prefill: "sm80/gemm_decode.cu",
    lanes: "generic/gemm_lanes.cu",
    attention: "generic/attention.cu",
    sm120: "sm120/gemm_native.cu",
    sm100: "sm100/gemm_native.cu",
    sm100_pairs: "sm100/gemm_native.cu",
    self_test_sm120: "sm120/gemm_native.cu",
    self_test_sm100: "sm100/gemm_native.cu",
    self_test_pairs: "sm100/gemm_native.cu",
}

# The decode's ring, which a mutant fills by one stage too many.
FILL = """  for (int i = 0; i < kStages - 1; ++i) copy(i);
  float acc[2][4] = {};
  for (int i = 0; i < my_steps; ++i) {
    wait_copies<kStages - 2>();
    __syncwarp();  // what every lane copied is here
    copy(i + kStages - 1);
"""

# What is wrong, where, the text and what stands in its place, the check that must fail.
MUTANTS = [
    # quantize
    ("no barrier after the tile is read", "generic/quantize_blocks.cuh", "__syncthreads();", "", blocks),
    ("no barrier after the tile is read, 16x16", "generic/quantize_16x16.cu", "__syncthreads();", "", tiles),
    ("the second stage is not turned", "generic/tile.cuh", "s ? second : first, s == 1", "s ? second : first, false", blocks),
    ("both stages share their signs", "generic/tile.cuh", "s ? second : first, s == 1", "first, s == 1", blocks),
    ("turns at the sums in the wrong order", "generic/encode.cuh", "turn == rotation.place", "turn == rotation.lanes() - 1 - rotation.place", blocks),
    ("the sum of the wrong lane", "generic/encode.cuh", "energy, first + turn)", "energy, first)", blocks),
    ("a block's S is that of its vector", "generic/encode.cuh", "if constexpr (rounding == Rounding::eden_block)", "if constexpr (false)", by_block),
    ("the energy is not normalized", "generic/encode.cuh", "normalizer(outer.dec)", "1.0f", magnitudes),
    ("random bits hang on the column", "generic/encode.cuh", "(k + rng.k + offset) / 8", "(k + rng.k + offset) / 16", blocks),
    ("both directions draw the same bits", "generic/encode.cuh", "philox_usage(purpose, colwise, role)", "philox_usage(purpose, false, role)", blocks),
    ("the neighbour's row", "generic/encode.cuh", "first + row * pitch + column", "first + (row ^ 1) * pitch + column", blocks),
    ("butterflies exchange the wrong lanes", "generic/tile.cuh", "__shfl_xor_sync(kAllLanes, t[i], h / N)", "__shfl_xor_sync(kAllLanes, t[i], h / N ^ 1)", blocks),
    ("the upper lane subtracts the wrong way", "generic/tile.cuh", "upper ? other - t[i]", "upper ? t[i] - other", blocks),
    ("the maximum misses a lane", "generic/quantize_16x16.cu", "int h = 8; h > 0", "int h = 4; h > 0", tiles),
    ("a tile takes its turns from the wrong half", "generic/quantize_16x16.cu", "(threadIdx.x & 16) + turn", "turn", tiles),
    # experts
    ("an expert's tokens are not padded", "generic/tile.cuh", "(end - begin + block - 1) / block * block", "end - begin", experts),
    ("an expert's rotation has the length of all", "generic/tile.cuh", "rht_length((v.k_size + 15) / 16 * 16, c.rht)", "c.rht", experts),
    ("all experts have the first one's outer scale", "generic/tile.cuh", "c.outer == OuterKind::expert ? v.batch : 0", "0", experts),
    ("random bits hang on the expert's row", "generic/tile.cuh", "first(colwise ? p.batch * in.cols : p.first)", "first(colwise ? 0 : p.first)", experts),
    ("an expert without rows has scales", "generic/dequantize.cu", "(end - begin + 127) / 128", "(end - begin + 128) / 128", swizzle),
    ("scales of the next expert as padding", "generic/dequantize.cu", "left < 128 ? left : 128", "128", swizzle),
    ("the scales of an expert's first rows for all", "generic/dequantize.cu", "Slab{begin + slab * 128,", "Slab{begin,", swizzle),
    # emulated GEMM
    ("no barrier between steps", "sm80/gemm_invariant.cu", "close_chunk(total, acc);\n    __syncthreads();", "close_chunk(total, acc);", invariant),
    ("no barrier before the sums are staged", "sm80/gemm_invariant.cu", "close_chunk(total, acc);\n    __syncthreads();", "close_chunk(total, acc);\n    if (step + 1 < steps) __syncthreads();", invariant),
    ("no barrier after the sums are staged", "gemm.cuh", "  __syncthreads();\n  const int64_t n_size", "  const int64_t n_size", invariant),
    ("one pair of tiles is filled instead of two", "sm80/gemm_invariant.cu", "memory + step % 2 * 2 * kTileBytes;\n    w.store", "memory;\n    w.store", invariant),
    ("the store is not swizzled", "sm80/gemm_invariant.cu", "piece_of(tile, row, first + p)", "(tile + row * 128 + (first + p) * 16)", invariant),
    ("the scale of the other block", "sm80/gemm_invariant.cu", "e2m1_pair(raw.words[p] >> (8 * i), scale[p / 2])", "e2m1_pair(raw.words[p] >> (8 * i), scale[1 - p / 2])", invariant),
    ("experts' rows begin at the wrong tile", "gemm.cuh", "tile -= tiles;", "tile -= tiles ? tiles - 1 : 0;", invariant),
    ("scales past an expert's tokens", "sm80/gemm_invariant.cu", "if (exists && o.block && k < k_size)", "if (exists && o.block)", over_tokens),
    ("tokens of w begin where those of x do", "sm80/gemm_invariant.cu", "span.w, span.k);", "span.x, span.k);", over_tokens),
    ("y is read where another row lies", "gemm.cuh", "static_cast<const float*>(a.y)[at] + v", "static_cast<const float*>(a.y)[at ^ 1] + v", over_tokens),
    ("all experts write the first product", "gemm.cuh", "(rows.before + row) * n_size", "row * n_size", over_tokens),
    # decode
    ("waits for one group too few", "sm80/gemm_decode.cu", "wait_copies<kStages - 2>()", "wait_copies<kStages - 1>()", decode),
    ("a stage is filled while it is read", "sm80/gemm_decode.cu", FILL, FILL.replace("kStages - 1", "kStages").replace("kStages - 2", "kStages - 1"), decode),
    ("no rendezvous after the wait", "sm80/gemm_decode.cu", "__syncwarp();", "", decode),
    ("no barrier before the chunks are added", "sm80/gemm_decode.cu", "  __syncthreads();\n\n  for (int i = threadIdx.x; i < x_rows", "  for (int i = threadIdx.x; i < x_rows", decode),
    ("a chunk is left out", "sm80/gemm_decode.cu", "for (int c = 1; c < chunks; ++c)", "for (int c = 1; c < chunks - 1; ++c)", decode),
    ("fragments of the wrong half", "sm80/gemm_decode.cu", "high = e2m1_pair(u.y", "high = e2m1_pair(u.x", decode),
    ("the halves of an instruction change places", "sm80/gemm_decode.cu", "low = e2m1_pair(u.x >> (8 * t), scale);\n    high = e2m1_pair(u.y", "high = e2m1_pair(u.x >> (8 * t), scale);\n    low = e2m1_pair(u.y", decode_is_prefill),
    # lane order
    ("no barrier between steps of lanes", "generic/gemm_lanes.cu", "close_chunk(acc, total);\n    __syncthreads();", "close_chunk(acc, total);", lanes),
    ("neighbouring lanes are added first", "generic/gemm_lanes.cu", "fold<8>(acc);\n  fold<4>(acc);\n  fold<2>(acc);\n  fold<1>(acc);", "fold<8>(acc);\n  fold<4>(acc);\n  fold<1>(acc);\n  fold<2>(acc);", lanes),
    ("a lane keeps what the other keeps too", "generic/gemm_lanes.cu", "given = upper ? acc[i] : acc[i + kKept]", "given = upper ? acc[i + kKept] : acc[i]", lanes),
    ("the sixteens of a step change places", "generic/gemm_lanes.cu", "float4{first[2], second[2], first[3], second[3]}", "float4{second[2], first[2], second[3], first[3]}", lanes),
    ("a zero more than the contract has", "generic/gemm_lanes.cu", "if (kBoth) sum", "sum", lanes),
    ("chunks of half their length", "generic/gemm_lanes.cu", "kPerChunk = kChunk / kStep", "kPerChunk = kChunk / kStep / 2", lanes),
    ("elements past the end", "generic/gemm_lanes.cu", "k_size - k < 4 ? k_size - k : 4", "4", lanes),
    ("the scale of the first block for all, lanes", "generic/gemm_lanes.cu", "scales[k >> shift()]", "scales[0]", lanes),
    ("a band that is not full is as wide as the others", "generic/gemm_lanes.cu", "across - band < kBand ? across - band : kBand", "kBand", lanes),
    # attention
    ("no barrier before scores' terms are replaced", "generic/attention.cu", "const int term = threadIdx.x % kDepth;\n    __syncthreads();\n    if (term < depth)", "const int term = threadIdx.x % kDepth;\n    if (term < depth)", attention),
    ("no barrier before values' terms are replaced", "generic/attention.cu", "kDepth ? count - j : kDepth;\n    __syncthreads();", "kDepth ? count - j : kDepth;", attention),
    ("a row takes part in keys that it does not read", "generic/attention.cu", "if (k < limit[i]) acc", "acc", attention),
    ("neighbouring lanes of weights are added first", "generic/attention.cu", "int h = 8; h > 0; h /= 2", "int h = 1; h < 16; h *= 2", attention),
    ("the largest score of half a warp", "generic/attention.cu", "? S::kAcross : 32) / 2; h > 0", "? S::kAcross : 32) / 2; h > 1", attention),
    ("the last chunk is not added", "generic/attention.cu", "for (int64_t c = 1; c < chunks; ++c) total", "for (int64_t c = 1; c + 1 < chunks; ++c) total", attention),
    ("every other band is left out", "generic/attention.cu", "first + step", "first + 2 * step", attention),
    # sm120
    ("waits for one group too few, sm120", "sm120/gemm_native.cu", "wait_copies<Format::kStages - 2>()", "wait_copies<Format::kStages - 1>()", sm120),
    ("no barrier in the loop, sm120", "sm120/gemm_native.cu", "__syncthreads();  // the step", "// the step", sm120),
    ("no barrier before the ring is reused", "sm120/gemm_native.cu", "  __syncthreads();\n  write(", "  write(", sm120),
    ("scales in the wrong lanes", "sm120/gemm_native.cu", "(lane & 1) * 8 + lane / 4", "lane / 4", sm120),
    ("the copy and the load differ in their key", "sm120/gemm_native.cu", "copy_async<16>(piece_of<Format>(tile, row, piece),", "copy_async<16>(piece_of<Format>(tile, row ^ 2, piece) + ((row & 2) - (~row & 2)) * Format::kRow,", sm120),
    ("the scales of the first mma for all", "sm120/gemm_native.cu", "const int byte = i * Format::kScalesPerMma;", "const int byte = 0;", sm120),
    # sm100
    ("stages share their scale columns", "sm100/gemm_native.cu", "sums + kScaleColumns + stage.at * 2 * S::kColumns", "sums + kScaleColumns", sm100),
    ("full arrives before the copies land", "sm100/gemm_native.cu", "wait_copies<0>();", "", sm100),
    ("full arrives before the other lanes' copies land", "sm100/gemm_native.cu", "  __syncwarp();\n  if (threadIdx.x % 32", "  if (threadIdx.x % 32", sm100),
    ("nobody waits for a stage to be empty", "sm100/gemm_native.cu", "mbarrier_wait(empty + stage.at, stage.parity ^ 1);\n        const int64_t at", "const int64_t at", sm100),
    ("the wrong parity", "sm100/gemm_native.cu", "mbarrier_wait<kCtas>(full + stage.at, stage.parity);", "mbarrier_wait<kCtas>(full + stage.at, stage.parity ^ 1);", sm100),
    ("sums are read before they are done", "sm100/gemm_native.cu", "mbarrier_wait(summed + b, parity);", "", sm100),
    ("the sums start from what was there", "sm100/gemm_native.cu", "k > 0 || j > 0", "true", sm100),
    ("sums are overwritten before they are read", "sm100/gemm_native.cu", "mbarrier_wait<kCtas>(written + b, parity ^ 1);", "", sm100),
    ("neighbouring tiles share their sums", "sm100/gemm_native.cu", "sums + b * kTile, x + 2 * j", "sums, x + 2 * j", sm100),
    ("the ring starts anew at each tile", "sm100/gemm_native.cu", "      for (int k = 0; k < steps; ++k, ++i) {\n        const Stage<Format, kCtas> stage(memory, i);\n        mbarrier_wait<kCtas>(full", "      for (int k = 0; k < steps; ++k, ++i) {\n        const Stage<Format, kCtas> stage(memory, k);\n        mbarrier_wait<kCtas>(full", sm100),
    ("a stage whose scales nobody copies", "sm100/gemm_native.cu", "stage.at != warp - kWriters", "stage.at != (warp - kWriters) % (kStages - 1)", sm100),
    ("K advances by half", "sm100/gemm_native.cu", "x + 2 * j, w + 2 * j", "x + j, w + j", sm100),
    ("a warp reads another's lanes", "sm100/gemm_native.cu", "(static_cast<uint32_t>(warp * 32) << 16)", "(static_cast<uint32_t>(warp / 2 * 32) << 16)", sm100),
    ("too few arrivals", "sm100/gemm_native.cu", "mbarrier_init(full + s, kCtas + 1);", "mbarrier_init(full + s, kCtas + 2);", sm100),
    ("codes are copied into a stage that is not empty", "sm100/gemm_native.cu", "mbarrier_wait(empty + stage.at, stage.parity ^ 1);\n        if (tiles.rank == 0) mbarrier_expect", "if (tiles.rank == 0) mbarrier_expect", sm100),
    ("half of the bytes are waited for", "sm100/gemm_native.cu", "kCtas * (S::kCodesOfX + S::kCodesOfW));", "kCtas * S::kCodesOfX);", sm100),
    ("nobody waits for the codes", "sm100/gemm_native.cu", "mbarrier_init(full + s, kCtas + 1);", "mbarrier_init(full + s, kCtas);", sm100),
    ("codes of the first expert for all", "sm100/gemm_native.cu", "static_cast<int>(rows.expert * a.w.rows + n0)", "static_cast<int>(n0)", sm100),
    ("the same byte of scales for every mma", "sm100/gemm_native.cu", "mxfp8_instruction(kCtas * kTile, kTile, static_cast<uint32_t>(i))", "mxfp8_instruction(kCtas * kTile, kTile, 0)", sm100),
    ("tensor memory is not freed", "sm100/gemm_native.cu", "if (warp == kIssuer) tensor_free", "if (warp == kThreads) tensor_free", sm100),
    # sm100, pairs
    ("both CTAs bring the same half of w", "sm100/gemm_native.cu", " + tiles.rank * (kTile / kCtas);", ";", sm100_pairs),
    ("both CTAs bring the same rows of x", "sm100/gemm_native.cu", "rows.begin += rank * kTile;", "", sm100_pairs),
    ("scales of w in the leading CTA alone", "sm100/gemm_native.cu", "copy_scales<Format>(a.w,", "if (tiles.rank == 0) copy_scales<Format>(a.w,", sm100_pairs),
    ("the other CTA is not told of empty stages", "sm100/gemm_native.cu", "tensor_commit<kCtas>(empty + stage.at);", "tensor_commit<1>(empty + stage.at);", sm100_pairs),
    ("the other CTA is not told of its sums", "sm100/gemm_native.cu", "tensor_commit<kCtas>(summed + b);", "tensor_commit<1>(summed + b);", sm100_pairs),
    ("the bytes of one CTA are waited for", "sm100/gemm_native.cu", "kCtas * (S::kCodesOfX + S::kCodesOfW));", "(S::kCodesOfX + S::kCodesOfW));", sm100_pairs),
    ("bytes count in each CTA", "sm100/gemm_native.cu", "copy_box<kCtas>(stage.w_tile", "copy_box<1>(stage.w_tile", sm100_pairs),
    ("each CTA arrives at its own barriers", "sm100/gemm_native.cu", "mbarrier_arrive<kCtas>(barrier);", "mbarrier_arrive<1>(barrier);", sm100_pairs),
    ("the scales of one CTA are waited for", "sm100/gemm_native.cu", "mbarrier_init(full + s, kCtas + 1);", "mbarrier_init(full + s, 2);", sm100_pairs),
    ("the other CTA's sums are overwritten before they are read", "sm100/gemm_native.cu", "mbarrier_init(written + b, kCtas * kWriters);", "mbarrier_init(written + b, kWriters);", sm100_pairs),
    ("a CTA exits while the other reaches into it", "sm100/gemm_native.cu", "  __syncwarp();\n  meet_cluster<kCtas>();", "  __syncwarp();\n  __syncthreads();", sm100_pairs),
    ("a CTA exits before the last arrivals", "sm100/gemm_native.cu", "i < end; ++i) mbarrier_wait(empty", "i < i; ++i) mbarrier_wait(empty", sm100_pairs),
    ("the other CTA hands over the work", "sm100/gemm_native.cu", "warp == kIssuer && tiles.rank == 0", "warp == kIssuer && tiles.rank == 1", sm100_pairs),
    ("both CTAs hand over the work", "sm100/gemm_native.cu", "warp == kIssuer && tiles.rank == 0 && elect_one()", "warp == kIssuer && elect_one()", sm100_pairs),
    ("a pair's product is described as one CTA's", "sm100/gemm_native.cu", "nvfp4_instruction(kCtas * kTile, kTile)", "nvfp4_instruction(kTile, kTile)", sm100_pairs),
    ("both CTAs take tiles of their own", "sm100/gemm_native.cu", "return blockIdx.x / kCtas;", "return blockIdx.x;", sm100_pairs),
    # What .aligned asks, and tensor memory.
    ("half of the lanes are at another barrier", "generic/quantize_blocks.cuh", "__syncthreads();", "if (threadIdx.x % 2) __syncthreads(); else __syncthreads();", blocks),
    ("scales in one quarter of the lanes alone", "ptx/tensor_core5.h", "quarter < 4; ++quarter)\n            std::memcpy", "quarter < 1; ++quarter)\n            std::memcpy", sm100),
    ("a warp allocates where another has all", "sm100/gemm_native.cu", "if (warp == kIssuer) tensor_alloc", "if (warp >= kFetcher) tensor_alloc", sm100),
    ("tensor memory is freed twice", "sm100/gemm_native.cu", "if (warp == kIssuer) tensor_free", "if (warp >= kFetcher) tensor_free", sm100),
    # Fences; each is dropped besides (SYNCHRONIZED).
    ("scales are fenced before they land", "sm100/gemm_native.cu", "        wait_copies<0>();\n        fence_for_engines<kCtas>();", "        fence_for_engines<kCtas>();\n        wait_copies<0>();", sm100),
    ("tensor memory is freed while it is written", "sm100/gemm_native.cu", "  __syncwarp();\n  meet_cluster<kCtas>();\n  if (warp == kIssuer) tensor_free", "  __syncwarp();\n  if (warp == kIssuer) tensor_free", sm100),
    ("a pair allocates before its CTAs have met", "sm100/gemm_native.cu", "  if constexpr (kCtas > 1) meet_cluster<kCtas>();  // a pair allocates once both of its CTAs run\n", "", sm100_pairs),
    # Grids and addresses.
    ("tiles along y", "sm80/gemm_invariant.cu", "const dim3 grid(static_cast<unsigned>((args.w.rows + kTile - 1) / kTile * most_tiles(args, kTile)));", "const dim3 grid(1, static_cast<unsigned>((args.w.rows + kTile - 1) / kTile * most_tiles(args, kTile)));", many_tiles),
    ("words of codes at any address", "generic/number.cuh", "if (!is_aligned(p, 4 * kWords)) {", "if (false) {", odd_codes),
    # What the self-test of a device would meet if an instruction were misread.
    ("one row's global scale for all", "generic/gemm_finish.cu", "global_of(a.x, 0, row)", "global_of(a.x, 0, 0)", finish),
    ("one column's global scale for all", "generic/gemm_finish.cu", "global_of(a.w, 0, n)", "global_of(a.w, 0, 0)", finish),
    ("the last column is left out", "generic/gemm_finish.cu", "n < n_size ? sums", "n + 1 < n_size ? sums", finish),
    ("blocks take the same columns", "generic/gemm_finish.cu", "static_cast<int64_t>(blockIdx.y) * kPerThread", "static_cast<int64_t>(blockIdx.y) * 0 * kPerThread", finish),
    ("self-test: scales in the wrong lanes", "sm120/gemm_native.cu", "(lane & 1) * 8 + lane / 4", "lane / 4", self_test_sm120),
    ("self-test: no barrier in the loop", "sm120/gemm_native.cu", "__syncthreads();  // the step", "// the step", self_test_sm120),
    ("self-test: the same byte of scales for every mma", "sm100/gemm_native.cu", "mxfp8_instruction(kCtas * kTile, kTile, static_cast<uint32_t>(i))", "mxfp8_instruction(kCtas * kTile, kTile, 0)", self_test_sm100),
    ("self-test: neighbouring tiles share their sums", "sm100/gemm_native.cu", "sums + b * kTile, x + 2 * j", "sums, x + 2 * j", self_test_sm100),
    ("self-test: stages share their scale columns", "sm100/gemm_native.cu", "sums + kScaleColumns + stage.at * 2 * S::kColumns", "sums + kScaleColumns", self_test_sm100),
    ("self-test: both CTAs bring the same half of w", "sm100/gemm_native.cu", " + tiles.rank * (kTile / kCtas);", ";", self_test_pairs),
    ("self-test: scales of w in the leading CTA alone", "sm100/gemm_native.cu", "copy_scales<Format>(a.w,", "if (tiles.rank == 0) copy_scales<Format>(a.w,", self_test_pairs),
    ("self-test: pairs add up K in another order", "sm100/gemm_native.cu", "for (int j = 0; j < kMmas; ++j) Format::mma(sums + b * kTile, x + 2 * j, w + 2 * j, x_columns, w_columns, j,", "for (int j = 0, h; h = kCtas == 2 ? kMmas - 1 - j : j, j < kMmas; ++j) Format::mma(sums + b * kTile, x + 2 * h, w + 2 * h, x_columns, w_columns, h,", self_test_pairs),
]  # fmt: skip


# Every synchronization of these kernels is dropped in turn, and each that has a scope gets the block's for the pair's.
SYNCHRONIZED = {
    "generic/quantize_blocks.cuh": blocks,
    "generic/quantize_16x16.cu": tiles,
    "generic/gemm_lanes.cu": lanes,
    "generic/attention.cu": attention,
    "gemm.cuh": invariant,
    "sm80/gemm_invariant.cu": invariant,
    "sm80/gemm_decode.cu": decode,
    "sm120/gemm_native.cu": sm120,
    "sm100/gemm_native.cu": sm100_pairs,
}
SYNCHRONIZATION = re.compile(
    r"\b(__syncthreads|__syncwarp|commit_copies|wait_copies|fence_for_engines|tensor_fence_before|tensor_fence_after"
    r"|mbarriers_are_made|mbarrier_wait|meet_cluster|tensor_commit|mbarrier_arrive)(<[^<>;]*(?:<[^<>]*>)?[^<>;]*>)?\(([^;]*)\);"
)
# What is right without them, and why they are there.
REDUNDANT = {
    "for one block meet_cluster<kCtas>(), number 2 in sm100/gemm_native.cu": "barriers are known since the pair first met, and a CTA hands over scales after it has allocated",
    "without __syncwarp(), number 2 in sm100/gemm_native.cu": "the thread that made the barriers is of another warp than allocates",
    "without tensor_fence_after(), number 1 in sm100/gemm_native.cu": "a fence follows each wait before tcgen05 is issued",
    "without tensor_fence_after(), number 3 in sm100/gemm_native.cu": "the fence after the wait for the step follows, and nothing is issued between",
}


def dropped() -> Iterator[tuple]:
    """Mutants like those of MUTANTS, whose text is a place in the source."""
    for file, check in SYNCHRONIZED.items():
        source = (KERNELS / file).read_text()
        for match in SYNCHRONIZATION.finditer(source):
            calls = f"{match[1]}{match[2] or ''}({match[3]})"
            nth = len(re.findall(re.escape(calls), source[: match.start()])) + 1
            where = f"{calls}, number {nth} in {file}"
            yield f"without {where}", file, match.span(), ";", check
            if match[2] == "<kCtas>":
                yield f"for one block {where}", file, match.span(2), "<1>", check


def built(mutant) -> Path:
    """The library with the mutant's edit."""
    name, file, text, instead, check = mutant
    source = (KERNELS / file).read_text()
    if isinstance(text, tuple):
        edited = source[: text[0]] + instead + source[text[1] :]
    else:
        assert source.count(text) == 1, (
            f"{name}: {file} has {text!r} {source.count(text)} times; a mutant follows its source"
        )
        edited = source.replace(text, instead)
    return build({KERNELS / file: edited}, only=[KERNELS / RUNS[check]])


def caught(library: Path, check) -> str | None:
    """Why the check fails in a process of its own; None if it passes."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(read)
            torch.set_num_threads(1)
            check(Machine(library))
        except BaseException as error:
            os.write(write, (str(error).strip().splitlines() or [repr(error)])[0][:300].encode())
        os._exit(0)
    os.close(write)
    deadline, status = time.monotonic() + PATIENCE, None
    while status is None and time.monotonic() < deadline:
        done, code = os.waitpid(child, os.WNOHANG)
        status = code if done else None
        time.sleep(0.02)
    if status is None:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    why = os.read(read, 1000).decode(errors="replace")
    os.close(read)
    return why or ("nothing came back in time" if status is None else f"ended by signal {status}" if status else None)


def main(names: list[str]) -> None:
    mutants = [*MUTANTS, *dropped()]
    known = [mutant[0] for mutant in mutants]
    unknown = [name for name in names if name not in known]
    if unknown:
        sys.exit(f"unknown mutants {', '.join(unknown)}; accepted: {', '.join(known)}")
    chosen = [mutant for mutant in mutants if not names or mutant[0] in names]
    for check in dict.fromkeys(mutant[-1] for mutant in chosen):
        why = caught(build(), check)
        assert why is None, f"{check.__name__} fails without a mutant: {why}"
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        libraries = list(pool.map(built, chosen))
    for library, (name, *_, check) in zip(libraries, chosen, strict=True):
        print(json.dumps({"name": name, "why": caught(library, check)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
