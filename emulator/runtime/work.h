// What an operation asks of the device and the link, for modelled time.
#pragma once

#include <acl/acl.h>

#include <cstddef>
#include <cstdint>

namespace emulator {

using Nanoseconds = int64_t;

// What does the work, and so which figures of the chip or the server say how long it takes. A ring: the links between
// devices. None: what takes no time.
enum class Unit { vector, softmax, matmul, attention, convolution, h2d, d2h, ring, drive_read, drive_write, none };

inline bool is_link(Unit unit) { return unit == Unit::h2d || unit == Unit::d2h; }

struct Work {
  Unit unit = Unit::vector;
  double flops = 0;              // of the matrix unit; 0 for what is bound by memory alone
  aclDataType dtype = ACL_FLOAT;  // of the factors
  double least = 0;              // the least of a matrix product's three dimensions; of attention, the size of a head
  double nbytes = 0;             // to and from memory, over the link, or of a file
  bool pageable = false;         // a copy of host memory that is not pinned
  uint32_t ranks = 0;            // of a ring: how many devices are in it
};

}  // namespace emulator
