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
                               const float* root, float to_exp_avg, float to_root, const Noise& noise, int64_t first) {
    for (int64_t i = 0; i < PART; ++i) {
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
  // The nearest whole number, of which the sum below has the lowest bits; of NaN, in a block that is lost, any.
  static SWD_INLINE int32_t fixed_point(float x) {
    constexpr float SHIFT = 0x1.8p23f;
    const float shifted = x + SHIFT;
    int32_t bits, zero;
    std::memcpy(&bits, &shifted, sizeof bits);
    std::memcpy(&zero, &SHIFT, sizeof zero);
    return bits - zero;
  }
};

int64_t sum_of_squared_codes(const uint8_t* codes, int64_t n) {
  int64_t sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += codes[i] * codes[i];
  return sum;
}

// A block that is shorter, as a whole one that ends in zeros.
UpdateSums update_short_block(UpdateBlocks& update_blocks, float* param, const CodedBlocks& moments,
                              float* max_exp_avg_sq, const float* grad, int64_t n, const Scalars<float>& scalars,
                              uint32_t rounding_key, int64_t block) {
  alignas(64) float whole_param[CODE_BLOCK] = {}, whole_grad[CODE_BLOCK] = {}, whole_max[CODE_BLOCK] = {};
  alignas(64) int8_t exp_avg[CODE_BLOCK] = {};
  alignas(64) uint8_t root[CODE_BLOCK] = {};
  std::copy(param, param + n, whole_param);
  std::copy(grad, grad + n, whole_grad);
  std::copy(moments.exp_avg, moments.exp_avg + n, exp_avg);
  std::copy(moments.root, moments.root + n, root);
  if (max_exp_avg_sq) std::copy(max_exp_avg_sq, max_exp_avg_sq + n, whole_max);
  const CodedBlocks whole{exp_avg, root, moments.exp_avg_scales, moments.root_scales};
  UpdateSums sums = update_blocks(whole_param, whole, max_exp_avg_sq ? whole_max : nullptr, whole_grad, 1, scalars,
                                  rounding_key, block);
  std::copy(whole_param, whole_param + n, param);
  std::copy(exp_avg, exp_avg + n, moments.exp_avg);
  std::copy(root, root + n, moments.root);
  if (max_exp_avg_sq) std::copy(whole_max, whole_max + n, max_exp_avg_sq);
  sums.averaged = sum_coded(moments.root, moments.root_scales, n);
  return sums;
}

}  // namespace

SWD_CLONES UpdateSums update_blocks_in_plain_loops(float* param, const CodedBlocks& moments, float* max_exp_avg_sq,
                                                   const float* grad, int64_t blocks, const Scalars<float>& scalars,
                                                   uint32_t rounding_key, int64_t block) {
  return update_blocks<PlainLanes>(param, moments, max_exp_avg_sq, grad, blocks, scalars, rounding_key, block);
}

UpdateSums update_coded(float* param, const CodedBlocks& moments, float* max_exp_avg_sq, const float* grad, int64_t n,
                        const Scalars<float>& scalars, uint32_t rounding_key, int64_t block) {
  static UpdateBlocks& update_blocks = has_avx512() ? update_blocks_by_avx512
                                       : has_avx2() ? update_blocks_by_avx2
                                                    : update_blocks_in_plain_loops;
  const int64_t blocks = n / CODE_BLOCK, whole = blocks * CODE_BLOCK;
  UpdateSums sums;
  if (blocks) sums += update_blocks(param, moments, max_exp_avg_sq, grad, blocks, scalars, rounding_key, block);
  if (n > whole) {
    sums += update_short_block(update_blocks, param + whole, moments.from_block(blocks),
                               max_exp_avg_sq ? max_exp_avg_sq + whole : nullptr, grad + whole, n - whole, scalars,
                               rounding_key, block + blocks);
  }
  if (max_exp_avg_sq) sums.averaged = sum(max_exp_avg_sq, n);
  sums.grad = checked_sum_of_squares(sums.grad, grad, n);
  return sums;
}

double sum_coded(const uint8_t* root, const float* root_scales, int64_t n) {
  double total = 0;
  for (int64_t i = 0; i < n; i += CODE_BLOCK) {
    total += block_sum(sum_of_squared_codes(root + i, std::min(CODE_BLOCK, n - i)), root_scales[i / CODE_BLOCK]);
  }
  return total;
}

SWD_CLONES void decode_exp_avg_sq(float* exp_avg_sq, const uint8_t* root, const float* root_scales, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const float number = static_cast<float>(root[i]) * root_scales[i / CODE_BLOCK];
    exp_avg_sq[i] = number * number;
  }
}

__attribute__((noinline)) double block_sum(int64_t sum_of_squared_codes, float scale) {
  return static_cast<double>(sum_of_squared_codes) * (static_cast<double>(scale) * scale);
}

}  // namespace swd
