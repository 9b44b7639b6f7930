// What a rank says of one operation: which one it is, of how much. All ranks must say the same, up to `given`.
#pragma once

#include <hccl/hccl_types.h>

#include <cstdint>
#include <string>

namespace emulator::hccl {

constexpr uint32_t kMostRanks = 8;

enum class Kind : uint32_t {
  none,
  all_reduce,
  reduce,
  broadcast,
  scatter,
  all_gather,
  reduce_scatter,
  all_to_all,
  barrier,
  transfer,  // from one rank to one other
};

struct Signature {
  Kind kind = Kind::none;
  HcclDataType dtype = HCCL_DATA_TYPE_UINT8;
  HcclReduceOp op = HCCL_REDUCE_SUM;
  uint32_t root = 0;
  uint64_t count = 0;                // of elements, as the function's caller has it
  uint64_t given = 0;                // bytes in this rank's tray
  uint64_t counts[kMostRanks] = {};  // of an all-to-all: how many elements for whom. Each rank has its own
};

size_t size_of(HcclDataType dtype);  // in bytes; 0 for what is no type

bool agree(const Signature& one, const Signature& other);

// "HcclAllReduce of 1024 fp32", and with ", sum" or ", root 0" behind it.
std::string in_words(Kind kind, uint64_t count, HcclDataType dtype);
std::string in_words(const Signature& signature);

// What the slowest rank sends or receives over its links, of an operation with that many bytes at each rank's input
// or, of a gathering, at its output. Those of a ring: the factors of nccl-tests' PERFORMANCE.md.
double bytes_on_the_way(Kind kind, double nbytes, uint32_t ranks);

}  // namespace emulator::hccl
