// HCCL's collectives: what each rank gives, and what it takes from the trays of the others. Reductions go through the
// ranks in their order, so that all ranks have the same bits.
#include "api.h"
#include "reduce.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

using namespace emulator;
using namespace emulator::hccl;

namespace {

// What is common to all: faults, an unknown communicator, a type without a size, or one that cannot be reduced.
HcclResult refusal(const char* function, const std::shared_ptr<Communicator>& communicator, HcclDataType dtype,
                   bool reduces = false) {
  if (const int code = told_to_fail(function); code != 0) return static_cast<HcclResult>(code);
  if (!communicator) return unknown(function);
  if (size_of(dtype) == 0 || (reduces && !can_reduce(dtype))) {
    return refuse(HCCL_E_NOT_SUPPORT, std::string(function) + ": not for the data type " + std::to_string(dtype));
  }
  return HCCL_SUCCESS;
}

char* bytes(const void* pointer) { return static_cast<char*>(const_cast<void*>(pointer)); }

// The part of all trays that begins at `offset`, reduced.
void reduce_trays(const Trays& trays, size_t offset, void* result, uint64_t count, HcclDataType dtype,
                  HcclReduceOp op) {
  std::memcpy(result, trays.of(0) + offset, count * size_of(dtype));
  for (size_t rank = 1; rank < trays.parties(); ++rank) reduce(result, trays.of(rank) + offset, count, dtype, op);
}

// Of an all-to-all: how many elements go to, or come from, each rank, and where these are.
struct Parts {
  std::vector<uint64_t> counts;
  std::vector<uint64_t> starts;

  std::vector<Range> ranges(const void* begin, size_t size) const {
    std::vector<Range> found;
    for (size_t i = 0; i < counts.size(); ++i) found.push_back({bytes(begin) + starts[i] * size, counts[i] * size});
    return found;
  }
};

Parts even_parts(uint64_t count, uint32_t ranks) {
  Parts parts;
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    parts.counts.push_back(count);
    parts.starts.push_back(rank * count);
  }
  return parts;
}

Parts uneven_parts(const void* counts, const void* starts, uint32_t ranks) {
  const auto* first_count = static_cast<const uint64_t*>(counts);
  const auto* first_start = static_cast<const uint64_t*>(starts);
  return {{first_count, first_count + ranks}, {first_start, first_start + ranks}};
}

HcclResult all_to_all(const char* function, Communicator& communicator, Signature signature, const void* send,
                      const Parts& sent, const void* receive, const Parts& received, aclrtStream stream) {
  std::copy(sent.counts.begin(), sent.counts.end(), signature.counts);
  const size_t size = size_of(signature.dtype);
  const std::vector<Range> gets = received.ranges(receive, size);
  const auto take = [gets, size, function = std::string(function), me = communicator.rank()](Trays trays) {
    for (size_t rank = 0; rank < trays.parties(); ++rank) {
      const uint64_t* counts = trays.signature(rank).counts;
      if (counts[me] * size != gets[rank].nbytes) {
        throw std::runtime_error(function + ": rank " + std::to_string(rank) + " sends " + std::to_string(counts[me]) +
                                 " elements to rank " + std::to_string(me) + ", which expects " +
                                 std::to_string(gets[rank].nbytes / size));
      }
      uint64_t before = 0;
      for (uint32_t other = 0; other < me; ++other) before += counts[other];
      std::memcpy(const_cast<void*>(gets[rank].begin), trays.of(rank) + before * size, gets[rank].nbytes);
    }
  };
  return communicator.collective(function, stream, signature, sent.ranges(send, size), gets, take);
}

}  // namespace

HCCL_EXPORT HcclResult HcclAllReduce(void* send, void* receive, uint64_t count, HcclDataType dtype, HcclReduceOp op,
                                     HcclComm handle, aclrtStream stream) {
  const auto communicator = Communicators::all().find(handle);
  if (const HcclResult code = refusal("HcclAllReduce", communicator, dtype, true); code != HCCL_SUCCESS) return code;
  const size_t nbytes = count * size_of(dtype);
  const auto take = [=](Trays trays) { reduce_trays(trays, 0, receive, count, dtype, op); };
  const Signature signature{.kind = Kind::all_reduce, .dtype = dtype, .op = op, .count = count};
  return communicator->collective("HcclAllReduce", stream, signature, {{send, nbytes}}, {{receive, nbytes}}, take);
}

HCCL_EXPORT HcclResult HcclReduce(void* send, void* receive, uint64_t count, HcclDataType dtype, HcclReduceOp op,
                                  uint32_t root, HcclComm handle, aclrtStream stream) {
  const auto communicator = Communicators::all().find(handle);
  if (const HcclResult code = refusal("HcclReduce", communicator, dtype, true); code != HCCL_SUCCESS) return code;
  const size_t nbytes = count * size_of(dtype);
  const bool mine = communicator->rank() == root;
  const auto take = [=](Trays trays) {
    if (mine) reduce_trays(trays, 0, receive, count, dtype, op);
  };
  const Signature signature{.kind = Kind::reduce, .dtype = dtype, .op = op, .root = root, .count = count};
  return communicator->collective("HcclReduce", stream, signature, {{send, nbytes}}, {{receive, mine ? nbytes : 0}},
                                  take);
}

