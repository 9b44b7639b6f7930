// HCCL's sends and receives, alone, in a batch, or in a group.
#include "api.h"

using namespace emulator;
using namespace emulator::hccl;

namespace {

// What this thread calls between HcclGroupStart and HcclGroupEnd, which is done as one.
class Group {
 public:
  static Group& of_thread() {
    thread_local Group group;
    return group;
  }

  bool is_open() const { return depth_ > 0; }
  void open() { ++depth_; }
  void add(std::shared_ptr<Communicator> communicator, aclrtStream stream, const Transfer& transfer) {
    entries_.push_back({std::move(communicator), stream, transfer});
  }

  HcclResult close() {
    if (depth_ == 0) return refuse(HCCL_E_PARA, "HcclGroupEnd without HcclGroupStart");
    if (--depth_ > 0) return HCCL_SUCCESS;
    auto entries = std::move(entries_);
    entries_.clear();
    HcclResult first = HCCL_SUCCESS;
    while (!entries.empty()) {
      const Entry head = entries.front();
      std::vector<Transfer> together;
      std::erase_if(entries, [&](const Entry& each) {
        if (each.communicator != head.communicator || each.stream != head.stream) return false;
        together.push_back(each.transfer);
        return true;
      });
      const HcclResult code = head.communicator->transfers("HcclGroup", head.stream, together);
      if (first == HCCL_SUCCESS) first = code;
    }
    return first;
  }

 private:
  struct Entry {
    std::shared_ptr<Communicator> communicator;
    aclrtStream stream;
    Transfer transfer;
  };

  int depth_ = 0;
  std::vector<Entry> entries_;
};

HcclResult transfer(const char* function, HcclComm handle, aclrtStream stream, const Transfer& transfer) {
  if (const int code = told_to_fail(function); code != 0) return static_cast<HcclResult>(code);
  const auto communicator = Communicators::all().find(handle);
  if (!communicator) return unknown(function);
  if (!Group::of_thread().is_open()) return communicator->transfers(function, stream, {transfer});
  Group::of_thread().add(communicator, stream, transfer);
  return HCCL_SUCCESS;
}

}  // namespace

HCCL_EXPORT HcclResult HcclSend(void* buffer, uint64_t count, HcclDataType dtype, uint32_t to, HcclComm handle,
                                aclrtStream stream) {
  return transfer("HcclSend", handle, stream, {true, buffer, count, dtype, to});
}

HCCL_EXPORT HcclResult HcclRecv(void* buffer, uint64_t count, HcclDataType dtype, uint32_t from, HcclComm handle,
                                aclrtStream stream) {
  return transfer("HcclRecv", handle, stream, {false, buffer, count, dtype, from});
}

HCCL_EXPORT HcclResult HcclBatchSendRecv(HcclSendRecvItem* items, uint32_t count, HcclComm handle,
                                         aclrtStream stream) {
  const auto communicator = Communicators::all().find(handle);
  if (!communicator) return unknown("HcclBatchSendRecv");
  std::vector<Transfer> transfers;
  for (uint32_t i = 0; i < count; ++i) {
    const HcclSendRecvItem& item = items[i];
    transfers.push_back(
        {item.sendRecvType == HCCL_SEND, item.buf, item.count, item.dataType, item.remoteRank});
  }
  return communicator->transfers("HcclBatchSendRecv", stream, transfers);
}

HCCL_EXPORT HcclResult HcclGroupStart() {
  Group::of_thread().open();
  return HCCL_SUCCESS;
}

HCCL_EXPORT HcclResult HcclGroupEnd() { return Group::of_thread().close(); }
