// A CUDA runtime and driver whose device memory is host memory. See README.md.
#include "hostcuda.h"

#include <cuda.h>
#include <dlfcn.h>
#include <elf.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>
#include <fcntl.h>
#include <cxxabi.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))

namespace {

// -- settings ---------------------------------------------------------------------------------------------------------

size_t env_size(const char* name, size_t otherwise) {
  const char* text = getenv(name);
  if (!text || !*text) return otherwise;
  char* end = nullptr;
  double value = strtod(text, &end);
  switch (*end) {
    case 'K': case 'k': value *= 1 << 10; break;
    case 'M': case 'm': value *= 1 << 20; break;
    case 'G': case 'g': value *= 1 << 30; break;
  }
  return static_cast<size_t>(value);
}
const bool kTrace = getenv("HOSTCUDA_TRACE") != nullptr;
const bool kPoison = getenv("HOSTCUDA_POISON") != nullptr;
const bool kLifo = getenv("HOSTCUDA_ORDER") && !strcmp(getenv("HOSTCUDA_ORDER"), "lifo");
const size_t kTotal = env_size("HOSTCUDA_MEMORY", 80ull << 30);
// Work waits until somebody has to wait for it, and then only what that needs runs.
const bool kLazy = getenv("HOSTCUDA_LAZY") && *getenv("HOSTCUDA_LAZY") != '0';
constexpr size_t kReserve = 1ull << 42; // virtual addresses, never used twice
constexpr size_t kPage = 2ull << 20;

#define TRACE(...) do { if (kTrace) { fprintf(stderr, "hostcuda[%ld]: ", (long)syscall(SYS_gettid)); fprintf(stderr, __VA_ARGS__); fputc('\n', stderr); } } while (0)

// -- state ------------------------------------------------------------------------------------------------------------

struct Graph;
struct Stream;
struct Node {
  int id;
  cudaGraphNodeType type;
  std::string name;
  std::function<void()> run;
  std::vector<Node*> deps;
};
struct UserObject {
  void* pointer;
  cudaHostFn_t destroy;
  int references;
};
struct Graph {
  std::vector<std::shared_ptr<Node>> nodes;
  std::map<UserObject*, int> objects;
};
struct Capture {
  unsigned long long id;
  cudaStreamCaptureMode mode;
  std::thread::id thread;
  Graph* graph;
  Stream* origin;
  std::set<Stream*> streams;
  bool invalid = false;
  bool ended = false;
  std::string why;
};
struct Queue;
struct Item {
  std::function<void()> run;
  std::shared_ptr<Queue> other; // or: wait until so much of another queue has run
  unsigned long long upto = 0;
};
struct Queue {
  std::deque<Item> items;
  unsigned long long issued = 0, completed = 0;
  bool blocking = false;
};
struct Stream {
  std::shared_ptr<Queue> queue = std::make_shared<Queue>();
  bool asked = false;
  unsigned flags = 0;
  int priority = 0;
  std::shared_ptr<Capture> capture;
  std::vector<Node*> deps;
  unsigned long long id = 0;
};
struct Event {
  unsigned flags = 0;
  bool recorded = false, asked = false;
  std::shared_ptr<double> time = std::make_shared<double>(0);
  std::shared_ptr<Queue> queue;
  unsigned long long upto = 0;
  std::shared_ptr<Capture> capture;
  std::vector<Node*> deps;
};
struct Exec {
  std::vector<std::shared_ptr<Node>> nodes; // in the order in which they run
  std::map<UserObject*, int> objects;
};
enum Kind { kDeviceMemory = 1, kPinned, kRegistered, kManaged, kMapped, kImported };
struct Block {
  size_t size;
  Kind kind;
  off_t offset;
};
struct Counters {
  std::atomic<long long> kernels_run{0}, kernels_skipped{0}, host_ops{0}, graph_launches{0}, nodes_run{0}, captures{0},
      captures_failed{0}, nodes_captured{0}, instantiations{0}, mallocs{0}, frees{0}, synchronizations{0},
      triton_launches{0}, refused{0}, wild{0}, memcpys{0}, memsets{0}, modules{0};
};

std::recursive_mutex& mutex() { static auto* m = new std::recursive_mutex; return *m; }
using Lock = std::unique_lock<std::recursive_mutex>;
Counters& counters() { static auto* c = new Counters; return *c; }
std::map<uintptr_t, Block>& blocks() { static auto* b = new std::map<uintptr_t, Block>; return *b; }
std::set<std::shared_ptr<Capture>>& active() { static auto* a = new std::set<std::shared_ptr<Capture>>; return *a; }
std::set<Stream*>& streams() { static auto* s = new std::set<Stream*>; return *s; }
std::map<std::string, long long>& skipped() { static auto* s = new std::map<std::string, long long>; return *s; }
std::map<std::string, long long>& refusals() { static auto* s = new std::map<std::string, long long>; return *s; }
size_t used_bytes = 0, peak_bytes = 0;
std::atomic<int> sticky{0};
int next_node = 0;
unsigned long long next_capture = 1, next_stream = 10;
thread_local cudaError_t last_error = cudaSuccess;
thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;
Stream legacy_stream;

cudaError_t done(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}
// The state of a query, which is no error to be found later.
#define REFUSE(call, error) refuse(call, error)
cudaError_t refuse(const char* call, cudaError_t error);

double now_ms() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// -- work that waits --------------------------------------------------------------------------------------------------

std::vector<std::shared_ptr<Queue>>& queues() { static auto* q = new std::vector<std::shared_ptr<Queue>>{legacy_stream.queue}; return *q; }
std::recursive_mutex& executor() { static auto* m = new std::recursive_mutex; return *m; }

// Waits for whoever runs work now; without Python's lock, which that work may need.
struct Executing {
  Executing() {
    if (executor().try_lock()) return;
    static auto check = (int (*)())dlsym(RTLD_DEFAULT, "PyGILState_Check");
    static auto save = (void* (*)())dlsym(RTLD_DEFAULT, "PyEval_SaveThread");
    static auto restore = (void (*)(void*))dlsym(RTLD_DEFAULT, "PyEval_RestoreThread");
    if (check && check()) {
      void* state = save();
      executor().lock();
      restore(state);
    } else {
      executor().lock();
    }
  }
  ~Executing() { executor().unlock(); }
};

// Runs what was issued first, up to a number; an error is reported by whoever asks next.
void run_until(const std::shared_ptr<Queue>& queue, unsigned long long upto) {
  if (!kLazy) return;
  { Lock lock(mutex()); if (queue->completed >= upto) return; }
  Executing executing;
  for (;;) {
    Item item;
    {
      Lock lock(mutex());
      if (queue->completed >= upto || queue->items.empty()) return;
      item = std::move(queue->items.front());
      queue->items.pop_front();
    }
    if (item.other) run_until(item.other, item.upto);
    if (item.run && !sticky) {
      try {
        item.run();
      } catch (const std::exception& error) {
        fprintf(stderr, "hostcuda: device work failed: %s\n", error.what());
        if (!sticky) sticky = cudaErrorLaunchFailure;
      }
    }
    Lock lock(mutex());
    queue->completed++;
  }
}
void run_all() {
  if (!kLazy) return;
  std::vector<std::shared_ptr<Queue>> all;
  { Lock lock(mutex()); all = queues(); }
  for (auto& q : all) run_until(q, ~0ull);
  Lock lock(mutex());
  auto& kept = queues();
  kept.erase(std::remove_if(kept.begin(), kept.end(), [](auto& q) { return q.use_count() == 1 && q->items.empty(); }), kept.end());
}
// With the mutex held.
void push(Stream* stream, Item item) {
  auto add = [](const std::shared_ptr<Queue>& q, Item i) { q->items.push_back(std::move(i)); q->issued++; };
  if (stream == &legacy_stream) {
    for (auto& q : queues()) if (q->blocking && q->completed < q->issued) add(stream->queue, {nullptr, q, q->issued});
  } else if (stream->queue->blocking && legacy_stream.queue->completed < legacy_stream.queue->issued) {
    add(stream->queue, {nullptr, legacy_stream.queue, legacy_stream.queue->issued});
  }
  add(stream->queue, std::move(item));
}
// What a wait for the legacy stream waits for.
void run_legacy() {
  if (!kLazy) return;
  std::vector<std::shared_ptr<Queue>> all;
  { Lock lock(mutex()); for (auto& q : queues()) if (q->blocking) all.push_back(q); }
  for (auto& q : all) run_until(q, ~0ull);
  run_until(legacy_stream.queue, ~0ull);
}

// -- memory -----------------------------------------------------------------------------------------------------------

uintptr_t region = 0;
size_t region_used = 0;
int memory_fd = -1;

void open_memory() {
  if (region) return;
  region = (uintptr_t)mmap(nullptr, kReserve, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (region == (uintptr_t)MAP_FAILED) { perror("hostcuda: reserve"); abort(); }
  region_used = (kPage - region % kPage) % kPage;
  memory_fd = memfd_create("hostcuda", MFD_CLOEXEC);
  if (memory_fd < 0 || ftruncate(memory_fd, kReserve) != 0) { perror("hostcuda: memfd"); abort(); }
}
bool in_region(uintptr_t p) { return region && p >= region && p < region + kReserve; }

// The block that holds an address, or end().
std::map<uintptr_t, Block>::iterator block_of(uintptr_t p) {
  auto& all = blocks();
  auto it = all.upper_bound(p);
  if (it == all.begin()) return all.end();
  --it;
  return p < it->first + std::max<size_t>(it->second.size, 1) ? it : all.end();
}

uintptr_t take_addresses(size_t bytes) {
  open_memory();
  size_t rounded = (bytes + kPage - 1) / kPage * kPage + kPage; // a page between blocks
  uintptr_t p = region + region_used;
  region_used += rounded;
  if (region_used > kReserve) { fprintf(stderr, "hostcuda: out of addresses\n"); abort(); }
  return p;
}

cudaError_t device_malloc(void** out, size_t bytes, Kind kind = kDeviceMemory) {
  *out = nullptr;
  if (bytes == 0) return cudaSuccess;
  size_t rounded = (bytes + 511) / 512 * 512;
  if (used_bytes + rounded > kTotal) return cudaErrorMemoryAllocation;
  uintptr_t p = take_addresses(rounded);
  off_t offset = p - region;
  size_t mapped = (rounded + 4095) / 4096 * 4096;
  if (mmap((void*)p, mapped, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, memory_fd, offset) == MAP_FAILED)
    return cudaErrorMemoryAllocation;
  if (kPoison) memset((void*)p, 0xff, rounded);
  blocks()[p] = {rounded, kind, offset};
  used_bytes += rounded;
  peak_bytes = std::max(peak_bytes, used_bytes);
  counters().mallocs++;
  *out = (void*)p;
  return cudaSuccess;
}
void unmap(uintptr_t p, size_t bytes, off_t offset, bool ours) {
  size_t mapped = (bytes + 4095) / 4096 * 4096;
  mmap((void*)p, mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  if (ours) fallocate(memory_fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, mapped);
}
cudaError_t device_free(void* pointer) {
  if (!pointer) return cudaSuccess;
  auto it = blocks().find((uintptr_t)pointer);
  if (it == blocks().end() || (it->second.kind != kDeviceMemory && it->second.kind != kManaged)) return cudaErrorInvalidValue;
  unmap(it->first, it->second.size, it->second.offset, true);
  used_bytes -= it->second.size;
  blocks().erase(it);
  counters().frees++;
  return cudaSuccess;
}

// -- captures ---------------------------------------------------------------------------------------------------------

void invalidate(Capture& capture, const std::string& why) {
  if (!capture.invalid) { capture.invalid = true; capture.why = why; TRACE("capture %llu invalidated by %s", capture.id, why.c_str()); }
}
cudaError_t refuse(const char* call, cudaError_t error) {
  counters().refused++;
  refusals()[std::string(call) + " -> " + cudaGetErrorName(error)]++;
  TRACE("%s refused: %s", call, cudaGetErrorName(error));
  return done(error);
}

// A call that may wait for, or change, what a capture relies on (cudaThreadExchangeStreamCaptureMode's documentation).
cudaError_t unsafe(const char* call) {
  if (thread_mode == cudaStreamCaptureModeRelaxed || active().empty()) return cudaSuccess;
  bool prohibited = false;
  for (auto& capture : active()) {
    bool mine = capture->thread == std::this_thread::get_id();
    bool counts = mine ? capture->mode != cudaStreamCaptureModeRelaxed
                       : thread_mode == cudaStreamCaptureModeGlobal && capture->mode == cudaStreamCaptureModeGlobal;
    if (counts) { prohibited = true; invalidate(*capture, call); }
  }
  return prohibited ? refuse(call, cudaErrorStreamCaptureUnsupported) : cudaSuccess;
}
// A wait for the whole device, which holds streams that capture: in every mode.
cudaError_t device_wide(const char* call) {
  if (active().empty()) return cudaSuccess;
  for (auto& capture : active()) invalidate(*capture, call);
  return refuse(call, cudaErrorStreamCaptureUnsupported);
}

Stream* resolve(cudaStream_t handle) {
  if (handle == nullptr || handle == cudaStreamLegacy || handle == cudaStreamPerThread) return &legacy_stream;
  return reinterpret_cast<Stream*>(handle);
}
bool known(Stream* stream) { return stream == &legacy_stream || streams().count(stream); }

// Work on the legacy stream would wait for blocking streams, which capture.
cudaError_t implicit(Stream* stream, const char* call) {
  if (stream != &legacy_stream) return cudaSuccess;
  for (auto& capture : active())
    for (Stream* one : capture->streams)
      if (!(one->flags & cudaStreamNonBlocking)) {
        invalidate(*capture, call);
        return refuse(call, cudaErrorStreamCaptureImplicit);
      }
  return cudaSuccess;
}

cudaError_t add_node(Stream* stream, cudaGraphNodeType type, std::string name, std::function<void()> run) {
  Capture& capture = *stream->capture;
  if (capture.invalid) return refuse(name.c_str(), cudaErrorStreamCaptureInvalidated);
  auto node = std::make_shared<Node>(Node{next_node++, type, std::move(name), std::move(run), stream->deps});
  stream->deps = {node.get()};
  TRACE("capture %llu: node %d %s", capture.id, node->id, node->name.c_str());
  capture.graph->nodes.push_back(std::move(node));
  counters().nodes_captured++;
  return cudaSuccess;
}

cudaError_t submit(cudaStream_t handle, cudaGraphNodeType type, std::string name, std::function<void()> run) {
  {
    Lock lock(mutex());
    if (sticky) return done((cudaError_t)sticky.load());
    Stream* stream = resolve(handle);
    if (!known(stream)) return refuse(name.c_str(), cudaErrorInvalidResourceHandle);
    if (stream->capture) return add_node(stream, type, std::move(name), std::move(run));
    if (auto error = implicit(stream, name.c_str())) return error;
    if (kLazy) { TRACE("issue %s on %p", name.c_str(), (void*)handle); push(stream, {std::move(run), nullptr, 0}); return cudaSuccess; }
  }
  TRACE("run %s on %p", name.c_str(), (void*)handle);
  run();
  return cudaSuccess;
}

void run_nodes(const std::vector<std::shared_ptr<Node>>& nodes) {
  for (auto& node : nodes) {
    if (node->run) {
      TRACE("replay node %d %s", node->id, node->name.c_str());
      node->run();
    }
    counters().nodes_run++;
  }
}

// An order that the dependencies allow: as captured, or the latest that is ready first.
std::vector<std::shared_ptr<Node>> ordered(const std::vector<std::shared_ptr<Node>>& nodes) {
  if (!kLifo) return nodes;
  std::set<Node*> all, ran;
  for (auto& n : nodes) all.insert(n.get());
  std::vector<std::shared_ptr<Node>> result;
  std::vector<std::shared_ptr<Node>> left(nodes);
  while (!left.empty()) {
    bool found = false;
    for (size_t i = left.size(); i-- > 0;) {
      bool ready = true;
      for (Node* d : left[i]->deps) ready = ready && (!all.count(d) || ran.count(d));
      if (ready) {
        ran.insert(left[i].get());
        result.push_back(left[i]);
        left.erase(left.begin() + i);
        found = true;
        break;
      }
    }
    if (!found) { fprintf(stderr, "hostcuda: a cycle in a graph\n"); abort(); }
  }
  return result;
}

void release_object(UserObject* object, int count) {
  object->references -= count;
  if (object->references <= 0) { if (object->destroy) object->destroy(object->pointer); delete object; }
}

struct IllegalAddress : std::runtime_error { using std::runtime_error::runtime_error; };

void check(const void* pointer, size_t bytes, const char* what) {
  Lock lock(mutex());
  uintptr_t p = (uintptr_t)pointer;
  if (bytes == 0 || !in_region(p)) return;
  auto it = block_of(p);
  if (it == blocks().end() || p + bytes > it->first + it->second.size) {
    counters().wild++;
    sticky = cudaErrorIllegalAddress;
    char text[256];
    snprintf(text, sizeof text, "hostcuda: %s touches %zu bytes at %p, which %s", what, bytes, pointer,
             it == blocks().end() ? "is not allocated" : "exceeds its allocation");
    fprintf(stderr, "%s\n", text);
    throw IllegalAddress(text);
  }
}

void copy_bytes(void* dst, const void* src, size_t bytes) {
  check(dst, bytes, "cudaMemcpy (destination)");
  check(src, bytes, "cudaMemcpy (source)");
  counters().memcpys++;
  memmove(dst, src, bytes);
}
void set_bytes(void* dst, int value, size_t bytes) {
  check(dst, bytes, "cudaMemset");
  counters().memsets++;
  memset(dst, value, bytes);
}

// Work that only this file knows how to run reports its fault as an error.
template <typename Work>
cudaError_t guarded(Work work) {
  try {
    return work();
  } catch (const std::exception& error) {
    fprintf(stderr, "hostcuda: device work failed: %s\n", error.what());
    if (!sticky) sticky = cudaErrorLaunchFailure;
    return done((cudaError_t)sticky.load());
  }
}

// -- kernels ----------------------------------------------------------------------------------------------------------

struct Kernel { std::string name; };
std::unordered_map<const void*, Kernel*>& kernels() { static auto* k = new std::unordered_map<const void*, Kernel*>; return *k; }

std::string demangled(const std::string& name) {
  int status = 0;
  char* text = abi::__cxa_demangle(name.c_str(), nullptr, nullptr, &status);
  std::string result = status == 0 ? text : name;
  free(text);
  return result;
}

cudaError_t launch_unknown(const Kernel* kernel, cudaStream_t stream) {
  std::string name = kernel ? kernel->name : "?";
  return guarded([&] {
    return submit(stream, cudaGraphNodeTypeKernel, name, [name] {
      Lock lock(mutex());
      counters().kernels_skipped++;
      skipped()[name]++;
    });
  });
}

// A function of a module that was loaded: what its parameters look like stands in the cubin.
struct Param { unsigned offset, size; };
struct Function {
  std::string name;
  std::string image; // identity of the cubin
  std::vector<Param> params;
  int registers = 32;
};
struct Module {
  std::vector<char> bytes;
  std::string identity;
  std::map<std::string, Function*> functions;
};

std::string identity_of(const char* data, size_t size) {
  uint64_t h = 1469598103934665603ull;
  for (size_t i = 0; i < size; ++i) { h ^= (unsigned char)data[i]; h *= 1099511628211ull; }
  char text[40];
  snprintf(text, sizeof text, "%016llx", (unsigned long long)h);
  return text;
}

size_t elf_size(const char* data) {
  auto* header = (const Elf64_Ehdr*)data;
  size_t end = header->e_shoff + (size_t)header->e_shnum * header->e_shentsize;
  end = std::max<size_t>(end, header->e_phoff + (size_t)header->e_phnum * header->e_phentsize);
  auto* sections = (const Elf64_Shdr*)(data + header->e_shoff);
  for (int i = 0; i < header->e_shnum; ++i)
    if (sections[i].sh_type != SHT_NOBITS) end = std::max<size_t>(end, sections[i].sh_offset + sections[i].sh_size);
  return end;
}

void read_params(const Module& module, Function* function) {
  const char* data = module.bytes.data();
  auto* header = (const Elf64_Ehdr*)data;
  auto* sections = (const Elf64_Shdr*)(data + header->e_shoff);
  const char* names = data + sections[header->e_shstrndx].sh_offset;
  std::string wanted = ".nv.info." + function->name;
  std::map<int, Param> found;
  for (int i = 0; i < header->e_shnum; ++i) {
    if (wanted != names + sections[i].sh_name) continue;
    const unsigned char* p = (const unsigned char*)data + sections[i].sh_offset;
    const unsigned char* end = p + sections[i].sh_size;
    while (p + 4 <= end) {
      unsigned format = p[0], attribute = p[1];
      if (format == 4) {
        unsigned size = p[2] | p[3] << 8;
        if (attribute == 0x17 && size >= 12) {
          uint16_t ordinal, offset;
          uint32_t word;
          memcpy(&ordinal, p + 8, 2);
          memcpy(&offset, p + 10, 2);
          memcpy(&word, p + 12, 4);
          found[ordinal] = {offset, word >> 18};
        }
        p += 4 + size;
      } else {
        p += 4;
      }
    }
  }
  for (auto& [ordinal, param] : found) function->params.push_back(param);
}

// name, cubin's identity, grid, block, bytes of the parameters, for each its offset and size, their number; 0 is success
using Callback = int (*)(const char*, const char*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                         const void*, const unsigned*, unsigned);
std::atomic<Callback> callback{nullptr};

cudaError_t launch_function(Function* function, dim3 grid, dim3 block, unsigned shared, cudaStream_t stream, void** args, void** extra) {
  std::vector<unsigned char> bytes;
  std::vector<unsigned> layout;
  for (size_t i = 0; i < function->params.size(); ++i) {
    auto [offset, size] = function->params[i];
    if (bytes.size() < offset + size) bytes.resize(offset + size);
    if (args) memcpy(bytes.data() + offset, args[i], size);
    layout.push_back(offset);
    layout.push_back(size);
  }
  if (extra && !args) {
    for (void** e = extra; *e != CU_LAUNCH_PARAM_END; e += 2)
      if (*e == CU_LAUNCH_PARAM_BUFFER_POINTER) memcpy(bytes.data(), e[1], bytes.size());
  }
  return guarded([&] {
    return submit(stream, cudaGraphNodeTypeKernel, function->name,
                  [name = function->name, image = function->image, grid, block, shared, bytes, layout] {
      counters().triton_launches++;
      for (size_t i = 0; i < layout.size(); i += 2) {
        if (layout[i + 1] != 8) continue;
        uintptr_t p;
        memcpy(&p, bytes.data() + layout[i], 8);
        check((void*)p, 1, name.c_str());
      }
      Callback run = callback;
      if (!run) {
        Lock lock(mutex());
        counters().kernels_skipped++;
        skipped()[name]++;
        return;
      }
      int code = run(name.c_str(), image.c_str(), grid.x, grid.y, grid.z, block.x, block.y, block.z, shared, bytes.data(),
                     layout.data(), layout.size() / 2);
      if (code == 1) {
        Lock lock(mutex());
        counters().kernels_skipped++;
        skipped()[name]++;
      } else if (code != 0) {
        throw std::runtime_error("kernel " + name + " failed in the interpreter");
      } else {
        counters().kernels_run++;
      }
    });
  });
}

void report() {
  if (!getenv("HOSTCUDA_REPORT")) return;
  auto& c = counters();
  fprintf(stderr, "hostcuda: %lld mallocs, %lld frees, peak %.1f MiB; %lld host ops, %lld triton launches, %lld kernels skipped; "
          "%lld captures (%lld failed), %lld nodes, %lld graph launches; %lld refusals, %lld wild accesses\n",
          c.mallocs.load(), c.frees.load(), peak_bytes / 1048576.0, c.host_ops.load(), c.triton_launches.load(), c.kernels_skipped.load(),
          c.captures.load(), c.captures_failed.load(), c.nodes_captured.load(), c.graph_launches.load(), c.refused.load(), c.wild.load());
  for (auto& [name, count] : skipped()) fprintf(stderr, "hostcuda: not computed, %lld times: %s\n", count, demangled(name).substr(0, 300).c_str());
  for (auto& [name, count] : refusals()) fprintf(stderr, "hostcuda: refused, %lld times: %s\n", count, name.c_str());
}
struct AtExit { AtExit() { atexit(report); } } at_exit;

} // namespace

namespace hostcuda {
__attribute__((visibility("default"))) cudaError_t issue(cudaStream_t stream, std::string name, std::function<void()> work) {
  counters().host_ops++;
  return submit(stream, cudaGraphNodeTypeKernel, std::move(name), std::move(work));
}
__attribute__((visibility("default"))) cudaError_t unsafe_call(const char* what) {
  Lock lock(mutex());
  return unsafe(what);
}
__attribute__((visibility("default"))) void check_range(const void* pointer, size_t bytes, const char* what) { check(pointer, bytes, what); }
__attribute__((visibility("default"))) bool is_device_pointer(const void* pointer) { return in_region((uintptr_t)pointer); }
} // namespace hostcuda

// -- what Python asks by ctypes ---------------------------------------------------------------------------------------

API long long hostcuda_counter(const char* name) {
  auto& c = counters();
#define ONE(field) if (!strcmp(name, #field)) return c.field
  ONE(kernels_run); ONE(kernels_skipped); ONE(host_ops); ONE(graph_launches); ONE(nodes_run); ONE(captures); ONE(captures_failed);
  ONE(nodes_captured); ONE(instantiations); ONE(mallocs); ONE(frees); ONE(synchronizations); ONE(triton_launches); ONE(refused);
  ONE(wild); ONE(memcpys); ONE(memsets); ONE(modules);
#undef ONE
  if (!strcmp(name, "used_bytes")) return used_bytes;
  if (!strcmp(name, "peak_bytes")) return peak_bytes;
  if (!strcmp(name, "active_captures")) { Lock lock(mutex()); return active().size(); }
  return -1;
}
API void hostcuda_set_callback(void* function) { callback = (Callback)function; }
API int hostcuda_skipped(char* out, int size) {
  Lock lock(mutex());
  std::string text;
  for (auto& [name, count] : skipped()) text += std::to_string(count) + " " + demangled(name) + "\n";
  snprintf(out, size, "%s", text.c_str());
  return skipped().size();
}
API int hostcuda_refusals(char* out, int size) {
  Lock lock(mutex());
  std::string text;
  for (auto& [name, count] : refusals()) text += std::to_string(count) + " " + name + "\n";
  snprintf(out, size, "%s", text.c_str());
  return refusals().size();
}
API void hostcuda_clear_sticky() { sticky = 0; }
API const char* hostcuda_identity(const char* data, long long size) {
  static thread_local std::string text;
  text = identity_of(data, size);
  return text.c_str();
}

// -- errors -----------------------------------------------------------------------------------------------------------

namespace {
struct ErrorText { int code; const char* name; const char* text; };
const ErrorText kErrors[] = {
    {0, "cudaSuccess", "no error"},
    {1, "cudaErrorInvalidValue", "invalid argument"},
    {2, "cudaErrorMemoryAllocation", "out of memory"},
    {3, "cudaErrorInitializationError", "initialization error"},
    {98, "cudaErrorInvalidDeviceFunction", "invalid device function"},
    {100, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {101, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {201, "cudaErrorDeviceUninitialized", "invalid device context"},
    {217, "cudaErrorPeerAccessUnsupported", "peer access is not supported between these two devices"},
    {400, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {401, "cudaErrorIllegalState", "the operation cannot be performed in the present state"},
    {500, "cudaErrorSymbolNotFound", "named symbol not found"},
    {600, "cudaErrorNotReady", "device not ready"},
    {700, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
    {704, "cudaErrorPeerAccessAlreadyEnabled", "peer access is already enabled"},
    {712, "cudaErrorHostMemoryAlreadyRegistered", "part or all of the requested memory range is already mapped"},
    {713, "cudaErrorHostMemoryNotRegistered", "pointer does not correspond to a registered memory region"},
    {719, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {801, "cudaErrorNotSupported", "operation not supported"},
    {900, "cudaErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing"},
    {901, "cudaErrorStreamCaptureInvalidated", "operation failed due to a previous error during capture"},
    {902, "cudaErrorStreamCaptureMerge", "operation would result in a merge of separate capture sequences"},
    {903, "cudaErrorStreamCaptureUnmatched", "capture was not ended in the same stream as it began"},
    {904, "cudaErrorStreamCaptureUnjoined", "capturing stream has unjoined work"},
    {905, "cudaErrorStreamCaptureIsolation", "dependency created on uncaptured work in another stream"},
    {906, "cudaErrorStreamCaptureImplicit", "operation would make the legacy stream depend on a capturing blocking stream"},
    {907, "cudaErrorCapturedEvent", "operation not permitted on an event last recorded in a capturing stream"},
    {908, "cudaErrorStreamCaptureWrongThread", "attempt to terminate a thread-local capture sequence from another thread"},
    {999, "cudaErrorUnknown", "unknown error"},
};
const ErrorText& text_of(int code) {
  for (auto& one : kErrors) if (one.code == code) return one;
  return kErrors[sizeof kErrors / sizeof *kErrors - 1];
}
} // namespace

API const char* cudaGetErrorName(cudaError_t e) { return text_of(e).name; }
API const char* cudaGetErrorString(cudaError_t e) { return text_of(e).text; }
API cudaError_t cudaGetLastError() { auto e = last_error; last_error = cudaSuccess; return sticky ? (cudaError_t)sticky.load() : e; }
API cudaError_t cudaPeekAtLastError() { return sticky ? (cudaError_t)sticky.load() : last_error; }

// -- device -----------------------------------------------------------------------------------------------------------

API cudaError_t cudaGetDeviceCount(int* n) { *n = getenv("CUDA_VISIBLE_DEVICES") && !*getenv("CUDA_VISIBLE_DEVICES") ? 0 : 1; return *n ? cudaSuccess : done(cudaErrorNoDevice); }
API cudaError_t cudaGetDevice(int* d) { *d = 0; return cudaSuccess; }
API cudaError_t cudaSetDevice(int d) { return d == 0 ? cudaSuccess : done(cudaErrorInvalidDevice); }
API cudaError_t cudaDriverGetVersion(int* v) { *v = 13000; return cudaSuccess; }
API cudaError_t cudaRuntimeGetVersion(int* v) { *v = 13000; return cudaSuccess; }
API cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { *can = 0; return cudaSuccess; }
API cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return done(cudaErrorPeerAccessUnsupported); }
API cudaError_t cudaDeviceGetPCIBusId(char* out, int n, int) { snprintf(out, n, "0000:01:00.0"); return cudaSuccess; }
API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) { if (least) *least = 0; if (greatest) *greatest = -5; return cudaSuccess; }
API cudaError_t cudaProfilerStart() { return cudaSuccess; }
API cudaError_t cudaProfilerStop() { return cudaSuccess; }
API cudaError_t cudaDeviceReset() { return cudaSuccess; }
API cudaError_t cudaDeviceSetLimit(cudaLimit, size_t) { return cudaSuccess; }
API cudaError_t cudaDeviceGetLimit(size_t* v, cudaLimit) { *v = 1 << 20; return cudaSuccess; }

API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int device) {
  if (device != 0) return done(cudaErrorInvalidDevice);
  memset(p, 0, sizeof *p);
  snprintf(p->name, sizeof p->name, "Host-memory CUDA device (no GPU)");
  for (int i = 0; i < 16; ++i) p->uuid.bytes[i] = i + 1;
  p->totalGlobalMem = kTotal;
  p->sharedMemPerBlock = 49152;
  p->regsPerBlock = 65536;
  p->warpSize = 32;
  p->memPitch = 2147483647;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024; p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647; p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->totalConstMem = 65536;
  p->major = 9; p->minor = 0;
  p->textureAlignment = 512; p->texturePitchAlignment = 32;
  p->multiProcessorCount = 132;
  p->canMapHostMemory = 1;
  p->concurrentKernels = 1;
  p->pciBusID = 1;
  p->asyncEngineCount = 3;
  p->unifiedAddressing = 1;
  p->memoryBusWidth = 5120;
  p->l2CacheSize = 50 << 20;
  p->maxThreadsPerMultiProcessor = 2048;
  p->streamPrioritiesSupported = 1;
  p->globalL1CacheSupported = p->localL1CacheSupported = 1;
  p->sharedMemPerMultiprocessor = 233472;
  p->regsPerMultiprocessor = 65536;
  p->managedMemory = 1;
  p->computePreemptionSupported = 1;
  p->canUseHostPointerForRegisteredMem = 1;
  p->cooperativeLaunch = 1;
  p->sharedMemPerBlockOptin = 232448;
  p->maxBlocksPerMultiProcessor = 32;
  p->reservedSharedMemPerBlock = 1024;
  p->hostRegisterSupported = 1;
  p->memoryPoolsSupported = 1;
  p->ipcEventSupported = 1;
  p->clusterLaunch = 1;
  p->unifiedFunctionPointers = 1;
  return cudaSuccess;
}

namespace {
int attribute(int which) {
  switch (which) { // numbers are those of CUdevice_attribute and cudaDeviceAttr alike
    case 1: return 1024; case 2: case 3: return 1024; case 4: return 64;
    case 5: return 2147483647; case 6: case 7: return 65535;
    case 8: return 49152; case 9: return 65536; case 10: return 32; case 11: return 2147483647;
    case 12: return 65536; case 13: return 1980000; case 14: return 512; case 15: return 3; case 16: return 132;
    case 19: return 1; case 31: return 1; case 33: return 1; case 36: return 2619000; case 37: return 5120;
    case 38: return 50 << 20; case 39: return 2048; case 40: return 3; case 41: return 1;
    case 75: return 9; case 76: return 0; case 78: return 1; case 79: case 80: return 1; case 81: return 233472; case 82: return 65536;
    case 83: return 1; case 90: return 1; case 91: return 1; case 95: return 1; case 97: return 232448;
    case 102: return getenv("HOSTCUDA_NO_VMM") ? 0 : 1; // virtual memory management
    case 103: return 1; // posix file descriptors
    case 106: return 32; case 111: return 1024; case 115: return 1; case 120: return 1; case 121: return 0; // memory pools..
    default: return 0;
  }
}
} // namespace
API cudaError_t cudaDeviceGetAttribute(int* v, cudaDeviceAttr a, int) { *v = attribute(a); return cudaSuccess; }

API cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total) {
  Lock lock(mutex());
  *free_bytes = kTotal - used_bytes; *total = kTotal;
  return cudaSuccess;
}

// -- memory -----------------------------------------------------------------------------------------------------------

API cudaError_t cudaMalloc(void** out, size_t bytes) {
  Lock lock(mutex());
  if (sticky) return done((cudaError_t)sticky.load());
  if (auto e = unsafe("cudaMalloc")) return e;
  auto e = device_malloc(out, bytes);
  TRACE("cudaMalloc(%zu) -> %p %d", bytes, *out, e);
  return done(e);
}
API cudaError_t cudaFree(void* p) {
  if (!p) return cudaSuccess; // initialises only
  { Lock lock(mutex()); if (auto e = unsafe("cudaFree")) return e; }
  run_all();
  Lock lock(mutex());
  TRACE("cudaFree(%p)", p);
  return done(device_free(p));
}
API cudaError_t cudaMallocManaged(void** out, size_t bytes, unsigned) { Lock lock(mutex()); if (auto e = unsafe("cudaMallocManaged")) return e; return done(device_malloc(out, bytes, kManaged)); }
API cudaError_t cudaHostAlloc(void** out, size_t bytes, unsigned) {
  Lock lock(mutex());
  if (auto e = unsafe("cudaHostAlloc")) return e;
  *out = aligned_alloc(4096, (std::max<size_t>(bytes, 1) + 4095) / 4096 * 4096);
  if (!*out) return done(cudaErrorMemoryAllocation);
  blocks()[(uintptr_t)*out] = {bytes, kPinned, 0};
  return cudaSuccess;
}
API cudaError_t cudaMallocHost(void** out, size_t bytes) { return cudaHostAlloc(out, bytes, 0); }
API cudaError_t cudaFreeHost(void* p) {
  Lock lock(mutex());
  if (!p) return cudaSuccess;
  if (auto e = unsafe("cudaFreeHost")) return e;
  auto it = blocks().find((uintptr_t)p);
  if (it == blocks().end() || it->second.kind != kPinned) return done(cudaErrorInvalidValue);
  blocks().erase(it);
  free(p);
  return cudaSuccess;
}
API cudaError_t cudaHostRegister(void* p, size_t bytes, unsigned) {
  Lock lock(mutex());
  if (auto e = unsafe("cudaHostRegister")) return e;
  if (block_of((uintptr_t)p) != blocks().end()) return done(cudaErrorHostMemoryAlreadyRegistered);
  blocks()[(uintptr_t)p] = {bytes, kRegistered, 0};
  return cudaSuccess;
}
API cudaError_t cudaHostUnregister(void* p) {
  Lock lock(mutex());
  if (auto e = unsafe("cudaHostUnregister")) return e;
  auto it = blocks().find((uintptr_t)p);
  if (it == blocks().end() || it->second.kind != kRegistered) return done(cudaErrorHostMemoryNotRegistered);
  blocks().erase(it);
  return cudaSuccess;
}
API cudaError_t cudaHostGetDevicePointer(void** out, void* p, unsigned) { *out = p; return cudaSuccess; }
API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* a, const void* p) {
  Lock lock(mutex());
  memset(a, 0, sizeof *a);
  auto it = block_of((uintptr_t)p);
  if (it == blocks().end()) { a->type = cudaMemoryTypeUnregistered; a->device = -2; a->hostPointer = nullptr; return cudaSuccess; }
  Kind kind = it->second.kind;
  a->device = 0;
  a->devicePointer = const_cast<void*>(p);
  if (kind == kPinned || kind == kRegistered) { a->type = cudaMemoryTypeHost; a->hostPointer = const_cast<void*>(p); }
  else a->type = kind == kManaged ? cudaMemoryTypeManaged : cudaMemoryTypeDevice;
  return cudaSuccess;
}

namespace {
cudaError_t synchronous(const char* call) {
  {
    Lock lock(mutex());
    if (sticky) return done((cudaError_t)sticky.load());
    if (auto e = unsafe(call)) return e;
    if (auto e = implicit(&legacy_stream, call)) return e;
  }
  run_legacy();
  return cudaSuccess;
}
bool pageable(const void* p) { Lock lock(mutex()); return !in_region((uintptr_t)p) && block_of((uintptr_t)p) == blocks().end(); }
} // namespace
API cudaError_t cudaMemcpy(void* d, const void* s, size_t n, cudaMemcpyKind) {
  if (auto e = synchronous("cudaMemcpy")) return e;
  return guarded([&] { copy_bytes(d, s, n); return cudaSuccess; });
}
API cudaError_t cudaMemcpyAsync(void* d, const void* s, size_t n, cudaMemcpyKind kind, cudaStream_t stream) {
  bool captured;
  { Lock lock(mutex()); captured = resolve(stream)->capture != nullptr; }
  if (kLazy && !captured && pageable(s)) { // staged at once
    auto staged = std::make_shared<std::vector<char>>((const char*)s, (const char*)s + n);
    return guarded([&] { return submit(stream, cudaGraphNodeTypeMemcpy, "memcpy from pageable memory", [=] { copy_bytes(d, staged->data(), n); }); });
  }
  if (kLazy && !captured && pageable(d)) { // waited for
    auto e = guarded([&] { return submit(stream, cudaGraphNodeTypeMemcpy, "memcpy to pageable memory", [=] { copy_bytes(d, s, n); }); });
    if (e == cudaSuccess) run_until(resolve(stream)->queue, ~0ull);
    return e;
  }
  return guarded([&] { return submit(stream, cudaGraphNodeTypeMemcpy, "memcpy", [=] { copy_bytes(d, s, n); }); });
}
API cudaError_t cudaMemcpyPeerAsync(void* d, int, const void* s, int, size_t n, cudaStream_t stream) { return cudaMemcpyAsync(d, s, n, cudaMemcpyDefault, stream); }
API cudaError_t cudaMemcpy2DAsync(void* d, size_t dp, const void* s, size_t sp, size_t w, size_t h, cudaMemcpyKind, cudaStream_t stream) {
  return guarded([&] { return submit(stream, cudaGraphNodeTypeMemcpy, "memcpy2D", [=] {
    for (size_t i = 0; i < h; ++i) copy_bytes((char*)d + i * dp, (const char*)s + i * sp, w);
  }); });
}
API cudaError_t cudaMemset(void* d, int v, size_t n) {
  if (auto e = synchronous("cudaMemset")) return e;
  return guarded([&] { set_bytes(d, v, n); return cudaSuccess; });
}
API cudaError_t cudaMemsetAsync(void* d, int v, size_t n, cudaStream_t stream) {
  return guarded([&] { return submit(stream, cudaGraphNodeTypeMemset, "memset", [=] { set_bytes(d, v, n); }); });
}

namespace {
struct Variable { std::string name; size_t size; void* memory; };
std::unordered_map<const void*, Variable>& variables() { static auto* v = new std::unordered_map<const void*, Variable>; return *v; }
void* symbol(const void* host) {
  Lock lock(mutex());
  auto& v = variables()[host];
  if (!v.memory) device_malloc(&v.memory, std::max<size_t>(v.size, 1024));
  return v.memory;
}
} // namespace
API cudaError_t cudaGetSymbolAddress(void** p, const void* s) { *p = symbol(s); return cudaSuccess; }
API cudaError_t cudaMemcpyToSymbol(const void* s, const void* src, size_t n, size_t offset, cudaMemcpyKind) {
  if (auto e = synchronous("cudaMemcpyToSymbol")) return e;
  memcpy((char*)symbol(s) + offset, src, n);
  return cudaSuccess;
}

// Memory pools: allocation at once.
API cudaError_t cudaMallocAsync(void** p, size_t n, cudaStream_t s) {
  Lock lock(mutex());
  if (resolve(s)->capture) { invalidate(*resolve(s)->capture, "cudaMallocAsync"); return refuse("cudaMallocAsync", cudaErrorNotSupported); }
  return done(device_malloc(p, n));
}
API cudaError_t cudaFreeAsync(void* p, cudaStream_t) { Lock lock(mutex()); return done(device_free(p)); }
API cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* p, int) { *p = (cudaMemPool_t)0x10; return cudaSuccess; }
API cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) { return cudaSuccess; }
API cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr, void* v) { *(uint64_t*)v = used_bytes; return cudaSuccess; }
API cudaError_t cudaMemPoolSetAccess(cudaMemPool_t, const cudaMemAccessDesc*, size_t) { return cudaSuccess; }
API cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, size_t) { return cudaSuccess; }
API cudaError_t cudaDeviceGetGraphMemAttribute(int, cudaGraphMemAttributeType, void* v) { *(uint64_t*)v = 0; return cudaSuccess; }
API cudaError_t cudaDeviceSetGraphMemAttribute(int, cudaGraphMemAttributeType, void*) { return cudaSuccess; }

