// The codec of moments in 8 bits, as state/eight_bit.py defines it: blocks of 256 elements, each with a scale.
#pragma once

#include <cmath>
#include <cstdint>

#include "random_bits.h"

namespace swd {

constexpr int64_t CODE_BLOCK = 256;

constexpr float LARGEST_EXP_AVG_CODE = 127, LARGEST_ROOT_CODE = 255;

// A block whose scale is not larger has codes of 0: its inverse would overflow.
constexpr float LEAST_SCALE = 1e-35f;

// Returns the factor that values are multiplied by before rounding: codes have 8 bits of fraction until random bits are
// added.
SWD_INLINE float to_fixed_point(float scale) { return scale > LEAST_SCALE ? 256 / scale : 0; }

// For both moments of the elements of a block, whose number is row-major in the whole tensor. Apart from the bits that
// round the parameter.
inline uint32_t block_key(uint32_t rounding_key, int64_t block) {
  return run_key(scrambled(rounding_key + 1), block * (CODE_BLOCK / 2));
}

// Two neighbours share a hash: of its 32 bits the lower half is for the first one, and of that half the lower 8 bits
// are for exp_avg, the upper ones for the root of exp_avg_sq.
SWD_INLINE uint32_t bits_of_pair(uint32_t block_key, uint32_t pair) { return scrambled(block_key ^ (pair * GOLDEN)); }

// The sum of a block's second moments. Not inlined: fused with an addition it would be rounded otherwise, and sums that
// an update emits must be those that are rebuilt from storage.
double block_sum(int64_t sum_of_squared_codes, float scale);

}  // namespace swd
