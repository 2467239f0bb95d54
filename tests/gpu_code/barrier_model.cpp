// The grid barrier of the fused kernel as C++ threads, for ThreadSanitizer: it follows which access happens before
// which, and so reports a missing order even when the values come out right.
//
// A thread here is a thread of the GPU; each program has a barrier of its own (bar.sync). Partial sums are plain
// memory. The counter is never reset: an arrival adds one, and a program waits for the next multiple of the number of
// programs. Each launch has new threads, as kernels of one stream follow each other; the counter goes on.
//
// The build says what is left out: ARRIVE_ORDER, WAIT_ORDER, BARRIER_BEFORE, BARRIER_AFTER.
#include <pthread.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <thread>
#include <vector>

constexpr unsigned programs = 4, threads = 4, launches = 3;

unsigned partial_sums[programs * threads];
std::atomic<int64_t> arrivals{0};
std::array<pthread_barrier_t, programs> program_barrier;
std::atomic<unsigned> wrong_sums{0};

void bar_sync(unsigned program) { pthread_barrier_wait(&program_barrier[program]); }

void grid_barrier(unsigned program, unsigned thread) {
#if BARRIER_BEFORE
  bar_sync(program);
#endif
  if (thread == 0) {
    const int64_t before = arrivals.fetch_add(1, std::ARRIVE_ORDER);
    const int64_t target = (before / programs + 1) * programs;
    while (arrivals.load(std::WAIT_ORDER) < target) {
      std::this_thread::yield();
    }
  }
#if BARRIER_AFTER
  bar_sync(program);
#endif
}

void kernel(unsigned launch, unsigned program, unsigned thread) {
  partial_sums[program * threads + thread] = launch + program * threads + thread;
  grid_barrier(program, thread);
  unsigned sum = 0;
  for (const unsigned partial : partial_sums) {
    sum += partial;
  }
  constexpr unsigned count = programs * threads;
  if (sum != count * launch + count * (count - 1) / 2) {
    wrong_sums.fetch_add(1, std::memory_order_relaxed);
  }
}

int main() {
  for (pthread_barrier_t& barrier : program_barrier) {
    pthread_barrier_init(&barrier, nullptr, threads);
  }
  for (unsigned launch = 0; launch < launches; ++launch) {
    std::vector<std::thread> grid;
    for (unsigned program = 0; program < programs; ++program) {
      for (unsigned thread = 0; thread < threads; ++thread) {
        grid.emplace_back(kernel, launch, program, thread);
      }
    }
    for (std::thread& thread : grid) {
      thread.join();
    }
  }
  std::printf("wrong sums: %u\n", wrong_sums.load());
}