// Between processes: the same file, opened through /proc.
namespace {
struct IpcMemory { int pid, fd; uint64_t offset, size; };
struct IpcEvent { int pid; uint64_t id; };
}
API cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* h, void* p) {
  Lock lock(mutex());
  auto it = block_of((uintptr_t)p);
  if (it == blocks().end() || it->second.kind != kDeviceMemory) return done(cudaErrorInvalidValue);
  memset(h, 0, sizeof *h);
  IpcMemory m{getpid(), memory_fd, (uint64_t)it->second.offset, it->second.size};
  memcpy(h, &m, sizeof m);
  return cudaSuccess;
}
API cudaError_t cudaIpcOpenMemHandle(void** p, cudaIpcMemHandle_t h, unsigned) {
  Lock lock(mutex());
  IpcMemory m;
  memcpy(&m, &h, sizeof m);
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/fd/%d", m.pid, m.fd);
  int fd = open(path, O_RDWR | O_CLOEXEC);
  if (fd < 0) return done(cudaErrorInvalidValue);
  uintptr_t at = take_addresses(m.size);
  void* got = mmap((void*)at, (m.size + 4095) / 4096 * 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, m.offset);
  close(fd);
  if (got == MAP_FAILED) return done(cudaErrorInvalidValue);
  blocks()[at] = {m.size, kImported, 0};
  *p = (void*)at;
  return cudaSuccess;
}
API cudaError_t cudaIpcCloseMemHandle(void* p) {
  run_all();
  Lock lock(mutex());
  auto it = blocks().find((uintptr_t)p);
  if (it == blocks().end()) return done(cudaErrorInvalidValue);
  unmap(it->first, it->second.size, 0, false);
  blocks().erase(it);
  return cudaSuccess;
}
API cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t* h, cudaEvent_t) { run_all(); memset(h, 0, sizeof *h); return cudaSuccess; }
API cudaError_t cudaIpcOpenEventHandle(cudaEvent_t* e, cudaIpcEventHandle_t) { *e = (cudaEvent_t) new Event; return cudaSuccess; }

