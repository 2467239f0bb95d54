#include "team.h"

#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <thread>

namespace swd {
namespace {

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ __volatile__("yield");
#endif
}

// Waits for what another thread is about to do, which takes it no longer than a task, tens of microseconds. Only
// then it yields, since that one may need this core: another program would keep it for milliseconds, so that a million
// elements beside one such program took three times as long.
template <typename F>
void wait_until(const F& holds) {
  constexpr int SPINS = 20000;  // about half a millisecond
  for (int spin = 0; !holds(); ++spin) {
    spin < SPINS ? pause() : std::this_thread::yield();
  }
}

// Keeps small steps on one thread for a while after a region had to wait for a thread without a core: for 32 steps, and
// twice as many each time that it happens again. A second thread saves such a step tenths of a millisecond, and where
// another program keeps its core busy it costs several. What a step computes does not depend on the number of threads.
class Patience {
 public:
  static constexpr int64_t SMALL = 1 << 18;  // elements

  bool takes_one_thread() {
    if (alone_.load(std::memory_order_relaxed) <= 0) return false;
    alone_.fetch_sub(1, std::memory_order_relaxed);
    return true;
  }

  void note(std::chrono::steady_clock::duration waited) {
    constexpr int64_t FEWEST = 32, MOST = 1024;
    const int64_t before = last_.load(std::memory_order_relaxed);
    const bool is_long = waited > std::chrono::microseconds(300);
    const int64_t steps = is_long ? std::clamp(2 * before, FEWEST, MOST) : 0;
    last_.store(steps, std::memory_order_relaxed);
    alone_.store(steps, std::memory_order_relaxed);
  }

 private:
  std::atomic<int64_t> alone_{0}, last_{0};
};

Patience patience;

}  // namespace

Team::Team(int64_t threads) : threads_(threads) {
  if (threads == 1) return;
  for (Pass& pass : passes_) pass.taken = std::vector<Counter>(threads);
}

void Team::run(int64_t elements, const Program& program) {
  const bool is_small = elements < Patience::SMALL;
  const int64_t wanted = elements / ELEMENTS_OF_THREAD;
  const bool is_alone = wanted < 2 || (is_small && patience.takes_one_thread());
  const int64_t threads = is_alone ? 1 : std::min(wanted, int64_t{torch::stable::get_num_threads()});
  Team team(threads);
  if (threads == 1) return program(team);
  std::chrono::steady_clock::time_point done;
  torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t) {
    if (begin != 0) return team.join(begin);
    struct End {
      ~End() { is_over.store(true, std::memory_order_release); }
      std::atomic<bool>& is_over;
    } const end{team.is_over_};
    program(team);
    done = std::chrono::steady_clock::now();
  });
  if (is_small) patience.note(std::chrono::steady_clock::now() - done);
}

void Team::each(int64_t tasks, bool backward, const Task& f) {
  if (threads_ == 1) {
    for (int64_t i = 0; i < tasks; ++i) f(backward ? tasks - 1 - i : i);
    return;
  }
  const int64_t number = begun_.load(std::memory_order_relaxed);
  STD_TORCH_CHECK(number < MOST_PASSES, "swd_fused: a step has at most ", MOST_PASSES, " passes");
  Pass& pass = passes_[number];
  pass.f = &f;
  pass.tasks = tasks;
  pass.backward = backward;
  begun_.store(number + 1, std::memory_order_release);
  work(pass, 0);
  wait_until([&] { return pass.done.value.load(std::memory_order_acquire) == tasks; });
}

void Team::work(Pass& pass, int64_t own_share) noexcept {
  for (int64_t i = 0; i < threads_; ++i) {
    const int64_t share = (own_share + i) % threads_;
    const int64_t from = pass.tasks * share / threads_, to = pass.tasks * (share + 1) / threads_;
    for (;;) {
      const int64_t taken = pass.taken[share].value.fetch_add(1, std::memory_order_relaxed);
      if (taken >= to - from) break;
      (*pass.f)(pass.backward ? to - 1 - taken : from + taken);
      pass.done.value.fetch_add(1, std::memory_order_acq_rel);
    }
  }
}

void Team::join(int64_t own_share) noexcept {
  for (int64_t number = 0;; ++number) {
    wait_until(
        [&] { return begun_.load(std::memory_order_acquire) > number || is_over_.load(std::memory_order_acquire); });
    if (begun_.load(std::memory_order_acquire) <= number) return;
    work(passes_[number], own_share);
  }
}

}  // namespace swd
