#include "machine.h"

// mbarriers of the machine. What counts stands beside shared memory, so that no access of a kernel can be to it.
namespace simt {
namespace {

// Of the block whose shared memory it lies in. Arrivals of threads are seen in their own block, and beyond it where
// both sides name the cluster; those of engines by whoever waits.
struct Handed {
  std::array<Message, 2> own;  // by the arriving thread's block
  Message cluster, engines;
  void add(const Handed& other) {
    for (int rank = 0; rank < 2; ++rank) own[rank].add(other.own[rank]);
    cluster.add(other.cluster), engines.add(other.engines);
  }
};

}  // namespace

struct Barrier {
  size_t offset;
  int count, pending;
  int64_t bytes = 0;
  int phase = 0;
  uint32_t made;  // the access that made it
  Handed arriving, done;

  void turn_if_all_have_come() {
    if (pending == 0 && bytes == 0) {
      pending = count;
      phase ^= 1;
      done.add(arriving);
      arriving = {};
    }
    made_progress();
  }
  void arrive() {
    if (pending <= 0) fail("mbarrier: more arrivals than it was made for");
    --pending;
    turn_if_all_have_come();
  }
};

namespace {

Barrier& find(Block& b, const void* p, const Clock& known, int id) {
  const auto offset = static_cast<size_t>(static_cast<const char*>(p) - b.shared.get());
  for (const auto& barrier : b.barriers)
    if (barrier->offset == offset) {
      if (static_cast<int>(barrier->made >> 20) != id && !knows(known, barrier->made))
        fail("race: an mbarrier is used of whose making nothing is known: no barrier or fence of their scope stands between");
      return *barrier;
    }
  fail("mbarrier: none was made there");
}
Barrier& find(Block& b, const void* p) { return find(b, p, me().agent.knows.generic, me().agent.id); }

}  // namespace

void barrier_init(void* p, int count) {
  Block& b = block();
  const auto offset = static_cast<size_t>(static_cast<char*>(p) - b.shared.get());
  if (offset % 8 || offset + 8 > b.shared_bytes) fail("mbarrier.init: not eight aligned bytes of shared memory");
  watch_barrier(offset);
  auto barrier = std::make_shared<Barrier>();
  barrier->offset = offset, barrier->count = barrier->pending = count;
  barrier->made = access(me().agent.id, me().agent.epoch);
  b.barriers.push_back(std::move(barrier));
}
void barrier_arrive(Block& owner, const void* p, Scope scope) {
  Barrier& barrier = find(owner, p);
  const Message m = release(me().agent);
  barrier.arriving.own[block().rank].add(m);
  if (scope == Scope::cluster) barrier.arriving.cluster.add(m);
  barrier.arrive();
}
void barrier_expect(const void* p, int bytes) {
  Barrier& barrier = find(block(), p);
  barrier.bytes += bytes;
  barrier_arrive(block(), p, Scope::block);
}
void barrier_wait(const void* p, int parity, Scope scope) {
  Barrier& barrier = find(block(), p);
  while (barrier.phase == parity) yield();
  acquire(me().agent, barrier.done.own[block().rank]);
  acquire(me().agent, barrier.done.engines);
  if (scope == Scope::cluster) acquire(me().agent, barrier.done.cluster);
}
void barrier_engine_arrives(Block& owner, const void* p, const Message& m, const Knowledge& knew) {
  Barrier& barrier = find(owner, p, knew.proxied[owner.rank != block().rank], -1);
  barrier.arriving.engines.add(m);
  barrier.arrive();
}
void barrier_engine_counts(Block& owner, const void* p, int bytes, const Message& m, const Knowledge& knew) {
  Barrier& barrier = find(owner, p, knew.proxied[owner.rank != block().rank], -1);
  barrier.arriving.engines.add(m);
  barrier.bytes -= bytes;
  barrier.turn_if_all_have_come();
}

}  // namespace simt
