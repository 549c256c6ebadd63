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
#include <span>
#include <string>
#include <vector>

// A SIMT machine on the CPU: CUDA kernels run here, from the sources that nvcc compiles, so that tests need no GPU.
//
//   a CUDA thread    = a fibre with its own stack; it runs until it waits for others
//   a warp           = 32 fibres that meet at each collective and exchange what they bring
//   a block          = warps that meet at __syncthreads
//   a cluster        = blocks that run together and reach each other's shared memory; most have one. Clusters run one
//                      after the other, in random order
//   shared memory    = an allocation of exactly the size asked for, filled with garbage
//   asynchronous     = a copy that lands as late, or as early, as the ISA allows; a tensor core that is its own engine
//
// Adversarial on purpose: a warp runs as far as it can while the others stand still, in an order that the seed chooses; so
// does a block of a cluster, and now and then some lanes of a warp. A missing barrier then shows as a wrong result, a
// barrier that not all threads reach as a deadlock, and a pointer that is not aligned, or to a block that has exited, as
// an error. Engines see what threads wrote only where it was fenced for them, and tcgen05 is checked for its fences. What it
// cannot see: speed, order between threads without a barrier, typos in the text of an instruction, an ISA misread on both
// sides.
namespace simt {

enum class Async { early, late, random };

// What a tensor core does with the terms of a sum, of which the accumulator is one: add them exactly and round once, to
// nearest or toward zero; or, as hardware does it, cut each term toward zero at some bits below the largest one's exponent,
// add exactly, and round toward zero (MMA-Sim, arXiv 2511.10909, whose authors report the bits of devices).
enum class Arithmetic { nearest, toward_zero, hardware };

struct Options {
  uint64_t seed = 0;
  Async async = Async::late;
  Arithmetic arithmetic = Arithmetic::hardware;
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
  std::vector<std::function<void()>> copies;      // cp.async that have not landed
  std::vector<size_t> groups;                     // how many of them each committed group ends at
  std::vector<std::pair<char*, size_t>> written;  // to shared memory, and not fenced for engines since
  // tcgen05: whether a synchronization came after the last fence::after_thread_sync, and an access that has to end before
  // the next one came after the last fence::before_thread_sync.
  bool synchronized = false, accessed = false;
};

// How far what threads wrote to a byte of shared memory is known to engines (the async proxy).
enum class Known : uint8_t { always, never, in_cta, in_cluster };

// Where `arrived` threads wait for others.
struct Rendezvous {
  unsigned arrived = 0, generation = 0;
};

struct Warp {
  Rendezvous rendezvous;
  const char* collective = nullptr;
  // What the lanes bring to a collective, twice: a lane may arrive at the next one while others still read this one.
  std::vector<char> brought[2];
};

struct Block {
  Dim3 index;
  int rank;  // in its cluster
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  Rendezvous barrier;
  unsigned alive = 0;  // threads that have not exited
  std::unique_ptr<char, decltype(&std::free)> shared{nullptr, &std::free};
  size_t shared_bytes = 0;
  std::vector<Known> known;  // of each byte of shared memory
  std::vector<Job> bulk, tensor;
  std::vector<uint32_t> tensor_memory;  // 128 lanes of so many columns; 0 before they are allocated and when they are freed
  uint32_t tensor_columns;
  int current = 0;
};

Block& block();  // of the thread that runs, or of the engine that works
Block& block_of_cluster(int rank);
Thread& me();
Dim3& block_size();
Dim3& grid_size();
std::mt19937_64& dice();

// Ends the launch: the kernel did what the ISA forbids.
[[noreturn]] void fail(const std::string& why);
const std::string& last_error();

// Lets others run.
void yield();
// Something changed that others may wait for.
void made_progress();
void meet_block();
void meet_cluster();
bool cluster_has_met();
void meet_warp(const char* collective);

// The same place in the shared memory of another block of the cluster.
void* in_block(int rank, void* shared);

// Every lane brings a value and gets all 32.
template <class T>
const T* exchange(const char* collective, const T& value) {
  Warp& warp = block().warps[me().warp];
  auto& slots = warp.brought[warp.rendezvous.generation & 1];
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

// A thread wrote to shared memory of its own block. An engine sees it after the thread's fence for engines, in its own CTA
// or in the cluster.
void written(void* to, size_t bytes);
void fence_for_engines(Known scope);
// An engine that block `by` hands work to reads shared memory of `block`, or writes it.
void engine_reads(const Block& block, const Block& by, const void* from, size_t bytes);
void engine_writes(Block& block, void* to, size_t bytes);

// What a tensor core makes of a sum, whose last term is the accumulator; `bits`: where hardware cuts each term.
float sum_of(std::span<const double> terms, int bits);

// The terms of a block-scaled product: of 8-bit elements each is one, cut at 25 bits; those of 4-bit elements are added
// exactly in a block of kBlock, and the blocks cut at 35 (MMA-Sim).
template <int kBits>
class ScaledTerms {
 public:
  explicit ScaledTerms(int block) : block_(block) {}
  void add(int k, double product) {
    if (kBits == 8 || k % block_ == 0)
      terms_[count_++] = product;
    else
      terms_[count_ - 1] += product;
  }
  float sum_with(float accumulator) {
    terms_[count_++] = accumulator;
    return sum_of({terms_.data(), count_}, kBits == 8 ? 25 : 35);
  }

 private:
  int block_;
  size_t count_ = 0;
  std::array<double, 33> terms_;
};

// Runs the blocks of a grid, in clusters of so many along x. Returns 0, or 1 where the machine ended the launch: last_error()
// says why.
int run(Dim3 grid, Dim3 threads, size_t shared_bytes, const std::function<void()>& body, unsigned cluster = 1);

}  // namespace simt
