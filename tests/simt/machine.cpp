#include "machine.h"

#include <signal.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

namespace simt {
namespace {

constexpr size_t kStack = 128 << 10;

struct Machine {
  Options options;
  std::vector<Block> cluster;
  Block* block = nullptr;  // the one that runs
  Rendezvous cluster_barrier;
  Dim3 size, grid;
  unsigned long progress = 0;
  std::mt19937_64 dice;
  std::string error;
  bool failed = false, in_thread = false;
  std::function<void()> body;
  std::vector<std::unique_ptr<char[]>> stacks;
  ucontext_t scheduler;
  std::jmp_buf at;
  const void* scheduler_stack = nullptr;
  size_t scheduler_stack_bytes = 0;
  void* fake_stack = nullptr;
};
Machine machine;
struct Failed {};  // what an engine throws

// Fibres start by ucontext and switch by longjmp, which makes no system call. AddressSanitizer wants to be told of each
// switch, and takes over longjmp; there they switch by ucontext.
#if defined(__SANITIZE_ADDRESS__)
void to_thread(Thread& t) {
  void* fake = nullptr;
  __sanitizer_start_switch_fiber(&fake, t.context.uc_stack.ss_sp, t.context.uc_stack.ss_size);
  swapcontext(&machine.scheduler, &t.context);
  __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
}
void to_scheduler(Thread& t) {
  __sanitizer_start_switch_fiber(t.done ? nullptr : &machine.fake_stack, machine.scheduler_stack, machine.scheduler_stack_bytes);
  swapcontext(&t.context, &machine.scheduler);
  __sanitizer_finish_switch_fiber(machine.fake_stack, &machine.scheduler_stack, &machine.scheduler_stack_bytes);
}
void arrived() { __sanitizer_finish_switch_fiber(nullptr, &machine.scheduler_stack, &machine.scheduler_stack_bytes); }
#else
[[gnu::noinline]] void to_thread(Thread& t) {
  if (_setjmp(machine.at)) return;
  if (t.started) _longjmp(t.at, 1);
  t.started = true;
  setcontext(&t.context);
}
[[gnu::noinline]] void to_scheduler(Thread& t) {
  if (!_setjmp(t.at)) _longjmp(machine.at, 1);
}
void arrived() {}
#endif

void thread_main() {
  arrived();
  machine.body();
  Thread& t = me();
  if (!t.copies.empty()) wait_copies(0);
  t.done = true;
  --machine.block->alive;
  ++machine.progress;
  to_scheduler(t);
}

void start_block(Block& b, Dim3 threads, size_t shared_bytes) {
  const unsigned n = threads.x * threads.y * threads.z, first = b.rank * n;
  b.threads.resize(n);
  b.warps.assign((n + 31) / 32, Warp{});
  b.barrier = {};
  b.alive = n;
  b.bulk.clear(), b.tensor.clear(), b.barriers.clear();
  b.shadow.start(shared_bytes);
  const int agents = static_cast<int>(machine.cluster.size() * n) + 2 * b.rank;
  b.tensor_engine = {agents, b.rank}, b.bulk_engine = {agents + 1, b.rank};
  b.allocations.clear(), b.tensor_memory.clear(), b.tensor_cells.clear();
  // Exactly as much as was asked for, so that AddressSanitizer sees a step beyond.
  void* memory = nullptr;
  if (posix_memalign(&memory, 1024, shared_bytes + 1)) std::abort();
  b.shared.reset(static_cast<char*>(memory));
  b.shared_bytes = shared_bytes;
  std::memset(memory, machine.dice() & 1 ? 0xff : 0xcd, shared_bytes);  // NaNs, or large numbers
  while (machine.stacks.size() < first + n) machine.stacks.emplace_back(new char[kStack]);
  for (unsigned i = 0; i < n; ++i) {
    Thread& t = b.threads[i];
    t.index = {i % threads.x, i / threads.x % threads.y, i / (threads.x * threads.y)};
    t.lane = static_cast<int>(i % 32), t.warp = static_cast<int>(i / 32);
    t.started = t.done = t.diverged = false;
    t.agent = {static_cast<int>(first + i), b.rank};
    t.copies.clear(), t.groups.clear();
    getcontext(&t.context);
    t.context.uc_stack.ss_sp = machine.stacks[first + i].get();
    t.context.uc_stack.ss_size = kStack;
    t.context.uc_link = nullptr;
    makecontext(&t.context, thread_main, 0);
  }
}

// One step of a block's engines: bulk copies land in any order; the tensor core works in order, but for what the ISA
// leaves open. Returns whether there was anything to do.
bool step_engines(Block& b) {
  auto& dice = machine.dice;
  std::vector<Job>* jobs = &b.tensor;
  size_t i = 0;
  if (!b.bulk.empty() && (b.tensor.empty() || dice() % 2)) {
    jobs = &b.bulk;
    i = dice() % b.bulk.size();
  } else if (b.tensor.empty()) {
    return false;
  } else if (dice() % 2) {
    std::vector<size_t> copies;
    for (size_t k = 0; k < b.tensor.size(); ++k)
      if (b.tensor[k].copy_of_scales) copies.push_back(k);
    if (!copies.empty()) i = copies[dice() % copies.size()];
  }
  const auto job = (*jobs)[i].run;
  jobs->erase(jobs->begin() + i);
  machine.block = &b;
  job();
  ++machine.progress;
  return true;
}
bool step_engines() {
  auto& cluster = machine.cluster;
  const size_t first = cluster.size() > 1 ? machine.dice() % cluster.size() : 0;
  for (size_t i = 0; i < cluster.size(); ++i)
    if (step_engines(cluster[(first + i) % cluster.size()])) return true;
  return false;
}

// Until it cannot go on; or, now and then, the first of its lanes alone.
void run_warp(Block& b, int warp, bool whole) {
  machine.block = &b;
  const unsigned first = warp * 32;
  unsigned end = std::min<unsigned>(first + 32, b.threads.size());
  if (!whole && machine.dice() % 4 == 0) {
    end = first + machine.dice() % (end - first);
    ++machine.progress;  // there are others
  }
  for (unsigned long before = ~0ul; before != machine.progress && !machine.failed;) {
    before = machine.progress;
    for (unsigned i = first; i < end && !machine.failed; ++i) {
      if (b.threads[i].done) continue;
      b.current = static_cast<int>(i);
      machine.in_thread = true;
      watched = {b.shared.get(), b.shared_bytes};
      to_thread(b.threads[i]);
      watched = {};
      machine.in_thread = false;
    }
  }
}

void say_deadlock() {
  unsigned alive = 0, at_barrier = 0;
  std::string where;
  for (const Block& b : machine.cluster) {
    alive += b.alive, at_barrier += b.barrier.arrived;
    for (const Warp& w : b.warps)
      if (w.rendezvous.arrived) where += std::string(where.empty() ? "" : ", ") + w.collective;
  }
  machine.failed = true;
  machine.error = "deadlock: " + std::to_string(alive) + " threads wait, " + std::to_string(at_barrier) + " of them at __syncthreads" +
                  (machine.cluster_barrier.arrived ? ", " + std::to_string(machine.cluster_barrier.arrived) + " at barrier.cluster" : "") +
                  (where.empty() ? "" : ", warps in " + where);
}

void run_cluster() {
  auto& dice = machine.dice;
  auto& cluster = machine.cluster;
  std::vector<std::pair<Block*, int>> order;
  for (Block& b : cluster)
    for (size_t warp = 0; warp < b.warps.size(); ++warp) order.emplace_back(&b, static_cast<int>(warp));
  const bool engines_are_fast = machine.options.async == Async::early;
  const auto anyone = [&]() -> const Block* { return cluster.size() > 1 && dice() % 2 ? &cluster[dice() % cluster.size()] : nullptr; };
  const Block* asleep = anyone();  // until the others cannot go on
  while (std::any_of(cluster.begin(), cluster.end(), [](const Block& b) { return b.alive > 0; })) {
    const unsigned long before = machine.progress;
    const bool whole_warps = dice() % 2;
    std::shuffle(order.begin(), order.end(), dice);
    for (const auto& [b, warp] : order) {
      if (b == asleep) continue;
      run_warp(*b, warp, whole_warps);
      if (machine.failed) return;
      while (engines_are_fast && step_engines()) {
      }
    }
    const bool stuck = machine.progress == before;
    if ((stuck && (!asleep || dice() % 2)) || (machine.options.async == Async::random && dice() % 3 == 0))
      if (step_engines()) continue;
    if (stuck && !asleep) return say_deadlock();
    if (stuck)
      asleep = nullptr;
    else if (!asleep)
      asleep = anyone();
  }
  while (step_engines()) {
  }
  for (const Block& b : cluster)
    if (!b.allocations.empty()) fail("tcgen05: tensor memory that a block has not freed");
}

void meet(Rendezvous& r, unsigned all, bool memory) {
  const unsigned generation = r.generation;
  if (memory) bring(me().agent, r.meeting);
  if (++r.arrived == all) {
    r.arrived = 0;
    if (memory) r.meeting.close();
    ++r.generation;
    ++machine.progress;
  }
  while (r.generation == generation) yield();
  if (memory) acquire(me().agent, r.meeting.result);
}

}  // namespace

Options& options() { return machine.options; }
Block& block() { return *machine.block; }
Block& block_of_cluster(int rank) { return machine.cluster.at(rank); }
Thread& me() { return machine.block->threads[machine.block->current]; }
unsigned cluster_size() { return machine.cluster.size(); }
Watched watched;
Dim3& block_size() { return machine.size; }
Dim3& grid_size() { return machine.grid; }
std::mt19937_64& dice() { return machine.dice; }
const std::string& last_error() { return machine.error; }

void yield() { to_scheduler(me()); }

void made_progress() { ++machine.progress; }

void fail(const std::string& why) {
  machine.failed = true;
  machine.error = why;
  if (!machine.in_thread) throw Failed{};
  yield();
  std::abort();  // a failed launch never resumes a thread
}

namespace {
void check_site(Site& site, unsigned generation, const void* at, const char* what) {
  if (me().diverged) fail(std::string(what) + ": .aligned, but the warp has elected a lane and not met since");
  if (site.generation != generation) site = {at, generation};
  if (site.at != at) fail(std::string(what) + ": .aligned, but lanes of one warp are at different places of the kernel");
}
}  // namespace
[[gnu::noinline]] void check_aligned(const char* what) {
  Warp& w = block().warps[me().warp];
  check_site(w.site, w.rendezvous.generation, __builtin_return_address(0), what);
}
[[gnu::noinline]] void meet_block() {
  check_site(block().warps[me().warp].block_site, block().barrier.generation, __builtin_return_address(0), "bar.sync");
  meet(block().barrier, block().threads.size(), true);
}
[[gnu::noinline]] void meet_cluster() {
  check_site(block().warps[me().warp].cluster_site, machine.cluster_barrier.generation, __builtin_return_address(0), "barrier.cluster");
  meet(machine.cluster_barrier, machine.cluster.size() * block().threads.size(), true);
}

namespace {
void meet_warp(const char* collective, bool memory) {
  Warp& w = block().warps[me().warp];
  if (w.rendezvous.arrived && std::strcmp(w.collective, collective) != 0)
    fail(std::string("lanes of one warp are in different collectives: ") + w.collective + " and " + collective);
  w.collective = collective;
  meet(w.rendezvous, 32, memory);
}
}  // namespace
bool cluster_has_met() { return machine.cluster_barrier.generation > 0; }
void meet_warp(const char* collective) { meet_warp(collective, false); }
void meet_warp_and_memory() {
  meet_warp("__syncwarp", true);
  me().diverged = false;
}

void* in_block(int rank, void* shared) {
  Block& other = block_of_cluster(rank);
  if (!other.alive) fail("the shared memory of a block that has exited");
  return other.shared.get() + (static_cast<char*>(shared) - block().shared.get());
}

namespace {
void land(const Copy& c) { c.exists ? std::memcpy(c.to, c.from, c.bytes) : std::memset(c.to, 0, c.bytes); }
}  // namespace

void copy_async(void* to, const void* from, size_t bytes, bool exists) {
  if (((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from)) & (bytes - 1)) != 0)
    fail("cp.async: an address is not a multiple of its size");
  const auto offset = static_cast<size_t>(static_cast<char*>(to) - block().shared.get());
  if (offset + bytes > block().shared_bytes) fail("cp.async: to elsewhere than shared memory");
  watch_copy_begins(offset, bytes);
  const Async async = machine.options.async;
  Copy copy{to, from, bytes, exists, async == Async::early || (async == Async::random && machine.dice() % 2)};
  if (copy.landed) land(copy);
  me().copies.push_back(copy);
}

