#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

// Who knows of whose accesses: vector clocks with the scopes and the proxies of PTX's memory model (PTX ISA 8).
//
//   an agent      a thread of the cluster, or an engine of one of its blocks: its tensor core, its bulk copies
//   an epoch      an agent's accesses between two of its releases
//   a clock       of each agent the last epoch that is known; to touch what is not known, so not ordered, is a race
//
// A thread hands its clock over where it releases (a barrier, an arrival, __syncwarp; a shuffle hands over nothing) and
// takes that of others where it acquires. Three kinds of accesses have clocks of their own:
//
//   generic   loads, stores and cp.async of threads
//   proxied   those of the generic accesses that a fence.proxy.async has handed to the async proxy, by which bulk copies
//             and the tensor core read shared memory: in the thread's own block, or in the cluster (.shared::cta,
//             .shared::cluster)
//   tensor    accesses to tensor memory, which cross a synchronization of threads by tcgen05.fence alone
//
// The compiler calls a hook at each access of a kernel (-fsanitize=thread, with this in the place of its runtime). What
// is watched is shared memory and tensor memory; to memory of the device blocks of one launch write side by side, and
// nothing is known of it here.
namespace simt {

using Epochs = std::vector<uint32_t>;
using Clock = std::shared_ptr<const Epochs>;  // none: nothing is known
Clock merge(const Clock& a, const Clock& b);

enum class Scope { block, cluster };

struct Knowledge {
  Clock generic, proxied[2];  // proxied: by scope
  Clock tensor, tensor_seen;  // tensor_seen: acquired, but there was no tcgen05.fence::after_thread_sync yet
};

// What is handed over at a barrier.
struct Message {
  Clock generic, proxied[2], tensor;
  void add(const Message& other);
};

// Where threads meet: what all of them bring.
struct Meeting {
  Epochs generic;
  const void* last = nullptr;  // the clock that was added last
  Message rest, result;
  void close();  // all are here
};

struct Agent {
  int id = 0, rank = 0;
  uint32_t epoch = 1, tensor_epoch = 1;
  bool tensor_unfenced = false;  // it has allocated tensor memory since
  Clock tensor_fenced;           // by tcgen05.fence::before_thread_sync
  Knowledge knows, fenced;       // fenced: at the last tcgen05.fence::after_thread_sync, all that its tcgen05 are ordered after
};

// Synchronization of threads.
Message release(Agent& a);
void acquire(Agent& a, const Message& m);
void bring(Agent& a, Meeting& m);
void fence_proxy(Agent& a, Scope scope);
void tensor_fence_before(Agent& a);
void tensor_fence_after(Agent& a);
// What an engine is told with its work: by a thread of which block, what that knew, and which epoch of the engine it
// is.
struct Order {
  Knowledge knew;
  Clock heard;  // of `knew`, without what the thread did itself
  int rank;
  uint32_t epoch;
};
// To the engine, of the thread that runs and knows so much.
Order order(Agent& engine, const Knowledge& knows);
// Of an engine: that it has done all it had been told until then.
Message done(const Agent& engine, const Order& order);

// What lies over two bytes of shared memory: who wrote them last and who has read them since, as id << 20 | epoch.
struct Cell {
  uint32_t write, reads[3];
};
struct Shadow {
  std::vector<Cell> cells;
  void start(size_t bytes) { cells.assign(bytes / 2 + 1, Cell{}); }
};
// Of one column of one lane of tensor memory.
struct TensorCell {
  uint32_t write, read;
};

void watch_read(size_t offset, size_t bytes);
void watch_write(size_t offset, size_t bytes);
// A copy of this thread is under way to there, or has come.
void watch_copy_begins(size_t offset, size_t bytes);
void watch_copy_ends(size_t offset, size_t bytes);
// Bytes that are an mbarrier: no access is to them.
void watch_barrier(size_t offset);

struct Block;
// By an engine's agent, whose work was given by a thread of block `rank` that knew `knew`.
void engine_reads(Block& block, size_t offset, size_t bytes, const Agent& engine, const Order& order);
void engine_copy_begins(Block& block, size_t offset, size_t bytes, const Order& order);
void engine_copy_ends(Block& block, size_t offset, size_t bytes, const Agent& engine, const Order& order);
// Of tensor memory, which the tensor core writes and a thread reads.
void tensor_writes(TensorCell& cell, const Agent& engine, const Order& order);
void tensor_reads(TensorCell& cell);

bool knows(const Clock& clock, uint32_t access);
inline uint32_t access(int id, uint32_t epoch) { return static_cast<uint32_t>(id) << 20 | epoch; }
std::string name_of(uint32_t access);

}  // namespace simt
