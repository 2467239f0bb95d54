#include "coded_blocks.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "clones.h"
#include "coded_blocks_loop.h"

namespace swd {
namespace {

struct PlainLanes {
  using Floats = Vector<float>;
  using Unsigned = Vector<uint32_t>;
  static SWD_INLINE double sum(const Floats& numbers) { return sum_of_lanes<float>(numbers); }
  using Some = CopiedLanes<PlainLanes>;
  static SWD_INLINE uint32_t largest(const Unsigned& bits) {
    uint32_t most = bits[0];
    for (int l = 1; l < LANES<float>; ++l) most = std::max(most, static_cast<uint32_t>(bits[l]));
    return most;
  }
  using SquaredCodes = int64_t;

  struct Noise {
    uint32_t key, first_pair;
    Noise(uint32_t block_key, int64_t pair) : key(block_key), first_pair(static_cast<uint32_t>(pair)) {}
  };

  template <typename Code>
  static SWD_INLINE Floats numbers(const Code* codes) {
    Floats x;
    for (int l = 0; l < LANES<float>; ++l) x[l] = codes[l];
    return x;
  }

  static SWD_INLINE void round(int8_t* exp_avg_codes, uint8_t* root_codes, SquaredCodes& squares, const float* exp_avg,
                               const float* root, float to_exp_avg, float to_root, const Noise& noise, int64_t first,
                               int64_t count = PART) {
    squares += PART - count;
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t pair = noise.first_pair + static_cast<uint32_t>((first + i) / 2);
      const uint32_t bits = bits_of_pair(noise.key, pair) >> (16 * (i % 2));
      const int32_t m = fixed_point(exp_avg[i] * to_exp_avg) + static_cast<int32_t>(bits & 0xFF);
      const int32_t r = fixed_point(root[i] * to_root) + static_cast<int32_t>(bits >> 8 & 0xFF);
      const int32_t code = std::clamp(r >> 8, 1, 255);
      exp_avg_codes[i] = static_cast<int8_t>(std::clamp(m >> 8, -127, 127));
      root_codes[i] = static_cast<uint8_t>(code);
      squares += code * code;
    }
  }

  static SWD_INLINE int64_t total(SquaredCodes squares) { return squares; }

 private:
  // The nearest whole number; of NaN, in a block that is lost, any. Not every x86-64 rounds in one instruction: there
  // the sum below has it in its lowest bits. Others would fuse that sum with the product x is, and round otherwise than
  // AVX2 and AVX-512: one code in ten thousand would differ.
  static SWD_INLINE int32_t fixed_point(float x) {
#if defined(__x86_64__)
    constexpr float SHIFT = 0x1.8p23f;
    const float shifted = x + SHIFT;
    int32_t bits, zero;
    std::memcpy(&bits, &shifted, sizeof bits);
    std::memcpy(&zero, &SHIFT, sizeof zero);
    return bits - zero;
#else
    return static_cast<int32_t>(std::rint(x));
#endif
  }
};

SWD_INLINE int64_t sum_of_squared_codes(const uint8_t* codes, int64_t n) {
  int32_t sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += codes[i] * codes[i];
  return sum;
}

// Calls f(begin, length, block) for each block among n elements.
template <typename F>
SWD_INLINE void for_each_block(int64_t n, BlockCursor cursor, const F& f) {
  for (int64_t begin = 0, block = 0; begin < n; ++block) {
    const int64_t length = cursor.length();
    f(begin, length, block);
    begin += length;
    cursor.advance();
  }
}

}  // namespace

SWD_CLONES UpdateSums update_blocks_in_plain_loops(float* param, const CodedBlocks& moments, float* max_exp_avg_sq,
                                                   const float* grad, int64_t n, BlockCursor cursor,
                                                   const Scalars<float>& scalars, uint32_t rounding_key) {
  return update_blocks<PlainLanes>(param, moments, max_exp_avg_sq, grad, n, cursor, scalars, rounding_key);
}

UpdateSums update_coded(float* param, const CodedBlocks& moments, float* max_exp_avg_sq, const float* grad, int64_t n,
                        BlockCursor cursor, const Scalars<float>& scalars, uint32_t rounding_key) {
  static UpdateBlocks& update_blocks = has_avx512() ? update_blocks_by_avx512
                                       : has_avx2() ? update_blocks_by_avx2
                                                    : update_blocks_in_plain_loops;
  UpdateSums sums = update_blocks(param, moments, max_exp_avg_sq, grad, n, cursor, scalars, rounding_key);
  if (max_exp_avg_sq) sums.averaged = sum(max_exp_avg_sq, n);
  sums.grad = checked_sum_of_squares(sums.grad, grad, n);
  return sums;
}

SWD_CLONES double sum_coded(const uint8_t* root, const float* root_scales, int64_t n, BlockCursor cursor) {
  double total = 0;
  for_each_block(n, cursor, [&](int64_t begin, int64_t length, int64_t block) SWD_INLINE_LAMBDA {
    total += block_sum(sum_of_squared_codes(root + begin, length), root_scales[block]);
  });
  return total;
}

SWD_CLONES void decode_exp_avg_sq(float* exp_avg_sq, const uint8_t* root, const float* root_scales, int64_t n,
                                  BlockCursor cursor) {
  for_each_block(n, cursor, [&](int64_t begin, int64_t length, int64_t block) SWD_INLINE_LAMBDA {
    for (int64_t i = begin; i < begin + length; ++i) {
      const float number = static_cast<float>(root[i]) * root_scales[block];
      exp_avg_sq[i] = number * number;
    }
  });
}

__attribute__((noinline)) double block_sum(int64_t sum_of_squared_codes, float scale) {
  return static_cast<double>(sum_of_squared_codes) * (static_cast<double>(scale) * scale);
}

}  // namespace swd
