#include "passes.h"

#include <cmath>
#include <numeric>

#include "../schedule.h"
#include "arguments.h"
#include "segment_walk.h"
#include "segments.h"
#include "staged.h"
#include "tensor_scalars.h"

namespace swd {
namespace {

Tensor results(const std::vector<double>& numbers) { return as_tensor(numbers, ScalarType::Double); }

double sum_of(const std::vector<double>& numbers) { return std::accumulate(numbers.begin(), numbers.end(), 0.0); }

// The results of pass 1.
struct GradientSums {
  double grad = 0, carried = 0, fresh = 0;

  GradientSums(const std::vector<double>& grad_sums, const std::vector<Operands>& operands, const double* sums,
               const TensorScalars& by_tensor) {
    const auto bias_corrections2 = by_tensor.bias_corrections2();
    for (size_t t = 0; t < grad_sums.size(); ++t) {
      if (!operands[t].has_grad) continue;
      const double beta2 = by_tensor.hyper(t).beta2;
      grad += grad_sums[t];
      carried += beta2 * sums[t] / bias_corrections2[t];
      fresh += (1 - beta2) * grad_sums[t] / bias_corrections2[t];
    }
  }
};

// Over the tensors that have taken a step: the sum of v^ as the step before left it, and its count.
struct LastSums {
  double total = 0, count = 0;

  LastSums(const double* sums, const std::vector<Operands>& operands, const TensorScalars& by_tensor) {
    const auto bias_corrections2 =
        by_tensor.each([](const Hyper& hyper, double before) { return bias_correction(hyper.beta2, before, hyper); });
    for (size_t t = 0; t < operands.size(); ++t) {
      if (by_tensor.steps_before(t) == 0) continue;
      total += sums[t] / bias_corrections2[t];
      count += static_cast<double>(operands[t].numel);
    }
  }
};

// Calls f(begin, end) for each segment, and stores the results.
template <typename Sum, typename F>
void for_each_segment(const SegmentWalk::Segments& segments, Sum* sums, const F& f,
                      Direction direction = Direction::Forward) {
  const int64_t count = (segments.end - segments.begin + SegmentWalk::SEGMENT - 1) / SegmentWalk::SEGMENT;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t segment = direction == Direction::Forward ? i : count - 1 - i;
    const int64_t begin = segments.begin + segment * SegmentWalk::SEGMENT;
    sums[segment] = f(begin, std::min(begin + SegmentWalk::SEGMENT, segments.end));
  }
}

// The elements of some segments. Where moments are codes, segments count blocks.
struct ElementRange {
  int64_t begin, end;

  ElementRange(const SegmentWalk::Segments& segments, int64_t columns) : begin(segments.begin), end(segments.end) {
    if (!columns) return;
    const int64_t width = walked_width(columns);
    begin = first_element(columns, begin / width);
    end = first_element(columns, end / width);
  }
};

// The passes over all elements.
class Walk {
 public:
  explicit Walk(const Tensor& description) : Walk(OperandsReader(description)) {}

  size_t size() const { return operands_.size(); }
  bool amsgrad() const { return amsgrad_; }
  const std::vector<Operands>& operands() const { return operands_; }
  TensorScalars scalars(const Tensor& steps, const Tensor& hyper) const { return {size(), groups_, steps, hyper}; }
  Rounding rounding(int64_t seed) const { return {seed, tensor_ids_}; }

  // Elements that have a gradient.
  int64_t count() const {
    const auto& numels = elements_.numels();
    return std::accumulate(numels.begin(), numels.end(), int64_t{0});
  }

  // Returns the cost of a step of all tensors, in elements.
  int64_t cost() const { return elements_.cost(); }

