#include "operands.h"

#include <torch/headeronly/util/Exception.h>

#include <algorithm>

#include "arguments.h"
#include "layout_copy.h"

namespace swd {
namespace {

class Writer {
 public:
  Writer() { number(0); }  // for the length

  void number(int64_t value) { numbers_.push_back(value); }

  void list(const int64_t* values, size_t count) { numbers_.insert(numbers_.end(), values, values + count); }

  void addresses(const TensorList& tensors) {
    for (const Tensor& tensor : tensors) number(reinterpret_cast<int64_t>(tensor.data_ptr()));
  }

  void layout(const View& view, const WalkOrder& order) {
    number(static_cast<int64_t>(view.dtype));
    positions(view, order);
  }

  void positions(const View& view, const WalkOrder& order) {
    const std::vector<Run> runs = runs_of(view, order);
    number(static_cast<int64_t>(runs.size()));
    for (const Run& run : runs) {
      number(run.size);
      number(run.stride);
    }
    room_for_runs_ += 2 * (view.dim() - static_cast<int64_t>(runs.size()));
  }

  // Its length follows from the tensors' dimensions, whatever their strides are: tracing must be able to tell.
  Tensor tensor() {
    numbers_.resize(numbers_.size() + room_for_runs_);
    numbers_[0] = static_cast<int64_t>(numbers_.size());
    return as_tensor(numbers_, ScalarType::Long);
  }

