#include "machine.h"

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
  Block block;
  Dim3 index, size, grid;
  std::mt19937_64 dice;
  std::string error;
  bool failed = false;
  std::function<void()> body;
  std::vector<std::unique_ptr<char[]>> stacks;
  ucontext_t scheduler;
  std::jmp_buf at;
  const void* scheduler_stack = nullptr;
  size_t scheduler_stack_bytes = 0;
  void* fake_stack = nullptr;
};
Machine machine;

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
  --machine.block.alive;
  ++machine.block.progress;
  to_scheduler(t);
}

void start_block(Dim3 threads, size_t shared_bytes) {
  Block& b = machine.block;
  const unsigned n = threads.x * threads.y * threads.z;
  b.threads.resize(n);
  b.warps.assign((n + 31) / 32, Warp{});
  b.at_barrier = b.barrier_generation = 0;
  b.alive = n;
  b.bulk.clear(), b.tensor.clear();
  b.tensor_memory.assign(128 * 512, 0x7fc0dead);
  // Exactly as much as was asked for, so that AddressSanitizer sees a step beyond.
  void* memory = nullptr;
  if (posix_memalign(&memory, 1024, shared_bytes + 1)) std::abort();
  b.shared.reset(static_cast<char*>(memory));
  b.shared_bytes = shared_bytes;
  std::memset(memory, machine.dice() & 1 ? 0xff : 0xcd, shared_bytes);  // NaNs, or large numbers
  while (machine.stacks.size() < n) machine.stacks.emplace_back(new char[kStack]);
  for (unsigned i = 0; i < n; ++i) {
    Thread& t = b.threads[i];
    t.index = {i % threads.x, i / threads.x % threads.y, i / (threads.x * threads.y)};
    t.lane = static_cast<int>(i % 32), t.warp = static_cast<int>(i / 32);
    t.started = t.done = false;
    t.copies.clear(), t.groups.clear();
    getcontext(&t.context);
    t.context.uc_stack.ss_sp = machine.stacks[i].get();
    t.context.uc_stack.ss_size = kStack;
    t.context.uc_link = nullptr;
    makecontext(&t.context, thread_main, 0);
  }
}

// One step of the engines: bulk copies land in any order; the tensor core works in order, but for what the ISA leaves
// open. Returns whether there was anything to do.
bool step_engines() {
  Block& b = machine.block;
  auto& dice = machine.dice;
  if (!b.bulk.empty() && (b.tensor.empty() || dice() % 2)) {
    const size_t i = dice() % b.bulk.size();
    const auto job = b.bulk[i].run;
    b.bulk.erase(b.bulk.begin() + i);
    job();
    return true;
  }
  if (b.tensor.empty()) return false;
  size_t i = 0;
  if (dice() % 2) {
    std::vector<size_t> copies;
    for (size_t k = 0; k < b.tensor.size(); ++k)
      if (b.tensor[k].copy_of_scales) copies.push_back(k);
    if (!copies.empty()) i = copies[dice() % copies.size()];
  }
  const auto job = b.tensor[i].run;
  b.tensor.erase(b.tensor.begin() + i);
  job();
  return true;
}

void run_warp(int warp) {
  Block& b = machine.block;
  const unsigned first = warp * 32, end = std::min<unsigned>(first + 32, b.threads.size());
  // Until it cannot go on.
  for (unsigned long before = ~0ul; before != b.progress && !machine.failed;) {
    before = b.progress;
    for (unsigned i = first; i < end && !machine.failed; ++i) {
      if (b.threads[i].done) continue;
      b.current = static_cast<int>(i);
      to_thread(b.threads[i]);
    }
  }
}

