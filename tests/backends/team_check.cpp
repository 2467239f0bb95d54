// Passes as those of a step, in which each reads what the one before has written, on other threads. ThreadSanitizer
// tells of data that is exchanged without acquire and release, whatever this machine makes of it.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <numeric>
#include <thread>
#include <vector>

#include "../../csrc/cpu/team.h"

// Whether a thread that has nothing left takes what another has not begun: portion 0 waits for portion 1, which is of
// the same share.
bool others_help() {
  std::atomic<bool> is_done{false};
  bool was_done_meanwhile = false;
  swd::Team::run(int64_t{1} << 40, [&](swd::Team& team) {
    team.each(8, false, [&](int64_t i) {
      if (i == 1) is_done.store(true);
      if (i != 0) return;
      const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
      while (!is_done.load() && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
      was_done_meanwhile = is_done.load();
    });
  });
  return was_done_meanwhile;
}

int main() {
  if (!others_help()) return std::puts("nobody took what a waiting thread had not begun"), 1;
  for (int step = 0; step < 100; ++step) {
    std::vector<double> weights(1000, 1.0), squares(1000);
    double total = 0;
    swd::Team::run(int64_t{1} << 40, [&](swd::Team& team) {
      team.each(1000, false, [&](int64_t i) { squares[i] = 2 * weights[i]; });
      const double mean = std::accumulate(squares.begin(), squares.end(), 0.0) / 1000;
      team.each(1000, true, [&](int64_t i) { weights[i] += mean; });
      std::vector<double> some(100);
      team.each(100, false, [&](int64_t i) { some[i] = weights[10 * i]; });
      total = std::accumulate(some.begin(), some.end(), 0.0);
    });
    if (total != 300) return std::printf("got %g, wanted 300\n", total), 1;
  }
  std::puts("no races");
}
