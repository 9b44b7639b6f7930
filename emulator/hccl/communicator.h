// A communicator: ranks, each with a device of its own, and what they do together, in the order of the host's calls.
#pragma once

#include "attendant.h"
#include "exchange.h"

#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace emulator::hccl {

// Keeps the message for aclGetRecentErrMsg and returns the code.
HcclResult refuse(HcclResult code, const std::string& message);

// A send or receive.
struct Transfer {
  bool sends;
  void* buffer;
  uint64_t count;
  HcclDataType dtype;
  uint32_t peer;
};

class Communicator {
 public:
  // Blocks until all ranks have come. buffer_bytes: what CANN's own communicator would take of the device's memory.
  // Throws std::runtime_error where that is not there, and as Board does.
  Communicator(const RootInfo& root, uint32_t ranks, uint32_t rank, std::string name, size_t buffer_bytes,
               std::chrono::seconds patience);
  ~Communicator();  // waits for what is queued
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  uint32_t rank() const { return rank_; }
  uint32_t ranks() const { return ranks_; }
  const std::string& name() const { return name_; }
  std::string failure() const { return board_->failure(); }

  // All ranks together. See Leg for what is given and taken.
  HcclResult collective(const char* function, aclrtStream stream, Signature signature, std::vector<Range> gives,
                        std::vector<Range> gets, std::function<void(Trays)> take);
  // All of these at once, each with its peer. Those with the same peer are one message: it must batch them alike.
  HcclResult transfers(const char* function, aclrtStream stream, const std::vector<Transfer>& transfers);

 private:
  Leg leg_of(const std::vector<Transfer>& message) const;
  HcclResult put(const std::string& function, aclrtStream stream, std::vector<Leg> legs, Work work);
  HcclResult submit_both(const std::string& function, aclrtStream stream, const std::vector<Leg>& legs, Work work);

  const uint32_t ranks_;
  const uint32_t rank_;
  const std::string name_;
  const size_t buffer_bytes_;
  const int device_;
  const std::chrono::seconds patience_;
  const std::shared_ptr<Board> board_;  // also of what is queued
  Attendant attendant_;
  std::mutex issuing_;  // the order of the calls is that on the streams
  aclrtStream last_stream_ = nullptr;
  std::shared_ptr<StreamPoint> last_point_;
};

}  // namespace emulator::hccl