// -- streams and events -----------------------------------------------------------------------------------------------

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* s, unsigned flags, int priority) {
  Lock lock(mutex());
  auto* stream = new Stream;
  stream->flags = flags; stream->priority = priority; stream->id = next_stream++;
  stream->queue->blocking = !(flags & cudaStreamNonBlocking);
  if (kLazy) queues().push_back(stream->queue);
  streams().insert(stream);
  *s = (cudaStream_t)stream;
  return cudaSuccess;
}
API cudaError_t cudaStreamCreate(cudaStream_t* s) { return cudaStreamCreateWithPriority(s, 0, 0); }
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* s, unsigned f) { return cudaStreamCreateWithPriority(s, f, 0); }
API cudaError_t cudaStreamDestroy(cudaStream_t s) {
  Lock lock(mutex());
  auto* stream = (Stream*)s;
  if (!streams().count(stream)) return done(cudaErrorInvalidResourceHandle);
  if (stream->capture) { invalidate(*stream->capture, "cudaStreamDestroy"); stream->capture->streams.erase(stream); }
  streams().erase(stream);
  delete stream;
  return cudaSuccess;
}
API cudaError_t cudaStreamGetPriority(cudaStream_t s, int* p) { *p = resolve(s)->priority; return cudaSuccess; }
API cudaError_t cudaStreamGetFlags(cudaStream_t s, unsigned* f) { *f = resolve(s)->flags; return cudaSuccess; }
API cudaError_t cudaStreamGetId(cudaStream_t s, unsigned long long* id) { *id = resolve(s)->id; return cudaSuccess; }
API cudaError_t cudaStreamGetDevice(cudaStream_t, int* d) { *d = 0; return cudaSuccess; }

