#include "memory.h"

#include "copy.h"
#include "detector.h"
#include "device.h"
#include "fault.h"
#include "poison.h"
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
constexpr int kReadWrite = PROT_READ | PROT_WRITE;
constexpr uintptr_t kFirst = uintptr_t{1} << 45;  // Linux has nothing there of its own

// Pages come on first touch, so a large capacity costs nothing until it is used; huge ones, so that the first
// touch of a block does not take longer than the copy or kernel that does it. In a dry run pages are small, for only a
// few are ever touched.
//
// Addresses rise from call to call, as long as the kernel has room there. Of two blocks that suit as well torch's
// allocator takes the lower one, so they must not be another process's luck. Called with the lock held.
void* map(size_t nbytes, int protection) {
  constexpr int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  const size_t spare = nbytes >= kHugePage ? kHugePage : 0;
  if (nbytes > SIZE_MAX - spare) return nullptr;
  static uintptr_t next = kFirst;
  void* mapped = mmap(reinterpret_cast<void*>(next), nbytes + spare, protection, flags, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  next += (nbytes + kHugePage - 1) / kHugePage * kHugePage + kHugePage;
  if (spare == 0) return mapped;

  const auto start = reinterpret_cast<uintptr_t>(mapped);
  const size_t before = (kHugePage - start % kHugePage) % kHugePage;
  auto* aligned = reinterpret_cast<void*>(start + before);
  if (before > 0) munmap(mapped, before);
  const uintptr_t tail = (start + before + nbytes + kPage - 1) / kPage * kPage;
  if (tail < start + nbytes + spare) munmap(reinterpret_cast<void*>(tail), start + nbytes + spare - tail);
  madvise(aligned, nbytes, settings().dry ? MADV_NOHUGEPAGE : MADV_HUGEPAGE);
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
  const int device = current_device();
  std::lock_guard lock(mutex_);
  seal_idle_graves();
  const size_t capacity = settings().hbm_bytes;
  const size_t free = capacity - std::min(capacity, device_used_[device]);
  if (nbytes > free) {
    return fail(ACL_ERROR_RT_MEMORY_ALLOCATION,
                "aclrtMalloc: needed " + mib(nbytes) + ", free " + mib(free) + " of " + mib(capacity));
  }
  // In a dry run the device's memory has no bytes, so whoever touches it by mistake dies of it.
  void* mapped = map(nbytes, settings().dry ? PROT_NONE : kReadWrite);
  if (mapped == nullptr) {
    return fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "aclrtMalloc: the host cannot map " + mib(nbytes));
  }
  poison(mapped, nbytes);
  device_[address(mapped)] = {nbytes, device, true};
  device_used_[device] += nbytes;
  *pointer = mapped;
  return ACL_SUCCESS;
}

aclError Memory::free_device(void* pointer) {
  std::lock_guard lock(mutex_);
  auto found = device_.find(address(pointer));
  if (found == device_.end()) return fail(ACL_ERROR_RT_MEMORY_FREE, "aclrtFree: not a device allocation");
  const auto [nbytes, device, owned] = found->second;
  if (Detector::on()) Detector::get().given_back("aclrtFree", {pointer, nbytes});
  device_used_[device] -= nbytes;
  device_.erase(found);
  bury(pointer, nbytes);
  return ACL_SUCCESS;
}

aclError Memory::refuse_beyond_host_limit(const char* function, size_t nbytes) {
  const size_t limit = settings().host_bytes;
  if (limit == 0 || nbytes <= limit - std::min(limit, host_used_)) return ACL_SUCCESS;
  return fail(ACL_ERROR_RT_MEMORY_ALLOCATION, std::string(function) + ": needed " + mib(nbytes) + ", pinned already " +
                                                  mib(host_used_) + " of " + mib(limit));
}

aclError Memory::allocate_host(void** pointer, size_t nbytes) {
  *pointer = nullptr;
  if (nbytes == 0) return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtMallocHost: 0 bytes");
  std::lock_guard lock(mutex_);
  seal_idle_graves();
  if (const aclError code = refuse_beyond_host_limit("aclrtMallocHost", nbytes); code != ACL_SUCCESS) return code;
  void* mapped = map(nbytes, kReadWrite);
  if (mapped == nullptr) {
    return fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "aclrtMallocHost: the host cannot map " + mib(nbytes));
  }
  poison(mapped, nbytes);
  host_[address(mapped)] = {nbytes, kNone, true};
  host_used_ += nbytes;
  *pointer = mapped;
  return ACL_SUCCESS;
}

