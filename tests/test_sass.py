"""What ptxas made of the kernels: the instructions that must be there, registers, and no spills. Needs no GPU.

`make kernels` builds the objects; the disassemblers are the packages nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm.
"""

import os
import re
import subprocess
from collections import Counter
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OBJECTS = ROOT / "build" / "kernels" / "CMakeFiles"
PLAIN = ("80", "90", "100", "120")  # what kernels for every chip are compiled for
# What pairs of thread blocks take: tensor cores, their arrivals and TMA for two; arrivals in the other's shared memory.
PAIRS = {
    "UTCCP.T.S.2CTA": 2,
    "UTCBAR.2CTA.MULTICAST": 2,
    "UTMALDG.2D.2CTA": 2,
    "LDTM": 1,
    "LDGSTS": 2,
    "UCGABAR_ARV": 3,
    "FENCE.VIEW.ASYNC.S": 3,
    "SYNCS.ARRIVE.TRANS64.RED": 2,
    "MEMBAR.ALL.GPU": 2,
}

# For each source, the architectures, and for each of its kernels the instructions and the most registers.
KERNELS = {
    "generic/quantize.cu": (PLAIN, {"amax_kernel": ({"LDG.E.128": 2, "LDS.128": 2, "SHFL": 1}, 128)}),
    "generic/quantize_nvfp4.cu": (
        PLAIN,
        {"quantize_blocks_kernel": ({"LDG.E.128": 2, "LDS.128": 2, "STG.E.64": 1}, 128)},
    ),
    "generic/quantize_nvfp4_random.cu": (
        PLAIN,
        {"quantize_blocks_kernel": ({"LDG.E.128": 2, "LDS.128": 2, "STG.E.64": 1}, 128)},
    ),
    "generic/quantize_mx.cu": (
        PLAIN,
        {"quantize_blocks_kernel": ({"LDG.E.128": 4, "LDS.128": 4, "STG.E.128": 1}, 255)},
    ),
    "generic/quantize_16x16.cu": (
        PLAIN,
        {"quantize_16x16_kernel": ({"LDG.E.128": 1, "LDS.128": 2, "STG.E.64": 2, "SHFL": 1}, 255)},
    ),
    "generic/gemm_finish.cu": (PLAIN, {"gemm_finish_kernel": ({"LDG.E": 4, "STG.E": 8}, 64)}),
    "generic/gemm_lanes.cu": (
        PLAIN,
        {
            "gemm_lanes_kernel.*ShapeILi4E": ({"FFMA": 192, "LDS.64": 16, "LDG.E.128": 2, "SHFL": 60}, 128),
            "gemm_lanes_kernel.*ShapeILi1E": ({"FFMA": 96, "LDS.64": 12, "LDG.E.128": 2, "SHFL": 30}, 128),
        },
    ),
    "generic/dequantize.cu": (PLAIN, {"dequantize_kernel": ({"STG.E.128": 2}, 128)}),
    "generic/attention.cu": (
        PLAIN,
        {
            "scores_kernelILi64E": ({"FFMA": 16, "LDS.128": 1, "RED": 1}, 128),
            "scores_kernelILi8E": ({"FFMA": 4, "LDS": 2, "RED": 1}, 128),
            "values_kernelILi64E": ({"FFMA": 16, "LDS.128": 1}, 128),
            "values_kernelILi8E": ({"FFMA": 4, "LDS": 2}, 128),
            "finish_kernel": ({"MUFU.RCP": 1}, 64),
        },
    ),
    "sm80/gemm_invariant.cu": (
        PLAIN,
        {"gemm_invariant_kernel": ({"HMMA.16816.F32.BF16": 64, "LDSM.16.M88.4": 24, "LDG.E.128": 6}, 255)},
    ),
    "sm80/gemm_decode.cu": (PLAIN, {"gemm_decode_kernel": ({"HMMA.16816.F32.BF16": 2, "LDGSTS": 4}, 168)}),
    "sm120/gemm_native.cu": (
        ("120",),  # 120f: the name of the family is not in the cubin
        {
            "gemm_native_kernel.*Nvfp4": ({"OMMA.SF.16864.F32.E2M1.E2M1.UE4M3": 16, "LDSM.16.M88.4": 6}, 255),
            "gemm_native_kernel.*Mxfp8": ({"QMMA.SF.16832.F32.E4M3.E4M3.E8": 16, "LDSM.16.M88.4": 6}, 255),
        },
    ),
    "sm100/gemm_native.cu": (
        ("100a", "103a"),
        {
            "gemm_native_kernel.*Nvfp4ILi1E": (
                {
                    "UTCOMMA": 1,
                    "UTCCP": 2,
                    "UTCBAR": 2,
                    "LDTM": 1,
                    "UTMALDG.2D": 2,
                    "LDGSTS": 2,
                    "FENCE.VIEW.ASYNC.S": 3,
                },
                128,
            ),
            "gemm_native_kernel.*Mxfp8ILi1E": (
                {
                    "UTCQMMA": 1,
                    "UTCCP": 2,
                    "UTCBAR": 2,
                    "LDTM": 1,
                    "UTMALDG.2D": 2,
                    "LDGSTS": 2,
                    "FENCE.VIEW.ASYNC.S": 3,
                },
                128,
            ),
            "gemm_native_kernel.*Nvfp4ILi2E": ({"UTCOMMA.2CTA": 1, **PAIRS}, 128),
            "gemm_native_kernel.*Mxfp8ILi2E": ({"UTCQMMA.2CTA": 1, **PAIRS}, 128),
        },
    ),
}


