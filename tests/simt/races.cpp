#include "races.h"

#include "machine.h"

namespace simt {
namespace {

constexpr int kUnderWay = 4095, kBarrier = 4094;  // in the place of an agent
constexpr uint32_t kEpochs = 1u << 20;

int agent_of(uint32_t access) { return static_cast<int>(access >> 20); }
uint32_t epoch_of(uint32_t access) { return access & (kEpochs - 1); }

// What was merged lately: the lanes of a warp merge the same two clocks.
struct Merged {
  Clock a, b, result;
};
std::array<Merged, 16> recent;
unsigned next_recent = 0;

void raise(Epochs& to, const Epochs& from) {
  if (to.size() < from.size()) to.resize(from.size());
  for (size_t i = 0; i < from.size(); ++i) to[i] = to[i] < from[i] ? from[i] : to[i];
}
void set(Epochs& clock, int id, uint32_t epoch) {
  if (clock.size() <= static_cast<size_t>(id)) clock.resize(id + 1);
  clock[id] = clock[id] < epoch ? epoch : clock[id];
}
Clock with(const Clock& clock, int id, uint32_t epoch) {
  Epochs e = clock ? *clock : Epochs{};
  set(e, id, epoch);
  return std::make_shared<const Epochs>(std::move(e));
}
void check_fenced(const Agent& a) {
  if (a.tensor_unfenced && options().races) fail("tcgen05.alloc: a synchronization without tcgen05.fence::before_thread_sync");
}
void next(uint32_t& epoch) {
  if (++epoch == kEpochs) fail("the machine counts no more epochs of an agent");
}

Shadow& shadow() { return block().shadow; }
[[noreturn]] void race(const char* does, size_t offset, const std::string& by, uint32_t other, const char* did, const char* why) {
  fail("race: " + by + " " + does + " shared memory at " + std::to_string(offset) + ", which " + name_of(other) + " " + did + "; " + why);
}
constexpr char kNoOrder[] = "no barrier, mbarrier or fence of their scope stands between";

[[gnu::noinline]] void check_read(Agent& a, Cell& cell, size_t offset, uint32_t mine) {
  const uint32_t w = cell.write;
  if (w && agent_of(w) != a.id && !knows(a.knows.generic, w)) {
    if (agent_of(w) == kUnderWay) race("reads", offset, name_of(mine), w, "has under way", "nobody has waited for it");
    if (agent_of(w) == kBarrier) fail("an mbarrier is read as memory");
    race("reads", offset, name_of(mine), w, "wrote", kNoOrder);
  }
  for (uint32_t& r : cell.reads)
    if (r == 0 || agent_of(r) == a.id || knows(a.knows.generic, r)) {
      r = mine;
      return;
    }
  cell.reads[offset / 2 % 3] = mine;
}
[[gnu::noinline]] void check_write(Agent& a, const Cell& cell, size_t offset, uint32_t mine) {
  const uint32_t w = cell.write;
  if (w && agent_of(w) != a.id && !knows(a.knows.generic, w)) {
    if (agent_of(w) == kUnderWay) race("writes", offset, name_of(mine), w, "has under way", "nobody has waited for it");
    if (agent_of(w) == kBarrier) fail("an mbarrier is written as memory");
    race("writes", offset, name_of(mine), w, "wrote", kNoOrder);
  }
  for (uint32_t r : cell.reads)
    if (r && agent_of(r) != a.id && !knows(a.knows.generic, r)) race("writes", offset, name_of(mine), r, "reads", kNoOrder);
}

template <class Visit>
void each_cell(Shadow& shadow, size_t offset, size_t bytes, Visit visit) {
  for (size_t i = offset / 2; i <= (offset + bytes - 1) / 2 && i < shadow.cells.size(); ++i) visit(shadow.cells[i], i * 2);
}

}  // namespace

std::string name_of(uint32_t access) {
  const int id = agent_of(access), threads = static_cast<int>(block_size().x * block_size().y * block_size().z);
  const int blocks = static_cast<int>(cluster_size());
  if (id == kUnderWay) return "a copy";
  if (id < threads * blocks)
    return "thread " + std::to_string(id % threads) + (blocks > 1 ? " of block " + std::to_string(id / threads) : "");
  return (id - threads * blocks) % 2 ? "a bulk copy" : "the tensor core";
}

bool knows(const Clock& clock, uint32_t access) {
  if (!options().races) return true;
  const auto id = static_cast<size_t>(agent_of(access));
  return clock && id < clock->size() && epoch_of(access) <= (*clock)[id];
}

Clock merge(const Clock& a, const Clock& b) {
  if (!b || a == b) return a;
  if (!a) return b;
  for (const Merged& m : recent)
    if (m.a == a && m.b == b) return m.result;
  auto merged = std::make_shared<Epochs>(*a);
  raise(*merged, *b);
  // The same knowledge is one clock.
  Clock result = *merged == *a ? a : *merged == *b ? b : Clock(std::move(merged));
  recent[next_recent++ % recent.size()] = {a, b, result};
  return result;
}

void Message::add(const Message& other) {
  generic = merge(generic, other.generic);
  for (int s = 0; s < 2; ++s) proxied[s] = merge(proxied[s], other.proxied[s]);
  tensor = merge(tensor, other.tensor);
}

void Meeting::close() {
  rest.generic = std::make_shared<const Epochs>(std::move(generic));
  result = std::move(rest);
  generic = {}, rest = {}, last = nullptr;
}

Message release(Agent& a) {
  check_fenced(a);
  Message m{with(a.knows.generic, a.id, a.epoch), {a.knows.proxied[0], a.knows.proxied[1]}, merge(a.tensor_fenced, a.knows.tensor_seen)};
  next(a.epoch);
  return m;
}
void bring(Agent& a, Meeting& m) {
  check_fenced(a);
  if (a.knows.generic && a.knows.generic.get() != m.last) raise(m.generic, *a.knows.generic);
  m.last = a.knows.generic.get();
  set(m.generic, a.id, a.epoch);
  next(a.epoch);
  for (int s = 0; s < 2; ++s) m.rest.proxied[s] = merge(m.rest.proxied[s], a.knows.proxied[s]);
  m.rest.tensor = merge(merge(m.rest.tensor, a.tensor_fenced), a.knows.tensor_seen);
}
void acquire(Agent& a, const Message& m) {
  a.knows.generic = merge(a.knows.generic, m.generic);
  for (int s = 0; s < 2; ++s) a.knows.proxied[s] = merge(a.knows.proxied[s], m.proxied[s]);
  a.knows.tensor_seen = merge(a.knows.tensor_seen, m.tensor);
}
void fence_proxy(Agent& a, Scope scope) {
  const Clock all = with(a.knows.generic, a.id, a.epoch);
  for (int s = 0; s <= static_cast<int>(scope); ++s) a.knows.proxied[s] = merge(a.knows.proxied[s], all);
  next(a.epoch);
}
void tensor_fence_before(Agent& a) {
  a.tensor_unfenced = false;
  a.tensor_fenced = with(a.knows.tensor, a.id, a.tensor_epoch);
  next(a.tensor_epoch);
}
void tensor_fence_after(Agent& a) {
  a.knows.tensor = merge(a.knows.tensor, a.knows.tensor_seen);
  a.fenced = a.knows;
}

Order order(Agent& engine, const Knowledge& knows) {
  Agent& a = me().agent;
  Order o{knows, knows.generic, a.rank, engine.epoch};
  o.knew.generic = with(knows.generic, a.id, a.epoch);
  o.knew.tensor = with(knows.tensor, a.id, a.tensor_epoch);
  next(a.epoch), next(a.tensor_epoch);
  return o;
}
Message done(const Agent& engine, const Order& order) {
  const Knowledge& knew = order.knew;
  return {with(order.heard, engine.id, order.epoch), {knew.proxied[0], knew.proxied[1]}, with(knew.tensor, engine.id, order.epoch)};
}

void tensor_writes(TensorCell& cell, const Agent& engine, const Order& order) {
  if (!options().races) return;
  if (cell.read && !knows(order.knew.tensor, cell.read))
    fail("race: the tensor core writes tensor memory that " + name_of(cell.read) +
         " reads; no tcgen05.fence and synchronization stand between");
  cell = {access(engine.id, order.epoch), 0};
}
void tensor_reads(TensorCell& cell) {
  if (!options().races) return;
  Agent& a = me().agent;
  if (cell.write && !knows(a.knows.tensor, cell.write))
    fail("race: " + name_of(access(a.id, 1)) +
         " reads tensor memory that the tensor core writes; no tcgen05.commit, wait and fence stand between");
  cell.read = access(a.id, a.tensor_epoch);
}

void watch_read(size_t offset, size_t bytes) {
  if (!options().races) return;
  Agent& a = me().agent;
  const uint32_t mine = access(a.id, a.epoch);
  each_cell(shadow(), offset, bytes, [&](Cell& cell, size_t at) {
    if (cell.reads[0] != mine || cell.write >> 20 == kUnderWay) check_read(a, cell, at, mine);
  });
}
void watch_write(size_t offset, size_t bytes) {
  if (!options().races) return;
  Agent& a = me().agent;
  const uint32_t mine = access(a.id, a.epoch);
  each_cell(shadow(), offset, bytes, [&](Cell& cell, size_t at) {
    if (cell.write == mine && !cell.reads[1] && agent_of(cell.reads[0]) == a.id) return;
    check_write(a, cell, at, mine);
    cell = {mine, {}};
  });
}
void watch_copy_begins(size_t offset, size_t bytes) {
  if (!options().races) return;
  watch_write(offset, bytes);
  each_cell(shadow(), offset, bytes, [&](Cell& cell, size_t) { cell.write = access(kUnderWay, 1); });
}
void watch_copy_ends(size_t offset, size_t bytes) {
  if (!options().races) return;
  const Agent& a = me().agent;
  each_cell(shadow(), offset, bytes, [&](Cell& cell, size_t) { cell = {access(a.id, a.epoch), {}}; });
}
void watch_barrier(size_t offset) {
  watch_write(offset, 8);
  each_cell(shadow(), offset, 8, [&](Cell& cell, size_t) { cell.write = access(kBarrier, 1); });
}

void engine_reads(Block& block, size_t offset, size_t bytes, const Agent& engine, const Order& order) {
  if (!options().races) return;
  const uint32_t mine = access(engine.id, order.epoch);
  const Knowledge& knew = order.knew;
  const Clock& proxied = knew.proxied[block.rank != order.rank];
  const int first_engine = static_cast<int>(cluster_size() * block.threads.size());
  each_cell(block.shadow, offset, bytes, [&](Cell& cell, size_t at) {
    const uint32_t w = cell.write;
    if (w && !knows(agent_of(w) >= first_engine ? knew.generic : proxied, w)) {
      if (agent_of(w) == kUnderWay) race("reads", at, name_of(mine), w, "has under way", "nobody has waited for it");
      if (knows(knew.generic, w)) race("reads", at, name_of(mine), w, "wrote", "no fence.proxy.async of their scope stands between");
      race("reads", at, name_of(mine), w, "wrote", kNoOrder);
    }
    for (uint32_t& r : cell.reads)
      if (r == 0 || agent_of(r) == engine.id || knows(knew.generic, r)) {
        r = mine;
        return;
      }
    cell.reads[2] = mine;
  });
}
void engine_copy_begins(Block& block, size_t offset, size_t bytes, const Order& order) {
  if (!options().races) return;
  const Knowledge& knew = order.knew;
  const uint32_t mine = access(block.bulk_engine.id, 1);
  const int first_engine = static_cast<int>(cluster_size() * block.threads.size());
  each_cell(block.shadow, offset, bytes, [&](Cell& cell, size_t at) {
    const uint32_t w = cell.write;
    if (w && !knows(agent_of(w) >= first_engine ? knew.generic : knew.proxied[0], w))
      race("writes", at, name_of(mine), w, agent_of(w) == kUnderWay ? "has under way" : "wrote", kNoOrder);
    for (uint32_t r : cell.reads)
      if (r && !knows(knew.generic, r)) race("writes", at, name_of(mine), r, "reads", kNoOrder);
    cell = {access(kUnderWay, 1), {}};
  });
}
void engine_copy_ends(Block& block, size_t offset, size_t bytes, const Agent& engine, const Order& order) {
  if (!options().races) return;
  each_cell(block.shadow, offset, bytes, [&](Cell& cell, size_t) { cell = {access(engine.id, order.epoch), {}}; });
}

}  // namespace simt

