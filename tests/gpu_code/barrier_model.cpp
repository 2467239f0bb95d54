// How the programs of the fused kernel wait for one another, as C++ threads for ThreadSanitizer: it follows which
// access happens before which, and so reports a missing order even when the values come out right.
//
// As in swd_fused/backends/triton/kernels/grid.py: a counter starts at zero in each launch and counts arrivals, one of
// each program at each meeting. At the first meeting all wait until it says that all have come (wait_for_all). At the
// last one nobody waits: whoever finds that all others have come (is_last) finishes the work, on what they wrote, and
// sets the counter back. A thread here is a thread of the GPU, and each program has a barrier of its own (bar.sync).
// Partial sums and step counts are plain memory. Each launch has new threads, as kernels of one stream follow each
// other.
//
// The build says what is left out: ARRIVE_ORDER, WAIT_ORDER, LAST_ORDER, BARRIER_BEFORE, BARRIER_AFTER.
#include <pthread.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <thread>
#include <vector>

constexpr unsigned programs = 4, threads = 4, launches = 4;

unsigned partial_sums[programs * threads];
unsigned step = 0;
std::atomic<int32_t> arrivals{0};
std::array<pthread_barrier_t, programs> program_barrier;
std::array<bool, programs> found_last;  // what an atomic gave to a program's first thread, in shared memory
std::atomic<unsigned> wrong_sums{0};

void bar_sync(unsigned program) { pthread_barrier_wait(&program_barrier[program]); }

void wait_for_all(unsigned program, unsigned thread, unsigned meeting) {
#if BARRIER_BEFORE
  bar_sync(program);
#endif
  if (thread == 0) {
    arrivals.fetch_add(1, std::ARRIVE_ORDER);
    while (arrivals.load(std::memory_order_relaxed) < static_cast<int32_t>(meeting * programs)) {
      std::this_thread::yield();
    }
    while (arrivals.load(std::WAIT_ORDER) < static_cast<int32_t>(meeting * programs)) {
    }
  }
#if BARRIER_AFTER
  bar_sync(program);
#endif
}

bool is_last(unsigned program, unsigned thread, unsigned meeting) {
  bar_sync(program);
  if (thread == 0) {
    found_last[program] = arrivals.fetch_add(1, std::LAST_ORDER) == static_cast<int32_t>(meeting * programs) - 1;
  }
  bar_sync(program);
  const bool last = found_last[program];
  if (last && thread == 0) {
    arrivals.store(0, std::memory_order_relaxed);
  }
  return last;
}

void check(bool right) { wrong_sums.fetch_add(!right, std::memory_order_relaxed); }

void exact_step(unsigned launch, unsigned program, unsigned thread) {
  partial_sums[program * threads + thread] = step + program * threads + thread;
  wait_for_all(program, thread, 1);
  unsigned sum = 0;
  for (const unsigned partial : partial_sums) {
    sum += partial;
  }
  constexpr unsigned count = programs * threads;
  check(sum == count * launch + count * (count - 1) / 2 && step == launch);
  if (is_last(program, thread, 2) && thread == 0) {
    step += 1;
  }
}

void lagged_step(unsigned launch, unsigned program, unsigned thread) {
  partial_sums[program * threads + thread] = step;
  if (is_last(program, thread, 1) && thread == 0) {
    for (const unsigned partial : partial_sums) {
      check(partial == launch);
    }
    step += 1;
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
        grid.emplace_back(launch % 2 ? lagged_step : exact_step, launch, program, thread);
      }
    }
    for (std::thread& thread : grid) {
      thread.join();
    }
  }
  std::printf("wrong sums: %u, steps: %u, arrivals: %d\n", wrong_sums.load(), step, arrivals.load());
}
