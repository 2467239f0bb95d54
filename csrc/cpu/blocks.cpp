#include "blocks.h"

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <type_traits>

#include "../masters.h"
#include "../random_bits.h"
#include "by_kind.h"
#include "clones.h"
#include "float16_arrays.h"

namespace swd {
namespace {

// --- 16-bit storage. torch's own conversions, which are branch-free integer arithmetic and so vectorise.

using torch::headeronly::BFloat16;
using torch::headeronly::Half;

SWD_INLINE float widen(float x) { return x; }
SWD_INLINE double widen(double x) { return x; }
SWD_INLINE float widen(BFloat16Bits x) { return static_cast<float>(BFloat16(x.bits, BFloat16::from_bits())); }
SWD_INLINE float widen(Float16Bits x) { return static_cast<float>(Half(x.bits, Half::from_bits())); }

template <typename To, typename T>
SWD_INLINE To narrow(T x) {
  if constexpr (std::is_same_v<To, BFloat16Bits>) {
    return {BFloat16(static_cast<float>(x)).x};
  } else if constexpr (std::is_same_v<To, Float16Bits>) {
    return {Half(static_cast<float>(x)).x};
  } else {
    return static_cast<To>(x);
  }
}

template <typename T, typename From>
SWD_INLINE void load_each(T* __restrict block, const From* __restrict src, int64_t n) {
  if constexpr (std::is_same_v<T, float> && std::is_same_v<From, Float16Bits>) {
    if (HAS_FLOAT16_INSTRUCTIONS) return widen_array(block, src, n);
  }
  for (int64_t i = 0; i < n; ++i) block[i] = static_cast<T>(widen(src[i]));
}

template <typename T, typename To>
SWD_INLINE void store_each(To* __restrict dst, const T* __restrict block, int64_t n) {
  if constexpr (std::is_same_v<T, float> && std::is_same_v<To, Float16Bits>) {
    if (HAS_FLOAT16_INSTRUCTIONS) return narrow_array(dst, block, n);
  }
  for (int64_t i = 0; i < n; ++i) dst[i] = narrow<To>(block[i]);
}

// --- Masters in two bytes

template <typename T>
SWD_INLINE void join_each(T* __restrict block, const uint16_t* __restrict params, const uint16_t* __restrict remainders,
                          int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = joined_master<int32_t, uint32_t>(params[i], static_cast<int16_t>(remainders[i]));
    float master;
    std::memcpy(&master, &bits, sizeof master);
    block[i] = static_cast<T>(master);
  }
}

template <typename T>
SWD_INLINE void split_each(uint16_t* __restrict params, uint16_t* __restrict remainders, const T* __restrict block,
                           int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const float master = static_cast<float>(block[i]);
    uint32_t bits;
    std::memcpy(&bits, &master, sizeof bits);
    const SplitMaster<uint32_t> parts = split_master<int32_t>(bits);
    params[i] = static_cast<uint16_t>(parts.param);
    remainders[i] = static_cast<uint16_t>(parts.remainder);
  }
}

// Rounds up with a probability given by the bits that are cut off. NaN and infinity stay as they are.
SWD_INLINE BFloat16Bits narrow_stochastically(float x, uint32_t key, uint32_t element) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const bool finite = (bits & 0x7F800000u) != 0x7F800000u;
  const uint16_t rounded = static_cast<uint16_t>((bits + random_16_bits(key, element)) >> 16);
  return {finite ? rounded : narrow<BFloat16Bits>(x).bits};
}

// --- Sums

// STRIPS partial vectors in T, folded into double after at most FOLD additions each. They run through distant
// places at once: on two cores of a Zen 3 machine one stream of reads took 15 to 30% longer, because the
// prefetcher of each core follows one page at a time.
constexpr int STRIPS = 8;
constexpr int64_t FOLD = 128;

// Squares of floats leave float's range where gradients are below 1e-19 or above 1e19, so sums of them are taken again
// where that may have lost something, of numbers that are scaled by a power of two. The lower limit: up to 2^15
// squares, each of which may have lost 2^-126, lose no more than float's resolution of 2^-80. A sum below it stays
// below 2^120 if scaled by 2^100, and the least float's square becomes 2^-98: neither leaves the range.
constexpr double LEAST_FLOAT_SUM = 0x1p-80;
constexpr float UP = 0x1p100f, DOWN = 0x1p-100f;

