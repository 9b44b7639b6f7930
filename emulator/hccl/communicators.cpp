// HCCL's functions that make, ask and destroy communicators.
#include "api.h"

#include <unistd.h>

#include <cstring>
#include <stdexcept>

namespace emulator::hccl {

Communicators& Communicators::all() {
  static auto* communicators = new Communicators;  // never destroyed: other libraries' threads ask to the very end
  return *communicators;
}

HcclComm Communicators::add(std::shared_ptr<Communicator> communicator) {
  const HcclComm handle = communicator.get();
  std::lock_guard lock(mutex_);
  communicators_.emplace(handle, std::move(communicator));
  return handle;
}

std::shared_ptr<Communicator> Communicators::find(HcclComm handle) {
  std::lock_guard lock(mutex_);
  const auto found = communicators_.find(handle);
  return found == communicators_.end() ? nullptr : found->second;
}

std::shared_ptr<Communicator> Communicators::remove(HcclComm handle) {
  std::lock_guard lock(mutex_);
  const auto found = communicators_.extract(handle);
  return found.empty() ? nullptr : found.mapped();
}

HcclResult unknown(const char* function) {
  return refuse(HCCL_E_PARA, std::string(function) + ": not a communicator, or one that was destroyed");
}

}  // namespace emulator::hccl

using namespace emulator;
using namespace emulator::hccl;

HCCL_EXPORT HcclResult HcclGetRootInfo(HcclRootInfo* opaque) try {
  const RootInfo root = Board::make();
  std::memset(opaque, 0, sizeof *opaque);
  std::memcpy(opaque->internal, &root, sizeof root);
  return HCCL_SUCCESS;
} catch (const std::exception& error) {
  return refuse(HCCL_E_MEMORY, std::string("HcclGetRootInfo: ") + error.what());
}

HCCL_EXPORT HcclResult HcclCommInitRootInfoConfig(uint32_t ranks, const HcclRootInfo* opaque, uint32_t rank,
                                                  const HcclCommConfig* config, HcclComm* handle) {
  if (const int code = told_to_fail("HcclCommInitRootInfo"); code != 0) return static_cast<HcclResult>(code);
  RootInfo root;
  std::memcpy(&root, opaque->internal, sizeof root);
  // Two buffers of that size, one for each direction.
  uint32_t mebibytes = static_cast<uint32_t>(patience_of("HCCL_BUFFSIZE", std::chrono::seconds(0)).count());
  if (mebibytes == 0) mebibytes = HCCL_COMM_DEFAULT_BUFFSIZE;
  auto patience = patience_of("HCCL_EXEC_TIMEOUT", kDefaultPatience);
  std::string name;
  if (config != nullptr) {
    if (config->hcclBufferSize != HCCL_COMM_BUFFSIZE_CONFIG_NOT_SET) mebibytes = config->hcclBufferSize;
    if (config->hcclExecTimeOut > 0) patience = std::chrono::seconds(config->hcclExecTimeOut);
    name = config->hcclCommName;
  }
  if (name.empty()) name = "hccl_" + std::to_string(root.cookie);
  HcclResult code = HCCL_SUCCESS;
  try {
    *handle = Communicators::all().add(
        std::make_shared<Communicator>(root, ranks, rank, name, size_t{2 * mebibytes} << 20, patience));
  } catch (const std::exception& error) {
    const bool late = dynamic_cast<const TimedOut*>(&error) != nullptr;
    code = refuse(late ? HCCL_E_TIMEOUT : HCCL_E_UNAVAIL, std::string("HcclCommInitRootInfo: ") + error.what());
  }
  if (root.pid == getpid()) close(root.fd);  // all have opened it by now, or never will
  return code;
}

HCCL_EXPORT HcclResult HcclCommInitRootInfo(uint32_t ranks, const HcclRootInfo* root, uint32_t rank,
                                            HcclComm* handle) {
  return HcclCommInitRootInfoConfig(ranks, root, rank, nullptr, handle);
}

HCCL_EXPORT HcclResult HcclCommDestroy(HcclComm handle) {
  return Communicators::all().remove(handle) ? HCCL_SUCCESS : unknown("HcclCommDestroy");
}

// torch_npu gives a communicator a name only if this is at least that of the newest option.
HCCL_EXPORT uint32_t HcclGetCommConfigCapability() { return HCCL_COMM_CONFIG_RESERVED; }

HCCL_EXPORT HcclResult HcclGetCommName(HcclComm handle, char* name) {
  const auto communicator = Communicators::all().find(handle);
  if (!communicator) return unknown("HcclGetCommName");
  std::strncpy(name, communicator->name().c_str(), COMM_NAME_MAX_LENGTH);
  return HCCL_SUCCESS;
}

HCCL_EXPORT HcclResult HcclGetRankSize(HcclComm handle, uint32_t* ranks) {
  const auto communicator = Communicators::all().find(handle);
  if (!communicator) return unknown("HcclGetRankSize");
  *ranks = communicator->ranks();
  return HCCL_SUCCESS;
}

HCCL_EXPORT HcclResult HcclGetRankId(HcclComm handle, uint32_t* rank) {
  const auto communicator = Communicators::all().find(handle);
  if (!communicator) return unknown("HcclGetRankId");
  *rank = communicator->rank();
  return HCCL_SUCCESS;
}

// torch_npu's watchdog asks, and ends the process with the message that is kept on its own thread.
HCCL_EXPORT HcclResult HcclGetCommAsyncError(HcclComm handle, HcclResult* error) {
  const auto communicator = Communicators::all().find(handle);
  if (!communicator) return unknown("HcclGetCommAsyncError");
  const std::string failure = communicator->failure();
  *error = failure.empty() ? HCCL_SUCCESS : refuse(HCCL_E_REMOTE, failure);
  return HCCL_SUCCESS;
}

HCCL_EXPORT const char* HcclGetErrorString(HcclResult) { return "aclGetRecentErrMsg() tells what went wrong"; }
