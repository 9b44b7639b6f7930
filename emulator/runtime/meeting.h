// An operation of several ranks in modelled time: it ends for all of them at once, when the last one has arrived and
// the bytes have gone round.
#pragma once

#include <cstdint>
#include <optional>

namespace emulator {

using Nanoseconds = int64_t;

class Meeting {
 public:
  virtual ~Meeting() = default;

  // This rank's stream arrives at that time, and the operation takes that long once all are there. Told once.
  virtual void arrives(Nanoseconds time, Nanoseconds lasts) = 0;

  // When it ends, if all ranks have told their arrival; a time long past if there was a failure. Must not block.
  virtual std::optional<Nanoseconds> ends() = 0;

  // Blocks until that is known.
  virtual void wait_for_end() = 0;
};

}  // namespace emulator
