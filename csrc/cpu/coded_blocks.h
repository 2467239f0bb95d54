// Updates of moments in 8 bits, block by block, see ../eight_bit.h.
#pragma once

#include <cstdint>

#include "../eight_bit.h"
#include "blocks.h"

namespace swd {

// The moments of blocks that follow one another.
struct CodedBlocks {
  int8_t* exp_avg;
  uint8_t* root;
  float* exp_avg_scales;
  float* root_scales;

  CodedBlocks from_block(int64_t block) const {
    const int64_t element = block * CODE_BLOCK;
    return {exp_avg + element, root + element, exp_avg_scales + block, root_scales + block};
  }
};

// Updates n elements from the beginning of a block on; the last block may be short. `max_exp_avg_sq` is null without
// amsgrad. Blocks are rounded by their numbers, from `block` on.
UpdateSums update_coded(float* param, const CodedBlocks& moments, float* max_exp_avg_sq, const float* grad, int64_t n,
                        const Scalars<float>& scalars, uint32_t rounding_key, int64_t block);

// The sum of their second moments that update_coded emits, bit for bit.
double sum_coded(const uint8_t* root, const float* root_scales, int64_t n);

// Second moments as numbers.
void decode_exp_avg_sq(float* exp_avg_sq, const uint8_t* root, const float* root_scales, int64_t n);

// What update_coded consists of: whole blocks, by the best instructions that the machine has.
using UpdateBlocks = UpdateSums(float* param, const CodedBlocks& moments, float* max_exp_avg_sq, const float* grad,
                                int64_t blocks, const Scalars<float>& scalars, uint32_t rounding_key, int64_t block);
UpdateBlocks update_blocks_in_plain_loops, update_blocks_by_avx2, update_blocks_by_avx512;
bool has_avx2();
bool has_avx512();

}  // namespace swd
