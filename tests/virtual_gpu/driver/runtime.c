// libcudart: the part of the CUDA runtime that torch and its allocators call. torch_kernels.c has the launches.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "machine.h"

#undef cudaGetDeviceProperties

// --- Devices

API cudaError_t cudaGetDeviceCount(int* count) { GIVE(count, device_count); }
API cudaError_t cudaGetDevice(int* device) { GIVE(device, current_device); }
API cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= device_count) return fail(cudaErrorInvalidDevice);
  current_device = device;
  return 0;
}
API cudaError_t cudaDriverGetVersion(int* version) { GIVE(version, CUDART_VERSION); }
API cudaError_t cudaRuntimeGetVersion(int* version) { GIVE(version, CUDART_VERSION); }
API cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp* p, int device) {
  memset(p, 0, sizeof *p);
  strcpy(p->name, "virtual H100");
  p->major = 9;
  p->multiProcessorCount = multiprocessors;
  p->totalGlobalMem = memory_size();
  p->sharedMemPerBlock = 49152;
  p->sharedMemPerBlockOptin = 232448;
  p->sharedMemPerMultiprocessor = 233472;
  p->reservedSharedMemPerBlock = 1024;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->warpSize = 32;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsPerMultiProcessor = 2048;
  p->maxBlocksPerMultiProcessor = 32;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->totalConstMem = 65536;
  p->memoryBusWidth = 5120;
  p->l2CacheSize = 52428800;
  p->canMapHostMemory = p->concurrentKernels = p->unifiedAddressing = p->managedMemory = p->cooperativeLaunch = 1;
  p->asyncEngineCount = 3;
  p->pciBusID = device + 1;
  return 0;
}
API cudaError_t cudaDeviceGetAttribute(int* value, enum cudaDeviceAttr attribute, int device) {
  return (cudaError_t)cuDeviceGetAttribute(value, (CUdevice_attribute)attribute, device);
}
API cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) { GIVE(can, 1); }
API cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) { return 0; }
API cudaError_t cudaDeviceGetPCIBusId(char* id, int size, int device) {
  snprintf(id, size, "0000:%02x:00.0", device + 1);
  return 0;
}
API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return 0;
}
API cudaError_t cudaDeviceSynchronize(void) {
  REFUSE_IN_CAPTURE("cudaDeviceSynchronize");
  vgpu_counts[SYNCS]++;
  run_all();
  return device_failure();
}
API cudaError_t cudaMemGetInfo(size_t* left, size_t* total) {
  *total = memory_size();
  *left = memory_left(current_device);
  return 0;
}

// --- Errors

API cudaError_t cudaGetLastError(void) {
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
API cudaError_t cudaPeekAtLastError(void) { return last_error; }
API const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess                         ? "no error"
         : error == cudaErrorMemoryAllocation         ? "out of memory"
         : error == cudaErrorInvalidDevice            ? "invalid device ordinal"
         : error == cudaErrorNotReady                 ? "device not ready"
         : error == cudaErrorLaunchFailure            ? "a kernel or operation failed: its traceback is on stderr"
         : error == cudaErrorNotSupported             ? "the virtual GPU cannot do this: what it was is on stderr"
         : error == cudaErrorStreamCaptureUnsupported ? "operation not permitted when stream is capturing"
         : error == cudaErrorStreamCaptureUnmatched   ? "capture was not begun on this stream"
         : error == cudaErrorCapturedEvent            ? "operation not permitted on an event of a capturing stream"
                                                      : "an error of the virtual GPU";
}
API const char* cudaGetErrorName(cudaError_t error) { return cudaGetErrorString(error); }

// --- Memory

API cudaError_t cudaMalloc(void** address, size_t size) {
  REFUSE_IN_CAPTURE("cudaMalloc");
  vgpu_counts[MALLOCS]++;
  *address = device_alloc(current_device, size);
  return *address ? 0 : fail(cudaErrorMemoryAllocation);
}
API cudaError_t cudaFree(void* address) {
  if (!address) return 0;
  REFUSE_IN_CAPTURE("cudaFree");
  run_all();
  Allocation* allocation = find_allocation(address);
  if (allocation) free_device(allocation);
  return 0;
}
API cudaError_t cudaMallocAsync(void** address, size_t size, cudaStream_t stream) { return cudaMalloc(address, size); }
API cudaError_t cudaFreeAsync(void* address, cudaStream_t stream) { return cudaFree(address); }

