// Cubins: ELF files, of which only the names of kernels and the layout of their parameters are read.
#include "modules.h"
#include "streams.h"

#include <cuda.h>
#include <elf.h>

#include <algorithm>

namespace hostcuda {

std::string identity_of(const char* data, size_t size) { // FNV-1a
  uint64_t hash = 1469598103934665603ull;
  for (size_t i = 0; i < size; ++i) hash = (hash ^ static_cast<unsigned char>(data[i])) * 1099511628211ull;
  char text[40];
  snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(hash));
  return text;
}

namespace {
const Elf64_Ehdr& header_of(const char* data) { return *reinterpret_cast<const Elf64_Ehdr*>(data); }
const Elf64_Shdr* sections_of(const char* data) {
  return reinterpret_cast<const Elf64_Shdr*>(data + header_of(data).e_shoff);
}
const Elf64_Shdr* section(const char* data, const std::string& name) {
  auto& header = header_of(data);
  auto* sections = sections_of(data);
  const char* names = data + sections[header.e_shstrndx].sh_offset;
  for (int i = 0; i < header.e_shnum; ++i)
    if (name == names + sections[i].sh_name) return sections + i;
  return nullptr;
}
template <typename T>
T read(const unsigned char* at) {
  T value;
  memcpy(&value, at, sizeof value);
  return value;
}
} // namespace

size_t elf_size(const char* data) {
  auto& header = header_of(data);
  size_t end = header.e_shoff + size_t(header.e_shnum) * header.e_shentsize;
  end = std::max<size_t>(end, header.e_phoff + size_t(header.e_phnum) * header.e_phentsize);
  auto* sections = sections_of(data);
  for (int i = 0; i < header.e_shnum; ++i)
    if (sections[i].sh_type != SHT_NOBITS) end = std::max<size_t>(end, sections[i].sh_offset + sections[i].sh_size);
  return end;
}

// Parameters stand in .nv.info.<kernel>, in records of a format, an attribute, and for EIFMT_SVAL (4) a size and so
// many bytes. EIATTR_KPARAM_INFO (0x17): index, ordinal, offset, and a word with the size above bit 18. (Not
// documented by NVIDIA; cuobjdump -elf shows it.)
std::unique_ptr<Function> read_function(const Module& module, const std::string& name) {
  const char* data = module.bytes.data();
  if (!section(data, ".text." + name)) return nullptr;
  auto function = std::make_unique<Function>(Function{name, module.identity, {}});
  auto* info = section(data, ".nv.info." + name);
  if (!info) return function;
  std::map<int, Param> found;
  auto* p = reinterpret_cast<const unsigned char*>(data) + info->sh_offset;
  auto* end = p + info->sh_size;
  while (p + 4 <= end) {
    const unsigned format = p[0], attribute = p[1], size = read<uint16_t>(p + 2);
    if (format == 4 && attribute == 0x17 && size >= 12)
      found[read<uint16_t>(p + 8)] = {read<uint16_t>(p + 10), read<uint32_t>(p + 12) >> 18};
    p += format == 4 ? 4 + size : 4;
  }
  for (auto& [ordinal, param] : found) function->params.push_back(param);
  return function;
}

} // namespace hostcuda
using namespace hostcuda;

API CUresult cuModuleLoadData(CUmodule* out, const void* image) {
  Lock lock(mutex());
  // It takes device memory (Programming Guide, "Lazy Loading": loading may need the context to synchronize).
  if (auto error = unsafe("cuModuleLoadData")) return static_cast<CUresult>(error);
  auto* data = static_cast<const char*>(image);
  if (memcmp(data, ELFMAG, 4) != 0) {
    refuse("cuModuleLoadData (no cubin)", cudaErrorInvalidKernelImage);
    return CUDA_ERROR_INVALID_IMAGE;
  }
  auto* module = new Module;
  module->bytes.assign(data, data + elf_size(data));
  module->identity = identity_of(data, module->bytes.size());
  counters().modules++;
  *out = reinterpret_cast<CUmodule>(module);
  return CUDA_SUCCESS;
}
API CUresult cuModuleLoadDataEx(CUmodule* out, const void* image, unsigned, CUjit_option*, void**) {
  return cuModuleLoadData(out, image);
}
API CUresult cuModuleLoad(CUmodule* out, const char* path) {
  FILE* file = fopen(path, "rb");
  if (!file) return CUDA_ERROR_FILE_NOT_FOUND;
  std::vector<char> bytes;
  char buffer[65536];
  for (size_t n; (n = fread(buffer, 1, sizeof buffer, file)) > 0;) bytes.insert(bytes.end(), buffer, buffer + n);
  fclose(file);
  return bytes.size() < sizeof(Elf64_Ehdr) ? CUDA_ERROR_INVALID_IMAGE : cuModuleLoadData(out, bytes.data());
}
API CUresult cuModuleUnload(CUmodule module) {
  Lock lock(mutex());
  if (auto error = unsafe("cuModuleUnload")) return static_cast<CUresult>(error);
  delete reinterpret_cast<Module*>(module); // launches have copies of what they need
  return CUDA_SUCCESS;
}
API CUresult cuModuleGetFunction(CUfunction* out, CUmodule handle, const char* name) {
  Lock lock(mutex());
  auto* module = reinterpret_cast<Module*>(handle);
  auto& function = module->functions[name];
  if (!function) {
    function = read_function(*module, name);
    if (!function) {
      refuse((std::string("cuModuleGetFunction ") + name).c_str(), cudaErrorSymbolNotFound);
      return CUDA_ERROR_NOT_FOUND;
    }
    TRACE("function %s of %s: %zu parameters", name, module->identity.c_str(), function->params.size());
  }
  *out = reinterpret_cast<CUfunction>(function.get());
  return CUDA_SUCCESS;
}
API CUresult cuModuleGetGlobal_v2(CUdeviceptr*, size_t*, CUmodule, const char* name) {
  refuse((std::string("cuModuleGetGlobal ") + name).c_str(), cudaErrorNotSupported);
  return CUDA_ERROR_NOT_FOUND;
}
API CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction) {
  switch (attribute) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = 1024; break;
    case CU_FUNC_ATTRIBUTE_NUM_REGS: *value = 32; break;
    case CU_FUNC_ATTRIBUTE_PTX_VERSION:
    case CU_FUNC_ATTRIBUTE_BINARY_VERSION: *value = 90; break;
    default: *value = 0;
  }
  return CUDA_SUCCESS;
}
API CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; }
API CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }
API CUresult cuFuncLoad(CUfunction) { return CUDA_SUCCESS; }

// PTX is not linked here: Triton calls ptxas itself.
API CUresult cuLinkCreate_v2(unsigned, CUjit_option*, void**, CUlinkState*) {
  refuse("cuLinkCreate", cudaErrorNotSupported);
  return CUDA_ERROR_NOT_SUPPORTED;
}
API CUresult cuLinkAddData_v2(CUlinkState, CUjitInputType, void*, size_t, const char*, unsigned, CUjit_option*,
                              void**) {
  return CUDA_ERROR_NOT_SUPPORTED;
}
API CUresult cuLinkComplete(CUlinkState, void**, size_t*) { return CUDA_ERROR_NOT_SUPPORTED; }
API CUresult cuLinkDestroy(CUlinkState) { return CUDA_SUCCESS; }
