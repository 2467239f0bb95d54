// The work of each pass on one segment of a tensor, in the type T that computes.
#pragma once

#include <algorithm>
#include <optional>
#include <type_traits>

#include "blocks.h"
#include "operand.h"
#include "operands.h"

namespace swd {

// Calls f(begin, n) for each block of a segment and adds up the results.
template <typename Sum, typename F>
Sum sum_of_blocks(int64_t begin, int64_t end, const F& f) {
  Sum total{};
  for (int64_t i = begin; i < end; i += BLOCK) total += f(i, std::min(BLOCK, end - i));
  return total;
}

template <typename T>
double gradient_segment(const Operand& grad, int64_t begin, int64_t end) {
  if (const T* array = grad.direct<T>(begin)) return sum_of_squares(array, end - begin);
  T scratch[BLOCK];
  return sum_of_blocks<double>(begin, end,
                               [&](int64_t i, int64_t n) { return sum_of_squares(grad.read(scratch, i, n), n); });
}

template <typename T>
double stored_segment(const Operand& averaged, int64_t begin, int64_t end) {
  T scratch[BLOCK];
  return sum_of_blocks<double>(begin, end, [&](int64_t i, int64_t n) { return sum(averaged.read(scratch, i, n), n); });
}

template <typename T>
double max_exp_avg_sq_segment(const Operands& x, const Scalars<T>& scalars, int64_t begin, int64_t end) {
  T scratch[3][BLOCK];
  return sum_of_blocks<double>(begin, end, [&](int64_t i, int64_t n) {
    return sum_of_next_max(x.exp_avg_sq.read(scratch[0], i, n), x.averaged.read(scratch[1], i, n),
                           x.grad.read(scratch[2], i, n), n, scalars);
  });
}

// With a key, bfloat16 parameters are rounded stochastically, by the numbers of their elements.
using RoundingKey = std::optional<uint32_t>;

template <typename T>
void write_param(const Operands& x, const T* param, int64_t begin, int64_t n, RoundingKey key) {
  if (!key || !x.param.is_bfloat16()) return x.param.write(param, begin, n);
  if constexpr (std::is_same_v<T, float>) {
    x.param.write_stochastically(param, begin, n, *key, *x.numbers);
  } else {
    float narrowed[BLOCK];
    std::copy(param, param + n, narrowed);
    x.param.write_stochastically(narrowed, begin, n, *key, *x.numbers);
  }
}

// Reads the weights to be updated: the parameter, its master, or the master made of parameter and remainder.
template <typename T>
T* read_weight(const Operands& x, T* scratch, int64_t begin, int64_t n) {
  if (!x.master) return x.param.read(scratch, begin, n);
  if (!x.master->is_remainder()) return x.master->read(scratch, begin, n);
  join_masters(scratch, x.param.bits(begin), x.master->bits(begin), n);
  return scratch;
}

template <typename T>
void write_weight(const Operands& x, const T* weight, int64_t begin, int64_t n, RoundingKey key) {
  if (x.master && x.master->is_remainder()) {
    return split_masters(x.param.bits(begin), x.master->bits(begin), weight, n);
  }
  if (x.master) x.master->write(weight, begin, n);
  write_param(x, weight, begin, n, key);
}

// Updates one block, whose moments, averages and gradient are arrays.
template <typename T>
UpdateSums update_weights(const Operands& x, bool amsgrad, const Scalars<T>& scalars, RoundingKey key, int64_t i,
                          int64_t n, T* exp_avg, T* exp_avg_sq, T* ema_param, const T* grad) {
  if constexpr (std::is_same_v<T, float>) {
    if (!amsgrad && x.master && x.master->is_remainder()) {
      return update_masters(x.param.bits(i), x.master->bits(i), exp_avg, exp_avg_sq, ema_param, grad, n, scalars);
    }
  }
  T scratch[2][BLOCK];
  UpdateSums sums;
  T* param = read_weight(x, scratch[0], i, n);
  if (amsgrad) {
    T* max_exp_avg_sq = x.averaged.read(scratch[1], i, n);
    sums = update_block_amsgrad(param, exp_avg, exp_avg_sq, max_exp_avg_sq, ema_param, grad, n, scalars);
    x.averaged.write(max_exp_avg_sq, i, n);
  } else {
    sums = update_block(param, exp_avg, exp_avg_sq, ema_param, grad, n, scalars);
  }
  write_weight(x, param, i, n, key);
  return sums;
}

template <typename T>
UpdateSums update_segment(const Operands& x, bool amsgrad, const Scalars<T>& scalars, RoundingKey key, int64_t begin,
                          int64_t end) {
  T scratch[4][BLOCK];
  return sum_of_blocks<UpdateSums>(begin, end, [&](int64_t i, int64_t n) {
    T* exp_avg = x.exp_avg.read(scratch[0], i, n);
    T* exp_avg_sq = x.exp_avg_sq.read(scratch[1], i, n);
    const T* grad = x.grad.read(scratch[2], i, n);
    T* ema_param = x.ema_param ? x.ema_param->read(scratch[3], i, n) : nullptr;
    UpdateSums sums = update_weights(x, amsgrad, scalars, key, i, n, exp_avg, exp_avg_sq, ema_param, grad);
    x.exp_avg.write(exp_avg, i, n);
    x.exp_avg_sq.write(exp_avg_sq, i, n);
    if (ema_param) x.ema_param->write(ema_param, i, n);
    // The sum is of the stored values: a sum of unrounded ones would drift from them.
    if (!x.averaged.is<T>()) sums.averaged = sum(x.averaged.read(scratch[0], i, n), n);
    return sums;
  });
}

// --- Tensors whose moments are codes

// The walk counts each block as this many elements, a power of two: segments then have whole blocks, and short rows do
// not make them much too small.
inline int64_t walked_width(int64_t columns) {
  int64_t width = 1;
  while (width < std::min(columns, CODE_BLOCK)) width *= 2;
  return width;
}

inline int64_t walked_numel(int64_t numel, int64_t columns) {
  return columns ? numel / columns * ((columns + CODE_BLOCK - 1) / CODE_BLOCK) * walked_width(columns) : 0;
}

// The element at which a block begins. They are counted row by row.
inline int64_t first_element(int64_t columns, int64_t block) {
  const int64_t blocks_of_row = (columns + CODE_BLOCK - 1) / CODE_BLOCK;
  return block / blocks_of_row * columns + block % blocks_of_row * CODE_BLOCK;
}

// Calls f(element, n, block, cursor) for blocks that follow one another, no more than BLOCK elements and as many rows
// as they hold, along a segment of the walk. Adds up the results.
template <typename Sum, typename F>
Sum sum_of_rows(const CodedMoments& coded, int64_t begin, int64_t end, const F& f) {
  const int64_t columns = coded.columns, blocks_of_row = (columns + CODE_BLOCK - 1) / CODE_BLOCK;
  const int64_t width = walked_width(columns), last = end / width;
  Sum total{};
  for (int64_t block = begin / width; block < last;) {
    const int64_t row = block / blocks_of_row, column = block % blocks_of_row * CODE_BLOCK;
    const int64_t rest_of_row = columns - column, element = row * columns + column;
    const int64_t blocks =
        rest_of_row > BLOCK ? BLOCK / CODE_BLOCK
                            : blocks_of_row - block % blocks_of_row + (BLOCK - rest_of_row) / columns * blocks_of_row;
    const int64_t next = std::min(block + blocks, last);
    const BlockCursor cursor{columns, column, coded.first_block + row * coded.block_pitch, coded.block_pitch};
    total += f(element, first_element(columns, next) - element, block, cursor);
    block = next;
  }
  return total;
}

inline CodedBlocks blocks_at(const CodedMoments& coded, int64_t element, int64_t block) {
  const CodedBlocks& all = coded.blocks;
  return {all.exp_avg + element, all.root + element, all.exp_avg_scales + block, all.root_scales + block};
}

inline double stored_coded_segment(const Operand& averaged, const CodedMoments& coded, int64_t begin, int64_t end) {
  float scratch[BLOCK];
  return sum_of_rows<double>(coded, begin, end, [&](int64_t i, int64_t n, int64_t block, const BlockCursor& cursor) {
    if (!averaged.is_code()) return sum(averaged.read(scratch, i, n), n);
    return sum_coded(reinterpret_cast<uint8_t*>(averaged.data()) + i, coded.blocks.root_scales + block, n, cursor);
  });
}

inline double max_exp_avg_sq_coded_segment(const Operands& x, const Scalars<float>& scalars, int64_t begin,
                                           int64_t end) {
  float scratch[3][BLOCK];
  return sum_of_rows<double>(*x.coded, begin, end, [&](int64_t i, int64_t n, int64_t block, const BlockCursor& cursor) {
    const CodedBlocks moments = blocks_at(*x.coded, i, block);
    decode_exp_avg_sq(scratch[0], moments.root, moments.root_scales, n, cursor);
    return sum_of_next_max(scratch[0], x.averaged.read(scratch[1], i, n), x.grad.read(scratch[2], i, n), n, scalars);
  });
}

// `key` rounds moments, and `param_key` bfloat16 parameters.
inline UpdateSums update_coded_segment(const Operands& x, bool amsgrad, const Scalars<float>& scalars, uint32_t key,
                                       RoundingKey param_key, int64_t begin, int64_t end) {
  float scratch[4][BLOCK];
  const auto update = [&](int64_t i, int64_t n, int64_t block, const BlockCursor& cursor) {
    float* param = read_weight(x, scratch[0], i, n);
    const float* grad = x.grad.read(scratch[1], i, n);
    float* max_exp_avg_sq = amsgrad ? x.averaged.read(scratch[2], i, n) : nullptr;
    const CodedBlocks moments = blocks_at(*x.coded, i, block);
    const UpdateSums sums = update_coded(param, moments, max_exp_avg_sq, grad, n, cursor, scalars, key);
    if (amsgrad) x.averaged.write(max_exp_avg_sq, i, n);
    if (x.ema_param) {
      float* ema_param = x.ema_param->read(scratch[3], i, n);
      update_averages(ema_param, param, n, scalars);
      x.ema_param->write(ema_param, i, n);
    }
    write_weight(x, param, i, n, param_key);
    return sums;
  };
  return sum_of_rows<UpdateSums>(*x.coded, begin, end, update);
}

}  // namespace swd
