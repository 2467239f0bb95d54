// torch's parallel region with plain threads, which ThreadSanitizer sees through, as it does not through OpenMP's.
#pragma once

#include <cstdint>
#include <thread>
#include <vector>

namespace torch::stable {

inline uint32_t get_num_threads() { return 4; }

template <typename F>
void parallel_for(int64_t begin, int64_t end, int64_t, const F& f) {
  std::vector<std::thread> threads;
  for (int64_t i = begin + 1; i < end; ++i) threads.emplace_back([&f, i] { f(i, i + 1); });
  f(begin, begin + 1);
  for (std::thread& thread : threads) thread.join();
}

}  // namespace torch::stable
