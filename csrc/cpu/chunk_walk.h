// All elements of a list of tensors, cut into chunks and shared among the threads.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <vector>

namespace swd {

enum class Direction { Forward, Backward };

class ChunkWalk {
 public:
  // Where sums are kept apart, so the result does not depend on the number of threads. 128 KB of floats.
  static constexpr int64_t CHUNK = 32768;

  explicit ChunkWalk(size_t tensors) {
    numels_.reserve(tensors);
    first_chunk_.reserve(tensors + 1);
    first_cost_.reserve(tensors + 1);
  }

  void add_tensor(int64_t numel) {
    numels_.push_back(numel);
    first_chunk_.push_back(first_chunk_.back() + (numel + CHUNK - 1) / CHUNK);
    first_cost_.push_back(first_cost_.back() + numel + TENSOR_COST);
  }

  const std::vector<int64_t>& numels() const { return numels_; }

  // Calls f(tensor, begin, end) -> Sum for each chunk and returns the sums by tensor, each taken in the order
  // of its chunks. A thread walks a contiguous share; backward, it meets first what it read last when it
  // walked forward, which is then still in its cache.
  template <typename Sum, typename F>
  std::vector<Sum> sums_by_tensor(Direction direction, const F& f) const {
    std::vector<Sum> slots(first_chunk_.back());
    torch::stable::parallel_for(0, first_cost_.back(), CHUNK, [&](int64_t begin, int64_t end) {
      const int64_t from = first_chunk_at(begin), to = first_chunk_at(end);
      int64_t tensor = tensor_of(direction == Direction::Forward ? from : to - 1);
      for (int64_t i = from; i < to; ++i) {
        const int64_t chunk = direction == Direction::Forward ? i : to - 1 - (i - from);
        while (chunk >= first_chunk_[tensor + 1]) ++tensor;
        while (chunk < first_chunk_[tensor]) --tensor;
        const int64_t start = (chunk - first_chunk_[tensor]) * CHUNK;
        slots[chunk] = f(tensor, start, std::min(start + CHUNK, numels_[tensor]));
      }
    });
    std::vector<Sum> sums(numels_.size());
    for (size_t t = 0; t < sums.size(); ++t) {
      for (int64_t c = first_chunk_[t]; c < first_chunk_[t + 1]; ++c) sums[t] += slots[c];
    }
    return sums;
  }

 private:
  // What a tensor costs besides its elements, in elements: keeps the shares even among many small tensors.
  static constexpr int64_t TENSOR_COST = 512;

  int64_t tensor_of(int64_t chunk) const {
    return std::upper_bound(first_chunk_.begin(), first_chunk_.end(), chunk) - first_chunk_.begin() - 1;
  }

  // The first chunk that starts at this cost or later.
  int64_t first_chunk_at(int64_t cost) const {
    const int64_t t = std::upper_bound(first_cost_.begin(), first_cost_.end(), cost) - first_cost_.begin() - 1;
    if (t == static_cast<int64_t>(numels_.size())) return first_chunk_.back();
    return std::min(first_chunk_[t] + (cost - first_cost_[t] + CHUNK - 1) / CHUNK, first_chunk_[t + 1]);
  }

  std::vector<int64_t> numels_;
  std::vector<int64_t> first_chunk_{0};
  std::vector<int64_t> first_cost_{0};
};

}  // namespace swd
