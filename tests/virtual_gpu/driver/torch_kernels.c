// torch's own kernels: registered by name, so that a launch that reaches the runtime can be named. None of them runs;
// Python serves torch's operations before they launch.
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "machine.h"

static struct {
  const void* host;
  const char* name;
}* kernels;
static int kernel_count, kernel_capacity;

API void __cudaRegisterFunction(void** module, const char* host, char* device, const char* name, int limit,
                                void* thread, void* block, void* block_dim, void* grid_dim, int* warp_size) {
  if (kernel_count == kernel_capacity) {
    kernel_capacity = kernel_capacity ? 2 * kernel_capacity : 4096;
    kernels = realloc(kernels, kernel_capacity * sizeof *kernels);
  }
  kernels[kernel_count].host = host;
  kernels[kernel_count++].name = name;
}
API void** __cudaRegisterFatBinary(void* binary) {
  static void* module;
  return &module;
}
API void __cudaRegisterFatBinaryEnd(void** module) {}
API void __cudaUnregisterFatBinary(void** module) {}
API char __cudaInitModule(void** module) { return 1; }
API void __cudaRegisterVar(void** module, char* host, char* device, const char* name, int is_extern, size_t size,
                           int constant, int global) {}

static _Thread_local struct {
  dim3 grid, block;
  size_t shared;
  void* stream;
} configured;

API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) {
  configured.grid = grid;
  configured.block = block;
  configured.shared = shared;
  configured.stream = stream;
  return 0;
}
API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = configured.grid;
  *block = configured.block;
  *shared = configured.shared;
  *(void**)stream = configured.stream;
  return 0;
}
API cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* host) {
  *kernel = (cudaKernel_t)host;
  return 0;
}

static cudaError_t unexpected(const void* host) {
  const char* name = "a kernel without a name";
  for (int i = 0; i < kernel_count; i++)
    if (kernels[i].host == host) name = kernels[i].name;
  say("torch launches %s, which cannot run here", name);
  if (python.unexpected) python.unexpected(name);
  return fail(cudaErrorNotSupported);
}
API cudaError_t cudaLaunchKernel(const void* host, dim3 grid, dim3 block, void** args, size_t shared,
                                 cudaStream_t stream) {
  return unexpected(host);
}
API cudaError_t __cudaLaunchKernel(cudaKernel_t host, dim3 grid, dim3 block, void** args, size_t shared,
                                   cudaStream_t stream) {
  return unexpected(host);
}
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* host, void** args) {
  return unexpected(host);
}
API cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes* attributes, const void* host) {
  memset(attributes, 0, sizeof *attributes);
  attributes->numRegs = 32;
  attributes->maxThreadsPerBlock = 1024;
  attributes->binaryVersion = attributes->ptxVersion = 90;
  return 0;
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* count, const void* host, int threads,
                                                              size_t shared) {
  GIVE(count, 2);
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* count, const void* host, int threads,
                                                                       size_t shared, unsigned flags) {
  GIVE(count, 2);
}