// Captures allow it in practice, though it costs time: torch allocates pinned memory in a relaxed section.
API cudaError_t cudaHostAlloc(void** address, size_t size, unsigned flags) {
  vgpu_counts[HOST_ALLOCS]++;
  if (posix_memalign(address, 4096, size)) return fail(cudaErrorMemoryAllocation);
  remember_pinned(*address, size);
  return 0;
}
API cudaError_t cudaFreeHost(void* address) {
  REFUSE_IN_CAPTURE("cudaFreeHost");
  run_all();
  Allocation* allocation = find_allocation(address);
  if (allocation) allocation->live = 0;
  return 0;
}
API cudaError_t cudaHostRegister(void* address, size_t size, unsigned flags) {
  REFUSE_IN_CAPTURE("cudaHostRegister");
  remember_pinned(address, size);
  return 0;
}
API cudaError_t cudaHostUnregister(void* address) {
  Allocation* allocation = find_allocation(address);
  if (allocation) allocation->live = 0;
  return 0;
}
API cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes* attributes, const void* address) {
  memset(attributes, 0, sizeof *attributes);
  Allocation* allocation = find_allocation(address);
  attributes->type = !allocation          ? cudaMemoryTypeUnregistered
                     : allocation->pinned ? cudaMemoryTypeHost
                                          : cudaMemoryTypeDevice;
  attributes->device = allocation ? allocation->device : -2;
  if (!allocation) return 0;
  attributes->devicePointer = (void*)address;
  if (allocation->pinned) attributes->hostPointer = (void*)address;
  return 0;
}

// --- Copies

static cudaError_t wait_for(Stream* stream) {
  if (stream->graph) return fail(cudaErrorStreamCaptureUnsupported);
  vgpu_counts[SYNCS]++;
  run_until(stream, stream->count);
  return device_failure();
}

static int is_pinned(const void* address) {
  Allocation* allocation = find_allocation(address);
  return allocation && allocation->pinned;
}

// Pinned memory is read when the copy runs. Pageable memory is read now, or the host waits, as the driver does it; in a
// capture nothing can be read now, so that a graph with a pageable source reads whatever is there when it is replayed.
static cudaError_t copy(void* to, const void* from, size_t size, Stream* stream, int blocking) {
  if (!size) return 0;
  Op op = {.kind = COPY, .to = to, .from = from, .size = size};
  int to_device = device_of(to) >= 0, from_device = device_of(from) >= 0;
  if (to_device && !from_device) {
    int pinned = is_pinned(from);
    vgpu_counts[pinned ? H2D_PINNED : H2D_PAGEABLE]++;
    if (!pinned && stream->graph)
      say("a graph will read %zu bytes of pageable memory at %p when it is replayed", size, from);
    if (!pinned && !stream->graph) op.staged = memcpy(malloc(size), from, size);
  } else if (!to_device && from_device) {
    int pinned = is_pinned(to);
    vgpu_counts[pinned ? D2H_PINNED : D2H_PAGEABLE]++;
    blocking |= !pinned;
  } else {
    vgpu_counts[D2D]++;
  }
  push(stream, op);
  return blocking ? wait_for(stream) : 0;
}

API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, enum cudaMemcpyKind kind,
                                cudaStream_t stream) {
  return copy(to, from, size, stream_of(stream), 0);
}
API cudaError_t cudaMemcpy(void* to, const void* from, size_t size, enum cudaMemcpyKind kind) {
  REFUSE_IN_CAPTURE("cudaMemcpy");
  return copy(to, from, size, stream_of(NULL), 1);
}
API cudaError_t cudaMemcpyPeerAsync(void* to, int to_device, const void* from, int from_device, size_t size,
                                    cudaStream_t stream) {
  return copy(to, from, size, stream_of(stream), 0);
}
API cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                                  size_t height, enum cudaMemcpyKind kind, cudaStream_t stream) {
  cudaError_t error = 0;
  for (size_t i = 0; i < height && !error; i++)
    error = copy((char*)to + i * to_pitch, (const char*)from + i * from_pitch, width, stream_of(stream), 0);
  return error;
}
API cudaError_t cudaMemsetAsync(void* to, int value, size_t size, cudaStream_t stream) {
  push(stream_of(stream), (Op){.kind = SET, .to = to, .value = value, .size = size});
  return 0;
}
API cudaError_t cudaMemset(void* to, int value, size_t size) { return cudaMemsetAsync(to, value, size, NULL); }

