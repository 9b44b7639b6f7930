// One direction of the link between host and device: copies share its bandwidth, first come, first served.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <mutex>

namespace emulator {

class Link {
 public:
  explicit Link(const std::atomic<double>& bytes_per_s) : bytes_per_s_(bytes_per_s) {}

  // Moves the bytes in at least nbytes / bandwidth, asleep until each chunk is due.
  void move(void* destination, const void* source, size_t nbytes);

 private:
  using Clock = std::chrono::steady_clock;

  const std::atomic<double>& bytes_per_s_;  // 0 means no limit
  std::mutex mutex_;
  Clock::time_point free_at_;
};

}  // namespace emulator