 private:
  int64_t room_for_runs_ = 0;
  std::vector<int64_t> numbers_;
};

void check_like(const View& view, const View& like, const char* name, bool is_integer) {
  if (!is_integer) check_dtype(view, name);
  STD_TORCH_CHECK(std::equal(view.sizes.begin(), view.sizes.end(), like.sizes.begin(), like.sizes.end()),
                  "swd_fused: ", name, " must have its parameter's shape");
}

// Codes have scales, and are row-major. Returns the number of columns of the tensor as a matrix of rows, or 0.
int64_t coded_columns(const Tensor& exp_avg, const Tensor& exp_avg_sq, const Tensor& exp_avg_scales,
                      const Tensor& exp_avg_sq_scales) {
  if (exp_avg_sq.scalar_type() != ScalarType::Byte) return 0;
  const View view(exp_avg_sq);
  STD_TORCH_CHECK(exp_avg.scalar_type() == ScalarType::Char && exp_avg.is_contiguous() && exp_avg_sq.is_contiguous(),
                  "swd_fused: codes must be contiguous, int8 for exp_avg and uint8 for exp_avg_sq");
  // A shard may have no rows.
  const int64_t rows = view.dim() > 1 ? view.sizes[0] : 1;
  int64_t columns = view.dim() > 1 ? 1 : view.numel();
  for (int64_t d = 1; d < view.dim(); ++d) columns *= view.sizes[d];
  const int64_t blocks = rows * ((columns + CODE_BLOCK - 1) / CODE_BLOCK);
  for (const Tensor& scales : {exp_avg_scales, exp_avg_sq_scales}) {
    STD_TORCH_CHECK(scales.scalar_type() == ScalarType::Float && scales.is_contiguous() && scales.numel() == blocks,
                    "swd_fused: scales must be contiguous, float32, one for each block");
  }
  return columns;
}

void check_length(const TensorList& list, size_t tensors, const char* name) {
  STD_TORCH_CHECK(list.size() == tensors, "swd_fused: got ", list.size(), " ", name, " for ", tensors, " parameters");
}

}  // namespace

Tensor description(TensorList params, TensorList exp_avgs, TensorList exp_avg_sqs, TensorList max_exp_avg_sqs,
                   TensorList masters, TensorList ema_params, TensorList exp_avg_scales, TensorList exp_avg_sq_scales,
                   TensorList grads, Tensor groups, Tensor tensor_ids, std::optional<Tensor> numbers,
                   std::optional<Tensor> block_numbers) {
  const size_t tensors = params.size();
  const bool amsgrad = !max_exp_avg_sqs.empty(), has_masters = !masters.empty(), has_averages = !ema_params.empty();
  check_length(exp_avgs, tensors, "exp_avgs");
  check_length(exp_avg_sqs, tensors, "exp_avg_sqs");
  if (amsgrad) check_length(max_exp_avg_sqs, tensors, "max_exp_avg_sqs");
  if (has_masters) check_length(masters, tensors, "masters");
  if (has_averages) check_length(ema_params, tensors, "ema_params");
  check_length(grads, tensors, "grads");
  const int64_t* next_blocks = nullptr;
  if (block_numbers) {
    check_length(exp_avg_scales, tensors, "exp_avg_scales");
    check_length(exp_avg_sq_scales, tensors, "exp_avg_sq_scales");
    next_blocks = values<int64_t>(*block_numbers, ScalarType::Long, 2 * tensors, "block_numbers");
  }
  Writer writer;
  writer.number(static_cast<int64_t>(tensors));
  writer.number(amsgrad);
  writer.number(has_masters);
  writer.number(has_averages);
  writer.number(block_numbers.has_value());
  writer.number(numbers.has_value());
  writer.addresses(grads);
  writer.list(values<int64_t>(groups, ScalarType::Long, tensors, "groups"), tensors);
  writer.list(values<int64_t>(tensor_ids, ScalarType::Long, tensors, "tensor_ids"), tensors);
  for (const TensorList& kept : {params, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, masters, ema_params}) {
    writer.addresses(kept);
  }
  if (block_numbers) {
    writer.addresses(exp_avg_scales);
    writer.addresses(exp_avg_sq_scales);
  }
  const int64_t* next_numbers = nullptr;
  if (numbers) {
    size_t expected = tensors;
    for (const Tensor& param : params) expected += param.sizes().size();
    next_numbers = values<int64_t>(*numbers, ScalarType::Long, expected, "numbers");
  }
  for (size_t t = 0; t < tensors; ++t) {
    const View param(params[t]), exp_avg_sq(exp_avg_sqs[t]);
    const View averaged = amsgrad ? View(max_exp_avg_sqs[t]) : exp_avg_sq;
    const int64_t columns =
        block_numbers ? coded_columns(exp_avgs[t], exp_avg_sqs[t], exp_avg_scales[t], exp_avg_sq_scales[t]) : 0;
    const WalkOrder order(columns ? exp_avg_sq : averaged);
    check_dtype(param, "param");
    writer.number(param.numel());
    writer.number(computes_in_double(averaged));
    if (block_numbers) {
      // Where whole blocks follow one another in memory, and in number, rows need not be told apart.
      const bool is_one_row = columns && columns % CODE_BLOCK == 0 && next_blocks[1] == columns / CODE_BLOCK;
      writer.number(is_one_row ? param.numel() : columns);
      writer.number(next_blocks[0]);
      writer.number(next_blocks[1]);
      next_blocks += 2;
    }
    writer.layout(param, order);
    const auto write = [&](const View& view, const char* name, bool is_integer = false) {
      check_like(view, param, name, is_integer);
      writer.layout(view, order);
    };
    write(View(exp_avgs[t]), "exp_avg", columns);
    write(exp_avg_sq, "exp_avg_sq", columns);
    if (amsgrad) write(averaged, "max_exp_avg_sq");
    if (has_masters) {
      const View master(masters[t]);
      const bool is_remainder = master.dtype == ScalarType::Short;
      STD_TORCH_CHECK(!is_remainder || param.dtype == ScalarType::BFloat16,
                      "swd_fused: a remainder belongs to a bfloat16 parameter");
      write(master, "master", is_remainder);
    }
    if (has_averages) write(View(ema_params[t]), "ema_param");
    write(View(grads[t]), "grad");
    if (numbers) {
      writer.number(*next_numbers++);
      writer.positions(View(param, next_numbers), order);
      next_numbers += param.dim();
    }
  }
  return writer.tensor();
}

OperandsReader::OperandsReader(const Tensor& description) {
  const int64_t* header = values<int64_t>(description, ScalarType::Long, HEADER, "description");
  // So that other numbers are not taken for addresses.
  STD_TORCH_CHECK(header[0] == description.numel(),
                  "swd_fused: got other numbers than the operator description returns");
  size_ = static_cast<size_t>(header[1]);
  amsgrad_ = header[2];
  masters_ = header[3];
  averages_ = header[4];
  coded_ = header[5];
  numbered_ = header[6];
  grad_addresses_ = header + HEADER;
  groups_ = grad_addresses_ + size_;
  tensor_ids_ = groups_ + size_;
  addresses_ = tensor_ids_ + size_;
  layouts_ = addresses_ + (3 + amsgrad_ + masters_ + averages_ + 2 * coded_) * size_;
}

Operands OperandsReader::next() {
  const size_t tensor = next_++;
  Operands x;
  x.numel = *layouts_++;
  x.in_double = *layouts_++;
  if (coded_) {
    if (layouts_[0]) x.coded = CodedMoments{{}, layouts_[0], layouts_[1], layouts_[2]};
    layouts_ += 3;
  }
  size_t list = 0;
  const auto read = [&] { return operand(addresses_[list++ * size_ + tensor], x.numel); };
  x.param = read();
  x.exp_avg = read();
  x.exp_avg_sq = read();
  x.averaged = amsgrad_ ? read() : x.exp_avg_sq;
  if (masters_) x.master = read();
  if (averages_) x.ema_param = read();
  if (x.coded) {
    const auto scales = [&] { return reinterpret_cast<float*>(addresses_[list++ * size_ + tensor]); };
    x.coded->blocks.exp_avg = reinterpret_cast<int8_t*>(x.exp_avg.data());
    x.coded->blocks.root = reinterpret_cast<uint8_t*>(x.exp_avg_sq.data());
    x.coded->blocks.exp_avg_scales = scales();
    x.coded->blocks.root_scales = scales();
  }
  x.has_grad = grad_addresses_[tensor] != NO_GRAD;
  x.grad = operand(grad_addresses_[tensor], x.numel);
  if (numbered_) {
    const int64_t first = *layouts_++;
    x.numbers = ElementNumbers(first, positions());
  }
  x.needs_staging = false;
  x.elements_at_once = 1;
  for (const Operand* part : {&x.param, &x.exp_avg, &x.exp_avg_sq, &x.averaged, &x.grad,
                              x.master ? &*x.master : &x.grad, x.ema_param ? &*x.ema_param : &x.grad}) {
    if (part->is_array()) continue;
    x.needs_staging = true;
    x.elements_at_once = std::max(x.elements_at_once, elements_at_once(part->positions(), part->item_size()));
  }
  if (!x.grad.is_array()) x.own_runs = in_memory_order(x.grad.positions());
  return x;
}

Operand OperandsReader::operand(int64_t address, int64_t numel) {
  STD_TORCH_CHECK(address != 0 || numel == 0, "swd_fused: a tensor has elements, but its memory was freed");
  const ScalarType dtype = static_cast<ScalarType>(*layouts_++);
  return Operand(reinterpret_cast<char*>(address), dtype, positions());
}

Positions OperandsReader::positions() {
  const size_t run_count = static_cast<size_t>(*layouts_++);
  const Run* runs = reinterpret_cast<const Run*>(layouts_);
  layouts_ += run_count * (sizeof(Run) / sizeof(int64_t));
  return Positions(runs, run_count);
}

}  // namespace swd