template <typename T>
SWD_INLINE bool keeps_squares(double sum) {
  return std::is_same_v<T, double> || (sum >= LEAST_FLOAT_SUM && sum <= std::numeric_limits<double>::max());
}

template <typename T>
SWD_INLINE double sum_of_scaled_squares(const T* values, int64_t n, T scale) {
  constexpr int64_t L = LANES<T>;
  const int64_t strip = n / (STRIPS * L) * L;
  double total = 0;
  for (int64_t begin = 0; begin < strip; begin += FOLD * L) {
    const int64_t end = std::min(strip, begin + FOLD * L);
    Vector<T> partial[STRIPS] = {};
    for (int64_t i = begin; i < end; i += L) {
#pragma GCC unroll 8
      for (int s = 0; s < STRIPS; ++s) {
        const Vector<T> x = get<Vector<T>>(values + s * strip + i) * scale;
        partial[s] += x * x;
      }
    }
    for (int half = STRIPS / 2; half > 0; half /= 2) {
      for (int s = 0; s < half; ++s) partial[s] += partial[s + half];
    }
    total += sum_of_lanes<T>(partial[0]);
  }
  for (int64_t i = STRIPS * strip; i < n; ++i) {
    const double x = static_cast<double>(values[i]) * scale;
    total += x * x;
  }
  return total;
}

// A sum of squares, or a new one where that may have lost something.
template <typename T>
SWD_INLINE double checked_squares(double sum, const T* values, int64_t n) {
  if (keeps_squares<T>(sum)) return sum;
  const double scale = sum < LEAST_FLOAT_SUM ? UP : DOWN;
  return sum_of_scaled_squares(values, n, static_cast<T>(scale)) / scale / scale;
}

template <typename T>
SWD_INLINE double strip_sum_of_squares(const T* values, int64_t n) {
  return checked_squares(sum_of_scaled_squares(values, n, T{1}), values, n);
}

// The order of every sum of second moments: a vector of partial sums, then the tail. With plain loops GCC 12 does
// not keep a fixed order in registers, and a second loop for the sum took 6 to 8% of an update.
template <typename T>
struct OrderedSum {
  Vector<T> partial = {};
  double tail = 0;
  SWD_INLINE void add(const Vector<T>& x) { partial += x; }
  SWD_INLINE void add(const T& x) { tail += x; }
  SWD_INLINE double total() const { return sum_of_lanes<T>(partial) + tail; }
};

// Calls f(i, V{}) along n elements, where V is Vector<T> and, for the tail, T.
template <typename T, typename F>
SWD_INLINE void for_each_vector(int64_t n, const F& f) {
  int64_t i = 0;
  for (; i + LANES<T> <= n; i += LANES<T>) f(i, Vector<T>{});
  for (; i < n; ++i) f(i, T{});
}

template <typename T>
SWD_INLINE double sum_each(const T* values, int64_t n) {
  OrderedSum<T> sum;
  for_each_vector<T>(n, [&](int64_t i, auto v) SWD_INLINE_LAMBDA { sum.add(get<decltype(v)>(values + i)); });
  return sum.total();
}

// --- Updates

// The weights to be updated, V at a time: an array,
template <typename T>
struct Weights {
  template <typename V>
  SWD_INLINE V read(int64_t i) const {
    return get<V>(array + i);
  }
  template <typename V>
  SWD_INLINE void write(int64_t i, const V& weights) const {
    put(array + i, weights);
  }
  T* array;
};

