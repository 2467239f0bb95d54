#include "passes.h"

#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/util/Exception.h>

#include <cmath>
#include <numeric>
#include <utility>

#include "chunk_walk.h"
#include "chunks.h"
#include "operand.h"
#include "schedule.h"
#include "tensor_scalars.h"

namespace swd {
namespace {

// --- Results

Tensor as_tensor(const std::vector<double>& numbers) {
  const std::vector<int64_t> sizes{static_cast<int64_t>(numbers.size())};
  Tensor out = torch::stable::empty(sizes, ScalarType::Double, std::nullopt,
                                    torch::stable::Device(torch::headeronly::DeviceType::CPU));
  std::copy(numbers.begin(), numbers.end(), static_cast<double*>(out.data_ptr()));
  return out;
}

double sum_of(const std::vector<double>& numbers) { return std::accumulate(numbers.begin(), numbers.end(), 0.0); }

// Pass 1 of amsgrad over operands that are ready: the sum of v^ after the step.
template <typename Operands>
double max_exp_avg_sq_hat_sum(const ChunkWalk& walk, const std::vector<Operands>& operands, const TensorScalars& of,
                              double clip) {
  const auto sums = walk.sums_by_tensor<double>(Direction::Forward, [&](int64_t t, int64_t begin, int64_t end) {
    const auto chunk = [&](auto type) {
      using T = decltype(type);
      return max_exp_avg_sq_chunk<T>(operands[t], scalars_of<T>(of.hyper(t), of.step(t), clip, 1), begin, end);
    };
    return operands[t].in_double ? chunk(double{}) : chunk(float{});
  });
  double total = 0;
  for (size_t t = 0; t < operands.size(); ++t)
    total += sums[t] / bias_correction(of.hyper(t).beta2, of.step(t), of.hyper(t));
  return total;
}

// What pass 1 makes of the sums of grad^2.
struct GradientSums {
  double grad = 0, carried = 0, fresh = 0;

  GradientSums(const std::vector<double>& grad_sums, const double* sums, const TensorScalars& of) {
    for (size_t t = 0; t < grad_sums.size(); ++t) {
      const double beta2 = of.hyper(t).beta2, bias_correction2 = bias_correction(beta2, of.step(t), of.hyper(t));
      grad += grad_sums[t];
      carried += beta2 * sums[t] / bias_correction2;
      fresh += (1 - beta2) * grad_sums[t] / bias_correction2;
    }
  }
};

// By tensor, for tensors that are only read, each by itself.
template <typename F>
std::vector<double> sums_of_each(const TensorList& tensors, const char* name, const F& chunk_sum) {
  ChunkWalk walk(tensors.size());
  std::vector<Operand> operands;
  std::vector<bool> in_double;
  operands.reserve(tensors.size());
  for (const Tensor& tensor : tensors) {
    const View view(tensor);
    check_dtype(view, name);
    walk.add_tensor(view.numel());
    operands.emplace_back(view, WalkOrder(view));
    in_double.push_back(computes_in_double(view));
  }
  return walk.sums_by_tensor<double>(Direction::Forward, [&](int64_t t, int64_t begin, int64_t end) {
    return in_double[t] ? chunk_sum(double{}, operands[t], begin, end) : chunk_sum(float{}, operands[t], begin, end);
  });
}

// Everything that pass 2 reads and writes, checked.
class UpdateWalk {
 public:
  UpdateWalk(const TensorList& params, const TensorList& exp_avgs, const TensorList& exp_avg_sqs,
             const TensorList& max_exp_avg_sqs, const TensorList& masters, const TensorList& grads)
      : walk_(params.size()), amsgrad_(!max_exp_avg_sqs.empty()) {
    const size_t tensors = params.size();
    check_length(exp_avgs, tensors, "exp_avgs");
    check_length(exp_avg_sqs, tensors, "exp_avg_sqs");
    if (amsgrad_) check_length(max_exp_avg_sqs, tensors, "max_exp_avg_sqs");
    if (!masters.empty()) check_length(masters, tensors, "masters");
    check_length(grads, tensors, "grads");
    operands_.reserve(tensors);
    for (size_t t = 0; t < tensors; ++t) {
      const View param(params[t]), exp_avg(exp_avgs[t]), exp_avg_sq(exp_avg_sqs[t]), grad(grads[t]);
      const View averaged = amsgrad_ ? View(max_exp_avg_sqs[t]) : exp_avg_sq;
      check_dtype(param, "param");
      check_like(exp_avg, param, "exp_avg");
      check_like(exp_avg_sq, param, "exp_avg_sq");
      check_like(averaged, param, "max_exp_avg_sq");
      check_like(grad, param, "grad");
      walk_.add_tensor(param.numel());
      numel_ += param.numel();
      const WalkOrder order(averaged);
      std::optional<Operand> master;
      if (!masters.empty()) {
        const View view(masters[t]);
        check_like(view, param, "master");
        master.emplace(view, order);
      }
      operands_.push_back({Operand(param, order), Operand(exp_avg, order), Operand(exp_avg_sq, order),
                           Operand(averaged, order), Operand(grad, order), std::move(master),
                           computes_in_double(averaged)});
    }
  }

