// When a stream's operations run: as soon as they can, as late as they may, or in a random order.
//
// Events and synchronisation allow all of these, so a correct program has the same result in each.
#pragma once

#include <cstdint>
#include <memory>

namespace emulator {

class Stream;

class Schedule {
 public:
  // The one that the settings name, for the whole process.
  static Schedule& get();

  virtual ~Schedule() = default;

  // How many operations a new stream may run before anybody asks for them.
  virtual uint64_t initially_permitted() const { return 0; }

  // An operation has been put on some stream.
  virtual void submitted() = 0;

  // Somebody is about to wait for operation number `position` of the stream.
  virtual void need(Stream& stream, uint64_t position) = 0;

  // The host asks whether that operation is done, and does not wait.
  virtual void polled(Stream& stream, uint64_t position) = 0;
};

}  // namespace emulator
