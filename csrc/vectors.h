// Vectors of 32 bytes, as GCC and Clang have them for every machine: the compiler maps them to what there is.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

// Must be inlined: a function called from a target_clones body would be compiled for the baseline only.
#define SWD_INLINE inline __attribute__((always_inline))
#define SWD_INLINE_LAMBDA __attribute__((always_inline))

namespace swd {

template <typename T>
constexpr int64_t LANES = 32 / sizeof(T);

template <typename T>
struct VectorOf {
  typedef T Type __attribute__((vector_size(32)));
};
template <typename T>
using Vector = typename VectorOf<T>::Type;

// V is T or Vector<T>; memory need not be aligned.
template <typename V, typename T>
SWD_INLINE V get(const T* p) {
  V value;
  std::memcpy(&value, p, sizeof(V));
  return value;
}
template <typename V, typename T>
SWD_INLINE void put(T* p, const V& value) {
  std::memcpy(p, &value, sizeof(V));
}

SWD_INLINE float square_root(float x) { return std::sqrt(x); }
SWD_INLINE double square_root(double x) { return std::sqrt(x); }
template <typename V>
SWD_INLINE V square_root(V x) {
  for (size_t l = 0; l < sizeof(V) / sizeof(x[0]); ++l) x[l] = std::sqrt(x[l]);
  return x;
}

template <typename T>
SWD_INLINE double sum_of_lanes(const Vector<T>& vector) {
  double lanes[LANES<T>];
  for (int l = 0; l < LANES<T>; ++l) lanes[l] = vector[l];
  for (int half = LANES<T> / 2; half > 0; half /= 2) {
    for (int l = 0; l < half; ++l) lanes[l] += lanes[l + half];
  }
  return lanes[0];
}

}  // namespace swd
