// What the device is like. Read from ASCEND_EMULATOR_* variables at the start, which the Python package writes, and
// changed by it while the process runs.
#pragma once

#include <atomic>
#include <cstddef>

namespace emulator {

struct Settings {
  std::atomic<size_t> hbm_bytes;        // capacity of the device's memory
  std::atomic<double> h2d_bytes_per_s;  // 0 means as fast as memcpy goes
  std::atomic<double> d2h_bytes_per_s;
  const bool current_stack;  // false: a stack whose torch_npu does not recognise memory from ctypes as pinned
};

Settings& settings();

}  // namespace emulator