namespace {
cudaError_t wait_for(cudaStream_t s, const char* call, bool query) {
  std::shared_ptr<Queue> queue;
  bool legacy;
  {
  Lock lock(mutex());
  if (sticky) return done((cudaError_t)sticky.load());
  Stream* stream = resolve(s);
  if (!known(stream)) return refuse(call, cudaErrorInvalidResourceHandle);
  if (stream->capture) {
    invalidate(*stream->capture, call);
    return refuse(call, cudaErrorStreamCaptureUnsupported);
  }
  if (auto e = unsafe(call)) return e;
  if (auto e = implicit(stream, call)) return e;
  counters().synchronizations++;
  queue = stream->queue;
  legacy = stream == &legacy_stream;
  if (kLazy && query && queue->completed < queue->issued && (stream->asked = !stream->asked)) return cudaErrorNotReady;
  }
  if (legacy) run_legacy(); else run_until(queue, ~0ull);
  return sticky ? done((cudaError_t)sticky.load()) : cudaSuccess;
}
} // namespace
API cudaError_t cudaStreamSynchronize(cudaStream_t s) { return wait_for(s, "cudaStreamSynchronize", false); }
API cudaError_t cudaStreamQuery(cudaStream_t s) { return wait_for(s, "cudaStreamQuery", true); }
API cudaError_t cudaDeviceSynchronize() {
  {
    Lock lock(mutex());
    if (sticky) return done((cudaError_t)sticky.load());
    if (auto e = device_wide("cudaDeviceSynchronize")) return e;
    counters().synchronizations++;
  }
  run_all();
  return sticky ? done((cudaError_t)sticky.load()) : cudaSuccess;
}
API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* e, unsigned flags) { auto* event = new Event; event->flags = flags; *e = (cudaEvent_t)event; return cudaSuccess; }
API cudaError_t cudaEventCreate(cudaEvent_t* e) { return cudaEventCreateWithFlags(e, 0); }
API cudaError_t cudaEventDestroy(cudaEvent_t e) { Lock lock(mutex()); delete (Event*)e; return cudaSuccess; }
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned flags) {
  Lock lock(mutex());
  if (sticky) return done((cudaError_t)sticky.load());
  auto* event = (Event*)e;
  Stream* stream = resolve(s);
  if (!known(stream)) return refuse("cudaEventRecord", cudaErrorInvalidResourceHandle);
  if (stream->capture) {
    if (stream->capture->invalid) return refuse("cudaEventRecord", cudaErrorStreamCaptureInvalidated);
    if (flags & cudaEventRecordExternal) return add_node(stream, cudaGraphNodeTypeEventRecord, "event record", [time = event->time] { *time = now_ms(); });
    event->capture = stream->capture;
    event->deps = stream->deps;
    return cudaSuccess;
  }
  if (auto error = implicit(stream, "cudaEventRecord")) return error;
  event->capture = nullptr;
  event->deps.clear();
  event->recorded = true;
  event->asked = false;
  event->time = std::make_shared<double>(now_ms());
  if (kLazy) {
    push(stream, {[time = event->time] { *time = now_ms(); }, nullptr, 0});
    event->queue = stream->queue;
    event->upto = stream->queue->issued;
  }
  return cudaSuccess;
}
API cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) { return cudaEventRecordWithFlags(e, s, 0); }
namespace {
cudaError_t wait_for_event(cudaEvent_t e, const char* call, bool query) {
  std::shared_ptr<Queue> queue;
  unsigned long long upto;
  {
  Lock lock(mutex());
  if (sticky) return done((cudaError_t)sticky.load());
  auto* event = (Event*)e;
  if (event->capture) {
    if (!event->capture->ended) invalidate(*event->capture, call);
    return refuse(call, cudaErrorCapturedEvent);
  }
  if (auto error = unsafe(call)) return error;
  counters().synchronizations++;
  if (!kLazy || !event->queue) return cudaSuccess;
  queue = event->queue;
  upto = event->upto;
  if (query && queue->completed < upto && (event->asked = !event->asked)) return cudaErrorNotReady;
  }
  run_until(queue, upto);
  return sticky ? done((cudaError_t)sticky.load()) : cudaSuccess;
}
} // namespace
API cudaError_t cudaEventSynchronize(cudaEvent_t e) { return wait_for_event(e, "cudaEventSynchronize", false); }
API cudaError_t cudaEventQuery(cudaEvent_t e) { return wait_for_event(e, "cudaEventQuery", true); }
API cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t a, cudaEvent_t b) {
  auto *x = (Event*)a, *y = (Event*)b;
  if (x->capture || y->capture) return refuse("cudaEventElapsedTime", cudaErrorCapturedEvent);
  if (!x->recorded || !y->recorded) return done(cudaErrorInvalidResourceHandle);
  *ms = *y->time - *x->time;
  return cudaSuccess;
}
API cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned flags) {
  Lock lock(mutex());
  if (sticky) return done((cudaError_t)sticky.load());
  const char* call = "cudaStreamWaitEvent";
  auto* event = (Event*)e;
  Stream* stream = resolve(s);
  if (!known(stream)) return refuse(call, cudaErrorInvalidResourceHandle);
  if (stream->capture && stream->capture->invalid) return refuse(call, cudaErrorStreamCaptureInvalidated);
  if (event->capture) {
    auto capture = event->capture;
    if (capture->ended) {
      if (stream->capture) invalidate(*stream->capture, call);
      return refuse(call, cudaErrorCapturedEvent);
    }
    if (capture->invalid) return refuse(call, cudaErrorStreamCaptureInvalidated);
    if (!stream->capture) {
      if (stream == &legacy_stream) { invalidate(*capture, call); return refuse(call, cudaErrorStreamCaptureImplicit); }
      stream->capture = capture;
      stream->deps = event->deps;
      capture->streams.insert(stream);
      return cudaSuccess;
    }
    if (stream->capture != capture) {
      invalidate(*stream->capture, call); invalidate(*capture, call);
      return refuse(call, cudaErrorStreamCaptureMerge);
    }
    for (Node* d : event->deps)
      if (std::find(stream->deps.begin(), stream->deps.end(), d) == stream->deps.end()) stream->deps.push_back(d);
    return cudaSuccess;
  }
  if (stream->capture && event->recorded) {
    if (flags & cudaEventWaitExternal) return add_node(stream, cudaGraphNodeTypeWaitEvent, "event wait", nullptr);
    invalidate(*stream->capture, call);
    return refuse(call, cudaErrorStreamCaptureIsolation);
  }
  if (auto error = implicit(stream, call)) return error;
  if (kLazy && event->queue && event->queue != stream->queue && event->queue->completed < event->upto) push(stream, {nullptr, event->queue, event->upto});
  return cudaSuccess;
}
API cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t fn, void* data) {
  return guarded([&] { return submit(s, cudaGraphNodeTypeHost, "host function", [=] { fn(data); }); });
}
API cudaError_t cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t fn, void* data, unsigned) {
  { Lock lock(mutex()); if (resolve(s)->capture) { invalidate(*resolve(s)->capture, "cudaStreamAddCallback"); return refuse("cudaStreamAddCallback", cudaErrorStreamCaptureUnsupported); } }
  return guarded([&] { return submit(s, cudaGraphNodeTypeHost, "callback", [=] { fn(s, cudaSuccess, data); }); });
}

