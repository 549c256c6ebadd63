#pragma once
#include "host_device.h"

// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11): four words that depend on a
// counter and a key, and on nothing else: not on a thread, a tile or a history. Here the counter is the logical place
// of an element (docs/numerics.md, 5).
namespace fp4ext {

struct PhiloxKey {
  uint32_t lo, hi;  // the seed
};

template <class U>
struct PhiloxWords {
  U w[4];
};

template <class U>
FP4_HD PhiloxWords<U> philox4x32(U c0, U c1, U c2, U c3, PhiloxKey key) {
  uint32_t k0 = key.lo, k1 = key.hi;
  for (int round = 0; round < 10; ++round) {
    U hi0, lo0, hi1, lo1;
    mul_wide(c0, 0xD2511F53u, hi0, lo0);
    mul_wide(c2, 0xCD9E8D57u, hi1, lo1);
    c0 = hi1 ^ c1 ^ U(k0);
    c1 = lo1;
    c2 = hi0 ^ c3 ^ U(k1);
    c3 = lo0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// What the random bits are for, which copy, whose: together the word `usage` of the counter.
enum class Purpose : uint32_t { kElement = 0, kScale = 1, kSigns = 2 };
FP4_HD uint32_t philox_usage(Purpose purpose, bool colwise, uint32_t role) {
  return static_cast<uint32_t>(purpose) + (colwise ? 4u : 0u) + 8u * role;
}

// Where a call's random bits come from: the user's state and the logical coordinates of the tensor's first element.
struct Rng {
  PhiloxKey key;
  uint32_t offset;
  uint32_t row, k;
};

// The 16 random bits of element i (0..7) of the eight that share one call.
template <class U>
FP4_HD U random16(const PhiloxWords<U>& words, int i) {
  return i & 1 ? words.w[i / 2] >> 16 : words.w[i / 2] & U(0xffffu);
}

}  // namespace fp4ext
