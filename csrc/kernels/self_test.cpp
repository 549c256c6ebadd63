#include "self_test.h"

#include <cstring>
#include <numeric>
#include <vector>

#include "device.h"

namespace fp4ext::kernels {
namespace {

// Memory of the device that frees itself, filled from the host.
class Buffer {
 public:
  template <class T>
  explicit Buffer(const std::vector<T>& values) : bytes_(values.size() * sizeof(T)) {
    if (cudaMalloc(&p_, bytes_ + 16) != cudaSuccess) p_ = nullptr;
    if (p_) cudaMemcpy(p_, values.data(), bytes_, cudaMemcpyHostToDevice);
  }
  ~Buffer() { cudaFree(p_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  template <class T>
  T* as() const {
    return static_cast<T*>(p_);
  }
  std::vector<uint8_t> read() const {
    std::vector<uint8_t> v(bytes_);
    if (cudaMemcpy(v.data(), p_, bytes_, cudaMemcpyDeviceToHost) != cudaSuccess) v.clear();
    return v;
  }

 private:
  void* p_ = nullptr;
  size_t bytes_;
};

// A few bits that depend on an index.
uint32_t hash(uint64_t i) { return static_cast<uint32_t>((i + 1) * 0x9e3779b97f4a7c15ull >> 40); }

struct Codes {
  std::vector<uint8_t> codes, scales;
};
// Every E2M1 code, or small integers of E4M3; scales of four powers of two.
Codes integers(bool nvfp4, int64_t rows, int64_t k, uint64_t seed) {
  static constexpr uint8_t kE4M3[8] = {0x00, 0x38, 0x40, 0x44, 0xb8, 0xc0, 0x48, 0x80};
  Codes c{std::vector<uint8_t>(rows * k / (nvfp4 ? 2 : 1)), std::vector<uint8_t>(rows * k / (nvfp4 ? 16 : 32))};
  for (size_t i = 0; i < c.codes.size(); ++i) c.codes[i] = static_cast<uint8_t>(nvfp4 ? hash(seed + i) : kE4M3[hash(seed + i) % 8]);
  for (size_t i = 0; i < c.scales.size(); ++i)
    c.scales[i] = static_cast<uint8_t>(nvfp4 ? 0x38 + hash(seed + 7 * i) % 4 * 8 : 126 + hash(seed + 7 * i) % 4);
  return c;
}

std::string try_one(Gemm native, bool nvfp4, int64_t m, int64_t n, int64_t k, const std::vector<int32_t>& offsets) {
  const int experts = offsets.empty() ? 1 : static_cast<int>(offsets.size());
  const Codes x = integers(nvfp4, m, k, 1), w = integers(nvfp4, experts * n, k, 1 << 20);
  const Buffer x_codes(x.codes), x_scales(x.scales), w_codes(w.codes), w_scales(w.scales), ends(offsets);
  const Buffer wanted(std::vector<float>(m * n, -1.0f)), got(std::vector<float>(m * n, -2.0f));
  const Elem elem = nvfp4 ? Elem::e2m1 : Elem::e4m3;
  const int block = nvfp4 ? 16 : 32;
  GemmArgs args{{x_codes.as<void>(), x_scales.as<uint8_t>(), nullptr, 0, 0, elem, block, m, k},
                {w_codes.as<void>(), w_scales.as<uint8_t>(), nullptr, 0, 0, elem, block, n, k},
                nullptr,
                wanted.as<void>(),
                false,
                offsets.empty() ? nullptr : ends.as<int32_t>(),
                experts};
  const auto describe = [&] {
    return std::string(nvfp4 ? "NVFP4" : "MXFP8") + (offsets.empty() ? " " : " grouped ") + std::to_string(m) + "x" + std::to_string(n) +
           "x" + std::to_string(k);
  };
  if (!native_takes(args)) return describe() + ": not taken";
  if (gemm_invariant(args, nullptr) != cudaSuccess) return describe() + ": the emulated kernel does not run";
  args.y = got.as<void>();
  for (int turn = 0; turn < 2; ++turn) {
    if (native(args, nullptr) != cudaSuccess) return describe() + ": the kernel does not run";
    const auto a = got.read(), b = wanted.read();
    if (a.empty() || b.empty()) return describe() + ": nothing came back";
    for (size_t i = 0; i < a.size(); i += 4)
      if (std::memcmp(&a[i], &b[i], 4) != 0) {
        float v, u;
        std::memcpy(&v, &a[i], 4), std::memcpy(&u, &b[i], 4);
        const int64_t at = static_cast<int64_t>(i / 4);
        return describe() + ": y[" + std::to_string(at / n) + ", " + std::to_string(at % n) + "] is " + std::to_string(v) + " instead of " +
               std::to_string(u);
      }
  }
  return "";
}

}  // namespace

std::string self_test(Gemm native) {
  // A tile an expert, three for a block of a persistent grid.
  std::vector<int32_t> ends(2 * multiprocessors() + 1);
  std::iota(ends.begin(), ends.end(), 1);
  for (const bool nvfp4 : {true, false}) {
    std::string why = try_one(native, nvfp4, 130, 40, nvfp4 ? 1280 : 640, {});  // more steps than a ring has stages
    if (why.empty()) why = try_one(native, nvfp4, 50, 24, nvfp4 ? 192 : 128, {0, 17, 17, 48});
    if (why.empty()) why = try_one(native, nvfp4, static_cast<int64_t>(ends.size()), 8, nvfp4 ? 256 : 128, ends);
    if (!why.empty()) return why;
  }
  return "";
}

}  // namespace fp4ext::kernels
