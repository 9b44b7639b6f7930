// What the files with HCCL's functions share: communicators by handle, and errors.
#pragma once

#include "communicator.h"

#include <map>

#define HCCL_EXPORT extern "C" __attribute__((visibility("default")))

namespace emulator::hccl {

// All communicators. One that is destroyed while another thread calls it lives until that call is done.
class Communicators {
 public:
  static Communicators& all();

  HcclComm add(std::shared_ptr<Communicator> communicator);
  std::shared_ptr<Communicator> find(HcclComm handle);  // empty for what is none, or was destroyed
  std::shared_ptr<Communicator> remove(HcclComm handle);

 private:
  std::mutex mutex_;
  std::map<HcclComm, std::shared_ptr<Communicator>> communicators_;
};

HcclResult unknown(const char* function);

}  // namespace emulator::hccl
