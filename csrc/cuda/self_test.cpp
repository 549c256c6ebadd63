#include "self_test.h"

#include <cstring>
#include <numeric>
#include <vector>

#include "device.h"

namespace fp4ext::cuda {
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

// Bits that depend on an index.
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
// Every finite code; every finite E4M3 scale, or twenty powers of two.
Codes random(bool nvfp4, int64_t rows, int64_t k, uint64_t seed) {
  Codes c = integers(nvfp4, rows, k, seed);
  for (size_t i = 0; i < c.codes.size() && !nvfp4; ++i)
    c.codes[i] = static_cast<uint8_t>(hash(seed + i) % 127 | (hash(seed + i) >> 8 & 1) << 7);
  for (size_t i = 0; i < c.scales.size(); ++i)
    c.scales[i] = static_cast<uint8_t>(nvfp4 ? hash(seed + 7 * i) % 127 : 117 + hash(seed + 7 * i) % 20);
  return c;
}

struct Size {
  bool nvfp4;
  int64_t m, n, k;
  std::vector<int32_t> offsets;  // grouped, unless empty
};

// Empty if `gemm` gives the bits of `other` for such operands, twice; else which element is not.
std::string compare(const Size& size, Codes (*make)(bool, int64_t, int64_t, uint64_t), Gemm gemm, Gemm other) {
  const auto& [nvfp4, m, n, k, offsets] = size;
  const int experts = offsets.empty() ? 1 : static_cast<int>(offsets.size());
  const Codes x = make(nvfp4, m, k, 1), w = make(nvfp4, experts * n, k, 1 << 20);
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
  const std::string which = std::string(nvfp4 ? "NVFP4" : "MXFP8") + (offsets.empty() ? " " : " grouped ") + std::to_string(m) + "x" +
                            std::to_string(n) + "x" + std::to_string(k) + ": ";
  if (!native_takes(args)) return which + "not taken";
  if (other(args, nullptr) != cudaSuccess) return which + "the kernel to compare with does not run";
  args.y = got.as<void>();
  for (int turn = 0; turn < 2; ++turn) {
    if (gemm(args, nullptr) != cudaSuccess) return which + "the kernel does not run";
    const auto a = got.read(), b = wanted.read();
    if (a.empty() || b.empty()) return which + "nothing came back";
    for (size_t i = 0; i < a.size(); i += 4)
      if (std::memcmp(&a[i], &b[i], 4) != 0) {
        float v, u;
        std::memcpy(&v, &a[i], 4), std::memcpy(&u, &b[i], 4);
        const int64_t at = static_cast<int64_t>(i / 4);
        return which + "y[" + std::to_string(at / n) + ", " + std::to_string(at % n) + "] is " + std::to_string(v) + " instead of " +
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
  for (const bool nvfp4 : {true, false})
    for (const Size& size : {Size{nvfp4, 130, 100, nvfp4 ? 1792 : 896, {}},  // more steps than a ring has stages
                             Size{nvfp4, 20, 300, nvfp4 ? 256 : 128, {}},    // several tiles along N
                             Size{nvfp4, 50, 24, nvfp4 ? 192 : 128, {0, 17, 17, 48}},
                             Size{nvfp4, static_cast<int64_t>(ends.size()), 8, nvfp4 ? 256 : 128, ends}}) {
      const std::string why = compare(size, integers, native, gemm_invariant);
      if (!why.empty()) return why;
    }
  return "";
}

std::string same_bits(Gemm native, Gemm other) {
  for (const bool nvfp4 : {true, false})
    for (const Size& size : {Size{nvfp4, 270, 100, nvfp4 ? 1088 : 384, {}}, Size{nvfp4, 290, 24, nvfp4 ? 320 : 256, {130, 130, 270}}}) {
      const std::string why = compare(size, random, native, other);
      if (!why.empty()) return why;
    }
  return "";
}

}  // namespace fp4ext::cuda