aclError Memory::free_host(void* pointer) {
  std::lock_guard lock(mutex_);
  auto found = host_.find(address(pointer));
  if (found == host_.end() || !found->second.owned) {
    return fail(ACL_ERROR_RT_MEMORY_FREE, "aclrtFreeHost: not memory of aclrtMallocHost");
  }
  const size_t nbytes = found->second.nbytes;
  if (Detector::on()) Detector::get().given_back("aclrtFreeHost", {pointer, nbytes});
  host_used_ -= nbytes;
  host_.erase(found);
  mapped_.erase(mapped_.lower_bound(address(pointer)), mapped_.lower_bound(address(pointer) + nbytes));
  bury(pointer, nbytes);
  return ACL_SUCCESS;
}

// Freeing does not wait for queued work. That work finds the pattern in place of its bytes, and the range stays mapped
// until all streams are idle, so that the mistake ends in wrong numbers, as on hardware, and not in a segmentation
// fault of the whole process.
void Memory::bury(void* pointer, size_t nbytes) {
  graves_[address(pointer)] = {nbytes, kNone, true};
  open_.push_back(address(pointer));
  if (Streams::all().busy()) poison(pointer, nbytes);
  seal_idle_graves();
}

// The addresses stay taken for a while, so that a use that comes even later is recognised.
void Memory::seal_idle_graves() {
  constexpr size_t kept = 4096;
  if (open_.empty() || Streams::all().busy()) return;
  for (const uintptr_t start : open_) {
    void* grave = reinterpret_cast<void*>(start);
    madvise(grave, graves_[start].nbytes, MADV_DONTNEED);
    mprotect(grave, graves_[start].nbytes, PROT_NONE);
    sealed_.push_back(start);
  }
  open_.clear();
  for (; sealed_.size() > kept; sealed_.pop_front()) {
    munmap(reinterpret_cast<void*>(sealed_.front()), graves_[sealed_.front()].nbytes);
    graves_.erase(sealed_.front());
  }
}

aclError Memory::register_host(void* pointer, size_t nbytes, bool mapped) {
  const uintptr_t start = address(pointer);
  if (start == 0 || nbytes == 0 || (mapped && start % kPage != 0)) {
    return fail(ACL_ERROR_RT_PARAM_INVALID,
                "aclrtHostRegister: needs an address, a multiple of 4096 unless it only pins, and some bytes");
  }
  std::lock_guard lock(mutex_);
  // torch_npu's swapped memory is a part of what aclrtMallocHost gave.
  const Extent* around = at(host_, pointer);
  if (mapped && around && around->owned && at(host_, static_cast<char*>(pointer) + nbytes - 1) == around) {
    mapped_.insert(start);
    return ACL_SUCCESS;
  }
  const auto next = host_.upper_bound(start);
  if (at(host_, pointer) || (next != host_.end() && next->first - start < nbytes)) {
    return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtHostRegister: a part of it is pinned already");
  }
  if (const aclError code = refuse_beyond_host_limit("aclrtHostRegister", nbytes); code != ACL_SUCCESS) return code;
  host_[start] = {nbytes, kNone, false};
  host_used_ += nbytes;
  return ACL_SUCCESS;
}

aclError Memory::unregister_host(void* pointer) {
  std::lock_guard lock(mutex_);
  if (mapped_.erase(address(pointer)) != 0) return ACL_SUCCESS;
  auto found = host_.find(address(pointer));
  if (found == host_.end() || found->second.owned) {
    return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtHostUnregister: not registered memory");
  }
  if (Detector::on()) Detector::get().given_back("aclrtHostUnregister", {pointer, found->second.nbytes});
  host_used_ -= found->second.nbytes;
  host_.erase(found);
  return ACL_SUCCESS;
}

const Memory::Extent* Memory::at(const Extents& extents, const void* pointer) {
  auto next = extents.upper_bound(address(pointer));
  if (next == extents.begin()) return nullptr;
  --next;
  return address(pointer) < next->first + next->second.nbytes ? &next->second : nullptr;
}

Place Memory::place_of(const void* pointer) {
  std::lock_guard lock(mutex_);
  if (at(device_, pointer)) return Place::device;
  if (at(host_, pointer)) return Place::pinned;
  return at(graves_, pointer) ? Place::freed : Place::pageable;
}

void Memory::blank(void* pointer, size_t nbytes) {
  const uintptr_t begin = address(pointer), end = begin + nbytes;
  const uintptr_t first = (begin + kPage - 1) / kPage * kPage, last = end / kPage * kPage;
  std::lock_guard lock(mutex_);
  const Extent* extent = at(host_, pointer);
  if (extent == nullptr || !extent->owned || first >= last) {
    std::memset(pointer, 0, nbytes);
    return;
  }
  madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);  // zeros, as if never touched
  std::memset(pointer, 0, first - begin);
  std::memset(reinterpret_cast<void*>(last), 0, end - last);
}