// or masters in two bytes. Copied into an array before the update, and split again behind it, they made a step a sixth
// longer.
struct Masters {
  template <typename V>
  SWD_INLINE V read(int64_t i) const {
    if constexpr (std::is_same_v<V, float>) {
      V weight;
      join_each(&weight, params + i, remainders + i, 1);
      return weight;
    } else {
      const Whole bits = __builtin_convertvector(get<Half16>(params + i), Whole);
      const Signed rest = __builtin_convertvector(get<SignedHalf>(remainders + i), Signed);
      const Whole masters = joined_master<Signed>(bits, rest);
      return get<V>(&masters);
    }
  }
  template <typename V>
  SWD_INLINE void write(int64_t i, const V& weights) const {
    if constexpr (std::is_same_v<V, float>) {
      split_each(params + i, remainders + i, &weights, 1);
    } else {
      const SplitMaster<Whole> parts = split_master<Signed>(get<Whole>(&weights));
      put(params + i, __builtin_convertvector(parts.param, Half16));
      put(remainders + i, __builtin_convertvector(parts.remainder, Half16));
    }
  }
  typedef uint32_t Whole __attribute__((vector_size(32)));
  typedef int32_t Signed __attribute__((vector_size(32)));
  typedef uint16_t Half16 __attribute__((vector_size(16)));
  typedef int16_t SignedHalf __attribute__((vector_size(16)));
  uint16_t *params, *remainders;
};

// Either of them, with averages that follow.
template <typename T, typename W>
struct Averaged {
  template <typename V>
  SWD_INLINE V read(int64_t i) const {
    return weights.template read<V>(i);
  }
  template <typename V>
  SWD_INLINE void write(int64_t i, const V& updated) const {
    weights.write(i, updated);
    put(ema_param + i, next_average(get<V>(ema_param + i), updated, ema_weight));
  }
  W weights;
  T* ema_param;
  T ema_weight;
};

template <bool AMSGRAD, Decay DECAY, bool FROM_GRAD, typename T, typename W>
SWD_INLINE UpdateSums update_vectors(W weights, T* exp_avg, T* exp_avg_sq, T* max_exp_avg_sq, const T* grad, int64_t n,
                                     const Scalars<T>& scalars) {
  const Scalars<T> s = scalars;
  OrderedSum<T> averaged_sum, grad_sum;
  for_each_vector<T>(n, [&](int64_t i, auto v) SWD_INLINE_LAMBDA {
    using V = decltype(v);
    V p = weights.template read<V>(i), m = get<V>(exp_avg + i), second = get<V>(exp_avg_sq + i), second_max{};
    const V g = get<V>(grad + i);
    if constexpr (AMSGRAD) second_max = get<V>(max_exp_avg_sq + i);
    update_element<AMSGRAD, DECAY, FROM_GRAD>(p, m, second, second_max, g, s);
    weights.write(i, p);
    put(exp_avg + i, m);
    put(exp_avg_sq + i, second);
    if constexpr (AMSGRAD) put(max_exp_avg_sq + i, second_max);
    averaged_sum.add(AMSGRAD ? second_max : second);
    grad_sum.add(g * g);
  });
  return {averaged_sum.total(), checked_squares(grad_sum.total(), grad, n)};
}

template <bool AMSGRAD, typename T, typename W>
SWD_INLINE UpdateSums update_each(W weights, T* exp_avg, T* exp_avg_sq, T* max_exp_avg_sq, T* ema_param, const T* grad,
                                  int64_t n, const Scalars<T>& scalars) {
  const auto update = [&](auto all_weights) SWD_INLINE_LAMBDA {
    return by_kind(scalars, [&](auto decay, auto from_grad) SWD_INLINE_LAMBDA {
      return update_vectors<AMSGRAD, decltype(decay)::value, decltype(from_grad)::value>(
          all_weights, exp_avg, exp_avg_sq, max_exp_avg_sq, grad, n, scalars);
    });
  };
  return ema_param ? update(Averaged<T, W>{weights, ema_param, scalars.ema_weight}) : update(weights);
}

// The update itself, with its other results thrown away, exp_avg among them. Its decay is the schedule's, so there is
// no L2.
template <typename T>
SWD_INLINE double next_max_each(const T* exp_avg_sq, const T* max_exp_avg_sq, const T* grad, int64_t n,
                                const Scalars<T>& scalars) {
  const Scalars<T> s = scalars;
  OrderedSum<T> sum;
  for_each_vector<T>(n, [&](int64_t i, auto v) SWD_INLINE_LAMBDA {
    using V = decltype(v);
    V param{}, exp_avg{}, second = get<V>(exp_avg_sq + i), second_max = get<V>(max_exp_avg_sq + i);
    update_element<true, Decay::Plain, false>(param, exp_avg, second, second_max, get<V>(grad + i), s);
    sum.add(second_max);
  });
  return sum.total();
}

}  // namespace

