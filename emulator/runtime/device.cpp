// The device itself: start and end, its name, its options, the versions it reports, and the last error.
#include "device.h"

#include "fault.h"
#include "settings.h"
#include "stream.h"

#include <acl/acl_op_compiler.h>

#include <cstdio>
#include <cstring>
#include <map>

namespace emulator {
namespace {

// Options that torch_npu sets and reads back.
class Options {
 public:
  static Options& get() {
    static auto* options = new Options;
    return *options;
  }

  void set_system(int option, int64_t value) {
    std::lock_guard lock(mutex_);
    system_[option] = value;
  }

  int64_t system(int option) {
    std::lock_guard lock(mutex_);
    return system_[option];
  }

  void set_compile(int option, const char* value) {
    std::lock_guard lock(mutex_);
    compile_[option] = value;
  }

  std::string compile(int option) {
    std::lock_guard lock(mutex_);
    return compile_[option];
  }

 private:
  std::mutex mutex_;
  std::map<int, int64_t> system_;
  // Operators must go the aclnn way: the older one compiles kernels, which only CANN itself can.
  std::map<int, std::string> compile_{{static_cast<int>(ACL_OP_JIT_COMPILE), "disable"}};
};

// The device that this thread uses. Its context is known by the address of its number.
thread_local int device_of_thread = 0;
constexpr int kMostDevices = 64;

int* contexts() {
  static int* numbers = [] {
    auto* made = new int[kMostDevices];
    for (int i = 0; i < kMostDevices; ++i) made[i] = i;
    return made;
  }();
  return numbers;
}

// The last call that failed on this thread. No std::string: calls come, and fail, after a thread's objects are gone.
struct LastError {
  aclError code = ACL_SUCCESS;
  char message[512] = "";
};

LastError& last_error() {
  thread_local LastError error;
  return error;
}

const char* version_of(aclCANNPackageName package) {
  if (settings().current_stack) return package == ACL_PKG_NAME_DRIVER ? "25.5.0" : "8.5.0";
  return package == ACL_PKG_NAME_DRIVER ? "24.1.0" : "8.2.0";
}

}  // namespace

int current_device() { return device_of_thread; }

aclError fail(aclError code, const std::string& message) {
  last_error().code = code;
  std::snprintf(last_error().message, sizeof LastError::message, "%s", message.c_str());
  return code;
}

}  // namespace emulator

using namespace emulator;

ACL_EXPORT aclError aclInit(const char*) { return ACL_SUCCESS; }

ACL_EXPORT aclError aclFinalize() { return aclrtSynchronizeDevice(); }

ACL_EXPORT aclError aclrtGetDeviceCount(uint32_t* count) {
  *count = settings().devices;
  return ACL_SUCCESS;
}

ACL_EXPORT aclError aclrtSetDevice(int32_t device) {
  if (device < 0 || device >= settings().devices) {
    return fail(ACL_ERROR_RT_INVALID_DEVICEID, "no device " + std::to_string(device) + " among the " +
                                                   std::to_string(settings().devices) + " emulated; --devices " +
                                                   std::to_string(device + 1) + " gives as many");
  }
  device_of_thread = device;
  return ACL_SUCCESS;
}

ACL_EXPORT aclError aclrtGetDevice(int32_t* device) {
  *device = device_of_thread;
  return ACL_SUCCESS;
}

ACL_EXPORT aclError aclrtResetDevice(int32_t) { return aclrtSynchronizeDevice(); }

ACL_EXPORT const char* aclrtGetSocName() { return "Ascend910B1"; }

ACL_EXPORT aclError aclrtGetCurrentContext(aclrtContext* context) {
  *context = &contexts()[device_of_thread];
  return ACL_SUCCESS;
}

ACL_EXPORT aclError aclrtSetCurrentContext(aclrtContext context) {
  return aclrtSetDevice(*static_cast<int*>(context));
}

// Copies from one device to another go through the host, as they do where devices have no link of their own.
ACL_EXPORT aclError aclrtDeviceCanAccessPeer(int32_t* can, int32_t, int32_t) {
  *can = 0;
  return ACL_SUCCESS;
}

ACL_EXPORT const char* aclGetRecentErrMsg() { return last_error().message; }

ACL_EXPORT aclError aclrtPeekAtLastError(aclrtLastErrLevel) { return last_error().code; }

ACL_EXPORT aclError aclrtGetLastError(aclrtLastErrLevel) {
  const aclError code = last_error().code;
  last_error().code = ACL_SUCCESS;
  return code;
}

ACL_EXPORT aclError aclrtGetSysParamOpt(aclSysParamOpt option, int64_t* value) {
  *value = Options::get().system(option);
  return ACL_SUCCESS;
}

ACL_EXPORT aclError aclrtSetSysParamOpt(aclSysParamOpt option, int64_t value) {
  Options::get().set_system(option, value);
  return ACL_SUCCESS;
}

ACL_EXPORT aclError aclrtCtxGetSysParamOpt(aclSysParamOpt option, int64_t* value) {
  return aclrtGetSysParamOpt(option, value);
}

ACL_EXPORT aclError aclrtCtxSetSysParamOpt(aclSysParamOpt option, int64_t value) {
  return aclrtSetSysParamOpt(option, value);
}

ACL_EXPORT aclError aclSetCompileopt(aclCompileOpt option, const char* value) {
  Options::get().set_compile(option, value);
  return ACL_SUCCESS;
}

ACL_EXPORT size_t aclGetCompileoptSize(aclCompileOpt option) { return Options::get().compile(option).size() + 1; }

ACL_EXPORT aclError aclGetCompileopt(aclCompileOpt option, char* value, size_t room) {
  std::snprintf(value, room, "%s", Options::get().compile(option).c_str());
  return ACL_SUCCESS;
}

// torch_npu trusts aclrtPointerGetAttributes about host memory only from driver 25.5 and CANN 8.5 on.
ACL_EXPORT aclError aclsysGetCANNVersion(aclCANNPackageName package, aclCANNPackageVersion* version) {
  std::memset(version, 0, sizeof *version);
  std::snprintf(version->version, sizeof version->version, "%s", version_of(package));
  return ACL_SUCCESS;
}