// -- captures and graphs ----------------------------------------------------------------------------------------------

API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) { std::swap(*mode, thread_mode); return cudaSuccess; }
API cudaError_t cudaStreamBeginCapture(cudaStream_t s, cudaStreamCaptureMode mode) {
  Lock lock(mutex());
  if (sticky) return done((cudaError_t)sticky.load());
  Stream* stream = resolve(s);
  if (!known(stream)) return refuse("cudaStreamBeginCapture", cudaErrorInvalidResourceHandle);
  if (stream == &legacy_stream) return refuse("cudaStreamBeginCapture", cudaErrorStreamCaptureUnsupported);
  if (stream->capture) return refuse("cudaStreamBeginCapture", cudaErrorIllegalState);
  auto capture = std::make_shared<Capture>();
  capture->id = next_capture++;
  capture->mode = mode;
  capture->thread = std::this_thread::get_id();
  capture->graph = new Graph;
  capture->origin = stream;
  capture->streams = {stream};
  stream->capture = capture;
  stream->deps.clear();
  active().insert(capture);
  counters().captures++;
  TRACE("capture %llu begins on %p, mode %d", capture->id, (void*)s, mode);
  return cudaSuccess;
}
API cudaError_t cudaStreamBeginCaptureToGraph(cudaStream_t, cudaGraph_t, const cudaGraphNode_t*, const cudaGraphEdgeData*, size_t, cudaStreamCaptureMode) { return refuse("cudaStreamBeginCaptureToGraph", cudaErrorNotSupported); }
namespace {
bool reaches(const std::vector<Node*>& from, const std::vector<Node*>& wanted) {
  std::set<Node*> seen;
  std::vector<Node*> todo(from);
  while (!todo.empty()) {
    Node* n = todo.back();
    todo.pop_back();
    if (!seen.insert(n).second) continue;
    for (Node* d : n->deps) todo.push_back(d);
  }
  for (Node* n : wanted) if (!seen.count(n)) return false;
  return true;
}
void destroy_graph(Graph* graph) {
  for (auto& [object, count] : graph->objects) release_object(object, count);
  delete graph;
}
} // namespace
API cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t* out) {
  Lock lock(mutex());
  *out = nullptr;
  const char* call = "cudaStreamEndCapture";
  Stream* stream = resolve(s);
  if (!stream->capture) return refuse(call, cudaErrorIllegalState);
  auto capture = stream->capture;
  if (capture->origin != stream) { invalidate(*capture, call); return refuse(call, cudaErrorStreamCaptureUnmatched); }
  if (capture->mode != cudaStreamCaptureModeRelaxed && capture->thread != std::this_thread::get_id())
    return refuse(call, cudaErrorStreamCaptureWrongThread);
  cudaError_t error = cudaSuccess;
  if (capture->invalid) error = cudaErrorStreamCaptureInvalidated;
  else
    for (Stream* one : capture->streams)
      if (one != stream && !reaches(stream->deps, one->deps)) error = cudaErrorStreamCaptureUnjoined;
  for (Stream* one : capture->streams) { one->capture = nullptr; one->deps.clear(); }
  capture->ended = true;
  active().erase(capture);
  TRACE("capture %llu ends: %s, %zu nodes", capture->id, cudaGetErrorName(error), capture->graph->nodes.size());
  if (error) {
    counters().captures_failed++;
    destroy_graph(capture->graph);
    return refuse(call, error);
  }
  *out = (cudaGraph_t)capture->graph;
  return cudaSuccess;
}
API cudaError_t cudaStreamIsCapturing(cudaStream_t s, cudaStreamCaptureStatus* status) {
  Lock lock(mutex());
  Stream* stream = resolve(s);
  if (stream == &legacy_stream) {
    // "If called on the legacy stream while a blocking stream captures": an implicit dependency
    if (auto e = implicit(stream, "cudaStreamIsCapturing")) return e;
  }
  *status = !stream->capture ? cudaStreamCaptureStatusNone : stream->capture->invalid ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, cudaStreamCaptureStatus* status, unsigned long long* id, cudaGraph_t* graph,
                                         const cudaGraphNode_t** deps, const cudaGraphEdgeData** edges, size_t* count) {
  Lock lock(mutex());
  if (auto e = cudaStreamIsCapturing(s, status)) return e;
  Stream* stream = resolve(s);
  if (*status != cudaStreamCaptureStatusActive) {
    if (id && stream->capture) *id = stream->capture->id;
    return cudaSuccess;
  }
  if (id) *id = stream->capture->id;
  if (graph) *graph = (cudaGraph_t)stream->capture->graph;
  if (deps) *deps = (const cudaGraphNode_t*)stream->deps.data();
  if (edges) *edges = nullptr;
  if (count) *count = stream->deps.size();
  return cudaSuccess;
}
API cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t s, cudaGraphNode_t* deps, const cudaGraphEdgeData*, size_t n, unsigned flags) {
  Lock lock(mutex());
  Stream* stream = resolve(s);
  if (!stream->capture) return refuse("cudaStreamUpdateCaptureDependencies", cudaErrorIllegalState);
  if (flags == cudaStreamSetCaptureDependencies) stream->deps.clear();
  for (size_t i = 0; i < n; ++i) stream->deps.push_back((Node*)deps[i]);
  return cudaSuccess;
}
API cudaError_t cudaGraphCreate(cudaGraph_t* g, unsigned) { *g = (cudaGraph_t) new Graph; return cudaSuccess; }
API cudaError_t cudaGraphDestroy(cudaGraph_t g) { Lock lock(mutex()); destroy_graph((Graph*)g); return cudaSuccess; }
API cudaError_t cudaGraphGetNodes(cudaGraph_t g, cudaGraphNode_t* nodes, size_t* n) {
  Lock lock(mutex());
  auto& all = ((Graph*)g)->nodes;
  if (nodes) for (size_t i = 0; i < std::min(*n, all.size()); ++i) nodes[i] = (cudaGraphNode_t)all[i].get();
  if (!nodes) *n = all.size(); else *n = std::min(*n, all.size());
  return cudaSuccess;
}
API cudaError_t cudaGraphNodeGetType(cudaGraphNode_t n, cudaGraphNodeType* t) { *t = ((Node*)n)->type; return cudaSuccess; }
API cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t node, cudaGraphNode_t* deps, cudaGraphEdgeData*, size_t* n) {
  Lock lock(mutex());
  auto& all = ((Node*)node)->deps;
  if (deps) for (size_t i = 0; i < std::min(*n, all.size()); ++i) deps[i] = (cudaGraphNode_t)all[i];
  *n = all.size();
  return cudaSuccess;
}
API cudaError_t cudaGraphAddNode(cudaGraphNode_t*, cudaGraph_t, const cudaGraphNode_t*, const cudaGraphEdgeData*, size_t, cudaGraphNodeParams*) { return refuse("cudaGraphAddNode", cudaErrorNotSupported); }
API cudaError_t cudaGraphConditionalHandleCreate(cudaGraphConditionalHandle*, cudaGraph_t, unsigned, unsigned) { return refuse("cudaGraphConditionalHandleCreate", cudaErrorNotSupported); }
API cudaError_t cudaGraphKernelNodeGetParams(cudaGraphNode_t, cudaKernelNodeParams* p) { memset(p, 0, sizeof *p); return cudaSuccess; }
API cudaError_t cudaGraphInstantiate(cudaGraphExec_t* e, cudaGraph_t g, unsigned long long) {
  Lock lock(mutex());
  if (sticky) return done((cudaError_t)sticky.load());
  auto* graph = (Graph*)g;
  auto* exec = new Exec;
  exec->nodes = ordered(graph->nodes);
  exec->objects = graph->objects;
  for (auto& [object, count] : exec->objects) object->references += count;
  counters().instantiations++;
  *e = (cudaGraphExec_t)exec;
  return cudaSuccess;
}
API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* e, cudaGraph_t g, unsigned long long f) { return cudaGraphInstantiate(e, g, f); }
API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t e) {
  Lock lock(mutex());
  auto* exec = (Exec*)e;
  for (auto& [object, count] : exec->objects) release_object(object, count);
  delete exec;
  return cudaSuccess;
}
API cudaError_t cudaGraphUpload(cudaGraphExec_t, cudaStream_t) { return cudaSuccess; }
API cudaError_t cudaGraphLaunch(cudaGraphExec_t e, cudaStream_t s) {
  auto nodes = ((Exec*)e)->nodes;
  {
    Lock lock(mutex());
    if (!resolve(s)->capture) counters().graph_launches++;
  }
  TRACE("graph launch of %zu nodes on %p", nodes.size(), (void*)s);
  return guarded([&] { return submit(s, cudaGraphNodeTypeGraph, "graph", [nodes] { run_nodes(nodes); }); });
}
API cudaError_t cudaGraphDebugDotPrint(cudaGraph_t g, const char* path, unsigned) {
  Lock lock(mutex());
  FILE* file = fopen(path, "w");
  if (!file) return done(cudaErrorUnknown);
  fprintf(file, "digraph fake {\n");
  for (auto& n : ((Graph*)g)->nodes) {
    fprintf(file, "  n%d [label=\"%s\"];\n", n->id, n->name.c_str());
    for (Node* d : n->deps) fprintf(file, "  n%d -> n%d;\n", d->id, n->id);
  }
  fprintf(file, "}\n");
  fclose(file);
  return cudaSuccess;
}
API cudaError_t cudaUserObjectCreate(cudaUserObject_t* o, void* p, cudaHostFn_t destroy, unsigned count, unsigned) { *o = (cudaUserObject_t) new UserObject{p, destroy, (int)count}; return cudaSuccess; }
API cudaError_t cudaUserObjectRelease(cudaUserObject_t o, unsigned n) { Lock lock(mutex()); release_object((UserObject*)o, n); return cudaSuccess; }
API cudaError_t cudaUserObjectRetain(cudaUserObject_t o, unsigned n) { Lock lock(mutex()); ((UserObject*)o)->references += n; return cudaSuccess; }
API cudaError_t cudaGraphRetainUserObject(cudaGraph_t g, cudaUserObject_t o, unsigned n, unsigned flags) {
  Lock lock(mutex());
  ((Graph*)g)->objects[(UserObject*)o] += n;
  if (!(flags & cudaGraphUserObjectMove)) ((UserObject*)o)->references += n;
  return cudaSuccess;
}

