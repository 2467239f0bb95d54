// All tensors of a step as one tensor of numbers that is kept from step to step: lists of a thousand tensors, passed
// across the ABI in each step anew, took longer than updating them, and each further tensor takes 0.4 us.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <vector>

#include "coded_blocks.h"
#include "operand.h"

namespace swd {

using torch::stable::Tensor;
using TensorList = std::vector<Tensor>;

// Stands in place of a gradient's address for a parameter without one. Not 0, which is the address of an empty one.
constexpr int64_t NO_GRAD = -16;

// Moments in 8 bits. They are row-major, and so is the walk over their operands. Blocks lie within rows of `columns`
// elements.
struct CodedMoments {
  CodedBlocks blocks;
  int64_t columns, first_block, block_pitch;  // the number of the first block, and its growth from row to row
};

// All that belongs to one parameter. `averaged` is max_exp_avg_sq with amsgrad, and exp_avg_sq without.
struct Operands {
  int64_t numel;
  bool has_grad;   // without one the tensor takes no part in the step
  bool in_double;  // whether it is computed in double
  Operand param, exp_avg, exp_avg_sq, averaged, grad;
  std::optional<Operand> master;  // updated in place of `param`, its rounded copy; or the remainder
  std::optional<Operand> ema_param;
  std::optional<ElementNumbers> numbers;
  std::optional<CodedMoments> coded;  // in place of exp_avg and exp_avg_sq
  bool needs_staging;                 // whether some of it is not an array
  int64_t elements_at_once;           // how many of the walk are then best copied together

  // The gradient in the order in which it lies in memory, for sums that do not need the others beside it.
  Operand grad_in_memory_order() const {
    return Operand(grad.data(), grad.dtype(), {own_runs.data(), own_runs.size()});
  }
  std::vector<Run> own_runs;
};

// Checks that all tensors fit their parameters, and returns where each is and how it lies in memory. Each list has one
// tensor for each parameter, or is empty: `max_exp_avg_sqs` without amsgrad, `ema_params` without averages, the lists
// of scales without 8-bit moments (an empty tensor stands for the scales of other moments), and `masters` without
// master weights. Masters are float32, or for bfloat16 parameters remainders (int16, see masters.h). The int64 tensors
// have one entry for each parameter: `groups`, its row in the table of hyper-parameters; `tensor_ids`, which stochastic
// rounding hashes; `numbers`, for stochastic rounding too, the number of its first element and the growth along each
// dimension; `block_numbers`, for 8-bit moments, the number of its first block and the growth from row to row.
//
// The result begins with HEADER numbers. The gradients' addresses follow, one for each parameter: only they change from
// step to step, and may be overwritten in place.
Tensor description(TensorList params, TensorList exp_avgs, TensorList exp_avg_sqs, TensorList max_exp_avg_sqs,
                   TensorList masters, TensorList ema_params, TensorList exp_avg_scales, TensorList exp_avg_sq_scales,
                   TensorList grads, Tensor groups, Tensor tensor_ids, std::optional<Tensor> numbers,
                   std::optional<Tensor> block_numbers);

constexpr size_t HEADER = 7;

// Reads the result of `description`.
class OperandsReader {
 public:
  explicit OperandsReader(const Tensor& description);

  size_t size() const { return size_; }
  bool amsgrad() const { return amsgrad_; }
  const int64_t* groups() const { return groups_; }
  const int64_t* tensor_ids() const { return tensor_ids_; }

  // To be called `size` times.
  Operands next();

 private:
  Operand operand(int64_t address, int64_t numel);
  Positions positions();

  size_t size_, next_ = 0;
  bool amsgrad_, masters_, averages_, coded_, numbered_;
  const int64_t *grad_addresses_, *groups_, *tensor_ids_, *addresses_;  // the last list by list
  const int64_t* layouts_;
};

}  // namespace swd
