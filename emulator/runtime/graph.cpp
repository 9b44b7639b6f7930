#include "graph.h"

#include "detector.h"
#include "memory.h"
#include "simulation.h"
#include "stream.h"

#include <algorithm>
#include <atomic>
#include <set>
#include <utility>

namespace emulator {
namespace {

uint32_t next_number() {
  static std::atomic<uint32_t> last{0};
  return ++last;
}

// All that there are.
struct Graphs {
  static Graphs& get() {
    static auto* graphs = new Graphs;  // never destroyed: see Streams
    return *graphs;
  }

  std::mutex mutex;
  std::set<Graph*> alive;
};

}  // namespace

Graph::Graph(int device, const Stream& origin) : device_(device), number_(next_number()) {
  branch_of(origin);
  std::lock_guard lock(Graphs::get().mutex);
  Graphs::get().alive.insert(this);
}

Graph::~Graph() {
  {
    std::lock_guard lock(Graphs::get().mutex);
    Graphs::get().alive.erase(this);
  }
  for (const auto& stream : beside_) Streams::all().destroy(stream);
}

bool Graph::is_captured_to() {
  std::lock_guard lock(mutex_);
  return capturing_;
}

bool Graph::is_of_origin(const Stream& stream) const {
  const auto found = branches_.find(stream.id());
  return found != branches_.end() && found->second == 0;
}

size_t Graph::branch_of(const Stream& stream) {
  const auto [place, is_new] = branches_.try_emplace(stream.id(), known_.size());
  if (is_new) {
    known_.emplace_back();
    newest_.push_back({place->second, 0});
  }
  return place->second;
}

aclError Graph::add(const Stream& stream, Operation operation) {
  if (operation.joint) {
    return fail(ACL_ERROR_RT_PARAM_INVALID, operation.name + ": a collective in a graph is not emulated");
  }
  if (Simulation::on()) Simulation::get().capture(operation);
  std::lock_guard lock(mutex_);
  const size_t branch = branch_of(stream);
  VectorClock& known = known_[branch];
  if (operation.awaits) known.join(known_at_[operation.awaits.get()]);
  // A record behind the last work leaves nothing to join: torch_npu makes one there for pinned memory that is given up.
  if (!operation.reaches) newest_[branch] = known.advance(branch);
  if (operation.reaches) {
    known_at_[operation.reaches.get()] = known;
    operation.reaches->belong_to(weak_from_this());
  }
  note_writes(operation);
  operations_.push_back({branch, std::move(operation)});
  return ACL_SUCCESS;
}

void Graph::note_writes(const Operation& operation) {
  for (const Range& range : operation.writes) {
    uintptr_t begin = address(range.begin), end = begin + range.nbytes;
    for (auto next = written_.upper_bound(end); next != written_.begin();) {
      --next;
      if (next->second < begin) break;
      begin = std::min(begin, next->first);
      end = std::max(end, next->second);
      next = written_.erase(next);
    }
    written_[begin] = end;
  }
}

bool Graph::one_writes_to(Range block) {
  const uintptr_t begin = address(block.begin), end = begin + block.nbytes;
  std::lock_guard lock(Graphs::get().mutex);
  return std::any_of(Graphs::get().alive.begin(), Graphs::get().alive.end(), [=](Graph* graph) {
    std::lock_guard its_lock(graph->mutex_);
    const auto next = graph->written_.lower_bound(end);
    return next != graph->written_.begin() && std::prev(next)->second > begin;
  });
}

void Graph::invalidate() {
  std::lock_guard lock(mutex_);
  valid_ = false;
}

bool Graph::is_valid() {
  std::lock_guard lock(mutex_);
  return valid_;
}

aclError Graph::end() {
  std::lock_guard lock(mutex_);
  capturing_ = false;
  if (!valid_) {
    return fail(ACL_ERROR_RT_STREAM_CAPTURE_INVALIDATED, "aclmdlRICaptureEnd: an error has made the capture invalid");
  }
  const bool joined = std::all_of(newest_.begin(), newest_.end(), [this](const Moment& last) {
    return last.slot == 0 || known_[0].knows(last);
  });
  if (joined) return ACL_SUCCESS;
  return fail(ACL_ERROR_RT_STREAM_UNJOINED,
              "aclmdlRICaptureEnd: a captured stream was not joined to the stream on which the capture began; record an "
              "event behind its last operation, and let that stream wait for it");
}

aclError Graph::replay(const std::shared_ptr<Stream>& stream) {
  const int site = Detector::on() ? Detector::get().site() : 0;
  std::lock_guard lock(replaying_);
  while (beside_.size() + 1 < known_.size()) beside_.push_back(Streams::all().make(device_));
  std::map<const StreamPoint*, std::shared_ptr<StreamPoint>> points;
  if (Simulation::on()) Simulation::get().replay();
  for (const auto& [branch, captured] : operations_) {
    Operation operation = captured;
    if (operation.reaches) {
      operation.reaches = points[captured.reaches.get()] = std::make_shared<StreamPoint>();
    }
    if (operation.awaits) operation.awaits = points.at(captured.awaits.get());
    operation.own_call = false;
    const aclError code = issue(branch == 0 ? stream : beside_[branch - 1], std::move(operation), site);
    if (code != ACL_SUCCESS) return code;
  }
  return ACL_SUCCESS;
}

}  // namespace emulator
