// Moments in 8 bits by AVX2's instructions for packing and widening, which GCC's vectoriser does not find: plain loops
// take three times as long.
#include "coded_blocks.h"

#if defined(__x86_64__) && defined(__GNUC__)

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#pragma GCC target("avx2,fma")

#include "coded_blocks_loop.h"

namespace swd {
namespace {

struct Avx2Lanes {
  using Floats = Vector<float>;
  using Unsigned = Vector<uint32_t>;
  static SWD_INLINE double sum(const Floats& numbers) { return sum_of_lanes<float>(numbers); }
  using Some = CopiedLanes<Avx2Lanes>;
  using SquaredCodes = __m256i;

  static SWD_INLINE uint32_t largest(const Unsigned& bits) {
    const __m256i all = reinterpret_cast<__m256i>(bits);
    __m128i most = _mm_max_epu32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
    most = _mm_max_epu32(most, _mm_shuffle_epi32(most, 0x4E));
    most = _mm_max_epu32(most, _mm_shuffle_epi32(most, 0xB1));
    return static_cast<uint32_t>(_mm_cvtsi128_si32(most));
  }

  // The random bits of a block.
  struct Noise {
    __m256i key, first;

    SWD_INLINE Noise(uint32_t block_key, int64_t first_pair)
        : key(_mm256_set1_epi32(static_cast<int>(block_key))),
          first(_mm256_mullo_epi32(_mm256_add_epi32(_mm256_setr_epi32(0, 1, 4, 5, 2, 3, 6, 7),
                                                    _mm256_set1_epi32(static_cast<int>(first_pair))),
                                   _mm256_set1_epi32(static_cast<int>(GOLDEN)))) {}

    // `bits_of_pair` of 8 pairs, which are 16 elements.
    SWD_INLINE __m256i bits(int64_t sixteen) const {
      const uint32_t passed = static_cast<uint32_t>(8 * sixteen) * GOLDEN;
      __m256i x = _mm256_xor_si256(_mm256_add_epi32(first, _mm256_set1_epi32(static_cast<int>(passed))), key);
      x = _mm256_xor_si256(x, _mm256_srli_epi32(x, 16));
      x = _mm256_mullo_epi32(x, _mm256_set1_epi32(static_cast<int>(0x85EBCA6Bu)));
      x = _mm256_xor_si256(x, _mm256_srli_epi32(x, 13));
      x = _mm256_mullo_epi32(x, _mm256_set1_epi32(static_cast<int>(0xC2B2AE35u)));
      return _mm256_xor_si256(x, _mm256_srli_epi32(x, 16));
    }
  };

  static SWD_INLINE Floats numbers(const int8_t* codes) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes))));
  }
  static SWD_INLINE Floats numbers(const uint8_t* codes) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes))));
  }

  // Packing works on each half of a register, so that 16 numbers come out in the order 0-3, 8-11, 4-7, 12-15. Random
  // bits are drawn in that order, and codes put into their own at the end.
  static SWD_INLINE void round(int8_t* exp_avg_codes, uint8_t* root_codes, SquaredCodes& squares, const float* exp_avg,
                               const float* root, float to_exp_avg, float to_root, const Noise& noise, int64_t first) {
    __m256i m[2], r[2];
    for (int half = 0; half < 2; ++half) {
      const __m256i bits = noise.bits(first / 16 + half);
      const float *ms = exp_avg + 16 * half, *roots = root + 16 * half;
      const __m256i fixed_m = _mm256_packs_epi32(fixed_point(ms, to_exp_avg), fixed_point(ms + 8, to_exp_avg));
      const __m256i fixed_r = _mm256_packus_epi32(fixed_point(roots, to_root), fixed_point(roots + 8, to_root));
      const __m256i noise_m = _mm256_and_si256(bits, _mm256_set1_epi16(0xFF)), noise_r = _mm256_srli_epi16(bits, 8);
      m[half] = _mm256_srai_epi16(_mm256_adds_epi16(fixed_m, noise_m), 8);
      r[half] = _mm256_max_epi16(_mm256_srli_epi16(_mm256_adds_epu16(fixed_r, noise_r), 8), _mm256_set1_epi16(1));
      squares = _mm256_add_epi32(squares, _mm256_madd_epi16(r[half], r[half]));
    }
    store(exp_avg_codes, _mm256_packs_epi16(m[0], m[1]));
    store(root_codes, _mm256_packus_epi16(r[0], r[1]));
  }

  // Stores the first `count` codes only.
  static SWD_INLINE void round(int8_t* exp_avg_codes, uint8_t* root_codes, SquaredCodes& squares, const float* exp_avg,
                               const float* root, float to_exp_avg, float to_root, const Noise& noise, int64_t first,
                               int64_t count) {
    int8_t whole_exp_avg[PART];
    uint8_t whole_root[PART];
    round(whole_exp_avg, whole_root, squares, exp_avg, root, to_exp_avg, to_root, noise, first);
    std::memcpy(exp_avg_codes, whole_exp_avg, count);
    std::memcpy(root_codes, whole_root, count);
  }

  static SWD_INLINE int64_t total(SquaredCodes squares) {
    alignas(32) int32_t lanes[8];
    _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), squares);
    int64_t sum = 0;
    for (int32_t lane : lanes) sum += lane;
    return sum;
  }

 private:
  static SWD_INLINE __m256i fixed_point(const float* numbers, float factor) {
    return _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(numbers), _mm256_set1_ps(factor)));
  }

  static SWD_INLINE void store(void* codes, __m256i packed) {
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    _mm256_storeu_si256(static_cast<__m256i*>(codes), _mm256_permutevar8x32_epi32(packed, order));
  }
};

}  // namespace

UpdateSums update_blocks_by_avx2(float* param, const CodedBlocks& moments, float* max_exp_avg_sq, const float* grad,
                                 int64_t n, BlockCursor cursor, const Scalars<float>& scalars, uint32_t rounding_key) {
  return update_blocks<Avx2Lanes>(param, moments, max_exp_avg_sq, grad, n, cursor, scalars, rounding_key);
}

bool has_avx2() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

}  // namespace swd

#else

namespace swd {

bool has_avx2() { return false; }

UpdateSums update_blocks_by_avx2(float*, const CodedBlocks&, float*, const float*, int64_t, BlockCursor,
                                 const Scalars<float>&, uint32_t) {
  return {};
}

}  // namespace swd

#endif
