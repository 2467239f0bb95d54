// Tensors as the operators get them, checked before anything is written, and as they return them.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>
#include <torch/headeronly/util/shim_utils.h>

#include <algorithm>
#include <vector>

#include "operand.h"

namespace swd {

inline void check_dtype(const View& view, const char* name) {
  const auto dtype = view.dtype;
  STD_TORCH_CHECK(dtype == ScalarType::Float || dtype == ScalarType::Double || dtype == ScalarType::BFloat16 ||
                      dtype == ScalarType::Half,
                  "swd_fused: ", name, " must be float32, float64, bfloat16 or float16");
  STD_TORCH_CHECK(view.data != nullptr || view.numel() == 0, "swd_fused: ", name,
                  " has elements, but its memory was freed");
}

inline bool computes_in_double(const View& averaged) { return averaged.dtype == ScalarType::Double; }

// The values of a contiguous tensor of a known dtype with at least `numel` elements.
template <typename T>
T* values(const Tensor& tensor, ScalarType dtype, size_t numel, const char* name) {
  STD_TORCH_CHECK(
      tensor.scalar_type() == dtype && tensor.is_contiguous() && tensor.numel() >= static_cast<int64_t>(numel),
      "swd_fused: ", name, " must be contiguous, of the documented dtype, with at least ", numel, " elements");
  return static_cast<T*>(tensor.data_ptr());
}

template <typename T>
Tensor as_tensor(const std::vector<T>& numbers, ScalarType dtype) {
  // torch::stable::empty looks aten::empty up by its name in each call, 1 us of a small model's step.
  const int64_t size = static_cast<int64_t>(numbers.size()), stride = 1;
  AtenTensorHandle handle;
  // Not STABLE_TORCH_ERROR_CODE_CHECK, which torch 2.10 does not have.
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(1, &size, &stride, static_cast<int32_t>(dtype),
                                                  aoti_torch_device_type_cpu(), 0, &handle));
  const Tensor out(handle);
  std::copy(numbers.begin(), numbers.end(), static_cast<T*>(out.data_ptr()));
  return out;
}

}  // namespace swd