  std::vector<double> gradient_sums(Team& team) const {
    return elements_.sums_by_tensor<double>(team, Direction::Forward, [&](const Segments& segments, double* sums) {
      const StagedOperand staged(operands_[segments.tensor].grad_in_memory_order(), segments.begin, segments.end);
      const Operand& grad = staged.operand();
      for_each_segment(segments, sums, [&](int64_t begin, int64_t end) {
        return grad.is_double() ? gradient_segment<double>(grad, begin, end)
                                : gradient_segment<float>(grad, begin, end);
      });
    });
  }

  double max_exp_avg_sq_hat_sum(Team& team, const TensorScalars& by_tensor, double grad_factor) const {
    const auto scalars = by_tensor.each(
        [&](const Hyper& hyper, double before) { return scalars_of(hyper, before + 1, grad_factor, 1); });
    const auto sums =
        updates_.sums_by_tensor<double>(team, Direction::Forward, [&](const Segments& segments, double* sums) {
          const Staged staged = stage(segments);
          const Operands& x = staged.operands();
          const Scalars<double>& own = scalars[segments.tensor];
          for_each_segment(segments, sums, [&](int64_t begin, int64_t end) {
            if (x.coded) return max_exp_avg_sq_coded_segment(x, own.as<float>(), begin, end);
            return x.in_double ? max_exp_avg_sq_segment<double>(x, own, begin, end)
                               : max_exp_avg_sq_segment<float>(x, own.as<float>(), begin, end);
          });
        });
    const auto bias_corrections2 = by_tensor.bias_corrections2();
    double total = 0;
    for (size_t t = 0; t < sums.size(); ++t) total += sums[t] / bias_corrections2[t];
    return total;
  }

  // Advances `sums` and `steps` too. Returns the sum of grad^2.
  double update(Team& team, double* sums, float* steps, const TensorScalars& by_tensor, double exp_avg_sq_mean,
                double grad_factor, const Rounding& rounding) const {
    const auto scalars = by_tensor.each([&](const Hyper& hyper, double before) {
      return scalars_of(hyper, before + 1, grad_factor, decay_factor(exp_avg_sq_mean, hyper));
    });
    const auto emitted =
        updates_.sums_by_tensor<UpdateSums>(team, Direction::Backward, [&](const Segments& segments, UpdateSums* sums) {
          const Staged staged = stage(segments);
          const Operands& x = staged.operands();
          const Scalars<double>& own = scalars[segments.tensor];
          const uint32_t moments_key = rounding.key(segments.tensor, by_tensor.step(segments.tensor));
          const RoundingKey key = x.numbers ? RoundingKey(moments_key) : std::nullopt;
          for_each_segment(
              segments, sums,
              [&](int64_t begin, int64_t end) {
                if (x.coded) return update_coded_segment(x, amsgrad_, own.as<float>(), moments_key, key, begin, end);
                return x.in_double ? update_segment<double>(x, amsgrad_, own, key, begin, end)
                                   : update_segment<float>(x, amsgrad_, own.as<float>(), key, begin, end);
              },
              Direction::Backward);
          staged.write_back();
        });
    double grad_sum = 0;
    for (size_t t = 0; t < emitted.size(); ++t) {
      if (!operands_[t].has_grad) continue;
      sums[t] = emitted[t].averaged;
      steps[t] += 1;
      grad_sum += emitted[t].grad;
    }
    return grad_sum;
  }

 private:
  explicit Walk(OperandsReader reader)
      : elements_(reader.size()),
        updates_(reader.size()),
        amsgrad_(reader.amsgrad()),
        groups_(reader.groups()),
        tensor_ids_(reader.tensor_ids()) {
    operands_.reserve(reader.size());
    for (size_t t = 0; t < reader.size(); ++t) {
      operands_.push_back(reader.next());
      const Operands& x = operands_.back();
      elements_.add_tensor(x.has_grad ? x.numel : 0);
      const int64_t at_once =
          std::clamp((x.elements_at_once + SEGMENT - 1) / SEGMENT, int64_t{1}, MOST_SEGMENTS_AT_ONCE);
      updates_.add_tensor(!x.has_grad ? 0 : x.coded ? walked_numel(x.numel, x.coded->columns) : x.numel, at_once);
    }
  }