  bool amsgrad() const { return amsgrad_; }
  int64_t numel() const { return numel_; }

  std::vector<double> gradient_sums() const {
    return walk_.sums_by_tensor<double>(Direction::Forward, [&](int64_t t, int64_t begin, int64_t end) {
      const Operand& grad = operands_[t].grad;
      return grad.is_double() ? gradient_chunk<double>(grad, begin, end) : gradient_chunk<float>(grad, begin, end);
    });
  }

  double max_exp_avg_sq_hat_sum(const TensorScalars& of, double clip) const {
    return swd::max_exp_avg_sq_hat_sum(walk_, operands_, of, clip);
  }

  // Advances `sums` and `steps` too. Returns the sum of grad^2.
  double update(double* sums, float* steps, const TensorScalars& of, double exp_avg_sq_mean, double clip,
                const Rounding& rounding) const {
    const auto results =
        walk_.sums_by_tensor<UpdateSums>(Direction::Backward, [&](int64_t t, int64_t begin, int64_t end) {
          const Hyper& hyper = of.hyper(t);
          const auto chunk = [&](auto type) {
            using T = decltype(type);
            const auto scalars = scalars_of<T>(hyper, of.step(t), clip, decay_factor(exp_avg_sq_mean, hyper));
            return update_chunk<T>(operands_[t], amsgrad_, scalars, rounding.key(t, of.step(t)), begin, end);
          };
          return operands_[t].in_double ? chunk(double{}) : chunk(float{});
        });
    double grad_sum = 0;
    for (size_t t = 0; t < results.size(); ++t) {
      sums[t] = results[t].averaged;
      steps[t] += 1;
      grad_sum += results[t].grad;
    }
    return grad_sum;
  }

 private:
  ChunkWalk walk_;
  bool amsgrad_;
  int64_t numel_ = 0;
  std::vector<UpdateOperands> operands_;
};

// Over the tensors that have taken a step: the sum of v^ as the step before left it, and its count.
struct LastSums {
  double total = 0, count = 0;

