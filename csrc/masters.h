// A float32 master weight in two bytes: the nearest bfloat16, which is the parameter, and a signed remainder, how many
// patterns of bits the master lies above it. Halfway between two parameters the upper one in magnitude is taken, where
// the remainder is -32768; to the even one, as torch rounds, +32768 would be needed too, which 16 bits have not.
#pragma once

#include <cstdint>

#include "vectors.h"

namespace swd {

struct SplitMaster {
  uint16_t param;
  int16_t remainder;
};

// NaN keeps no remainder: rounding some NaNs up would give the parameter -0.
SWD_INLINE SplitMaster split_master(uint32_t master) {
  const bool is_nan = (master & 0x7FFFFFFFu) > 0x7F800000u;
  const uint32_t kept = is_nan ? (master | 0x00400000u) & 0xFFFF0000u : master;
  return {static_cast<uint16_t>((kept + 0x8000u) >> 16), static_cast<int16_t>(kept & 0xFFFFu)};
}

// Somebody may have written to the parameter since. What lies below zero or above infinity is then no number, and the
// remainder, which cannot belong to such a parameter, counts as 0.
SWD_INLINE uint32_t joined_master(uint16_t param, int16_t remainder) {
  const uint32_t magnitude = param & 0x7FFFu;
  const bool is_stale = ((magnitude == 0) & (remainder < 0)) | ((magnitude == 0x7F80u) & (remainder > 0));
  return (static_cast<uint32_t>(param) << 16) + (is_stale ? 0u : static_cast<uint32_t>(int32_t{remainder}));
}

}  // namespace swd