void commit_copies() { me().groups.push_back(me().copies.size()); }

void wait_copies(size_t pending_groups) {
  Thread& t = me();
  while (t.groups.size() > pending_groups) {
    const size_t n = t.groups.front();
    for (size_t i = 0; i < n; ++i) {
      const Copy& c = t.copies[i];
      if (!c.landed) land(c);
      watch_copy_ends(static_cast<size_t>(static_cast<char*>(c.to) - block().shared.get()), c.bytes);
    }
    t.copies.erase(t.copies.begin(), t.copies.begin() + n);
    t.groups.erase(t.groups.begin());
    for (size_t& g : t.groups) g -= n;
  }
}

namespace {
// Where the compiler's check of an address traps (build.py).
void trapped(int) { fail("a load or store of a vector at an address that is not a multiple of its size"); }
}  // namespace

int run(Dim3 grid, Dim3 threads, size_t shared_bytes, const std::function<void()>& body, unsigned cluster) {
  struct sigaction trap{};
  trap.sa_handler = trapped;
  trap.sa_flags = SA_NODEFER;  // the handler does not return
  sigaction(SIGILL, &trap, nullptr);
  machine.dice.seed(machine.options.seed);
  machine.failed = false;
  machine.error.clear();
  machine.body = body;
  machine.grid = grid, machine.size = threads;
  machine.cluster.resize(cluster);
  std::vector<uint64_t> order(static_cast<uint64_t>(grid.x) * grid.y * grid.z / cluster);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), machine.dice);
  for (uint64_t c : order) {
    machine.cluster_barrier = {};
    for (unsigned rank = 0; rank < cluster; ++rank) {
      const uint64_t i = c * cluster + rank;
      Block& b = machine.cluster[rank];
      b.index = {static_cast<unsigned>(i % grid.x), static_cast<unsigned>(i / grid.x % grid.y), static_cast<unsigned>(i / grid.x / grid.y)};
      b.rank = static_cast<int>(rank);
      start_block(b, threads, shared_bytes);
    }
    try {
      run_cluster();
    } catch (const Failed&) {
    }
    if (machine.failed) return 1;
  }
  return 0;
}

}  // namespace simt
