// The two passes of a step over lists of CPU tensors, and what their sums are rebuilt from.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <vector>

namespace swd {

using torch::stable::Tensor;
using TensorList = std::vector<Tensor>;

// By tensor: `sums` (float64) are those of exp_avg_sq, or of max_exp_avg_sq with amsgrad; `steps` (float32) counts the
// steps taken so far; `groups` (int64) is the row of the `hyper` table (float64, see schedule.h) that holds for it.
// `exp_avg_sq_mean` and `clip`, if there is one, are single float64 numbers. v^ is the second moment after bias
// correction.

// Pass 1. Returns the sum of grad^2 and, for the sum of v^ after this step, the part carried over from the step before
// and the part that comes from these gradients: carried + clip^2 * fresh.
Tensor gradient_sums(TensorList grads, Tensor sums, Tensor steps, Tensor groups, Tensor hyper);

// Pass 1 of amsgrad, which has no recursion: the sum of v^ after this step.
Tensor max_exp_avg_sq_sum(TensorList exp_avg_sqs, TensorList max_exp_avg_sqs, TensorList grads, Tensor steps,
                          Tensor groups, Tensor hyper, std::optional<Tensor> clip);

// Instead of pass 1: the sum of v^ as the step before left it, and its count, over tensors that have taken a step.
Tensor last_exp_avg_sq_sum(Tensor sums, Tensor steps, Tensor numels, Tensor groups, Tensor hyper);

// Pass 2. `max_exp_avg_sqs` is empty without amsgrad. Advances `steps`, leaves the next step's `sums`, and returns the
// sum of grad^2.
Tensor update_(TensorList params, TensorList exp_avgs, TensorList exp_avg_sqs, TensorList max_exp_avg_sqs, Tensor sums,
               Tensor steps, TensorList grads, Tensor groups, Tensor hyper, Tensor exp_avg_sq_mean,
               std::optional<Tensor> clip);

// Both passes and the number between them, where these tensors are all there are. Returns exp_avg_sq_mean and the
// gradients' norm.
Tensor step_(TensorList params, TensorList exp_avgs, TensorList exp_avg_sqs, TensorList max_exp_avg_sqs, Tensor sums,
             Tensor steps, TensorList grads, Tensor numels, Tensor groups, Tensor hyper,
             std::optional<double> max_grad_norm, bool lagged);

// By tensor, the `sums` that `update_` leaves, bit for bit, from what is stored.
Tensor exp_avg_sq_sums(TensorList exp_avg_sqs);

}  // namespace swd
