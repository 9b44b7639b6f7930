// What the device is like. Read from ASCEND_EMULATOR_* variables at the start, which the Python package writes, and
// changed by it while the process runs.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

namespace emulator {

enum class Order { eager, late, random };

struct Settings {
  std::atomic<size_t> hbm_bytes;        // capacity of each device's memory
  std::atomic<size_t> host_bytes;       // most host memory that can be pinned; 0 means no limit
  std::atomic<double> h2d_bytes_per_s;  // 0 means as fast as memcpy goes
  std::atomic<double> d2h_bytes_per_s;
  const double host_memory_bytes_per_s;  // of the modelled server; 0 means what its file says
  // false: a stack whose torch_npu does not recognise memory from ctypes as pinned, without aclrtMemcpyBatchAsync
  const bool current_stack;
  const int devices;
  const Order schedule;
  const uint64_t seed;  // of the random schedule
  const bool races;     // whether the race detector watches
  const bool poison;    // whether new and freed memory is filled with a pattern
  const bool dry;       // whether operations only take their modelled time, and memory is only counted
  const std::string model;  // the figures of the modelled machine, see Model; empty: time is not modelled
};

Settings& settings();

}  // namespace emulator
