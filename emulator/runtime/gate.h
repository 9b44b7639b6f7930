// What an operation waits for outside of this process: that the other ranks of a collective have come as far.
#pragma once

namespace emulator {

class Gate {
 public:
  virtual ~Gate() = default;

  // Whether the operation may run. Must not block.
  virtual bool open() = 0;

  // Somebody here waits for the operation: asks the other processes for what opens the gate. Asked again and again; a
  // gate that stays shut for too long opens in the end, and the operation fails. Must not block.
  virtual void demand() = 0;

  // Demands, and blocks until the gate is open.
  virtual void wait() = 0;

  // The operation will never run, since the device is lost.
  virtual void abandon() = 0;
};

}  // namespace emulator
