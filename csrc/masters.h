// A float32 master weight in two bytes: the nearest bfloat16, which is the parameter, and a signed remainder, how many
// patterns of bits the master lies above it. Halfway between two parameters the upper one in magnitude is taken, where
// the remainder is -32768; to the even one, as torch rounds, +32768 would be needed too, which 16 bits have not.
#pragma once

#include <cstdint>

#include "vectors.h"

namespace swd {

// Both are the lower half of an element.
template <typename U>
struct SplitMaster {
  U param, remainder;
};

// U is uint32_t or a vector of them, I the same with signs.
template <typename I, typename U>
SWD_INLINE auto is_nan(U bits) {
  return (I)(bits & 0x7FFFFFFFu) > 0x7F800000;
}

// NaN keeps no remainder: rounding some NaNs up would give the parameter -0.
template <typename I, typename U>
SWD_INLINE SplitMaster<U> split_master(U master) {
  const U kept = is_nan<I>(master) ? U{} + 0x7FC00000u : master;
  return {(kept + 0x8000u) >> 16, kept & 0xFFFFu};
}

// Somebody may have written to the parameter since. Below zero and above infinity are no numbers: a remainder that
// would lead there cannot belong to the parameter, and counts as 0.
template <typename I, typename U>
SWD_INLINE U joined_master(U param, I remainder) {
  const U master = (param << 16) + (U)remainder;
  return is_nan<I>(master) ? param << 16 : master;
}

}  // namespace swd
