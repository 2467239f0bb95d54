#include "passes.h"

#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/util/Exception.h>

#include "chunk_walk.h"
#include "operand.h"

namespace swd {
namespace {

constexpr int SCALARS = 7;  // columns of the table

template <typename T>
Scalars<T> scalars_row(const double* row) {
  const double grad_scale = row[0], beta1 = row[1], beta2 = row[2], bias_correction2 = row[3];
  const double eps = row[4], decay_factor = row[5], step_size = row[6];
  return {static_cast<T>(grad_scale),
          static_cast<T>(1 - beta1),
          static_cast<T>(beta2),
          static_cast<T>(1 - beta2),
          static_cast<T>(1 / std::sqrt(bias_correction2)),
          static_cast<T>(eps),
          static_cast<T>(decay_factor),
          static_cast<T>(step_size)};
}

const double* check_scalars(const Tensor& scalars, size_t tensors) {
  STD_TORCH_CHECK(scalars.scalar_type() == ScalarType::Double && scalars.is_contiguous() &&
                      scalars.numel() == static_cast<int64_t>(tensors) * SCALARS,
                  "swd_fused: scalars must be a contiguous float64 table with ", SCALARS,
                  " columns and a row for each of ", tensors, " tensors");
  return static_cast<const double*>(scalars.data_ptr());
}

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

bool computes_in_double(const View& averaged) { return averaged.dtype == ScalarType::Double; }

Tensor new_float64(const std::vector<int64_t>& sizes) {
  return torch::stable::empty(sizes, ScalarType::Double, std::nullopt,
                              torch::stable::Device(torch::headeronly::DeviceType::CPU));
}

Tensor as_tensor(const std::vector<double>& values) {
  Tensor out = new_float64({static_cast<int64_t>(values.size())});
  std::copy(values.begin(), values.end(), static_cast<double*>(out.data_ptr()));
  return out;
}

// Calls f(begin, n) for each block of a chunk and adds what it returns.
template <typename Sum, typename F>
Sum sum_of_blocks(int64_t begin, int64_t end, const F& f) {
  Sum total{};
  for (int64_t i = begin; i < end; i += BLOCK) total += f(i, std::min(BLOCK, end - i));
  return total;
}

// --- What a chunk of each pass does, in the type T that computes.

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
double max_exp_avg_sq_chunk(const AmsgradOperands& x, const double* row, int64_t begin, int64_t end) {
  const Scalars<T> scalars = scalars_row<T>(row);
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
UpdateSums update_chunk(const UpdateOperands& x, bool amsgrad, const double* row, int64_t begin, int64_t end) {
  const Scalars<T> scalars = scalars_row<T>(row);
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

// A list of tensors that are only read and summed, each by itself.
template <typename F>
Tensor sums_of_each(const TensorList& tensors, const char* name, const F& chunk_sum) {
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
  return as_tensor(walk.sums_by_tensor<double>(Direction::Forward, [&](int64_t t, int64_t begin, int64_t end) {
    return in_double[t] ? chunk_sum(double{}, operands[t], begin, end) : chunk_sum(float{}, operands[t], begin, end);
  }));
}

}  // namespace

Tensor gradient_sums(TensorList grads) {
  return sums_of_each(grads, "grad", [](auto type, const Operand& grad, int64_t begin, int64_t end) {
    return gradient_chunk<decltype(type)>(grad, begin, end);
  });
}

Tensor exp_avg_sq_sums(TensorList exp_avg_sqs) {
  return sums_of_each(exp_avg_sqs, "exp_avg_sq", [](auto type, const Operand& averaged, int64_t begin, int64_t end) {
    return stored_chunk<decltype(type)>(averaged, begin, end);
  });
}

Tensor max_exp_avg_sq_sums(TensorList exp_avg_sqs, TensorList max_exp_avg_sqs, TensorList grads, Tensor scalars) {
  const size_t tensors = grads.size();
  check_length(exp_avg_sqs, tensors, "exp_avg_sqs");
  check_length(max_exp_avg_sqs, tensors, "max_exp_avg_sqs");
  const double* rows = check_scalars(scalars, tensors);
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
  return as_tensor(walk.sums_by_tensor<double>(Direction::Forward, [&](int64_t t, int64_t begin, int64_t end) {
    const double* row = rows + t * SCALARS;
    return operands[t].in_double ? max_exp_avg_sq_chunk<double>(operands[t], row, begin, end)
                                 : max_exp_avg_sq_chunk<float>(operands[t], row, begin, end);
  }));
}

Tensor update_(TensorList params, TensorList exp_avgs, TensorList exp_avg_sqs, TensorList max_exp_avg_sqs,
               TensorList grads, Tensor scalars) {
  const size_t tensors = params.size();
  const bool amsgrad = !max_exp_avg_sqs.empty();
  check_length(exp_avgs, tensors, "exp_avgs");
  check_length(exp_avg_sqs, tensors, "exp_avg_sqs");
  if (amsgrad) check_length(max_exp_avg_sqs, tensors, "max_exp_avg_sqs");
  check_length(grads, tensors, "grads");
  const double* rows = check_scalars(scalars, tensors);

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

  const auto sums = walk.sums_by_tensor<UpdateSums>(Direction::Backward, [&](int64_t t, int64_t begin, int64_t end) {
    const double* row = rows + t * SCALARS;
    return operands[t].in_double ? update_chunk<double>(operands[t], amsgrad, row, begin, end)
                                 : update_chunk<float>(operands[t], amsgrad, row, begin, end);
  });
  const int64_t columns = static_cast<int64_t>(tensors);
  Tensor out = new_float64({2, columns});
  double* averaged_sums = static_cast<double*>(out.data_ptr());
  for (size_t t = 0; t < tensors; ++t) {
    averaged_sums[t] = sums[t].averaged;
    averaged_sums[t + tensors] = sums[t].grad;
  }
  return out;
}

}  // namespace swd
