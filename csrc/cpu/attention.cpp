#include <algorithm>
#include <memory>
#include <new>
#include <utility>

#include "kernels/attention.h"

namespace fp4ext::cpu {
namespace {

constexpr int64_t kGrain = 1 << 15;  // multiplications worth a thread

void block(const AttentionArgs& args, int64_t batch, int64_t kv_head, int64_t row, int64_t rows, const AttentionScratch& scratch) {
  FP4EXT_DISPATCH(attention_block(args, batch, kv_head, row, rows, scratch));
}

int64_t padded(int64_t n) { return (n + kAttentionPad - 1) / kAttentionPad * kAttentionPad; }

constexpr std::align_val_t kAlign{64};
struct Free {
  void operator()(float* p) const { ::operator delete(p, kAlign); }
};

}  // namespace

void attention(const AttentionArgs& args, const Parallel& parallel) {
  if (args.batch == 0 || args.heads == 0 || args.m == 0 || args.d == 0) return;
  const int64_t rows = args.rows(), d = padded(args.d);
  const int64_t blocks = (rows + kAttentionRows - 1) / kAttentionRows, items = args.batch * args.kv_heads * blocks;
  int64_t keys = 0;
  for (int64_t b = 0; b < args.batch; ++b) keys = std::max(keys, args.start[b] + args.m);
  const int64_t work = std::min(rows, kAttentionRows) * keys * args.d;
  // The last blocks read the most keys: neighbours in the order of items are the same block of different heads, so that threads share evenly.
  const int64_t heads = args.batch * args.kv_heads;
  parallel(items, kGrain / (work + 1) + 1, [&](int64_t begin, int64_t end) {
    const int64_t sizes[] = {kAttentionRows * d, kAttentionRows * padded(keys), d * kAttentionPad, kAttentionChunk * d, kAttentionRows * d,
                             kAttentionRows * d};
    int64_t size = 0;
    for (int64_t s : sizes) size += padded(s);
    const std::unique_ptr<float, Free> memory(static_cast<float*>(::operator new(size * sizeof(float), kAlign)));
    float* at = memory.get();
    const auto take = [&](int i) { return std::exchange(at, at + padded(sizes[i])); };
    AttentionScratch scratch;
    scratch.q = take(0), scratch.scores = take(1), scratch.keys = take(2), scratch.values = take(3), scratch.part = take(4),
    scratch.total = take(5);
    scratch.stride = padded(keys);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t head = i % heads, row = i / heads * kAttentionRows;
      block(args, head / args.kv_heads, head % args.kv_heads, row, std::min(kAttentionRows, rows - row), scratch);
    }
  });
}

}  // namespace fp4ext::cpu
