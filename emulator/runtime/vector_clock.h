// Vector clocks: who knows of whose work.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace emulator {

// The n-th thing that one stream, or the host, did.
struct Moment {
  size_t slot;
  uint64_t tick;
};

class VectorClock {
 public:
  void join(const VectorClock& other) {
    if (ticks_.size() < other.ticks_.size()) ticks_.resize(other.ticks_.size());
    for (size_t i = 0; i < other.ticks_.size(); ++i) ticks_[i] = std::max(ticks_[i], other.ticks_[i]);
  }

  Moment advance(size_t slot) {
    if (ticks_.size() <= slot) ticks_.resize(slot + 1);
    return {slot, ++ticks_[slot]};
  }

  bool knows(Moment moment) const { return moment.slot < ticks_.size() && ticks_[moment.slot] >= moment.tick; }

 private:
  std::vector<uint64_t> ticks_;
};

}  // namespace emulator
