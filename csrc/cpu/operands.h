// All tensors of a step as numbers that are kept from step to step: lists of a thousand tensors, passed across the ABI
// in each step anew, took longer than updating them.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <vector>

#include "coded_blocks.h"
#include "operand.h"

namespace swd {

using torch::stable::Tensor;
using TensorList = std::vector<Tensor>;

// Stands in `grad_addresses` for a parameter without a gradient. Not 0, which is the address of an empty one.
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
  std::optional<Operand> master;  // what is updated instead of `param`, which is it rounded
  std::optional<ElementNumbers> numbers;
  std::optional<CodedMoments> coded;  // in place of exp_avg and exp_avg_sq
};

// Checks that all tensors fit their parameters, and describes how each lies in memory. `max_exp_avg_sqs` is empty
// without amsgrad, `masters` without master weights, of which `params` are else the rounded copies. Where a tensor's
// moments are codes it has scales, which are else empty; without any codes so are the lists of scales. `numbers`
// (int64), which stochastic rounding needs, are the numbers of the elements, tensor by tensor: that of the first
// element, and by how much it grows along each dimension. `block_numbers` (int64), which codes need, are two for each
// tensor: the number of its first block, and by how much it grows from row to row.
Tensor layouts(TensorList params, TensorList exp_avgs, TensorList exp_avg_sqs, TensorList max_exp_avg_sqs,
               TensorList masters, TensorList exp_avg_scales, TensorList exp_avg_sq_scales, TensorList grads,
               std::optional<Tensor> numbers, std::optional<Tensor> block_numbers);

// Reads that, together with addresses: of all tensors but the gradients, list by list; and of the gradients, which are
// what moves from step to step.
class OperandsReader {
 public:
  OperandsReader(const Tensor& layouts, const Tensor& addresses, const Tensor& grad_addresses);

  size_t size() const { return size_; }
  bool amsgrad() const { return amsgrad_; }

  // To be called `size` times.
  Operands next();

 private:
  Operand operand(int64_t address, int64_t numel);
  Positions positions();

  const int64_t* at_;
  const int64_t* addresses_;
  const int64_t* grad_addresses_;
  size_t size_, next_ = 0;
  bool amsgrad_, masters_, coded_, numbered_;
};

}  // namespace swd