void run_block() {
  Block& b = machine.block;
  auto& dice = machine.dice;
  std::vector<int> order(b.warps.size());
  std::iota(order.begin(), order.end(), 0);
  const bool engines_are_fast = machine.options.async == Async::early;
  while (b.alive && !machine.failed) {
    const unsigned long before = b.progress;
    std::shuffle(order.begin(), order.end(), dice);
    for (int warp : order) {
      run_warp(warp);
      if (machine.failed) return;
      while (engines_are_fast && step_engines()) ++b.progress;
    }
    if ((b.progress == before || (machine.options.async == Async::random && dice() % 3 == 0)) && step_engines()) {
      ++b.progress;
      continue;
    }
    if (b.alive && b.progress == before) {
      std::string where;
      for (const Warp& w : b.warps)
        if (w.arrived) where += std::string(where.empty() ? "" : ", ") + w.collective;
      machine.failed = true;
      machine.error = "deadlock: " + std::to_string(b.alive) + " threads wait, " + std::to_string(b.at_barrier) +
                      " of them at __syncthreads" + (where.empty() ? "" : ", warps in " + where);
    }
  }
  while (!machine.failed && step_engines()) {
  }
}

}  // namespace

Options& options() { return machine.options; }
Block& block() { return machine.block; }
Thread& me() { return machine.block.threads[machine.block.current]; }
Dim3& block_index() { return machine.index; }
Dim3& block_size() { return machine.size; }
Dim3& grid_size() { return machine.grid; }
std::mt19937_64& dice() { return machine.dice; }
const std::string& last_error() { return machine.error; }

void yield() { to_scheduler(me()); }

void fail(const std::string& why) {
  machine.failed = true;
  machine.error = why;
  if (machine.block.alive) yield();
  std::abort();  // a failed launch never resumes a thread
}

void meet_block() {
  Block& b = machine.block;
  const unsigned generation = b.barrier_generation;
  if (++b.at_barrier == b.threads.size()) {
    b.at_barrier = 0;
    ++b.barrier_generation;
    ++b.progress;
  }
  while (b.barrier_generation == generation) yield();
}

void meet_warp(const char* collective) {
  Block& b = machine.block;
  Warp& w = b.warps[me().warp];
  const unsigned generation = w.generation;
  if (w.arrived && std::strcmp(w.collective, collective) != 0)
    fail(std::string("lanes of one warp are in different collectives: ") + w.collective + " and " + collective);
  w.collective = collective;
  if (++w.arrived == 32) {
    w.arrived = 0;
    ++w.generation;
    ++b.progress;
  }
  while (w.generation == generation) yield();
}

void copy_async(void* to, const void* from, size_t bytes, bool exists) {
  if (((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from)) & (bytes - 1)) != 0)
    fail("cp.async: an address is not a multiple of its size");
  const auto copy = [=] { exists ? std::memcpy(to, from, bytes) : std::memset(to, 0, bytes); };
  const Async async = machine.options.async;
  if (async == Async::early || (async == Async::random && machine.dice() % 2))
    copy();
  else
    me().copies.push_back(copy);
}

void commit_copies() { me().groups.push_back(me().copies.size()); }

void wait_copies(size_t pending_groups) {
  Thread& t = me();
  while (t.groups.size() > pending_groups) {
    const size_t n = t.groups.front();
    for (size_t i = 0; i < n; ++i) t.copies[i]();
    t.copies.erase(t.copies.begin(), t.copies.begin() + n);
    t.groups.erase(t.groups.begin());
    for (size_t& g : t.groups) g -= n;
  }
}

float round_sum(double sum) {
  const float nearest = static_cast<float>(sum);
  const bool away = std::fabs(static_cast<double>(nearest)) > std::fabs(sum);
  return machine.options.truncate && away ? std::nextafterf(nearest, 0.0f) : nearest;
}

int run(Dim3 grid, Dim3 threads, size_t shared_bytes, const std::function<void()>& body) {
  machine.dice.seed(machine.options.seed);
  machine.failed = false;
  machine.error.clear();
  machine.body = body;
  machine.grid = grid, machine.size = threads;
  std::vector<uint64_t> order(static_cast<uint64_t>(grid.x) * grid.y * grid.z);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), machine.dice);
  for (uint64_t i : order) {
    machine.index = {static_cast<unsigned>(i % grid.x), static_cast<unsigned>(i / grid.x % grid.y),
                     static_cast<unsigned>(i / grid.x / grid.y)};
    start_block(threads, shared_bytes);
    run_block();
    if (machine.failed) return 1;
  }
  return 0;
}

}  // namespace simt
