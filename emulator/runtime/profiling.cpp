// The host's half of profilers works: torch's records the CPU's operators, and torch_npu's as well, with
// ProfilerActivity.CPU. The device's half is not emulated. What is asked of it here leads to no crash, and names the
// timeline, which does show what ran when.
#include "operation.h"

#include <cstdio>
#include <mutex>
#include <stdexcept>

using namespace emulator;

namespace {

constexpr const char* kInstead =
    "the emulated NPU has no profiler of the device; python -m ascend_emulator --timeline FILE writes what ran when";

// The result codes of mspti, by which torch.profiler asks for what ran on the device.
enum MsptiResult : int { kSuccess = 0, kWithoutLibrary = 6 };

}  // namespace

// torch.profiler calls these when it stops, whether or not it could start. It takes no error from them.
ACL_EXPORT int msptiActivityFlushAll(uint32_t) {
  static std::once_flag told;
  std::call_once(told, [] { std::fprintf(stderr, "torch.profiler: %s\n", kInstead); });
  return kWithoutLibrary;
}

ACL_EXPORT int msptiActivityDisable(int) { return kSuccess; }  // nothing was enabled

// torch_npu.profiler, with ProfilerActivity.NPU. It looks at no code that this returns, but logs what it throws.
ACL_EXPORT aclError aclprofInit(const char*, size_t) { throw std::runtime_error(kInstead); }

// torch_npu.profiler reads a driver of this version by the host's clock, and a newer one by a counter of the device.
ACL_EXPORT int halGetAPIVersion(int32_t* version) {
  *version = 0;
  return 0;
}

ACL_EXPORT int halGetDeviceInfo(uint32_t, int32_t, int32_t, int64_t* value) {
  *value = 0;
  return 0;
}
