// Updates of moments in 8 bits, block by block, see ../eight_bit.h.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../eight_bit.h"
#include "blocks.h"

namespace swd {

// The moments of blocks that follow one another, with all their elements.
struct CodedBlocks {
  int8_t* exp_avg;
  uint8_t* root;
  float* exp_avg_scales;
  float* root_scales;
};

// Cuts consecutive elements into blocks: the last block of each row of `columns` elements may be short. Says where a
// block begins, and its number: consecutive in a row, growing by `pitch` from row to row.
struct BlockCursor {
  int64_t columns, column, first_number_of_row, pitch;

  int64_t length() const { return std::min(CODE_BLOCK, columns - column); }
  int64_t number() const { return first_number_of_row + column / CODE_BLOCK; }
  void advance() {
    column += CODE_BLOCK;
    if (column < columns) return;
    column = 0;
    first_number_of_row += pitch;
  }
};

// Updates n elements, which are whole blocks as `cursor` cuts them, by the best instructions that the machine has.
// `max_exp_avg_sq` is null without amsgrad. Blocks are rounded by their numbers.
using UpdateBlocks = UpdateSums(float* param, const CodedBlocks& moments, float* max_exp_avg_sq, const float* grad,
                                int64_t n, BlockCursor cursor, const Scalars<float>& scalars, uint32_t rounding_key);
UpdateBlocks update_coded;

// The sum of their second moments that update_coded emits, bit for bit.
double sum_coded(const uint8_t* root, const float* root_scales, int64_t n, BlockCursor cursor);

// Second moments as numbers.
void decode_exp_avg_sq(float* exp_avg_sq, const uint8_t* root, const float* root_scales, int64_t n, BlockCursor cursor);

// The loops of update_coded, for each instruction set.
UpdateBlocks update_blocks_in_plain_loops, update_blocks_by_avx2, update_blocks_by_avx512;
bool has_avx2();
bool has_avx512();

}  // namespace swd