// What the compiler calls at an access of a kernel.
#define FP4_SIMT_HOOK(name, watch, size)                              \
  void name(void* p) {                                                \
    const size_t offset = static_cast<char*>(p) - simt::watched.from; \
    if (offset < simt::watched.bytes) simt::watch(offset, size);      \
  }
#define FP4_SIMT_HOOKS(n)                                \
  FP4_SIMT_HOOK(__tsan_read##n, watch_read, n)           \
  FP4_SIMT_HOOK(__tsan_write##n, watch_write, n)         \
  FP4_SIMT_HOOK(__tsan_unaligned_read##n, watch_read, n) \
  FP4_SIMT_HOOK(__tsan_unaligned_write##n, watch_write, n)
extern "C" {
FP4_SIMT_HOOKS(1)
FP4_SIMT_HOOKS(2)
FP4_SIMT_HOOKS(4)
FP4_SIMT_HOOKS(8)
FP4_SIMT_HOOKS(16)
void __tsan_init() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit(void) {}
int __tsan_atomic32_fetch_add(volatile int* p, int value, int) { return __atomic_fetch_add(p, value, __ATOMIC_SEQ_CST); }
void __tsan_read_range(void* p, size_t bytes) {
  const size_t offset = static_cast<char*>(p) - simt::watched.from;
  if (offset < simt::watched.bytes) simt::watch_read(offset, bytes);
}
void __tsan_write_range(void* p, size_t bytes) {
  const size_t offset = static_cast<char*>(p) - simt::watched.from;
  if (offset < simt::watched.bytes) simt::watch_write(offset, bytes);
}
}