def binaries() -> str | None:
    """The folder of cuobjdump and nvdisasm, if both packages are installed."""
    spec = find_spec("nvidia")
    for base in spec.submodule_search_locations if spec else ():
        for folder in sorted(Path(base).glob("*/bin")):
            if (folder / "cuobjdump").exists() and (folder / "nvdisasm").exists():
                return str(folder)
    return None


@cache
def disassembled(source: str, tmp: Path) -> dict[str, dict[str, list[str]]]:
    """Architecture → mangled name of a kernel → its lines of SASS."""
    kernel_set = source.split("/")[0]
    objects = list(OBJECTS.glob(f"kernels_{kernel_set}.dir/csrc/cuda/{source}.o"))
    assert objects, f"{source} was not built"
    env = os.environ | {"PATH": f"{binaries()}:{os.environ['PATH']}"}
    subprocess.run(["cuobjdump", "-xelf", "all", str(objects[0])], cwd=tmp, env=env, check=True, capture_output=True)
    out = {}
    for cubin in tmp.glob("*.cubin"):
        text = subprocess.run(["nvdisasm", cubin], env=env, check=True, capture_output=True, text=True).stdout
        sections = re.split(r"^\s*\.section\s+\.text\.(\w+),", text, flags=re.M)
        arch = re.search(r"sm_(\w+)\.cubin", cubin.name)[1]
        out[arch] = {
            name: re.findall(r"/\*[0-9a-f]+\*/\s+(.*?;.*)", body)
            for name, body in zip(sections[1::2], sections[2::2], strict=True)
        }
    return out


def registers(lines: list[str]) -> int:
    """The highest register that is named, and those it stands for, plus one; RZ is none."""
    return max(int(n) for line in lines for n in re.findall(r"\bR(\d+)\b", line)) + 1


@pytest.fixture(scope="module")
def sass(tmp_path_factory):
    if binaries() is None:
        pytest.skip("the packages nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm are not installed")
    if not any(OBJECTS.glob("kernels_*.dir")):
        pytest.skip("no cubins: `make kernels` was not run (it needs nvcc)")
    folders = {}

    def of(source):
        folder = folders.setdefault(source, tmp_path_factory.mktemp("cubins"))
        return disassembled(source, folder)

    return of


@pytest.mark.parametrize("source", KERNELS)
def test_instructions_registers_and_spills(sass, source):
    archs, kernels = KERNELS[source]
    by_arch = sass(source)
    assert set(by_arch) == set(archs)
    for arch, functions in by_arch.items():
        for pattern, (wanted, most) in kernels.items():
            found = {name: lines for name, lines in functions.items() if re.search(pattern, name)}
            assert found, f"{source} sm_{arch}: no {pattern}"
            for name, lines in found.items():
                where = f"{source} sm_{arch} {name}"
                count = Counter(key for line in lines for key in wanted if key in line)
                missing = {key: (count[key], least) for key, least in wanted.items() if count[key] < least}
                assert not missing, f"{where}: (found, wanted) {missing}"
                assert not [line for line in lines if "SpillRefill" in line], f"{where}: spills"
                assert registers(lines) <= most, f"{where}: {registers(lines)} registers"


def test_a_pair_meets_before_it_allocates(sass):
    """tcgen05.alloc of cta_group::2 wants both thread blocks to run (PTX ISA 9.7.16.7.1)."""
    for arch, functions in sass("sm100/gemm_native.cu").items():
        for name, lines in functions.items():
            allocated = [i for i, line in enumerate(lines) if "UTCATOMSWS.2CTA.FIND_AND_SET" in line]
            met = [i for i, line in enumerate(lines) if "UCGABAR_WAIT" in line]
            assert not allocated or met[0] < allocated[0], f"sm_{arch} {name}"


def test_every_kernel_is_looked_at():
    """A new source names here what must be in it."""
    on_disk = {str(path.relative_to(ROOT / "csrc/cuda")) for path in (ROOT / "csrc/cuda").rglob("*.cu")}
    assert on_disk == set(KERNELS)


def test_nothing_is_contracted(sass):
    """The quantizers' bits are their contract: a*b+c stays two roundings, so no FFMA but those of divisions.

    ptxas writes a division as FFMAs after an MUFU.RCP; a kernel with neither division nor fma has none: dequantize.
    """
    for arch, functions in sass("generic/dequantize.cu").items():
        for name, lines in functions.items():
            assert not [line for line in lines if "FFMA" in line], f"sm_{arch} {name}"
