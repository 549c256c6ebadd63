#pragma once
#include "../attention.h"

// What one instruction set offers to attention.cpp.
namespace fp4ext::cpu {

inline constexpr int64_t kAttentionChunk = 256;  // keys whose weighted values are summed before they join the total
inline constexpr int64_t kAttentionRows = 32;    // rows a block: what packing keys and values is shared by
inline constexpr int64_t kAttentionPad = 64;     // keys and d are padded to a multiple of this in scratch memory

// Scratch of one thread, in floats, for blocks that read at most `keys` keys of `d` elements.
struct AttentionScratch {
  float* q;        // [kAttentionRows, padded d]
  float* scores;   // [kAttentionRows, padded keys]
  float* keys;     // [padded d, a tile of keys]
  float* values;   // [kAttentionChunk, padded d]
  float* part;     // [kAttentionRows, padded d]
  float* total;    // [kAttentionRows, padded d]
  int64_t stride;  // of scores
};

#define FP4EXT_ATTENTION_KERNELS(isa)                                                                        \
  namespace isa {                                                                                            \
  void attention_block(const AttentionArgs& args, int64_t batch, int64_t kv_head, int64_t row, int64_t rows, \
                       const AttentionScratch& scratch);                                                     \
  }
FP4EXT_ATTENTION_KERNELS(portable)
FP4EXT_ATTENTION_KERNELS(avx2)
FP4EXT_ATTENTION_KERNELS(avx512)
#undef FP4EXT_ATTENTION_KERNELS

}  // namespace fp4ext::cpu
