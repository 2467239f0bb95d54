// The two passes of a step over lists of CPU tensors, and what their sums are rebuilt from.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <vector>

namespace swd {

using torch::stable::Tensor;
using TensorList = std::vector<Tensor>;

// Each returns one float64 for each tensor.

// Pass 1: sum of grad^2.
Tensor gradient_sums(TensorList grads);

// Pass 1 of amsgrad, which has no recursion: sum of max_exp_avg_sq as this step will leave it.
Tensor max_exp_avg_sq_sums(TensorList exp_avg_sqs, TensorList max_exp_avg_sqs, TensorList grads, Tensor scalars);

// Sum of what is stored, in the order in which `update_` takes it.
Tensor exp_avg_sq_sums(TensorList exp_avg_sqs);

// Pass 2. `max_exp_avg_sqs` is empty without amsgrad. `scalars` has a row for each tensor, see scalars_row in
// passes.cpp. Returns two rows: the next step's sums of exp_avg_sq (of max_exp_avg_sq with amsgrad), and those
// of grad^2.
Tensor update_(TensorList params, TensorList exp_avgs, TensorList exp_avg_sqs, TensorList max_exp_avg_sqs,
               TensorList grads, Tensor scalars);

}  // namespace swd
