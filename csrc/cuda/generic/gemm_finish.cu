#include "../gemm.cuh"

// The epilogue over the sums of a product that was made elsewhere.
namespace fp4ext::cuda {
namespace {

inline constexpr int kPerThread = 4;

__global__ void __launch_bounds__(kGemmThreads) gemm_finish_kernel(const GemmArgs a, const float* sums) {
  const int64_t row = blockIdx.x, n_size = a.w.rows;
  const double g_x = global_of(a.x, 0, row);
  const int64_t first = static_cast<int64_t>(blockIdx.y) * kPerThread * kGemmThreads + threadIdx.x;
  float sum[kPerThread];  // read before anything is written, or the compiler would wait for each
  FP4_UNROLL
  for (int i = 0; i < kPerThread; ++i) {
    const int64_t n = first + i * kGemmThreads;
    sum[i] = n < n_size ? sums[row * n_size + n] : 0.0f;
  }
  FP4_UNROLL
  for (int i = 0; i < kPerThread; ++i) {
    const int64_t n = first + i * kGemmThreads;
    if (n < n_size) store(a, row * n_size + n, finish(a, sum[i], g_x, global_of(a.w, 0, n), n));
  }
}

}  // namespace

cudaError_t gemm_finish(const GemmArgs& a, const float* sums, cudaStream_t stream) {
  if (a.x.rows == 0 || a.w.rows == 0) return cudaSuccess;
  const int64_t across = (a.w.rows + kGemmThreads * kPerThread - 1) / (kGemmThreads * kPerThread);
  return launch(gemm_finish_kernel, dim3(static_cast<unsigned>(a.x.rows), static_cast<unsigned>(across)), kGemmThreads, 0, stream, a, sums);
}

}  // namespace fp4ext::cuda
