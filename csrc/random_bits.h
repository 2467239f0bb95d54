// Random bits for stochastic rounding, hashed from seed, tensor, step and element: the same in every run, on any number
// of threads.
#pragma once

#include <cstdint>

#include "vectors.h"

namespace swd {

// The finaliser of MurmurHash3: each bit of the result depends on each bit of x.
SWD_INLINE uint32_t scrambled(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x85EBCA6Bu;
  x = (x ^ (x >> 13)) * 0xC2B2AE35u;
  return x ^ (x >> 16);
}

// For one tensor in one step.
inline uint32_t rounding_key(int64_t seed, int64_t tensor, double step) {
  const uint32_t start = scrambled(static_cast<uint32_t>(seed) ^ scrambled(static_cast<uint32_t>(seed >> 32) + 1));
  return scrambled(scrambled(start + static_cast<uint32_t>(tensor)) + static_cast<uint32_t>(step));
}

// For elements whose numbers have the same upper 32 bits as this one.
inline uint32_t run_key(uint32_t key, int64_t number) { return key + scrambled(static_cast<uint32_t>(number >> 32)); }

// Spreads numbers that follow one another over all 32 bits.
constexpr uint32_t GOLDEN = 0x9E3779B9u;

SWD_INLINE uint32_t random_16_bits(uint32_t key, uint32_t element) { return scrambled(key ^ (element * GOLDEN)) >> 16; }

}  // namespace swd