HCCL_EXPORT HcclResult HcclBroadcast(void* buffer, uint64_t count, HcclDataType dtype, uint32_t root, HcclComm handle,
                                     aclrtStream stream) {
  const auto communicator = Communicators::all().find(handle);
  if (const HcclResult code = refusal("HcclBroadcast", communicator, dtype); code != HCCL_SUCCESS) return code;
  const size_t nbytes = count * size_of(dtype);
  const bool mine = communicator->rank() == root;
  const auto take = [=](Trays trays) {
    if (!mine) std::memcpy(buffer, trays.of(root), nbytes);
  };
  const Signature signature{.kind = Kind::broadcast, .dtype = dtype, .root = root, .count = count};
  return communicator->collective("HcclBroadcast", stream, signature, {{buffer, mine ? nbytes : 0}},
                                  {{buffer, mine ? 0 : nbytes}}, take);
}

HCCL_EXPORT HcclResult HcclScatter(void* send, void* receive, uint64_t count, HcclDataType dtype, uint32_t root,
                                   HcclComm handle, aclrtStream stream) {
  const auto communicator = Communicators::all().find(handle);
  if (const HcclResult code = refusal("HcclScatter", communicator, dtype); code != HCCL_SUCCESS) return code;
  const size_t nbytes = count * size_of(dtype);
  const uint32_t me = communicator->rank();
  const auto take = [=](Trays trays) { std::memcpy(receive, trays.of(root) + me * nbytes, nbytes); };
  const Signature signature{.kind = Kind::scatter, .dtype = dtype, .root = root, .count = count};
  const size_t given = me == root ? nbytes * communicator->ranks() : 0;
  return communicator->collective("HcclScatter", stream, signature, {{send, given}}, {{receive, nbytes}}, take);
}

HCCL_EXPORT HcclResult HcclAllGather(void* send, void* receive, uint64_t count, HcclDataType dtype, HcclComm handle,
                                     aclrtStream stream) {
  const auto communicator = Communicators::all().find(handle);
  if (const HcclResult code = refusal("HcclAllGather", communicator, dtype); code != HCCL_SUCCESS) return code;
  const size_t nbytes = count * size_of(dtype);
  const auto take = [=](Trays trays) {
    for (size_t rank = 0; rank < trays.parties(); ++rank) {
      std::memcpy(bytes(receive) + rank * nbytes, trays.of(rank), nbytes);
    }
  };
  const Signature signature{.kind = Kind::all_gather, .dtype = dtype, .count = count};
  return communicator->collective("HcclAllGather", stream, signature, {{send, nbytes}},
                                  {{receive, nbytes * communicator->ranks()}}, take);
}

HCCL_EXPORT HcclResult HcclReduceScatter(void* send, void* receive, uint64_t count, HcclDataType dtype,
                                         HcclReduceOp op, HcclComm handle, aclrtStream stream) {
  const auto communicator = Communicators::all().find(handle);
  if (const auto code = refusal("HcclReduceScatter", communicator, dtype, true); code != HCCL_SUCCESS) return code;
  const size_t nbytes = count * size_of(dtype);
  const size_t mine = communicator->rank() * nbytes;
  const auto take = [=](Trays trays) { reduce_trays(trays, mine, receive, count, dtype, op); };
  const Signature signature{.kind = Kind::reduce_scatter, .dtype = dtype, .op = op, .count = count};
  return communicator->collective("HcclReduceScatter", stream, signature, {{send, nbytes * communicator->ranks()}},
                                  {{receive, nbytes}}, take);
}

HCCL_EXPORT HcclResult HcclAlltoAll(const void* send, uint64_t send_count, HcclDataType dtype, const void* receive,
                                    uint64_t receive_count, HcclDataType, HcclComm handle, aclrtStream stream) {
  const auto communicator = Communicators::all().find(handle);
  if (const HcclResult code = refusal("HcclAlltoAll", communicator, dtype); code != HCCL_SUCCESS) return code;
  const uint32_t ranks = communicator->ranks();
  return all_to_all("HcclAlltoAll", *communicator, {.kind = Kind::all_to_all, .dtype = dtype, .count = send_count},
                    send, even_parts(send_count, ranks), receive, even_parts(receive_count, ranks), stream);
}

HCCL_EXPORT HcclResult HcclAlltoAllV(const void* send, const void* send_counts, const void* send_starts,
                                     HcclDataType dtype, const void* receive, const void* receive_counts,
                                     const void* receive_starts, HcclDataType, HcclComm handle, aclrtStream stream) {
  const auto communicator = Communicators::all().find(handle);
  if (const HcclResult code = refusal("HcclAlltoAllV", communicator, dtype); code != HCCL_SUCCESS) return code;
  const uint32_t ranks = communicator->ranks();
  return all_to_all("HcclAlltoAllV", *communicator, {.kind = Kind::all_to_all, .dtype = dtype}, send,
                    uneven_parts(send_counts, send_starts, ranks), receive,
                    uneven_parts(receive_counts, receive_starts, ranks), stream);
}

HCCL_EXPORT HcclResult HcclBarrier(HcclComm handle, aclrtStream stream) {
  const auto communicator = Communicators::all().find(handle);
  if (!communicator) return unknown("HcclBarrier");
  return communicator->collective("HcclBarrier", stream, {.kind = Kind::barrier}, {}, {}, {});
}
