#include <pybind11/pybind11.h>

#include "cpu/isa.h"
#if defined(USE_CUDA)
#include "ops/dispatch_cuda.h"
#endif

// The Python face of everything that is not a tensor op: what was built, what this CPU runs.
// Tensor ops live in torch.ops.fp4ext (ops/library.cpp).
namespace py = pybind11;
using namespace fp4ext;

PYBIND11_MODULE(_C, m) {
  m.attr("build_note") = FP4EXT_BUILD_NOTE;
  m.attr("cuda_kernel_sets") = FP4EXT_CUDA_KERNEL_SETS;
  m.attr("nvcc") = FP4EXT_NVCC;  // the version that compiled them; empty without
  m.def("isa", [] { return cpu::isa_name(cpu::isa_in_use()); }, "The instruction set the CPU kernels use.");
  m.def(
      "isas",
      [] {
        py::list names;
        for (auto isa : {cpu::Isa::portable, cpu::Isa::avx2, cpu::Isa::avx512})
          if (cpu::isa_available(isa)) names.append(cpu::isa_name(isa));
        return names;
      },
      "The instruction sets this CPU can run, best last.");
  m.def(
      "force_isa", [](const char* name) { cpu::force_isa(cpu::isa_from_name(name)); }, py::arg("name"),
      "Makes the CPU kernels use this instruction set; for tests.");
#if defined(USE_CUDA)
  m.def("native_status", &native_status, py::arg("device"), "Whether the native GEMMs are used on a CUDA device; tests them first.");
  m.def("emulated_status", &emulated_status, py::arg("device"), "Whether the emulated GEMMs run on a CUDA device.");
  m.def("fast_status", &fast_status, py::arg("device"), "Whether torch's product of decoded operands runs on a CUDA device.");
#endif
}