  using Segments = SegmentWalk::Segments;
  static constexpr int64_t SEGMENT = SegmentWalk::SEGMENT;

  // Copies of more, 4 MB of floats, would not stay in the cache.
  static constexpr int64_t MOST_SEGMENTS_AT_ONCE = 32;

  Staged stage(const Segments& segments) const {
    const Operands& x = operands_[segments.tensor];
    const ElementRange range(segments, x.coded ? x.coded->columns : 0);
    return Staged(x, range.begin, range.end);
  }

  SegmentWalk elements_, updates_;  // over elements; over elements, and in place of coded ones over their blocks
  bool amsgrad_;
  const int64_t *groups_, *tensor_ids_;
  std::vector<Operands> operands_;
};

}  // namespace

Tensor gradient_sums(Tensor description, Tensor sums, Tensor steps, Tensor hyper) {
  const Walk walk(description);
  const TensorScalars by_tensor = walk.scalars(steps, hyper);
  const double* before = values<double>(sums, ScalarType::Double, walk.size(), "sums");
  std::vector<double> squares;
  Team::run(walk.cost(), [&](Team& team) { squares = walk.gradient_sums(team); });
  const GradientSums result(squares, walk.operands(), before, by_tensor);
  return results({result.grad, result.carried, result.fresh});
}

Tensor max_exp_avg_sq_sum(Tensor description, Tensor steps, Tensor hyper, std::optional<Tensor> grad_factor) {
  const Walk walk(description);
  const TensorScalars by_tensor = walk.scalars(steps, hyper);
  const double factor = grad_factor ? *values<double>(*grad_factor, ScalarType::Double, 1, "grad_factor") : 1;
  double sum = 0;
  Team::run(walk.cost(), [&](Team& team) { sum = walk.max_exp_avg_sq_hat_sum(team, by_tensor, factor); });
  return results({sum});
}

Tensor last_exp_avg_sq_sum(Tensor description, Tensor sums, Tensor steps, Tensor hyper) {
  const Walk walk(description);
  const LastSums last(values<double>(sums, ScalarType::Double, walk.size(), "sums"), walk.operands(),
                      walk.scalars(steps, hyper));
  return results({last.total, last.count});
}

Tensor update_(Tensor sums, Tensor steps, Tensor description, Tensor hyper, Tensor exp_avg_sq_mean,
               std::optional<Tensor> grad_factor, std::optional<Tensor> skip, int64_t seed) {
  const Walk walk(description);
  const TensorScalars by_tensor = walk.scalars(steps, hyper);
  const Rounding rounding = walk.rounding(seed);
  double* next_sums = values<double>(sums, ScalarType::Double, walk.size(), "sums");
  const double mean = *values<double>(exp_avg_sq_mean, ScalarType::Double, 1, "exp_avg_sq_mean");
  const double factor = grad_factor ? *values<double>(*grad_factor, ScalarType::Double, 1, "grad_factor") : 1;
  const bool skips = skip && *values<double>(*skip, ScalarType::Double, 1, "skip") != 0;
  double grad_sum = 0;
  Team::run(walk.cost(), [&](Team& team) {
    grad_sum =
        skips ? sum_of(walk.gradient_sums(team))
              : walk.update(team, next_sums, static_cast<float*>(steps.data_ptr()), by_tensor, mean, factor, rounding);
  });
  return results({grad_sum});
}

