// Tells the race detector what torch_npu's caching allocator takes back. Such memory stays the device's, and is
// handed out again without any call that the runtime would see.
#include "../runtime/operation.h"

#include <torch_npu/csrc/core/npu/NPUCachingAllocator.h>

// The first releases of torch_npu 2.9 to 2.12 tell nobody, and start() refuses to look for races there.
#ifdef ALLOCATOR_TELLS
// To be called once, when torch_npu has made its allocators.
ACL_EXPORT void ascend_emulator_watch_allocator() {
  using c10_npu::NPUCachingAllocator::TraceEntry;
  c10_npu::NPUCachingAllocator::attachAllocatorTraceTracker([](const TraceEntry& entry) {
    if (entry.action_ == TraceEntry::FREE_COMPLETED) {
      auto* begin = reinterpret_cast<void*>(entry.addr_);
      emulator::freed_by_torch(entry.stream_, {begin, static_cast<size_t>(entry.size_)});
    }
  });
}
#endif