// -- kernels ----------------------------------------------------------------------------------------------------------

API void** __cudaRegisterFatBinary(void*) { static void* handle[4]; return handle; }
API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void**) {}
API char __cudaInitModule(void**) { return 1; }
API void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*, int*) {
  Lock lock(mutex());
  auto& kernel = kernels()[host];
  if (!kernel) kernel = new Kernel{name};
}
API void __cudaRegisterVar(void**, char* host, char*, const char* name, int, size_t size, int, int) {
  Lock lock(mutex());
  variables()[host] = {name, size, nullptr};
}
namespace {
struct Configuration { dim3 grid, block; size_t shared; void* stream; };
thread_local std::vector<Configuration> configurations;
Kernel* kernel_of(const void* host) {
  Lock lock(mutex());
  auto it = kernels().find(host);
  return it == kernels().end() ? nullptr : it->second;
}
} // namespace
API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, CUstream_st* stream) { configurations.push_back({grid, block, shared, stream}); return 0; }
API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  auto c = configurations.back();
  configurations.pop_back();
  *grid = c.grid; *block = c.block; *shared = c.shared; *(void**)stream = c.stream;
  return cudaSuccess;
}
API cudaError_t __cudaGetKernel(cudaKernel_t* k, const void* host) { *k = (cudaKernel_t)kernel_of(host); return cudaSuccess; }
API cudaError_t __cudaLaunchKernel(cudaKernel_t k, dim3, dim3, void**, size_t, cudaStream_t s) { return launch_unknown((Kernel*)k, s); }
API cudaError_t cudaLaunchKernel(const void* f, dim3, dim3, void**, size_t, cudaStream_t s) { return launch_unknown(kernel_of(f), s); }
API cudaError_t cudaLaunchCooperativeKernel(const void* f, dim3, dim3, void**, size_t, cudaStream_t s) { return launch_unknown(kernel_of(f), s); }
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* c, const void* f, void**) { return launch_unknown(kernel_of(f), c->stream); }
API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* a, const void*) {
  memset(a, 0, sizeof *a);
  a->maxThreadsPerBlock = 1024; a->numRegs = 32; a->ptxVersion = a->binaryVersion = 90; a->maxDynamicSharedSizeBytes = 232448;
  return cudaSuccess;
}
API cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* n, const void*, int, size_t) { *n = 2; return cudaSuccess; }
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* n, const void*, int, size_t, unsigned) { *n = 2; return cudaSuccess; }
API cudaError_t cudaLibraryLoadData(cudaLibrary_t*, const void*, cudaJitOption*, void**, unsigned, cudaLibraryOption*, void**, unsigned) { return done(cudaErrorNotSupported); }
API cudaError_t cudaLibraryGetKernel(cudaKernel_t*, cudaLibrary_t, const char*) { return done(cudaErrorNotSupported); }
API cudaError_t cudaLibraryUnload(cudaLibrary_t) { return done(cudaErrorNotSupported); }
API cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t, cudaFuncAttribute, int, int) { return cudaSuccess; }

