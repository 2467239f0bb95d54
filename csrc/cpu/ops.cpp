// The operators as PyTorch sees them, on its stable ABI.
#include <Python.h>
#include <torch/csrc/stable/library.h>

#include "huge_pages.h"
#include "operands.h"
#include "passes.h"

STABLE_TORCH_LIBRARY(swd_fused, m) {
  m.def(
      "description(Tensor[] params, Tensor[] exp_avgs, Tensor[] exp_avg_sqs, Tensor[] max_exp_avg_sqs, Tensor[] "
      "masters, Tensor[] ema_params, Tensor[] exp_avg_scales, Tensor[] exp_avg_sq_scales, Tensor[] grads, Tensor "
      "groups, Tensor tensor_ids, Tensor? numbers, Tensor? block_numbers) -> Tensor");
  m.def("gradient_sums(Tensor description, Tensor sums, Tensor steps, Tensor hyper) -> Tensor");
  m.def("max_exp_avg_sq_sum(Tensor description, Tensor steps, Tensor hyper, Tensor? grad_factor) -> Tensor");
  m.def("last_exp_avg_sq_sum(Tensor description, Tensor sums, Tensor steps, Tensor hyper) -> Tensor");
  m.def(
      "update_(Tensor(a!) sums, Tensor(b!) steps, Tensor description, Tensor hyper, Tensor exp_avg_sq_mean, Tensor? "
      "grad_factor, Tensor? skip, int seed) -> Tensor");
  m.def(
      "step_(Tensor(a!) sums, Tensor(b!) steps, Tensor description, Tensor hyper, float? max_grad_norm, bool lagged, "
      "Tensor? grad_scale, Tensor? found_inf, bool skip_nonfinite, int seed) -> Tensor");
  m.def("exp_avg_sq_sums(Tensor[] averaged, Tensor[] scales, int[] columns) -> Tensor");
  m.def("advise_huge_pages(Tensor tensor) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(swd_fused, CPU, m) {
  m.impl("description", TORCH_BOX(&swd::description));
  m.impl("gradient_sums", TORCH_BOX(&swd::gradient_sums));
  m.impl("max_exp_avg_sq_sum", TORCH_BOX(&swd::max_exp_avg_sq_sum));
  m.impl("last_exp_avg_sq_sum", TORCH_BOX(&swd::last_exp_avg_sq_sum));
  m.impl("step_", TORCH_BOX(&swd::step_));
  m.impl("exp_avg_sq_sums", TORCH_BOX(&swd::exp_avg_sq_sums));
  m.impl("update_", TORCH_BOX(&swd::update_));
  m.impl("advise_huge_pages", TORCH_BOX(&swd::advise_huge_pages));
}

// Importing the module registers the operators; it has nothing else to offer.
PyMODINIT_FUNC PyInit__C(void) {
  static PyModuleDef definition = {
      PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&definition);
}
