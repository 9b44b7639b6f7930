// A point in a stream's work that is reached once: one record of an event, or the end of an operation.
#pragma once

#include "model.h"
#include "vector_clock.h"

#include <acl/acl.h>

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

namespace emulator {

class Graph;
class Stream;

// The first thing that went wrong on a stream, or on one for which it has waited; told by every later synchronisation.
struct StreamError {
  aclError code = ACL_SUCCESS;
  std::string message;
};

class StreamPoint {
 public:
  using Time = std::chrono::steady_clock::time_point;

  // Says where it stands: behind operation number `position` of the stream. Called once, as its record is queued.
  void place(std::weak_ptr<Stream> stream, uint64_t position, VectorClock known);

  // It stands in a graph, which is captured still, and is never reached: replays have points of their own.
  void belong_to(std::weak_ptr<Graph> graph) { graph_ = std::move(graph); }
  std::shared_ptr<Graph> graph() const { return graph_.lock(); }

  void reach(StreamError error);
  void ask();      // makes the schedule run what comes before it
  void wait();     // the same, and blocks until it is reached
  bool reached();  // for streams: whether it has come to pass
  bool asked();    // for the host: the same, and the schedule hears that somebody polls
  Time when();
  StreamError error();  // of its stream, up to there

  // When it is reached in modelled time, nothing as long as that is not known. Both under Simulation's lock.
  void reach_at(Nanoseconds time) { modelled_ = time; }
  std::optional<Nanoseconds> modelled() const { return modelled_; }

  // What whoever has waited for it knows of.
  const VectorClock& known() const { return known_; }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool reached_ = false;
  Time when_;
  StreamError error_;
  std::optional<Nanoseconds> modelled_;
  std::weak_ptr<Stream> stream_;
  uint64_t position_ = 0;
  VectorClock known_;
  std::weak_ptr<Graph> graph_;
};

}  // namespace emulator
