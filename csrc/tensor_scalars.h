// Arguments of the operators, checked: all checks are made before anything is written.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "operand.h"
#include "passes.h"
#include "random_bits.h"
#include "schedule.h"

namespace swd {

inline void check_dtype(const View& view, const char* name) {
  const auto dtype = view.dtype;
  STD_TORCH_CHECK(dtype == ScalarType::Float || dtype == ScalarType::Double || dtype == ScalarType::BFloat16 ||
                      dtype == ScalarType::Half,
                  "swd_fused: ", name, " must be float32, float64, bfloat16 or float16");
  STD_TORCH_CHECK(view.data != nullptr || view.numel() == 0, "swd_fused: ", name,
                  " has elements, but its memory was freed");
}

inline void check_like(const View& view, const View& like, const char* name) {
  check_dtype(view, name);
  STD_TORCH_CHECK(std::equal(view.sizes.begin(), view.sizes.end(), like.sizes.begin(), like.sizes.end()),
                  "swd_fused: ", name, " must have its parameter's shape");
}

inline void check_length(const TensorList& list, size_t tensors, const char* name) {
  STD_TORCH_CHECK(list.size() == tensors, "swd_fused: got ", list.size(), " ", name, " for ", tensors, " parameters");
}

// The values of a contiguous tensor of a known dtype with at least `numel` elements.
template <typename T>
T* values(const Tensor& tensor, ScalarType dtype, size_t numel, const char* name) {
  STD_TORCH_CHECK(
      tensor.scalar_type() == dtype && tensor.is_contiguous() && tensor.numel() >= static_cast<int64_t>(numel),
      "swd_fused: ", name, " must be contiguous, of the documented dtype, with at least ", numel, " elements");
  return static_cast<T*>(tensor.data_ptr());
}

// What holds for a tensor of the list: its group and its step count.
class TensorScalars {
 public:
  TensorScalars(size_t tensors, const Tensor& steps, const Tensor& groups, const Tensor& hyper)
      : steps_(values<float>(steps, ScalarType::Float, tensors, "steps")),
        groups_(values<int64_t>(groups, ScalarType::Long, tensors, "groups")),
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

 private:
  const float* steps_;
  const int64_t* groups_;
  const Hyper* hyper_;
};

// How bfloat16 parameters are rounded: to nearest, or with a seed by chance. `tensor_ids` tell tensors apart.
class Rounding {
 public:
  Rounding(std::optional<int64_t> seed, const Tensor& tensor_ids, size_t tensors)
      : seed_(seed), ids_(seed ? values<int64_t>(tensor_ids, ScalarType::Long, tensors, "tensor_ids") : nullptr) {}
  std::optional<uint32_t> key(int64_t tensor, double step) const {
    if (!seed_) return std::nullopt;
    return rounding_key(*seed_, ids_[tensor], step);
  }

 private:
  std::optional<int64_t> seed_;
  const int64_t* ids_;
};

inline bool computes_in_double(const View& averaged) { return averaged.dtype == ScalarType::Double; }

}  // namespace swd
