// An operation that several ranks make together: a collective, or a send and its receive.
#pragma once

#include "work.h"

#include <optional>
#include <vector>

namespace emulator {

// How much of the time that lies behind it a device's link has moved bytes, 0 to 1, of late more than long ago.
struct LinkUse {
  int device = 0;
  double h2d = 0;
  double d2h = 0;
};

class JointOperation {
 public:
  virtual ~JointOperation() = default;

  // Really. Whether the other ranks have come as far, so that it may run here. Must not block.
  virtual bool ready() = 0;

  // Somebody here waits for the operation: asks the other processes for their part. Asked again and again; where they
  // take too long it gets ready in the end, and fails. Must not block.
  virtual void demand() = 0;

  // Demands, and blocks until it is ready.
  virtual void wait() = 0;

  // It will never run here, since the device is lost.
  virtual void abandon() = 0;

  // In modelled time: it ends for all ranks at once, when the last one has arrived and the bytes have gone round. This
  // rank's stream arrives at that time, and the operation takes that long once all are there. Told once, and with it
  // how this rank's link is used.
  virtual void arrives(Nanoseconds time, Nanoseconds lasts, const LinkUse& link) = 0;

  // When it ends, if all ranks have told their arrival; a time long past if there was a failure. Must not block.
  virtual std::optional<Nanoseconds> ends() = 0;

  // What all ranks have told of their links, once it is known when it ends.
  virtual std::vector<LinkUse> links() = 0;

  // Blocks until that is known.
  virtual void wait_for_end() = 0;
};

}  // namespace emulator
