// The AdamS update of one element: the only place in C++ where the mathematics stand.
#pragma once

#include "vectors.h"

namespace swd {

// What an element needs to know besides itself, in the type that computes. Made by scalars_of in schedule.h.
template <typename T>
struct Scalars {
  T grad_scale;  // clip factor, divided by the loss scale; negative to maximize
  T l2;
  T one_minus_beta1;
  T beta2;
  T one_minus_beta2;
  T inv_sqrt_bias_correction2;
  T eps;
  T decay_factor;
  T step_size;  // lr / bias_correction1

  template <typename To>
  Scalars<To> as() const {
    return {static_cast<To>(grad_scale),
            static_cast<To>(l2),
            static_cast<To>(one_minus_beta1),
            static_cast<To>(beta2),
            static_cast<To>(one_minus_beta2),
            static_cast<To>(inv_sqrt_bias_correction2),
            static_cast<To>(eps),
            static_cast<To>(decay_factor),
            static_cast<To>(step_size)};
  }
};

// Returns the root of the second moment, which moments in 8 bits are made of. V is T or Vector<T>. L2 is whether s.l2
// is not 0: asked of each vector anew it took a fifth of an update in the cache.
template <bool AMSGRAD, bool L2, typename V, typename T>
SWD_INLINE V update_element(V& param, V& exp_avg, V& exp_avg_sq, V& max_exp_avg_sq, V grad, const Scalars<T>& s) {
  grad *= s.grad_scale;
  if constexpr (L2) grad += s.l2 * param;
  exp_avg += s.one_minus_beta1 * (grad - exp_avg);
  exp_avg_sq = s.beta2 * exp_avg_sq + s.one_minus_beta2 * grad * grad;
  V averaged = exp_avg_sq;
  if constexpr (AMSGRAD) {
    // Written so that a NaN in exp_avg_sq is kept, as torch.maximum keeps it.
    max_exp_avg_sq = max_exp_avg_sq >= exp_avg_sq ? max_exp_avg_sq : exp_avg_sq;
    averaged = max_exp_avg_sq;
  }
  const V root = square_root(averaged);
  const V denom = root * s.inv_sqrt_bias_correction2 + s.eps;
  param = s.decay_factor * param - s.step_size * exp_avg / denom;
  return root;
}

}  // namespace swd
