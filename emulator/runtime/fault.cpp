#include "fault.h"

#include <atomic>
#include <condition_variable>
#include <map>
#include <mutex>
#include <random>
#include <set>

namespace emulator {
namespace {

constexpr int kHcclInternal = 4;  // HCCL_E_INTERNAL

// The functions that can be told to fail, each with its variants, and the code that CANN fails with.
const std::map<std::string, aclError> kCodes{
    {"aclrtMalloc", ACL_ERROR_RT_MEMORY_ALLOCATION},
    {"aclrtMallocHost", ACL_ERROR_RT_MEMORY_ALLOCATION},
    {"aclrtFreeHost", ACL_ERROR_RT_MEMORY_FREE},
    {"aclrtHostRegister", ACL_ERROR_RT_MEMORY_ALLOCATION},
    {"aclrtHostUnregister", ACL_ERROR_RT_DRV_INTERNAL_ERROR},
    {"aclrtPointerGetAttributes", ACL_ERROR_RT_DRV_INTERNAL_ERROR},
    {"aclrtMemcpy", ACL_ERROR_RT_INTERNAL_ERROR},
    {"aclrtMemcpyAsync", ACL_ERROR_RT_INTERNAL_ERROR},
    {"aclrtMemcpyBatch", ACL_ERROR_RT_INTERNAL_ERROR},
    {"aclrtMemcpyBatchAsync", ACL_ERROR_RT_INTERNAL_ERROR},
    {"aclrtCreateStream", ACL_ERROR_RT_NO_STREAM_RESOURCE},
    {"aclrtCreateEvent", ACL_ERROR_RT_NO_EVENT_RESOURCE},
    {"HcclCommInitRootInfo", kHcclInternal},
    {"HcclAllReduce", kHcclInternal},
    {"HcclAllGather", kHcclInternal},
    {"HcclReduceScatter", kHcclInternal},
    {"HcclBroadcast", kHcclInternal},
};
constexpr const char* kDevice = "device";  // fails with the operation, and stays lost
constexpr aclError kStruck = ACL_ERROR_RT_INTERNAL_ERROR;  // nobody is told of what goes wrong in silence

bool is_kernel(const std::string& function) { return function.starts_with("aclnn"); }

// What goes wrong while every call says that it went well.
const std::set<std::string> kSilent{"copy_h2d",     "copy_d2h", "late_h2d",    "late_d2h",  "blocking_h2d",
                                    "blocking_d2h", "unpinned", "endless_h2d", "lost_wait", "endless_d2h"};

bool is_silent(const std::string& function) { return is_kernel(function) || kSilent.contains(function); }

struct Fault {
  uint64_t calls_left;  // 0: by probability
  double probability;
  std::mt19937_64 draw;
  aclError code;
};

class Faults {
 public:
  static Faults& get() {
    static auto* faults = new Faults;  // never destroyed: see Streams
    return *faults;
  }

  bool set(const std::string& function, uint64_t nth, double probability, uint64_t seed, aclError code) {
    const bool silent = is_silent(function);
    if (!kCodes.contains(function) && function != kDevice && !silent) return false;
    std::lock_guard lock(mutex_);
    if (silent) code = kStruck;
    if (code == ACL_SUCCESS) code = function == kDevice ? ACL_ERROR_RT_LOST_HEARTBEAT : kCodes.at(function);
    faults_[function] = {nth, probability, std::mt19937_64(seed), code};
    any_ = true;
    return true;
  }

  void clear() {
    std::lock_guard lock(mutex_);
    faults_.clear();
    any_ = false;
    lost_ = ACL_SUCCESS;
    ++cleared_;
    changed_.notify_all();
  }

  uint64_t cleared() {
    std::lock_guard lock(mutex_);
    return cleared_;
  }

  void wait_for_clear(uint64_t before) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this, before] { return cleared_ != before; });
  }

  aclError strikes(const char* function) {
    if (!any_) return ACL_SUCCESS;
    std::lock_guard lock(mutex_);
    const auto found = faults_.find(function);
    if (found == faults_.end()) return ACL_SUCCESS;
    Fault& fault = found->second;
    if (fault.calls_left > 0) {
      if (--fault.calls_left > 0) return ACL_SUCCESS;
      const aclError code = fault.code;
      faults_.erase(found);
      return code;
    }
    std::uniform_real_distribution<double> uniform(0, 1);
    return uniform(fault.draw) < fault.probability ? fault.code : ACL_SUCCESS;
  }

  std::atomic<aclError> lost_{ACL_SUCCESS};

 private:
  std::atomic<bool> any_{false};
  std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t cleared_ = 0;  // how often
  std::map<std::string, Fault> faults_;
};

}  // namespace

aclError fault(const char* function) { return device_is_lost() ? lost() : fault_without_device(function); }

aclError fault_without_device(const char* function) {
  const aclError code = Faults::get().strikes(function);
  return code == ACL_SUCCESS ? ACL_SUCCESS : fail(code, std::string(function) + ": this call was told to fail");
}

bool device_is_lost() { return Faults::get().lost_ != ACL_SUCCESS; }

aclError lost() { return fail(Faults::get().lost_, "the device is lost"); }

aclError count_towards_loss() {
  if (!device_is_lost()) {
    const aclError code = Faults::get().strikes(kDevice);
    if (code == ACL_SUCCESS) return ACL_SUCCESS;
    Faults::get().lost_ = code;
  }
  return lost();
}

bool misbehaves(const std::string& how) { return Faults::get().strikes(how.c_str()) != ACL_SUCCESS; }

std::function<void()> until_faults_are_cleared() {
  return [before = Faults::get().cleared()] { Faults::get().wait_for_clear(before); };
}

void give_other_bits(Operation& operation) {
  if (!is_silent(operation.name) || operation.writes.empty()) return;
  if (Faults::get().strikes(operation.name.c_str()) == ACL_SUCCESS) return;
  const Range first = operation.writes.front();
  operation.body = [body = std::move(operation.body), first] {
    body();
    if (first.nbytes > 0) *static_cast<unsigned char*>(const_cast<void*>(first.begin)) ^= 1;
  };
}

}  // namespace emulator

// For the Python package. What is silent does not fail, but goes wrong. nth: the call that fails, counted from 1, once; 0: each call, with that probability.
// code: 0 is the one that CANN fails with. Returns 0 for a function that cannot be told to fail.
ACL_EXPORT int ascend_emulator_set_fault(const char* function, uint64_t nth, double probability, uint64_t seed,
                                         int code) {
  return emulator::Faults::get().set(function, nth, probability, seed, code);
}

ACL_EXPORT void ascend_emulator_clear_faults() { emulator::Faults::get().clear(); }