Tensor step_(Tensor sums, Tensor steps, Tensor description, Tensor hyper, std::optional<double> max_grad_norm,
             bool lagged, std::optional<Tensor> grad_scale, std::optional<Tensor> found_inf, bool skip_nonfinite,
             int64_t seed) {
  const Walk walk(description);
  const TensorScalars by_tensor = walk.scalars(steps, hyper);
  const Rounding rounding = walk.rounding(seed);
  double* sums_ = values<double>(sums, ScalarType::Double, walk.size(), "sums");
  const double unscale = grad_scale ? 1.0 / *values<float>(*grad_scale, ScalarType::Float, 1, "grad_scale") : 1;
  bool skip = found_inf && *values<float>(*found_inf, ScalarType::Float, 1, "found_inf") != 0;
  double factor = unscale, mean = 0, grad_norm = 0;
  Team::run(walk.cost(), [&](Team& team) {
    if (lagged) {
      const LastSums last(sums_, walk.operands(), by_tensor);
      mean = mean_of_sums(last.total, 0, 1, last.count);
      if (skip) grad_norm = unscale * std::sqrt(sum_of(walk.gradient_sums(team)));
    } else {
      const GradientSums pass1(walk.gradient_sums(team), walk.operands(), sums_, by_tensor);
      grad_norm = unscale * std::sqrt(pass1.grad);
      if (max_grad_norm) factor *= clip_factor(grad_norm, *max_grad_norm);
      const double numel = static_cast<double>(walk.count());
      mean = walk.amsgrad() ? mean_of_sums(walk.max_exp_avg_sq_hat_sum(team, by_tensor, factor), 0, 1, numel)
                            : mean_of_sums(pass1.carried, pass1.fresh, factor, numel);
      skip = skip || (skip_nonfinite && !std::isfinite(grad_norm));
    }
    if (!skip) {
      float* counts = static_cast<float*>(steps.data_ptr());
      const double updated = walk.update(team, sums_, counts, by_tensor, mean, factor, rounding);
      if (lagged) grad_norm = unscale * std::sqrt(updated);
    }
  });
  return results({mean, grad_norm, skip ? 1.0 : 0.0});
}

Tensor exp_avg_sq_sums(TensorList averaged, TensorList scales, std::vector<int64_t> columns) {
  STD_TORCH_CHECK(columns.empty() || (scales.size() == averaged.size() && columns.size() == averaged.size()),
                  "swd_fused: scales and columns must be empty or as many as averaged");
  SegmentWalk walk(averaged.size());
  std::vector<std::vector<Run>> runs;
  std::vector<Operand> operands;
  std::vector<CodedMoments> coded;
  for (size_t t = 0; t < averaged.size(); ++t) {
    const View view(averaged[t]);
    const bool is_coded = !columns.empty() && columns[t];
    if (view.dtype != ScalarType::Byte || !is_coded) check_dtype(view, "exp_avg_sq");
    walk.add_tensor(is_coded ? walked_numel(view.numel(), columns[t]) : view.numel());
    float* root_scales = is_coded ? static_cast<float*>(scales[t].data_ptr()) : nullptr;
    coded.push_back({{nullptr, nullptr, nullptr, root_scales}, is_coded ? columns[t] : 0, 0, 0});
    runs.push_back(runs_of(view, is_coded ? WalkOrder::along_rows() : WalkOrder(view)));
    operands.emplace_back(view.data, view.dtype, Positions(runs.back().data(), runs.back().size()));
  }
  std::vector<double> sums;
  Team::run(walk.cost(), [&](Team& team) {
    sums = walk.sums_by_tensor<double>(team, Direction::Forward, [&](const auto& segments, double* slots) {
      const int64_t t = segments.tensor;
      const CodedMoments& codes = coded[t];
      const ElementRange range(segments, codes.columns);
      const StagedOperand staged(operands[t], range.begin, range.end);
      const Operand& x = staged.operand();
      for_each_segment(segments, slots, [&](int64_t begin, int64_t end) {
        if (codes.columns) return stored_coded_segment(x, codes, begin, end);
        return x.is_double() ? stored_segment<double>(x, begin, end) : stored_segment<float>(x, begin, end);
      });
    });
  });
  return results(sums);
}

}  // namespace swd
