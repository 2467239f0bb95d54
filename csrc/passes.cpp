#include "passes.h"

#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/util/Exception.h>

#include "chunk_walk.h"
#include "operand.h"
#include "schedule.h"

namespace swd {
namespace {

// --- Checks, all made before anything is written

void check_dtype(const View& view, const char* name) {
  const auto dtype = view.dtype;
  STD_TORCH_CHECK(dtype == ScalarType::Float || dtype == ScalarType::Double || dtype == ScalarType::BFloat16 ||
                      dtype == ScalarType::Half,
                  "swd_fused: ", name, " must be float32, float64, bfloat16 or float16");
}

void check_like(const View& view, const View& like, const char* name) {
  check_dtype(view, name);
  STD_TORCH_CHECK(std::equal(view.sizes.begin(), view.sizes.end(), like.sizes.begin(), like.sizes.end()),
                  "swd_fused: ", name, " must have its parameter's shape");
}

void check_length(const TensorList& list, size_t tensors, const char* name) {
  STD_TORCH_CHECK(list.size() == tensors, "swd_fused: got ", list.size(), " ", name, " for ", tensors, " parameters");
}

// The values of a contiguous tensor of a known dtype with at least `numel` elements.
template <typename T>
T* values(const Tensor& tensor, ScalarType dtype, size_t numel, const char* name) {
  STD_TORCH_CHECK(
      tensor.scalar_type() == dtype && tensor.is_contiguous() && tensor.numel() >= static_cast<int64_t>(numel),
      "swd_fused: ", name, " must be contiguous, of the documented dtype, with at least ", numel, " elements");
  return static_cast<T*>(tensor.data_ptr());
}

// What holds for a tensor of the list: its group and its step count.
class TensorScalars {
 public:
  TensorScalars(size_t tensors, const Tensor& steps, const Tensor& groups, const Tensor& hyper)
      : steps_(values<float>(steps, ScalarType::Float, tensors, "steps")),
        groups_(values<int64_t>(groups, ScalarType::Long, tensors, "groups")),
        hyper_(reinterpret_cast<const Hyper*>(values<double>(hyper, ScalarType::Double, 0, "hyper"))) {
    const int64_t rows = hyper.numel() / static_cast<int64_t>(sizeof(Hyper) / sizeof(double));
    for (size_t t = 0; t < tensors; ++t) {
      STD_TORCH_CHECK(0 <= groups_[t] && groups_[t] < rows, "swd_fused: tensor ", t, " is of group ", groups_[t],
                      ", but hyper has ", rows, " rows");
    }
  }
  const Hyper& hyper(int64_t tensor) const { return hyper_[groups_[tensor]]; }
  double steps_before(int64_t tensor) const { return steps_[tensor]; }
  double step(int64_t tensor) const { return steps_before(tensor) + 1; }

