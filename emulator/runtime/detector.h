// The race detector: finds two uses of the same bytes, one of which changes them, that nothing orders.
//
// What orders them is decided where the program issues them, by vector clocks: one entry for each stream and one for
// the host. So what is found does not depend on what happened to run first. All host threads count as one: the order
// of their calls is taken as an order that the program made sure of.
#pragma once

#include "operation.h"
#include "shadow.h"

#include <atomic>
#include <map>
#include <mutex>
#include <tuple>

namespace emulator {

class Detector {
 public:
  static bool on();
  static Detector& get();

  // Streams. A slot that was left is given to the next stream, which goes on counting where the last one stopped.
  size_t enter();
  void leave(size_t slot);
  // Gives the memory of which this is the first use since torch's allocator took it back.
  std::vector<Range> submitted(size_t slot, int stream, const Operation& operation, int site);
  VectorClock known_to(size_t slot);

  // The host.
  void host_waited(const VectorClock& known);
  void host_uses(const std::string& function, Range range, Touch touch, int site);

  // Nobody is asked where the program frees memory: see site().
  // Memory that torch's allocator takes back, to hand it out again for that stream.
  void taken_back(int stream, Range range);
  // Memory that is given back to the system: that must come after all its uses.
  void given_back(const std::string& function, Range range);

  // A number for where the program is, or 0. It runs Python, which may wait for another thread, and may collect
  // garbage and so free tensors. Never call it under a lock, nor where torch's allocator may be at work.
  int site();
  void ask_for_site(int (*ask)()) { ask_ = ask; }

  std::string json();
  void clear();

 private:
  struct Race {
    Access first;
    Access second;
    AccessPointer freed;  // between the two, or nullptr
    uint64_t count;
  };
  using Party = std::tuple<std::string, int, Touch, int>;

  Detector();
  std::vector<Range> note(const Access& access, const VectorClock& known);
  void found(const Access& first, const Access& second, const AccessPointer& freed);

  std::mutex mutex_;
  std::vector<VectorClock> clocks_;  // by slot; the first is the host's
  std::vector<size_t> left_;
  Shadow shadow_;
  std::vector<Race> races_;
  std::map<std::pair<Party, Party>, size_t> known_races_;
  std::atomic<int (*)()> ask_{nullptr};
};

}  // namespace emulator