std::optional<int> Memory::device_of(const void* pointer) {
  std::lock_guard lock(mutex_);
  const Extent* extent = at(device_, pointer);
  if (extent == nullptr) return std::nullopt;
  return extent->device;
}

std::pair<size_t, size_t> Memory::free_and_total() {
  const int device = current_device();
  std::lock_guard lock(mutex_);
  const size_t capacity = settings().hbm_bytes;
  return {capacity - std::min(capacity, device_used_[device]), capacity};
}

bool Memory::take(int device, size_t nbytes) {
  std::lock_guard lock(mutex_);
  const size_t capacity = settings().hbm_bytes;
  if (nbytes > capacity - std::min(capacity, device_used_[device])) return false;
  device_used_[device] += nbytes;
  return true;
}

void Memory::give(int device, size_t nbytes) {
  std::lock_guard lock(mutex_);
  device_used_[device] -= nbytes;
}

}  // namespace emulator

using namespace emulator;

ACL_EXPORT aclError aclrtMalloc(void** pointer, size_t nbytes, aclrtMemMallocPolicy) {
  const aclError code = fault("aclrtMalloc");
  return code == ACL_SUCCESS ? Memory::get().allocate_device(pointer, nbytes) : code;
}

ACL_EXPORT aclError aclrtMallocAlign32(void** pointer, size_t nbytes, aclrtMemMallocPolicy policy) {
  return aclrtMalloc(pointer, nbytes, policy);
}

ACL_EXPORT aclError aclrtFree(void* pointer) {
  land_late_bytes();
  return Memory::get().free_device(pointer);
}

ACL_EXPORT aclError aclrtMallocHost(void** pointer, size_t nbytes) {
  const aclError code = fault("aclrtMallocHost");
  return code == ACL_SUCCESS ? Memory::get().allocate_host(pointer, nbytes) : code;
}

ACL_EXPORT aclError aclrtMallocHostWithCfg(void** pointer, uint64_t nbytes, aclrtMallocConfig*) {
  return aclrtMallocHost(pointer, nbytes);
}

ACL_EXPORT aclError aclrtFreeHost(void* pointer) {
  land_late_bytes();
  const aclError code = fault_without_device("aclrtFreeHost");
  return code == ACL_SUCCESS ? Memory::get().free_host(pointer) : code;
}

ACL_EXPORT aclError aclrtHostRegisterV2(void* pointer, uint64_t nbytes, uint32_t flag) {
  const aclError code = fault("aclrtHostRegister");
  return code == ACL_SUCCESS ? Memory::get().register_host(pointer, nbytes, flag != ACL_HOST_REG_PINNED) : code;
}

ACL_EXPORT aclError aclrtHostRegister(void* pointer, uint64_t nbytes, aclrtHostRegisterType, void** device_pointer) {
  const aclError code = aclrtHostRegisterV2(pointer, nbytes, 0);
  if (code == ACL_SUCCESS && device_pointer != nullptr) *device_pointer = pointer;
  return code;
}

ACL_EXPORT aclError aclrtHostUnregister(void* pointer) {
  land_late_bytes();
  const aclError code = fault_without_device("aclrtHostUnregister");
  return code == ACL_SUCCESS ? Memory::get().unregister_host(pointer) : code;
}

ACL_EXPORT aclError aclrtPointerGetAttributes(const void* pointer, aclrtPtrAttributes* attributes) {
  if (const aclError code = fault_without_device("aclrtPointerGetAttributes"); code != ACL_SUCCESS) return code;
  std::memset(attributes, 0, sizeof *attributes);
  attributes->location.id = Memory::get().device_of(pointer).value_or(0);
  switch (Memory::get().place_of(pointer)) {
    case Place::device: attributes->location.type = ACL_MEM_LOCATION_TYPE_DEVICE; break;
    case Place::pinned:
      attributes->location.type =
          misbehaves("unpinned") ? ACL_MEM_LOCATION_TYPE_UNREGISTERED : ACL_MEM_LOCATION_TYPE_HOST;
      break;
    case Place::freed:
    case Place::pageable: attributes->location.type = ACL_MEM_LOCATION_TYPE_UNREGISTERED; break;
  }
  return ACL_SUCCESS;
}

ACL_EXPORT aclError aclrtGetMemInfo(aclrtMemAttr, size_t* free, size_t* total) {
  std::tie(*free, *total) = Memory::get().free_and_total();
  return ACL_SUCCESS;
}
