// Moments in 8 bits by the instructions of x86-64-v4: half as many as by AVX2's, and three quarters of their time.
#include "coded_blocks.h"

#if defined(__x86_64__) && defined(__GNUC__)

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#pragma GCC target("arch=x86-64-v4,prefer-vector-width=512")

#include "coded_blocks_loop.h"

namespace swd {
namespace {

struct Avx512Lanes {
  typedef float Floats __attribute__((vector_size(64)));
  typedef uint32_t Unsigned __attribute__((vector_size(64)));
  using SquaredCodes = __m512i;

  static SWD_INLINE uint32_t largest(const Unsigned& bits) {
    return _mm512_reduce_max_epu32(reinterpret_cast<__m512i>(bits));
  }

  // The first `count` lanes of a vector, with zeros in the others.
  struct Some {
    __mmask16 mask;

    explicit SWD_INLINE Some(int64_t count) : mask(static_cast<__mmask16>((1u << count) - 1)) {}
    SWD_INLINE Floats read(const float* numbers) const { return _mm512_maskz_loadu_ps(mask, numbers); }
    SWD_INLINE void write(float* numbers, const Floats& x) const { _mm512_mask_storeu_ps(numbers, mask, x); }
    SWD_INLINE Floats read_codes(const int8_t* codes) const {
      return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(mask, codes)));
    }
    SWD_INLINE Floats read_codes(const uint8_t* codes) const {
      return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(mask, codes)));
    }
  };

  // The random bits of a block.
  struct Noise {
    __m512i key, first;

    SWD_INLINE Noise(uint32_t block_key, int64_t first_pair)
        : key(_mm512_set1_epi32(static_cast<int>(block_key))),
          first(_mm512_mullo_epi32(
              _mm512_add_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                               _mm512_set1_epi32(static_cast<int>(first_pair))),
              _mm512_set1_epi32(static_cast<int>(GOLDEN)))) {}

    // `bits_of_pair` of 16 pairs, which are the elements of a PART.
    SWD_INLINE __m512i bits(int64_t part) const {
      const uint32_t passed = static_cast<uint32_t>(PART / 2 * part) * GOLDEN;
      __m512i x = _mm512_xor_si512(_mm512_add_epi32(first, _mm512_set1_epi32(static_cast<int>(passed))), key);
      x = _mm512_xor_si512(x, _mm512_srli_epi32(x, 16));
      x = _mm512_mullo_epi32(x, _mm512_set1_epi32(static_cast<int>(0x85EBCA6Bu)));
      x = _mm512_xor_si512(x, _mm512_srli_epi32(x, 13));
      x = _mm512_mullo_epi32(x, _mm512_set1_epi32(static_cast<int>(0xC2B2AE35u)));
      return _mm512_xor_si512(x, _mm512_srli_epi32(x, 16));
    }
  };

  static SWD_INLINE Floats numbers(const int8_t* codes) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes))));
  }
  static SWD_INLINE Floats numbers(const uint8_t* codes) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes))));
  }

  static SWD_INLINE void round(int8_t* exp_avg_codes, uint8_t* root_codes, SquaredCodes& squares, const float* exp_avg,
                               const float* root, float to_exp_avg, float to_root, const Noise& noise, int64_t first,
                               int64_t count = PART) {
    const __m512i bits = noise.bits(first / PART);
    const __m512i noise_m = _mm512_and_si512(bits, _mm512_set1_epi16(0xFF)), noise_r = _mm512_srli_epi16(bits, 8);
    const __m512i m = _mm512_srai_epi16(_mm512_add_epi16(fixed_point(exp_avg, to_exp_avg), noise_m), 8);
    const __m512i fractional_r = _mm512_add_epi16(fixed_point(root, to_root), noise_r);
    const __m512i r = _mm512_max_epi16(_mm512_srli_epi16(fractional_r, 8), _mm512_set1_epi16(1));
    squares = _mm512_add_epi32(squares, _mm512_madd_epi16(r, r));
    const __mmask32 mask = static_cast<__mmask32>((uint64_t{1} << count) - 1);
    _mm256_mask_storeu_epi8(exp_avg_codes, mask, _mm512_cvtepi16_epi8(m));
    _mm256_mask_storeu_epi8(root_codes, mask, _mm512_cvtepi16_epi8(r));
  }

  static SWD_INLINE int64_t total(SquaredCodes squares) { return _mm512_reduce_add_epi32(squares); }

  static SWD_INLINE double sum(const Floats& numbers) {
    double total = 0;
    for (int64_t l = 0; l < PART / 2; ++l) total += numbers[l];
    return total;
  }

 private:
  // Whole numbers that 16 bits hold: at most 127 or 255 in 256ths.
  static SWD_INLINE __m512i fixed_point(const float* numbers, float factor) {
    const __m512 factors = _mm512_set1_ps(factor);
    const __m512i low = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(numbers), factors));
    const __m512i high = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(numbers + PART / 2), factors));
    return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi32_epi16(low)), _mm512_cvtepi32_epi16(high), 1);
  }
};

}  // namespace

UpdateSums update_blocks_by_avx512(float* param, const CodedBlocks& moments, float* max_exp_avg_sq, const float* grad,
                                   int64_t n, BlockCursor cursor, const Scalars<float>& scalars,
                                   uint32_t rounding_key) {
  return update_blocks<Avx512Lanes>(param, moments, max_exp_avg_sq, grad, n, cursor, scalars, rounding_key);
}

bool has_avx512() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("bmi2");
}

}  // namespace swd

#else

namespace swd {

bool has_avx512() { return false; }

UpdateSums update_blocks_by_avx512(float*, const CodedBlocks&, float*, const float*, int64_t, BlockCursor,
                                   const Scalars<float>&, uint32_t) {
  return {};
}

}  // namespace swd

#endif
