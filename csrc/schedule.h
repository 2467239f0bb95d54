// The scalars of a step: what each tensor needs to know besides its elements, from its group and step count.
#pragma once

#include <algorithm>
#include <cmath>

#include "adams_element.h"

namespace swd {

// A row of the `hyper` table, one for each parameter group.
struct Hyper {
  double lr, beta1, beta2, eps, weight_decay, max_decay, sign;  // sign is -1 to maximize
};

inline double bias_correction(double beta, double step) { return 1 - std::pow(beta, step); }

// What weights are multiplied by. A mean of zero (no gradient but zeros so far) decays nothing; nor does NaN, which
// would spread to all weights.
inline double decay_factor(double exp_avg_sq_mean, const Hyper& hyper) {
  if (!(exp_avg_sq_mean > 0)) return 1;
  return 1 - std::min(hyper.lr * hyper.weight_decay / (std::sqrt(exp_avg_sq_mean) + hyper.eps), hyper.max_decay);
}

// As torch.nn.utils.clip_grad_norm_ has it, its 1e-6 included. Written so that a NaN norm gives NaN.
inline double clip_factor(double grad_sum, double max_grad_norm) {
  const double factor = max_grad_norm / (std::sqrt(grad_sum) + 1e-6);
  return factor > 1 ? 1 : factor;
}

template <typename T>
Scalars<T> scalars_of(const Hyper& hyper, double step, double clip, double decay_factor) {
  return {static_cast<T>(hyper.sign * clip),
          static_cast<T>(1 - hyper.beta1),
          static_cast<T>(hyper.beta2),
          static_cast<T>(1 - hyper.beta2),
          static_cast<T>(1 / std::sqrt(bias_correction(hyper.beta2, step))),
          static_cast<T>(hyper.eps),
          static_cast<T>(decay_factor),
          static_cast<T>(hyper.lr / bias_correction(hyper.beta1, step))};
}

}  // namespace swd
