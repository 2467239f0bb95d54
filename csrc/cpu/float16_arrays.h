// Arrays of float16, converted by instructions that x86-64-v3 has for it but that GCC does not vectorise with: its
// loops of integer arithmetic took half of a float16 step.
#pragma once

#include <cstdint>

#include "blocks.h"

namespace swd {

extern const bool HAS_FLOAT16_INSTRUCTIONS;

void widen_array(float* block, const Float16Bits* src, int64_t n);
void narrow_array(Float16Bits* dst, const float* block, int64_t n);

}  // namespace swd
