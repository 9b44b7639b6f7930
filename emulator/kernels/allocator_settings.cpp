// Lets torch_npu be loaded beside torch's CUDA build, the only one that PyPI has for x86.
#include <c10/core/AllocatorConfig.h>

namespace {

// torch_npu's allocator registers its settings with torch as it is loaded. Two of them are also those of CUDA's, which
// the CUDA build has registered before, and torch ends a process in which a setting is registered twice. No CUDA device
// is used beside an emulated NPU, so the two become unknown again, as they are to torch's CPU build.
template <typename Config>
void forget_settings_of_cuda() {
  if constexpr (requires { Config::getMutableKeys(); }) {  // torch 2.10 has it, 2.9 does not
    for (const char* name : {"per_process_memory_fraction", "pinned_reserve_segment_size_mb"}) {
      Config::getMutableKeys().erase(name);
    }
  }
}

// This library is loaded after torch, and before torch_npu.
[[gnu::constructor]] void before_torch_npu() {
  forget_settings_of_cuda<c10::CachingAllocator::AcceleratorAllocatorConfig>();
}

}  // namespace
