// The captures that are under way, and what the host must not do meanwhile.
//
// A call that would wait for a captured stream, or look at an event that was recorded in a capture, is refused wherever
// it is made. Besides, a capture's mode forbids copies and fills that the host waits for: they could not be repeated.
#pragma once

#include "graph.h"

#include <memory>

namespace emulator {

class Captures {
 public:
  static Captures& get();

  aclError begin(const std::shared_ptr<Stream>& stream, aclmdlRICaptureMode mode, std::shared_ptr<Graph>& graph);
  // Takes the stream, and all that have joined it, out of the capture, whatever is returned.
  aclError end(const std::shared_ptr<Stream>& stream, std::shared_ptr<Graph>& graph);

  // ACL_SUCCESS, or what a copy or fill is to return that the host would wait for.
  aclError refuse_waiting(const char* function);

  // A stream waits for an event that was recorded in this capture, and so is captured from now on.
  aclError join(const std::shared_ptr<Stream>& stream, const std::shared_ptr<Graph>& graph);

 private:
  struct Capture {
    std::shared_ptr<Graph> graph;
    aclmdlRICaptureMode mode;
    int thread;
  };

  std::mutex mutex_;
  std::vector<Capture> under_way_;
};

// Whether the stream is captured.
bool is_captured(aclrtStream stream);

// A call that a captured stream or event does not take.
aclError refuse_captured(aclError code, const char* function, const char* what);

}  // namespace emulator
