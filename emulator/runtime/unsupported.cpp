// What torch_npu must find in order to load and this emulator does not have. A stub that reported success without
// doing the work would turn into silent zeros, so each of these fails and says its name.
//
// The CANN headers are not included here: the functions take no notice of their arguments, which the C calling
// convention allows, and so need no signatures.
#include <stdexcept>
#include <string>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace emulator {

int fail(int code, const std::string& message);

namespace {

int unsupported(const char* function) {
  constexpr int feature_not_support = 207000;
  return fail(feature_not_support, std::string(function) + " is not emulated");
}

}  // namespace
}  // namespace emulator

#define UNSUPPORTED(function) \
  EXPORT int function() { return emulator::unsupported(#function); }
// torch_npu goes on after the code that UNSUPPORTED has, with a warning. What is thrown goes through it to its caller.
#define THROWS(function) \
  EXPORT int function() { throw std::runtime_error(#function " is not emulated"); }
#define NOTHING(function) \
  EXPORT void* function() { return nullptr; }
#define UNHEARD(function) \
  EXPORT long function() { return 0; }

// Memory by physical pages, and memory shared between processes and devices.
UNSUPPORTED(aclrtMallocPhysical)
UNSUPPORTED(aclrtFreePhysical)
UNSUPPORTED(aclrtReserveMemAddress)
UNSUPPORTED(aclrtReleaseMemAddress)
UNSUPPORTED(aclrtMapMem)
UNSUPPORTED(aclrtUnmapMem)
UNSUPPORTED(aclrtMemExportToShareableHandle)
UNSUPPORTED(aclrtMemImportFromShareableHandle)
UNSUPPORTED(aclrtMemSetPidToShareableHandle)
UNSUPPORTED(aclrtDeviceEnablePeerAccess)
UNSUPPORTED(aclrtDeviceGetBareTgid)
UNSUPPORTED(aclrtResetEvent)

// Kernels given as binaries.
UNSUPPORTED(aclrtBinaryGetFunction)
UNSUPPORTED(aclrtBinaryLoadFromData)
UNSUPPORTED(aclrtGetFunctionAddr)
UNSUPPORTED(rtDevBinaryRegister)
UNSUPPORTED(rtFunctionRegister)
UNSUPPORTED(rtGetC2cCtrlAddr)
UNSUPPORTED(rtKernelLaunch)

// What a graph can have on hardware beside its operations: tasks that are exchanged between replays, and branches that
// depend on data. And what shows a graph.
THROWS(aclmdlRICaptureTaskGrpBegin)
THROWS(aclmdlRICaptureTaskGrpEnd)
THROWS(aclmdlRICaptureTaskUpdateBegin)
THROWS(aclmdlRICaptureTaskUpdateEnd)
THROWS(aclmdlRICondHandleCreate)
THROWS(aclmdlRICondHandleGetCondPtr)
THROWS(aclmdlRIAddCondTask)
THROWS(aclmdlRICaptureToModelRIBegin)
THROWS(aclmdlRIDebugPrint)
THROWS(aclmdlRIDebugJsonPrint)

// The ranks of one process, for which torch_npu 2.9 is linked with it.
UNSUPPORTED(HcclCommInitAll)

// Dumps.
UNSUPPORTED(aclmdlInitDump)
UNSUPPORTED(aclmdlSetDump)
UNSUPPORTED(aclmdlFinalizeDump)
UNSUPPORTED(aclGetDeviceCapability)

// Operators by name, the way before aclnn. The first description of a tensor throws, through torch_npu's code to who
// called the operator. The launch could say the operator's name, but it may be made by torch_npu's task queue, which
// drops all work after a failure and tells whoever comes next.
EXPORT void* aclCreateTensorDesc() {
  throw std::runtime_error(
      "the emulated NPU has no kernel for this call, which CANN computes by its older interface, aclop");
}

NOTHING(aclCreateDataBuffer)
NOTHING(aclopCreateAttr)
UNHEARD(aclDestroyDataBuffer)
UNHEARD(aclDestroyTensorDesc)
UNHEARD(aclGetTensorDescDimV2)
UNHEARD(aclGetTensorDescFormat)
UNHEARD(aclGetTensorDescNumDims)
UNHEARD(aclGetTensorDescType)
UNHEARD(aclSetTensorDescName)
UNHEARD(aclSetTensorFormat)
UNHEARD(aclSetTensorPlaceMent)
UNHEARD(aclSetTensorShape)
UNHEARD(aclopDestroyAttr)
UNHEARD(aclopSetAttrBool)
UNHEARD(aclopSetAttrDataType)
UNHEARD(aclopSetAttrFloat)
UNHEARD(aclopSetAttrInt)
UNHEARD(aclopSetAttrListBool)
UNHEARD(aclopSetAttrListFloat)
UNHEARD(aclopSetAttrListInt)
UNHEARD(aclopSetAttrListListInt)
UNHEARD(aclopSetAttrString)

EXPORT int aclopCompileAndExecute(const char* operator_name) {
  return emulator::unsupported((std::string("operator ") + operator_name + " (by aclop)").c_str());
}

EXPORT int aclopCompileAndExecuteV2(const char* operator_name) { return aclopCompileAndExecute(operator_name); }

// Telemetry, limits on how long an operation may take, collectives to be deterministic: there is nothing here that
// they would change. Nor do numbers that are too large saturate: they become infinite, whatever the mode.
UNHEARD(MsprofGetHashId)
UNHEARD(MsprofRegisterCallback)
UNHEARD(MsprofReportAdditionalInfo)
UNHEARD(MsprofReportApi)
UNHEARD(MsprofReportCompactInfo)
UNHEARD(MsprofSysCycleTime)
UNHEARD(aclAppLog)
UNHEARD(aclrtSetOpWaitTimeout)
UNHEARD(aclrtSetOpExecuteTimeOut)
UNHEARD(aclrtSetStreamFailureMode)
UNHEARD(aclrtSetStreamOverflowSwitch)
UNHEARD(aclrtSetStreamAttribute)
UNHEARD(aclrtSetDeviceSatMode)
UNHEARD(HcclSetConfig)
