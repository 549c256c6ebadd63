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

#include "arithmetic.h"
#include "races.h"

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
// Adversarial on purpose: a warp runs as far as it can while the others stand still, in an order that the seed chooses;
// so does a block of a cluster, and now and then some lanes of a warp. A missing barrier then shows as a wrong result,
// a barrier that not all threads reach as a deadlock, and a pointer that is not aligned, or to a block that has exited,
// as an error. Who may rely on whose writes is counted besides (races.h), so that a missing fence or a scope too small
// is an error under every schedule. What it cannot see: speed, typos in the text of an instruction, an ISA misread on
// both sides.
namespace simt {

enum class Async { early, late, random };

struct Options {
  uint64_t seed = 0;
  Async async = Async::late;
  Arithmetic arithmetic = Arithmetic::hardware;
  bool races = true;              // end the launch; without, a race shows as a device shows it: by what it makes of the result
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
// A cp.async that has not landed.
struct Copy {
  void* to;
  const void* from;
  size_t bytes;
  bool exists, landed;  // landed: the bytes are there, but nobody may rely on it
};

struct Thread {
  Agent agent;
  ucontext_t context;
  std::jmp_buf at;
  bool started, done;
  Dim3 index;
  int lane, warp;
  bool diverged;  // it elected one of its warp, and has not met the others since
  std::vector<Copy> copies;
  std::vector<size_t> groups;  // how many of them each committed group ends at
};

// Where `arrived` threads wait for others.
struct Rendezvous {
  unsigned arrived = 0, generation = 0;
  Meeting meeting;
};

// Which instruction in the text of a kernel threads are at, for which meeting of theirs.
struct Site {
  const void* at = nullptr;
  unsigned generation = ~0u;
};

struct Warp {
  Site site, block_site, cluster_site;
  Rendezvous rendezvous;
  const char* collective = nullptr;
  // What the lanes bring to a collective, twice: a lane may arrive at the next one while others still read this one.
  std::vector<char> brought[2];
  // What they make of it together.
  std::vector<char> made[2];
  unsigned made_in[2] = {~0u, ~0u};  // which generation
};

struct Barrier;      // mbarrier.cpp
struct Allocation {  // of tensor memory
  int first, columns;
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
  Shadow shadow;
  std::vector<std::shared_ptr<Barrier>> barriers;
  std::vector<Job> bulk, tensor;
  Agent bulk_engine, tensor_engine;
  std::vector<TensorCell> tensor_cells;
  std::vector<uint32_t> tensor_memory;
  std::vector<Allocation> allocations;
  int current = 0;
};

Block& block();  // of the thread that runs, or of the engine that works
Block& block_of_cluster(int rank);
Thread& me();
unsigned cluster_size();
// The shared memory of the block whose thread runs; of 0 bytes where none does.
struct Watched {
  char* from;
  size_t bytes;
};
extern Watched watched;
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
// All lanes of a warp are at the same instruction, as `.aligned` says.
void check_aligned(const char* what);
void meet_warp_and_memory();  // __syncwarp: what each lane wrote is seen by all

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

// Every lane brings a value, and gets its own of the 32 that one of them makes of all.
template <class Out, class In, class Make>
const Out& together(const char* collective, const In& value, Make make) {
  Warp& warp = block().warps[me().warp];
  const unsigned generation = warp.rendezvous.generation, at = generation & 1;
  const In* all = exchange(collective, value);
  if (warp.made_in[at] != generation) {
    warp.made_in[at] = generation;
    if (warp.made[at].size() < 32 * sizeof(Out)) warp.made[at].resize(32 * sizeof(Out));
    make(all, reinterpret_cast<Out*>(warp.made[at].data()));
  }
  return reinterpret_cast<const Out*>(warp.made[at].data())[me().lane];
}

// mbarriers. `scope`: how far what the thread wrote before, or others before they arrived, is handed over.
void barrier_init(void* barrier, int count);
void barrier_arrive(Block& owner, const void* barrier, Scope scope);
void barrier_expect(const void* barrier, int bytes);
void barrier_wait(const void* barrier, int parity, Scope scope);
void barrier_engine_arrives(Block& owner, const void* barrier, const Message& m, const Knowledge& knew);
void barrier_engine_counts(Block& owner, const void* barrier, int bytes, const Message& m, const Knowledge& knew);

// Tensor memory. outstanding: whether a tensor core still has work to do there.
uint32_t tensor_allocate(int columns);
void tensor_release(uint32_t first, int columns, bool outstanding);
uint32_t& tensor_word(Block& block, uint32_t lane, uint32_t column);
TensorCell& tensor_cell(Block& block, uint32_t lane, uint32_t column);

// cp.async and its groups.
void copy_async(void* to, const void* from, size_t bytes, bool exists);
void commit_copies();
void wait_copies(size_t pending_groups);

// Runs the blocks of a grid, in clusters of so many along x. Returns 0, or 1 where the machine ended the launch:
// last_error() says why.
int run(Dim3 grid, Dim3 threads, size_t shared_bytes, const std::function<void()>& body, unsigned cluster = 1);

}  // namespace simt
