#include "machine.h"

// Tensor memory of a block: 128 lanes of 512 columns, which warps allocate by powers of two.
namespace simt {
namespace {

constexpr int kColumns = 512;
constexpr uint32_t kGarbage = 0xffffffff;  // NaN, as a sum and as a scale of either format

bool is_free(const Block& b, int first, int columns) {
  for (const Allocation& a : b.allocations)
    if (first < a.first + a.columns && a.first < first + columns) return false;
  return true;
}

size_t place(const Block& b, uint32_t lane, uint32_t column) {
  if (lane < 128 && column < kColumns && !is_free(b, static_cast<int>(column), 1)) return lane * kColumns + column;
  fail("tcgen05: outside of tensor memory that was allocated");
}

}  // namespace

// Waits until there is room. Where it lies is the machine's choice, the same in both blocks of a pair.
uint32_t tensor_allocate(int columns) {
  if (columns < 32 || columns > kColumns || (columns & (columns - 1))) fail("tcgen05.alloc: not a power of two from 32 to 512");
  Block& b = block();
  b.tensor_memory.resize(128 * kColumns, kGarbage), b.tensor_cells.resize(128 * kColumns);
  const int places = kColumns / columns, start = static_cast<int>(options().seed % places);
  for (;; yield())
    for (int i = 0; i < places; ++i) {
      const int first = (start + i) % places * columns;
      if (!is_free(b, first, columns)) continue;
      b.allocations.push_back({first, columns});
      me().agent.tensor_unfenced = true;
      made_progress();
      return first;
    }
}

void tensor_release(uint32_t first, int columns, bool outstanding) {
  Block& b = block();
  if (outstanding) fail("tcgen05.dealloc: with work outstanding");
  for (size_t i = 0; i < b.allocations.size(); ++i) {
    if (b.allocations[i].first != static_cast<int>(first) || b.allocations[i].columns != columns) continue;
    const Clock known = merge(me().agent.knows.tensor, me().agent.knows.tensor_seen);
    for (uint32_t lane = 0; lane < 128; ++lane)
      for (uint32_t column = first; column < first + columns; ++column) {
        const TensorCell& cell = b.tensor_cells[lane * kColumns + column];
        for (uint32_t other : {cell.write, cell.read})
          if (other && static_cast<int>(other >> 20) != me().agent.id && !knows(known, other))
            fail("race: tensor memory is freed that " + name_of(other) + " uses; no tcgen05.fence and synchronization stand between");
        b.tensor_memory[lane * kColumns + column] = kGarbage;
        b.tensor_cells[lane * kColumns + column] = {};
      }
    b.allocations.erase(b.allocations.begin() + i);
    made_progress();
    return;
  }
  fail("tcgen05.dealloc: no such columns are allocated");
}

uint32_t& tensor_word(Block& b, uint32_t lane, uint32_t column) { return b.tensor_memory[place(b, lane, column)]; }
TensorCell& tensor_cell(Block& b, uint32_t lane, uint32_t column) { return b.tensor_cells[place(b, lane, column)]; }

}  // namespace simt
