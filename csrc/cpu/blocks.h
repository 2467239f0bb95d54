// Loops over contiguous blocks of elements: all that is worth vectorising, compiled for several
// instruction sets and chosen when the library is loaded.
#pragma once

#include <cstdint>

#include "../element.h"

namespace swd {

// Elements that are processed at once. With 1024 the calls and the folding of sums took 4% of an update. Six blocks of
// doubles, the most that an update copies, are 192 KB of stack.
constexpr int64_t BLOCK = 4096;

struct BFloat16Bits {
  uint16_t bits;
};
struct Float16Bits {
  uint16_t bits;
};

// The sums that an update leaves for the next step and for the log: those of exp_avg_sq (of max_exp_avg_sq with
// amsgrad) and of grad^2.
struct UpdateSums {
  double averaged = 0, grad = 0;
  void operator+=(const UpdateSums& other) {
    averaged += other.averaged;
    grad += other.grad;
  }
};

// T computes and is float or double; S is what a tensor stores. Sums are taken in an order that depends on n alone.
#define SWD_DECLARE_STORAGE(T, S)               \
  void load(T* block, const S* src, int64_t n); \
  void store(S* dst, const T* block, int64_t n);

// Rounds up or down at random, so that the mean of many roundings is right. Elements have the numbers `number`,
// `number + number_stride`, and so on.
void store_stochastically(BFloat16Bits* dst, const float* block, int64_t n, uint32_t key, uint32_t number,
                          uint32_t number_stride);

#define SWD_DECLARE_BLOCKS(T)                                                                                          \
  SWD_DECLARE_STORAGE(T, float)                                                                                        \
  SWD_DECLARE_STORAGE(T, double)                                                                                       \
  SWD_DECLARE_STORAGE(T, BFloat16Bits)                                                                                 \
  SWD_DECLARE_STORAGE(T, Float16Bits)                                                                                  \
  /* Masters from the bits of bfloat16 parameters and remainders, and the other way round.*/                           \
  void join_masters(T* block, const uint16_t* params, const uint16_t* remainders, int64_t n);                          \
  void split_masters(uint16_t* params, uint16_t* remainders, const T* block, int64_t n);                               \
  double sum(const T* values, int64_t n);                                                                              \
  double sum_of_squares(const T* values, int64_t n);                                                                   \
  /* Without averages `ema_param` is null.*/                                                                           \
  UpdateSums update_block(T* param, T* exp_avg, T* exp_avg_sq, T* ema_param, const T* grad, int64_t n,                 \
                          const Scalars<T>& scalars);                                                                  \
  UpdateSums update_block_amsgrad(T* param, T* exp_avg, T* exp_avg_sq, T* max_exp_avg_sq, T* ema_param, const T* grad, \
                                  int64_t n, const Scalars<T>& scalars);                                               \
  /* Sum of what max_exp_avg_sq will be after the update; changes nothing.*/                                           \
  double sum_of_next_max(const T* exp_avg_sq, const T* max_exp_avg_sq, const T* grad, int64_t n,                       \
                         const Scalars<T>& scalars);

SWD_DECLARE_BLOCKS(float)
SWD_DECLARE_BLOCKS(double)

// `update_block` of masters in two bytes, by the bits of bfloat16 parameters and remainders.
UpdateSums update_masters(uint16_t* params, uint16_t* remainders, float* exp_avg, float* exp_avg_sq, float* ema_param,
                          const float* grad, int64_t n, const Scalars<float>& scalars);

// Averages of weights as an update has left them.
void update_averages(float* ema_param, const float* weights, int64_t n, const Scalars<float>& scalars);

// A sum of squares taken in float, or a new one in double where that may have left float's range.
double checked_sum_of_squares(double sum, const float* values, int64_t n);

}  // namespace swd