  LastSums(const double* sums, const int64_t* numels, size_t tensors, const TensorScalars& of) {
    for (size_t t = 0; t < tensors; ++t) {
      if (of.steps_before(t) == 0) continue;
      total += sums[t] / bias_correction(of.hyper(t).beta2, of.steps_before(t), of.hyper(t));
      count += static_cast<double>(numels[t]);
    }
  }
};

}  // namespace

Tensor gradient_sums(TensorList grads, Tensor sums, Tensor steps, Tensor groups, Tensor hyper) {
  const TensorScalars of(grads.size(), steps, groups, hyper);
  const double* before = values<double>(sums, ScalarType::Double, grads.size(), "sums");
  const auto grad_sums = sums_of_each(grads, "grad", [](auto type, const Operand& grad, int64_t begin, int64_t end) {
    return gradient_chunk<decltype(type)>(grad, begin, end);
  });
  const GradientSums result(grad_sums, before, of);
  return as_tensor({result.grad, result.carried, result.fresh});
}

Tensor max_exp_avg_sq_sum(TensorList exp_avg_sqs, TensorList max_exp_avg_sqs, TensorList grads, Tensor steps,
                          Tensor groups, Tensor hyper, std::optional<Tensor> grad_factor) {
  const size_t tensors = grads.size();
  check_length(exp_avg_sqs, tensors, "exp_avg_sqs");
  check_length(max_exp_avg_sqs, tensors, "max_exp_avg_sqs");
  const TensorScalars of(tensors, steps, groups, hyper);
  const double factor = grad_factor ? *values<double>(*grad_factor, ScalarType::Double, 1, "grad_factor") : 1;
  ChunkWalk walk(tensors);
  std::vector<AmsgradOperands> operands;
  operands.reserve(tensors);
  for (size_t t = 0; t < tensors; ++t) {
    const View grad(grads[t]), exp_avg_sq(exp_avg_sqs[t]), max_exp_avg_sq(max_exp_avg_sqs[t]);
    check_dtype(grad, "grad");
    check_like(exp_avg_sq, grad, "exp_avg_sq");
    check_like(max_exp_avg_sq, grad, "max_exp_avg_sq");
    walk.add_tensor(grad.numel());
    const WalkOrder order(max_exp_avg_sq);
    operands.push_back({Operand(exp_avg_sq, order), Operand(max_exp_avg_sq, order), Operand(grad, order),
                        computes_in_double(max_exp_avg_sq)});
  }
  return as_tensor({max_exp_avg_sq_hat_sum(walk, operands, of, factor)});
}

Tensor last_exp_avg_sq_sum(Tensor sums, Tensor steps, Tensor numels, Tensor groups, Tensor hyper) {
  const size_t tensors = static_cast<size_t>(sums.numel());
  const LastSums last(values<double>(sums, ScalarType::Double, tensors, "sums"),
                      values<int64_t>(numels, ScalarType::Long, tensors, "numels"), tensors,
                      TensorScalars(tensors, steps, groups, hyper));
  return as_tensor({last.total, last.count});
}

Tensor update_(TensorList params, TensorList exp_avgs, TensorList exp_avg_sqs, TensorList max_exp_avg_sqs,
               TensorList masters, Tensor sums, Tensor steps, TensorList grads, Tensor groups, Tensor tensor_ids,
               Tensor hyper, Tensor exp_avg_sq_mean, std::optional<Tensor> grad_factor, std::optional<Tensor> skip,
               std::optional<int64_t> rounding_seed) {
  const UpdateWalk walk(params, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, masters, grads);
  const TensorScalars of(params.size(), steps, groups, hyper);
  const Rounding rounding(rounding_seed, tensor_ids, params.size());
  double* next_sums = values<double>(sums, ScalarType::Double, params.size(), "sums");
  const double mean = *values<double>(exp_avg_sq_mean, ScalarType::Double, 1, "exp_avg_sq_mean");
  const double factor = grad_factor ? *values<double>(*grad_factor, ScalarType::Double, 1, "grad_factor") : 1;
  if (skip && *values<double>(*skip, ScalarType::Double, 1, "skip") != 0) {
    return as_tensor({sum_of(walk.gradient_sums())});
  }
  return as_tensor({walk.update(next_sums, static_cast<float*>(steps.data_ptr()), of, mean, factor, rounding)});
}

Tensor step_(TensorList params, TensorList exp_avgs, TensorList exp_avg_sqs, TensorList max_exp_avg_sqs,
             TensorList masters, Tensor sums, Tensor steps, TensorList grads, Tensor numels, Tensor groups,
             Tensor tensor_ids, Tensor hyper, std::optional<double> max_grad_norm, bool lagged,
             std::optional<Tensor> grad_scale, std::optional<Tensor> found_inf, bool skip_nonfinite,
             std::optional<int64_t> rounding_seed) {
  const size_t tensors = params.size();
  const UpdateWalk walk(params, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, masters, grads);
  const TensorScalars of(tensors, steps, groups, hyper);
  const Rounding rounding(rounding_seed, tensor_ids, tensors);
  double* sums_ = values<double>(sums, ScalarType::Double, tensors, "sums");
  const int64_t* counts = values<int64_t>(numels, ScalarType::Long, tensors, "numels");
  const double unscale = grad_scale ? 1.0 / *values<float>(*grad_scale, ScalarType::Float, 1, "grad_scale") : 1;
  bool skip = found_inf && *values<float>(*found_inf, ScalarType::Float, 1, "found_inf") != 0;
  double factor = unscale, exp_avg_sq_mean = 0, grad_norm = 0;
  if (lagged) {
    const LastSums last(sums_, counts, tensors, of);
    exp_avg_sq_mean = last.total / std::max(1.0, last.count);
    if (skip) grad_norm = unscale * std::sqrt(sum_of(walk.gradient_sums()));
  } else {
    const GradientSums pass1(walk.gradient_sums(), sums_, of);
    grad_norm = unscale * std::sqrt(pass1.grad);
    if (max_grad_norm) factor *= clip_factor(grad_norm, *max_grad_norm);
    const double hat_sum =
        walk.amsgrad() ? walk.max_exp_avg_sq_hat_sum(of, factor) : pass1.carried + factor * factor * pass1.fresh;
    exp_avg_sq_mean = hat_sum / static_cast<double>(std::max<int64_t>(1, walk.numel()));
    skip = skip || (skip_nonfinite && !std::isfinite(grad_norm));
  }
  if (!skip) {
    const double updated =
        walk.update(sums_, static_cast<float*>(steps.data_ptr()), of, exp_avg_sq_mean, factor, rounding);
    if (lagged) grad_norm = unscale * std::sqrt(updated);
  }
  return as_tensor({exp_avg_sq_mean, grad_norm, skip ? 1.0 : 0.0});
}

Tensor exp_avg_sq_sums(TensorList exp_avg_sqs) {
  return as_tensor(
      sums_of_each(exp_avg_sqs, "exp_avg_sq", [](auto type, const Operand& averaged, int64_t begin, int64_t end) {
        return stored_chunk<decltype(type)>(averaged, begin, end);
      }));
}

}  // namespace swd
