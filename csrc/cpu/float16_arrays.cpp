#include "float16_arrays.h"

#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__)

#include <immintrin.h>

#define SWD_FLOAT16 __attribute__((target("avx,f16c")))

namespace swd {
namespace {

constexpr int64_t LANES_AT_ONCE = 8;

SWD_FLOAT16 inline void widen_vector(float* block, const Float16Bits* src) {
  _mm256_storeu_ps(block, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(src))));
}

SWD_FLOAT16 inline void narrow_vector(Float16Bits* dst, const float* block) {
  const __m128i bits = _mm256_cvtps_ph(_mm256_loadu_ps(block), _MM_FROUND_TO_NEAREST_INT);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(dst), bits);
}

}  // namespace

const bool HAS_FLOAT16_INSTRUCTIONS = [] {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx") && __builtin_cpu_supports("f16c");
}();

SWD_FLOAT16 void widen_array(float* block, const Float16Bits* src, int64_t n) {
  int64_t i = 0;
  for (; i + LANES_AT_ONCE <= n; i += LANES_AT_ONCE) widen_vector(block + i, src + i);
  Float16Bits narrow[LANES_AT_ONCE] = {};
  float wide[LANES_AT_ONCE];
  std::memcpy(narrow, src + i, (n - i) * sizeof(Float16Bits));
  widen_vector(wide, narrow);
  std::memcpy(block + i, wide, (n - i) * sizeof(float));
}

SWD_FLOAT16 void narrow_array(Float16Bits* dst, const float* block, int64_t n) {
  int64_t i = 0;
  for (; i + LANES_AT_ONCE <= n; i += LANES_AT_ONCE) narrow_vector(dst + i, block + i);
  Float16Bits narrow[LANES_AT_ONCE];
  float wide[LANES_AT_ONCE] = {};
  std::memcpy(wide, block + i, (n - i) * sizeof(float));
  narrow_vector(narrow, wide);
  std::memcpy(dst + i, narrow, (n - i) * sizeof(Float16Bits));
}

}  // namespace swd

#else

namespace swd {

const bool HAS_FLOAT16_INSTRUCTIONS = false;

void widen_array(float*, const Float16Bits*, int64_t) {}
void narrow_array(Float16Bits*, const float*, int64_t) {}

}  // namespace swd

#endif