// -- the driver -------------------------------------------------------------------------------------------------------

#define CU(expression) static_cast<CUresult>(expression)
namespace { thread_local CUcontext context = nullptr; CUcontext const kContext = (CUcontext)0x1000; }
API CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
API CUresult cuDriverGetVersion(int* v) { *v = 13000; return CUDA_SUCCESS; }
API CUresult cuDeviceGet(CUdevice* d, int i) { *d = i; return i == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE; }
API CUresult cuDeviceGetCount(int* n) { *n = 1; return CUDA_SUCCESS; }
API CUresult cuDeviceGetName(char* s, int n, CUdevice) { snprintf(s, n, "Host-memory CUDA device (no GPU)"); return CUDA_SUCCESS; }
API CUresult cuDeviceGetUuid(CUuuid* u, CUdevice) { for (int i = 0; i < 16; ++i) u->bytes[i] = i + 1; return CUDA_SUCCESS; }
API CUresult cuDeviceTotalMem_v2(size_t* n, CUdevice) { *n = kTotal; return CUDA_SUCCESS; }
API CUresult cuDeviceGetAttribute(int* v, CUdevice_attribute a, CUdevice) { *v = attribute(a); return CUDA_SUCCESS; }
API CUresult cuDevicePrimaryCtxRetain(CUcontext* c, CUdevice) { *c = kContext; return CUDA_SUCCESS; }
API CUresult cuDevicePrimaryCtxRelease_v2(CUdevice) { return CUDA_SUCCESS; }
API CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* is_active) { *flags = 0; *is_active = 1; return CUDA_SUCCESS; }
API CUresult cuCtxGetCurrent(CUcontext* c) { *c = kContext; return CUDA_SUCCESS; }
API CUresult cuCtxSetCurrent(CUcontext c) { context = c; return CUDA_SUCCESS; }
API CUresult cuCtxPushCurrent_v2(CUcontext) { return CUDA_SUCCESS; }
API CUresult cuCtxPopCurrent_v2(CUcontext* c) { if (c) *c = kContext; return CUDA_SUCCESS; }
API CUresult cuCtxGetDevice(CUdevice* d) { *d = 0; return CUDA_SUCCESS; }
API CUresult cuCtxGetLimit(size_t* v, CUlimit) { *v = 1 << 20; return CUDA_SUCCESS; }
API CUresult cuCtxSetLimit(CUlimit, size_t) { return CUDA_SUCCESS; }
API CUresult cuCtxSynchronize() { return CU(cudaDeviceSynchronize()); }
API CUresult cuGetErrorString(CUresult e, const char** s) { *s = cudaGetErrorString((cudaError_t)e); return CUDA_SUCCESS; }
API CUresult cuGetErrorName(CUresult e, const char** s) { *s = cudaGetErrorName((cudaError_t)e); return CUDA_SUCCESS; }

