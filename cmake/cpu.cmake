# The CPU kernels. Each file of csrc/cpu/kernels is compiled once an instruction set, in a namespace of that name; csrc/cpu/*.cpp choose.
set(FP4EXT_CPU_ISAS portable)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  list(APPEND FP4EXT_CPU_ISAS avx2 avx512)
endif()
set(ISA_FLAGS_portable)
set(ISA_FLAGS_avx2 -mavx2 -mfma -mf16c -mbmi2)
set(ISA_FLAGS_avx512 ${ISA_FLAGS_avx2} -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni -mprefer-vector-width=512)

# For tests on a CPU without AVX-512: its intrinsics are replaced by tests/avx512/immintrin.h.
option(FP4EXT_AVX512_DOUBLE "Compile the avx512 kernels against a stand-in that runs with AVX2" OFF)
if(FP4EXT_AVX512_DOUBLE)
  set(ISA_FLAGS_avx512 ${ISA_FLAGS_avx2} -O1 -isystem ${PROJECT_SOURCE_DIR}/tests/avx512 -include immintrin.h)
endif()

# A quantizer's bits are its contract: no contraction into FMA, no fast math. Nobody reads errno or the exception flags.
# GCC 12 takes its own avx512 headers, and arrays of vectors that loops fill, for uninitialized.
set(cpu_flags -O3 -ffp-contract=off -fno-math-errno -fno-trapping-math -Wall -Wextra -Wno-psabi -Wno-uninitialized -Wno-maybe-uninitialized)

# `make test-sanitized`.
option(FP4EXT_SANITIZE "Compile the CPU's side with AddressSanitizer and UBSan" OFF)
if(FP4EXT_SANITIZE)
  add_compile_options(-g1 -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer)
  add_link_options(-fsanitize=address,undefined)
  list(APPEND cpu_flags -O1)
endif()

file(GLOB cpu_kernels CONFIGURE_DEPENDS csrc/cpu/kernels/*.cpp)
file(GLOB cpu_sources CONFIGURE_DEPENDS csrc/cpu/*.cpp)
add_library(fp4ext_cpu OBJECT ${cpu_sources})
target_compile_options(fp4ext_cpu PRIVATE ${cpu_flags})
list(LENGTH FP4EXT_CPU_ISAS isas)
if(isas GREATER 1)
  target_compile_definitions(fp4ext_cpu PRIVATE FP4EXT_X86 $<$<BOOL:${FP4EXT_AVX512_DOUBLE}>:FP4EXT_AVX512_DOUBLE>)
endif()
foreach(isa IN LISTS FP4EXT_CPU_ISAS)
  add_library(cpu_${isa} OBJECT ${cpu_kernels})
  target_compile_options(cpu_${isa} PRIVATE ${cpu_flags} ${ISA_FLAGS_${isa}})
  target_compile_definitions(cpu_${isa} PRIVATE FP4EXT_ISA=${isa})
  target_link_libraries(fp4ext_cpu INTERFACE $<TARGET_OBJECTS:cpu_${isa}>)
endforeach()
