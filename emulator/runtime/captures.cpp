#include "captures.h"

#include "device.h"
#include "stream.h"

#include <unistd.h>

#include <algorithm>

namespace emulator {
namespace {

// What aclmdlRICaptureThreadExchangeMode has set for this thread.
thread_local aclmdlRICaptureMode mode_of_thread = ACL_MODEL_RI_CAPTURE_MODE_GLOBAL;

}  // namespace

Captures& Captures::get() {
  static auto* captures = new Captures;  // never destroyed: see Streams
  return *captures;
}

aclError Captures::begin(const std::shared_ptr<Stream>& stream, aclmdlRICaptureMode mode,
                         std::shared_ptr<Graph>& graph) {
  if (stream->capture()) return refuse_captured(ACL_ERROR_RT_STREAM_CAPTURED, "aclmdlRICaptureBegin", "the stream");
  graph = std::make_shared<Graph>(stream->device(), *stream);
  stream->enter(graph);
  std::lock_guard lock(mutex_);
  under_way_.push_back({graph, mode, gettid()});
  return ACL_SUCCESS;
}

aclError Captures::end(const std::shared_ptr<Stream>& stream, std::shared_ptr<Graph>& graph) {
  graph = stream->capture();
  if (!graph) return fail(ACL_ERROR_RT_STREAM_NOT_CAPTURED, "aclmdlRICaptureEnd: the stream is not being captured");
  if (!graph->is_of_origin(*stream)) {
    return fail(ACL_ERROR_RT_STREAM_CAPTURE_UNMATCHED, "aclmdlRICaptureEnd: the capture began on another stream");
  }
  std::lock_guard lock(mutex_);
  const auto found = std::find_if(under_way_.begin(), under_way_.end(), [&](auto& each) { return each.graph == graph; });
  const bool elsewhere = found->thread != gettid() && found->mode != ACL_MODEL_RI_CAPTURE_MODE_RELAXED;
  under_way_.erase(found);
  const aclError code = graph->end();
  if (elsewhere) {
    return fail(ACL_ERROR_RT_STREAM_CAPTURE_WRONG_THREAD, "aclmdlRICaptureEnd: the capture began on another thread");
  }
  return code;
}

aclError Captures::refuse_waiting(const char* function) {
  std::lock_guard lock(mutex_);
  if (mode_of_thread == ACL_MODEL_RI_CAPTURE_MODE_RELAXED) return ACL_SUCCESS;
  const bool forbidden = std::any_of(under_way_.begin(), under_way_.end(), [](const Capture& each) {
    if (each.graph->device() != current_device() || each.mode == ACL_MODEL_RI_CAPTURE_MODE_RELAXED) return false;
    if (each.thread == gettid()) return true;
    return each.mode == ACL_MODEL_RI_CAPTURE_MODE_GLOBAL && mode_of_thread == ACL_MODEL_RI_CAPTURE_MODE_GLOBAL;
  });
  if (!forbidden) return ACL_SUCCESS;
  return fail(ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT,
              std::string(function) + ": not while a stream is captured, unless the capture's mode is relaxed");
}

aclError Captures::join(const std::shared_ptr<Stream>& stream, const std::shared_ptr<Graph>& graph) {
  if (stream->device() != graph->device()) {
    return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtStreamWaitEvent: a graph of several devices is not emulated");
  }
  const auto other = stream->capture();
  if (!other) stream->enter(graph);
  if (!other || other == graph) return ACL_SUCCESS;
  graph->invalidate();
  other->invalidate();
  return fail(ACL_ERROR_STREAM_CAPTURE_CONFLICT,
              "aclrtStreamWaitEvent: the event was recorded in another capture than that of the stream");
}

bool is_captured(aclrtStream handle) {
  const auto stream = Streams::all().find(handle);
  return stream && stream->capture();
}

aclError refuse_captured(aclError code, const char* function, const char* what) {
  return fail(code, std::string(function) + ": " + what + " is being captured");
}

}  // namespace emulator

using namespace emulator;

// *mode: the thread's new mode, and then the one that it had.
ACL_EXPORT aclError aclmdlRICaptureThreadExchangeMode(aclmdlRICaptureMode* mode) {
  std::swap(mode_of_thread, *mode);
  return ACL_SUCCESS;
}