API CUresult cuModuleLoadData(CUmodule* m, const void* image) {
  Lock lock(mutex());
  if (auto e = unsafe("cuModuleLoadData")) return CU(e);
  auto* data = (const char*)image;
  if (memcmp(data, ELFMAG, 4) != 0) return CUDA_ERROR_INVALID_IMAGE;
  auto* module = new Module;
  module->bytes.assign(data, data + elf_size(data));
  module->identity = identity_of(data, module->bytes.size());
  counters().modules++;
  *m = (CUmodule)module;
  return CUDA_SUCCESS;
}
API CUresult cuModuleLoadDataEx(CUmodule* m, const void* image, unsigned, CUjit_option*, void**) { return cuModuleLoadData(m, image); }
API CUresult cuModuleLoad(CUmodule* m, const char* path) {
  FILE* file = fopen(path, "rb");
  if (!file) return CUDA_ERROR_FILE_NOT_FOUND;
  std::vector<char> bytes;
  char buffer[65536];
  for (size_t n; (n = fread(buffer, 1, sizeof buffer, file)) > 0;) bytes.insert(bytes.end(), buffer, buffer + n);
  fclose(file);
  return cuModuleLoadData(m, bytes.data());
}
API CUresult cuModuleUnload(CUmodule) { Lock lock(mutex()); if (auto e = unsafe("cuModuleUnload")) return CU(e); return CUDA_SUCCESS; }
API CUresult cuModuleGetFunction(CUfunction* f, CUmodule m, const char* name) {
  Lock lock(mutex());
  auto* module = (Module*)m;
  auto& function = module->functions[name];
  if (!function) {
    function = new Function{name, module->identity, {}};
    read_params(*module, function);
    TRACE("function %s of %s: %zu parameters", name, module->identity.c_str(), function->params.size());
  }
  *f = (CUfunction)function;
  return CUDA_SUCCESS;
}
API CUresult cuModuleGetGlobal_v2(CUdeviceptr*, size_t*, CUmodule, const char*) { return CUDA_ERROR_NOT_FOUND; }
API CUresult cuFuncGetAttribute(int* v, CUfunction_attribute a, CUfunction f) {
  switch (a) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *v = 1024; break;
    case CU_FUNC_ATTRIBUTE_NUM_REGS: *v = 32; break;
    case CU_FUNC_ATTRIBUTE_PTX_VERSION: case CU_FUNC_ATTRIBUTE_BINARY_VERSION: *v = 90; break;
    default: *v = 0;
  }
  return CUDA_SUCCESS;
}
API CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; }
API CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }
API CUresult cuFuncLoad(CUfunction) { return CUDA_SUCCESS; }
API CUresult cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, CUstream s, void** args, void** extra) {
  return CU(launch_function((Function*)f, dim3(gx, gy, gz), dim3(bx, by, bz), shared, s, args, extra));
}
API CUresult cuLaunchCooperativeKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, CUstream s, void** args) {
  return CU(launch_function((Function*)f, dim3(gx, gy, gz), dim3(bx, by, bz), shared, s, args, nullptr));
}
API CUresult cuLaunchKernelEx(const CUlaunchConfig* c, CUfunction f, void** args, void** extra) {
  return CU(launch_function((Function*)f, dim3(c->gridDimX, c->gridDimY, c->gridDimZ), dim3(c->blockDimX, c->blockDimY, c->blockDimZ), c->sharedMemBytes, c->hStream, args, extra));
}
API CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* n, CUfunction, int, size_t) { *n = 2; return CUDA_SUCCESS; }
API CUresult cuOccupancyMaxActiveClusters(int* n, CUfunction, const CUlaunchConfig*) { *n = 16; return CUDA_SUCCESS; }
API CUresult cuPointerGetAttribute(void* v, CUpointer_attribute a, CUdeviceptr p) {
  Lock lock(mutex());
  auto it = block_of(p);
  switch (a) {
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: if (it == blocks().end()) return CUDA_ERROR_INVALID_VALUE; *(CUdeviceptr*)v = p; return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_CONTEXT: *(CUcontext*)v = kContext; return it == blocks().end() ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE: if (it == blocks().end()) return CUDA_ERROR_INVALID_VALUE; *(unsigned*)v = it->second.kind == kPinned || it->second.kind == kRegistered ? 1 : 2; return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int*)v = 0; return it == blocks().end() ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
    default: *(int*)v = 0; return CUDA_SUCCESS;
  }
}
API CUresult cuPointerGetAttributes(unsigned n, CUpointer_attribute* a, void** v, CUdeviceptr p) {
  for (unsigned i = 0; i < n; ++i) if (cuPointerGetAttribute(v[i], a[i], p) != CUDA_SUCCESS) *(uint64_t*)v[i] = 0;
  return CUDA_SUCCESS;
}
API CUresult cuMemGetAddressRange_v2(CUdeviceptr* base, size_t* size, CUdeviceptr p) {
  Lock lock(mutex());
  auto it = block_of(p);
  if (it == blocks().end()) return CUDA_ERROR_NOT_FOUND;
  if (base) *base = it->first;
  if (size) *size = it->second.size;
  return CUDA_SUCCESS;
}
API CUresult cuMemGetInfo_v2(size_t* f, size_t* t) { return CU(cudaMemGetInfo(f, t)); }
API CUresult cuMemAlloc_v2(CUdeviceptr* p, size_t n) { return CU(cudaMalloc((void**)p, n)); }
API CUresult cuMemFree_v2(CUdeviceptr p) { return CU(cudaFree((void*)p)); }
API CUresult cuMemcpyHtoD_v2(CUdeviceptr d, const void* s, size_t n) { return CU(cudaMemcpy((void*)d, s, n, cudaMemcpyHostToDevice)); }
API CUresult cuMemcpyDtoH_v2(void* d, CUdeviceptr s, size_t n) { return CU(cudaMemcpy(d, (void*)s, n, cudaMemcpyDeviceToHost)); }
API CUresult cuMemsetD32Async(CUdeviceptr p, unsigned v, size_t n, CUstream s) {
  return CU(guarded([&] { return submit(s, cudaGraphNodeTypeMemset, "memset32", [=] { check((void*)p, 4 * n, "cuMemsetD32"); std::fill_n((unsigned*)p, n, v); }); }));
}
API CUresult cuStreamWriteValue32_v2(CUstream s, CUdeviceptr p, cuuint32_t v, unsigned) {
  return CU(guarded([&] { return submit(s, cudaGraphNodeTypeMemset, "write32", [=] { *(volatile uint32_t*)p = v; }); }));
}
API CUresult cuStreamSynchronize(CUstream s) { return CU(cudaStreamSynchronize(s)); }
API CUresult cuStreamIsCapturing(CUstream s, CUstreamCaptureStatus* t) { return CU(cudaStreamIsCapturing(s, (cudaStreamCaptureStatus*)t)); }
API CUresult cuTensorMapEncodeTiled(CUtensorMap* m, CUtensorMapDataType type, cuuint32_t rank, void* address, const cuuint64_t* dims, const cuuint64_t* strides, const cuuint32_t* box, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  memset(m, 0, sizeof *m);
  uint64_t* w = (uint64_t*)m;
  w[0] = (uint64_t)address; w[1] = (uint64_t)type << 32 | rank;
  for (unsigned i = 0; i < rank && i < 5; ++i) { w[2 + i] = dims[i]; if (i + 1 < rank) w[7 + i] = strides[i]; }
  for (unsigned i = 0; i < rank && i < 5; ++i) ((uint32_t*)(w + 12))[i] = box[i];
  return CUDA_SUCCESS;
}
API CUresult cuLinkCreate_v2(unsigned, CUjit_option*, void**, CUlinkState*) { return CUDA_ERROR_NOT_SUPPORTED; }
API CUresult cuLinkAddData_v2(CUlinkState, CUjitInputType, void*, size_t, const char*, unsigned, CUjit_option*, void**) { return CUDA_ERROR_NOT_SUPPORTED; }
API CUresult cuLinkComplete(CUlinkState, void**, size_t*) { return CUDA_ERROR_NOT_SUPPORTED; }
API CUresult cuLinkDestroy(CUlinkState) { return CUDA_SUCCESS; }

// Virtual memory: handles are ranges of the same file. Allowed in captures: torch's expandable segments do it unguarded,
// and capture on hardware.
namespace {
struct Physical { size_t size; off_t offset; int references; };
struct Mapping { size_t size; Physical* physical; };
std::map<uintptr_t, Mapping>& mappings() { static auto* m = new std::map<uintptr_t, Mapping>; return *m; }
void drop(Physical* p) {
  if (--p->references > 0) return;
  fallocate(memory_fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, p->offset, p->size);
  used_bytes -= p->size;
  delete p;
}
} // namespace
API CUresult cuMemGetAllocationGranularity(size_t* g, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) { *g = kPage; return CUDA_SUCCESS; }
API CUresult cuMemAddressReserve(CUdeviceptr* p, size_t size, size_t, CUdeviceptr, unsigned long long) { Lock lock(mutex()); *p = take_addresses(size); TRACE("cuMemAddressReserve(%zu) -> %llx", size, *p); return CUDA_SUCCESS; }
API CUresult cuMemAddressFree(CUdeviceptr, size_t) { return CUDA_SUCCESS; }
API CUresult cuMemCreate(CUmemGenericAllocationHandle* h, size_t size, const CUmemAllocationProp*, unsigned long long) {
  TRACE("cuMemCreate(%zu)", size);
  Lock lock(mutex());
  if (used_bytes + size > kTotal) return CUDA_ERROR_OUT_OF_MEMORY;
  uintptr_t at = take_addresses(size); // for its place in the file
  used_bytes += size;
  peak_bytes = std::max(peak_bytes, used_bytes);
  counters().mallocs++;
  *h = (CUmemGenericAllocationHandle) new Physical{size, (off_t)(at - region), 1};
  return CUDA_SUCCESS;
}
API CUresult cuMemRelease(CUmemGenericAllocationHandle h) { Lock lock(mutex()); counters().frees++; drop((Physical*)h); return CUDA_SUCCESS; }
API CUresult cuMemMap(CUdeviceptr p, size_t size, size_t offset, CUmemGenericAllocationHandle h, unsigned long long) {
  Lock lock(mutex());
  auto* physical = (Physical*)h;
  TRACE("cuMemMap(%llx, %zu, %zu, %p)", p, size, offset, (void*)physical);
  if (mmap((void*)p, size, PROT_NONE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, memory_fd, physical->offset + offset) == MAP_FAILED) return CUDA_ERROR_INVALID_VALUE;
  physical->references++;
  mappings()[p] = {size, physical};
  return CUDA_SUCCESS;
}
namespace {
// Neighbouring mappings are one allocation to whoever looks for bounds.
void remap_blocks() {
  auto& all = blocks();
  for (auto it = all.begin(); it != all.end();) it = it->second.kind == kMapped ? all.erase(it) : std::next(it);
  uintptr_t begin = 0, end = 0;
  for (auto& [p, m] : mappings()) {
    if (p != end) { if (end > begin) all[begin] = {end - begin, kMapped, 0}; begin = p; }
    end = p + m.size;
  }
  if (end > begin) all[begin] = {end - begin, kMapped, 0};
}
}
API CUresult cuMemSetAccess(CUdeviceptr p, size_t size, const CUmemAccessDesc*, size_t) {
  TRACE("cuMemSetAccess(%llx, %zu)", p, size);
  Lock lock(mutex());
  if (mprotect((void*)p, size, PROT_READ | PROT_WRITE) != 0) return CUDA_ERROR_INVALID_VALUE;
  if (kPoison) memset((void*)p, 0xff, size);
  remap_blocks();
  return CUDA_SUCCESS;
}
API CUresult cuMemUnmap(CUdeviceptr p, size_t size) {
  run_all();
  Lock lock(mutex());
  for (auto it = mappings().lower_bound(p); it != mappings().end() && it->first < p + size;) {
    unmap(it->first, it->second.size, 0, false);
    drop(it->second.physical);
    it = mappings().erase(it);
  }
  remap_blocks();
  return CUDA_SUCCESS;
}
API CUresult cuMemExportToShareableHandle(void*, CUmemGenericAllocationHandle, CUmemAllocationHandleType, unsigned long long) { return CUDA_ERROR_NOT_SUPPORTED; }
API CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle*, void*, CUmemAllocationHandleType) { return CUDA_ERROR_NOT_SUPPORTED; }
API CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle*, void*) { return CUDA_ERROR_NOT_SUPPORTED; }
API CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp*, CUmemGenericAllocationHandle) { return CUDA_ERROR_NOT_SUPPORTED; }

namespace {
void* entry_point(const char* symbol) {
  static void* self = [] { Dl_info info; dladdr((void*)&cuInit, &info); return dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD); }();
  for (std::string suffix : {"_v2", ""})
    if (void* p = dlsym(self, (symbol + suffix).c_str())) return p;
  return nullptr;
}
} // namespace
API cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** p, unsigned, unsigned long long, cudaDriverEntryPointQueryResult* status) {
  *p = entry_point(symbol);
  if (!*p) TRACE("no entry point %s", symbol);
  if (status) *status = *p ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
API CUresult cuGetProcAddress_v2(const char* symbol, void** p, int, cuuint64_t, CUdriverProcAddressQueryResult* status) {
  *p = entry_point(symbol);
  if (status) *status = *p ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  return *p ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
