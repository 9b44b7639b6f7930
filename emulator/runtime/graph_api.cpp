// CANN's functions on graphs, which it calls runtime instances of models.
#include "captures.h"
#include "fault.h"
#include "stream.h"

using namespace emulator;

namespace {

// All graphs, from when their capture begins until they are destroyed.
class Graphs {
 public:
  static Graphs& all() {
    static auto* graphs = new Graphs;  // never destroyed: see Streams
    return *graphs;
  }

  void keep(const std::shared_ptr<Graph>& graph) {
    std::lock_guard lock(mutex_);
    graphs_[graph.get()] = graph;
  }

  // Empty for what is not a graph, or was destroyed.
  std::shared_ptr<Graph> find(aclmdlRI handle) {
    std::lock_guard lock(mutex_);
    const auto found = graphs_.find(handle);
    return found == graphs_.end() ? nullptr : found->second;
  }

  std::shared_ptr<Graph> take(aclmdlRI handle) {
    std::lock_guard lock(mutex_);
    const auto found = graphs_.extract(handle);
    return found.empty() ? nullptr : found.mapped();
  }

 private:
  std::mutex mutex_;
  std::map<aclmdlRI, std::shared_ptr<Graph>> graphs_;
};

aclError no_graph(const char* function) {
  return fail(ACL_ERROR_RT_PARAM_INVALID, std::string(function) + ": not a graph, one that is still captured, or one that was destroyed");
}

aclError no_stream(const char* function) {
  return fail(ACL_ERROR_RT_STREAM_CONTEXT, std::string(function) + ": not a stream, or one that was destroyed");
}

}  // namespace

ACL_EXPORT aclError aclmdlRICaptureBegin(aclrtStream handle, aclmdlRICaptureMode mode) {
  if (device_is_lost()) return lost();
  if (handle == nullptr) {
    return fail(ACL_ERROR_RT_PARAM_INVALID, "aclmdlRICaptureBegin: the default stream cannot be captured");
  }
  const auto stream = Streams::all().find(handle);
  if (!stream) return no_stream("aclmdlRICaptureBegin");
  std::shared_ptr<Graph> graph;
  const aclError code = Captures::get().begin(stream, mode, graph);
  if (code == ACL_SUCCESS) Graphs::all().keep(graph);
  return code;
}

ACL_EXPORT aclError aclmdlRICaptureGetInfo(aclrtStream handle, aclmdlRICaptureStatus* status, aclmdlRI* graph) {
  const auto stream = Streams::all().find(handle);
  if (!stream) return no_stream("aclmdlRICaptureGetInfo");
  const auto capture = stream->capture();
  if (status != nullptr) {
    *status = !capture               ? ACL_MODEL_RI_CAPTURE_STATUS_NONE
              : capture->is_valid() ? ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE
                                    : ACL_MODEL_RI_CAPTURE_STATUS_INVALIDATED;
  }
  if (graph != nullptr) *graph = capture.get();
  return ACL_SUCCESS;
}

ACL_EXPORT aclError aclmdlRICaptureEnd(aclrtStream handle, aclmdlRI* result) {
  *result = nullptr;
  const auto stream = Streams::all().find(handle);
  if (!stream) return no_stream("aclmdlRICaptureEnd");
  std::shared_ptr<Graph> graph;
  const aclError code = Captures::get().end(stream, graph);
  if (code == ACL_SUCCESS) *result = graph.get();
  if (code != ACL_SUCCESS && graph && !graph->is_captured_to()) Graphs::all().take(graph.get());
  return code;
}

ACL_EXPORT aclError aclmdlRIExecuteAsync(aclmdlRI handle, aclrtStream stream_handle) {
  const auto graph = Graphs::all().find(handle);
  const auto stream = Streams::all().find(stream_handle);
  if (!graph || graph->is_captured_to()) return no_graph("aclmdlRIExecuteAsync");
  if (!stream) return no_stream("aclmdlRIExecuteAsync");
  if (stream->capture()) return refuse_captured(ACL_ERROR_RT_STREAM_CAPTURED, "aclmdlRIExecuteAsync", "the stream");
  return graph->replay(stream);
}

ACL_EXPORT aclError aclmdlRIDestroy(aclmdlRI handle) {
  return Graphs::all().take(handle) ? ACL_SUCCESS : no_graph("aclmdlRIDestroy");
}

ACL_EXPORT aclError aclmdlRIGetId(aclmdlRI handle, uint32_t* id) {
  const auto graph = Graphs::all().find(handle);
  if (!graph) return no_graph("aclmdlRIGetId");
  *id = graph->number();
  return ACL_SUCCESS;
}
