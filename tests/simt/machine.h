#pragma once
#include <ucontext.h>

#include <array>
#include <csetjmp>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

// A SIMT machine on the CPU: CUDA kernels run here, from the sources that nvcc compiles, so that tests need no GPU.
//
//   a CUDA thread    = a fibre with its own stack; it runs until it waits for others
//   a warp           = 32 fibres that meet at each collective and exchange what they bring
//   a block          = warps that meet at __syncthreads; blocks run one after the other, in random order
//   shared memory    = an allocation of exactly the size asked for, filled with garbage
//   asynchronous     = a copy that lands as late, or as early, as the ISA allows; a tensor core that is its own engine
//
// Adversarial on purpose: a warp runs as far as it can while the others stand still, in an order that the seed chooses.
// A missing barrier then shows as a wrong result, a barrier that not all threads reach as a deadlock, and a pointer that
// is not aligned as an error. What it cannot see: speed, memory fences, typos in the text of an instruction, an ISA
// misread on both sides.
namespace simt {

enum class Async { early, late, random };

struct Options {
  uint64_t seed = 0;
  Async async = Async::late;
  bool truncate = false;          // tensor cores round each mma toward zero, instead of to nearest
  std::array<int, 64> devices{};  // compute capability of each device, times 10
  int device = 0;                 // where all tensors are
};
Options& options();

struct Dim3 {
  unsigned x = 1, y = 1, z = 1;
  Dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {}
};

// Work of an engine that runs beside the threads: a bulk copy, or an instruction of the fifth-generation tensor core.
struct Job {
  bool copy_of_scales;  // tcgen05.cp: ordered before later mma, but not after earlier ones
  std::function<void()> run;
};

struct Thread {
  ucontext_t context;
  std::jmp_buf at;
  bool started, done;
  Dim3 index;
  int lane, warp;
  std::vector<std::function<void()>> copies;  // cp.async that have not landed
  std::vector<size_t> groups;                 // how many of them each committed group ends at
};

struct Warp {
  int arrived = 0;
  unsigned generation = 0;
  const char* collective = nullptr;
  // What the lanes bring to a collective, twice: a lane may arrive at the next one while others still read this one.
  std::vector<char> brought[2];
};

struct Block {
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  unsigned at_barrier = 0, barrier_generation = 0, alive = 0;
  unsigned long progress = 0;
  std::unique_ptr<char, decltype(&std::free)> shared{nullptr, &std::free};
  size_t shared_bytes = 0;
  std::vector<Job> bulk, tensor;
  std::vector<uint32_t> tensor_memory;
  int current = 0;
};

Block& block();
Thread& me();
Dim3& block_index();
Dim3& block_size();
Dim3& grid_size();
std::mt19937_64& dice();

// Ends the launch: the kernel did what the ISA forbids.
[[noreturn]] void fail(const std::string& why);
const std::string& last_error();

// Lets others run.
void yield();
void meet_block();
void meet_warp(const char* collective);

// Every lane brings a value and gets all 32.
template <class T>
const T* exchange(const char* collective, const T& value) {
  Warp& warp = block().warps[me().warp];
  auto& slots = warp.brought[warp.generation & 1];
  if (slots.size() < 32 * sizeof(T)) slots.resize(32 * sizeof(T));
  std::memcpy(slots.data() + me().lane * sizeof(T), &value, sizeof(T));
  const T* all = reinterpret_cast<const T*>(slots.data());
  meet_warp(collective);
  return all;
}

// cp.async and its groups.
void copy_async(void* to, const void* from, size_t bytes, bool exists);
void commit_copies();
void wait_copies(size_t pending_groups);

// What a tensor core makes of an exact sum.
float round_sum(double sum);

// Runs the blocks of a grid. Returns 0, or 1 where the machine ended the launch: last_error() says why.
int run(Dim3 grid, Dim3 threads, size_t shared_bytes, const std::function<void()>& body);

}  // namespace simt
