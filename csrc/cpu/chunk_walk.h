// All elements of a list of tensors, cut into chunks that the threads of a team share.
#pragma once

#include <algorithm>
#include <vector>

#include "team.h"

namespace swd {

enum class Direction { Forward, Backward };

class ChunkWalk {
 public:
  // Where sums are kept apart, so the result does not depend on the number of threads. 128 KB of floats.
  static constexpr int64_t CHUNK = 32768;

  // Some chunks of a tensor that follow one another.
  struct Stretch {
    int64_t tensor, first_chunk, begin, end;
  };

  explicit ChunkWalk(size_t tensors) {
    numels_.reserve(tensors);
    first_chunk_.reserve(tensors + 1);
    first_cost_.reserve(tensors + 1);
  }

  // Several chunks at once are better for tensors that lie in another order than they are walked in.
  void add_tensor(int64_t numel, int64_t chunks_at_once = 1) {
    numels_.push_back(numel);
    first_chunk_.push_back(first_chunk_.back() + (numel + CHUNK - 1) / CHUNK);
    first_cost_.push_back(first_cost_.back() + numel + TENSOR_COST);
    if (numel) portion_ = std::max(portion_, chunks_at_once * CHUNK);
  }

  const std::vector<int64_t>& numels() const { return numels_; }
  int64_t cost() const { return first_cost_.back(); }

  // Calls f(stretch, sums) for all chunks, a stretch at a time, where sums[0] is for its first chunk. Returns the sums
  // by tensor, each taken in the order of its chunks.
  template <typename Sum, typename F>
  std::vector<Sum> sums_by_tensor(Team& team, Direction direction, const F& f) const {
    std::vector<Sum> slots(first_chunk_.back());
    const bool backward = direction == Direction::Backward;
    team.each((cost() + portion_ - 1) / portion_, backward, [&](int64_t portion) {
      const int64_t from = first_chunk_at(portion * portion_);
      const int64_t to = first_chunk_at(std::min((portion + 1) * portion_, cost()));
      if (from == to) return;
      int64_t tensor = tensor_of(backward ? to - 1 : from);
      for (int64_t done = 0; done < to - from;) {
        const int64_t chunk = backward ? to - 1 - done : from + done;
        while (chunk >= first_chunk_[tensor + 1]) ++tensor;
        while (chunk < first_chunk_[tensor]) --tensor;
        const int64_t first = std::max(from, first_chunk_[tensor]), last = std::min(to, first_chunk_[tensor + 1]);
        const int64_t begin = (first - first_chunk_[tensor]) * CHUNK;
        const int64_t end = std::min((last - first_chunk_[tensor]) * CHUNK, numels_[tensor]);
        f(Stretch{tensor, first, begin, end}, &slots[first]);
        done += last - first;
      }
    });
    std::vector<Sum> sums(numels_.size());
    for (size_t t = 0; t < sums.size(); ++t) {
      for (int64_t c = first_chunk_[t]; c < first_chunk_[t + 1]; ++c) sums[t] += slots[c];
    }
    return sums;
  }

 private:
  // The fixed cost of a tensor, in elements: keeps the shares even among many small tensors.
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

  int64_t portion_ = CHUNK;
  std::vector<int64_t> numels_;
  std::vector<int64_t> first_chunk_{0};
  std::vector<int64_t> first_cost_{0};
};

}  // namespace swd
