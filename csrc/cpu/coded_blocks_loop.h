// The loop over blocks of moments in 8 bits, for one instruction set: `Lanes` converts between codes and numbers.
#pragma once

#include "../element.h"
#include "by_kind.h"
#include "coded_blocks.h"

namespace swd {
namespace {

// Elements that are updated, and of the block before rounded, at once.
constexpr int64_t PART = 32;

// What an update leaves of a block before it is rounded.
struct FreshBlock {
  alignas(64) float exp_avg[CODE_BLOCK], root[CODE_BLOCK];
};

// The largest magnitudes of numbers that are not negative. Compared as integers they are in the same order, with NaN
// above infinity: so no NaN is lost.
template <typename Floats, typename Unsigned>
struct Largest {
  Unsigned bits{};

  SWD_INLINE void add(Floats numbers) {
    Unsigned own;
    std::memcpy(&own, &numbers, sizeof own);
    bits = bits > own ? bits : own;
  }
  SWD_INLINE float number() const {
    uint32_t largest = bits[0];
    for (size_t l = 1; l < sizeof(Floats) / sizeof(float); ++l) largest = bits[l] > largest ? bits[l] : largest;
    float x;
    std::memcpy(&x, &largest, sizeof x);
    return x;
  }
};

template <typename Unsigned, typename Floats>
SWD_INLINE Floats without_sign(Floats numbers) {
  Unsigned bits;
  std::memcpy(&bits, &numbers, sizeof bits);
  bits &= 0x7FFFFFFFu;
  std::memcpy(&numbers, &bits, sizeof bits);
  return numbers;
}

// Each block is rounded while the next one is updated: one waits for the divider, the other is all integers. What
// changes from element to element is in local variables: in members it went through memory, and took half as long
// again.
template <typename Lanes, bool AMSGRAD, Decay DECAY, bool FROM_GRAD>
SWD_INLINE UpdateSums update_and_round(float* param, const CodedBlocks& moments, float* max_exp_avg_sq,
                                       const float* grad, int64_t blocks, const Scalars<float>& scalars,
                                       uint32_t rounding_key, int64_t block) {
  using Floats = typename Lanes::Floats;
  using Unsigned = typename Lanes::Unsigned;
  constexpr int64_t WIDTH = sizeof(Floats) / sizeof(float);
  const Scalars<float> s = scalars;
  FreshBlock fresh[2];
  Floats grad_sum{};
  Largest<Floats, Unsigned> largest_exp_avg, largest_root;
  UpdateSums sums;

  const auto update_part = [&](int64_t begin, const int8_t* codes, const uint8_t* root_codes, float exp_avg_scale,
                               float root_scale, FreshBlock& now) SWD_INLINE_LAMBDA {
    const int64_t offset = begin % CODE_BLOCK;
#pragma GCC unroll 4
    for (int64_t i = 0; i < PART; i += WIDTH) {
      Floats p = get<Floats>(param + begin + i), second_max{};
      const Floats g = get<Floats>(grad + begin + i);
      Floats m = Lanes::numbers(codes + begin + i) * exp_avg_scale;
      const Floats last_root = Lanes::numbers(root_codes + begin + i) * root_scale;
      Floats second = last_root * last_root;
      if constexpr (AMSGRAD) second_max = get<Floats>(max_exp_avg_sq + begin + i);
      Floats root = update_element<AMSGRAD, DECAY, FROM_GRAD>(p, m, second, second_max, g, s);
      if constexpr (AMSGRAD) {
        put(max_exp_avg_sq + begin + i, second_max);
        root = square_root(second);
      }
      put(param + begin + i, p);
      put(now.exp_avg + offset + i, m);
      put(now.root + offset + i, root);
      largest_exp_avg.add(without_sign<Unsigned>(m));
      largest_root.add(root);
      grad_sum += g * g;
    }
  };

  for (int64_t b = 0; b <= blocks; ++b) {
    const FreshBlock& before = fresh[(b + 1) % 2];
    FreshBlock& now = fresh[b % 2];
    float to_exp_avg = 0, to_root = 0;
    if (b > 0) {
      moments.exp_avg_scales[b - 1] = largest_exp_avg.number() * (1 / LARGEST_EXP_AVG_CODE);
      moments.root_scales[b - 1] = largest_root.number() * (1 / LARGEST_ROOT_CODE);
      to_exp_avg = to_fixed_point(moments.exp_avg_scales[b - 1]);
      to_root = to_fixed_point(moments.root_scales[b - 1]);
      largest_exp_avg = largest_root = Largest<Floats, Unsigned>{};
    }
    const int64_t rounded = (b - 1) * CODE_BLOCK, updated = b * CODE_BLOCK;
    const typename Lanes::Noise noise(block_key(rounding_key, block + b - 1), (block + b - 1) * (CODE_BLOCK / 2));
    typename Lanes::SquaredCodes squares{};
    const auto round_part = [&](int64_t i) SWD_INLINE_LAMBDA {
      Lanes::round(moments.exp_avg + rounded + i, moments.root + rounded + i, squares, before.exp_avg + i,
                   before.root + i, to_exp_avg, to_root, noise, i);
    };
    if (b == 0) {
      for (int64_t i = 0; i < CODE_BLOCK; i += PART) {
        update_part(updated + i, moments.exp_avg, moments.root, *moments.exp_avg_scales, *moments.root_scales, now);
      }
      continue;
    }
    if (b < blocks) {
      const float exp_avg_scale = moments.exp_avg_scales[b], root_scale = moments.root_scales[b];
      for (int64_t i = 0; i < CODE_BLOCK; i += PART) {
        update_part(updated + i, moments.exp_avg, moments.root, exp_avg_scale, root_scale, now);
        round_part(i);
      }
    } else {
      for (int64_t i = 0; i < CODE_BLOCK; i += PART) round_part(i);
    }
    sums.averaged += block_sum(Lanes::total(squares), moments.root_scales[b - 1]);
  }
  sums.grad = Lanes::sum(grad_sum);
  return sums;
}

template <typename Lanes>
SWD_INLINE UpdateSums update_blocks(float* param, const CodedBlocks& moments, float* max_exp_avg_sq, const float* grad,
                                    int64_t blocks, const Scalars<float>& s, uint32_t rounding_key, int64_t block) {
  const auto update = [&](auto amsgrad) SWD_INLINE_LAMBDA {
    return by_kind(s, [&](auto decay, auto from_grad) SWD_INLINE_LAMBDA {
      return update_and_round<Lanes, decltype(amsgrad)::value, decltype(decay)::value, decltype(from_grad)::value>(
          param, moments, max_exp_avg_sq, grad, blocks, s, rounding_key, block);
    });
  };
  return max_exp_avg_sq ? update(std::true_type{}) : update(std::false_type{});
}

}  // namespace
}  // namespace swd