// --- Streams and events

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  GIVE(stream, (cudaStream_t)new_stream());
}
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}
API cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
API cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  run_until(stream_of(stream), stream_of(stream)->count);
  return 0;
}
API cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) { GIVE(priority, 0); }
API cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  REFUSE_IN_CAPTURE("cudaStreamSynchronize");
  return wait_for(stream_of(stream));
}
API cudaError_t cudaStreamQuery(cudaStream_t stream) {
  REFUSE_IN_CAPTURE("cudaStreamQuery");
  static int polls;
  Stream* s = stream_of(stream);
  if (!poll(s, s->count, &polls)) return cudaErrorNotReady;
  polls = 0;
  return device_failure();
}
// A stream that waits for an event of a capture joins it. Its operations are kept in the order of the calls, which is
// one of the orders that the graph allows.
API cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
  Event* e = (Event*)event;
  Stream* s = stream_of(stream);
  if (e->recorded && e->captured && e->graph && e->stream->graph == e->graph && !s->graph) s->graph = e->graph;
  if (!e->recorded || e->captured || s->graph || e->stream == s) return 0;
  push(s, (Op){.kind = WAIT, .other = e->stream, .position = e->position});
  return 0;
}
API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) { GIVE(event, calloc(1, sizeof(Event))); }
API cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
API cudaError_t cudaEventDestroy(cudaEvent_t event) { return 0; }
API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  Stream* s = stream_of(stream);
  *(Event*)event =
      (Event){.stream = s, .position = s->count, .recorded = 1, .captured = s->graph != NULL, .graph = s->graph};
  return 0;
}
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
  return cudaEventRecord(event, stream);
}
API cudaError_t cudaEventQuery(cudaEvent_t event) {
  REFUSE_IN_CAPTURE("cudaEventQuery");
  Event* e = (Event*)event;
  vgpu_counts[EVENT_QUERIES]++;
  if (e->captured) return fail(cudaErrorCapturedEvent);
  return !e->recorded || poll(e->stream, e->position, &e->polls) ? 0 : cudaErrorNotReady;
}
API cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  REFUSE_IN_CAPTURE("cudaEventSynchronize");
  Event* e = (Event*)event;
  vgpu_counts[SYNCS]++;
  if (e->recorded && !e->captured) run_until(e->stream, e->position);
  return device_failure();
}
API cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  *milliseconds = 1;  // there is no time here
  return 0;
}
API cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  push(stream_of(stream), (Op){.kind = HOST, .function = function, .data = data});
  return 0;
}

// --- Graphs: the operations of a capture, in their order

API cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
  begin_capture(stream_of(stream), mode);
  return 0;
}
API cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  *graph = (cudaGraph_t)end_capture(stream_of(stream));
  return *graph ? 0 : fail(cudaErrorStreamCaptureUnmatched);
}
API cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus* status) {
  GIVE(status, stream_of(stream)->graph ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone);
}
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus* status,
                                         unsigned long long* id, cudaGraph_t* graph, const cudaGraphNode_t** nodes,
                                         const cudaGraphEdgeData** edges, size_t* count) {
  cudaStreamIsCapturing(stream, status);
  if (id) *id = capture_id();
  if (graph) *graph = (cudaGraph_t)stream_of(stream)->graph;
  if (nodes) *nodes = NULL;
  if (edges) *edges = NULL;
  if (count) *count = 0;
  return 0;
}
API cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode* mode) {
  enum cudaStreamCaptureMode before = thread_capture_mode;
  thread_capture_mode = *mode;
  *mode = before;
  return 0;
}
API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* executable, cudaGraph_t graph,
                                              unsigned long long flags) {
  GIVE(executable, (cudaGraphExec_t)graph);
}
API cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  Graph* graph = (Graph*)executable;
  for (long i = 0; i < graph->count; i++) push(stream_of(stream), graph->ops[i]);
  return 0;
}
API cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return 0; }
API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) { return 0; }
API cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* count) {
  GIVE(count, ((Graph*)graph)->count);
}

// --- The driver's functions, by name

static int not_there(void) { return CUDA_ERROR_NOT_SUPPORTED; }

API cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned version,
                                                 unsigned long long flags,
                                                 enum cudaDriverEntryPointQueryResult* status) {
  static void* driver;
  if (!driver) driver = dlopen("libcuda.so.1", RTLD_LAZY);
  void* found = dlsym(RTLD_DEFAULT, symbol);
  if (!found && driver) found = dlsym(driver, symbol);
  *function = found ? found : (void*)not_there;
  if (status) *status = cudaDriverEntryPointSuccess;
  return 0;
}
