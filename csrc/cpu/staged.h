// Tensors that lie in memory in another order than they are walked in, as arrays.
#pragma once

#include "operands.h"

namespace swd {

// All that belongs to a parameter, from one element of the walk to another: what is not an array has been copied into
// one. Element by element, in the passes themselves, a transposed gradient made a step take 13 times as long.
class Staged {
 public:
  Staged(const Operands& x, int64_t begin, int64_t end);

  const Operands& operands() const { return is_staged_ ? staged_ : original_; }

  // Copies what a step writes back to where it belongs.
  void write_back() const;

 private:
  const Operands& original_;
  int64_t begin_, end_;
  bool is_staged_;
  Operands staged_;
};

// A tensor alone.
class StagedOperand {
 public:
  StagedOperand(const Operand& original, int64_t begin, int64_t end);
  const Operand& operand() const { return operand_; }

 private:
  Operand operand_;
};

}  // namespace swd
