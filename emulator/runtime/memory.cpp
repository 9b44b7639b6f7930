#include "memory.h"

#include "settings.h"
#include "stream.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>

namespace emulator {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kHugePage = 2 << 20;

// Pages come on first touch, so a large capacity costs nothing until it is used; huge ones, so that the first
// touch of a block does not take longer than the copy or kernel that does it.
void* map(size_t nbytes) {
  constexpr int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  const size_t spare = nbytes >= kHugePage ? kHugePage : 0;
  if (nbytes > SIZE_MAX - spare) return nullptr;
  void* mapped = mmap(nullptr, nbytes + spare, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  if (spare == 0) return mapped;

  const auto start = reinterpret_cast<uintptr_t>(mapped);
  const size_t before = (kHugePage - start % kHugePage) % kHugePage;
  auto* aligned = reinterpret_cast<void*>(start + before);
  if (before > 0) munmap(mapped, before);
  const uintptr_t tail = (start + before + nbytes + kPage - 1) / kPage * kPage;
  if (tail < start + nbytes + spare) munmap(reinterpret_cast<void*>(tail), start + nbytes + spare - tail);
  madvise(aligned, nbytes, MADV_HUGEPAGE);
  return aligned;
}

std::string mib(size_t nbytes) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f MiB", static_cast<double>(nbytes) / (1 << 20));
  return text;
}

}  // namespace

Memory& Memory::get() {
  static auto* memory = new Memory;  // never destroyed: see Streams
  return *memory;
}

aclError Memory::allocate_device(void** pointer, size_t nbytes) {
  *pointer = nullptr;
  if (nbytes == 0) return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtMalloc: 0 bytes");
  std::lock_guard lock(mutex_);
  const size_t capacity = settings().hbm_bytes;
  const size_t free = capacity - std::min(capacity, device_used_);
  if (nbytes > free) {
    return fail(ACL_ERROR_RT_MEMORY_ALLOCATION,
                "aclrtMalloc: needed " + mib(nbytes) + ", free " + mib(free) + " of " + mib(capacity));
  }
  void* mapped = map(nbytes);
  if (mapped == nullptr) {
    return fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "aclrtMalloc: the host cannot map " + mib(nbytes));
  }
  device_[reinterpret_cast<uintptr_t>(mapped)] = {nbytes, true};
  device_used_ += nbytes;
  *pointer = mapped;
  return ACL_SUCCESS;
}

aclError Memory::free_device(void* pointer) {
  // Kernels that are still queued may touch it, and an unmapped page would end the process, not the test.
  Streams::all().synchronize();
  std::lock_guard lock(mutex_);
  auto found = device_.find(reinterpret_cast<uintptr_t>(pointer));
  if (found == device_.end()) return fail(ACL_ERROR_RT_MEMORY_FREE, "aclrtFree: not a device allocation");
  munmap(pointer, found->second.nbytes);
  device_used_ -= found->second.nbytes;
  device_.erase(found);
  return ACL_SUCCESS;
}

aclError Memory::allocate_host(void** pointer, size_t nbytes) {
  *pointer = nullptr;
  if (nbytes == 0) return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtMallocHost: 0 bytes");
  void* mapped = map(nbytes);
  if (mapped == nullptr) {
    return fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "aclrtMallocHost: the host cannot map " + mib(nbytes));
  }
  std::lock_guard lock(mutex_);
  host_[reinterpret_cast<uintptr_t>(mapped)] = {nbytes, true};
  *pointer = mapped;
  return ACL_SUCCESS;
}

aclError Memory::free_host(void* pointer) {
  std::lock_guard lock(mutex_);
  auto found = host_.find(reinterpret_cast<uintptr_t>(pointer));
  if (found == host_.end() || !found->second.owned) {
    return fail(ACL_ERROR_RT_MEMORY_FREE, "aclrtFreeHost: not memory of aclrtMallocHost");
  }
  bury(pointer, found->second.nbytes);
  host_.erase(found);
  return ACL_SUCCESS;
}

// aclrtFreeHost does not wait for copies. A copy that is still queued finds the bytes gone (they read as zero),
// but the range stays mapped until the streams are idle, so that the mistake ends in wrong numbers, as on
// hardware, and not in a segmentation fault of the whole process.
void Memory::bury(void* pointer, size_t nbytes) {
  madvise(pointer, nbytes, MADV_DONTNEED);
  buried_.emplace_back(pointer, nbytes);
  if (!Streams::all().idle()) return;
  for (auto& [start, length] : buried_) munmap(start, length);
  buried_.clear();
}

