// CUDA's driver, "Virtual Memory Management". It is looked up at run time, and what is used of its interface is declared
// here, so that neither CUDA's headers nor its libraries are needed to compile. Whoever includes this has the text in
// the key of its library (``native_build.built_library``). Functions return 0 or an error.

#pragma once

#include <dlfcn.h>

#include <cstddef>
#include <type_traits>

namespace {

// cuda.h. These are the versions "_v1" of the structures, which do not change.
using Pointer = unsigned long long;
using Handle = unsigned long long;
struct Location {
  int type, id;
};
struct Properties {
  int type, handle_types;
  Location location;
  void* windows;
  struct {
    unsigned char compression, rdma;
    unsigned short usage;
    unsigned char reserved[4];
  } flags;
};
struct Access {
  Location location;
  int flags;
};
constexpr int kPinned = 1, kOnDevice = 1, kReadAndWrite = 3, kMinimum = 0, kSuccess = 0;

struct {
  int (*granularity)(size_t*, const Properties*, int);
  int (*reserve)(Pointer*, size_t, size_t, Pointer, unsigned long long);
  int (*free)(Pointer, size_t);
  int (*create)(Handle*, size_t, const Properties*, unsigned long long);
  int (*release)(Handle);
  int (*map)(Pointer, size_t, size_t, Handle, unsigned long long);
  int (*access)(Pointer, size_t, const Access*, size_t);
  int (*unmap)(Pointer, size_t);
} driver;

// Looks the driver up; returns the name of the library or of the first function that is missing, or null.
inline const char* open_driver(const char* library) {
  void* opened = dlopen(library, RTLD_NOW | RTLD_GLOBAL);
  if (opened == nullptr) return library;
  const auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(opened, name));
    return function == nullptr ? name : nullptr;
  };
  const char* missing = nullptr;
  (missing = find(driver.granularity, "cuMemGetAllocationGranularity")) ||
      (missing = find(driver.reserve, "cuMemAddressReserve")) || (missing = find(driver.free, "cuMemAddressFree")) ||
      (missing = find(driver.create, "cuMemCreate")) || (missing = find(driver.release, "cuMemRelease")) ||
      (missing = find(driver.map, "cuMemMap")) || (missing = find(driver.access, "cuMemSetAccess")) ||
      (missing = find(driver.unmap, "cuMemUnmap"));
  return missing;
}

inline Properties properties(int device) {
  Properties wanted{};
  wanted.type = kPinned;
  wanted.location = {kOnDevice, device};
  return wanted;
}

}  // namespace
