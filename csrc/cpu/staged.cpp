#include "staged.h"

#include <array>

#include "layout_copy.h"

namespace swd {
namespace {

// The operands that may have to be copied back; the gradient is only read.
constexpr std::array WRITTEN = {&Operands::param, &Operands::exp_avg, &Operands::exp_avg_sq, &Operands::averaged};
constexpr std::array WRITTEN_IF_THERE = {&Operands::master, &Operands::ema_param};
constexpr size_t GRAD = WRITTEN.size() + WRITTEN_IF_THERE.size(), PLACES = GRAD + 1;

// Kept by each thread: in each step anew, its pages would be too.
char* room(size_t place, int64_t bytes) {
  thread_local std::array<std::vector<char>, PLACES> arrays;
  if (arrays[place].size() < static_cast<size_t>(bytes)) arrays[place].resize(bytes);
  return arrays[place].data();
}

// The same elements as an array, so that their places in the walk stay what they are.
Operand staged(const Operand& x, size_t place, int64_t begin, int64_t end) {
  if (x.is_array()) return x;
  const int64_t size = x.item_size();
  char* array = room(place, (end - begin) * size);
  copy_to_array(array, x.data(), size, x.positions(), begin, end - begin);
  return Operand(array - begin * size, x.dtype(), Positions());
}

void write_back(const Operand& original, const Operand& copy, int64_t begin, int64_t end) {
  if (original.is_array()) return;
  const int64_t size = original.item_size();
  copy_to_tensor(original.data(), copy.data() + begin * size, size, original.positions(), begin, end - begin);
}

}  // namespace

Staged::Staged(const Operands& x, int64_t begin, int64_t end)
    : original_(x), begin_(begin), end_(end), is_staged_(x.needs_staging) {
  if (!is_staged_) return;
  staged_ = x;
  for (size_t place = 0; place < WRITTEN.size(); ++place) {
    staged_.*WRITTEN[place] = staged(x.*WRITTEN[place], place, begin, end);
  }
  // Without amsgrad they are the same tensor.
  if (x.averaged.data() == x.exp_avg_sq.data()) staged_.averaged = staged_.exp_avg_sq;
  for (size_t i = 0; i < WRITTEN_IF_THERE.size(); ++i) {
    const auto& operand = x.*WRITTEN_IF_THERE[i];
    if (operand) staged_.*WRITTEN_IF_THERE[i] = staged(*operand, WRITTEN.size() + i, begin, end);
  }
  staged_.grad = staged(x.grad, GRAD, begin, end);
}

void Staged::write_back() const {
  if (!is_staged_) return;
  for (const auto operand : WRITTEN) swd::write_back(original_.*operand, staged_.*operand, begin_, end_);
  for (const auto operand : WRITTEN_IF_THERE) {
    if (original_.*operand) swd::write_back(*(original_.*operand), *(staged_.*operand), begin_, end_);
  }
}

StagedOperand::StagedOperand(const Operand& original, int64_t begin, int64_t end)
    : operand_(staged(original, GRAD, begin, end)) {}

}  // namespace swd
