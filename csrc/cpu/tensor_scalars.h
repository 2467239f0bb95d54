// The scalars of each tensor in a step.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <optional>
#include <vector>

#include "../random_bits.h"
#include "../schedule.h"
#include "arguments.h"

namespace swd {

// A tensor's group and its step count.
class TensorScalars {
 public:
  TensorScalars(size_t tensors, const int64_t* groups, const Tensor& steps, const Tensor& hyper)
      : tensors_(tensors),
        steps_(values<float>(steps, ScalarType::Float, tensors, "steps")),
        groups_(groups),
        hyper_(reinterpret_cast<const Hyper*>(values<double>(hyper, ScalarType::Double, 0, "hyper"))) {
    const int64_t rows = hyper.numel() / static_cast<int64_t>(sizeof(Hyper) / sizeof(double));
    for (size_t t = 0; t < tensors; ++t) {
      STD_TORCH_CHECK(0 <= groups_[t] && groups_[t] < rows, "swd_fused: tensor ", t, " is of group ", groups_[t],
                      ", but hyper has ", rows, " rows");
    }
  }
  const Hyper& hyper(int64_t tensor) const { return hyper_[groups_[tensor]]; }
  double steps_before(int64_t tensor) const { return steps_[tensor]; }
  double step(int64_t tensor) const { return steps_before(tensor) + 1; }

  // By tensor, f(hyper, steps before). Mostly all tensors of a group have taken equally many steps, and then f, with
  // its powers, is called once.
  template <typename F>
  auto each(const F& f) const {
    std::vector<decltype(f(*hyper_, 0.0))> results;
    results.reserve(tensors_);
    for (size_t t = 0; t < tensors_; ++t) {
      const bool repeats = t > 0 && groups_[t] == groups_[t - 1] && steps_[t] == steps_[t - 1];
      results.push_back(repeats ? results.back() : f(hyper(t), steps_before(t)));
    }
    return results;
  }

  std::vector<double> bias_corrections2() const {
    return each([](const Hyper& hyper, double before) { return bias_correction(hyper.beta2, before + 1, hyper); });
  }

 private:
  size_t tensors_;
  const float* steps_;
  const int64_t* groups_;
  const Hyper* hyper_;
};

// The keys of stochastic rounding. `tensor_ids` tell tensors apart.
class Rounding {
 public:
  Rounding(int64_t seed, const int64_t* tensor_ids) : seed_(seed), ids_(tensor_ids) {}

  uint32_t key(int64_t tensor, double step) const { return rounding_key(seed_, ids_[tensor], step); }

 private:
  int64_t seed_;
  const int64_t* ids_;
};

}  // namespace swd