// --- One function for each type, since target_clones does not take templates.

#define SWD_STORAGE(T, S)                                                               \
  SWD_CLONES void load(T* block, const S* src, int64_t n) { load_each(block, src, n); } \
  SWD_CLONES void store(S* dst, const T* block, int64_t n) { store_each(dst, block, n); }

#define SWD_BLOCKS(T)                                                                                                 \
  SWD_STORAGE(T, float)                                                                                               \
  SWD_STORAGE(T, double)                                                                                              \
  SWD_STORAGE(T, BFloat16Bits)                                                                                        \
  SWD_STORAGE(T, Float16Bits)                                                                                         \
  SWD_CLONES void join_masters(T* block, const uint16_t* params, const uint16_t* remainders, int64_t n) {             \
    join_each(block, params, remainders, n);                                                                          \
  }                                                                                                                   \
  SWD_CLONES void split_masters(uint16_t* params, uint16_t* remainders, const T* block, int64_t n) {                  \
    split_each(params, remainders, block, n);                                                                         \
  }                                                                                                                   \
  SWD_CLONES double sum(const T* values, int64_t n) { return sum_each(values, n); }                                   \
  SWD_CLONES double sum_of_squares(const T* values, int64_t n) { return strip_sum_of_squares(values, n); }            \
  SWD_CLONES UpdateSums update_block(T* param, T* exp_avg, T* exp_avg_sq, T* ema_param, const T* grad, int64_t n,     \
                                     const Scalars<T>& scalars) {                                                     \
    return update_each<false, T>(Weights<T>{param}, exp_avg, exp_avg_sq, nullptr, ema_param, grad, n, scalars);       \
  }                                                                                                                   \
  SWD_CLONES UpdateSums update_block_amsgrad(T* param, T* exp_avg, T* exp_avg_sq, T* max_exp_avg_sq, T* ema_param,    \
                                             const T* grad, int64_t n, const Scalars<T>& scalars) {                   \
    return update_each<true, T>(Weights<T>{param}, exp_avg, exp_avg_sq, max_exp_avg_sq, ema_param, grad, n, scalars); \
  }                                                                                                                   \
  SWD_CLONES double sum_of_next_max(const T* exp_avg_sq, const T* max_exp_avg_sq, const T* grad, int64_t n,           \
                                    const Scalars<T>& scalars) {                                                      \
    return next_max_each(exp_avg_sq, max_exp_avg_sq, grad, n, scalars);                                               \
  }

SWD_BLOCKS(float)
SWD_BLOCKS(double)

SWD_CLONES UpdateSums update_masters(uint16_t* params, uint16_t* remainders, float* exp_avg, float* exp_avg_sq,
                                     float* ema_param, const float* grad, int64_t n, const Scalars<float>& scalars) {
  const Masters masters{params, remainders};
  return update_each<false, float>(masters, exp_avg, exp_avg_sq, nullptr, ema_param, grad, n, scalars);
}

SWD_CLONES void update_averages(float* ema_param, const float* weights, int64_t n, const Scalars<float>& scalars) {
  for (int64_t i = 0; i < n; ++i) ema_param[i] = next_average(ema_param[i], weights[i], scalars.ema_weight);
}

SWD_CLONES double checked_sum_of_squares(double sum, const float* values, int64_t n) {
  return checked_squares(sum, values, n);
}

SWD_CLONES void store_stochastically(BFloat16Bits* dst, const float* block, int64_t n, uint32_t key, uint32_t number,
                                     uint32_t number_stride) {
  for (int64_t i = 0; i < n; ++i) {
    dst[i] = narrow_stochastically(block[i], key, number + static_cast<uint32_t>(i) * number_stride);
  }
}

}  // namespace swd