 private:
  const float* steps_;
  const int64_t* groups_;
  const Hyper* hyper_;
};

bool computes_in_double(const View& averaged) { return averaged.dtype == ScalarType::Double; }

// --- Results

Tensor as_tensor(const std::vector<double>& numbers) {
  const std::vector<int64_t> sizes{static_cast<int64_t>(numbers.size())};
  Tensor out = torch::stable::empty(sizes, ScalarType::Double, std::nullopt,
                                    torch::stable::Device(torch::headeronly::DeviceType::CPU));
  std::copy(numbers.begin(), numbers.end(), static_cast<double*>(out.data_ptr()));
  return out;
}

// Calls f(begin, n) for each block of a chunk and adds what it returns.
template <typename Sum, typename F>
Sum sum_of_blocks(int64_t begin, int64_t end, const F& f) {
  Sum total{};
  for (int64_t i = begin; i < end; i += BLOCK) total += f(i, std::min(BLOCK, end - i));
  return total;
}

// --- What a chunk of each pass does, in the type T that computes

template <typename T>
double gradient_chunk(const Operand& grad, int64_t begin, int64_t end) {
  if (const T* array = grad.direct<T>(begin)) return sum_of_squares(array, end - begin);
  T scratch[BLOCK];
  return sum_of_blocks<double>(begin, end,
                               [&](int64_t i, int64_t n) { return sum_of_squares(grad.read(scratch, i, n), n); });
}

template <typename T>
double stored_chunk(const Operand& averaged, int64_t begin, int64_t end) {
  T scratch[BLOCK];
  return sum_of_blocks<double>(begin, end, [&](int64_t i, int64_t n) { return sum(averaged.read(scratch, i, n), n); });
}

struct AmsgradOperands {
  Operand exp_avg_sq, max_exp_avg_sq, grad;
  bool in_double;
};

template <typename T>
double max_exp_avg_sq_chunk(const AmsgradOperands& x, const Scalars<T>& scalars, int64_t begin, int64_t end) {
  T scratch[3][BLOCK];
  return sum_of_blocks<double>(begin, end, [&](int64_t i, int64_t n) {
    return sum_of_next_max(x.exp_avg_sq.read(scratch[0], i, n), x.max_exp_avg_sq.read(scratch[1], i, n),
                           x.grad.read(scratch[2], i, n), n, scalars);
  });
}

struct UpdateOperands {
  Operand param, exp_avg, exp_avg_sq, max_exp_avg_sq, grad;
  bool in_double;
};

template <typename T>
UpdateSums update_chunk(const UpdateOperands& x, bool amsgrad, const Scalars<T>& scalars, int64_t begin, int64_t end) {
  T scratch[5][BLOCK];
  return sum_of_blocks<UpdateSums>(begin, end, [&](int64_t i, int64_t n) {
    UpdateSums sums;
    T* param = x.param.read(scratch[0], i, n);
    T* exp_avg = x.exp_avg.read(scratch[1], i, n);
    T* exp_avg_sq = x.exp_avg_sq.read(scratch[2], i, n);
    const T* grad = x.grad.read(scratch[3], i, n);
    if (amsgrad) {
      T* max_exp_avg_sq = x.max_exp_avg_sq.read(scratch[4], i, n);
      sums = update_block_amsgrad(param, exp_avg, exp_avg_sq, max_exp_avg_sq, grad, n, scalars);
      x.max_exp_avg_sq.write(max_exp_avg_sq, i, n);
    } else {
      sums = update_block(param, exp_avg, exp_avg_sq, grad, n, scalars);
    }
    x.param.write(param, i, n);
    x.exp_avg.write(exp_avg, i, n);
    x.exp_avg_sq.write(exp_avg_sq, i, n);
    return sums;
  });
}

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

}  // namespace

Tensor gradient_sums(TensorList grads, Tensor sums, Tensor steps, Tensor groups, Tensor hyper) {
  const TensorScalars of(grads.size(), steps, groups, hyper);
  const double* before = values<double>(sums, ScalarType::Double, grads.size(), "sums");
  const auto grad_sums = sums_of_each(grads, "grad", [](auto type, const Operand& grad, int64_t begin, int64_t end) {
    return gradient_chunk<decltype(type)>(grad, begin, end);
  });
  double total = 0, carried = 0, fresh = 0;
  for (size_t t = 0; t < grads.size(); ++t) {
    const double beta2 = of.hyper(t).beta2, bias_correction2 = bias_correction(beta2, of.step(t));
    total += grad_sums[t];
    carried += beta2 * before[t] / bias_correction2;
    fresh += (1 - beta2) * grad_sums[t] / bias_correction2;
  }
  return as_tensor({total, carried, fresh});
}

Tensor max_exp_avg_sq_sum(TensorList exp_avg_sqs, TensorList max_exp_avg_sqs, TensorList grads, Tensor steps,
                          Tensor groups, Tensor hyper, std::optional<Tensor> clip) {
  const size_t tensors = grads.size();
  check_length(exp_avg_sqs, tensors, "exp_avg_sqs");
  check_length(max_exp_avg_sqs, tensors, "max_exp_avg_sqs");
  const TensorScalars of(tensors, steps, groups, hyper);
  const double clip_factor = clip ? *values<double>(*clip, ScalarType::Double, 1, "clip") : 1;
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
  const auto sums = walk.sums_by_tensor<double>(Direction::Forward, [&](int64_t t, int64_t begin, int64_t end) {
    const auto chunk = [&](auto type) {
      using T = decltype(type);
      return max_exp_avg_sq_chunk<T>(operands[t], scalars_of<T>(of.hyper(t), of.step(t), clip_factor, 1), begin, end);
    };
    return operands[t].in_double ? chunk(double{}) : chunk(float{});
  });
  double total = 0;
  for (size_t t = 0; t < tensors; ++t) total += sums[t] / bias_correction(of.hyper(t).beta2, of.step(t));
  return as_tensor({total});
}

Tensor last_exp_avg_sq_sum(Tensor sums, Tensor steps, Tensor numels, Tensor groups, Tensor hyper) {
  const size_t tensors = static_cast<size_t>(sums.numel());
  const TensorScalars of(tensors, steps, groups, hyper);
  const double* before = values<double>(sums, ScalarType::Double, tensors, "sums");
  const int64_t* counts = values<int64_t>(numels, ScalarType::Long, tensors, "numels");
  double total = 0, count = 0;
  for (size_t t = 0; t < tensors; ++t) {
    if (of.steps_before(t) == 0) continue;
    total += before[t] / bias_correction(of.hyper(t).beta2, of.steps_before(t));
    count += static_cast<double>(counts[t]);
  }
  return as_tensor({total, count});
}

Tensor update_(TensorList params, TensorList exp_avgs, TensorList exp_avg_sqs, TensorList max_exp_avg_sqs, Tensor sums,
               Tensor steps, TensorList grads, Tensor groups, Tensor hyper, Tensor exp_avg_sq_mean,
               std::optional<Tensor> clip) {
  const size_t tensors = params.size();
  const bool amsgrad = !max_exp_avg_sqs.empty();
  check_length(exp_avgs, tensors, "exp_avgs");
  check_length(exp_avg_sqs, tensors, "exp_avg_sqs");
  if (amsgrad) check_length(max_exp_avg_sqs, tensors, "max_exp_avg_sqs");
  check_length(grads, tensors, "grads");
  const TensorScalars of(tensors, steps, groups, hyper);
  double* next_sums = values<double>(sums, ScalarType::Double, tensors, "sums");
  const double mean = *values<double>(exp_avg_sq_mean, ScalarType::Double, 1, "exp_avg_sq_mean");
  const double clip_factor = clip ? *values<double>(*clip, ScalarType::Double, 1, "clip") : 1;

  ChunkWalk walk(tensors);
  std::vector<UpdateOperands> operands;
  operands.reserve(tensors);
  for (size_t t = 0; t < tensors; ++t) {
    const View param(params[t]), exp_avg(exp_avgs[t]), exp_avg_sq(exp_avg_sqs[t]), grad(grads[t]);
    const View averaged = amsgrad ? View(max_exp_avg_sqs[t]) : exp_avg_sq;
    check_dtype(param, "param");
    check_like(exp_avg, param, "exp_avg");
    check_like(exp_avg_sq, param, "exp_avg_sq");
    check_like(averaged, param, "max_exp_avg_sq");
    check_like(grad, param, "grad");
    walk.add_tensor(param.numel());
    const WalkOrder order(averaged);
    operands.push_back({Operand(param, order), Operand(exp_avg, order), Operand(exp_avg_sq, order),
                        Operand(averaged, order), Operand(grad, order), computes_in_double(averaged)});
  }

  const auto results = walk.sums_by_tensor<UpdateSums>(Direction::Backward, [&](int64_t t, int64_t begin, int64_t end) {
    const Hyper& own = of.hyper(t);
    const auto chunk = [&](auto type) {
      using T = decltype(type);
      const auto scalars = scalars_of<T>(own, of.step(t), clip_factor, decay_factor(mean, own));
      return update_chunk<T>(operands[t], amsgrad, scalars, begin, end);
    };
    return operands[t].in_double ? chunk(double{}) : chunk(float{});
  });

  float* counters = static_cast<float*>(steps.data_ptr());
  double grad_sum = 0;
  for (size_t t = 0; t < tensors; ++t) {
    next_sums[t] = results[t].averaged;
    counters[t] += 1;
    grad_sum += results[t].grad;
  }
  return as_tensor({grad_sum});
}

Tensor exp_avg_sq_sums(TensorList exp_avg_sqs) {
  return as_tensor(
      sums_of_each(exp_avg_sqs, "exp_avg_sq", [](auto type, const Operand& averaged, int64_t begin, int64_t end) {
        return stored_chunk<decltype(type)>(averaged, begin, end);
      }));
}

}  // namespace swd
