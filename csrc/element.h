// The AdamS update of one element: the only place in C++ where the mathematics stand.
#pragma once

#include "vectors.h"

namespace swd {

// The scalars of an element's update, in the type that computes. Made by scalars_of in schedule.h.
template <typename T>
struct Scalars {
  T grad_scale;  // clip factor, divided by the loss scale; negative to maximize
  T l2;
  T exp_avg_slope;  // 1 - beta1, or -beta1 with from_grad
  T beta2;
  T one_minus_beta2;
  T inv_sqrt_bias_correction2;
  T eps;
  T decay_factor;
  T step_size;     // lr / bias_correction1
  T ema_weight;    // of the new weight in its average
  bool from_grad;  // whether exp_avg is g - beta1 (g - m) and not m + (1 - beta1)(g - m)
  bool cautious;   // whether only weights decay that the update does not move away from zero

  template <typename To>
  Scalars<To> as() const {
    return {static_cast<To>(grad_scale),
            static_cast<To>(l2),
            static_cast<To>(exp_avg_slope),
            static_cast<To>(beta2),
            static_cast<To>(one_minus_beta2),
            static_cast<To>(inv_sqrt_bias_correction2),
            static_cast<To>(eps),
            static_cast<To>(decay_factor),
            static_cast<To>(step_size),
            static_cast<To>(ema_weight),
            from_grad,
            cautious};
  }
};

// How an element decays: by a factor; by a term of its gradient, where s.l2 is not 0; or if s.cautious.
enum class Decay { Plain, L2, Cautious };

// Returns the root of the second moment, which moments in 8 bits are made of. V is T or Vector<T>. FROM_GRAD is
// s.from_grad: asked of each vector anew whether there is L2 took a fifth of an update in the cache, FROM_GRAD 5%, and
// a branch in between kept GCC from fusing multiply with add.
template <bool AMSGRAD, Decay DECAY, bool FROM_GRAD, typename V, typename T>
SWD_INLINE V update_element(V& param, V& exp_avg, V& exp_avg_sq, V& max_exp_avg_sq, V grad, const Scalars<T>& s) {
  grad *= s.grad_scale;
  if constexpr (DECAY == Decay::L2) grad += s.l2 * param;
  // Computed as torch's lerp is: where the gradient has the larger weight, m + (1 - beta1)(g - m) would lose a small m.
  exp_avg = (FROM_GRAD ? grad : exp_avg) + s.exp_avg_slope * (grad - exp_avg);
  exp_avg_sq = s.beta2 * exp_avg_sq + s.one_minus_beta2 * grad * grad;
  V averaged = exp_avg_sq;
  if constexpr (AMSGRAD) {
    // Written so that a NaN in exp_avg_sq is kept, as torch.maximum keeps it.
    max_exp_avg_sq = max_exp_avg_sq >= exp_avg_sq ? max_exp_avg_sq : exp_avg_sq;
    averaged = max_exp_avg_sq;
  }
  const V root = square_root(averaged);
  const V denom = root * s.inv_sqrt_bias_correction2 + s.eps;
  if constexpr (DECAY == Decay::Cautious) {
    // The update has the sign of exp_avg. Both signs are asked for: the product of two small numbers would be zero.
    const V towards_zero = param < 0 ? -exp_avg : exp_avg;
    param = (towards_zero >= 0 ? s.decay_factor * param : param) - s.step_size * exp_avg / denom;
  } else {
    param = s.decay_factor * param - s.step_size * exp_avg / denom;
  }
  return root;
}

// The exponential average of a weight, `param` as its update leaves it.
template <typename V, typename T>
SWD_INLINE V next_average(V ema_param, V param, T ema_weight) {
  return ema_param + ema_weight * (param - ema_param);
}

}  // namespace swd
