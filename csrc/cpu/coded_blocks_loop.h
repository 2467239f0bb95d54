// The loop over blocks of moments in 8 bits, for one instruction set: `Lanes` converts between codes and numbers.
#pragma once

#include "../element.h"
#include "coded_blocks.h"

namespace swd {
namespace {

using Floats = Vector<float>;
using Integers = Vector<int32_t>;

// Elements that are updated, and of the block before rounded, at once.
constexpr int64_t PART = 32;

// What an update leaves of a block before it is rounded, and the largest of it.
struct FreshBlock {
  alignas(64) float exp_avg[CODE_BLOCK], root[CODE_BLOCK];
  Integers largest_exp_avg, largest_root;
};

// Absolute values as integers, which are in the same order, with NaN above infinity: so no NaN is lost.
SWD_INLINE Integers magnitude(Floats x) {
  Integers bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits & 0x7FFFFFFF;
}

SWD_INLINE float largest_of(const Integers& magnitudes) {
  int32_t largest = magnitudes[0];
  for (int l = 1; l < LANES<float>; ++l) largest = magnitudes[l] > largest ? magnitudes[l] : largest;
  float x;
  std::memcpy(&x, &largest, sizeof x);
  return x;
}

// A block while it is updated.
template <typename Lanes, bool AMSGRAD, bool L2>
struct BlockUpdate {
  float* param;
  const float* grad;
  float* max_exp_avg_sq;
  CodedBlocks moments;
  float exp_avg_scale, root_scale;

  SWD_INLINE void part(int64_t begin, const Scalars<float>& s, FreshBlock& fresh, Floats& grad_sum) const {
#pragma GCC unroll 4
    for (int64_t i = begin; i < begin + PART; i += LANES<float>) {
      Floats p = get<Floats>(param + i), second_max{};
      const Floats g = get<Floats>(grad + i);
      Floats m = Lanes::numbers(moments.exp_avg + i) * exp_avg_scale;
      const Floats last_root = Lanes::numbers(moments.root + i) * root_scale;
      Floats second = last_root * last_root;
      if constexpr (AMSGRAD) second_max = get<Floats>(max_exp_avg_sq + i);
      Floats root = update_element<AMSGRAD, L2>(p, m, second, second_max, g, s);
      if constexpr (AMSGRAD) {
        put(max_exp_avg_sq + i, second_max);
        root = square_root(second);
      }
      put(param + i, p);
      put(fresh.exp_avg + i, m);
      put(fresh.root + i, root);
      const Integers m_size = magnitude(m), root_size = magnitude(root);
      fresh.largest_exp_avg = fresh.largest_exp_avg > m_size ? fresh.largest_exp_avg : m_size;
      fresh.largest_root = fresh.largest_root > root_size ? fresh.largest_root : root_size;
      grad_sum += g * g;
    }
  }
};

// A block while it is rounded.
template <typename Lanes>
struct BlockRounding {
  CodedBlocks moments;
  float to_exp_avg, to_root;
  uint32_t key, first_pair;
  typename Lanes::SquaredCodes squares{};

  SWD_INLINE BlockRounding(const CodedBlocks& to, const FreshBlock& fresh, uint32_t rounding_key, int64_t block)
      : moments(to), key(block_key(rounding_key, block)), first_pair(static_cast<uint32_t>(block * (CODE_BLOCK / 2))) {
    const float exp_avg_scale = largest_of(fresh.largest_exp_avg) * (1 / LARGEST_EXP_AVG_CODE);
    const float root_scale = largest_of(fresh.largest_root) * (1 / LARGEST_ROOT_CODE);
    *moments.exp_avg_scales = exp_avg_scale;
    *moments.root_scales = root_scale;
    to_exp_avg = to_fixed_point(exp_avg_scale);
    to_root = to_fixed_point(root_scale);
  }

  SWD_INLINE void part(int64_t begin, const FreshBlock& fresh) {
    Lanes::round(moments.exp_avg + begin, moments.root + begin, squares, fresh.exp_avg + begin, fresh.root + begin,
                 to_exp_avg, to_root, key, first_pair + static_cast<uint32_t>(begin / 2));
  }

  SWD_INLINE double sum() const { return block_sum(Lanes::total(squares), *moments.root_scales); }
};

// Each block is rounded while the next one is updated: one waits for the divider, the other is all integers.
template <typename Lanes, bool AMSGRAD, bool L2>
SWD_INLINE UpdateSums update_and_round(float* param, const CodedBlocks& moments, float* max_exp_avg_sq,
                                       const float* grad, int64_t blocks, const Scalars<float>& scalars,
                                       uint32_t rounding_key, int64_t block) {
  const Scalars<float> s = scalars;
  FreshBlock fresh[2];
  Floats grad_sum{};
  UpdateSums sums;
  const auto update_of = [&](int64_t b) SWD_INLINE_LAMBDA {
    const CodedBlocks own = moments.from_block(b);
    const int64_t i = b * CODE_BLOCK;
    fresh[b % 2].largest_exp_avg = fresh[b % 2].largest_root = Integers{};
    return BlockUpdate<Lanes, AMSGRAD, L2>{
        param + i, grad + i, AMSGRAD ? max_exp_avg_sq + i : nullptr, own, *own.exp_avg_scales, *own.root_scales};
  };
  const auto rounding_of = [&](int64_t b) SWD_INLINE_LAMBDA {
    return BlockRounding<Lanes>(moments.from_block(b), fresh[b % 2], rounding_key, block + b);
  };
  const auto first = update_of(0);
  for (int64_t i = 0; i < CODE_BLOCK; i += PART) first.part(i, s, fresh[0], grad_sum);
  for (int64_t b = 1; b < blocks; ++b) {
    const auto update = update_of(b);
    auto rounding = rounding_of(b - 1);
    for (int64_t i = 0; i < CODE_BLOCK; i += PART) {
      update.part(i, s, fresh[b % 2], grad_sum);
      rounding.part(i, fresh[(b - 1) % 2]);
    }
    sums.averaged += rounding.sum();
  }
  auto last = rounding_of(blocks - 1);
  for (int64_t i = 0; i < CODE_BLOCK; i += PART) last.part(i, fresh[(blocks - 1) % 2]);
  sums.averaged += last.sum();
  sums.grad = sum_of_lanes<float>(grad_sum);
  return sums;
}

template <typename Lanes>
SWD_INLINE UpdateSums update_blocks(float* param, const CodedBlocks& moments, float* max_exp_avg_sq, const float* grad,
                                    int64_t blocks, const Scalars<float>& s, uint32_t rounding_key, int64_t block) {
  const auto update = [&](auto amsgrad, auto l2) SWD_INLINE_LAMBDA {
    return update_and_round<Lanes, decltype(amsgrad)::value, decltype(l2)::value>(param, moments, max_exp_avg_sq, grad,
                                                                                  blocks, s, rounding_key, block);
  };
  if (s.l2 == 0)
    return max_exp_avg_sq ? update(std::true_type{}, std::false_type{}) : update(std::false_type{}, std::false_type{});
  return max_exp_avg_sq ? update(std::true_type{}, std::true_type{}) : update(std::false_type{}, std::true_type{});
}

}  // namespace
}  // namespace swd
