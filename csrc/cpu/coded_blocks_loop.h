// The loop over blocks of moments in 8 bits, for one instruction set: `Lanes` converts between codes and numbers.
#pragma once

#include "../element.h"
#include "by_kind.h"
#include "coded_blocks.h"

namespace swd {
namespace {

// Elements that are updated, and of the block before rounded, at once.
constexpr int64_t PART = 32;

// A block's updated moments before they are rounded.
struct FreshBlock {
  alignas(64) float exp_avg[CODE_BLOCK], root[CODE_BLOCK];
};

// The largest magnitudes of numbers that are not negative. Compared as integers they are in the same order, with NaN
// above infinity: so no NaN is lost.
template <typename Lanes>
struct Largest {
  typename Lanes::Unsigned bits{};

  SWD_INLINE void add(typename Lanes::Floats numbers) {
    typename Lanes::Unsigned own;
    std::memcpy(&own, &numbers, sizeof own);
    bits = bits > own ? bits : own;
  }
  SWD_INLINE float number() const {
    const uint32_t largest = Lanes::largest(bits);
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

// How a vector is read and written: whole,
template <typename Lanes>
struct WholeVector {
  SWD_INLINE typename Lanes::Floats read(const float* numbers) const { return get<typename Lanes::Floats>(numbers); }
  SWD_INLINE void write(float* numbers, const typename Lanes::Floats& x) const { put(numbers, x); }
  template <typename Code>
  SWD_INLINE typename Lanes::Floats read_codes(const Code* codes) const {
    return Lanes::numbers(codes);
  }
};

// or the first `count` lanes of it, with zeros in the others. For instruction sets that have no masks for all of this.
template <typename Lanes>
struct CopiedLanes {
  int64_t count;
  static constexpr int64_t WIDTH = sizeof(typename Lanes::Floats) / sizeof(float);

  SWD_INLINE typename Lanes::Floats read(const float* numbers) const {
    typename Lanes::Floats x{};
    std::memcpy(&x, numbers, count * sizeof(float));
    return x;
  }
  SWD_INLINE void write(float* numbers, const typename Lanes::Floats& x) const {
    std::memcpy(numbers, &x, count * sizeof(float));
  }
  template <typename Code>
  SWD_INLINE typename Lanes::Floats read_codes(const Code* codes) const {
    Code copy[WIDTH] = {};
    std::memcpy(copy, codes, count);
    return Lanes::numbers(copy);
  }
};

// Each block is rounded while the next one is updated: one waits for the divider, the other is all integers. What
// changes from element to element is in local variables: in members it went through memory, and took half as long
// again. Blocks that are shorter end in lanes of zeros, which do not leave the registers: copied into whole blocks,
// rows of 16 took 20 times as long as others.
template <typename Lanes, bool AMSGRAD, Decay DECAY, bool FROM_GRAD>
SWD_INLINE UpdateSums update_and_round(float* param, const CodedBlocks& moments, float* max_exp_avg_sq,
                                       const float* grad, int64_t n, BlockCursor cursor, const Scalars<float>& scalars,
                                       uint32_t rounding_key) {
  using Floats = typename Lanes::Floats;
  constexpr int64_t WIDTH = sizeof(Floats) / sizeof(float);
  const Scalars<float> s = scalars;
  FreshBlock fresh[2];
  Floats grad_sum{};
  Largest<Lanes> largest_exp_avg, largest_root;
  UpdateSums sums;

  const auto update_vector = [&](int64_t i, int64_t offset, float exp_avg_scale, float root_scale, FreshBlock& now,
                                 auto lanes) SWD_INLINE_LAMBDA {
    Floats p = lanes.read(param + i), second_max{};
    const Floats g = lanes.read(grad + i);
    Floats m = lanes.read_codes(moments.exp_avg + i) * exp_avg_scale;
    const Floats last_root = lanes.read_codes(moments.root + i) * root_scale;
    Floats second = last_root * last_root;
    if constexpr (AMSGRAD) second_max = lanes.read(max_exp_avg_sq + i);
    Floats root = update_element<AMSGRAD, DECAY, FROM_GRAD>(p, m, second, second_max, g, s);
    if constexpr (AMSGRAD) {
      lanes.write(max_exp_avg_sq + i, second_max);
      root = square_root(second);
    }
    lanes.write(param + i, p);
    put(now.exp_avg + offset, m);
    put(now.root + offset, root);
    largest_exp_avg.add(without_sign<typename Lanes::Unsigned>(m));
    largest_root.add(root);
    grad_sum += g * g;
  };
  const auto update_part = [&](int64_t begin, int64_t offset, float exp_avg_scale, float root_scale,
                               FreshBlock& now) SWD_INLINE_LAMBDA {
#pragma GCC unroll 4
    for (int64_t i = 0; i < PART; i += WIDTH) {
      update_vector(begin + i, offset + i, exp_avg_scale, root_scale, now, WholeVector<Lanes>{});
    }
  };
  const auto update_short_part = [&](int64_t begin, int64_t offset, int64_t count, float exp_avg_scale,
                                     float root_scale, FreshBlock& now) SWD_INLINE_LAMBDA {
    int64_t i = 0;
    for (; i + WIDTH <= count; i += WIDTH) {
      update_vector(begin + i, offset + i, exp_avg_scale, root_scale, now, WholeVector<Lanes>{});
    }
    if (i < count) {
      update_vector(begin + i, offset + i, exp_avg_scale, root_scale, now, typename Lanes::Some{count - i});
      i += WIDTH;
    }
    for (; i < PART; i += WIDTH) {
      put(now.exp_avg + offset + i, Floats{});
      put(now.root + offset + i, Floats{});
    }
  };

  int64_t updated = 0, rounded = 0, rounded_length = 0, rounded_number = 0;
  for (int64_t b = 0;; ++b) {
    const int64_t length = updated < n ? cursor.length() : 0;
    const FreshBlock& before = fresh[(b + 1) % 2];
    FreshBlock& now = fresh[b % 2];
    float to_exp_avg = 0, to_root = 0, exp_avg_scale = 0, root_scale = 0;
    if (b > 0) {
      moments.exp_avg_scales[b - 1] = largest_exp_avg.number() * (1 / LARGEST_EXP_AVG_CODE);
      moments.root_scales[b - 1] = largest_root.number() * (1 / LARGEST_ROOT_CODE);
      to_exp_avg = to_fixed_point(moments.exp_avg_scales[b - 1]);
      to_root = to_fixed_point(moments.root_scales[b - 1]);
      largest_exp_avg = largest_root = Largest<Lanes>{};
    }
    if (length) {
      exp_avg_scale = moments.exp_avg_scales[b];
      root_scale = moments.root_scales[b];
    }
    const typename Lanes::Noise noise(block_key(rounding_key, rounded_number), rounded_number * (CODE_BLOCK / 2));
    typename Lanes::SquaredCodes squares{};
    const auto round_part = [&](int64_t i, auto... count) SWD_INLINE_LAMBDA {
      Lanes::round(moments.exp_avg + rounded + i, moments.root + rounded + i, squares, before.exp_avg + i,
                   before.root + i, to_exp_avg, to_root, noise, i, count...);
    };
    if (length == CODE_BLOCK && rounded_length == CODE_BLOCK) {
      for (int64_t i = 0; i < CODE_BLOCK; i += PART) {
        update_part(updated + i, i, exp_avg_scale, root_scale, now);
        round_part(i);
      }
    } else {
      int64_t i = 0;
      for (; i + PART <= length; i += PART) update_part(updated + i, i, exp_avg_scale, root_scale, now);
      if (i < length) update_short_part(updated + i, i, length - i, exp_avg_scale, root_scale, now);
      for (i = 0; i + PART <= rounded_length; i += PART) round_part(i);
      if (i < rounded_length) round_part(i, rounded_length - i);
    }
    if (b > 0) {
      // Codes of lanes that are no elements are 1.
      const int64_t padding = (PART - rounded_length % PART) % PART;
      sums.averaged += block_sum(Lanes::total(squares) - padding, moments.root_scales[b - 1]);
    }
    if (!length) break;
    rounded = updated;
    rounded_length = length;
    rounded_number = cursor.number();
    updated += length;
    cursor.advance();
  }
  sums.grad = Lanes::sum(grad_sum);
  return sums;
}

template <typename Lanes>
SWD_INLINE UpdateSums update_blocks(float* param, const CodedBlocks& moments, float* max_exp_avg_sq, const float* grad,
                                    int64_t n, const BlockCursor& cursor, const Scalars<float>& s,
                                    uint32_t rounding_key) {
  const auto update = [&](auto amsgrad) SWD_INLINE_LAMBDA {
    return by_kind(s, [&](auto decay, auto from_grad) SWD_INLINE_LAMBDA {
      return update_and_round<Lanes, decltype(amsgrad)::value, decltype(decay)::value, decltype(from_grad)::value>(
          param, moments, max_exp_avg_sq, grad, n, cursor, s, rounding_key);
    });
  };
  return max_exp_avg_sq ? update(std::true_type{}) : update(std::false_type{});
}

}  // namespace
}  // namespace swd
