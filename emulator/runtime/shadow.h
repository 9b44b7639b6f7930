// Who touched which bytes last: for each stretch of memory the newest write, the reads since, and whether torch's
// allocator has taken it back since all of these.
#pragma once

#include "model.h"
#include "operation.h"
#include "vector_clock.h"

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace emulator {

enum class Touch { read, write, free };

// One operation's, or the host's, use of one stretch of memory.
struct Access {
  std::string operation;
  int stream;  // 0 for the host
  Touch touch;
  uintptr_t begin;
  size_t nbytes;
  int site;
  Moment moment;
  Nanoseconds time;  // the host's, in modelled time; -1 where time is not modelled
};

using AccessPointer = std::shared_ptr<const Access>;

class Shadow {
 public:
  // freed: how the memory was taken back between the two accesses, or nullptr.
  using Conflict = std::function<void(const Access& earlier, const AccessPointer& freed)>;

  // Notes an access by somebody who knows `known`, and tells of each earlier one that it does not know of, if one
  // of the two changes the bytes. Gives the stretches of which this is the first use since they were taken back.
  std::vector<Range> note(const AccessPointer& access, const VectorClock& known, const Conflict& conflict);

  // torch's allocator takes memory back. That is no use of it: the next one is compared with those before.
  void take_back(const AccessPointer& freed);

  // The memory is given back: whatever comes at these addresses has nothing to do with what was.
  void forget(uintptr_t begin, size_t nbytes);

 private:
  struct Cell {
    uintptr_t end;
    AccessPointer write;  // nullptr if there was none
    std::vector<AccessPointer> reads;
    AccessPointer freed;  // nullptr if the memory was used since
  };
  using Cells = std::map<uintptr_t, Cell>;

  void split(uintptr_t at);
  void read(const AccessPointer& access, const VectorClock& known, const Conflict& conflict);
  void write(const AccessPointer& access, const VectorClock& known, const Conflict& conflict);

  Cells cells_;  // by first byte; they do not overlap
};

}  // namespace emulator
