// The scalars of a step: what each tensor needs to know besides its elements, from its group and step count.
#pragma once

#include <algorithm>
#include <cmath>

#include "element.h"

namespace swd {

// A row of the `hyper` table, one for each parameter group.
struct Hyper {
  double lr;
  double decay_lr;  // what takes its place before the decay
  double beta1, beta2, eps;
  double weight_decay, max_decay;  // the paper's
  double sign;                     // -1 to maximize
  double decoupled_decay;          // AdamW's, or independent of the learning rate
  double l2;                       // Adam's
  double corrects_bias;            // 1 or 0
  double cautious;                 // 1 or 0
  double ema_decay;                // of averages of weights; 1 where there are none
  double ema_warmup;               // 1 or 0
};

inline double bias_correction(double beta, double step, const Hyper& hyper) {
  return 1 - hyper.corrects_bias * std::pow(beta, step);
}

// Returns the mean of v^ over `numel` elements, from the sums between the passes: `carried` comes from the steps
// before, `fresh` from this step's gradients before they are multiplied by `grad_factor`.
inline double mean_of_sums(double carried, double fresh, double grad_factor, double numel) {
  return (carried + grad_factor * grad_factor * fresh) / std::max(1.0, numel);
}

// Returns the factor that weights are multiplied by. A mean of zero (no gradient but zeros so far) decays nothing; nor
// does NaN, which would spread to all weights.
inline double decay_factor(double exp_avg_sq_mean, const Hyper& hyper) {
  const double decoupled = hyper.decay_lr * hyper.decoupled_decay;
  if (!(exp_avg_sq_mean > 0)) return 1 - decoupled;
  const double scheduled = hyper.decay_lr * hyper.weight_decay / (std::sqrt(exp_avg_sq_mean) + hyper.eps);
  return 1 - std::min(scheduled, hyper.max_decay) - decoupled;
}

// Returns the clipping factor of torch.nn.utils.clip_grad_norm_, its 1e-6 included. A NaN norm gives NaN.
inline double clip_factor(double grad_norm, double max_grad_norm) {
  const double factor = max_grad_norm / (grad_norm + 1e-6);
  return factor > 1 ? 1 : factor;
}

// 1 - ema_decay, or more in the first steps.
inline double ema_weight(const Hyper& hyper, double step) {
  if (hyper.ema_warmup == 0) return 1 - hyper.ema_decay;
  return 1 - std::min(hyper.ema_decay, (1 + step) / (10 + step));
}

inline Scalars<double> scalars_of(const Hyper& hyper, double step, double grad_factor, double decay_factor) {
  const bool from_grad = hyper.beta1 <= 0.5;
  return {hyper.sign * grad_factor,
          hyper.l2,
          from_grad ? -hyper.beta1 : 1 - hyper.beta1,
          hyper.beta2,
          1 - hyper.beta2,
          1 / std::sqrt(bias_correction(hyper.beta2, step, hyper)),
          hyper.eps,
          decay_factor,
          hyper.lr / bias_correction(hyper.beta1, step, hyper),
          ema_weight(hyper, step),
          from_grad,
          hyper.cautious != 0};
}

}  // namespace swd
