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
constexpr int64_t NO_GRAD = -1;

// Moments in 8 bits, which are row-major, and so is the walk over all that belongs to them. Blocks lie within rows of
// `columns` elements.
struct CodedMoments {
  CodedBlocks blocks;
  int64_t columns, first_block, block_pitch;  // by which blocks are numbered: of the first one, and from row to row
};

// All that belongs to one parameter. `averaged` is max_exp_avg_sq with amsgrad, and exp_avg_sq without.
struct Operands {
  int64_t numel;
  bool has_grad;   // without one the tensor takes no part in the step
  bool in_double;  // what computes
  Operand param, exp_avg, exp_avg_sq, averaged, grad;
  std::optional<Operand> master;  // what is updated instead of `param`, which is it rounded; or its remainder
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

// Checks that all tensors fit their parameters, and returns where each is, and how it lies in memory. `max_exp_avg_sqs`
// is empty without amsgrad, `masters` without master weights, of which `params` are else the rounded copies; where
// those are bfloat16, they may be remainders (int16, see masters.h). `ema_params` is empty without averages. Where a
// tensor's moments are codes it has scales, which are else empty; without any codes so are the lists of scales. By
// tensor, all int64: `groups` are rows of the table of hyper-parameters; `tensor_ids` tell tensors apart where rounding
// is stochastic; `numbers`, which that needs too, are the numbers of its elements, that of the first one and by how
// much it grows along each dimension; `block_numbers`, which codes need, are the number of its first block, and by how
// much it grows from row to row.
//
// The result begins with HEADER numbers; then come, one for each tensor, the gradients' addresses, which are what
// changes from step to step, and may be overwritten there.
Tensor description(TensorList params, TensorList exp_avgs, TensorList exp_avg_sqs, TensorList max_exp_avg_sqs,
                   TensorList masters, TensorList ema_params, TensorList exp_avg_scales, TensorList exp_avg_sq_scales,
                   TensorList grads, Tensor groups, Tensor tensor_ids, std::optional<Tensor> numbers,
                   std::optional<Tensor> block_numbers);

constexpr size_t HEADER = 7;

// Reads that.
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
