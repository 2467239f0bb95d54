// The two passes of a step over CPU tensors, and what their sums are rebuilt from.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>

#include "operands.h"

namespace swd {

// `description` describes the step's tensors, see operands.h. With one entry for each tensor: `sums` (float64), the
// sums of exp_avg_sq, or of max_exp_avg_sq with amsgrad; `steps` (float32), the steps taken so far. `hyper` (float64)
// is the table of schedule.h, with a row for each group. Single float64 numbers are `exp_avg_sq_mean`, `grad_factor`
// (gradients are multiplied by it: the clip factor, divided by the loss scale; none is 1) and `skip` (not 0: change
// nothing). v^ is the second moment after bias correction.

// Pass 1. Returns the sum of grad^2 and, for the sum of v^ after this step, the part carried over from the step before
// and the part that comes from these gradients: carried + grad_factor^2 * fresh.
Tensor gradient_sums(Tensor description, Tensor sums, Tensor steps, Tensor hyper);

// Pass 1 of amsgrad, which has no recursion: the sum of v^ after this step.
Tensor max_exp_avg_sq_sum(Tensor description, Tensor steps, Tensor hyper, std::optional<Tensor> grad_factor);

// Instead of pass 1: the sum of v^ as the step before left it, and its count, over tensors that have taken a step.
Tensor last_exp_avg_sq_sum(Tensor description, Tensor sums, Tensor steps, Tensor hyper);

// Pass 2: writes to these tensors. Codes are rounded stochastically, and bfloat16 parameters where elements
// have numbers. Advances `steps`, leaves the next step's `sums`, and returns the sum of grad^2.
Tensor update_(Tensor sums, Tensor steps, Tensor description, Tensor hyper, Tensor exp_avg_sq_mean,
               std::optional<Tensor> grad_factor, std::optional<Tensor> skip, int64_t seed);

// Both passes and the mean between them, where these tensors are all there are. `grad_scale` and `found_inf` are
// float32 numbers as torch.amp.GradScaler has them. Returns exp_avg_sq_mean, the gradients' norm, and whether the step
// was skipped.
Tensor step_(Tensor sums, Tensor steps, Tensor description, Tensor hyper, std::optional<double> max_grad_norm,
             bool lagged, std::optional<Tensor> grad_scale, std::optional<Tensor> found_inf, bool skip_nonfinite,
             int64_t seed);

// By tensor, the `sums` that `update_` leaves, bit for bit, from what is stored. For tensors whose moments are codes
// `columns` is that of OperandsReader, and 0 for the others; without any codes it is empty.
Tensor exp_avg_sq_sums(TensorList averaged, TensorList scales, std::vector<int64_t> columns);

}  // namespace swd