aclError Memory::register_host(void* pointer, size_t nbytes) {
  const auto start = reinterpret_cast<uintptr_t>(pointer);
  if (start % kPage != 0 || nbytes == 0) {
    return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtHostRegister: needs a multiple of 4096 as address, and some bytes");
  }
  std::lock_guard lock(mutex_);
  const auto next = host_.upper_bound(start);
  if (covers(host_, pointer) || (next != host_.end() && next->first - start < nbytes)) {
    return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtHostRegister: a part of it is pinned already");
  }
  host_[start] = {nbytes, false};
  return ACL_SUCCESS;
}

aclError Memory::unregister_host(void* pointer) {
  std::lock_guard lock(mutex_);
  auto found = host_.find(reinterpret_cast<uintptr_t>(pointer));
  if (found == host_.end() || found->second.owned) {
    return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtHostUnregister: not registered memory");
  }
  host_.erase(found);
  return ACL_SUCCESS;
}

bool Memory::covers(const Extents& extents, const void* pointer) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  auto next = extents.upper_bound(address);
  if (next == extents.begin()) return false;
  --next;
  return address < next->first + next->second.nbytes;
}

Place Memory::place_of(const void* pointer) {
  std::lock_guard lock(mutex_);
  if (covers(device_, pointer)) return Place::device;
  return covers(host_, pointer) ? Place::pinned : Place::pageable;
}

std::pair<size_t, size_t> Memory::free_and_total() {
  std::lock_guard lock(mutex_);
  const size_t capacity = settings().hbm_bytes;
  return {capacity - std::min(capacity, device_used_), capacity};
}

}  // namespace emulator

using namespace emulator;

ACL_EXPORT aclError aclrtMalloc(void** pointer, size_t nbytes, aclrtMemMallocPolicy) {
  return Memory::get().allocate_device(pointer, nbytes);
}

ACL_EXPORT aclError aclrtMallocAlign32(void** pointer, size_t nbytes, aclrtMemMallocPolicy) {
  return Memory::get().allocate_device(pointer, nbytes);
}

ACL_EXPORT aclError aclrtFree(void* pointer) { return Memory::get().free_device(pointer); }

ACL_EXPORT aclError aclrtMallocHost(void** pointer, size_t nbytes) {
  return Memory::get().allocate_host(pointer, nbytes);
}

ACL_EXPORT aclError aclrtMallocHostWithCfg(void** pointer, uint64_t nbytes, aclrtMallocConfig*) {
  return Memory::get().allocate_host(pointer, nbytes);
}

ACL_EXPORT aclError aclrtFreeHost(void* pointer) { return Memory::get().free_host(pointer); }

ACL_EXPORT aclError aclrtHostRegister(void* pointer, uint64_t nbytes, aclrtHostRegisterType, void** device_pointer) {
  const aclError code = Memory::get().register_host(pointer, nbytes);
  if (code == ACL_SUCCESS && device_pointer != nullptr) *device_pointer = pointer;
  return code;
}

ACL_EXPORT aclError aclrtHostRegisterV2(void* pointer, uint64_t nbytes, uint32_t) {
  return Memory::get().register_host(pointer, nbytes);
}

ACL_EXPORT aclError aclrtHostUnregister(void* pointer) { return Memory::get().unregister_host(pointer); }

ACL_EXPORT aclError aclrtPointerGetAttributes(const void* pointer, aclrtPtrAttributes* attributes) {
  std::memset(attributes, 0, sizeof *attributes);
  switch (Memory::get().place_of(pointer)) {
    case Place::device: attributes->location.type = ACL_MEM_LOCATION_TYPE_DEVICE; break;
    case Place::pinned: attributes->location.type = ACL_MEM_LOCATION_TYPE_HOST; break;
    case Place::pageable: attributes->location.type = ACL_MEM_LOCATION_TYPE_UNREGISTERED; break;
  }
  return ACL_SUCCESS;
}

ACL_EXPORT aclError aclrtGetMemInfo(aclrtMemAttr, size_t* free, size_t* total) {
  std::tie(*free, *total) = Memory::get().free_and_total();
  return ACL_SUCCESS;
}
