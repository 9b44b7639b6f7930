// A graph: what was put on some streams while they were captured, in that order. It did not run then; each replay puts
// all of it on a stream anew.
#pragma once

#include "operation.h"
#include "vector_clock.h"

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace emulator {

class Stream;

class Graph : public std::enable_shared_from_this<Graph> {
 public:
  // origin: the stream on which the capture begins.
  Graph(int device, const Stream& origin);
  ~Graph();  // a replay that is on its way goes on
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  int device() const { return device_; }
  uint32_t number() const { return number_; }

  // While it is captured.
  bool is_captured_to();
  bool is_of_origin(const Stream& stream) const;
  aclError add(const Stream& stream, Operation operation);
  void invalidate();  // the capture goes on, and ends with an error
  bool is_valid();
  aclError end();  // and checks that all streams have come back to the origin

  // Whether some graph writes there.
  static bool one_writes_to(Range block);

  // On the stream, and where several were captured, beside it.
  aclError replay(const std::shared_ptr<Stream>& stream);

 private:
  struct Captured {
    size_t branch;
    Operation operation;
  };

  size_t branch_of(const Stream& stream);
  void note_writes(const Operation& operation);

  const int device_;
  const uint32_t number_;
  std::mutex mutex_;
  bool capturing_ = true;
  bool valid_ = true;
  std::map<int, size_t> branches_;  // by the number of the captured stream; the origin's is 0
  // What each branch, and whoever waits for a point, knows to lie behind it.
  std::vector<VectorClock> known_;
  std::map<const StreamPoint*, VectorClock> known_at_;
  std::vector<Moment> newest_;  // by branch
  std::vector<Captured> operations_;
  std::map<uintptr_t, uintptr_t> written_;  // from, to; they do not touch each other
  std::mutex replaying_;
  std::vector<std::shared_ptr<Stream>> beside_;  // what the branches but the first run on
};

}  // namespace emulator
