// All elements of a list of tensors, cut into segments that the threads of a team share.
#pragma once

#include <algorithm>
#include <vector>

#include "team.h"

namespace swd {

enum class Direction { Forward, Backward };

class SegmentWalk {
 public:
  // Where sums are kept apart, so the result does not depend on the number of threads. 128 KB of floats.
  static constexpr int64_t SEGMENT = 32768;

  // Some segments of a tensor that follow one another.
  struct Segments {
    int64_t tensor, first_segment, begin, end;
  };

  explicit SegmentWalk(size_t tensors) {
    numels_.reserve(tensors);
    first_segment_.reserve(tensors + 1);
    first_cost_.reserve(tensors + 1);
  }

  // Several segments at once are better for tensors that lie in another order than they are walked in.
  void add_tensor(int64_t numel, int64_t segments_at_once = 1) {
    numels_.push_back(numel);
    first_segment_.push_back(first_segment_.back() + (numel + SEGMENT - 1) / SEGMENT);
    first_cost_.push_back(first_cost_.back() + numel + TENSOR_COST);
    if (numel) task_cost_ = std::max(task_cost_, segments_at_once * SEGMENT);
  }

  const std::vector<int64_t>& numels() const { return numels_; }
  int64_t cost() const { return first_cost_.back(); }

  // Calls f(segments, sums) for all segments, those of a task together, where sums[0] is for the first of them. Returns
  // the sums by tensor, each taken in the order of its segments.
  template <typename Sum, typename F>
  std::vector<Sum> sums_by_tensor(Team& team, Direction direction, const F& f) const {
    std::vector<Sum> slots(first_segment_.back());
    const bool backward = direction == Direction::Backward;
    team.each((cost() + task_cost_ - 1) / task_cost_, backward, [&](int64_t task) {
      const int64_t from = first_segment_at(task * task_cost_);
      const int64_t to = first_segment_at(std::min((task + 1) * task_cost_, cost()));
      if (from == to) return;
      int64_t tensor = tensor_of(backward ? to - 1 : from);
      for (int64_t done = 0; done < to - from;) {
        const int64_t segment = backward ? to - 1 - done : from + done;
        while (segment >= first_segment_[tensor + 1]) ++tensor;
        while (segment < first_segment_[tensor]) --tensor;
        const int64_t first = std::max(from, first_segment_[tensor]), last = std::min(to, first_segment_[tensor + 1]);
        const int64_t begin = (first - first_segment_[tensor]) * SEGMENT;
        const int64_t end = std::min((last - first_segment_[tensor]) * SEGMENT, numels_[tensor]);
        f(Segments{tensor, first, begin, end}, &slots[first]);
        done += last - first;
      }
    });
    std::vector<Sum> sums(numels_.size());
    for (size_t t = 0; t < sums.size(); ++t) {
      for (int64_t c = first_segment_[t]; c < first_segment_[t + 1]; ++c) sums[t] += slots[c];
    }
    return sums;
  }

 private:
  // The fixed cost of a tensor, in elements: keeps the shares even among many small tensors.
  static constexpr int64_t TENSOR_COST = 512;

  int64_t tensor_of(int64_t segment) const {
    return std::upper_bound(first_segment_.begin(), first_segment_.end(), segment) - first_segment_.begin() - 1;
  }

  // The first segment that starts at this cost or later.
  int64_t first_segment_at(int64_t cost) const {
    const int64_t t = std::upper_bound(first_cost_.begin(), first_cost_.end(), cost) - first_cost_.begin() - 1;
    if (t == static_cast<int64_t>(numels_.size())) return first_segment_.back();
    return std::min(first_segment_[t] + (cost - first_cost_[t] + SEGMENT - 1) / SEGMENT, first_segment_[t + 1]);
  }

  int64_t task_cost_ = SEGMENT;
  std::vector<int64_t> numels_;
  std::vector<int64_t> first_segment_{0};
  std::vector<int64_t> first_cost_{0};
};

}  // namespace swd
